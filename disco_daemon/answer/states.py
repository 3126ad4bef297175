"""The states of an answer and of its handoffs. The two tables are the specification of both.

A state lists the events that act in it, and the states that each leads to, if its endpoint runs for this answer. Any
other event changes nothing. docs/handoff.md's diagrams are made from the tables.
"""

from __future__ import annotations

from enum import StrEnum

from .events import Arrived, Begin, Broke, CalledOff, Due, Ended, Followed, Move, SourceGone, Tick


class State(StrEnum):
    """Where an answer is in its life."""

    PLANNED = "planned"
    RACING = "racing"
    RELAYING = "relaying"
    HANDOFF = "handoff"
    DONE = "done"
    FAILED = "failed"


class HandoffState(StrEnum):
    """Where a handoff is in its life. *Alone*: its source has failed, the target goes on all the same."""

    FOLLOWING = "following"  # the target is held, and prefills what the source makes
    FOLLOWING_ALONE = "following_alone"
    JOINING = "joining"  # the target generates, and its text is compared with what the reader has
    JOINING_ALONE = "joining_alone"
    JOINED = "joined"  # the target is the source from now on
    DROPPED = "dropped"


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
        Ended: frozenset({State.HANDOFF, State.DONE, State.FAILED}),
        Broke: frozenset({State.HANDOFF, State.DONE, State.FAILED}),
        Move: frozenset({State.RELAYING, State.HANDOFF}),
        Tick: frozenset({State.RELAYING}),
    },
    State.HANDOFF: {
        Arrived: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Ended: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Broke: frozenset({State.HANDOFF, State.RELAYING, State.DONE, State.FAILED}),
        Followed: frozenset({State.HANDOFF}),
        Tick: frozenset({State.HANDOFF}),
    },
    State.DONE: {},
    State.FAILED: {},
}

# Followed, Arrived, Ended and Broke are the target's here.
HANDOFF_TRANSITIONS: dict[HandoffState, dict[type, frozenset[HandoffState]]] = {
    HandoffState.FOLLOWING: {
        Followed: frozenset({HandoffState.FOLLOWING, HandoffState.JOINING}),
        Ended: frozenset({HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        SourceGone: frozenset({HandoffState.FOLLOWING_ALONE}),
        CalledOff: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.FOLLOWING_ALONE: {
        Followed: frozenset({HandoffState.JOINING_ALONE}),
        Ended: frozenset({HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINING: {
        Arrived: frozenset({HandoffState.JOINING, HandoffState.JOINED, HandoffState.DROPPED}),
        Ended: frozenset({HandoffState.JOINED, HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
        SourceGone: frozenset({HandoffState.JOINING_ALONE}),
        CalledOff: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINING_ALONE: {
        Arrived: frozenset({HandoffState.JOINING_ALONE, HandoffState.JOINED, HandoffState.DROPPED}),
        Ended: frozenset({HandoffState.JOINED, HandoffState.DROPPED}),
        Broke: frozenset({HandoffState.DROPPED}),
    },
    HandoffState.JOINED: {},
    HandoffState.DROPPED: {},
}


class IllegalEvent(RuntimeError):
    """The conductor sent a second Begin, or another event before the first one."""
