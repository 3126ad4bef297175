"""A server's bytes as events and tokens, its bill, and when it wants to be asked again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.endpoints.bill import FOUND_TOKENS, MAX_TPS, OWN_TOKENS, SPARE_TOKENS, Bill
from disco_daemon.endpoints.chunks import Reader
from disco_daemon.endpoints.retry import MAX_RETRY_S, retry_after_s
from disco_daemon.endpoints.stream import (
    MAX_ANSWER,
    MAX_ANSWER_S,
    MAX_JOINED_LINES,
    MAX_LINE,
    Endless,
    EventStream,
    Patience,
    most_bytes,
)
from disco_daemon.system.net import pointed_to
from disco_daemon.types import Delta, Finish, Token, Usage

documents = st.lists(
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.integers(-5, 5)), max_size=3), max_size=6
)


async def bytes_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(*parts: bytes, max_bytes: int = MAX_ANSWER) -> tuple[list[dict[str, Any]], bool]:
    stream = EventStream(bytes_of(*parts), Patience(5, 5), max_bytes)
    return [event async for event in stream.objects()], stream.done


# --- events -----------------------------------------------------------------------------------------------------------


@given(documents, st.sampled_from(["\n\n", "\n", "\r\n\r\n", "\n: ping\n\n"]), st.booleans(), st.integers(1, 40))
def test_events_are_read_however_they_are_written_and_cut(
    said: list[dict[str, Any]], between: str, lines: bool, size: int
) -> None:
    indent = 1 if lines else None
    written = ["\n".join(f"data: {line}" for line in json.dumps(one, indent=indent).split("\n")) for one in said]
    whole = "".join(one + between for one in written).encode() + b"data: [DONE]\n\n"
    cut = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert asyncio.run(read(*cut)) == (said, True)


async def test_an_end_without_done_is_told() -> None:
    assert await read(b'data: {"a":1}\n\n') == ([{"a": 1}], False)
    assert await read(b'data: {"a":1}') == ([{"a": 1}], False)
    assert await read(b'id: 5\nevent: x\ndata: {"a":1}\ndata:\n\ndata: [DONE]') == ([{"a": 1}], True)


@pytest.mark.parametrize(
    "garbage",
    [
        b'data: {"a":\n\ndata: {"a":1}\n\n',
        b'data: oops\ndata: {"a":1}\n',
        b'data: {"a":\ndata: [DONE]\n\n',
        b'data: {"a":',
        b"data: " + b'{"a":' * 100_000 + b"\n\n",
        b"data: [\n" * (MAX_JOINED_LINES + 2),
        b"data: [1]\n\n",
        b"x" * (MAX_LINE + 1),
    ],
)
async def test_what_is_no_json_is_an_error(garbage: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        await read(garbage)


async def test_too_many_bytes_are_no_answer() -> None:
    with pytest.raises(Endless, match="bytes"):
        await read(*[b'data: {"a":1}\n\n'] * 100, max_bytes=500)
    assert most_bytes(None) == MAX_ANSWER == most_bytes(1 << 60)
    assert most_bytes(6) < 2_000_000


async def test_a_server_that_dribbles_is_given_up_and_a_slow_reader_is_not_its_fault() -> None:
    async def dribbling() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.02)
            yield b'data: {"a":1}\n\n'

    patience, heard = Patience(0.3, 0.3, max_tokens=2), 0

    async def listen() -> None:
        nonlocal heard
        async for _ in EventStream(dribbling(), patience).objects():
            patience.renew(Token("x"))
            heard += 1
            await asyncio.sleep(0.04)  # a reader who takes longer than the server

    with pytest.raises(Endless, match=r"took more than 0\.9 s"):
        await listen()
    assert heard >= 5
    assert Patience(20, 15)._left_s == MAX_ANSWER_S


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_content_in_parts_is_text_and_thought() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, {"type": "reference"}]}
    said = {"type": "text", "text": "hello"}
    assert Reader().token({"delta": {"content": [thinking]}}) == Token("", 1, Delta(thought="hm"))
    both = Reader().token({"delta": {"role": "assistant", "content": [thinking, said, {"type": "image_url"}]}})
    assert both == Token("hello", 2, Delta(thought="hm"))
    assert Reader().token({"delta": {"content": [said, said]}}) == Token("hellohello")
    assert Reader().token({"delta": {"content": []}}) is None
    assert Reader().token({"delta": {"content": ["x", None]}}) == Token("x")
    for odd in (3, [3], [{"type": "text", "text": 3}]):
        with pytest.raises(TypeError):
            Reader().token({"delta": {"content": odd}})


# --- the bill ---------------------------------------------------------------------------------------------------------

BODY = {"messages": [{"role": "user", "content": "x" * 1000}]}


def billed(told: Any, *, said: str = "", max_tokens: int | None = None, after_s: float = 1.0, body: Any = BODY) -> Any:
    usage = Usage()
    bill = Bill(usage, body, max_tokens)
    if said:
        bill.count_token(Token(said), 1)
    bill.take(told, after_s)
    return usage, bill.odd


def test_a_bill_that_can_be_true_is_taken_as_it_is() -> None:
    told = {
        "prompt_tokens": 900, "completion_tokens": 700, "prompt_tokens_details": {"cached_tokens": 128},
        "completion_tokens_details": {"reasoning_tokens": 600},
    }  # fmt: skip
    assert billed(told, said="hello") == (Usage(772, 700, 0.0, 128, 600, told=True), "")


@pytest.mark.parametrize(
    "written", [{"prompt_tokens_details": {"cache_write_tokens": 90}}, {"cache_creation_input_tokens": 90}]
)
def test_what_was_written_into_a_cache_and_the_servers_own_cost_are_told_on(written: dict[str, Any]) -> None:
    usage, odd = billed({"prompt_tokens": 100, "completion_tokens": 5, "cost": 0.25, **written}, said="hello")
    assert (usage.cache_write_tokens, usage.cost, odd) == (90, 0.25, "")
    assert (usage.prompt_tokens, usage.cached_tokens) == (100, 0), "the ledger knows nothing of it"


@pytest.mark.parametrize("cost", [None, "0.1", True, -1, 1e9, float("nan"), [1]])
def test_a_cost_that_is_none_is_not_told_on(cost: Any) -> None:
    assert billed({"prompt_tokens": 9, "completion_tokens": 5, "cost": cost}, said="hello")[0].cost is None
    written = {"prompt_tokens": 9, "prompt_tokens_details": {"cache_write_tokens": 10**9}}
    assert billed(written)[0].cache_write_tokens == 9, "no more than the prompt has"
    assert billed({"prompt_tokens": 900.0})[0].prompt_tokens == 900


def test_what_was_thought_beside_the_answer_is_added() -> None:
    told = {
        "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 35,
        "completion_tokens_details": {"reasoning_tokens": 20},
    }  # fmt: skip
    assert billed(told)[0] == Usage(10, 25, 0.0, 0, 20, told=True)


def test_more_than_can_be_true_is_cut_to_what_can() -> None:
    usage, odd = billed({"prompt_tokens": 1 << 62, "completion_tokens": 1 << 62}, said="hello")
    assert "cannot be true" in odd
    assert 1000 < usage.prompt_tokens < 2000 + OWN_TOKENS
    assert usage.completion_tokens == 5 + MAX_TPS + SPARE_TOKENS
    usage, _ = billed({"completion_tokens": 1 << 62}, said="hello", max_tokens=100)
    assert usage.completion_tokens == 100 + SPARE_TOKENS
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}]}
    usage, odd = billed({"prompt_tokens": 100_000}, body=image)
    assert (usage.prompt_tokens, odd) == (100_000, "")
    assert billed({"prompt_tokens": 10**400}, body=image)[0].prompt_tokens < 2 * FOUND_TOKENS


@given(
    st.dictionaries(
        st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"]),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.booleans(), st.lists(st.integers())),
    )
    | st.lists(st.integers())
    | st.text()
)
def test_an_odd_bill_fails_no_answer_and_books_little(told: Any) -> None:
    usage, _ = billed(told, said="hello")
    assert 0 <= usage.prompt_tokens + usage.cached_tokens < 2000 + OWN_TOKENS
    assert 1 <= usage.completion_tokens <= 5 + MAX_TPS + SPARE_TOKENS


# --- when to come back ------------------------------------------------------------------------------------------------

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": formatdate(NOW + 90, usegmt=True)}, 90.0),
        ({"retry-after": formatdate(NOW - 90, usegmt=True)}, 0.0),
        # By the server's clock, however wrong it is, or ours.
        *(
            ({"retry-after": formatdate(NOW + off + 90, usegmt=True), "date": formatdate(NOW + off, usegmt=True)}, 90.0)
            for off in (-86_400, -600, 600, 86_400, 1_000_000_000)
        ),
        ({"retry-after": formatdate(NOW + 90, usegmt=True), "date": "soon"}, 90.0),
        ({"retry-after": "7", "date": formatdate(NOW + 600, usegmt=True)}, 7.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, MAX_RETRY_S),
        ({"retry-after": "1e400"}, MAX_RETRY_S),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "999999999999"}, MAX_RETRY_S),
        ({"retry-after": "Mon, 99 Foo 9999999 00:00:00 GMT"}, None),
        ({"retry-after": "soon"}, None),
    ],
)
def test_retry_after_is_understood_in_each_form(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, NOW) == seconds


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("http://other:8080/v1?key=x#y", "http://other:8080/v1"),
        ("//user:pass@other/v1", "https://other/v1"),
        ("/elsewhere", "https://api.example/elsewhere"),
        ("", "somewhere else"),
        ("http://[::1", "somewhere else"),
        ("data:text/html,x", "somewhere else"),
    ],
)
def test_where_a_redirect_leads_is_shown_without_secrets(location: str, shown: str) -> None:
    assert pointed_to("https://api.example/v1/chat/completions", location) == shown


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize(
    ("told", "stop"), [("END", "END"), (None, None), (151645, None), (True, None), (["END"], None), ({}, None)]
)
def test_the_stop_string_that_a_server_names_is_a_part_of_the_end(name: str, told: object, stop: str | None) -> None:
    """A number is the token that ended it: vLLM and SGLang tell that in the same field."""
    reader = Reader()
    reader.token({"delta": {"content": "Hi"}})
    reader.token({"delta": {}, "finish_reason": "stop", name: told})
    assert reader.ends(is_done=True) == [Finish("stop", stop=stop)]
    cut = Reader()
    cut.token({"delta": {"content": "Hi"}, "finish_reason": "length", name: told})
    assert cut.ends(is_done=True) == [Finish("length")]
