"""Run by `disco doctor`: check if llama.cpp works on this machine, with enough memory for a model, and on what GPU.

A process of its own: bindings built for another processor crash at the first instruction that it lacks. The
model itself is not opened: the job has its shape.
"""

from __future__ import annotations

import re

from ...system.confine import Access, confine, try_forbidden
from ...system.job import JobSocket
from ..llama import gpu
from ..llama import model as llama
from ..llama.library import FAULT
from ..llama.memory import (
    F16,
    FACTOR,
    FIRST_CTX,
    KV_BYTES,
    Q8_0,
    Footprint,
    Need,
    Placement,
    available_bytes,
    fitting,
    kv_type_for,
    open_cells,
    open_context,
    placement,
    too_large,
    weights_there,
    work_bytes,
)
from .checkup_messages import Bindings, CheckupJob, CheckupRequest, Confined, Examined, Fit


def bindings() -> Bindings:
    """Report llama.cpp's version, features and GPUs."""
    version, _, system = (build := llama.build()).partition(" ")
    backends = re.findall(r"(?:^|\| )(\w+) : ", system)
    return Bindings(version, re.findall(r"(\w+) = 1\b", system), gpu.free_bytes(), backends, FAULT, build)


def fit(asked: CheckupRequest, available: int, gpu_bytes: int) -> Fit:
    """Report whether a model fits, by the steps and functions of `engine.llama.model`."""
    work = work_bytes(llama.N_BATCH, asked.n_vocab, asked.n_embd)
    placed = _placement(asked, int(asked.kv_numbers * KV_BYTES[asked.kv_type]), work, gpu_bytes)
    found = {kv_type: _fit(asked, kv_type, placed, available, gpu_bytes) for kv_type in (F16, Q8_0)}
    if asked.kv_type != "auto" or asked.is_open:
        return found[F16 if asked.is_open and asked.kv_type == "auto" else asked.kv_type]
    return found[kv_type_for(lambda kv_type: found[kv_type].n_ctx == asked.n_ctx)]


def _fit(asked: CheckupRequest, kv_type: str, placed: Placement, available: int, gpu_bytes: int) -> Fit:
    per_token = int(asked.kv_numbers * KV_BYTES[kv_type])
    work = work_bytes(llama.N_BATCH, asked.n_vocab, asked.n_embd)
    layers = asked.n_layers if placed.n_gpu_layers < 0 else min(asked.n_layers, placed.n_gpu_layers)
    if not layers and (why := too_large(asked.n_bytes, available)):
        return Fit(available, problem=why)
    need, there = Need(per_token + 4 * llama.N_BATCH * asked.n_heads, work), weights_there(_footprint(asked), placed)
    wanted, cells = asked.n_ctx, asked.n_cells
    if asked.is_open:
        wanted = open_context(wanted, asked.n_cells, need, available if layers else available - asked.n_bytes)
        if layers:
            needed = Need(need.per_token * layers // asked.n_layers, work)
            wanted = open_context(wanted, asked.n_cells, needed, max(0, gpu_bytes - there))
            cells = cells or wanted
        cells = cells or open_cells(wanted)
    try:
        n_ctx, n_cells = fitting(wanted, cells, need, available)
    except MemoryError as e:
        return Fit(available, problem=str(e))
    kv = n_cells * need.per_token
    here = asked.n_bytes - there + kv - kv * layers // asked.n_layers
    in_all = asked.n_bytes + kv + work
    return Fit(available, here + work, n_ctx, n_cells, layers, "", in_all, placed.n_cpu_moe, kv_type)


def _footprint(asked: CheckupRequest, kv_bytes: int = 0) -> Footprint:
    return Footprint(asked.n_bytes, asked.n_layers, kv_bytes, asked.experts)


def _placement(asked: CheckupRequest, per_token: int, work: int, gpu_bytes: int) -> Placement:
    """Decide what would be on the GPU, as `gpu.placed` does."""
    if not gpu_bytes or asked.n_gpu_layers == 0:
        return Placement(0)
    n_ctx = min(asked.n_ctx, asked.n_cells or FIRST_CTX) if asked.is_open else asked.n_ctx
    kv = per_token * max(n_ctx, asked.n_cells or FACTOR * n_ctx)
    return placement(_footprint(asked, kv), work, gpu_bytes, asked.n_gpu_layers, asked.n_cpu_moe)


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, confinement = home.job(CheckupJob, lambda _: confine(Access(), gpu.free_bytes))
    confined = Confined(confinement.in_force, confinement.missing, try_forbidden())
    found, available = bindings(), available_bytes()
    fits = tuple(fit(one, available, found.gpu_bytes) for one in job.models)
    home.done(Examined(found, fits, confined=confined))


if __name__ == "__main__":
    main()
