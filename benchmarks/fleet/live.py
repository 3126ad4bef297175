"""A fleet of two processes of this machine, measured: home on one core, a host of the inner layers on another.

Beside it, with the same batcher and answers: one process on one core, one on both, and two whole copies, a core each. A
run in which other programs took more than 10 % of the cores is not judged. Engine settings are the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from disco_daemon.bench.command import Figures, progress
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import Ends, HomeLlama
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.memory import N_SEQS
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.engine.serve.remote_layers import RemoteLayers
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles, disk_bytes, read_head
from disco_daemon.models.segments import n_layers
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.system import program
from disco_daemon.types import LayerRange

from .answers import equal_answers, failures
from .lines import line_costs
from .local_hosts import LocalHosts
from .operations import operation_lines, operations
from .prediction import prediction_lines, predictions

N_ANSWERS = 8
N_TOKENS = 64  # of each answer
N_CTX, N_CELLS = 1024, 4096
OTHERS = 0.1  # share of the cores that others may have taken in a run that is judged
INNER = (1 / 6, 0.74)  # the layers of a host, as shares of all: home has the head, which is worth several layers
# Answers, and sentences before each question.
LOADS = {"mixed": (8, 40), "decode": (8, 0), "mixed_16": (16, 40), "decode_16": (16, 0), "single": (1, 0)}
WORDS = ("river", "lamp", "stone", "garden", "winter", "silver", "music", "door")
RECOVERED = {
    "process": "killed; asked: 1 s",
    "link": "stopped, as a cut link; asked: 5 s",
    "closed": "its socket closed",
}
KINDS = ("one", "both", "copy 0", "copy 1", "fleet")
# Children that do one thing: move layers while answers are drawn, let hosts fail, draw answers beside random steps.
OPERATIONS, FAILURE, EQUAL = "operations", "failure", "equal"
FEW_ANSWERS, FEW_FAULTS = 12, 6  # without `--full`: some minutes
ALL_ANSWERS, ALL_FAULTS = 200, 100  # what is asked
PREDICTION = "prediction"  # a child whose throughput is forecast under several plans
LINES = "lines"  # a child whose host is behind lines of some delays and rates


@dataclass
class Run:
    """A batcher in this process, and what the answers of one load came to."""

    llama: Llama
    said: dict[str, str] = field(default_factory=dict)
    n_tokens: int = 0
    failed: int = 0

    def hear(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_, text=text):
                self.said[id_] = self.said.get(id_, "") + text
            case wire.Failed():
                self.failed += 1

    def play(self, load: str, numbers: Sequence[int], kill_at: int) -> dict[str, Any]:
        """Serve the answers of these numbers all at once; kill the host at an iteration, if that is not 0."""
        llama, n_sentences = self.llama, LOADS[load][1]
        llama.clear()
        latency = IterationLatency(llama.latency_prior)
        admission = Admission(Cells(llama, N_SEQS, llama.n_cells), SCHEDULERS["andes"](latency), latency)
        remote = FleetHome() if isinstance(llama, HomeLlama) else RemoteLayers()
        batcher = Batcher(llama, self.hear, admission, remote=remote)
        host = psutil.Process(llama.host_pids[0]) if isinstance(llama, HomeLlama) else None
        before = _cpu_s(host)
        began, cpu_began, step = time.perf_counter(), time.process_time(), 0
        for number in numbers:
            word = WORDS[number % len(WORDS)]
            text = f"The {word} of house {number} is old. " * (n_sentences // 4) + f"Tell me a story about a {word}."
            messages = [{"role": "user", "content": text}]
            batcher.add(wire.Generate(id=str(number), messages=messages, temperature=0, max_tokens=N_TOKENS))
        while admission.sequences:
            if kill_at and step == kill_at and isinstance(llama, HomeLlama):
                os.kill(llama.host_pids[0], signal.SIGKILL)
            batcher.step()
            step += 1
        wall_s = time.perf_counter() - began
        return {
            "wall_s": wall_s,
            "cpu_s": time.process_time() - cpu_began,
            "host_cpu_s": 0.0 if kill_at else _cpu_s(host) - before,
            "tokens": batcher.counters.completion_tokens,
            "said": self.said,
            "failed": self.failed,
            "replaced_s": llama.replaced_s if isinstance(llama, HomeLlama) else None,
        }


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def serve(kind: str, model: Path, folder: Path, cut: Sequence[int]) -> None:
    """Be one of KINDS: a line of JSON in, a line of JSON out, until stdin ends."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = {"both": cores, "copy 1": cores[1:]}.get(kind, cores[:1])
    os.sched_setaffinity(0, own)
    if kind in (OPERATIONS, FAILURE, EQUAL):
        print("{}", flush=True)
        for line in sys.stdin:
            n = json.loads(line)["numbers"][0]
            if kind == OPERATIONS:
                found = operations(model, folder, cut[2], cores, n)
            else:
                found = (failures if kind == FAILURE else equal_answers)(model, folder, cut[2], n, cpus=cores[1:])
            print(json.dumps(found), flush=True)
        return
    if kind in (PREDICTION, LINES):
        print("{}", flush=True)
        measure = predictions if kind == PREDICTION else line_costs
        for line in sys.stdin:
            print(json.dumps(measure(model, folder, cores, json.loads(line)["numbers"][0])), flush=True)
        return
    load = wire.Load(
        model_path=str(model), n_ctx=N_CTX, n_cells=N_CELLS, n_threads=len(own), n_gpu_layers=0, speculate=False
    )
    hosts = LocalHosts(cpus=cores[1:])
    if kind == "fleet":
        n = cut[2]
        ranges = (LayerRange(0, cut[0], n), LayerRange(cut[0], cut[1], n), LayerRange(cut[1], n, n))
        first, middle, last = map(str, SegmentFiles(folder, 8 << 30, one_embedding=True).write(model, ranges))
        llama: Llama = HomeLlama(load, Ends((first, middle, last), ranges), AbortFlag(), hosts.open)
    else:
        llama = Llama(load, AbortFlag())
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(Run(llama).play(asked["load"], asked["numbers"], asked["kill_at"])), flush=True)
    llama.close()
    hosts.close()


class Child:
    """One of KINDS as a process."""

    def __init__(self, kind: str, model: Path, folder: Path, cut: Sequence[int]) -> None:
        words = [kind, str(model), str(folder), *map(str, cut)]
        self._process = subprocess.Popen(
            program.command("benchmarks.fleet.live", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=program.environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.answer()

    def ask(self, load: str, numbers: Sequence[int], kill_at: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"load": load, "numbers": list(numbers), "kill_at": kill_at}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()


def together(children: Sequence[Child], load: str, kill_at: int = 0) -> dict[str, Any]:
    """Let some processes share the answers of a load; return what they did, and the share that others took."""
    n, began, busy = LOADS[load][0], time.perf_counter(), _busy_s()
    for number, child in enumerate(children):
        child.ask(load, range(number, n, len(children)), kill_at)
    found = [child.answer() for child in children]
    wall_s, busy = time.perf_counter() - began, _busy_s() - busy
    cpu_s = [one["cpu_s"] for one in found] + [one["host_cpu_s"] for one in found if one["host_cpu_s"]]
    return {
        "throughput": sum(one["tokens"] for one in found) / max(one["wall_s"] for one in found),
        "cpu_s": cpu_s,
        "others": max(0.0, busy - sum(cpu_s)) / (wall_s * (os.cpu_count() or 1)),
        "said": {id_: text for one in found for id_, text in one["said"].items()},
        "replaced_s": found[0]["replaced_s"],
        "failed": sum(one["failed"] for one in found),
    }


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def live(
    repeats: int, cut: tuple[int, int] | None, n_answers: int = FEW_ANSWERS, n_faults: int = FEW_FAULTS
) -> Figures:
    """Measure everything, `repeats` times in turn; medians. Hosts fail `n_faults` times."""
    model = default_model_path()
    n = n_layers(read_head(model)[1])
    first, last = cut or (round(INNER[0] * n), round(INNER[1] * n))
    children: dict[str, Child] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for kind in KINDS:
                children[kind] = Child(kind, model, folder, (first, last, n))
            sides = {kind: [children[kind]] for kind in ("one", "both", "fleet")}
            sides["copies"] = [children["copy 0"], children["copy 1"]]
            runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
            for number in range(repeats):
                for load in LOADS:
                    for side, processes in sides.items():
                        if load == "single" and side == "copies":
                            continue
                        runs.setdefault(load, {}).setdefault(side, []).append(together(processes, load))
                progress(f"run {number + 1} of {repeats}")
            killed = [together(sides["fleet"], "decode", kill_at=20 + 10 * i) for i in range(repeats)]
        finally:
            for child in children.values():
                child.close()
        weights = disk_bytes(folder.glob("*.gguf"))
        moved = measure_apart(OPERATIONS, model, folder, (first, last, n), repeats)
        failed = measure_apart(FAILURE, model, folder, (first, last, n), n_faults)
        equal = measure_apart(EQUAL, model, folder, (first, last, n), n_answers)
        forecast = measure_apart(PREDICTION, model, folder, (first, last, n), repeats)
    found = figures(runs, killed, weights / (2 * model.stat().st_size), (first, last, n))
    of_all = min(found["answers_equal"], equal["equal"] / equal["drawn"])
    return found | {
        "operations": moved, "failure": failed, "answers_equal": of_all, "same_answers": equal,
        "prediction_error": forecast,
    }  # fmt: skip


def only(kind: str, number: int) -> Figures:
    """Do only one of these, with its number of repeats, faults or answers."""
    model = default_model_path()
    n = n_layers(read_head(model)[1])
    with tempfile.TemporaryDirectory() as name:
        return measure_apart(kind, model, Path(name), (0, n, n), number)


def measure_apart(kind: str, model: Path, folder: Path, cut: tuple[int, int, int], number: int) -> dict[str, Any]:
    """Measure one of OPERATIONS, FAILURE, EQUAL, PREDICTION and LINES in a process of its own."""
    child = Child(kind, model, folder, cut)
    try:
        child.ask("", [number])
        return child.answer()
    finally:
        child.close()


def figures(
    runs: dict[str, dict[str, list[dict[str, Any]]]],
    killed: Sequence[dict[str, Any]],
    memory: float,
    cut: tuple[int, int, int],
) -> Figures:
    """Return what the runs come to, by the names that other programs read; None: not measured yet."""
    rate = {load: {side: _median(found, "throughput") for side, found in by.items()} for load, by in runs.items()}

    def fleet_against(side: str, load: str) -> float:
        """Return the median of the ratios of runs that were made next to each other: a machine's speed drifts."""
        pairs = zip(runs[load]["fleet"], runs[load][side], strict=True)
        return float(statistics.median(fleet["throughput"] / other["throughput"] for fleet, other in pairs))

    others = max(one["others"] for by in runs.values() for found in by.values() for one in found)
    pairs = [
        (mine, one["said"][id_])
        for load, by in runs.items()
        for fleet, one in zip(by["fleet"], by["one"], strict=True)
        for id_, mine in fleet["said"].items()
    ]
    expected = runs["decode"]["one"][0]["said"]
    wrong = sum(one["said"].get(id_) != text for one in killed for id_, text in expected.items())
    return {
        "throughput_gain": {load: fleet_against("one", load) for load, by in runs.items() if "copies" in by},
        "of_two_copies": fleet_against("copies", "mixed"),
        "of_two_copies_16": fleet_against("copies", "mixed_16"),
        "memory_of_two_copies": memory,
        "single_slowdown": 1 / fleet_against("one", "single") - 1,
        "prediction_error": {"measured": None, "paper": None},
        "operations": {"replicate_s": {}, "migrate_s": None, "pause_s": None, "throughput_lost": None},
        "failure": {
            "runs": len(killed),
            "lost": wrong,
            "doubled": 0 if wrong == 0 else None,
            "recovery_s": {"process": max(one["replaced_s"] for one in killed), "link": None},
        },
        "answers_equal": sum(a == b for a, b in pairs) / len(pairs),
        "judged": others <= OTHERS,
        "hosts": 2,
        "others": others,
        "layers_at_host": f"{cut[0]}-{cut[1]} of {cut[2]}",
        "throughput": rate,
        "cpu_s": {
            load: {side: [round(s, 2) for s in found[-1]["cpu_s"]] for side, found in by.items()}
            for load, by in runs.items()
        },
    }


def _median(found: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.median(one[name] for one in found))


def table(found: Figures) -> str:
    """Return the figures as text."""
    failure, moved, error = found["failure"], found["operations"], found["prediction_error"]
    lines = [
        f"layers {found['layers_at_host']} at a host of one core, all else at home on another; default settings",
        f"{'token/s (CPU s of each process, last run)':44}" + "".join(f"{s:>26}" for s in found["throughput"]["mixed"]),
    ]
    for load, by in found["throughput"].items():
        shown = (f"{rate:.1f} ({', '.join(map(str, found['cpu_s'][load][side]))})" for side, rate in by.items())
        lines.append(f"{load:44}" + "".join(f"{one:>26}" for one in shown))
    gain = found["throughput_gain"]
    lines += [
        (
            f"gain over one core, 8 and 16 answers: mixed {gain['mixed']:.2f}, {gain['mixed_16']:.2f} (asked: 1.5), "
            f"decode {gain['decode']:.2f}, {gain['decode_16']:.2f} (asked: 1.3)"
        ),
        (
            f"of two whole copies: {found['of_two_copies']:.0%}, {found['of_two_copies_16']:.0%} (asked: 85 %), "
            f"{found['memory_of_two_copies']:.0%} of their weights (asked: at most 65 %)"
        ),
        f"one answer alone: {found['single_slowdown']:+.0%} time a token (asked: at most 10 %)",
        f"answers equal to one process's: {found['answers_equal']:.1%}",
        *failure_lines(failure),
        *equal_lines(found["same_answers"]),
        *operation_lines(moved),
        *prediction_lines(error),
        f"others took up to {found['others']:.0%} of the cores: {'judged' if found['judged'] else 'NOT JUDGED'}",
    ]
    return "\n".join(lines)


def failure_lines(found: dict[str, Any]) -> list[str]:
    """Return as text what hosts that failed have cost."""
    shown = ((name, found["recovery_s"][kind]) for kind, name in RECOVERED.items())
    return [
        f"hosts failed {found['runs']} times: {found['lost']} answers lost text, {found['doubled']} doubled some",
        "replaced within " + ", ".join(f"{'-' if s is None else f'{s:.2f} s'} ({name})" for name, s in shown),
    ]


def equal_lines(found: dict[str, Any]) -> list[str]:
    """Return as text what came of answers beside random steps."""
    n_steps = sum(found["steps"].values())
    rows = "; ".join(f"{n}: {', '.join(map(str, rows))}" for n, rows in found["rows"].items())
    leaked = {n: left for n, left in found["leaked"].items() if left}
    return [
        f"{found['equal']} of {found['drawn']} answers equal beside {n_steps} random steps and {found['moves']} moves",
        f"rows computed at the hosts of fleets of 1, 2 and 3: {rows}",
        f"cells that were not as they should be: {found['wrong_cells']}; left behind: {leaked or 'nothing'}",
    ]


def main() -> None:
    """Be one of the processes that are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=(*KINDS, OPERATIONS, FAILURE, EQUAL, PREDICTION, LINES))
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cut", type=int, nargs=3)
    args = parser.parse_args()
    serve(args.kind, args.model, args.folder, args.cut)


if __name__ == "__main__":
    main()
