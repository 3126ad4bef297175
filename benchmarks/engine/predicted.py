"""What `disco models recommend` predicts of models, beside what they take: `python -m benchmarks.engine.predicted`.

    python -m benchmarks.engine.predicted [--models 0.6b:q4_k_m,1.7b:q8_0,default,FILE.gguf] [--prompts N,N]
        [--threads N] [--speed FILE] [--json]

A model is a shape of `benchmarks.engine.shapes` with a packing, `default` for the embedded one, or a file. The machine
is measured before each, as disco does once (`engine.measure.machine_speed`), since others that use it may come and go;
then the model, in a process of its own:
reading prompts of 100, 512 and 2,000 tokens, writing behind 200, and what the process grows by when it is loaded with
CONTEXT cells and has read a prompt. Both are by processor time, divided by threads, the least of some rounds. `--speed`
takes a machine that was measured before. The form of the prediction was chosen on 0.6b:q4_k_m; all others judge it. The
exit code is 1 where one of those is off by more than is stated (`roofline.ERROR`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from disco_daemon.bench.command import print_figures, progress
from disco_daemon.config.layers import cache_path
from disco_daemon.config.schema import Config
from disco_daemon.engine import wire
from disco_daemon.engine.llama.ggml import Ggml
from disco_daemon.engine.llama.memory import N_BATCH, available_bytes
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.measure.machine_speed import MachineBench, least_s
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.machines.model_offers import memory_of, request_for
from disco_daemon.models.default import fetch_default_model
from disco_daemon.models.files import whole_header
from disco_daemon.models.listed import listed
from disco_daemon.models.offered import CONTEXT, OfferedModel
from disco_daemon.models.roofline import ERROR, MachineSpeed
from disco_daemon.system.processors import n_cores, shared_cache_bytes
from disco_daemon.system.program import SPINS

from ..command import run_script
from . import shapes

PROMPTS, CONTEXT_AT = "100,512,2000", 200
CHOSEN_ON = "0.6b:q4_k_m"
MODELS = "0.6b:q4_k_m,0.6b:q8_0,1.7b:q4_k_m,1.7b:q8_0,default"
PATIENCE_S = 1800.0
ROUND_S = 2.0  # of one measurement; the first round of all is not counted


def measured(path: Path, n_threads: int, prompts: Sequence[int]) -> dict[str, float]:
    """Load a model here, which must be a process that has loaded none; return its times, s, and its memory, bytes."""
    before = psutil.Process().memory_info().rss
    load = wire.Load(
        model_path=str(path), n_ctx=CONTEXT, n_threads=n_threads, n_gpu_layers=0, n_cells=CONTEXT, speculate=False
    )
    llama = Llama(load, AbortFlag(), warm=False)
    llama.n_threads = llama.n_threads_batch = n_threads

    def read(n: int) -> Callable[[], None]:
        def run() -> None:
            llama.clear()
            for start in range(0, n, N_BATCH):
                _decode(llama, [(100 + i % 1000, i, 0, i == n - 1) for i in range(start, min(n, start + N_BATCH))])

        return run

    found = {f"prompt_{n}": least_s(read(n), time.process_time, ROUND_S) / n_threads for n in prompts}
    found["memory"] = float(psutil.Process().memory_info().rss - before)
    read(CONTEXT_AT)()
    at = [CONTEXT_AT]

    def write() -> None:
        for _ in range(8):
            _decode(llama, [(100 + at[0], at[0], 0, True)])
            at[0] += 1

    found["decode"] = least_s(write, time.process_time, ROUND_S) / n_threads / 8
    return found


def _decode(llama: Llama, rows: list[tuple[int, int, int, bool]]) -> None:
    if llama.decode(rows) != 0:
        raise RuntimeError("llama.cpp does not compute")


def expected(model: OfferedModel, machine: MachineSpeed, prompts: Sequence[int]) -> dict[str, float]:
    """Return what is predicted of the same."""
    request = request_for(model, Config())
    memory = memory_of(request, fit(request, max(available_bytes(), 8 * model.n_bytes), 0)).n_bytes
    found = {f"prompt_{n}": model.work.prompt_s(machine, n) for n in prompts}
    return found | {"decode": model.work.decode_s(machine, CONTEXT_AT + 16), "memory": float(memory)}


def compare(name: str, machine: MachineSpeed, prompts: Sequence[int]) -> dict[str, Any]:
    """Return both for a model, and predicted over measured."""
    cache_path().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="model-", dir=cache_path()) as folder:
        path = _file(name, Path(folder))
        command = [sys.executable, "-m", "benchmarks.engine.predicted", "--here", str(path), str(machine.n_threads)]
        command += ["--prompts", ",".join(map(str, prompts))]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        told = expected(listed(path, whole_header(path)), machine, prompts)
    ratios = {what: round(told[what] / seen[what], 3) for what in seen}
    return {"model": name, "judged": name != CHOSEN_ON, "predicted": told, "measured": seen, "ratio": ratios}


def _file(name: str, folder: Path) -> Path:
    if name == "default":
        return fetch_default_model(progress)
    if name.endswith(".gguf"):
        return Path(name)
    shape, _, quant = name.partition(":")
    path = folder / f"random-{shape}-{quant.upper()}.gguf"
    return shapes.make(path, shapes.SHAPES[shape], quant, Ggml.installed(), fetch_default_model(progress))


def is_off(one: dict[str, Any]) -> bool:
    """Whether a prediction is off by more than is stated."""
    return any(abs(ratio - 1) > ERROR[what.partition("_")[0]] for what, ratio in one["ratio"].items())


def table(found: dict[str, Any]) -> str:
    """Return a line for each model."""
    lines = []
    for one in found["models"]:
        told, seen = one["predicted"], one["measured"]
        parts = [f"{one['model']:>14}"]
        parts += [
            f"{what} {_shown(what, told[what])} for {_shown(what, seen[what])} ({one['ratio'][what]:.2f})"
            for what in seen
        ]
        lines.append(", ".join(parts) + ("" if one["judged"] else "  [chosen on]"))
    return "\n".join(lines)


def _shown(what: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB" if what == "memory" else f"{1e3 * value:.4g} ms"


def main(argv: list[str] | None = None) -> int:
    """Compare and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.predicted", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--models", default=MODELS, help="with commas between (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, n_cores() - 1), help="default: one fewer than the cores")
    parser.add_argument("--prompts", default=PROMPTS, help="their tokens, with commas between (default: %(default)s)")
    parser.add_argument("--speed", type=Path, help="a machine's speed as JSON, in place of measuring it")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # as in the engine, before ggml is loaded
    prompts = [int(n) for n in args.prompts.split(",")]
    if args.here:
        print(json.dumps(measured(Path(args.here[0]), int(args.here[1]), prompts)))
        return 0
    models = []
    for name in args.models.split(","):
        progress(f"{name} …")
        if args.speed:
            machine = msgspec.json.decode(args.speed.read_bytes(), type=MachineSpeed)
        else:
            machine = MachineBench(args.threads, shared_cache_bytes()).speed()
        models.append(compare(name, machine, prompts) | {"machine": msgspec.to_builtins(machine)})
    found = {"models": models, "stated": ERROR}
    print_figures(found, table, as_json=args.json)
    return int(any(is_off(one) for one in models if one["judged"]))


if __name__ == "__main__":
    sys.exit(run_script(main))
