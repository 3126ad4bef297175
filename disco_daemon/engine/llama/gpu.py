"""How much of a model fits on the GPU, if llama.cpp was built for one. A build for the CPU has none of this."""

from __future__ import annotations

import ctypes
import os

import llama_cpp

from ..wire import Load
from .library import LIBRARY
from .memory import FACTOR, FIRST_CTX, Footprint, gpu_layers, model_bytes, work_bytes
from .metadata import Metadata

# As in ggml-backend.h, `enum ggml_backend_dev_type`; the bindings lack these functions.
DEVICE_GPU, DEVICE_IGPU = 1, 2
N_ROWS = 512  # computed at once: llama.N_BATCH, which this cannot import


def layers(load: Load) -> int:
    """Decide how many layers go on the GPU: as `load` says (-1 = all), or as many as fit; 0 without a GPU."""
    if load.n_gpu_layers == 0 or not llama_cpp.llama_supports_gpu_offload():
        return 0
    if load.n_gpu_layers is not None:
        return load.n_gpu_layers
    free = free_bytes()
    return _fitting(load, free) if free else 0


def free_bytes() -> int:
    """Return the free memory of all GPUs that llama.cpp would use: discrete ones, or else the processor's own."""
    for wanted in (DEVICE_GPU, DEVICE_IGPU):
        found = [_free(device) for device in _devices(wanted)]
        if found:
            return sum(found)
    return 0


def _devices(wanted: int) -> list[ctypes.c_void_p]:
    LIBRARY.ggml_backend_dev_count.restype = ctypes.c_size_t
    LIBRARY.ggml_backend_dev_get.restype = ctypes.c_void_p
    LIBRARY.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    LIBRARY.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    every = (ctypes.c_void_p(LIBRARY.ggml_backend_dev_get(i)) for i in range(LIBRARY.ggml_backend_dev_count()))
    return [device for device in every if LIBRARY.ggml_backend_dev_type(device) == wanted]


def _free(device: ctypes.c_void_p) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    LIBRARY.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


def _fitting(load: Load, free: int) -> int:
    """Count the layers that fit the free memory, by the shape in the file's header."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
    if not model:
        return 0  # loading it whole will say why
    try:
        header = Metadata(model)
        n_ctx = load.n_ctx or min(header.number("context_length"), load.n_cells or FIRST_CTX)
        kv = header.kv_bytes(load.kv_type) * max(n_ctx, load.n_cells or FACTOR * n_ctx)
        footprint = Footprint(model_bytes(load.model_path), header.number("block_count"), kv)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        work = work_bytes(N_ROWS, n_vocab, header.n_embd)
    except OSError:  # a part is missing: loading it whole will say which
        return 0
    finally:
        llama_cpp.llama_model_free(model)
    return gpu_layers(footprint, work, free)
