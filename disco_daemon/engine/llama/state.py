"""The state of one text, as llama.cpp gives it out of the KV cache and takes it back."""

from __future__ import annotations

from typing import TypeAlias

State: TypeAlias = bytes | memoryview  # all that the KV cache had of a text
