"""A model's shape by its file's header, also while only its vocabulary is loaded."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

# Bytes a number takes in the KV cache. Q8_0 keeps 32 numbers of a byte each with a scale of two bytes.
KV_BYTES = {"auto": 2.0, "q8_0": 34 / 32}


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

    def kv_bytes(self, kv_type: str) -> int:
        """Return the bytes of a token in the KV cache: a key and a value in every layer."""
        n_heads = self.number("attention.head_count") or 1
        # A list, one entry a layer, reads as nothing: then as many as there are heads, which is the most there can be.
        n_heads_kv = self.number("attention.head_count_kv") or n_heads
        size = self.n_embd // n_heads
        key, value = (self.number(f"attention.{part}_length") or size for part in ("key", "value"))
        return int(self.number("block_count") * n_heads_kv * (key + value) * KV_BYTES[kv_type])
