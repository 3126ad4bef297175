"""Several answers to one question are one stream of events, and each goes to its own choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from disco_daemon.api.http.sse import BodySink
from disco_daemon.api.openai.shapes import ChatShape, TextShape
from disco_daemon.endpoints.base import Controls
from disco_daemon.endpoints.choices import Event, several
from disco_daemon.endpoints.chunks import Reader
from disco_daemon.errors import EndpointError
from disco_daemon.types import Delta, Finish, Pace, Paused, Side, Token, Usage
from tests.fixtures.raw import serving
from tests.unit.api.test_openai_format import outcome
from tests.unit.conductor.test_answer_run import Scripted, context, played
from tests.unit.types.test_fields import asked


class Engine:
    """Choices that say what they are told to; it notes when each begins, ends, and what it is ordered."""

    def __init__(self, *said: list[Event | EndpointError]) -> None:
        self.said, self.log, self.orders = said, list[str](), list[Any]()
        self.usage, self.controls = Usage(), Controls()

    async def _ask(self, index: int, usage: Usage, controls: Controls) -> AsyncGenerator[Event, None]:
        self.log.append(f"begin {index}")
        controls.bind(lambda order: self.orders.append((index, order)))
        usage.prompt_tokens, usage.cached_tokens = (9, 1) if index == 0 else (1, 9)
        try:
            for event in self.said[index]:
                await asyncio.sleep(0)
                if isinstance(event, EndpointError):
                    raise event
                usage.completion_tokens += event.n_tokens if isinstance(event, Token) else 0
                yield event
            await asyncio.Event().wait()
        finally:
            usage.busy_s = 1.0
            self.log.append(f"end {index}")

    def ask(self) -> AsyncGenerator[Event, None]:
        return several(len(self.said), self._ask, self.usage, self.controls)

    async def events(self) -> list[Event]:
        events = self.ask()
        try:
            return [event async for event in events]
        finally:
            await events.aclose()


async def test_the_others_begin_with_the_first_ones_token_and_all_are_counted() -> None:
    engine = Engine(
        [Paused(True), Token("a"), Token("b"), Finish("length")], [Token("c"), Finish("stop")], [Finish("stop")]
    )
    engine.controls.send(Pace(3.0))
    events = await engine.events()
    assert engine.log[0] == "begin 0"
    tokens = [event for event in events if isinstance(event, Token)]
    assert tokens[0] == Token("a", 1, Delta()), "nobody else has said anything"
    assert ["".join(t.text for t in tokens if t.index == i) for i in range(3)] == ["ab", "c", ""]
    (last,) = [event for event in events if isinstance(event, Finish)]
    assert events[-1] is last
    ends = {t.index: t.ended for t in tokens if t.ended}
    (left,) = {0, 1, 2} - ends.keys()
    assert ends | {left: last.reason} == {0: "length", 1: "stop", 2: "stop"}
    assert {token.index for token in tokens} == {0, 1, 2}, "also one that says nothing"
    assert sorted(engine.log[-3:]) == ["end 0", "end 1", "end 2"]
    assert engine.orders == [(i, Pace(3.0)) for i in range(3)]
    assert (engine.usage.prompt_tokens, engine.usage.cached_tokens) == (9, 1), "the prompt is there once"
    assert (engine.usage.completion_tokens, engine.usage.busy_s) == (3, 3.0)


async def test_where_one_fails_all_have_failed_and_none_goes_on() -> None:
    engine = Engine([Token("a")], [Token("b"), EndpointError(Side.DEVICE, "engine_gone", "gone")])
    with pytest.raises(EndpointError, match="gone"):
        await engine.events()
    assert sorted(engine.log[-2:]) == ["end 0", "end 1"]


async def test_who_leaves_ends_all() -> None:
    engine = Engine([Token("a")], [Token("b")])
    events = engine.ask()
    assert {(await anext(events)).index for _ in range(2)} == {0, 1}  # type: ignore[union-attr]
    await events.aclose()
    assert sorted(engine.log[-2:]) == ["end 0", "end 1"]


def chunk(index: Any, text: str = "", reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "finish_reason": reason}


def test_a_servers_choices_keep_their_numbers() -> None:
    reader = Reader(n_choices=2)
    assert reader.token(chunk(1, "b")) == Token("b", 1, Delta(), index=1)
    assert reader.token(chunk(1, reason="length")) is None
    assert reader.token(chunk(0, "a")) == Token("a", 1, Delta())
    assert reader.token(chunk(0, reason="stop")) is None
    assert reader.token(chunk(1, " too")) == Token(" too", 1, Delta(), index=1), "text behind the end is kept"
    ends = [Token("", 0, Delta(), index=1, ended="length"), Token("", 0, Delta()), Finish("stop")]
    assert reader.ends(is_done=True) == ends
    assert reader.token(chunk(8, "x")) is None, "nobody has asked for that one"
    for index in (None, -1, True, "0"):
        with pytest.raises(TypeError):
            reader.token(chunk(index, "x"))
    one = Reader()
    assert one.token(chunk(None, "a")) == Token("a")
    assert one.ends(is_done=True) == [Finish("stop")]


SAID = [chunk(0, "a"), chunk(1, "c"), chunk(1, reason="length"), chunk(0, " b"), chunk(0, reason="stop")]


async def test_a_server_gets_n_as_it_is_and_its_choices_are_relayed() -> None:
    heard: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        heard.append(json.loads(await reader.readexactly(length)))
        events: list[dict[str, Any]] = [{"choices": [one]} for one in SAID]
        events[-1]["usage"] = {"prompt_tokens": 7, "completion_tokens": 2}  # of the last one only
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()

    async with serving(answer) as server:
        usage, request = Usage(), asked(n=2, max_tokens=2, seed=1)
        events = [event async for event in server.generate(request, usage)]
    assert (heard[0]["n"], heard[0]["seed"]) == (2, 1)
    tokens = [event for event in events if isinstance(event, Token)]
    assert ["".join(t.text for t in tokens if t.index == i) for i in range(2)] == ["a b", "c"]
    assert [t.ended for t in tokens if t.index == 1] == [None, "length"]
    assert events[-1] == Finish("stop")
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


CHOICES: list[Any] = [
    Token("a ", 1, Delta()), Token("b ", 1, Delta(), index=1), Token("c ", 1, Delta()), Token("d", 1, Delta(), index=1),
]  # fmt: skip


async def test_an_answer_with_choices_has_one_record_with_the_tokens_of_all_and_teaches_no_length() -> None:
    on = context(Scripted(Side.DEVICE, [*CHOICES, Finish("length")]), Scripted(Side.SERVER, []))
    expected = on.planner.knowledge.outputs.expected_remaining(0, 10)
    request = asked(n=2, max_tokens=2)
    text, record = await played(on, request)
    assert text == "a b c d"
    assert (record.tokens[Side.DEVICE], record.finish_reason, record.choices) == (4, "length", 2)
    assert on.planner.knowledge.outputs.expected_remaining(0, 10) == expected
    on.keep_text = True
    assert (await played(on, request))[1].answer == "a c \n\nb d"


async def test_choices_stay_on_the_side_that_began_them() -> None:
    gone = EndpointError(Side.DEVICE, "engine_gone", "gone")
    server = Scripted(Side.SERVER, [Token("x", 1, Delta()), Finish("stop")])
    text, record = await played(context(Scripted(Side.DEVICE, [*CHOICES, gone]), server), asked(n=2))
    assert (text, record.error, server.asked) == ("a b c d", "engine_gone", [])
    text, record = await played(context(Scripted(Side.DEVICE, [gone]), server), asked(n=2))
    assert (text, record.winner) == ("x", Side.SERVER), "before the first token the other side may begin"
    assert "n" in record.ignored, "it gave one choice of two, and that is told"


TOKENS = (Token("a", 1, Delta(), ids=(1,)), Token("c", 1, Delta(), ids=(3,), index=1), Token("b", 1, Delta(), ids=(2,)),
          Token("", 0, Delta(), index=1, ended="length"))  # fmt: skip


def test_a_body_has_each_choice_whole() -> None:
    sink = BodySink(ChatShape("r", 1, "m"), token_ids=True)
    for token in TOKENS:
        sink.token(token, Side.DEVICE)
    body = sink.body(outcome("stop"))
    choices = ChatCompletion.model_validate(body).choices
    assert [(c.index, c.message.content, c.finish_reason) for c in choices] == [(0, "ab", "stop"), (1, "c", "length")]
    assert [choice["token_ids"] for choice in body["choices"]] == [[1, 2], [3]]


def test_a_stream_tells_of_each_chunk_whose_it_is_and_ends_each_choice_once() -> None:
    for shape in (ChatShape("r", 1, "m"), TextShape("r", 1, "m")):
        chunks = [shape.chunk(token, None, first=n == 0) for n, token in enumerate(TOKENS)] + [shape.end("stop")]
        choices = [choice for one in chunks for choice in one["choices"]]
        assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length", "stop"]
    chat = ChatShape("r", 1, "m")
    deltas = [
        ChatCompletionChunk.model_validate(chat.chunk(token, None, first=n == 0)).choices[0].delta
        for n, token in enumerate(TOKENS)
    ]
    assert [delta.role for delta in deltas] == ["assistant", "assistant", None, None]
