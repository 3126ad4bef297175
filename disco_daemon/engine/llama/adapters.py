"""LoRA adapters by name: those of one model, and the one that is applied to its context.

llama.cpp applies an adapter to all rows of a llama_decode; `adapter_round_robin` chooses it. Cells computed under one
adapter are of no use to another, so the prefix index knows the first token of a text under each as a different one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

from ..wire import AdapterFile
from .memory import GIB, available_bytes

_ERROR = 4  # ggml_log_level


class AdapterError(RuntimeError):
    """An adapter cannot be loaded or is not there; the message is fit for a user."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter in memory; `number` counts from 1, 0 is the model without one."""

    handle: Any
    scale: float
    number: int


class Adapters:
    """The adapters of one model. Mutable state: which one is applied ("" for none), and to which context."""

    def __init__(self, model: Any, wanted: Sequence[AdapterFile], log: Any) -> None:
        """Load the adapters, before there is a context. `failures` has those that cannot be loaded, with the reason.

        `log` is llama.cpp's log callback at all other times.
        """
        self.refused: dict[str, str] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._ctx, self._applied = None, ""
        for number, adapter in enumerate(wanted, 1):
            try:
                self._loaded[adapter.name] = _Loaded(_load(model, adapter.path, log), adapter.scale, number)
            except AdapterError as e:
                self.refused[adapter.name] = str(e)

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def failures(self) -> dict[str, str]:
        """Each adapter that was wanted, with the reason why it is missing; empty if it is loaded."""
        return dict.fromkeys(self._loaded, "") | self.refused

    def salt(self, name: str, n_tokens: int) -> int:
        """Return what `prefix_key` adds to one of `n_tokens` tokens; 0 for no adapter. Raises AdapterError."""
        if not name:
            return 0
        if name not in self._loaded:
            there = ", ".join(self._loaded) or "none"
            reason = f" ({self.refused[name]})" if name in self.refused else ""
            raise AdapterError(f"The device has no adapter '{name}'{reason}. There are: {there}.")
        return self._loaded[name].number * n_tokens

    def apply(self, ctx: Any, name: str) -> None:
        """Apply this adapter, or none, to all that is decoded from now on; raises KeyError.

        The next llama_decode plans its graph anew if the adapter has changed, which takes some ms.
        """
        if ctx is self._ctx and name == self._applied:
            return
        one = [self._loaded[name]] if name else []
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * len(one))(*(adapter.handle for adapter in one))
        scales = (ctypes.c_float * len(one))(*(adapter.scale for adapter in one))
        if llama_cpp.llama_set_adapters_lora(ctx, handles, len(one), scales) != 0:
            raise RuntimeError(f"llama.cpp cannot apply the adapter {name!r}")
        self._ctx, self._applied = ctx, name


def prefix_key(tokens: list[int], salt: int) -> list[int]:
    """Return the key of tokens, from the first on, in the prefix index: no two adapters have a beginning in common."""
    return [tokens[0] + salt, *tokens[1:]] if salt and tokens else tokens


def _load(model: Any, path: str, log: Any) -> Any:
    """Load one file. Raises AdapterError."""
    try:
        n_bytes, free = os.stat(path).st_size, available_bytes()  # noqa: PTH116
    except OSError as e:
        raise AdapterError(f"{path}: {e.strerror}") from e
    if n_bytes > free:
        raise AdapterError(f"{path} needs {n_bytes / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free")
    said: list[str] = []
    listen = llama_cpp.llama_log_callback(
        lambda level, text, _: said.append(text.decode("utf-8", "replace")) if level == _ERROR else None
    )
    llama_cpp.llama_log_set(listen, ctypes.c_void_p(0))
    try:
        handle = llama_cpp.llama_adapter_lora_init(model, os.fsencode(path))
    finally:
        llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    if not handle:
        reason = "".join(said[-1:]).rpartition("lora adapter: ")[-1].strip()
        raise AdapterError(f"llama.cpp cannot use {path} with this model: {reason or 'no reason given'}")
    if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(handle):
        llama_cpp.llama_adapter_lora_free(handle)
        msg = f"{path} is an activated LoRA (aLoRA), which begins in the middle of a prompt: not supported"
        raise AdapterError(msg)
    return handle
