"""When each token of an answer came and was shown: what is kept of it, how long, and what the daemon tells."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.control import trace_route as api
from disco_daemon.conductor import Conductor
from disco_daemon.conductor.traces import LATEST, MAX_TRACES, Traces
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.delivery.trace import MAX_TRACED, Trace
from disco_daemon.errors import RequestError
from disco_daemon.types import Attempt, Caller, Delivery, Outcome, Plan, Side, Token, Usage
from disco_tui.draw import token_timeline

BEGAN = 100.0  # of every answer, on the buffer's clock, s
PACE = 2.0


def outcome(request_id: str = "req-1") -> Outcome:
    won = Attempt(Side.DEVICE, "tiny", 0.0, 0.5, censored=False, usage=Usage(12, 3, 0.75))
    return Outcome(
        request_id, 1_700_000_000.5, "disco", "race", Plan(0.0, math.inf), 12, winner=Side.DEVICE,
        finish_reason="stop", error=None, ttft_s=0.5, duration_s=1.98765, handoffs=0, tokens={Side.DEVICE: 3},
        attempts=(won,), cost_usd=0.0, energy_j=1.0,
    )  # fmt: skip


def buffered(puts: list[tuple[float, int]], releases: list[float]) -> TokenBuffer:
    """A paced buffer that was given (s, tokens) and asked at these times, s; both counted from BEGAN on."""
    buffer = TokenBuffer(Delivery.PACED, PACE)
    for at, n in puts:
        for _ in range(n):
            buffer.put(Token("word "), BEGAN + at)
    for at in releases:
        buffer.release(BEGAN + at)
    return buffer


def traced(buffer: TokenBuffer, request_id: str = "req-1") -> Trace:
    return Trace.of(outcome(request_id), buffer, BEGAN, pace_tps=PACE, expected_ttft_s=1.0)


# --- one answer -------------------------------------------------------------------------------------------------------


def test_a_trace_tells_when_each_token_came_and_when_it_was_shown() -> None:
    told = traced(buffered([(0.5, 2), (0.7, 1)], [1.0, 1.5])).to_json()
    assert told["put_s"] == [0.5, 0.5, 0.7]
    assert told["released_s"] == [0.5, 1.0, 1.5]
    assert (told["put"], told["released"], told["cut"]) == (3, 3, False)
    assert (told["pace_tps"], told["expected_ttft_s"], told["duration_s"]) == (PACE, 1.0, 1.988)
    assert told["disco"] == outcome().to_json()


def test_times_are_told_in_ms_and_in_no_more_digits() -> None:
    told = traced(buffered([(0.1234567, 1), (3.3333333, 1)], [])).to_json()
    assert json.dumps(told["put_s"]) == "[0.123, 3.333]"


def test_what_its_reader_did_not_wait_for_is_put_and_never_released() -> None:
    told = traced(buffered([(0.5, 3)], [])).to_json()
    assert (told["put"], told["released"]) == (3, 1)
    assert told["released_s"] == [0.5]


def test_an_answer_without_a_token_has_a_trace_too() -> None:
    told = traced(buffered([], [])).to_json()
    assert told["put_s"] == told["released_s"] == []


def test_of_a_very_long_answer_the_beginning_is_kept_and_it_is_said() -> None:
    buffer = TokenBuffer(Delivery.OFF, PACE)
    for i in range(MAX_TRACED + 5):
        buffer.put(Token("a "), BEGAN + i)
    trace = traced(buffer)
    told = trace.to_json()
    assert len(told["put_s"]) == len(told["released_s"]) == MAX_TRACED
    assert (told["put"], told["cut"]) == (MAX_TRACED + 5, True)
    assert trace.put_s.nbytes + trace.released_s.nbytes == 8 * MAX_TRACED, "bounded memory"
    assert told["put_s"][-1] == MAX_TRACED - 1


def test_what_was_taken_back_in_a_handoff_is_not_told() -> None:
    buffer = buffered([(0.5, 2)], [])
    buffer.mark()
    buffer.put(Token("thrown away"), BEGAN + 0.6)
    buffer.retract()
    buffer.put(Token("joined"), BEGAN + 0.9)
    assert traced(buffer).to_json()["put_s"] == [0.5, 0.5, 0.9]


# --- the latest ones --------------------------------------------------------------------------------------------------


def test_only_the_latest_traces_are_kept() -> None:
    traces = Traces(size=3)
    for i in range(5):
        traces.keep(traced(buffered([], []), f"req-{i}"))
    assert len(traces) == 3
    assert [traces.find(f"req-{i}") is not None for i in range(5)] == [False, False, True, True, True]
    latest = traces.find(LATEST)
    assert latest is not None
    assert latest.outcome.request_id == "req-4"
    assert Traces().find(LATEST) is None


class Played:
    """The part of a conductor that the API asks for a trace."""

    def __init__(self) -> None:
        self.context = self.in_flight = self
        self.traces = Traces()

    def is_answering(self, request_id: str, caller: Caller | None) -> bool:
        return request_id == "req-running" and caller is None


@pytest.mark.parametrize(
    ("request_id", "message"),
    [("req-old", f"the last {MAX_TRACES} answers"), ("req-running", "still running"), (LATEST, "No answer has been")],
)
def test_a_trace_that_is_not_kept_is_not_found_and_it_is_said_why(request_id: str, message: str) -> None:
    conductor = cast(Conductor, Played())
    with pytest.raises(RequestError, match=message) as raised:
        api.document(conductor, request_id)
    assert (raised.value.status, raised.value.code) == (404, api.GONE)


def test_a_key_finds_the_traces_of_its_own_answers_alone() -> None:
    conductor = cast(Conductor, Played())
    anna, bert = Caller("anna", "1"), Caller("bert", "2")
    for request_id, key in (("req-a", "anna"), ("req-b", "bert"), ("req-o", "")):
        trace = traced(buffered([], []), request_id)
        conductor.context.traces.keep(replace(trace, outcome=replace(trace.outcome, key=key)))
    seen = {
        (caller, request_id): api.document(conductor, request_id, caller)["request_id"]
        for caller, request_id in ((anna, "req-a"), (bert, "req-b"), (anna, LATEST), (bert, LATEST), (None, LATEST))
    }
    assert list(seen.values()) == ["req-a", "req-b", "req-a", "req-b", "req-o"]
    for request_id in ("req-b", "req-o", "req-running"):
        with pytest.raises(RequestError, match="No trace of") as raised:
            api.document(conductor, request_id, anna)
        assert raised.value.status == 404
    with pytest.raises(RequestError, match="No answer has been given to the key 'carl'"):
        api.document(conductor, LATEST, Caller("carl", "3"))


# --- whatever happens -------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.floats(0, 2), st.sampled_from(["put", "put", "put", "release", "mark", "retract", "adopt", "off", "paced"]),
        st.sampled_from(["a ", "👩", "\u200d", "", "क्"]), st.integers(0, 3),
    ),
    max_size=60,
)  # fmt: skip


def played(script: list[tuple[float, str, str, int]]) -> TokenBuffer:
    """A buffer after steps of (wait in s, what to do, text, tokens)."""
    buffer, now = TokenBuffer(Delivery.RESERVE, PACE), BEGAN
    for wait, what, text, n in script:
        now += wait
        if what == "put":
            buffer.put(Token(text, n), now)
        elif what == "release":
            buffer.release(now)
        elif what in ("off", "paced"):
            buffer.set_delivery(Delivery(what), now)
        else:
            getattr(buffer, what)()
    return buffer


@given(script=steps, whole=st.booleans())
def test_no_token_is_shown_before_it_came_and_the_level_is_never_below_nothing(
    script: list[tuple[float, str, str, int]], whole: bool
) -> None:
    buffer = played(script)
    if whole:
        buffer.flush(BEGAN + 1000.0)
    told = traced(buffer).to_json()
    put, released = told["put_s"], told["released_s"]
    assert put == sorted(put)
    assert released == sorted(released)
    assert len(put) >= len(released)
    assert all(came <= shown for came, shown in zip(put, released, strict=False))
    levels = token_timeline.levels(token_timeline.TokenTimes.of(told))
    assert all(level >= 0 for _, level in levels)
    assert [t for t, _ in levels] == sorted({*put, *released})
    if levels:
        assert levels[-1][1] == len(put) - len(released)
