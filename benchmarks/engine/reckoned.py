"""What a model is reckoned to take in memory, beside what the process takes that has loaded it and read a prompt.

`python -m benchmarks.engine.reckoned [--kinds hybrid,sliding-window] [--json]`: models of random weights, as deep as
those that people keep, each in a process of its own. `reckoned` is what `disco doctor` and `disco models show` say of
it, `taken` how much the process grew (its resident pages, the file's among them), bytes; `kv` is what is kept of texts
in that, and `kv_full` what it would be if all layers had all cells. Exit code 1 where one is off by more than OFF.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil

from disco_daemon.config.schema import DeviceSettings
from disco_daemon.engine import wire
from disco_daemon.engine.llama.memory import N_BATCH, available_bytes, kept_bytes, kept_of
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.machines.model_memory import checkup_request
from disco_daemon.models.files import whole_header
from disco_daemon.models.kept_numbers import GOING_BACK, kept_numbers
from tests.fixtures.tiny_models import MODELS, N_KV_HEADS, tiny_model

OFF = 0.1  # of what is taken
N_CTX, PATIENCE_S = 4096, 300.0
DEEP = {  # layers and cells: so much is kept that weights and work are little beside it, as with long contexts
    "hybrid": (48, 131_072),
    "moe": (48, 65_536),
    "sliding-window": (48, 262_144),
    "recurrent": (256, 4096),
}


def deep(folder: Path, kind: str) -> Path:
    """Write a model of this kind with many layers."""
    n_layers = DEEP[kind][0]
    model = replace(MODELS[kind], n_layers=n_layers)
    if "attention.head_count_kv" in model.others:
        heads = tuple(N_KV_HEADS * (layer % 2) for layer in range(n_layers))
        model = replace(model, others={**model.others, "attention.head_count_kv": heads})
    MODELS["deep"] = model
    return tiny_model(folder / f"{kind}.gguf", "deep")


def weigh(kind: str) -> dict[str, int | str]:
    """Load a model of this kind here, which must be a process that has loaded none; return its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, n_cells = deep(Path(folder), kind), DEEP[kind][1]
        settings = DeviceSettings(model=str(path), n_ctx=N_CTX, n_cells=n_cells)
        told = fit(checkup_request(settings, path, 0), available_bytes(), 0)
        load = wire.Load(model_path=str(path), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=n_cells)
        before = psutil.Process().memory_info().rss
        llama = Llama(load, AbortFlag(), warm=False)
        for start in (0, N_BATCH):
            if llama.decode([(100 + i, i, 0, i % 64 == 0) for i in range(start, start + N_BATCH)]) != 0:
                raise RuntimeError("llama.cpp does not compute the prompt")
        taken = psutil.Process().memory_info().rss - before
        if (llama.n_ctx, llama.n_cells) != (told.n_ctx, told.n_cells):
            raise RuntimeError(f"{(llama.n_ctx, llama.n_cells)} tokens, where {told} was foretold")
        header = whole_header(path)
        kept = replace(kept_of(kept_numbers(header.keys), "auto"), goes_back=header.architecture in GOING_BACK)
        kv = kept_bytes(kept, N_CTX, n_cells, available_bytes())
        full = kv if kept.state else n_cells * (kept.cell + kept.window_cell)
        return {"kind": kind, "reckoned": told.n_bytes, "taken": taken, "kv": kv, "kv_full": full}


def measure(kind: str) -> dict[str, int | str]:
    """Do that in a process of its own. Raises CalledProcessError with what it said."""
    command = [sys.executable, "-m", "benchmarks.engine.reckoned", "--here", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.reckoned", description=__doc__)
    parser.add_argument("--kinds", default=",".join(DEEP), help="with commas between (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(weigh(args.here)))
        return 0
    found = [measure(kind) for kind in args.kinds.split(",")]
    ratios = [int(one["reckoned"]) / int(one["taken"]) for one in found]
    for one, ratio in zip(found, ratios, strict=True):
        sizes = ", ".join(f"{key} {int(one[key]) / 2**20:.0f} MiB" for key in ("reckoned", "taken", "kv", "kv_full"))
        print(f"{one['kind']:>15}: {sizes}; reckoned / taken {ratio:.3f}", file=sys.stderr)
    if args.json:
        print(json.dumps(found))
    return int(any(abs(ratio - 1) > OFF for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
