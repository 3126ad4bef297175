"""CE-CoLLM's naive split, really run: for each token the rows of the whole context go up, in float32.

    python -m benchmarks.split_naive partner|edge, with a line of JSON on stdin, which is held open

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from disco_daemon.bench.child import LOG_TAIL, BenchError, child_env
from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import N_BATCH, AbortFlag, Llama
from disco_daemon.engine.llama.rows import Row
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.program import end_with_stdin
from disco_daemon.types import LayerRange

from .split_proxy import SlowProxy
from .split_tables import SplitAnswer

N_CTX = 2048
ANSWER_S = 300.0  # for one answer, s
HEAD = struct.Struct("<I")  # rows that follow; the answer to them is one token's id
SEGMENT_BYTES = 8 << 30


def _load(job: dict[str, Any]) -> Llama:
    layers = tuple(job["layers"])
    load = wire.Load(model_path=job["path"], n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CTX, layers=layers)
    return Llama(load, AbortFlag())


def _compute(llama: Llama, tokens: Sequence[int], start: int, hidden: np.ndarray | None) -> np.ndarray:
    """Compute tokens from a position on, part by part; return the rows of a range that gives some."""
    found = []
    for at in range(0, len(tokens), N_BATCH):
        part = tokens[at : at + N_BATCH]
        rows: list[Row] = [(token, start + at + i, 0, at + i == len(tokens) - 1) for i, token in enumerate(part)]
        if llama.decode(rows, None if hidden is None else hidden[at : at + N_BATCH]) != 0:
            msg = "llama.cpp cannot compute a batch"
            raise RuntimeError(msg)
        found.append(llama.hidden_out.copy())
    return np.concatenate(found)


def _serve(job: dict[str, Any]) -> None:
    """Be the partner: say where it listens, and then answer one edge's questions."""
    llama = _load(job)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as stream:
        began = time.process_time()
        while head := stream.read(HEAD.size):
            (n,) = HEAD.unpack(head)
            if n:
                rows = np.frombuffer(stream.read(4 * n * llama.n_embd), np.float32).reshape(n, llama.n_embd)
                llama.clear()
                _compute(llama, [0] * n, 0, rows)
                said = int(llama.logits(n - 1 - (n - 1) // N_BATCH * N_BATCH).argmax())
                connection.sendall(HEAD.pack(said))
            else:  # an answer has ended: what it took, in us
                connection.sendall(HEAD.pack(int(1e6 * (time.process_time() - began))))
                began = time.process_time()


def _ask(job: dict[str, Any]) -> None:
    """Be the edge: write all answers, one after the other."""
    llama = _load(job)
    vocabulary = llama.vocabulary
    with socket.create_connection(("127.0.0.1", job["port"])) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange(data: bytes) -> int:
            connection.sendall(data)
            reply = b""
            while len(reply) < HEAD.size:
                reply += connection.recv(HEAD.size - len(reply))
            return int(HEAD.unpack(reply)[0])

        for prompt, n_most in job["prompts"]:
            began, busy = time.perf_counter(), time.process_time()
            request = wire.Count(id="n", messages=[{"role": "user", "content": prompt}])
            tokens, said = vocabulary.prompt_tokens(request), bytearray()
            llama.clear()
            rows = np.empty((0, llama.n_embd), np.float32)
            n_prompt = len(tokens)
            while len(tokens) - n_prompt < n_most:
                rows = np.concatenate([rows, _compute(llama, tokens[len(rows) :], len(rows), None)])
                token = exchange(HEAD.pack(len(rows)) + rows.tobytes())
                tokens.append(token)
                if vocabulary.ends(token):
                    break
                said += vocabulary.piece(token)
            told = {
                "text": said.decode(errors="replace"), "n": len(tokens) - n_prompt,
                "took_s": time.perf_counter() - began, "edge_s": time.process_time() - busy,
                "partner_s": exchange(HEAD.pack(0)) / 1e6,
            }  # fmt: skip
            print(json.dumps(told), flush=True)


async def measure_naive(
    model: Path, cut: int, n_layers: int, prompts: Sequence[tuple[str, int]], folder: Path, link: tuple[float, float]
) -> list[SplitAnswer]:
    """Write the answers to prompts, of so many tokens at most each, over a `link` of a round trip, s, and Mbit/s.

    Raises BenchError.
    """
    ranges = [LayerRange(0, cut, n_layers), LayerRange(cut, n_layers, n_layers)]
    paths = await asyncio.to_thread(SegmentFiles(folder, SEGMENT_BYTES).write, model, ranges)
    jobs = [{"path": str(p), "layers": [r.first, r.last, r.of]} for p, r in zip(paths, ranges, strict=True)]
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
            answer = SplitAnswer(told["text"], told["n"], told["took_s"], told["edge_s"], told["partner_s"], told["n"])
            found.append(replace(answer, bytes_up=sent, bytes_down=heard))
    return found


class _Child:
    """One of the two processes; it ends with its `async with`."""

    def __init__(self, role: str, job: dict[str, Any], folder: Path) -> None:
        self._role, self._job, self._folder = role, job, folder

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.split_naive", self._role,
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
    {"partner": _serve, "edge": _ask}[sys.argv[1]](job)
