"""`disco tune`: measure which knobs are fastest on this machine, for the next start of the daemon."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import make_console, progress

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..engine.measure.tune_messages import Tuned, TuneRow

# llama.cpp's file types (`enum llama_ftype`) that gain nothing by 8 bits a weight: F32, F16, Q8_0, BF16.
LARGE = (0, 1, 7, 32)
LONGEST_S = 600.0  # that a tune may be asked to take
COPY_S = 3600.0  # to write a copy of a model: tens of gigabytes take minutes on a slow disk


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="measure which threads and batches are fastest here",
        description="Measure the device's model with other threads, micro-batches and attention, for half a minute, "
        "and keep the fastest for the next start of the daemon. Best while the machine has nothing else to do.",
    )
    parser.add_argument("--model", help="GGUF file (default from the configuration)")
    parser.add_argument("--budget", type=_seconds, metavar="S", help="stop after S seconds (default: 30)")
    parser.add_argument(
        "--requantize", action="store_true", help="make a copy of the model with 8 bits a weight, and measure that, too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= LONGEST_S:
        msg = f"must be 1 to {LONGEST_S:g}"
        raise argparse.ArgumentTypeError(msg)
    return value


def run(args: argparse.Namespace) -> int:
    """Measure, keep and show the fastest knobs."""
    import asyncio

    from msgspec import to_builtins

    from ..config.layers import load
    from ..errors import ConfigError
    from ..machines.device_settings import job_for, model_path, save
    from ..profiling.autotuner import BUDGET_S, run_tune

    config = load(flags={"device.model": args.model})
    if config.device.base_url or not config.device.enabled:
        raise ConfigError("there is no engine to tune: device.base_url is set, or device.enabled is false")
    path = model_path(config.device)
    job = job_for(config, path, budget_s=args.budget or BUDGET_S)
    tuned = asyncio.run(run_tune(job, progress))
    kept = save(config, path, tuned)
    copy = _copy(config, path, tuned, write=args.requantize)
    if args.json:
        document = to_builtins(tuned) | {
            "model": str(path),
            "profile": str(kept),
            "in_use": not config.device.n_threads,
        }
        print(json.dumps(document | {"copy": copy}))
        return 0
    _show(tuned, kept, config.device.n_threads)
    for line in _offer(copy, path, tuned):
        print(line)
    return 0


def copy_path(model: Path) -> Path:
    """Return the path of a copy with 8 bits a weight: beside the model, Q8_0 in place of its quantization."""
    stem = re.sub(r"[._-](?:i?q\d\w*|f16|bf16|f32)$", "", model.stem, flags=re.IGNORECASE)
    return model.with_name(f"{stem}.Q8_0.gguf")


def _copy(config: Config, path: Path, tuned: Tuned, *, write: bool) -> dict[str, Any] | None:
    """Measure the copy, if it exists or is wanted, and return its figures; None if it would be of no use."""
    import asyncio

    from msgspec import to_builtins
    from msgspec.structs import replace

    from ..machines.device_settings import job_for
    from ..profiling.autotuner import run_tune

    copy = copy_path(path)
    if tuned.file_type in LARGE or copy == path:
        return None
    if write and not copy.exists():
        _requantize(path, copy)
    if not copy.exists():
        return {"path": str(copy), "measured": False}
    job = replace(job_for(config, path), budget_s=0.0, start=tuned.knobs, compare=str(copy))
    both = asyncio.run(run_tune(job, progress))
    assert both.other is not None
    sizes = {"size_bytes": copy.stat().st_size, "model_bytes": path.stat().st_size}
    speeds = {"speed": to_builtins(both.other), "model_speed": to_builtins(both.speed)}
    return {"path": str(copy), "measured": True, "agreement": both.agreement, **sizes, **speeds}


def _requantize(path: Path, copy: Path) -> None:
    """Write the copy, in a process of its own. Raises OSError, TuneError."""
    import asyncio

    from ..engine.measure.tune_messages import Requantized, RequantizeJob
    from ..profiling.autotuner import TuneError
    from ..system.job import run_job

    progress(f"writing {copy}")
    unfinished = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    job = RequantizeJob(str(path), str(copy), str(unfinished))
    try:
        asyncio.run(
            run_job(
                "disco_daemon.engine.measure.requantize", job, progress, Requantized, TuneError, name="the copy",
                timeout_s=COPY_S,
            )
        )  # fmt: skip
    finally:
        unfinished.unlink(missing_ok=True)


def _show(tuned: Tuned, kept: Path, n_threads: int) -> None:
    from rich.table import Table

    from ..machines.device_settings import describe

    table = Table(box=None, pad_edge=False)
    for column in ("what", "tried", "ms", "samples"):
        table.add_column(column, justify="left" if column in ("what", "tried") else "right")
    for row in tuned.rows:
        table.add_row(*_cells(row))
    console = make_console(highlight=False)
    console.print(table)
    if not tuned.complete:
        console.print("the time was up before all was tried: a larger --budget tries the rest")
    console.print(f"fastest: {describe(tuned)}")
    console.print(f"kept in {kept} for the next start of the daemon", soft_wrap=True)
    if n_threads:
        console.print(f"but device.n_threads = {n_threads} is set, and a setting wins: unset it with 0")


def _cells(row: TuneRow) -> tuple[str, str, str, str]:
    """Return one line of the table."""
    knobs = row.knobs
    what, tried = {
        "decode": ("writing answers", f"{knobs.n_threads} threads"),
        "prefill": ("reading prompts", f"{knobs.n_threads_batch} threads"),
        "long": ("reading long prompts", f"{knobs.n_ubatch} tokens at a time"),
    }[row.work]
    flash = ", no flash attention" if knobs.flash_attn is False else ""
    layout = "" if knobs.repack else ", weights as in the file"
    busy = " beside a busy process" if row.busy else ""
    return f"{what}{busy}", tried + flash + layout, f"{1e3 * row.seconds:.1f}", str(row.n)


def _offer(copy: dict[str, Any] | None, path: Path, tuned: Tuned) -> list[str]:
    """Print the gain of a copy with 8 bits a weight, and how to use it: the user decides."""
    if copy is None:
        return []
    if not copy["measured"]:
        return [
            "`disco tune --requantize` tries a copy with 8 bits a weight: larger, often faster to read prompts with"
        ]
    prefill = copy["speed"]["prefill_tps"] / copy["model_speed"]["prefill_tps"]
    decode = copy["speed"]["decode_tps"] / copy["model_speed"]["decode_tps"]
    same = (
        "" if copy["agreement"] is None else f"; the next token is the same in {100 * copy['agreement']:.0f} % of cases"
    )
    sizes = f"{copy['model_bytes'] / 1e6:.0f} -> {copy['size_bytes'] / 1e6:.0f} MB"
    lines = [f"{copy['path']}: reads prompts {prefill:.2f} x as fast, writes {decode:.2f} x as fast; {sizes}{same}"]
    if prefill > 1:
        lines.append(f"to use it: `disco config set device.model {copy['path']}`")
        lines.append(f"and back:  `disco config set device.model {path}`")
    return lines
