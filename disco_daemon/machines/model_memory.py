"""The memory of models on this machine, as a process of the engine predicts it without loading them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..config.schema import DeviceSettings
from ..engine.measure.checkup_messages import Bindings, CheckupRequest, Confined, Fit, decode_reply, encode
from ..models.gguf import read_gguf, shard_names
from ..models.model_shape import shape_of
from ..system.process import run as run_part
from ..system.smallfile import open_regular

CHILD_TIMEOUT_S = 30.0  # importing the bindings takes 0.3 s, from a cold disk some seconds
HEAD_BYTES = 1 << 20  # read of a GGUF file: its shape stands in the first kilobytes
MOST_NUMBERS = 1 << 32  # in the KV cache of one token; the largest models have 2 million


@dataclass(frozen=True, slots=True)
class Examined:
    """The child process's results; None where it did not get that far, and `problem` says why.

    `fits` are the models' in order, as far as it got; `fit` is the first.
    """

    bindings: Bindings | None = None
    fit: Fit | None = None
    problem: str = ""
    confined: Confined | None = None
    fits: tuple[Fit, ...] = ()


def checkup_request(settings: DeviceSettings, path: Path, n_gpu_layers: int | None) -> CheckupRequest:
    """Return the checkup's request for the model at `path`. Raises OSError, or ValueError for a poor header."""
    with open_regular(path) as f:
        header = read_gguf(f.read(HEAD_BYTES))
    shape = shape_of(header)
    trained = header.get(f"{header.get('general.architecture')}.context_length")
    n_ctx = settings.n_ctx or (trained if isinstance(trained, int) else 0)
    if n_ctx < 1:
        raise ValueError("its header does not tell its context_length")
    kv_numbers = shape.layers * shape.kv_heads * 2 * shape.head_dim
    if kv_numbers > MOST_NUMBERS:
        raise ValueError("its header tells of a shape that no model has")
    return CheckupRequest(
        n_bytes=sum(path.with_name(name).stat().st_size for name in shard_names(path.name)),
        n_layers=shape.layers,
        n_embd=shape.hidden,
        n_vocab=shape.vocab,
        n_heads=shape.heads if settings.flash_attn == "off" else 0,
        kv_numbers=kv_numbers,
        n_ctx=n_ctx,
        n_cells=settings.n_cells,
        kv_type=settings.kv_type,
        n_gpu_layers=n_gpu_layers,
        is_open=not settings.n_ctx,
    )


def run_checkup(*about: CheckupRequest) -> Examined:
    """Run `engine.measure.checkup` in a process of its own. Blocks for CHILD_TIMEOUT_S at most."""
    try:
        done = run_part("disco_daemon.engine.measure.checkup", line=encode(about) + b"\n", timeout_s=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Examined(problem=f"said nothing for {CHILD_TIMEOUT_S:g} s")
    except OSError as e:
        return Examined(problem=f"cannot be tried: {e.strerror}")
    confined = bindings = None
    fits: list[Fit] = []
    for line in done.stdout.splitlines():
        try:
            reply = decode_reply(line)
        except msgspec.MsgspecError:  # a library that prints
            continue
        match reply:
            case Confined():
                confined = reply
            case Bindings():
                bindings = reply
            case Fit():
                fits.append(reply)
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"]
    why = f"died of signal {-done.returncode}" if done.returncode < 0 else said[-1]
    return Examined(bindings, fits[0] if fits else None, why if done.returncode else "", confined, tuple(fits))
