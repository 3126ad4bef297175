"""Parameters of a llama.cpp context by `wire.Load`, but for its sizes."""

from __future__ import annotations

from typing import Any

import llama_cpp

from ..wire import Load
from .library import usable_threads
from .memory import Q8_0
from .metadata import Metadata

GGML_TYPE_BF16 = 30  # as in ggml.h; the bindings lack it
# As in llama.h, `enum llama_flash_attn_type`; the bindings lack it.
FLASH_ATTN = {None: -1, False: 0, True: 1}


def context_params(load: Load, header: Metadata) -> Any:
    """Return parameters with threads, attention and the types of keys and values set, for the model of this header."""
    params = llama_cpp.llama_context_default_params()
    params.kv_unified = True  # separate buffers abort on partial sequence copies (GGML_ASSERT)
    params.flash_attn_type = FLASH_ATTN[load.flash_attn]
    params.n_threads = params.n_threads_batch = usable_threads(load.n_threads)
    # Without it a GPU build computes large batches on the GPU even if no layer is there, and rounds them differently.
    params.op_offload = load.n_gpu_layers != 0
    if load.kv_type == Q8_0:
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
    elif load.exact and not load.n_gpu_layers:
        # With K and V of one 16-bit type, flash attention on the CPU has three code paths, by rows, threads and place,
        # that round differently; with these two it has one: what is prefilled is bit for bit as if generated.
        params.type_k, params.type_v = GGML_TYPE_BF16, llama_cpp.GGML_TYPE_F16
        if header.shares_keys:  # llama.cpp refuses two types there; with BF16 alone it has one code path, too
            params.type_v = GGML_TYPE_BF16
    return params
