"""Model files that lie, each loaded by the engine's own loader in a process of its own, with bounds on time and memory.

    python -m benchmarks.faults.fuzz_files [--cases 2000] [--seed 1] [--kind model] [--json]

A header is changed where it has meaning: values, types, counts and lengths of keys, names, shapes, packings and offsets
of tensors, the template, tokens that are ids. Kinds are a whole model, an adapter, and a range of layers; and `cells`:
what a lent host says it has saved of a text in a model with a sliding window, checked as home does it, then put into a
cache. A file is `loaded`, or `refused` with the engine's own errors; where llama.cpp ends the process instead it is
`ended`, which costs users the file and nothing else: the daemon says so and goes on. Of cells none may be, since that
would end home's engine. `slow` and `large` ones pass the bounds; `fault`s are errors of Python that no engine expects.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.engine.hosts.outstanding import AskedCells, UnaskedError, check_cells
from disco_daemon.engine.llama.adapters import Adapters
from disco_daemon.engine.llama.library import show_errors
from disco_daemon.engine.llama.model import AbortFlag, Llama, quiet
from disco_daemon.engine.llama.refusals import ModelError, PromptError
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.llama.template import TemplateError, TemplateUnfit
from disco_daemon.engine.wire import AdapterFile, Generate, Load
from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import Header, read_header
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.types import LayerRange

LIMIT_S = 10.0  # of processor time for one file of a megabyte; a whole one takes 0.1 s
LIMIT_BYTES = 1 << 30  # of memory beside what the process had before
LOADED, REFUSED, FAULT = 0, 3, 4  # exit codes of a child
REFUSALS = (
    ModelError,
    PromptError,
    TemplateError,
    TemplateUnfit,
    MemoryError,
    UnaskedError,
)  # which the engine's worker tells
ODD = (0, 1, 2, 3, 7, 31, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
WORDS = (
    b"",
    b"\xff",
    b"\x00" * 9,
    b"%s%n",
    b"llama\x1b[2J",
    b"../../etc/passwd",
    b"A" * 70_000,
    b"{% for x in range(10**9) %}",
)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type in GGUF
STRING, ARRAY = 8, 9
N_CELLS = 100  # that a text has
CELLS_ASKED = (0, 130)  # positions of it that are asked for: it ends before


def changed(data: bytes, rng: random.Random, header: Header) -> bytes:
    """Return a file's bytes with one to three parts of its header changed."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        change = rng.choice((_number, _number, _number, _type, _count, _counts, _tensor, _tensor, _tensor, _word, _cut))
        change(made, header, rng)
    return bytes(made)


def _value_at(made: bytes | bytearray, span: tuple[int, int]) -> int:
    """Return where a key's type stands, behind its name."""
    return min(span[0] + 8 + int.from_bytes(made[span[0] : span[0] + 8], "little"), len(made) - 16)


def _number(made: bytearray, header: Header, rng: random.Random) -> None:
    """Make a number of the header another one."""
    span = rng.choice(sorted(header.spans.values()))
    at = _value_at(made, span)
    kind = struct.unpack_from("<I", made, at)[0]
    if kind in SIZES:
        made[at + 4 : at + 4 + SIZES[kind]] = _odd(rng, SIZES[kind])


def _odd(rng: random.Random, size: int) -> bytes:
    value = rng.choice((*ODD, rng.getrandbits(64), rng.randrange(300)))
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def _type(made: bytearray, header: Header, rng: random.Random) -> None:
    at = _value_at(made, rng.choice(sorted(header.spans.values())))
    made[at : at + 4] = struct.pack("<I", rng.choice((*range(14), 255, 2**32 - 1)))


def _count(made: bytearray, header: Header, rng: random.Random) -> None:
    """Make the length of a text or of an array another one."""
    at = _value_at(made, rng.choice(sorted(header.spans.values())))
    kind = struct.unpack_from("<I", made, at)[0]
    if kind == STRING:
        made[at + 4 : at + 12] = _odd(rng, 8)
    elif kind == ARRAY:
        made[at + 8 : at + 16] = _odd(rng, 8)
        if rng.random() < 0.3:
            made[at + 4 : at + 8] = struct.pack("<I", rng.randrange(14))


def _counts(made: bytearray, header: Header, rng: random.Random) -> None:
    """Make version, number of tensors or number of keys another one."""
    at, size = rng.choice(((4, 4), (8, 8), (16, 8)))
    made[at : at + size] = _odd(rng, size)


def _tensor(made: bytearray, header: Header, rng: random.Random) -> None:
    """Make a tensor's dimensions, sizes, packing or offset others."""
    tensor = rng.choice(header.tensors)
    at = made.find(struct.pack("<Q", len(tensor.name)) + tensor.name.encode())
    if at < 0:
        return
    at += 8 + len(tensor.name)
    n = len(tensor.shape)
    where, size = rng.choice(
        ((at, 4), *((at + 4 + 8 * i, 8) for i in range(n)), (at + 4 + 8 * n, 4), (at + 8 + 8 * n, 8))
    )
    made[where : where + size] = _odd(rng, size)


def _word(made: bytearray, header: Header, rng: random.Random) -> None:
    """Put another text into the place of one, with its right length: a name, a template, an architecture."""
    if texts := sorted(texts_of(bytes(made), header).items()):
        at, n = rng.choice(texts)[1][0]
        if at + n <= len(made):
            word = rng.choice(WORDS)
            made[at - 8 : at + n] = struct.pack("<Q", len(word)) + word


def texts_of(data: bytes, header: Header) -> dict[str, list[tuple[int, int]]]:
    """Return where the texts of each key stand that has one, or a list of them, and how many bytes they have."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, span in header.spans.items():
        at = _value_at(data, span)
        kinds = struct.unpack_from("<II", data, at)
        at, n_left = (at + 4, 1) if kinds[0] == STRING else (at + 16, struct.unpack_from("<Q", data, at + 8)[0])
        if STRING not in (kinds[0], kinds[1] if kinds[0] == ARRAY else None):
            continue
        found[key] = []
        while n_left and at + 8 <= span[1]:
            n = struct.unpack_from("<Q", data, at)[0]
            found[key].append((at + 8, n))
            at, n_left = at + 8 + n, n_left - 1
    return found


def without_utf8(data: bytes, header: Header) -> dict[str, bytes]:
    """Return the file once for each key with texts: no byte of the last of them can begin a character there."""
    found = {}
    for key, texts in texts_of(data, header).items():
        at, n = texts[-1]
        found[key] = data[:at] + b"\xff" * n + data[at + n :]
    return found


def _cut(made: bytearray, header: Header, rng: random.Random) -> None:
    del header
    if rng.random() < 0.5:
        del made[rng.randrange(len(made)) :]
    else:
        at = rng.randrange(max(1, len(made) - 64))
        del made[at : at + rng.randrange(1, 64)]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: a sound one, and how the engine reads one of a path."""

    data: bytes
    read: Callable[[Path], None]
    changed: Callable[[bytes, random.Random], bytes]


def _read_model(path: Path) -> None:
    llama = Llama(Load(model_path=str(path), n_ctx=256, n_threads=1, n_gpu_layers=0, n_cells=256), AbortFlag())
    llama.vocabulary.prompt_tokens(Generate(id="1", messages=[{"role": "user", "content": "Hello"}]))
    llama.decode([(min(5, llama.vocabulary.n_tokens - 1), i, 0, i == 3) for i in range(4)])


def _read_adapter(path: Path) -> None:
    llama = _speaker()
    llama.adapters = Adapters(llama._model, (AdapterFile(name="one", path=str(path)),), show_errors)
    if llama.adapters.failures["one"]:
        raise ModelError(llama.adapters.failures["one"])
    llama.adapt("one")
    llama.decode([(5, i, 0, i == 3) for i in range(4)])


def _read_cells(path: Path) -> None:
    data, model = path.read_bytes(), _windowed()
    check_cells(data, AskedCells(model.layers, *CELLS_ASKED), are_joined=False)
    model.put(data, (1, 2), *CELLS_ASKED)
    model.run([(5, N_CELLS, 1, False)], np.ones((1, model.n_embd), np.float32))
    model.part(2, *CELLS_ASKED)


def changed_cells(data: bytes, rng: random.Random) -> bytes:
    """Return saved cells with one to three numbers changed, mostly of those that say how much there is, or cut."""
    made = bytearray(data)
    heads = range(0, min(len(made), 4096), 4)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice((rng.choice(heads[:40]), rng.choice(heads), rng.randrange(len(made) // 4) * 4))
        match rng.randrange(8):
            case 0:
                del made[rng.randrange(len(made)) :]
                made += bytes(rng.choice((0, 0, 8, 4096)))
            case 1:
                made[at:at] = rng.randbytes(rng.choice((1, 4, 12, 24)))
            case 2:
                del made[at : at + rng.choice((1, 4, 12, 24))]
            case 3:
                made[at : at + 8] = _odd(rng, 8)
            case _:
                made[at : at + 4] = _odd(rng, 4)
        if len(made) < 64:
            break
    return bytes(made)


def forget() -> None:
    """Free what `kinds` has loaded."""
    for load in (_speaker, _windowed):
        load().close()
        load.cache_clear()


@cache
def _windowed() -> SegmentModel:
    """A range of a model with a sliding window, with a text in it; loaded once, before the first child."""
    from tests.fixtures.tiny_models import MODELS, tiny_model

    n_layers = MODELS["sliding-window"].n_layers
    layers = LayerRange(1, n_layers, n_layers)
    with tempfile.TemporaryDirectory() as made:
        whole = tiny_model(Path(made) / "window.gguf", "sliding-window")
        [path] = SegmentFiles(Path(made), 1 << 30).write(whole, [layers])
        model = SegmentModel(Load(model_path=str(path), n_ctx=512, n_threads=1, n_gpu_layers=0), layers)
    rows = np.random.default_rng(0).standard_normal((N_CELLS, model.n_embd), np.float32)
    model.run([(5, position, 0, False) for position in range(N_CELLS)], rows)
    return model


@cache
def _speaker() -> Llama:
    """The default model, which adapters are for; loaded once, before the first child."""
    path = str(default_model_path())
    return Llama(Load(model_path=path, n_ctx=256, n_threads=1, n_gpu_layers=0, n_cells=256), AbortFlag(), warm=False)


def _read_segment(path: Path) -> None:
    load = Load(model_path=str(path), n_ctx=256, n_threads=1, n_gpu_layers=0, n_cells=256, layers=(0, 1, 2))
    Llama(load, AbortFlag()).decode([(5, i, 0, i == 3) for i in range(4)])


def kinds(folder: Path) -> dict[str, Kind]:
    """Return the kinds of files by name; the models have random weights and a vocabulary of bytes."""
    from tests.fixtures.lora import write_lora
    from tests.fixtures.weights import random_bytes_speaker

    _speaker()
    model = random_bytes_speaker(folder / "sound.gguf", 512)
    [segment] = SegmentFiles(folder / "segments", 1 << 30).write(model, [LayerRange(0, 1, 2)])
    adapter = write_lora(folder / "lora.gguf")
    return {
        **{
            name: Kind(data, read, partial(changed, header=read_header(data)))
            for name, data, read in (
                ("model", model.read_bytes(), _read_model),
                ("segment", segment.read_bytes(), _read_segment),
                ("adapter", adapter.read_bytes(), _read_adapter),
            )
        },
        "cells": Kind(bytes(_windowed().part(0, *CELLS_ASKED)), _read_cells, changed_cells),
    }


def run_one(kind: Kind, data: bytes, folder: Path) -> tuple[int, resource.struct_rusage]:
    """Load one file in a process of its own, and return how that ended and what it took."""
    path = folder / "changed.gguf"
    path.write_bytes(data)
    pid = os.fork()
    if pid == 0:
        code = FAULT
        try:
            faulthandler.disable()
            os.environ["GGML_NO_BACKTRACE"] = "1"  # or a debugger is started for each that llama.cpp ends
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            resource.setrlimit(resource.RLIMIT_CPU, (int(3 * LIMIT_S), int(3 * LIMIT_S)))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            kind.read(path)
            code = LOADED
        except REFUSALS:
            code = REFUSED
        finally:
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage


def run(kind: Kind, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """Load that many changed files of a kind, and count what came of them."""
    rng = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    faults, slowest_s, largest = [], 0.0, 0
    for case in range(cases):
        code, usage = run_one(kind, kind.changed(kind.data, rng), folder)
        took_s = usage.ru_utime + usage.ru_stime
        grown = (usage.ru_maxrss - before) << 10
        slowest_s, largest = max(slowest_s, took_s), max(largest, grown)
        found["slow"] += took_s > LIMIT_S
        found["large"] += grown > LIMIT_BYTES
        if code < 0:
            found["ended"] += 1
            ends[signal.Signals(-code).name] += 1
        else:
            found[{LOADED: "loaded", REFUSED: "refused"}.get(code, "fault")] += 1
        if code == FAULT or took_s > LIMIT_S or grown > LIMIT_BYTES:
            faults.append(case)
    return {
        "cases": cases,
        **{name: found[name] for name in ("loaded", "refused", "ended", "fault", "slow", "large")},
        "signals": dict(ends),
        "slowest_s": round(slowest_s, 2),
        "largest_mb": largest >> 20,
        "odd_cases": faults[:10],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=("model", "adapter", "segment", "cells"))
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    args = parser.parse_args()
    quiet()
    began, told = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, kind in kinds(folder).items():
            if args.kind in (None, name):
                told[name] = run(kind, args.cases, args.seed, folder)
                if not args.json:
                    print(name, told[name], file=sys.stderr)
    print(json.dumps({"files": told, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
