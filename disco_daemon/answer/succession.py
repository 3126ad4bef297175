"""Which side may go on with an answer: a cheaper one, one that is not silent, or the one that is left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..delivery.seam import Seam
from ..types import BOTH, Continuation, HandoffRecord, Side
from .failures import Failures
from .text import AnswerText

MAX_HANDOFFS = 2  # moves of one answer, the last kept for a failure: it does not move for ever
MAX_MOVES = MAX_HANDOFFS - 1  # for money: the last one is kept for a failure
MAX_STALLS = 2  # moves for a source's silence, done or not: each start of a target may cost the whole prompt


@dataclass(slots=True)
class Succession:
    """The rules by which an answer gets another source; `text`, `failures` and `moves` are the answer's own.

    `before` is how the client has begun it, `n_stalls` counts the moves begun since a source was silent. `again` says
    whether a side has another place to be asked at, after one of them has failed.
    """

    available: frozenset[Side]
    continuation: Mapping[Side, Continuation]
    before: str
    text: AnswerText
    failures: Failures
    moves: list[HandoffRecord]
    n_stalls: int = 0
    again: Callable[[Side], bool] = lambda side: False

    @property
    def n_handoffs(self) -> int:
        """Moves that are done."""
        return sum(move.dropped is None for move in self.moves)

    def maker(self, at: int, winner: Side) -> Side:
        """Return the side that made the character `at`: what a source made before a handoff may be shown after it."""
        side = winner
        for move in self.moves:
            if move.dropped is None and move.at_char <= at:
                side = move.target
        return side

    def is_worth_asking(self, target: Side) -> bool:
        """Whether an answer that is relayed may move to `target` for money."""
        return (
            self.n_handoffs < MAX_MOVES
            and self._is_able(target)
            and self.continuation[target] is not Continuation.UNTRIED
            and not any(move.target is target and move.dropped is not None for move in self.moves)
            and self.text.ends_with_a_token
        )

    def may_leave_for(self, target: Side, reason: str) -> bool:
        """Whether an answer may move from a living source to `target`, for `cost` or `stall`.

        What was left for its silence is gone back to only where the other side fails, for which the last move is kept.
        """
        if not self._is_able(target) or self.n_handoffs >= MAX_HANDOFFS or self.text.is_thought:
            return False
        if reason == "stall" and (self.n_stalls >= MAX_STALLS or self._was_silent(target)):
            return False
        # Of a very short beginning a restart cannot be told from chance.
        exact = self.continuation[target] is Continuation.EXACT
        return exact or len(self.before + str(self.text)) >= Seam.MIN_RESTART

    def after(self, side: Side) -> Side | None:
        """The side that goes on after `side` has failed.

        1. The same side, at another place that is known to go on with what there is.
        2. The other endpoint, if it has not failed for this answer; it may have lost the race.
        3. The same side, at another place that may.
        4. The device once more, if its engine died in mid-answer and the server has failed since or cannot continue:
           it is restarted within seconds. Alone it gets no second chance: a request that kills the engine would kill
           it again.
        5. None; also where the answer has begun, and has moved too often.
        """
        begun = bool(self.text.pieces)
        if begun and self.n_handoffs >= MAX_HANDOFFS:
            return None
        own = self.again(side) and self.continuation.get(side) is not Continuation.NONE
        if own and begun and self.continuation.get(side) is not Continuation.UNTRIED:
            return side
        mute = begun and self.continuation.get(side.other) is Continuation.NONE
        if side.other in self.available and not self._has_failed(side.other) and not mute:
            return side.other
        if own:
            return side
        died_now = self.failures.errors[-1].reason == "engine_gone"
        died_once = self.failures.n_died_midway == 1 and self.available == BOTH
        return Side.DEVICE if died_once and ((mute and died_now) or side is Side.SERVER) else None

    def _was_silent(self, side: Side) -> bool:
        return any(m.reason == "stall" and m.target is side.other and m.dropped is None for m in self.moves)

    def _is_able(self, target: Side) -> bool:
        capable = self.continuation.get(target) is not Continuation.NONE
        return target in self.available and capable and not self._has_failed(target)

    def _has_failed(self, side: Side) -> bool:
        return self.failures.has(side) and not self.again(side)
