"""What it costs to move layers, and to have them at one host more, while eight answers draw tokens.

Home on one core, two hosts on another: so a move brings no speed here, and what it costs is seen alone. The files of
all segments are written before, and both hosts' processes run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import Ends, HomeLlama
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.memory import N_SEQS
from disco_daemon.engine.llama.model import AbortFlag
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.estimation.prefill_curve import t95
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import LayerRange

from .local_hosts import LocalHosts

N_ANSWERS, N_TOKENS = 8, 256  # answers, and what each has in the cache when the first operation begins
N_BEHIND = 4  # iterations behind an operation that count as its: what it has held up shows there
N_BESIDE = 8  # iterations until the next operation, by which it is known what is usual
N_MOVES = 4  # there and back, there and back: for each repeat, since one move is three iterations long
FIRST, LAST = 5, 25  # the layers that hosts have: 20 of the default model's 30
SIZES = (1, 10, 20)  # layers that are replicated


@dataclass(frozen=True, slots=True)
class Effort:
    """What home and hosts have used so far: seconds of processors, and how often a thread slept; tokens drawn, time."""

    cpu_s: float
    n_sleeps: int
    n_tokens: int
    at_s: float

    @staticmethod
    def of(pids: Sequence[int], n_tokens: int) -> Effort:
        """Return what these processes have used."""
        cpu_s, n_sleeps = 0.0, 0
        for pid in pids:
            times = psutil.Process(pid).cpu_times()
            cpu_s += times.user + times.system
            for task in Path(f"/proc/{pid}/task").iterdir():
                words = (task / "status").read_text().split()
                n_sleeps += int(words[words.index("voluntary_ctxt_switches:") + 1])
        return Effort(cpu_s, n_sleeps, n_tokens, time.perf_counter())

    def since(self, before: Effort) -> Effort:
        """Return what was used since then."""
        return self + Effort(-before.cpu_s, -before.n_sleeps, -before.n_tokens, -before.at_s)

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            self.cpu_s + other.cpu_s, self.n_sleeps + other.n_sleeps, self.n_tokens + other.n_tokens,
            self.at_s + other.at_s,
        )  # fmt: skip


NO_EFFORT = Effort(0.0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class MovePair:
    """A move that took `seconds`, and the effort until what it held up was made good, and `beside` it without one."""

    seconds: float
    moving: Effort
    beside: Effort

    @property
    def lost_s(self) -> float:
        """How much longer the tokens took than as many take without a move, s."""
        return self.moving.at_s - self.moving.n_tokens * self.beside.at_s / self.beside.n_tokens


@dataclass
class Meanwhile:
    """Eight answers of a batcher, when each got its tokens, and what else went on: `pairs` has moves that count."""

    llama: HomeLlama
    times: dict[str, list[float]] = field(default_factory=dict)
    windows: list[tuple[float, float]] = field(default_factory=list)  # in which layers were moved for the figures
    others: list[tuple[float, float]] = field(default_factory=list)  # in which they were put where they have to be
    pairs: list[MovePair] = field(default_factory=list)
    _beside: Effort = NO_EFFORT  # of the iterations before the next move

    def __post_init__(self) -> None:
        self.llama.clear()
        latency = IterationLatency(self.llama.latency_prior)
        admission = Admission(Cells(self.llama, N_SEQS, self.llama.n_cells), SCHEDULERS["andes"](latency), latency)
        self.home = FleetHome()
        self.batcher = Batcher(self.llama, self.hear, admission, remote=self.home)
        words = "The house is old, and the garden behind it is long. " * 18
        for number in range(N_ANSWERS):
            messages = [{"role": "user", "content": f"{number}. {words} Tell me a long story about house {number}."}]
            self.batcher.add(wire.Generate(id=str(number), messages=messages, temperature=0, max_tokens=700))
        while any(s.n_past < N_TOKENS for s in admission.sequences.values()):
            self.batcher.step()
        self.began = time.perf_counter()
        self._rest()

    def hear(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_):
                self.times.setdefault(id_, []).append(time.perf_counter())
            case wire.Failed(message=text):
                raise RuntimeError(text)

    def move(self, ends: Ends, *, counts: bool) -> float:
        """Move layers, then go on for a while; return how long it took, s. Raises RuntimeError if it cannot be done."""
        before, earlier = self.effort(), self._beside
        self.home.begin_move(ends)
        while self.llama.is_moving:
            self.batcher.step()
        if error := self.llama.moves[-1].error:
            raise RuntimeError(error)
        began, ended = before.at_s, time.perf_counter()
        (self.windows if counts else self.others).append((began, ended))
        for _ in range(N_BEHIND):
            self.batcher.step()
        moving = self.effort().since(before)
        self._rest()
        if counts:
            self.pairs.append(MovePair(ended - began, moving, earlier + self._beside))
        return ended - began

    def _rest(self) -> None:
        before = self.effort()
        for _ in range(N_BESIDE):
            self.batcher.step()
        self._beside = self.effort().since(before)

    def effort(self) -> Effort:
        """Return what home and hosts have used so far."""
        pids = [os.getpid(), *filter(None, self.llama.host_pids.values())]
        return Effort.of(pids, self.batcher.counters.completion_tokens)

    def costs(self) -> dict[str, Any]:
        """Return what a move cost beside the tokens that were drawn meanwhile.

        Seconds of processors, how often a thread slept, and time, all beyond what as many tokens take without a move in
        the iterations before and behind it; and that time by the move's. With few moves the interval is wide.
        """
        n, moving, beside = len(self.pairs), NO_EFFORT, NO_EFFORT
        for pair in self.pairs:
            moving, beside = moving + pair.moving, beside + pair.beside
        share = moving.n_tokens / max(1, beside.n_tokens)
        move_s = statistics.mean(pair.seconds for pair in self.pairs)
        lost = [pair.lost_s / move_s for pair in self.pairs]
        half = t95(n - 1) * statistics.stdev(lost) / n**0.5 if n > 1 else None
        mean = statistics.mean(lost)
        return {
            "throughput_lost": mean,
            "throughput_lost_95": None if half is None else [mean - half, mean + half],
            "throughput_lost_median": statistics.median(lost),
            "moves": n,
            "cpu_s": (moving.cpu_s - share * beside.cpu_s) / n,
            "sleeps": (moving.n_sleeps - share * beside.n_sleeps) / n,
        }

    def effect(self) -> dict[str, float]:
        """Return how much longer than usual a reader waited at most, s, and how many tokens were drawn in moves."""
        waits, usual, n_meanwhile = [0.0], list[float](), 0
        for times in self.times.values():
            shown = [at for at in times if at >= self.began]
            for a, b in pairwise(shown):
                if any(a < end and b > start for start, end in self.windows):
                    waits.append(b - a)
                elif not any(a < end and b > start for start, end in self.others):
                    usual.append(b - a)
            n_meanwhile += sum(start <= at < end for at in shown for start, end in self.windows)
        return {
            "pause_s": max(waits) - statistics.median(usual),
            "usual_wait_s": statistics.median(usual),
            "longest_usual_wait_s": max(usual),
            "tokens_meanwhile": n_meanwhile,
        }


def operations(model: Path, folder: Path, n_layers: int, cores: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure each operation `repeats` times while eight answers are drawn; medians."""

    def ends(middle: int, *hosts: tuple[int, ...]) -> Ends:
        bounds = [0, FIRST, *((middle,) if middle < LAST else ()), LAST, n_layers]
        ranges = tuple(LayerRange(a, b, n_layers) for a, b in pairwise(bounds))
        return Ends(
            tuple(map(str, SegmentFiles(folder, 8 << 30, one_embedding=True).write(model, ranges))), ranges, hosts
        )

    hosts = LocalHosts(cpus=cores[1:])
    load = wire.Load(model_path=str(model), n_ctx=1024, n_cells=8192, n_threads=1, n_gpu_layers=0, speculate=False)
    before, after = ends(15, (0,), (1,)), ends(15, (1,), (1,))
    llama = HomeLlama(load, before, AbortFlag(), hosts.open)
    try:
        readers = Meanwhile(llama)
        migrate_s = [readers.move((after, before)[n % 2], counts=True) for n in range(N_MOVES * repeats)]
        found = readers.effect() | readers.costs()
        moved = [move for move in llama.moves if not move.error]
        found["moved_bytes"] = statistics.median(move.n_bytes for move in moved)
        found["switch_s"] = statistics.median(move.pause_s for move in moved)
        replicate_s: dict[str, list[float]] = {}
        for _ in range(repeats):
            for size in SIZES:
                others = ((1,),) if size < SIZES[-1] else ()
                readers.move(ends(FIRST + size, (0,), *others), counts=False)
                took_s = readers.move(ends(FIRST + size, (0, 1), *others), counts=True)
                replicate_s.setdefault(str(size), []).append(took_s)
        pauses = [move.pause_s for move in llama.moves if not move.error]
        if len(readers.batcher.admission.sequences) < N_ANSWERS:
            raise RuntimeError("an answer has ended: fewer than there should be were drawn")
    finally:
        llama.close()
        hosts.close()
    return {
        "replicate_s": {size: statistics.median(all_s) for size, all_s in replicate_s.items()},
        "migrate_s": statistics.median(migrate_s),
        **found,
        "longest_switch_s": max(pauses),
        "longest_migrate_s": max(migrate_s),
    }


def operation_lines(moved: dict[str, Any]) -> list[str]:
    """Return as text how long moves and replicas took, and what readers noticed of them."""
    return [
        (
            f"10 layers moved in {moved['migrate_s']:.2f} s (asked: 0.25), a reader waited at most "
            f"{moved['pause_s']:.2f} s longer than usual (asked: 0.1; without a move at most "
            f"{moved['longest_usual_wait_s'] - moved['usual_wait_s']:.2f} s)"
        ),
        (
            f"{moved['throughput_lost']:.1%} of the throughput lost meanwhile{_interval(moved['throughput_lost_95'])}, "
            f"in {moved['moves']} moves (asked: at most 5 %)"
        ),
        (
            f"beside the tokens drawn meanwhile: {moved['cpu_s']:.3f} s of processors and {moved['sleeps']:.0f} "
            "wake-ups a move or replica"
        ),
        "replicated: "
        + ", ".join(f"{size} layers in {took_s:.2f} s" for size, took_s in moved["replicate_s"].items())
        + " (asked: 0.05, 0.1, 0.15)",
    ]


def _interval(shares: list[float] | None) -> str:
    return "" if shares is None else f" (95 %: {shares[0]:.1%} to {shares[1]:.1%})"
