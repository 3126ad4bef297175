"""The KV cache's content for one text, in the form that llama.cpp saves and restores."""

from __future__ import annotations

from typing import TypeAlias

State: TypeAlias = bytes | memoryview  # of one sequence
