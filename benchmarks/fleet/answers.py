"""What random moves, lost hosts and other answers change of what is said, and what they leave behind: nothing.

Answers are drawn by one process first. Then they are drawn with the inner layers at one, two and three hosts, cut at
random layers, while at each iteration something else happens: layers are moved, replicated and evicted, hosts join and
leave, answers come, are cancelled and interrupted, cells are moved. Home's own copy of the cells is compared with the
cells that each leg has. Where hosts are to fail, they are killed, stopped, or their sockets are closed, at random
moments.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil

from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import HERE, Ends, HomeLlama
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.home import FleetHome
from disco_daemon.engine.serve.remote_layers import RemoteLayers
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import LayerRange

from .local_hosts import LocalHosts

N_TOGETHER = 8  # answers at a time
N_TOKENS = 24  # of each
N_CTX, N_CELLS, N_SEQS = 512, 2048, 32
STEPS_PER_ANSWER = 50  # random steps: 10,000 beside 200 answers
CHECK_EVERY = 25  # steps, after which all cells are compared
WORDS = ("rivers", "lamps", "stones", "gardens", "winter", "silver", "music", "doors")
# What happens at an iteration, and how often beside the others.
CHANGES = {
    "move": 30, "break off": 6, "leave": 4, "ask": 12, "cancel": 10, "preempt": 6, "move cells": 3, "evict": 3
}  # fmt: skip
BETWEEN_FAULTS = 40  # iterations at most: some faults in each round of answers
FAULTS = ("process", "stopped", "closed")  # kill -9, SIGSTOP, and the socket is closed


def prompt(number: int) -> str:
    return f"Tell me about {WORDS[number % len(WORDS)]}, and say why house {number} has so many of them."


@dataclass
class Answers:
    """A batcher in this process, what each answer has said, and why it ended."""

    llama: Llama
    said: dict[str, str] = field(default_factory=dict)
    failed: int = 0

    def __post_init__(self) -> None:
        self.llama.clear()
        latency = IterationLatency(self.llama.latency_prior)
        self.cells = Cells(self.llama, N_SEQS, N_CELLS)
        self.admission = Admission(self.cells, SCHEDULERS["andes"](latency), latency)
        remote = FleetHome() if isinstance(self.llama, HomeLlama) else RemoteLayers()
        self.batcher = Batcher(self.llama, self.hear, self.admission, remote=remote)

    def hear(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_, text=text):
                self.said[id_] = self.said.get(id_, "") + text
            case wire.Failed():
                self.failed += 1

    def ask(self, id_: str, text: str, n: int = N_TOKENS) -> None:
        messages = [{"role": "user", "content": text}]
        self.batcher.add(wire.Generate(id=id_, messages=messages, temperature=0, max_tokens=n))

    def draw(self, numbers: Sequence[int], before: Callable[[], object] = lambda: None) -> dict[str, str]:
        """Draw the answers of these numbers, N_TOGETHER at a time; `before` is called before each iteration."""
        waiting = list(reversed(numbers))
        while waiting or self.admission.sequences:
            while waiting and sum(not id_.startswith("x") for id_ in self.admission.sequences) < N_TOGETHER:
                number = waiting.pop()
                self.ask(str(number), prompt(number))
            before()
            self.batcher.step()
        return {id_: text for id_, text in self.said.items() if not id_.startswith("x")}


@dataclass
class Fleet:
    """Home and its hosts, cut at random layers between the first and the last `n_ends` layers, which are home's."""

    model: Path
    folder: Path
    n_layers: int
    random: Random
    hosts: LocalHosts
    n_hosts: int
    n_ends: int = 5
    rows: dict[int, int] = field(default_factory=dict)  # that hosts computed which have left

    def __post_init__(self) -> None:
        load = wire.Load(
            model_path=str(self.model), n_ctx=N_CTX, n_cells=N_CELLS, n_threads=1, n_gpu_layers=0, speculate=False
        )
        self.llama = HomeLlama(load, self.cut(is_first=True), AbortFlag(), self.hosts.open)

    def cut(self, *, is_first: bool = False) -> Ends:
        """Return legs at random: each at a host, at two, or at home. The first ones are at all hosts."""
        first, last = self.n_ends, self.n_layers - self.n_ends
        inner = sorted(
            self.random.sample(range(first + 1, last), self.n_hosts - 1 if is_first else self.random.randrange(3))
        )
        bounds = [0, first, *inner, last, self.n_layers]
        ranges = tuple(LayerRange(a, b, self.n_layers) for a, b in pairwise(bounds))
        numbers = list(range(self.n_hosts))
        legs = list[tuple[int, ...]]()
        for number in range(len(ranges) - 2):
            if is_first:
                legs.append((number,))
            elif self.random.random() < 0.2:
                legs.append((HERE,))
            else:
                n = min(len(numbers), 1 + (self.random.random() < 0.3))
                legs.append(tuple(self.random.sample(numbers, n)))
        paths = SegmentFiles(self.folder, 8 << 30, one_embedding=True).write(self.model, ranges)
        return Ends(tuple(map(str, paths)), ranges, tuple(legs))

    def leave(self) -> None:
        """Let a host go that has no layers; the next move that wants it starts it again."""
        for number, host in list(self.llama.hosts.items()):
            if not host.segments and not self.llama.is_moving and host.link is not None:
                self.rows[number] = self.rows.get(number, 0) + host.computed()[0]
                self.llama.leave(number)
                return

    def rows_at(self) -> dict[int, int]:
        """Return how many rows each host has computed."""
        present = {number: host.computed()[0] for number, host in self.llama.hosts.items()}
        return {n: self.rows.get(n, 0) + present.get(n, 0) for n in sorted(self.rows.keys() | present.keys())}


@dataclass
class Steps:
    """Random steps beside answers, each by its kind, and how often cells were not as they should be."""

    answers: Answers
    fleet: Fleet
    left: int
    done: dict[str, int] = field(default_factory=dict)
    n_moves: int = 0  # that were carried out
    wrong_cells: int = 0
    _latest: object = None  # the latest report that was counted

    def step(self) -> None:
        """Do something, if steps are left."""
        latest = next(reversed(self.fleet.llama.moves), None)  # one iteration carries out one at most
        if latest is not self._latest and latest is not None:
            self._latest = latest
            self.n_moves += not latest.error
        if self.left <= 0:
            return
        self.left -= 1
        random, admission, batcher = self.fleet.random, self.answers.admission, self.answers.batcher
        remote = batcher.remote
        assert isinstance(remote, FleetHome)
        kind = random.choices(list(CHANGES), list(CHANGES.values()))[0]
        self.done[kind] = self.done.get(kind, 0) + 1
        others = [id_ for id_ in admission.sequences if id_.startswith("x")]
        match kind:
            case "move" if not self.fleet.llama.is_moving:
                remote.begin_move(self.fleet.cut())
            case "break off":
                remote.break_off_move("tried out")
            case "leave":
                self.fleet.leave()
            case "ask" if len(others) < N_TOGETHER:
                self.answers.ask(f"x{self.left}", prompt(random.randrange(40)) + " Be brief." * random.randrange(4), 40)
            case "cancel" if others:
                batcher.cancel(random.choice(others))
            case "preempt" if here := [s for s in admission.resident if not s.is_away]:
                admission.preempt(random.choice(here))
            case "move cells":
                self.answers.cells.move()
            case "evict":
                self.answers.cells.tidy()
        if self.left % CHECK_EVERY == 0:
            self.compare()

    def compare(self) -> None:
        """Compare the cells that each leg has with those that there should be."""
        self.answers.cells.before_move()  # all flights land
        expected: dict[int, int] = {}
        for _, end, owners in self.answers.cells.spans():
            expected.update({seq: max(end, expected.get(seq, 0)) for seq in owners})
        self.wrong_cells += sum(found not in (None, expected) for found in self.fleet.llama.cells_of_legs())


def n_left_behind(folder: Path, hosts: LocalHosts) -> dict[str, int]:
    """Return what there is of this process: descriptors, threads, half-written files, and hosts that run."""
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len([path for path in folder.iterdir() if path.suffix != ".gguf"]),
        "processes": sum(host.poll() is None for host in hosts.started),
    }


def expected_answers(model: Path, n: int) -> dict[str, str]:
    """Return what one process says."""
    load = wire.Load(model_path=str(model), n_ctx=N_CTX, n_cells=N_CELLS, n_threads=1, n_gpu_layers=0, speculate=False)
    llama = Llama(load, AbortFlag())
    try:
        return Answers(llama).draw(range(n))
    finally:
        llama.close()


def equal_answers(
    model: Path, folder: Path, n_layers: int, n: int, seed: int = 23, cpus: Sequence[int] = ()
) -> dict[str, Any]:
    """Draw `n` answers over one, two and three hosts beside random steps; return how many differ, and what was left."""
    expected, random = expected_answers(model, n), Random(seed)
    found: dict[str, Any] = {
        "answers": n,
        "equal": 0,
        "drawn": 0,
        "failed": 0,
        "wrong_cells": 0,
        "moves": 0,
        "steps": {},
    }
    found |= {"rows": {}, "leaked": {}}
    for n_hosts in (1, 2, 3):
        hosts = LocalHosts(cpus=cpus)
        before = n_left_behind(folder, hosts)
        fleet = Fleet(model, folder, n_layers, random, hosts, n_hosts)
        answers = Answers(fleet.llama)
        steps = Steps(answers, fleet, STEPS_PER_ANSWER * n // 3)
        said: list[dict[str, str]] = []
        while steps.left > 0 or not said:
            answers.said.clear()
            said.append(answers.draw(range(n), steps.step))
        found["rows"][str(n_hosts)] = list(fleet.rows_at().values())
        fleet.llama.break_off("all is done")
        fleet.llama.clear()
        left_cells = fleet.llama.kept_bytes
        fleet.llama.close()
        hosts.close()
        after = n_left_behind(folder, hosts) | {"kept_bytes": left_cells}
        found["leaked"][str(n_hosts)] = {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)}
        for each in said:
            found["equal"] += sum(each.get(id_) == text for id_, text in expected.items())
            found["drawn"] += len(expected)
        found["failed"] += answers.failed
        found["wrong_cells"] += steps.wrong_cells
        found["moves"] += steps.n_moves
        for kind, count in steps.done.items():
            found["steps"][kind] = found["steps"].get(kind, 0) + count
    return found


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """`n` hosts that fail at random moments, and how long it took until another process was in the place of each, s.

    Each is at most `between` iterations behind the end of the one before.
    """

    fleet: Fleet
    n: int
    hosts: LocalHosts
    between: int = BETWEEN_FAULTS
    next_at: int = 0  # the iteration of the next fault
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in FAULTS})
    _iteration: int = 0
    _failed: tuple[str, int, int, int, float] | None = None  # its kind, host, process, losses before, and when

    def step(self) -> None:
        """Let a host fail if it is time, or see whether it has been replaced."""
        self._iteration += 1
        llama = self.fleet.llama
        if self._failed is not None:
            kind, number, pid, n_lost, began = self._failed
            host = llama.hosts[number]
            if host.n_lost > n_lost and host.pid:
                self.recovery_s[kind].append(time.perf_counter() - began)
                self._failed = None
                _end(pid)
                self.hosts.prepare()
                self.next_at = self._iteration + self.fleet.random.randrange(1, self.between)
        elif self.n_done < self.n and self._iteration >= self.next_at:
            kind = FAULTS[sum(map(len, self.recovery_s.values())) % len(FAULTS)]
            number = self.fleet.random.choice([n for n, host in llama.hosts.items() if host.pid])
            host = llama.hosts[number]
            self._failed = kind, number, host.pid, host.n_lost, time.perf_counter()
            match kind:
                case "process":
                    os.kill(host.pid, signal.SIGKILL)
                case "stopped":
                    os.kill(host.pid, signal.SIGSTOP)
                case "closed" if host.link is not None:
                    with socket.fromfd(host.link.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                        sock.shutdown(socket.SHUT_RDWR)

    @property
    def n_done(self) -> int:
        """How many hosts have failed and were replaced."""
        return sum(map(len, self.recovery_s.values()))


def _end(pid: int) -> None:
    """End a stopped process, whose socket is closed, as the daemon does."""
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)


def failures(
    model: Path,
    folder: Path,
    n_layers: int,
    n: int,
    seed: int = 23,
    cpus: Sequence[int] = (),
    between: int = BETWEEN_FAULTS,
) -> dict[str, Any]:
    """Let hosts of a fleet of two fail at `n` random moments of eight answers; return what that cost."""
    expected, random, hosts = expected_answers(model, N_TOGETHER), Random(seed), LocalHosts(cpus=cpus)
    fleet = Fleet(model, folder, n_layers, random, hosts, 2)
    faults, lost, doubled, failed = Faults(fleet, n, hosts, between, random.randrange(1, between)), 0, 0, 0
    hosts.prepare()
    try:
        while faults.n_done < n:
            answers = Answers(fleet.llama)
            said = answers.draw(range(N_TOGETHER), faults.step)
            failed += answers.failed
            for id_, text in expected.items():
                if (mine := said.get(id_, "")) != text:
                    lost, doubled = lost + (len(mine) <= len(text)), doubled + (len(mine) > len(text))
    finally:
        fleet.llama.close()
        hosts.close()
    longest = {kind: max(all_s, default=None) for kind, all_s in faults.recovery_s.items()}
    return {
        "runs": faults.n_done,
        "lost": lost,
        "doubled": doubled,
        "failed": failed,
        "recovery_s": {"process": longest["process"], "link": longest["stopped"], "closed": longest["closed"]},
        "orphans": sum(host.poll() is None for host in hosts.started),
    }
