"""History on disk. `History` is the only door; the rest of the software never sees SQL."""

from .db import History

__all__ = ["History"]
