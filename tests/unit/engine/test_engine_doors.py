"""What the daemon says reaches the engine: requests, settings, orders and cancellations, each field of them."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from disco_daemon.endpoints.base import Controls
from disco_daemon.endpoints.device import Device
from disco_daemon.engine import wire
from disco_daemon.engine.framing import frame
from disco_daemon.engine.llama.embedder import Embeddings
from disco_daemon.engine.requests import count_message, generate_message, order_message
from disco_daemon.engine.serve.admission import SCHEDULERS
from disco_daemon.engine.serve.intake import Intake, TextIntake
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.scheduler.andes import Andes
from disco_daemon.scheduler.baselines import Fcfs, RoundRobin
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import (
    Append,
    CaughtUp,
    Delivery,
    Drawing,
    Finish,
    GenerationRequest,
    Hold,
    Pace,
    Paused,
    Sampling,
    SplitWish,
    TextFamily,
    TextKind,
    TextTask,
    Token,
    Usage,
)
from tests.fixtures.clock import StoppedClock
from tests.unit.engine.test_batch import Bench

FORMAT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
REQUEST = GenerationRequest(
    "r",
    ({"role": "user", "content": "Hello"},),
    Sampling(7, 0.3, 0.4, 5, ("END",), 0.1, 0.2),
    extra={
        "response_format": FORMAT, "chat_template_kwargs": {"enable_thinking": False}, "logprobs": True,
        "top_logprobs": 3,
    },
    answer_so_far="Hi",
    answer_ids=(9, 8),
    pace_tps=4.5,
    expected_ttft_s=0.6,
    expected_rest=(1.0, 2.0),
    adapter="pirate",
    private=True,
    split=SplitWish(mode="confident", theta=0.7, goes_on=True),
    drawing=Drawing(top_k=11),
)  # fmt: skip


def test_all_that_a_request_says_is_in_the_message_to_the_engine() -> None:
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(generate_message("g1", REQUEST, hold=True)), type=wire.Generate
    )
    assert sent == wire.Generate(
        id="g1", messages=[{"role": "user", "content": "Hello"}], answer_so_far="Hi", hold=True, max_tokens=7,
        temperature=0.3, top_p=0.4, seed=5, stop=("END",), frequency_penalty=0.1, presence_penalty=0.2,
        drawing=Drawing(top_k=11), answer_ids=(9, 8), pace_tps=4.5, ttft_s=0.6, rest=(1.0, 2.0),
        response_format=FORMAT, adapter="pirate", template_args={"enable_thinking": False}, private=True,
        mode="confident", theta=0.7, goes_on=True, top_logprobs=3, thought_budget=0,
    )  # fmt: skip
    at_once = dataclasses.replace(REQUEST, delivery=Delivery.OFF)
    assert generate_message("g1", at_once, hold=False).pace_tps is None
    with_tools = dataclasses.replace(REQUEST, extra={"tools": [TOOL]})
    tools = generate_message("g1", with_tools, hold=False).tools
    assert tools is not None
    assert tools.allowed == ("look",)


def test_all_that_a_prompt_s_length_depends_on_is_in_the_question_for_it() -> None:
    assert count_message("q1", REQUEST, ids=True) == wire.Count(
        id="q1", messages=[{"role": "user", "content": "Hello"}], prompt=None, ids=True, answer="Hi",
        answer_ids=(9, 8), adapter="pirate", template_args={"enable_thinking": False}, tools=None,
    )  # fmt: skip


def test_each_order_is_passed_on_as_it_is() -> None:
    assert order_message(Hold(), "g1") == wire.HoldAnswer(id="g1")
    assert order_message(Append("more", ids=(1, 2), go=True), "g1") == wire.AppendText(
        id="g1", text="more", go=True, ids=(1, 2)
    )
    assert order_message(Pace(2.5), "g1") == wire.SetPace(id="g1", pace_tps=2.5)


# --- in the engine's process -----------------------------------------------------------------------------------------


def test_each_scheduler_s_name_is_its_own() -> None:
    latency = IterationLatency((0.01, 0.001, 0.001, 0.0))
    kinds = {name: type(make(latency)) for name, make in SCHEDULERS.items()}
    assert kinds == {"andes": Andes, "andes-paper": Andes, "fcfs": Fcfs, "round-robin": RoundRobin}


@pytest.mark.parametrize(("scheduler", "order"), [("andes", ["r2", "r1"]), ("fcfs", ["r1", "r2"])])
def test_of_two_that_wait_the_impatient_reader_is_first_and_not_whoever_came_first(
    scheduler: str, order: list[str]
) -> None:
    bench = Bench(n_ctx=64, n_cells=64, tick_s=0.001)
    bench.admission.scheduler = SCHEDULERS[scheduler](bench.admission.latency)
    bench.add("h" * 40, max_tokens=8)
    bench.step()
    for ttft_s in (1000.0, 0.1):  # neither has room beside the other, nor beside the one that runs
        bench.add("w" * 40, pace_tps=5.0, ttft_s=ttft_s, max_tokens=4)
    bench.drain()
    assert [done.id for done in bench.of(wire.Done)][1:] == order


def test_a_reader_s_pace_patience_and_what_is_behind_reach_the_scheduler() -> None:
    bench = Bench()
    for more in ({"pace_tps": 3.0, "ttft_s": 0.25, "rest": (4.0, 5.0)}, {"pace_tps": None}):
        bench.add("hello", **more)
    jobs = {s.request.id: s.job(0.0) for s in bench.admission.sequences.values()}
    assert (jobs["r0"].timeline.pace_tps, jobs["r0"].timeline.expected_ttft_s) == (3.0, 0.25)
    assert not jobs["r0"].hurried
    assert jobs["r0"].expected_rest
    assert not jobs["r1"].expected_rest
    assert jobs["r1"].hurried
    bench.batcher.pace("r0", 9.0)
    assert bench.admission.sequences["r0"].job(0.0).timeline.pace_tps == 9.0


class Recorder:
    """Stands for what the main thread has, and notes what it is told."""

    def __init__(self) -> None:
        self.single_prompt = False
        self.admission = SimpleNamespace(may_abort=lambda _: True)
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append((name, args))


def intake() -> tuple[Intake, Recorder, queue.SimpleQueue[Callable[[], None]], list[wire.Message]]:
    batcher, commands, sent = Recorder(), queue.SimpleQueue[Callable[[], None]](), list[wire.Message]()
    given = cast(Any, batcher)
    door = Intake(batcher=given, embeddings=given, cells=given, send=sent.append, hand_on=commands.put, abort=given)
    return door, batcher, commands, sent


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (wire.HoldAnswer(id="g1"), ("hold", ("g1",))),
        (wire.SetPace(id="g1", pace_tps=2.0), ("pace", ("g1", 2.0))),
        (wire.AppendText(id="g1", text="t", go=True), ("append", (wire.AppendText(id="g1", text="t", go=True),))),
    ],
)
def test_an_order_is_carried_out_by_the_thread_that_computes(order: Any, told: tuple[str, tuple[Any, ...]]) -> None:
    door, batcher, _, _ = intake()
    door._order(order)()
    assert batcher.told == [told]


def test_a_cancellation_stops_the_decode_under_way_and_ends_the_answer_and_the_embedding() -> None:
    door, batcher, commands, _ = intake()
    door.cancel("g1")
    assert batcher.told == [("set", ())]
    while not commands.empty():
        commands.get()()
    assert batcher.told[1:] == [("cancel", ("g1",)), ("cancel", ("g1",))]


def test_a_text_that_is_cancelled_is_not_computed_to_its_end_and_does_not_end_anothers() -> None:
    texts = Embeddings(cast(Any, None), lambda _: [], 8192, 4, lambda _: None)
    commands, abort = queue.SimpleQueue[Callable[[], None]](), Recorder()
    door = TextIntake(embeddings=texts, send=lambda _: None, hand_on=commands.put, abort=cast(Any, abort))
    for name in "abc":
        texts.add(wire.Embed(id=name, inputs=((1, 2),)))
    door.cancel("b")
    door.cancel("unknown")
    assert not abort.told
    door.cancel("a")
    assert abort.told == [("set", ())]
    while not commands.empty():
        commands.get()()
    assert list(texts._requests) == ["c"]


def test_a_request_that_is_cancelled_while_it_waits_is_never_computed() -> None:
    door, batcher, commands, sent = intake()
    request = wire.Generate(id="g1", messages=[])
    door.put(request)
    door.cancel("g1")
    door._finish(request, lambda: None)
    assert [type(message) for message in sent] == [wire.Done]
    assert commands.empty()
    assert not batcher.told


def test_an_answer_that_comes_does_not_wait_for_a_large_chunk_of_the_only_prompt() -> None:
    door, batcher, commands, _ = intake()
    batcher.single_prompt = True
    request = wire.Generate(id="g1", messages=[])
    door.put(request)
    door._finish(request, lambda: None)
    assert batcher.told == [("set", ())]
    assert not commands.empty()


# --- the daemon's end of the line ------------------------------------------------------------------------------------


HEADER = len(frame(wire.Alive())) - len(msgspec.msgpack.encode(wire.Alive()))  # bytes before a message


class Line:
    """The socket to an engine process, whose part the test plays: what was sent there."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []

    def write(self, data: bytes) -> None:
        self.sent.append(wire.decode_to_engine(data[HEADER:]))

    def is_closing(self) -> bool:
        return False


async def test_an_answer_of_the_device_tells_all_that_the_engine_says_and_its_orders_reach_it() -> None:
    engine, line = Engine(wire.Load(model_path="model.gguf", n_ctx=1, n_threads=1), StoppedClock()), Line()
    engine.state = EngineState.READY
    engine._channel.open(cast(Any, line))
    request = dataclasses.replace(REQUEST, adapter="", split=SplitWish(), extra={}, drawing=Drawing())
    usage, controls, heard = Usage(), Controls(held=True), list[Any]()

    async def read() -> None:
        async for event in Device(engine).generate(request, usage, controls):
            heard.append(event)

    reading = asyncio.create_task(read())
    while not line.sent:
        await asyncio.sleep(0)  # until the answer is open
    [asked] = line.sent
    assert isinstance(asked, wire.Generate)
    assert asked.hold
    controls.send(Append("more", ids=(3,), go=True))
    controls.send(Pace(7.0))
    for reply in (
        wire.PrefillProgress(id=asked.id, n_past=4, n_prompt=5, idle=True, n_orders=1, n_prefilled=3, n_cached=1),
        wire.PauseChange(id=asked.id, paused=True),
        wire.TextPiece(id=asked.id, text="Hello", n_tokens=2),
        wire.Done(id=asked.id, reason="length", n_prompt=5, n_completion=2, busy_s=0.25, n_cached=1),
    ):
        engine._channel.deliver(reply)
    async with asyncio.timeout(30.0):
        await reading
    assert line.sent[1:] == [
        wire.AppendText(id=asked.id, text="more", go=True, ids=(3,)), wire.SetPace(id=asked.id, pace_tps=7.0)
    ]  # fmt: skip
    assert [type(event) for event in heard] == [CaughtUp, Paused, Token, Finish]
    assert (heard[2].text, heard[3].reason) == ("Hello", "length")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.busy_s) == (5, 1, 2, 0.25)


@pytest.mark.parametrize(
    ("kind", "least"), [(TextKind("mean"), None), (TextKind("cls", TextFamily({}, 64)), 64), (None, 1)]
)
async def test_which_dimensions_a_model_can_have_is_for_the_engine_to_say_which_knows_its_size(
    kind: TextKind | None, least: int | None
) -> None:
    engine, line = Engine(wire.Load(model_path="model.gguf", n_ctx=1, n_threads=1), StoppedClock()), Line()
    engine.state = EngineState.READY
    engine._channel.open(cast(Any, line))
    engine.info = wire.Loaded(
        model="m", n_ctx=1, n_cells=1, n_seqs=1, bytes_per_token=0, load_s=0.1, prefill_tps=1.0,
        pooling=kind.pooling if kind else "",
    )  # fmt: skip
    device = Device(engine)
    device.expected_text_kind = lambda: kind
    asking = asyncio.create_task(device.embed(["a"], TextTask(dimensions=384), usage := Usage()))
    async with asyncio.timeout(30.0):
        while not line.sent and not asking.done():
            await asyncio.sleep(0)
        [asked] = line.sent
        assert isinstance(asked, wire.Embed)
        assert (asked.dimensions, asked.least_dimensions) == (384, least)
        engine._channel.deliver(wire.Embedded(id=asked.id, vectors=(b"v",), n_tokens=1, busy_s=0.5))
        assert (await asking).vectors == (b"v",)
    assert (usage.prompt_tokens, usage.busy_s) == (1, 0.5)


async def test_texts_that_nobody_waits_for_cost_what_was_computed_of_them() -> None:
    engine, line = Engine(wire.Load(model_path="model.gguf", n_ctx=1, n_threads=1), StoppedClock()), Line()
    engine.state = EngineState.READY
    engine._channel.open(cast(Any, line))
    engine.info = wire.Loaded(
        model="m", n_ctx=1, n_cells=1, n_seqs=1, bytes_per_token=0, load_s=0.1, prefill_tps=1.0, pooling="mean"
    )  # fmt: skip
    asking = asyncio.create_task(Device(engine).embed(["a"], TextTask(), usage := Usage()))
    async with asyncio.timeout(30.0):
        while not line.sent:
            await asyncio.sleep(0)
        asking.cancel()
        while len(line.sent) < 2:
            await asyncio.sleep(0)
        [asked, withdrawn] = line.sent
        assert isinstance(asked, wire.Embed)
        assert withdrawn == wire.CancelRequest(id=asked.id)
        engine._channel.deliver(wire.Embedded(id=asked.id, vectors=(), n_tokens=7, busy_s=0.5))
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert (usage.prompt_tokens, usage.busy_s) == (7, 0.5)
    assert not engine._channel.owes_reply


async def test_a_prompt_is_counted_with_its_ids_where_these_are_wanted() -> None:
    engine, line = Engine(wire.Load(model_path="model.gguf", n_ctx=1, n_threads=1), StoppedClock()), Line()
    engine.state = EngineState.READY
    engine._channel.open(cast(Any, line))
    asking = asyncio.create_task(Device(engine).token_ids(dataclasses.replace(REQUEST, adapter="")))
    while not line.sent:
        await asyncio.sleep(0)
    [asked] = line.sent
    assert isinstance(asked, wire.Count)
    assert asked.ids
    engine._channel.deliver(wire.Counted(id=asked.id, n_tokens=2, ids=(5, 6)))
    assert await asking in ((5, 6), None), "unless this machine was held up for too long"
