"""A model's shape by its file's header, also while only its vocabulary is loaded."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from .memory import KV_BLOCK, KV_BYTES


class Metadata:
    """The header of a model that is loaded; keys are those of its architecture."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._arch = self.text("general.architecture")

    def text(self, key: str) -> str:
        """Return an entry; empty if there is none, or if it is a list."""
        buffer = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    def number(self, key: str) -> int:
        """Return an entry of the architecture, such as block_count; 0 if there is none."""
        text = self.text(f"{self._arch}.{key}")
        return int(text) if text.isdigit() else 0

    @property
    def n_layers(self) -> int:
        """The number of layers, at least 1."""
        return self.number("block_count") or 1

    @property
    def n_embd(self) -> int:
        """The length of an embedding."""
        return self.number("embedding_length")

    @property
    def shares_keys(self) -> bool:
        """Whether keys and values are one compressed row in the KV cache (MLA), and so of one type."""
        return self.number("attention.key_length_mla") > 0 or self._arch == "deepseek4"

    @property
    def fits_q8_0(self) -> bool:
        """Whether heads have a length that can be kept as Q8_0."""
        return not any(length % KV_BLOCK for length in self._head_lengths)

    @property
    def _head_lengths(self) -> tuple[int, int]:
        """The lengths of a key and of a value of one head."""
        size = self.n_embd // (self.number("attention.head_count") or 1)
        return self.number("attention.key_length") or size, self.number("attention.value_length") or size

    def kv_bytes(self, kv_type: str) -> int:
        """Return the bytes of a token in the KV cache: a key and a value in every layer."""
        n_heads = self.number("attention.head_count") or 1
        # A list, one entry a layer, reads as nothing: then as many as there are heads, which is the most there can be.
        n_heads_kv = self.number("attention.head_count_kv") or n_heads
        return int(self.number("block_count") * n_heads_kv * sum(self._head_lengths) * KV_BYTES[kv_type])
