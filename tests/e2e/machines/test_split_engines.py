"""Two engine processes, each with some layers of the model, joined by a socket: the answers are the whole model's."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.inbox import EngineAnswer
from disco_daemon.engine.llama.weights import read_output, read_weights
from disco_daemon.engine.supervisor import Engine
from disco_daemon.exits.head import ExitHead
from disco_daemon.exits.packing import tensors_of
from disco_daemon.link.protocol import (
    FRAMES,
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    DraftVerdict,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Refused,
    SendRows,
    decode,
    frame,
)
from disco_daemon.link.rows.content import credits_for
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles, read_head
from disco_daemon.models.segments import ExitTensor
from disco_daemon.types import Append, GenerationRequest, LayerRange, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

N, CUT, N_CTX = 30, 15, 1024
RANGES = [LayerRange(0, CUT, N), LayerRange(CUT, N, N)]


@dataclass
class Wire:
    """The relays' place: frames go from one engine to the other, as long as the link is up.

    Each link has a number of its own, so that what was meant for one before it is dropped. Frames go their own way: an
    answer's last frames may be seen after the answer has ended for its reader, so a test that looks at them waits. A
    verdict passes while `verdicts` is set. All mutable state is under the `lock`: of the frames `seen` on any link, the
    ids of the answers that are `open` at the partner, and the frame behind which the link is to be cut, once.
    """

    ends: dict[str, socket.socket] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    up: bool = False
    delay_s: float = 0.0  # of each verdict
    verdicts: threading.Event = field(default_factory=threading.Event)
    number: int = 0
    seen: list[PeerFrame] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    cut_behind: Callable[[PeerFrame], bool] | None = None
    n_ctx: int = N_CTX

    def __post_init__(self) -> None:
        self.verdicts.set()

    def attach(self, name: str) -> Callable[[socket.socket], None]:
        def attach(end: socket.socket) -> None:
            with self.lock:
                self.cut()
                self.ends[name] = end
                threading.Thread(target=self._carry, args=[name, end], daemon=True).start()
                if len(self.ends) == 2:
                    self.join()

        return attach

    def join(self) -> None:
        with self.lock:
            self.up = True
            self.number += 1
            self._tell("partner", PeerJoined(name="laptop", salt=1 << 61))
            self._tell("edge", PeerJoined(name="desktop", credits=credits_for(16), n_ctx=self.n_ctx))

    def cut(self) -> None:
        with self.lock:
            if self.up:
                self.up = False
                self.open.clear()
                for name in self.ends:
                    self._tell(name, PeerLeft(reason="cut"))

    async def settle(self) -> list[PeerFrame]:
        """Wait until the partner has said of each answer that it has ended; return the frames seen up to then.

        It says so last: no frame of an answer follows. Raises TimeoutError after 30 s.
        """
        async with asyncio.timeout(30):
            while True:
                with self.lock:
                    if not self.open:
                        return list(self.seen)
                await asyncio.sleep(0.01)

    def _see(self, message: PeerFrame) -> None:
        self.seen.append(message)
        match message:
            case OpenAnswer(id=name):
                self.open.add(name)
            case AnswerClosed(id=name) | AnswerFailed(id=name):
                self.open.discard(name)
            case Refused():
                self.open.clear()

    def _tell(self, name: str, message: PeerFrame) -> None:
        with suppress(OSError):
            self.ends[name].sendall(frame(message, peer=self.number))

    def _carry(self, name: str, end: socket.socket) -> None:
        to = {"edge": "partner", "partner": "edge"}[name]
        with suppress(OSError), end, end.makefile("rb") as stream:
            while (found := FRAMES.read(stream)) is not None:
                body, _, number = found
                if isinstance(decode(body), DraftVerdict):
                    self.verdicts.wait(30)
                    time.sleep(self.delay_s)
                with self.lock:
                    if self.up and number == self.number:
                        self._see(message := decode(body))
                        with suppress(OSError):
                            self.ends[to].sendall(FRAMES.pack(*found))
                        if self.cut_behind is not None and self.cut_behind(message):
                            self.cut_behind = None
                            self.cut()
        with self.lock:
            if self.ends.get(name) is end:
                self.cut()
                del self.ends[name]


def question(text: str, max_tokens: int = 24, temperature: float = 0.0, seed: int | None = None) -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return GenerationRequest("r", ({"role": "user", "content": text},), sampling)


async def told(answer: EngineAnswer) -> tuple[str, wire.Done]:
    text = ""
    while True:
        match await anext(answer):
            case wire.TextPiece(text=piece):
                text += piece
            case wire.Done() as done:
                return text, done
            case wire.Failed() as failed:
                raise AssertionError(failed)


def config(
    path: Path,
    layers: LayerRange | None,
    n_cells: int = 4 * N_CTX,
    exit_: wire.ExitCalibration | None = None,
    n_ctx: int = N_CTX,
    codec: str = "f32",
    chat_template: str = "",
) -> wire.Load:
    return wire.Load(
        model_path=str(path),
        n_ctx=n_ctx,
        n_threads=1,
        n_cells=n_cells,
        layers=() if layers is None else (layers.first, layers.last, layers.of),
        patience_s=20.0,
        exit=exit_,
        codec=codec,
        chat_template=chat_template,
    )


@dataclass
class Pair:
    edge: Engine
    partner: Engine
    wire: Wire


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return SegmentFiles(tmp_path_factory.mktemp("segments"), 1 << 30).write(default_model_path(), RANGES)


@asynccontextmanager
async def paired(
    segments: list[Path],
    n_edge: int = 4 * N_CTX,
    n_partner: int = 4 * N_CTX,
    exit_: wire.ExitCalibration | None = None,
    n_ctx: int = N_CTX,
    codec: str = "f32",
    ranges: Sequence[LayerRange | None] = RANGES,
    n_ctx_partner: int = 0,
    chat_template: str = "",
) -> AsyncIterator[Pair]:
    link, clock = Wire(n_ctx=n_ctx_partner or n_ctx), SystemClock()
    edge = Engine(
        config(segments[0], ranges[0], n_edge, exit_, n_ctx, codec, chat_template), clock, link.attach("edge")
    )
    partner = Engine(config(segments[1], ranges[1], n_partner, None, link.n_ctx), clock, link.attach("partner"))
    edge.start()
    partner.start()
    try:
        await edge.ready(60)
        await partner.ready(60)
        yield Pair(edge, partner, link)
    finally:
        await edge.close()
        await partner.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(segments: list[Path]) -> AsyncIterator[Pair]:
    async with paired(segments) as both:
        yield both


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Engine]:
    engine = Engine(config(default_model_path(), None), SystemClock())
    engine.start()
    await engine.ready(60)
    yield engine
    await engine.close()


QUESTIONS = ["Name three colours.", "What is the capital of France?", "Write a list of ten fruits, then repeat it."]


@pytest.mark.parametrize("text", QUESTIONS)
async def test_a_greedy_answer_is_the_whole_models(pair: Pair, whole: Engine, text: str) -> None:
    request = question(text, 40)
    expected, _ = await told(whole.open(request))
    got, done = await told(pair.edge.open(request))
    assert got == expected
    assert done.split is not None
    assert done.split.edge_rows > 0
    assert 0 < done.split.round_trips <= done.n_completion + 1


async def test_an_answer_with_a_seed_is_the_whole_models(pair: Pair, whole: Engine) -> None:
    request = question("Tell me a story about the sea.", 40, temperature=0.7, seed=7)
    expected, _ = await told(whole.open(request))
    assert (await told(pair.edge.open(request)))[0] == expected


async def test_eight_answers_at_a_time_are_those_of_one_at_a_time(pair: Pair, whole: Engine) -> None:
    requests = [question(f"Write {n} sentences about the number {n}.", 12) for n in range(2, 10)]
    expected = [(await told(whole.open(request)))[0] for request in requests]
    got = await asyncio.gather(*(told(pair.edge.open(request)) for request in requests))
    assert [text for text, _ in got] == expected


async def test_what_is_repeated_takes_fewer_round_trips_than_tokens(pair: Pair, whole: Engine) -> None:
    text = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
    request = question(f"Repeat these words exactly three times: {text}", 64)
    expected, _ = await told(whole.open(request))
    pair.wire.delay_s = 0.1  # a verdict is dear, so that drafts pay however slow a busy machine computes their rows
    try:
        got, done = await told(pair.edge.open(request))
    finally:
        pair.wire.delay_s = 0.0
    assert got == expected
    assert done.split is not None
    assert done.split.accepted > 0
    assert done.split.round_trips <= done.n_completion + 1 - done.split.accepted


async def test_a_second_turn_uploads_only_new_rows(pair: Pair, whole: Engine) -> None:
    first = question("Tell me about the sea in a few words. " * 8, 24)
    start = len(await pair.wire.settle())
    said, done = await told(pair.edge.open(first))
    messages = (*first.messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And the sky?"})
    second = GenerationRequest("r", messages, Sampling(max_tokens=24, temperature=0))
    expected, _ = await told(whole.open(second))
    before = len(await pair.wire.settle())
    got, again = await told(pair.edge.open(second))
    assert got == expected
    assert done.split is not None
    assert again.split is not None
    seen = await pair.wire.settle()
    opened = next(m for m in seen[before:] if isinstance(m, AnswerOpened))
    rows = [m for m in seen[before:] if isinstance(m, SendRows)]
    prompt = next(m for m in seen[start:] if isinstance(m, OpenAnswer)).tokens
    assert opened.n_past > len(prompt)
    assert rows[0].pos == opened.n_past
    assert again.split.bytes_up < done.split.bytes_up


@pytest.mark.parametrize(("codec", "share"), [("bf16", 0.5), ("int8", 660 / 2304)])
async def test_rounded_rows_take_fewer_bytes_and_give_an_answer(segments: list[Path], codec: str, share: float) -> None:
    async with paired(segments, codec=codec) as both:
        text, done = await told(both.edge.open(question("Name three colours.", 16)))
        sent = [message for message in await both.wire.settle() if isinstance(message, SendRows)]
    assert text
    assert done.split is not None
    assert {message.codec for message in sent} == {codec}
    assert done.split.bytes_up == pytest.approx(share * 2304 * sum(len(message.tokens) for message in sent))


async def test_a_handoff_to_the_pair_goes_on_from_the_exact_position(pair: Pair, whole: Engine) -> None:
    request = question("Name ten animals.", 40)
    expected, _ = await told(whole.open(request))
    answer = pair.edge.open(request, hold=True)
    answer.send(Append(expected[:40]))
    answer.send(Append("", go=True))
    text, _ = await told(answer)
    assert expected[:40] + text == expected


async def test_an_answer_goes_on_when_the_link_comes_back(pair: Pair, whole: Engine) -> None:
    request = question("Write a poem about a lighthouse.", 64)
    expected, _ = await told(whole.open(request))
    text, cuts, answer = "", 0, pair.edge.open(request)
    while True:
        match await anext(answer):
            case wire.TextPiece(text=piece):
                text += piece
                if cuts < 5 and len(text) > 30 * (cuts + 1):
                    cuts += 1
                    pair.wire.cut()
                    pair.wire.join()
            case wire.Done():
                break
            case wire.Failed() as failed:
                raise AssertionError(failed)
    assert cuts == 5
    assert text == expected


async def test_an_answer_goes_on_when_the_partner_has_started_again(pair: Pair, whole: Engine) -> None:
    request = question("Write a story about a small boat.", 56)
    expected, _ = await told(whole.open(request))
    text, answer = "", pair.edge.open(request)
    killed = False
    while True:
        match await anext(answer):
            case wire.TextPiece(text=piece):
                text += piece
                if len(text) > 60 and not killed:
                    killed = True
                    assert pair.partner.pid is not None
                    os.kill(pair.partner.pid, signal.SIGKILL)
            case wire.Done():
                break
            case wire.Failed() as failed:
                raise AssertionError(failed)
    assert killed
    assert text == expected


async def test_answers_that_take_each_others_cells_are_the_whole_models(segments: list[Path], whole: Engine) -> None:
    words = ["sea", "sky", "boat", "tree", "house", "river", "mountain", "lamp", "road", "bird"]
    draw = random.Random(7)
    requests = [question(f"Tell me of {' and '.join(draw.choices(words, k=15 * i))}.", 12) for i in range(2, 6)]
    expected = [(await told(whole.open(request)))[0] for request in requests]
    few = 256  # of both machines: the four have about 500 tokens
    for n_edge, n_partner in ((4 * N_CTX, few), (few, few)):
        async with paired(segments, n_edge, n_partner, n_ctx=few) as both:
            got = await asyncio.gather(*(told(both.edge.open(request)) for request in requests))
        assert [text for text, _ in got] == expected


async def test_an_answer_ends_where_the_smaller_context_does(segments: list[Path], whole: Engine) -> None:
    request, n_ctx = question("Tell me a story about the sea.", 120), 100
    expected, _ = await told(whole.open(request))
    async with paired(segments, n_ctx_partner=n_ctx) as both:
        text, done = await told(both.edge.open(request))
        assert (done.reason, done.n_prompt + done.n_completion) == (wire.FULL, n_ctx)
        assert len(text) > 100
        assert expected.startswith(text)
        refused = await anext(both.edge.open(question("alpha beta gamma " * 60)))
        assert isinstance(refused, wire.Failed)
        assert f"maximum context length is {n_ctx} tokens" in refused.message


def exit_segment(folder: Path, layers: LayerRange = RANGES[0]) -> Path:
    """The edge's range with an exit that nobody has trained: it reads the rows as if they were the last layer's."""
    model = default_model_path()
    _, header = read_head(model)
    output = read_output(model, header)
    head = ExitHead(read_weights(model, header, "output_norm.weight"), np.eye(output.shape[1], dtype=np.float32), 1e-5)
    tensors = {name: ExitTensor(t.shape, t.packing, t.data) for name, t in tensors_of(head, output).items()}
    return SegmentFiles(folder, 1 << 30).write_exit(model, layers, tensors)


async def test_drafts_of_an_exit_never_change_an_answer(segments: list[Path], whole: Engine, tmp_path: Path) -> None:
    sure = wire.ExitCalibration(coefficients=(0.0, 0.0, 0.0, 0.0), scores=(0.0, 1.0), shares=(0.7, 0.7))
    requests = [question(text, 40) for text in QUESTIONS]
    requests.append(question("Tell me a story about the sea.", 24, temperature=0.7, seed=7))
    expected = [text for text, _ in await asyncio.gather(*(told(whole.open(request)) for request in requests))]
    async with paired([exit_segment(tmp_path), segments[1]], exit_=sure) as both:
        one_by_one = [await told(both.edge.open(request)) for request in requests]
        assert [text for text, _ in one_by_one] == expected
        got = await asyncio.gather(*(told(both.edge.open(request)) for request in requests))
        assert [text for text, _ in got] == expected
        usages = [done.split for _, done in one_by_one]
        assert sum(usage.drafted for usage in usages if usage is not None) > 0
