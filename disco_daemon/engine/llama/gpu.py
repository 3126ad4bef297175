"""How much of a model fits on the GPU, if llama.cpp was built for one, and how experts are kept out of it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp

from ...models.files import whole_header
from ...models.model_shape import EXPERTS, expert_bytes
from ..wire import Load
from .library import LIBRARY
from .memory import FACTOR, FIRST_CTX, Footprint, Placement, model_bytes, placement, work_bytes
from .metadata import Metadata

# As in ggml-backend.h, `enum ggml_backend_dev_type`; the bindings lack these functions.
DEVICE_GPU, DEVICE_IGPU = 1, 2
N_ROWS = 512  # computed at once: llama.N_BATCH, which this cannot import


class _Override(ctypes.Structure):
    """`llama_model_tensor_buft_override` of llama.h: the buffers of tensors whose names match a pattern."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def placed(load: Load) -> Placement:
    """Decide what goes on the GPU: as `load` says, or as much as fits; nothing without a GPU."""
    if load.n_gpu_layers == 0 or not llama_cpp.llama_supports_gpu_offload():
        return Placement(0)
    shape, free = _shape(load), free_bytes()
    if shape is None or not free:
        return Placement(load.n_gpu_layers or 0, (load.n_cpu_moe or 0) if load.n_gpu_layers else 0)
    return placement(*shape, free, load.n_gpu_layers, load.n_cpu_moe)


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


def _shape(load: Load) -> tuple[Footprint, int] | None:
    """Return a model's memory and that of its work, bytes, by the file's header; None if that cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
    if not model:
        return None  # loading it whole will say why
    try:
        header = Metadata(model)
        n_ctx = load.n_ctx or min(header.number("context_length"), load.n_cells or FIRST_CTX)
        kv, n_layers = header.kv_bytes(load.kv_type) * max(n_ctx, load.n_cells or FACTOR * n_ctx), header.n_layers
        experts = expert_bytes(whole_header(Path(load.model_path)), n_layers) if header.number("expert_count") else ()
        footprint = Footprint(model_bytes(load.model_path), n_layers, kv, experts)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        return footprint, work_bytes(N_ROWS, n_vocab, header.n_embd)
    except (OSError, ValueError):  # a part is missing: loading it whole will say which
        return None
    finally:
        llama_cpp.llama_model_free(model)
