"""The states of an answer. The table is its specification; that of a handoff stands in `handoff`.

A state lists the events that act in it, and the states that each leads to, if its endpoint runs for this answer. Any
other event changes nothing. docs/explain/handoff.md's diagrams are made from the two tables.
"""

from __future__ import annotations

from enum import StrEnum

from .events import Arrived, AskAgain, Begin, Broke, Due, Ended, Followed, Move, Rest, Tick


class State(StrEnum):
    """Where an answer is in its life."""

    PLANNED = "planned"
    RACING = "racing"
    RELAYING = "relaying"
    HANDOFF = "handoff"
    DONE = "done"
    FAILED = "failed"


TRANSITIONS: dict[State, dict[type, frozenset[State]]] = {
    State.PLANNED: {
        Begin: frozenset({State.RACING, State.FAILED}),
    },
    State.RACING: {
        Due: frozenset({State.RACING}),
        Arrived: frozenset({State.RACING, State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.RACING, State.HANDOFF, State.DONE, State.FAILED}),
        Broke: frozenset({State.RACING, State.FAILED}),
    },
    State.RELAYING: {
        Arrived: frozenset({State.RELAYING, State.DONE}),
        Ended: frozenset({State.RACING, State.HANDOFF, State.DONE, State.FAILED}),
        Broke: frozenset({State.RACING, State.HANDOFF, State.DONE, State.FAILED}),
        Move: frozenset({State.RELAYING, State.HANDOFF}),
        Tick: frozenset({State.RELAYING}),
    },
    State.HANDOFF: {
        Arrived: frozenset({State.RACING, State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.RACING, State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Broke: frozenset({State.RACING, State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Followed: frozenset({State.HANDOFF}),
        Rest: frozenset({State.HANDOFF}),
        AskAgain: frozenset({State.HANDOFF}),
        Tick: frozenset({State.HANDOFF}),
    },
    State.DONE: {},
    State.FAILED: {},
}
