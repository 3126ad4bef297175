"""The bounds of this processor, measured on the spot by limits.c, and what a model's tokens take of them.

A prompt's token has to multiply all weights but the head's once; a token that is written alone has to read all of them
from memory. No kernel is faster than that. Attention, norms and whatever else is computed come on top, so that a share
of 1 is out of reach. All is by processor time of a thread: threads share the work, and the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from disco_daemon.models.gguf import HEADER_BYTES, read_header, shard_names

SOURCE = Path(__file__).with_name("limits.c")
COMPILE_S, MEASURE_S = 60.0, 120.0  # each takes about a second
FLOATS = (0, 1, 30)  # ggml's F32, F16 and BF16: multiplied as floats


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a thread can do in a second of processor time, 0 where that was not measured.

    Multiply-adds of bytes and of floats, cycles, and bytes from memory while `threads` threads read.
    """

    multiply_adds_per_s: float
    float_multiply_adds_per_s: float
    cycles_per_s: float
    bytes_per_s: float
    threads: int

    @property
    def multiply_adds_per_cycle(self) -> float | None:
        """Integer multiply-adds of a cycle; None where one of both is not known."""
        return round(self.multiply_adds_per_s / self.cycles_per_s, 2) if self.cycles_per_s else None


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's tokens take: multiply-adds of a prompt's token, of bytes and of floats, and bytes of one alone."""

    multiply_adds: int
    float_multiply_adds: int
    n_bytes: int

    def prompt_s(self, bounds: Bounds) -> float | None:
        """Return the least processor time of a prompt's token, s; None where no bound was measured."""
        parts = (
            (self.multiply_adds, bounds.multiply_adds_per_s),
            (self.float_multiply_adds, bounds.float_multiply_adds_per_s),
        )
        if any(n and not rate for n, rate in parts):
            return None
        return sum(n / rate for n, rate in parts if n)

    def one_s(self, bounds: Bounds) -> float | None:
        """Return the least processor time of a token that is written alone, s."""
        return self.n_bytes / bounds.bytes_per_s if bounds.bytes_per_s else None


def measure(n_threads: int) -> Bounds | None:
    """Measure this processor; None where there is no C compiler, or it makes nothing of the program."""
    native = "-mcpu=native" if sys.platform == "darwin" else "-march=native"
    with tempfile.TemporaryDirectory(prefix="disco-limits-") as folder:
        program = str(Path(folder) / "limits")
        compiler = ["cc", "-O3", native, "-pthread", str(SOURCE), "-o", program]
        try:
            subprocess.run(compiler, capture_output=True, timeout=COMPILE_S, check=True)
            done = subprocess.run([program, str(n_threads)], capture_output=True, timeout=MEASURE_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
    return Bounds(**json.loads(done.stdout), threads=n_threads)


def work_of(model: Path) -> Work:
    """Return what a model's tokens take, by its file's header. Raises OSError, or ValueError for a poor one."""
    whole: list[tuple[str, int, int, int]] = []  # of each matrix its name, packing, numbers and bytes
    used = 1.0  # the share of the experts that a token has
    for part in shard_names(model.name):
        with model.with_name(part).open("rb") as file:
            header = read_header(file.read(HEADER_BYTES))
        if n_experts := header.number(f"{header.architecture}.expert_count"):
            used = (header.number(f"{header.architecture}.expert_used_count") or n_experts) / n_experts
        whole += [(t.name, t.packing, t.n_numbers, t.n_bytes or 0) for t in header.tensors if len(t.shape) > 1]
    is_tied = not any(name == "output.weight" for name, *_ in whole)
    of_bytes = of_floats = n_bytes = 0.0
    for name, packing, n, size in whole:
        share = used if "_exps" in name else 1.0
        is_embedding, is_head = name.startswith(("token_embd.", "per_layer_token_embd.")), name == "output.weight"
        if not is_embedding or (is_tied and name == "token_embd.weight"):
            n_bytes += share * size
        if is_embedding or is_head:
            continue  # a prompt needs logits behind its last token only
        if packing in FLOATS:
            of_floats += share * n
        else:
            of_bytes += share * n
    return Work(int(of_bytes), int(of_floats), int(n_bytes))
