"""Many edges of one partner, as in CE-CoLLM's Figure 4, on a machine with two cores: recorded ones.

An edge's engine answers a few questions once, and all that it sends is written down, with the time that it took. Then
one to five machines that have joined send the same to the same partner, each through a relay, a certificate and a
network of its own, and each as fast as the engine did: the partner computes everything anew, and has to say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from disco_daemon import __version__
from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress
from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.link.protocol import (  # fmt: skip
    FRAMES,
    AnswerFailed,
    AnswerOpened,
    Build,
    DraftVerdict,
    Hello,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Refused,
    SendRows,
    decode,
    frame,
)
from disco_daemon.link.relay.orders import Address, JoinPartner
from disco_daemon.link.relay.relay_process import RelayProcess
from disco_daemon.link.trust.pairing import Membership
from disco_daemon.machines.split.joined_model import JoinedFolder, shape_of
from disco_daemon.machines.split.trained_exits import read_calibration
from disco_daemon.types import GenerationRequest, Sampling, SplitMode, SplitWish

from .daemons import JoinedMachines
from .proxy import SlowProxy

_Message = TypeVar("_Message", AnswerOpened, DraftVerdict)
MOST_EDGES, THETA = 5, 0.9
EXACT: SplitMode = "exact"
CONFIDENT: SplitMode = "confident"
N_CTX = 1024
ANSWER_S = 300.0  # for one answer, s


class FramePipe:
    """One end of a socket that carries frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, sock: socket.socket) -> FramePipe:
        """Take over a socket."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock))

    async def read(self) -> tuple[PeerFrame, bytes, int]:
        """Return the next message, its bytes, and the peer's number. Raises OSError, EOFError."""
        body, payload, peer = await FRAMES.receive(self._reader.readexactly)
        return decode(body), payload, peer

    async def write(self, message: PeerFrame, payload: bytes, peer: int) -> None:
        """Send a message."""
        self._writer.write(frame(message, payload, peer))
        await self._writer.drain()

    async def close(self) -> None:
        """Close the socket."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


@dataclass(slots=True)
class RecordedAnswer:
    """What an edge sent for one answer: for each verdict that it waited for, the frames before it.

    Each frame comes so many s behind the one before it, or behind the verdict. `drawn` is what the verdicts said.
    """

    runs: list[list[tuple[float, PeerFrame, bytes]]] = field(default_factory=lambda: [[]])
    drawn: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class EdgeRecorder:
    """Stands between an edge's engine and its relay, and writes down what passes."""

    engine: FramePipe
    relay: FramePipe
    found: list[RecordedAnswer] = field(default_factory=list)
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    _at: float = 0.0

    def begin(self) -> None:
        """Another answer is asked for."""
        self.found.append(RecordedAnswer())
        self._at = time.perf_counter()

    async def up(self) -> None:
        """Pass on what the engine sends, until it ends."""
        while True:
            message, payload, peer = await self.engine.read()
            now = time.perf_counter()
            if self.found:
                self.found[-1].runs[-1].append((now - self._at, message, payload))
            self._at = now
            await self.relay.write(message, payload, peer)

    async def down(self) -> None:
        """Pass on what the relay sends, until it ends."""
        while True:
            message, payload, peer = await self.relay.read()
            if isinstance(message, PeerJoined):
                self.linked.set()
            elif isinstance(message, DraftVerdict) and self.found:
                self.found[-1].drawn.append(message.tokens)
                self.found[-1].runs.append([])
            self._at = time.perf_counter()
            await self.engine.write(message, payload, peer)


@asynccontextmanager
async def relay_of(folder: Path, address: Address, build: str, cut: int) -> AsyncIterator[FramePipe]:
    """Run the relay of a machine that has joined, with this process in its engine's place."""
    joined, paired = (
        JoinedFolder(folder / "disco" / "split").load(),
        Membership(folder / "disco/peer/membership").partner(),
    )
    if paired is None:
        msg = f"{folder} has joined no partner"
        raise BenchError(msg)
    n_embd, n_vocab = shape_of(JoinedFolder(folder / "disco" / "split").segment(joined.cut))
    told = Build(
        disco=__version__, llama=build, model=joined.fingerprint, n_layers=joined.n_layers, n_embd=n_embd,
        n_vocab=n_vocab,
    )  # fmt: skip
    role = JoinPartner(
        identity=paired.identity, name=paired.name, addresses=(address,), hello=Hello(build=told, cut=cut)
    )
    relay = RelayProcess(lambda _: None)
    ours, theirs = socket.socketpair()
    pipe = await FramePipe.of(ours)
    try:
        relay.start()
        relay.give_engine(theirs)
        relay.join(role)
        yield pipe
    finally:
        await relay.close()
        await pipe.close()


async def record(
    folder: Path, address: Address, prompts: Sequence[tuple[str, int]], wish: SplitWish, *, raw: bool = False
) -> tuple[list[RecordedAnswer], list[str], str]:
    """Have a joined machine's engine answer prompts, of so many tokens at most, in the mode that is wished for.

    They are `raw` text, or chats. Returns what it sent, its texts, and its build of llama.cpp. Raises BenchError.
    """
    layers = JoinedFolder(folder / "disco" / "split")
    joined, attached = layers.load(), asyncio.get_running_loop().create_future()
    path = layers.segment(joined.cut)
    config = wire.Load(
        model_path=str(path), n_ctx=N_CTX, n_threads=1, n_cells=4 * N_CTX, speculate=False,
        layers=() if joined.layers is None else (joined.layers.first, joined.layers.last, joined.layers.of),
        patience_s=ANSWER_S, exit=read_calibration(path),
    )  # fmt: skip
    engine = Engine(config, SystemClock(), attach=attached.set_result)
    engine.start()
    try:
        loaded = await engine.ready(ANSWER_S)
        async with relay_of(folder, address, loaded.build, joined.cut) as relay:
            recorder = EdgeRecorder(await FramePipe.of(await attached), relay)
            tasks = [asyncio.create_task(way()) for way in (recorder.up, recorder.down)]
            try:
                async with asyncio.timeout(ANSWER_S):
                    await recorder.linked.wait()
                    texts = []
                    for prompt, n in prompts:
                        recorder.begin()
                        texts.append(await _text_of(engine, prompt, n, wish, raw=raw))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await engine.close()
    return recorder.found, texts, loaded.build


async def _text_of(engine: Engine, prompt: str, n: int, wish: SplitWish, *, raw: bool) -> str:
    """Return an answer. Raises BenchError."""
    sampling = Sampling(max_tokens=n, temperature=0)
    messages = () if raw else ({"role": "user", "content": prompt},)
    request = GenerationRequest("r", messages, sampling, prompt=prompt if raw else None, split=wish)
    text, answer = "", engine.open(request)
    while True:
        match await anext(answer):
            case wire.TextPiece(text=piece):
                text += piece
            case wire.Done():
                return text
            case wire.Failed(message=message):
                raise BenchError(message)


async def _linked(pipe: FramePipe) -> int:
    """Wait for the link; return the partner's number."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            message, _, peer = await pipe.read()
            if isinstance(message, PeerJoined):
                return peer


async def replay(pipe: FramePipe, peer: int, answers: Sequence[RecordedAnswer]) -> None:
    """Send what was recorded, as fast as it was. Raises BenchError if the partner says anything else."""
    for answer in answers:
        n_past = 0
        for number, run in enumerate(answer.runs):
            for after_s, sent, payload in run:
                await asyncio.sleep(after_s)
                if isinstance(sent, SendRows):
                    sent, payload = rows_from(n_past, sent, payload)
                if not isinstance(sent, SendRows) or sent.tokens:
                    await pipe.write(sent, payload, peer)
                if isinstance(sent, OpenAnswer):
                    n_past = (await _next(pipe, AnswerOpened)).n_past
            if number < len(answer.drawn):
                said = await _next(pipe, DraftVerdict)
                if said.tokens != answer.drawn[number]:
                    msg = f"the partner drew {said.tokens}, where it drew {answer.drawn[number]} for the recorded edge"
                    raise BenchError(msg)


def rows_from(n_past: int, sent: SendRows, payload: bytes) -> tuple[SendRows, bytes]:
    """Leave out the rows before a position, which the partner has already."""
    n = min(max(0, n_past - sent.pos), len(sent.tokens))
    row_bytes = len(payload) // len(sent.tokens)
    return msgspec.structs.replace(sent, pos=sent.pos + n, tokens=sent.tokens[n:]), payload[n * row_bytes :]


async def _next(pipe: FramePipe, kind: type[_Message]) -> _Message:
    """Return the next message of a kind. Raises BenchError if the partner says that it does not go on."""
    while True:
        match (await pipe.read())[0]:
            case found if isinstance(found, kind):
                return found
            case PeerLeft() | Refused() | AnswerFailed() as message:
                msg = f"the partner does not serve a recorded edge: {message}"
                raise BenchError(msg)
            case _:
                pass


async def measure_edges(
    pair: JoinedMachines, prompts: Sequence[tuple[str, int]], link: tuple[float, float], most: int = MOST_EDGES
) -> list[dict[str, float | None]]:
    """Return what one to `most` edges take until each has all answers, beside as many clients of the whole model, s.

    Exact answers, and confident ones where there is an exit. Raises BenchError.
    """
    folders = [await pair.join(f"edge{number}") for number in range(most)]
    here = Address(host="127.0.0.1", port=pair.link.port)
    wishes = {"exact_s": SplitWish(EXACT)} | ({"confident_s": SplitWish(CONFIDENT, THETA)} if pair.head else {})
    recorded = dict[str, tuple[list[RecordedAnswer], str]]()
    for name, wish in wishes.items():
        recorder = await pair.join(f"recorder-{wish.mode}")
        answers, texts, build = await record(recorder, here, prompts, wish, raw=pair.raw)
        recorded[name] = answers, build
        _, said = await _cloud(pair, prompts, 1)
        if wish.mode == EXACT and said != texts:
            progress("the recorded edge's answers are not the whole model's")
        await _split_s(pair, folders, answers, build, link)  # so that all have cached all prompts
    found = list[dict[str, float | None]]()
    for n in range(1, most + 1):
        row: dict[str, float | None] = {"n": n, "cloud_s": (await _cloud(pair, prompts, n))[0], "confident_s": None}
        for name, (answers, build) in recorded.items():
            row[name] = await _split_s(pair, folders[:n], answers, build, link)
        found.append(row)
        took = ", ".join(f"{key[:-2]} {value:.1f} s" for key, value in row.items() if key != "n" and value is not None)
        progress(f"{n} edges: {took}")
    return found


async def _cloud(pair: JoinedMachines, prompts: Sequence[tuple[str, int]], n: int) -> tuple[float, list[str]]:
    """Return what `n` clients of the whole model take, s, and what the first one hears."""

    async def ask_all() -> list[str]:
        root = f"http://127.0.0.1:{pair.api.port}"
        return [(await pair.partner.ask(root, prompt, n_tokens)).text for prompt, n_tokens in prompts]

    began = time.perf_counter()
    said = await asyncio.gather(*(ask_all() for _ in range(n)))
    return time.perf_counter() - began, said[0]


async def _split_s(
    pair: JoinedMachines, folders: Sequence[Path], answers: Sequence[RecordedAnswer], build: str,
    link: tuple[float, float],
) -> float:  # fmt: skip
    """Return what the machines of these folders take to replay all answers at a time, s. Raises BenchError."""
    async with AsyncExitStack() as stack:
        pipes = []
        for folder in folders:
            proxy = await stack.enter_async_context(SlowProxy(pair.peer_port, *link))
            at = Address(host="127.0.0.1", port=proxy.port)
            pipe = await stack.enter_async_context(relay_of(folder, at, build, pair.cut))
            pipes.append((pipe, await _linked(pipe)))
        began = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_S * len(folders)), asyncio.TaskGroup() as group:
                for pipe, peer in pipes:
                    group.create_task(replay(pipe, peer, answers))
        except* (OSError, EOFError, TimeoutError) as errors:
            msg = f"a recorded edge broke off: {errors.exceptions[0]!r}"
            raise BenchError(msg) from errors
        except* BenchError as errors:
            raise BenchError(str(errors.exceptions[0])) from errors
        return time.perf_counter() - began
