"""CE-CoLLM's naive split, really run: for each token the rows of the whole context go up, in float32.

    python -m benchmarks.split.naive partner|edge, with a line of JSON on stdin, which is held open

Both are children of `benchmarks.split`, each with one range of the model. The partner keeps nothing between two tokens:
it computes the rows of the whole context each time, and says the most probable next token. The edge keeps its KV cache,
and tells of each answer by a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from disco_daemon.bench.child import LOG_TAIL, BenchError, child_env
from disco_daemon.engine import wire
from disco_daemon.engine.llama.memory import N_BATCH
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.refusals import refuse_to_cut
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.serve.drafting import FIRST_TIMES, ExitDrafter
from disco_daemon.engine.serve.rows_at_partner import ExitGuess
from disco_daemon.link.rows.codec import decode_rows, encode_rows
from disco_daemon.machines.split.trained_exits import KeptExit, told_of
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.scheduler.draft_length import DraftLength
from disco_daemon.system.program import end_with_stdin
from disco_daemon.types import LayerRange

from .proxy import SlowProxy
from .tables import SplitAnswer

N_CTX = 2048
ANSWER_S = 300.0  # for one answer, s
QUESTION = struct.Struct("<III")  # rows that follow, how many of them are drafts, and the bytes of them
VERDICT = struct.Struct("<IIf")  # how many drafts were right, the token behind them, and s that the partner was busy
SEGMENT_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class NaiveWay:
    """How rows travel, whether prompts are raw text, and the exit that drafts, if one does."""

    codec: str = "f32"
    raw: bool = False
    exit: KeptExit | None = None


NAIVE = NaiveWay()


def _load(job: dict[str, Any]) -> Llama:
    layers, told = tuple(job["layers"]), job.get("exit")
    load = wire.Load(
        model_path=job["path"], n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CTX, layers=layers,
        exit=msgspec.json.decode(told, type=wire.ExitCalibration) if told else None,
    )  # fmt: skip
    return Llama(load, AbortFlag())


def _compute(
    llama: Llama, tokens: Sequence[int], start: int, hidden: np.ndarray | None, n_wanted: int = 1
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Compute tokens from a position on, part by part.

    Returns the rows of a range that gives some, and logits of the last `n_wanted` of a range that has logits.
    """
    found, logits = [], []
    for at in range(0, len(tokens), N_BATCH):
        part = tokens[at : at + N_BATCH]
        rows: list[Row] = [(token, start + at + i, 0, at + i >= len(tokens) - n_wanted) for i, token in enumerate(part)]
        if llama.decode(rows, None if hidden is None else hidden[at : at + N_BATCH]) != 0:
            msg = "llama.cpp cannot compute a batch"
            raise RuntimeError(msg)
        found.append(llama.hidden_out.copy())
        if llama.has_logits:
            logits += [llama.logits(i).copy() for i, row in enumerate(rows) if row[3]]
    return np.concatenate(found), logits


def _serve(job: dict[str, Any]) -> None:
    """Be the partner: say where it listens, and then answer one edge's questions."""
    llama = _load(job)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as stream:
        began = time.process_time()
        while head := stream.read(QUESTION.size):
            n, n_drafts, n_bytes = QUESTION.unpack(head)
            if n:
                asked_at = time.perf_counter()
                drafts = list(struct.unpack(f"<{n_drafts}I", stream.read(4 * n_drafts)))
                rows = decode_rows(job["codec"], stream.read(n_bytes), n, llama.n_embd)
                llama.clear()
                _, logits = _compute(llama, [0] * n, 0, rows, n_drafts + 1)
                said = [int(row.argmax()) for row in logits]
                n_right = next((i for i, draft in enumerate(drafts) if said[i] != draft), n_drafts)
                connection.sendall(VERDICT.pack(n_right, said[n_right], time.perf_counter() - asked_at))
            else:  # an answer has ended: what it took
                connection.sendall(VERDICT.pack(0, 0, time.process_time() - began))
                began = time.process_time()


@dataclass(slots=True)
class NaiveEdge:
    """The edge: it keeps its KV cache, and writes one answer after the other.

    All mutable state: the rows of the text so far, and what runs of drafts take.
    """

    llama: Llama
    connection: socket.socket
    codec: str
    drafter: ExitDrafter | None
    rows: np.ndarray
    lengths: DraftLength = field(default_factory=lambda: DraftLength(FIRST_TIMES))
    counts: Counter[str] = field(default_factory=Counter)

    def write(self, tokens: list[int], n_most: int) -> Iterator[int]:
        """Go on with a text's tokens, up to its end; yield what is new."""
        vocabulary, n_left = self.llama.vocabulary, n_most
        self.llama.clear()
        self.rows = self.rows[:0]
        while n_left > 0:
            drafts, guesses = self._draft(tokens, n_left)
            n_right, token = self._ask(drafts)
            if self.drafter is not None:
                self.drafter.learn([guess.signals for guess in guesses], n_right)
            self.counts.update(round_trips=1, drafted=len(drafts), accepted=n_right)
            for drawn in [*drafts[:n_right], token]:
                tokens.append(drawn)
                n_left -= 1
                yield drawn
                if vocabulary.ends(drawn):
                    return
            self.rows = self.rows[: len(tokens) - 1]
            self.llama.truncate(0, len(tokens) - 1, refuse_to_cut)

    def _draft(self, tokens: Sequence[int], n_left: int) -> tuple[list[int], list[ExitGuess]]:
        """Compute what is not computed yet, and go on with the exit's guesses as long as that pays."""
        guesses, chances = list[ExitGuess](), list[float]()
        while True:
            text = [*tokens, *(guess.token for guess in guesses)]
            n_new, began = len(text) - len(self.rows), time.perf_counter()
            rows, logits = _compute(self.llama, text[len(self.rows) :], len(self.rows), None)
            self.rows = np.concatenate([self.rows, rows])
            if self.drafter is None or len(guesses) >= n_left - 1:
                return text[len(tokens) :], guesses
            if n_new == 1:
                self.lengths.observe_step(time.perf_counter() - began)
            guess = self.drafter.guess(logits[-1])
            ends = bool(guesses) and self.llama.vocabulary.ends(guesses[-1].token)
            if not self.lengths.wants_draft(chances, guess.chance, ends_text=ends):
                return text[len(tokens) :], guesses
            guesses.append(guess)
            chances.append(guess.chance)

    def _ask(self, drafts: Sequence[int]) -> tuple[int, int]:
        """Send the rows of the whole context; return how many drafts are right, and the token behind them."""
        payload, began = encode_rows(self.codec, self.rows), time.perf_counter()
        head = QUESTION.pack(len(self.rows), len(drafts), len(payload))
        n_right, token, busy_s = self._exchange(head + struct.pack(f"<{len(drafts)}I", *drafts) + payload)
        self.lengths.observe_round_trip(len(drafts) + 1, time.perf_counter() - began, busy_s)
        return n_right, token

    def end(self) -> dict[str, Any]:
        """Tell of the answer what was counted, and what the partner took for it, s."""
        told = dict(self.counts) | {"partner_s": self._exchange(QUESTION.pack(0, 0, 0))[2]}
        self.counts.clear()
        return told

    def _exchange(self, data: bytes) -> tuple[int, int, float]:
        self.connection.sendall(data)
        reply = b""
        while len(reply) < VERDICT.size:
            reply += self.connection.recv(VERDICT.size - len(reply))
        n_right, token, busy_s = VERDICT.unpack(reply)
        return n_right, token, busy_s


def _write(job: dict[str, Any]) -> None:
    """Be the edge: write all answers, one after the other, and tell of each."""
    llama = _load(job)
    told = job.get("exit")
    drafter = ExitDrafter(msgspec.json.decode(told, type=wire.ExitCalibration)) if told else None
    vocabulary, no_rows = llama.vocabulary, np.empty((0, llama.n_embd), np.float32)
    with socket.create_connection(("127.0.0.1", job["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        edge = NaiveEdge(llama, connection, job["codec"], drafter, no_rows)
        for prompt, n_most in job["prompts"]:
            began, busy, said, first_s = time.perf_counter(), time.process_time(), list[int](), None
            messages = [] if job["raw"] else [{"role": "user", "content": prompt}]
            question = wire.Count(id="n", messages=messages, prompt=prompt if job["raw"] else None)
            for token in edge.write(vocabulary.prompt_tokens(question), n_most):
                said.append(token)
                first_s = first_s or time.perf_counter() - began
            text = b"".join(vocabulary.piece(token) for token in said if not vocabulary.ends(token))
            told = {
                "text": text.decode(errors="replace"), "n": len(said), "took_s": time.perf_counter() - began,
                "edge_s": time.process_time() - busy, "first_s": first_s, **edge.end(),
            }  # fmt: skip
            print(json.dumps(told), flush=True)


async def measure_naive(
    model: Path, cut: int, n_layers: int, prompts: Sequence[tuple[str, int]], folder: Path, link: tuple[float, float],
    way: NaiveWay = NAIVE,
) -> list[SplitAnswer]:  # fmt: skip
    """Write the answers to prompts, of so many tokens at most each, over a `link` of a round trip, s, and Mbit/s.

    Raises BenchError.
    """
    ranges = [LayerRange(0, cut, n_layers), LayerRange(cut, n_layers, n_layers)]
    segments = SegmentFiles(folder, SEGMENT_BYTES)
    paths = await asyncio.to_thread(segments.write, model, ranges)
    jobs = [
        {"path": str(p), "layers": [r.first, r.last, r.of], "codec": way.codec, "raw": way.raw}
        for p, r in zip(paths, ranges, strict=True)
    ]
    if way.exit is not None:
        calibration = msgspec.json.encode(told_of(way.exit)).decode()
        path = await asyncio.to_thread(segments.write_exit, model, ranges[0], way.exit.tensors(), calibration)
        jobs[0] |= {"path": str(path), "exit": calibration}
    found, up, down = list[SplitAnswer](), 0, 0
    async with (
        _Child("partner", jobs[1], folder) as partner,
        SlowProxy(int((await partner.line())["port"]), *link) as proxy,
        _Child("edge", jobs[0] | {"port": proxy.port, "prompts": list(prompts)}, folder) as edge,
    ):
        for _ in prompts:
            told = await edge.line()
            sent, heard = proxy.n_up - up, proxy.n_down - down
            up, down = proxy.n_up, proxy.n_down
            found.append(
                SplitAnswer(
                    told["text"], told["n"], told["took_s"], told["edge_s"], told["partner_s"], told["round_trips"],
                    told["drafted"], told["accepted"], bytes_up=sent, bytes_down=heard, first_s=told["first_s"],
                )
            )  # fmt: skip
    return found


class _Child:
    """One of the two processes; it ends with its `async with`."""

    def __init__(self, role: str, job: dict[str, Any], folder: Path) -> None:
        self._role, self._job, self._folder = role, job, folder

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.split.naive", self._role,
            stdin=PIPE, stdout=PIPE, stderr=PIPE, env=child_env(self._folder),
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._job).encode() + b"\n")  # left open: the child ends with it
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def line(self) -> dict[str, Any]:
        """Return what it says next. Raises BenchError."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                text = await self._process.stdout.readline()
        except TimeoutError:
            text = b""
        if not text:
            self._process.kill()
            said = (await self._process.stderr.read()).decode(errors="replace")[-LOG_TAIL:]
            msg = f"the naive split's {self._role} has failed: {said}"
            raise BenchError(msg)
        found: dict[str, Any] = json.loads(text)
        return found


if __name__ == "__main__":
    job = json.loads(sys.stdin.buffer.readline())
    end_with_stdin()
    {"partner": _serve, "edge": _write}[sys.argv[1]](job)
