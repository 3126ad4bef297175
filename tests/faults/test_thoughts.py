"""Models that think unseen for longer than a first token may take: signs of life are waited with, a dead server is not.

The times of `Patience` are read off a clock that a test moves; the rest is a scripted server on a raw socket, whose
signs come some ten times as often as they would have to.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.endpoints.base import Controls
from disco_daemon.endpoints.hedge import Hedge
from disco_daemon.endpoints.server import Server
from disco_daemon.endpoints.stream import Patience
from disco_daemon.endpoints.thoughts import LEAST_S, MAX_EFFORTS, Thoughts
from disco_daemon.errors import EndpointError
from disco_daemon.estimation.silence import BEYOND, ENOUGH
from disco_daemon.types import Finish, GenerationRequest, Token, Usage
from tests.fixtures.raw import serving

FIRST_S, TOKEN_S, ALIVE_S = 20.0, 15.0, 100.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def event(delta: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode() + b"\n\n"


SIGNS = {
    "OpenRouter's comment": b": OPENROUTER PROCESSING\n\n",
    "an empty comment": b":\n\n",
    "a ping event": b"event: ping\ndata: {}\n\n",
    "a role": event({"role": "assistant", "content": ""}),
    "a role with null": event({"role": "assistant", "content": None, "refusal": None}),
    "an empty delta": event({}),
    "no choices": b'data: {"choices":[]}\n\n',
    "usage": b'data: {"choices":[],"usage":{"completion_tokens":7,"prompt_tokens":3}}\n\n',
    "an empty thought": event({"reasoning_content": ""}),
    "an empty line": b"\n",
    "an id": b"id: 7\n\n",
    "a retry": b"retry: 1000\n\n",
}


def asked(effort: str | None = None, **more: Any) -> GenerationRequest:
    extra = more if effort is None else {"reasoning_effort": effort, **more}
    return GenerationRequest("r", ({"role": "user", "content": "x"},), extra=extra)


# --- the clock ------------------------------------------------------------------------------------------------------


class Waiting:
    """A server that is waited for, by a clock that the test moves; `gone` once it has been given up."""

    def __init__(self, *, thinks: bool = False, alive_s: float = ALIVE_S) -> None:
        self.now = 0.0
        self.patience = Patience(FIRST_S, TOKEN_S, alive_s=alive_s, thinks=thinks)
        self._began = began = self.patience._began
        self.patience._now = lambda: began + self.now

    def until(self) -> float:
        return self.patience.until() - self._began

    def hears(self, what: Callable[[Patience], None], after_s: float) -> bool:
        """Whether what comes after so many s comes in time."""
        if self.now + after_s > self.until():
            return False
        self.now += after_s
        what(self.patience)
        return True


def token(patience: Patience) -> None:
    patience.renew(Token("x"))


async def test_a_server_without_a_sign_of_life_is_given_up_as_ever() -> None:
    assert Waiting().until() == pytest.approx(FIRST_S)
    assert Waiting(thinks=True).until() == pytest.approx(FIRST_S)


async def test_signs_of_life_are_waited_with_up_to_the_limit() -> None:
    it = Waiting()
    for _ in range(9):
        assert it.hears(Patience.sign, 11)
    assert it.now == pytest.approx(99)
    assert it.until() == pytest.approx(ALIVE_S), "nothing waits for ever"


async def test_a_silence_behind_a_sign_is_a_thought_only_where_one_is_to_be_expected() -> None:
    for thinks, until in ((False, 1 + FIRST_S), (True, ALIVE_S)):
        it = Waiting(thinks=thinks)
        assert it.hears(Patience.sign, 1)
        assert it.until() == pytest.approx(until)


async def test_between_tokens_signs_count_only_for_a_server_that_thinks() -> None:
    for thinks, until in ((False, 5 + TOKEN_S), (True, 5 + ALIVE_S)):
        it = Waiting(thinks=thinks)
        assert it.hears(token, 5)
        assert it.hears(Patience.sign, 10)
        assert it.until() == pytest.approx(until)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 60)), max_size=40), st.booleans(), st.floats(0, 300))
def test_no_wait_is_longer_than_the_limit_and_none_shorter_than_ever(
    script: list[tuple[bool, float]], thinks: bool, alive_s: float
) -> None:
    async def run() -> None:
        it, last = Waiting(thinks=thinks, alive_s=alive_s), 0.0
        least = FIRST_S
        for is_token, after_s in script:
            assert last + least <= it.until() + 1e-6
            assert it.until() <= last + max(least, alive_s) + 1e-6
            if not it.hears(token if is_token else Patience.sign, after_s):
                return
            if is_token:
                last, least = it.now, TOKEN_S

    asyncio.run(run())


# --- what is learned ----------------------------------------------------------------------------------------------


def test_the_limit_follows_what_this_effort_has_taken() -> None:
    thoughts = Thoughts(FIRST_S, TOKEN_S, 600.0)
    assert thoughts.limit_s(asked()) == 600.0, "nothing is known"
    for _ in range(ENOUGH):
        thoughts.add(asked("low"), (2.0, False), Usage())
        thoughts.add(asked("high"), (90.0, False), Usage(reasoning_tokens=500))
    assert thoughts.limit_s(asked("low")) == LEAST_S
    assert thoughts.limit_s(asked("high")) == BEYOND * 90.0
    assert thoughts.limit_s(asked("medium")) == 600.0
    assert Thoughts(FIRST_S, TOKEN_S, 30.0).limit_s(asked()) == 30.0


@pytest.mark.parametrize(
    ("extra", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"enable_thinking": True}, True),
        ({"think": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_who_asks_for_a_thought_may_get_a_silent_one(extra: dict[str, Any], thinks: bool) -> None:
    assert Thoughts(FIRST_S, TOKEN_S, 600.0).thinks(asked(**extra)) is thinks


def test_a_model_that_has_thought_unseen_may_do_so_again_and_one_that_shows_its_thoughts_need_not() -> None:
    thoughts, told = Thoughts(FIRST_S, TOKEN_S, 600.0), Usage(reasoning_tokens=50)
    thoughts.add(asked(), (30.0, False), told)
    assert thoughts.thinks(asked())
    thoughts.add(asked(), (0.5, True), told)
    assert not thoughts.thinks(asked())


def test_whatever_efforts_clients_name_few_are_kept() -> None:
    thoughts = Thoughts(FIRST_S, TOKEN_S, 600.0)
    for i in range(100):
        thoughts.add(asked(f"effort {i}"), (1.0, False), Usage())
    assert len(thoughts._seen) == MAX_EFFORTS


# --- on the wire ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def saying(script: Callable[[], AsyncIterator[bytes]], **config: Any) -> AsyncIterator[tuple[Server, list[int]]]:
    """A server that says what the script yields, and how often it was asked."""
    n_asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        n_asked.append(1)
        async for part in script():
            writer.write(part)
            await writer.drain()

    async with serving(serve, stream_usage=False, **config) as server:
        yield server, n_asked


async def heard(server: Server, request: GenerationRequest | None = None) -> str:
    async with aclosing(server.ask(request or asked(), Usage())) as events:
        return "".join([one.text async for one in events if isinstance(one, Token)])


async def test_a_thought_with_any_sign_of_life_is_heard_out() -> None:
    async def hear(sign: bytes) -> None:
        async def thinking() -> AsyncIterator[bytes]:
            yield HEAD
            for _ in range(15):
                yield sign
                await asyncio.sleep(0.1)
            yield TEXT + END

        async with saying(thinking, first_token_timeout_s=1.0, thinking_timeout_s=60.0) as (server, n_asked):
            assert await heard(server) == "hi", sign
            assert len(n_asked) == 1

    async with asyncio.TaskGroup() as group:
        for sign in SIGNS.values():
            group.create_task(hear(sign))


async def test_a_thought_that_is_silent_behind_its_first_chunk_is_heard_out_where_it_was_asked_for() -> None:
    async def thinking() -> AsyncIterator[bytes]:
        yield HEAD + SIGNS["a role"]
        await asyncio.sleep(0.6)
        yield TEXT + END

    async with saying(thinking, first_token_timeout_s=0.3, thinking_timeout_s=60.0) as (server, _):
        assert await heard(server, asked("high")) == "hi"
        with pytest.raises(EndpointError) as e:
            await heard(server)
        assert e.value.reason == "timeout"


@pytest.mark.parametrize("effort", [None, "high"])
async def test_signs_of_life_without_end_are_given_up(effort: str | None) -> None:
    async def dreaming() -> AsyncIterator[bytes]:
        yield HEAD
        while True:
            yield SIGNS["OpenRouter's comment"]
            await asyncio.sleep(0.02)

    async with saying(dreaming, first_token_timeout_s=0.2, thinking_timeout_s=0.5) as (server, _):
        with pytest.raises(EndpointError) as e:
            await asyncio.wait_for(heard(server, asked(effort)), 30)
        assert e.value.reason == "timeout"


@pytest.mark.parametrize("effort", [None, "high"])
async def test_behind_a_whole_answer_signs_of_life_are_not_waited_with(
    effort: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bill may come; whoever thinks or not has nothing more to say."""
    monkeypatch.setattr("disco_daemon.endpoints.server_answer.USAGE_TIMEOUT_S", 0.1)

    async def lingering() -> AsyncIterator[bytes]:
        yield HEAD + TEXT + END.removesuffix(b"data: [DONE]\n\n")
        while True:
            yield SIGNS["OpenRouter's comment"]
            await asyncio.sleep(0.02)

    async with saying(lingering, thinking_timeout_s=60.0) as (server, _):
        assert await asyncio.wait_for(heard(server, asked(effort)), 10) == "hi"


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_server_that_says_nothing_is_given_up_after_its_first_time_out(begun: bytes) -> None:
    async def dead() -> AsyncIterator[bytes]:
        yield begun
        await asyncio.Event().wait()

    async with saying(dead, first_token_timeout_s=0.2, thinking_timeout_s=math.inf) as (server, _):
        with pytest.raises(EndpointError) as e:
            await asyncio.wait_for(heard(server, asked("high")), 30)
        assert e.value.reason == "timeout"


async def test_what_thinks_is_not_asked_a_second_time() -> None:
    """Both thoughts would be paid for."""

    async def thinking() -> AsyncIterator[bytes]:
        yield HEAD + SIGNS["a role"]
        await asyncio.sleep(0.3)
        yield TEXT + END

    async with saying(thinking, thinking_timeout_s=60.0) as (server, n_asked):
        for request, n in ((asked("high"), 1), (asked(), 2)):
            n_asked.clear()
            controls = Controls(hedge=Hedge(0.05, lambda: True))
            async with aclosing(server.generate(request, Usage(), controls)) as events:
                assert isinstance([one async for one in events][-1], Finish)
            assert len(n_asked) == n
