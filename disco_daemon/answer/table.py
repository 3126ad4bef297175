"""The states of an answer and the literal table of its transitions."""

from __future__ import annotations

from enum import StrEnum

from .events import Arrived, Begin, Broke, Due, Ended, Followed, Move, Tick


class State(StrEnum):
    """Where an answer is in its life."""

    PLANNED = "planned"
    RACING = "racing"
    RELAYING = "relaying"
    HANDOFF = "handoff"
    DONE = "done"
    FAILED = "failed"


_ANY = (Due, Arrived, Ended, Broke, Followed, Move, Tick)

# state -> event -> the states it may lead to. docs/handoff.md's diagram is generated from this.
TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.PLANNED: {Begin: frozenset({State.RACING, State.FAILED})},
    State.RACING: {
        Due: frozenset({State.RACING}),
        Arrived: frozenset({State.RACING, State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.RACING, State.DONE, State.FAILED}),
        Broke: frozenset({State.RACING, State.FAILED}),
        Followed: frozenset({State.RACING}),
        Move: frozenset({State.RACING}),
        Tick: frozenset({State.RACING}),
    },
    State.RELAYING: {
        Due: frozenset({State.RELAYING}),
        Arrived: frozenset({State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.RELAYING, State.HANDOFF, State.DONE, State.FAILED}),
        Broke: frozenset({State.RELAYING, State.HANDOFF, State.DONE, State.FAILED}),
        Followed: frozenset({State.RELAYING}),
        Move: frozenset({State.RELAYING, State.HANDOFF}),
        Tick: frozenset({State.RELAYING}),
    },
    State.HANDOFF: {
        Due: frozenset({State.HANDOFF}),
        Arrived: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Broke: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Followed: frozenset({State.HANDOFF}),
        Move: frozenset({State.HANDOFF}),
        Tick: frozenset({State.HANDOFF}),
    },
    State.DONE: {e: frozenset({State.DONE}) for e in _ANY},
    State.FAILED: {e: frozenset({State.FAILED}) for e in _ANY},
}


class IllegalEvent(RuntimeError):
    """The conductor sent an event that the state table does not allow."""
