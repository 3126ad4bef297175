"""The history on disk. `History` is its only interface; no other room sees SQL."""

from .history import History

__all__ = ["History"]
