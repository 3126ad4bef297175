"""How much of a model fits on the GPU, if llama.cpp was built for one, and how experts are kept out of it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace

import llama_cpp

from ...models.kept_numbers import kept_numbers
from ...models.model_shape import EXPERTS, expert_bytes
from ..wire import Load
from .library import LIBRARY
from .memory import (
    FIRST_CTX,
    N_BATCH,
    Footprint,
    GpuPlacement,
    kept_bytes,
    kept_of,
    model_bytes,
    one_gpu,
    placement,
    work_bytes,
)
from .metadata import Metadata
from .rounding import whole_header

# As in ggml-backend.h, `enum ggml_backend_dev_type`; the bindings lack these functions.
DEVICE_GPU, DEVICE_IGPU = 1, 2
HEAD_BYTES = 1 << 20  # read of a file: the numbers of a model's shape stand in the first kilobytes


class _Override(ctypes.Structure):
    """`llama_model_tensor_buft_override` of llama.h: the buffers of tensors whose names match a pattern."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def placed(load: Load) -> GpuPlacement:
    """Decide what goes on the GPU: as `load` says, or as much as fits; nothing without a GPU."""
    if load.n_gpu_layers == 0 or not llama_cpp.llama_supports_gpu_offload():
        return GpuPlacement(0)
    each = free_each()
    free = sum(each)
    shape = _shape(load, free)
    if shape is None or not free:
        return GpuPlacement(load.n_gpu_layers or 0, (load.n_cpu_moe or 0) if load.n_gpu_layers else 0)
    found = placement(*shape, free, load.n_gpu_layers, load.n_cpu_moe)
    return replace(found, main_gpu=one_gpu(*shape, each, found)) if load.one_gpu else found


def overrides(n_cpu_moe: int) -> ctypes.Array[_Override] | None:
    """Return llama.cpp's `tensor_buft_overrides` that keep experts of the first layers with the processor; -1 = all.

    It ends with an empty pattern, as llama.cpp wants it, and has to live until the model is loaded. None for no layer.
    """
    if not n_cpu_moe:
        return None
    LIBRARY.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    which = r"\d+" if n_cpu_moe < 0 else f"({'|'.join(map(str, range(n_cpu_moe)))})"
    pattern = rf"blk\.{which}{EXPERTS}"
    buffers = LIBRARY.ggml_backend_cpu_buffer_type()
    return (_Override * 2)(_Override(pattern.encode(), buffers), _Override(None, None))


def free_bytes() -> int:
    """Return the free memory of all GPUs that llama.cpp would use."""
    return sum(free_each())


def free_each() -> list[int]:
    """Return the free memory of each GPU that llama.cpp would use, by its number there: discrete ones, or else the own.

    Another model's process has taken its part of it already: so models on one machine are placed one after the other.
    """
    for wanted in (DEVICE_GPU, DEVICE_IGPU):
        if found := [_free(device) for device in _devices(wanted)]:
            return found
    return []


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


def _shape(load: Load, free: int) -> tuple[Footprint, int] | None:
    """Return a model's memory and that of its work, bytes, by the file's header; None if that cannot be read.

    As many states and windows are in it as `free` bytes are for.
    """
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
    if not model:
        return None  # loading it whole will say why
    try:
        header = Metadata(model)
        n_ctx = load.n_ctx or min(header.number("context_length"), load.n_cells or FIRST_CTX)
        whole, n_layers = whole_header(load.model_path), header.n_layers
        kv = kept_bytes(kept_of(kept_numbers(whole.keys), load.kv_type), n_ctx, load.n_cells, free)
        experts = expert_bytes(whole, n_layers) if header.number("expert_count") else ()
        footprint = Footprint(model_bytes(load.model_path), n_layers, kv, experts)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        return footprint, work_bytes(N_BATCH, n_vocab, header.n_embd)
    except (OSError, ValueError):  # a part is missing: loading it whole will say which
        return None
    finally:
        llama_cpp.llama_model_free(model)
