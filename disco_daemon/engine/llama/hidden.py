"""The hidden rows of a layer: what comes out of it for all positions of a batch, n x n_embd float32.

llama.cpp shows the input of a layer by two functions that are exported as C++ symbols only, for the architectures whose
graph names it. For all others the graph is watched while it is computed, which costs a call a node (0.8 ms a token).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._ctypes_extensions import load_shared_library
from llama_cpp._ggml import libggml_base_path
from numpy.typing import NDArray

FloatRows = NDArray[np.float32]

# The names of one function by compiler: C, Itanium's C++, Microsoft's. As `llama_cpp.llama_cpp_ext` finds its siblings.
_SET = (
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
)
_GET = (
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)
# Whose graph names the inputs of its layers (`t_layer_inp` in src/models/*.cpp); for another one llama.cpp aborts.
_SHOWN = frozenset({"llama", "qwen3", "qwen3moe", "gpt-oss", "minimax-m2", "mimo2"})


def _function(names: Sequence[str]) -> Any:
    """Return llama.cpp's function of one of these names; None if there is none."""
    for name in names:
        if (found := getattr(llama_cpp.llama_cpp._lib, name, None)) is not None:
            return found
    return None


_set, _get = _function(_SET), _function(_GET)
if _set is not None and _get is not None:
    _set.argtypes, _set.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
    _get.argtypes, _get.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)


class HiddenRows:
    """Reads the rows that layer `layer` of a context gets from the one before it."""

    def __init__(self, architecture: str, layer: int, n_embd: int) -> None:
        self._layer, self._n_embd = layer, n_embd
        self._watch = None if architecture in _SHOWN and _get is not None else GraphWatch(f"l_out-{layer - 1}")

    def prepare(self, params: Any) -> None:
        """Set what a context needs to be made with."""
        if self._watch is not None:
            params.cb_eval = self._watch.callback

    def begin(self, context: Any) -> None:
        """Let a new context show these rows."""
        if self._watch is None:
            _set(context, self._layer, True)

    def take(self, context: Any, n: int) -> FloatRows:
        """Return the rows of the last batch, of `n` positions, in order; 0 if it did not go through.

        Raises ValueError if they were not seen.
        """
        if n == 0:
            if self._watch is not None:
                self._watch.take()
            return np.empty((0, self._n_embd), np.float32)
        if self._watch is None:
            return np.ctypeslib.as_array(_get(context, self._layer), (n, self._n_embd)).copy()
        rows = b"".join(self._watch.take())
        if len(rows) != 4 * n * self._n_embd:
            raise ValueError(f"llama.cpp does not show the rows after layer {self._layer - 1} of this model")
        return np.frombuffer(rows, np.float32).reshape(n, self._n_embd)


_base = load_shared_library("ggml-base", libggml_base_path)
_base.ggml_get_name.argtypes, _base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
_base.ggml_nbytes.argtypes, _base.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
_base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_base.ggml_backend_tensor_get.restype = None


class GraphWatch:
    """Takes a tensor's numbers out of the graph while that is computed, a copy for each micro-batch."""

    def __init__(self, name: str) -> None:
        self._name, self._taken = name.encode(), list[bytes]()
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._look)

    def _look(self, tensor: int, asked: bool, _data: object) -> bool:
        """Say whether the tensor is wanted; when it has been computed, copy it."""
        if _base.ggml_get_name(tensor) != self._name:
            return not asked
        if not asked:
            buffer = ctypes.create_string_buffer(_base.ggml_nbytes(tensor))
            _base.ggml_backend_tensor_get(tensor, buffer, 0, len(buffer))
            self._taken.append(buffer.raw)
        return True

    def take(self) -> list[bytes]:
        """Return what was taken since the last call."""
        taken, self._taken = self._taken, []
        return taken
