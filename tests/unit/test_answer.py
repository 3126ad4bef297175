from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.answer import (
    MAX_HANDOFFS,
    TRANSITIONS,
    Answer,
    Arrived,
    Begin,
    Broke,
    Cancel,
    Complete,
    Deliver,
    Due,
    Effect,
    Ended,
    Event,
    Fail,
    IllegalEvent,
    SetTimer,
    Start,
    State,
)
from disco_daemon.errors import EndpointError, Unavailable
from disco_daemon.types import BOTH, Continuation, Finish, Plan, Side, Token

DEVICE, SERVER = Side.DEVICE, Side.SERVER
INF, RACE = math.inf, Plan(0, 0)
NONE, GUARDED, EXACT = Continuation
OVER = (State.DONE, State.FAILED)


def snapshot(answer: Answer) -> dict[str, Any]:
    """A deep copy to compare with: an answer's seam and errors have no equality of their own."""
    found = {f.name: getattr(answer, f.name) for f in dataclasses.fields(answer)}
    copied = {k: type(v)(v) if isinstance(v, list | set | dict) else v for k, v in found.items()}
    return copied | {"_seam": None if answer._seam is None else dict(vars(answer._seam))}


class Watch:
    """Carries out an answer's effects as the conductor does, and checks every promise on the way."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.running: set[Side] = set()
        self.pending: set[Side] = set()
        self.shown = ""
        self.ends: list[Effect] = []

    def on(self, event: Event) -> list[Effect]:
        answer, before, was = self.answer, snapshot(self.answer), self.answer.state
        allowed = TRANSITIONS[was].get(type(event))
        if allowed is None:
            with pytest.raises(IllegalEvent):
                answer.on(event)
            assert snapshot(answer) == before
            return []
        heard = isinstance(event, Begin) or event.side in (self.pending if isinstance(event, Due) else self.running)
        effects = answer.on(event)
        assert answer.state in allowed
        if not heard:
            assert effects == []
            assert snapshot(answer) == before
            return []
        if isinstance(event, Ended | Broke):
            self.running.discard(event.side)
        for effect in effects:
            self._carry_out(effect, event, was)
        self._check(was)
        return effects

    def _carry_out(self, effect: Effect, event: Event, was: State) -> None:
        assert not self.ends, "nothing may follow the end"
        match effect:
            case Start(side=side, answer_so_far=so_far):
                assert side in self.answer.available
                assert side not in self.running, "a side runs at most once"
                assert so_far == self.shown
                self.pending.discard(side)
                self.running.add(side)
            case SetTimer(side=side, delay_s=delay_s):
                assert side in self.answer.available
                assert 0 < delay_s < INF
                self.pending.add(side)
            case Cancel(side=side):
                assert side in self.running | self.pending, "only what was started is cancelled"
                self.running.discard(side)
                self.pending.discard(side)
            case Deliver(token=token):
                assert isinstance(event, Arrived | Ended)
                assert not {event.side.other} & (self.running | self.pending), "the loser goes first"
                assert event.side is self.answer.source
                assert was is State.HANDOFF or (isinstance(event, Arrived) and token is event.token)
                self.shown += token.text
            case Complete() | Fail():
                self.ends.append(effect)

    def _check(self, was: State) -> None:
        answer, alive = self.answer, self.running | self.pending
        assert answer.text == self.shown
        assert answer.handoffs <= MAX_HANDOFFS
        assert len(self.ends) == (answer.state in OVER)
        assert bool(alive) == (answer.state not in OVER), "an answer waits for somebody until it is over"
        assert answer.state in (State.PLANNED, State.RACING, *OVER) or len(alive) == 1


texts = st.sampled_from(["", "a", "Once", "Once upon a time", ", there", "Once upon a time, there", " was"])
tokens = st.builds(Token, texts, st.integers(0, 2), st.sampled_from([None, None, None, {"tool_calls": [{"index": 0}]}]))


def events(side: Side) -> st.SearchStrategy[Event]:
    arrived = st.builds(Arrived, st.just(side), tokens)
    ended = st.builds(Ended, st.just(side), st.builds(Finish, st.sampled_from(["stop", "length"])))
    reasons = st.sampled_from(["engine_gone", "stalled"] if side is DEVICE else ["timeout", "cut"])
    error = st.builds(EndpointError, st.just(side), reasons, st.just("broken"), your_fault=st.booleans())
    broke = st.builds(Broke, st.just(side), error)
    return st.one_of(arrived, arrived, broke, ended, st.builds(Due, st.just(side)))


any_event = st.one_of(events(DEVICE), events(SERVER), events(DEVICE), events(SERVER), st.just(Begin()))
delays = st.sampled_from([0.0, 0.5, 1.0, INF])
plans, limits = st.builds(Plan, delays, delays), st.none() | st.integers(1, 4)
continuations = st.fixed_dictionaries(dict.fromkeys(Side, st.sampled_from(Continuation)))
available = st.frozensets(st.sampled_from(Side)) | st.just(BOTH)
answers = st.builds(Answer, plans, available, limits, continuations, st.booleans())


@settings(max_examples=1500)
@given(answers, st.booleans(), st.lists(any_event, max_size=30))
def test_any_interleaving_keeps_every_promise(answer: Answer, begun: bool, script: Sequence[Event]) -> None:
    watch = Watch(answer)
    for event in ([Begin()] if begun else []) + list(script):
        watch.on(event)


guarded: dict[str, Any] = {"continuation": {DEVICE: EXACT, SERVER: GUARDED}}


def gone() -> Broke:
    return broke(DEVICE, "engine_gone")


def broke(side: Side, reason: str = "cut", *, your_fault: bool = False) -> Broke:
    return Broke(side, EndpointError(side, reason, f"{side} {reason}", your_fault=your_fault))


def said(side: Side, text: str, n: int = 1) -> Arrived:
    return Arrived(side, Token(text, n))


def played(*script: Event, plan: Plan = RACE, **more: Any) -> tuple[Watch, list[Effect]]:
    """An answer after `script`, and the effects of its last event."""
    watch = Watch(Answer(plan, more.pop("available", BOTH), **more))
    effects: list[Effect] = []
    for event in (Begin(), *script):
        effects = watch.on(event)
    return watch, effects


def test_the_race_is_won_by_the_first_token_and_the_loser_is_cancelled_before_it_is_shown() -> None:
    watch, effects = played(said(SERVER, "Hi"))
    assert effects == [Cancel(DEVICE), Deliver(Token("Hi"))]
    assert watch.answer.winner is SERVER
    assert watch.on(said(DEVICE, "Hello")) == []
    assert watch.on(Ended(SERVER, Finish("stop"))) == [Complete("stop")]


def test_a_race_starts_both_at_once() -> None:
    assert played()[1] == [Start(DEVICE), Start(SERVER)]


def test_the_delay_policy_starts_the_device_only_when_it_is_due() -> None:
    watch, effects = played(plan=Plan(0.3, 0))
    assert effects == [Start(SERVER), SetTimer(DEVICE, 0.3)]
    assert watch.on(Due(DEVICE)) == [Start(DEVICE)]
    assert watch.on(Due(DEVICE)) == []


def test_the_delay_policy_starts_the_device_at_once_when_the_server_fails() -> None:
    assert played(broke(SERVER), plan=Plan(0.3, 0))[1] == [Start(DEVICE)]


def test_a_failure_before_the_first_token_starts_the_other_side_even_if_the_plan_did_not_use_it() -> None:
    assert played(gone(), plan=Plan(0, INF))[1] == [Start(SERVER)]
    assert played(broke(SERVER), plan=Plan(INF, 0))[1] == [Start(DEVICE)]


def test_the_only_side_available_starts_at_once_even_if_the_plan_did_not_use_it() -> None:
    assert played(plan=Plan(INF, 0), available=frozenset({DEVICE}))[1] == [Start(DEVICE)]


def test_without_any_side_the_answer_fails_as_unavailable() -> None:
    (effect,) = played(available=frozenset())[1]
    assert isinstance(getattr(effect, "error", None), Unavailable)


def test_a_device_alone_that_dies_in_mid_answer_gets_no_second_chance() -> None:
    assert isinstance(played(said(DEVICE, "Hi"), gone(), available=frozenset({DEVICE}))[1][-1], Fail)


def test_when_the_device_dies_the_server_that_lost_the_race_carries_on() -> None:
    watch, effects = played(said(DEVICE, "Hi"), gone())
    assert effects == [Start(SERVER, "Hi")]
    assert watch.on(said(SERVER, " there")) == [Deliver(Token(" there"))]
    assert (watch.shown, watch.answer.handoffs, watch.answer.winner) == ("Hi there", 1, DEVICE)
    assert watch.answer.tokens == {DEVICE: 1, SERVER: 1}


def test_when_the_server_cannot_continue_a_died_device_it_is_restarted_once() -> None:
    watch, effects = played(said(DEVICE, "Hi"), gone(), broke(SERVER))
    assert effects == [Start(DEVICE, "Hi")]
    assert watch.on(said(DEVICE, " you")) == [Deliver(Token(" you"))]
    assert isinstance(watch.on(gone())[-1], Fail)


def test_a_device_that_died_before_the_first_token_is_not_tried_again() -> None:
    _, effects = played(gone(), said(SERVER, "Hi"), broke(SERVER))
    assert isinstance(effects[-1], Fail), "the request that killed the engine would kill it again"


def test_a_server_that_cannot_continue_is_not_asked_to_and_the_device_is_restarted_once() -> None:
    continuation = {DEVICE: EXACT, SERVER: NONE}
    for again in (gone(), broke(DEVICE, "stalled")):
        watch, effects = played(said(DEVICE, "Hi"), gone(), continuation=continuation)
        assert effects == [Start(DEVICE, "Hi")]
        assert isinstance(watch.on(again)[-1], Fail)
    assert isinstance(played(said(DEVICE, "Hi"), broke(DEVICE, "stalled"), continuation=continuation)[1][-1], Fail)
    assert played(gone(), plan=Plan(0, INF), continuation=continuation)[1] == [Start(SERVER)], "nothing to continue"


def test_a_side_that_is_not_configured_need_not_say_how_it_continues() -> None:
    alone: dict[str, Any] = {"available": frozenset({DEVICE}), "continuation": {DEVICE: EXACT}}
    assert isinstance(played(said(DEVICE, "Hi"), gone(), **alone)[1][-1], Fail)


def test_an_answer_that_may_not_be_shared_is_not_continued_by_the_other_side() -> None:
    assert isinstance(played(said(DEVICE, "Hi"), gone(), joinable=False)[1][-1], Fail)
    assert played(gone(), plan=Plan(0, INF), joinable=False)[1] == [Start(SERVER)]


def test_a_target_that_continues_exactly_may_repeat_itself() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone())
    assert watch.on(said(SERVER, "Once upon a time")) == [Deliver(Token("Once upon a time"))]


def test_a_target_that_starts_the_answer_again_is_swallowed_until_it_says_something_new() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone(), **guarded)
    assert watch.on(said(SERVER, "Once upon")) == []
    assert watch.on(said(SERVER, " a time, there")) == [Deliver(Token(", there"))]
    assert watch.shown == "Once upon a time, there"


def test_a_target_that_tells_another_story_is_dropped_and_the_device_restarted() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time, there"), gone(), **guarded)
    assert watch.on(said(SERVER, "Once upon a time I")) == [Cancel(SERVER), Start(DEVICE, "Once upon a time, there")]
    assert watch.on(said(SERVER, " was")) == []


def test_the_end_of_a_handoff_gives_out_what_the_seam_held_as_the_targets_text() -> None:
    watch, _ = played(said(DEVICE, "Once upon a time"), gone(), said(SERVER, "Once", 3), **guarded)
    assert watch.on(Ended(SERVER, Finish("stop"))) == [Deliver(Token("Once", 3)), Complete("stop")]
    assert watch.answer.source is SERVER, "only the source's tokens are delivered"


def test_text_that_the_seam_held_counts_with_all_its_tokens() -> None:
    script = (said(DEVICE, "Once upon a time", 4), gone(), said(SERVER, "On", 3), said(SERVER, " top", 2))
    watch, _ = played(*script, **guarded)
    assert watch.shown == "Once upon a timeOn top"
    assert watch.answer.tokens == {DEVICE: 4, SERVER: 5}


def test_a_failure_when_all_allowed_tokens_are_delivered_completes_with_length() -> None:
    _, effects = played(said(DEVICE, "Hi"), said(DEVICE, " you"), gone(), max_tokens=2)
    assert effects == [Complete("length")]


def test_a_tool_call_is_never_continued_by_the_other_side() -> None:
    call = Token("", 1, {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]})
    assert isinstance(played(Arrived(SERVER, call), broke(SERVER))[1][-1], Fail)


def test_an_answer_moves_at_most_max_handoffs_times() -> None:
    watch, _ = played(said(DEVICE, "Hi"), gone(), said(SERVER, " a"), broke(SERVER), said(DEVICE, " b"))
    assert isinstance(watch.on(broke(DEVICE, "stalled"))[-1], Fail)


def test_the_error_shown_is_the_requests_own_fault_if_there_is_one_else_the_first() -> None:
    own = broke(SERVER, "context_length_exceeded", your_fault=True)
    assert played(broke(DEVICE), own)[1] == [Fail(own.error)]
    first = broke(SERVER)
    assert played(first, gone())[1] == [Fail(first.error)]
