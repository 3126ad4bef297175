"""What memory a model would take, by its shape: the arithmetic of its loading, without llama.cpp."""

from __future__ import annotations

from dataclasses import replace

from ...models.kept_numbers import KeptNumbers
from ..llama.memory import (
    F16,
    FIRST_CTX,
    KV_BLOCK,
    N_BATCH,
    Q8_0,
    Footprint,
    GpuPlacement,
    KeptBytes,
    Need,
    TextNeed,
    context_sizes,
    fitting,
    kept_bytes,
    kept_of,
    kv_type_for,
    open_cells,
    open_context,
    placement,
    too_large,
    weights_there,
    work_bytes,
)
from .checkup_messages import CheckupRequest, Fit

OUTPUTS = 16  # rows of a batch with logits: the last of each answer, and what is guessed


def kv_type_of(kv_type: str, head_length: int) -> str:
    """Return `kv_type`, but f16 in place of auto for heads of a length that cannot be kept as Q8_0."""
    return F16 if kv_type == "auto" and head_length % KV_BLOCK else kv_type


def fit(asked: CheckupRequest, available: int, gpu_bytes: int) -> Fit:
    """Report whether a model fits, by the steps and functions of `engine.llama.model`."""
    work = work_bytes(N_BATCH, asked.n_vocab, asked.n_embd)
    if asked.pooling:
        return _fit_texts(asked, available, gpu_bytes)
    placed = _placement(asked, _kept(asked, asked.kv_type), work, gpu_bytes)
    found = {kv_type: _fit(asked, kv_type, placed, available, gpu_bytes) for kv_type in (F16, Q8_0)}
    if asked.kv_type != "auto" or asked.is_open:
        return found[F16 if asked.is_open and asked.kv_type == "auto" else asked.kv_type]
    return found[kv_type_for(lambda kv_type: found[kv_type].n_ctx == asked.n_ctx)]


def in_use(asked: CheckupRequest, found: Fit) -> int:
    """Return what a model takes while it answers, on a GPU too, bytes.

    Room for the logits of a whole batch has to be there, but answers touch those of a few rows.
    """
    return max(asked.n_bytes, found.in_all - work_bytes(N_BATCH - OUTPUTS, asked.n_vocab, 0))


def _fit_texts(asked: CheckupRequest, available: int, gpu_bytes: int) -> Fit:
    """Report it of a model that makes vectors of texts, by the steps of `engine.llama.text_model`."""
    kept = 0 if asked.reads_whole else _kept(asked, F16).cell
    need = TextNeed(asked.n_embd, asked.n_vocab, kept, asked.reads_whole, asked.n_heads)
    on_gpu = gpu_bytes > asked.n_bytes and asked.n_gpu_layers != 0
    free = available if on_gpu else available - asked.n_bytes
    try:
        n_ctx = need.n_ctx(asked.n_ctx, free)
    except MemoryError as e:
        return Fit(available, problem=str(e))
    n_bytes = need.n_bytes(n_ctx)
    here, layers = (n_bytes, asked.n_layers) if on_gpu else (n_bytes + asked.n_bytes, 0)
    return Fit(available, here, n_ctx, n_ctx, layers, "", n_bytes + asked.n_bytes)


def _kept(asked: CheckupRequest, kv_type: str) -> KeptBytes:
    return kept_of(KeptNumbers(asked.kv_numbers, asked.window, asked.window_numbers, asked.state_bytes), kv_type)


def _fit(asked: CheckupRequest, kv_type: str, placed: GpuPlacement, available: int, gpu_bytes: int) -> Fit:
    kept, work = _kept(asked, kv_type), work_bytes(N_BATCH, asked.n_vocab, asked.n_embd)
    layers = asked.n_layers if placed.n_gpu_layers < 0 else min(asked.n_layers, placed.n_gpu_layers)
    if not layers and (why := too_large(asked.n_bytes, available)):
        return Fit(available, problem=why)
    if asked.goes_back and not layers:
        kept = replace(kept, goes_back=True)
    scores, there = 4 * N_BATCH * asked.n_heads, weights_there(_footprint(asked), placed)

    def fit_cells(cell: int, fixed: int) -> tuple[int, int]:
        need, wanted, cells = Need(cell + scores, work + fixed), asked.n_ctx, asked.n_cells
        if asked.is_open:
            wanted = open_context(wanted, asked.n_cells, need, available if layers else available - asked.n_bytes)
            if layers:
                needed = Need(need.per_token * layers // asked.n_layers, need.work)
                wanted = open_context(wanted, asked.n_cells, needed, max(0, gpu_bytes - there))
                cells = cells or wanted
            cells = cells or open_cells(wanted)
        return fitting(wanted, cells, need, available)

    try:
        sizes = context_sizes(kept, fit_cells, min(available, max(0, gpu_bytes - there)) if layers else available)
    except MemoryError as e:
        return Fit(available, problem=str(e))
    kv = sizes.n_bytes + sizes.n_cells * scores
    here = asked.n_bytes - there + kv - kv * layers // asked.n_layers
    in_all = asked.n_bytes + kv + work
    cells = sizes.n_ctx, sizes.n_cells
    return Fit(available, here + work, *cells, layers, "", in_all, placed.n_cpu_moe, kv_type)


def _footprint(asked: CheckupRequest, kv_bytes: int = 0) -> Footprint:
    return Footprint(asked.n_bytes, asked.n_layers, kv_bytes, asked.experts)


def _placement(asked: CheckupRequest, kept: KeptBytes, work: int, gpu_bytes: int) -> GpuPlacement:
    """Decide what would be on the GPU, as `gpu.placed` does."""
    if not gpu_bytes or asked.n_gpu_layers == 0:
        return GpuPlacement(0)
    n_ctx = min(asked.n_ctx, asked.n_cells or FIRST_CTX) if asked.is_open else asked.n_ctx
    kv = kept_bytes(kept, n_ctx, asked.n_cells, gpu_bytes)
    return placement(_footprint(asked, kv), work, gpu_bytes, asked.n_gpu_layers, asked.n_cpu_moe)
