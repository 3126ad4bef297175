"""Whether an engine stays as quick when its KV cache is full: `python -m benchmarks.engine.cells`.

Each kind of engine answers chats one after the other, all different and as long as each other, until its cells have
been filled at least ten times over. Of each fill the mean time of an iteration is taken, moves of cells and all else
that is between iterations included; the last one, and the slowest, are held against the first. Small caches make it
quick: what depends on how full they are shows all the same. The split's two engines are in one process, and so is its
iteration: one of each.

Times are processor seconds of this process and of the hosts, which others on the machine hardly change; `--wall` counts
seconds. Exit code 1: an engine has become slower than `--most` times as slow, or filled its cells too few times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from disco_daemon.bench.command import Figures, at_least, print_figures, progress
from disco_daemon.engine import wire
from disco_daemon.engine.hosts.home import Ends, HomeLlama
from disco_daemon.engine.kv.cells import MAX_SAVED_BYTES, Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import SCHEDULERS, Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.edge import SplitEdge
from disco_daemon.engine.serve.engine_role import make_batcher
from disco_daemon.engine.serve.partner import SplitPartner
from disco_daemon.link.protocol import PeerFrame, PeerJoined
from disco_daemon.link.rows.content import credits_for
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles, read_head
from disco_daemon.models.segments import n_layers
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import Drawing, LayerRange
from tests.fixtures.tiny_models import MODELS, tiny_model

from ..command import positive, run_script
from ..fleet.local_hosts import LocalHosts

N_CELLS = 768
N_CHATS = 500
N_ANSWER = 8  # tokens of an answer
N_SEQS = 64  # as an engine has
LEAST_FILLS = 10
MOST = 1.3  # of the first fill's time
PEER = 1
ON_AND_ON = Drawing(ignore_eos=True)  # answers as long as each other


@dataclass
class Bench:
    """An engine in this process: its batcher, and what one iteration of all of it is."""

    cells: Cells
    batcher: Batcher
    step: Callable[[], bool]
    hosts: list[psutil.Process] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Processor seconds of this process and of the hosts so far."""
        there = [host.cpu_times() for host in self.hosts]
        return time.process_time() + sum(times.user + times.system for times in there)


def admission_of(llama: Llama, spare_bytes: int = MAX_SAVED_BYTES) -> Admission:
    latency = IterationLatency(llama.latency_prior)
    cells = Cells(llama, N_SEQS, llama.n_cells, spare_bytes=spare_bytes)
    return Admission(cells, SCHEDULERS["andes"](latency), latency)


def hear(failed: list[str], message: wire.Message) -> None:
    if isinstance(message, wire.Failed):
        failed.append(message.message)


def bench_of(load: wire.Load, llama: Llama, **more: Any) -> Bench:
    """Return the bench of one process with its hosts."""
    failed: list[str] = []
    admission = admission_of(llama, **more)
    batcher = make_batcher(load, llama, partial(hear, failed), admission, None)
    return Bench(admission.cells, batcher, batcher.step, failed=failed)


@contextmanager
def whole(load: wire.Load, *, on_gpu: bool = False, **more: Any) -> Iterator[Bench]:
    """A whole model; as on a GPU cells in the way cost nothing, so that they are not put away for that."""
    llama = Llama(load, AbortFlag())
    if on_gpu:
        llama.skip_s = 0.0
    yield bench_of(load, llama, **more)
    llama.close()


@contextmanager
def fleet(load: wire.Load) -> Iterator[Bench]:
    """The inner half of the layers at one host of this machine."""
    n = n_layers(read_head(Path(load.model_path))[1])
    with tempfile.TemporaryDirectory() as folder:
        ranges = cut(n, n // 4, 3 * n // 4)
        paths = SegmentFiles(Path(folder), 8 << 30, one_embedding=True).write(Path(load.model_path), ranges)
        hosts = LocalHosts()
        llama = HomeLlama(load, Ends(tuple(map(str, paths)), ranges), AbortFlag(), hosts.open)
        parts = tuple(
            wire.RangeFile(path=str(path), first=part.first, last=part.last, of=part.of)
            for path, part in zip(paths, ranges, strict=True)
        )
        bench = bench_of(wire.Load(**{**fields_of(load), "ranges": parts}), llama)
        bench.hosts = [psutil.Process(host.pid) for host in hosts.started]
        yield bench
        llama.close()
        hosts.close()


@contextmanager
def split(load: wire.Load) -> Iterator[Bench]:
    """The lower half of the layers at an edge, the upper half at a partner."""
    n = n_layers(read_head(Path(load.model_path))[1])
    with tempfile.TemporaryDirectory() as folder:
        ranges = cut(n, n // 2)
        paths = SegmentFiles(Path(folder), 8 << 30).write(Path(load.model_path), ranges)
        loads = [
            wire.Load(**{**fields_of(load), "model_path": str(path), "layers": (part.first, part.last, part.of)})
            for path, part in zip(paths, ranges, strict=True)
        ]
        lower, upper = (Llama(one, AbortFlag()) for one in loads)
        up, down, failed = deque[tuple[PeerFrame, bytes]](), deque[tuple[PeerFrame, bytes]](), list[str]()
        edge = make_batcher(loads[0], lower, partial(hear, failed), admission_of(lower), partial(send, up))
        partner = make_batcher(loads[1], upper, partial(hear, failed), admission_of(upper), partial(send, down))
        lower_side, upper_side = edge.remote, partner.remote
        assert isinstance(lower_side, SplitEdge)
        assert isinstance(upper_side, SplitPartner)
        upper_side.receive(PEER, PeerJoined(name="edge", salt=1), b"")
        lower_side.receive(
            PEER, PeerJoined(name="partner", credits=credits_for(loads[1].max_answers), n_ctx=upper.n_ctx), b""
        )

        def step() -> bool:
            busy = edge.step()
            while up:
                upper_side.receive(PEER, *up.popleft())
            busy |= partner.step()
            while down:
                lower_side.receive(PEER, *down.popleft())
                busy = True
            return busy

        yield Bench(edge.admission.cells, edge, step, failed=failed)
        lower.close()
        upper.close()


@contextmanager
def tiny(kind: str, load: wire.Load) -> Iterator[Bench]:
    """A whole tiny model of another kind than most, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(Path(folder) / f"{kind}.gguf", kind)
        with whole(wire.Load(**{**fields_of(load), "model_path": str(path)})) as bench:
            yield bench


def send(queue: deque[tuple[PeerFrame, bytes]], peer: int, message: PeerFrame, payload: bytes = b"") -> None:
    assert peer == PEER
    queue.append((message, payload))


def cut(n: int, *bounds: int) -> tuple[LayerRange, ...]:
    return tuple(LayerRange(a, b, n) for a, b in zip([0, *bounds], [*bounds, n], strict=True))


def fields_of(load: wire.Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__struct_fields__}


KINDS: dict[str, Callable[[wire.Load], AbstractContextManager[Bench]]] = {
    "whole": whole,
    "gpu": partial(whole, on_gpu=True),
    "gpu_without_host_cache": partial(whole, on_gpu=True, spare_bytes=0),
    "fleet": fleet,
    "split": split,
    **{kind: partial(tiny, kind) for kind in MODELS},
}  # fmt: skip


def measure(bench: Bench, n_chats: int, *, by_wall: bool) -> Figures:
    """Answer chats, and return the mean times of an iteration, ms, by fills of the cells."""
    clock = time.perf_counter if by_wall else bench.cpu_s
    n_cells, sequences = bench.cells.n_cells, bench.batcher.admission.sequences
    fills, n_tokens, n_reused, n_iterations, began = list[float](), 0, 0, 0, clock()
    for number in range(n_chats):
        words = " ".join(f"{number * 7 + i}" for i in range(3))
        messages = [{"role": "user", "content": f"{number}: what do the numbers {words} mean to you?"}]
        request = wire.Generate(
            id=f"{number}", messages=messages, temperature=0, max_tokens=N_ANSWER, drawing=ON_AND_ON
        )
        bench.batcher.add(request)
        s = sequences[request.id]
        while sequences:
            bench.step()
            n_iterations += 1
        n_tokens += len(s.tokens) - (bench.cells.n_reused - n_reused)
        n_reused = bench.cells.n_reused
        if n_tokens >= n_cells * (len(fills) + 1):
            fills.append(1000 * (clock() - began) / n_iterations)
            n_iterations, began = 0, clock()
    first, later = fills[0], fills[1:] or [float("nan")]
    return {
        "chats": n_chats, "failed": len(bench.failed), "fills": len(fills), "first_ms": first, "last_ms": later[-1],
        "ratio": later[-1] / first, "slowest_ratio": max(later) / first, "moves": bench.cells.n_moves,
        "moves_per_fill": bench.cells.n_moves / len(fills), "tokens": n_tokens,
    }  # fmt: skip


def measure_all(kinds: list[str], model: Path, n_cells: int, n_chats: int, *, by_wall: bool) -> Figures:
    load = wire.Load(model_path=str(model), n_ctx=n_cells // 2, n_cells=n_cells, n_threads=1, n_gpu_layers=0)
    found: Figures = {}
    for kind in kinds:
        with KINDS[kind](load) as bench:
            found[kind] = measure(bench, n_chats, by_wall=by_wall)
        progress(f"{kind}: {found[kind]['ratio']:.2f}")
    return found


def table(figures: Figures) -> str:
    names = ("fills", "first_ms", "last_ms", "ratio", "slowest_ratio", "moves", "failed")
    lines = [f"{'engine':24}" + "".join(f"{name:>14}" for name in names)]
    for kind, found in figures.items():
        lines.append(f"{kind:24}" + "".join(f"{found[name]:14.4g}" for name in names))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.cells", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=[], help="kinds of engines; all")
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--cells", type=at_least(256), default=N_CELLS)
    parser.add_argument("--chats", type=at_least(2), default=N_CHATS)
    parser.add_argument("--most", type=positive, default=MOST, help="the highest ratio")
    parser.add_argument("--wall", action="store_true", help="count seconds, not processor seconds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure_all(args.kinds or list(KINDS), args.model, args.cells, args.chats, by_wall=args.wall)
    print_figures(figures, table, as_json=args.json)
    slow = [kind for kind, f in figures.items() if f["ratio"] > args.most or f["failed"]]
    short = [kind for kind, f in figures.items() if f["fills"] < LEAST_FILLS]
    for kind in slow:
        progress(f"{kind} is {figures[kind]['ratio']:.2f} times as slow with its cells full, or answers failed")
    for kind in short:
        progress(f"the cells of {kind} were filled {figures[kind]['fills']} times only: give it more chats")
    return int(bool(slow or short))


if __name__ == "__main__":
    sys.exit(run_script(main))
