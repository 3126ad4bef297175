"""Stop strings of an answer that two sides write: whoever writes which part of it, they hold as within one side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.answer import (
    Answer,
    Arrived,
    Begin,
    Complete,
    Deliver,
    Effect,
    Ended,
    Event,
    Feed,
    Followed,
    Move,
    Start,
)
from disco_daemon.api.anthropic.messages_shape import MessagesShape
from disco_daemon.api.ollama.ollama_shape import ChatLines
from disco_daemon.api.openai.shapes import ChatShape, TextShape
from disco_daemon.api.responses.responses_request import to_chat
from disco_daemon.api.responses.responses_shape import ResponsesShape
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.types import BOTH, Delivery, Finish, Side, Token
from tests.fixtures.answer import PACE_TPS, RACE, STEP_S, Watch, broke
from tests.unit.api.test_openai_format import outcome

DEVICE, SERVER = Side.DEVICE, Side.SERVER
Stops = tuple[str, ...]


def first_stop(text: str, stops: Stops) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first, and itself: the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@dataclass
class Played:
    """Two sides that write `text`, each from where the answer is when it is started; one that `obeys` stops itself."""

    text: str
    stops: Stops
    obeys: dict[Side, bool]
    watch: Watch
    at: dict[Side, int] = field(default_factory=dict)  # characters of the text that a side has said, or was given
    made: dict[Side, int] = field(default_factory=dict)  # that it has made, of which it may hold back the last ones
    begun: dict[Side, int] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)

    def on(self, event: Event, after_s: float = 0.0) -> None:
        hit = first_stop(self.text, self.stops)
        self._note(self.watch.on(event, after_s))
        expected = self.text if hit is None else self.text[: hit[0]]
        assert expected.startswith(self.watch.shown), "no beginning of a stop string is ever shown"

    def _note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(side=side, held=False) | Feed(side=side, go=True):
                    self.at[side] = self.made[side] = self.begun[side] = len(self.watch.given[side])
                case Deliver(token=token):
                    self.tokens.append(token)

    def say(self, side: Side, n: int) -> None:
        """Let a side say the next `n` characters, or end."""
        if side not in self.at or side in self.watch.held or side not in self.watch.running:
            return
        begun, at = self.begun[side], self.at[side]
        end = self.made[side] = min(len(self.text), self.made[side] + n)
        hit = first_stop(self.text[begun:end], self.stops) if self.obeys[side] else None
        if hit is not None:
            said = self.text[at : max(at, begun + hit[0])]
        elif self.obeys[side] and end < len(self.text):
            own = self.text[begun:end]
            n_held = max((n for s in self.stops for n in range(1, len(s)) if own.endswith(s[:n])), default=0)
            said = self.text[at : max(at, end - n_held)]
        else:
            said = self.text[at:end]
        self.at[side] = at + len(said)
        if said:
            ids = tuple(range(at, at + len(said))) if side is DEVICE and self.obeys[side] else ()
            self.on(Arrived(side, Token(said, len(said) if ids else 1, ids=ids)))
        if side in self.watch.running and (hit is not None or end == len(self.text)):
            self.on(Ended(side, Finish("stop", stop=None if hit is None else hit[1])))

    def finish(self) -> None:
        while not self.watch.ends:
            for side in Side:
                self.on(Followed(side))
                self.say(side, 3)
            self.on(Move(DEVICE, "stall"), STEP_S)


moves = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(Side), st.integers(1, 6)),
    st.tuples(st.just("move"), st.sampled_from(Side), st.sampled_from(["stall", "cost"])),
    st.tuples(st.just("follow"), st.sampled_from(Side), st.just(0)),
)


def play(text: str, stops: Stops, source: Side, n_first: int, steps: list[Any], **more: Any) -> Played:
    obeys = more.pop("obeys", dict.fromkeys(Side, True))
    delivery, follows, breaks = more.pop("delivery", Delivery.OFF), more.pop("follows", False), more.pop("breaks", None)
    followers = frozenset({DEVICE}) if follows else frozenset()
    buffer = TokenBuffer(delivery, PACE_TPS)
    one = Played(text, stops, obeys, Watch(Answer(RACE, BOTH, stop=stops, followers=followers, buffer=buffer)))
    one.on(Begin())
    one.say(source, n_first)
    for i, (what, side, value) in enumerate(steps):
        if one.watch.ends:
            break
        if i == breaks and one.watch.answer.source in one.watch.running:
            one.on(broke(one.watch.answer.source))
        elif what == "say":
            one.say(side, value)
        elif what == "move":
            one.on(Move(side, value), STEP_S)
        else:
            one.on(Followed(side))
    one.finish()
    return one


@settings(max_examples=400)
@given(
    text=st.text("ab \n", min_size=1, max_size=40), source=st.sampled_from(Side), n_first=st.integers(1, 20),
    stops=st.lists(st.text("ab \n", min_size=1, max_size=6), min_size=1, max_size=3).map(tuple),
    steps=st.lists(moves, max_size=25), obeys=st.fixed_dictionaries(dict.fromkeys(Side, st.booleans())),
    delivery=st.sampled_from(Delivery), follows=st.booleans(), breaks=st.none() | st.integers(0, 20),
)  # fmt: skip
def test_whoever_writes_which_part_stop_strings_hold_as_within_one_side(
    text: str, source: Side, n_first: int, stops: Stops, steps: list[Any], **more: Any
) -> None:
    one = play(text, stops, source, n_first, steps, **more)
    hit = first_stop(text, stops)
    assert one.watch.shown == (text if hit is None else text[: hit[0]])
    assert one.watch.ends == [Complete("stop")]
    assert one.watch.answer.stop_met == (None if hit is None else hit[1])


SHAPES: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
    "chat": (lambda: ChatShape("r", 1, "m"), lambda body: body["choices"][0]["message"]["content"]),
    "completions": (lambda: TextShape("r", 1, "m"), lambda body: body["choices"][0]["text"]),
    "messages": (lambda: MessagesShape("r", 1, "m"), lambda body: "".join(part["text"] for part in body["content"])),
    "responses": (
        lambda: ResponsesShape("r", 1, "m", to_chat({"model": "m", "input": "x"})),
        lambda body: "".join(part["text"] for item in body["output"] for part in item["content"]),
    ),
    "ollama": (lambda: ChatLines("r", 1, "m"), lambda body: body["message"]["content"]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("source", Side)
def test_at_any_cut_each_api_says_what_one_side_would_have_said(name: str, source: Side) -> None:
    text, stops = "The capital of France is Paris of Pardubice", (" is Par", "of Pard")
    made, text_of = SHAPES[name]
    for n in range(1, len(text)):
        for reason in ("breaks", "moves"):
            steps = [("move", source.other, "stall")] if reason == "moves" else [("say", source, 1)]
            one = play(text, stops, source, n, steps, breaks=0 if reason == "breaks" else None)
            ended = replace(outcome(), stop_sequence=one.watch.answer.stop_met)
            body = json.loads(json.dumps(made().body(one.tokens, {}, ended)))
            assert text_of(body) == "The capital of France", (n, reason)
            if name == "messages":
                assert body["stop_sequence"] == " is Par"
