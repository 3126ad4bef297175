"""How much memory there is, and what fits into it: told before llama.cpp asks for it, and is killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
CACHE_SHARE = 0.25  # of the free memory, for more than one answer's KV cache
FACTOR = 2  # answers of full length in the KV cache, if there is memory
LEAST_CTX = 512  # tokens; an answer with less is of no use
SPARE = 0.9  # of the free memory; something else may want some
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """What a context takes: `per_token` of the KV cache and `work` in all, bytes."""

    per_token: int
    work: int


def available_bytes() -> int:
    """Memory that can be had without swapping: the machine's, or the control group's if that is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def too_large(model_bytes: int, available: int) -> str | None:
    """Why the model cannot be loaded; None if it can."""
    if model_bytes <= available:
        return None
    return (
        f"the model needs {model_bytes / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are free: "
        "close other programs, or choose a smaller model or quantisation (device.model)"
    )


def fitting(n_ctx: int, n_cells: int, need: Need, available: int) -> tuple[int, int]:
    """Tokens of an answer, and of the KV cache. Wanted are `n_ctx` and `n_cells` (0: as many as are sensible).

    Raises MemoryError if not even LEAST_CTX tokens (or `n_ctx`, if that is less) fit.
    """
    room = int((SPARE * available - need.work) // need.per_token)
    least = min(n_ctx, LEAST_CTX)
    if room < least:
        msg = (
            f"a context of {least} tokens needs {(need.work + least * need.per_token) / GIB:.2f} GiB of memory, and "
            f"{available / GIB:.2f} GiB are free: close other programs, or choose a smaller model (device.model)"
        )
        raise MemoryError(msg)
    spacious = int(CACHE_SHARE * available // need.per_token)
    wanted = n_cells or max(n_ctx, min(FACTOR * n_ctx, spacious))
    fit = min(max(wanted, n_ctx), room)
    return min(n_ctx, fit), fit


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
