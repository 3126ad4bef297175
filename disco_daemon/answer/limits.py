"""Where an answer has to end: at `max_tokens`, and where two sides may write it also at a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..delivery.cut import divided
from ..delivery.seam import StopScan
from ..types import Finish, Token

# How far beyond `max_tokens`, by our count of its text, an endpoint's own end is waited for before it is taken for one
# that knows no limit. What is said in vain is paid for.
SPARE_SHARE = 1.0  # of `max_tokens`: no tokenizer is known to be coarser than that count by so much
SPARE_TOKENS = 16  # at least, for a limit of a few: a short text is counted less surely


@dataclass(slots=True)
class Limits:
    """What the client allows. An endpoint keeps to it by itself, but cannot see what came before a seam.

    A text is counted from outside, and may have fewer tokens than that: what is beyond `max_tokens` waits for the end
    that the endpoint makes itself. It has the last word if it says that it kept to the limit: it ended for that, or has
    counted no more tokens. `was_cut`: it said far more, or its ids tell how many tokens it said, and nothing more is
    admitted. Behind a seam (`begin_anew`) only we count the tokens.

    A stop string may begin before a seam and end behind it. So where there may be one (`may_move`), text that may grow
    into a stop string waits from the first token on, as it does within an endpoint: what is shown cannot be taken back.
    At the seam the next endpoint says it again. `met` is the stop string that ended the answer.
    """

    max_tokens: int | None
    stop: tuple[str, ...]
    may_move: bool = False
    was_cut: bool = False
    met: str | None = None
    _counts: bool = False
    _scan: StopScan | None = None
    _beyond: list[Token] = field(default_factory=list)
    _n_beyond: int = 0

    def __post_init__(self) -> None:
        if self.may_move:
            self._look_for_stops("")

    def begin_anew(self, text: str) -> None:
        """Another endpoint goes on after `text`."""
        self._counts = bool(text)
        self._beyond, self._n_beyond = [], 0
        self._look_for_stops(text)

    def admits(self, token: Token, n_generated: int) -> bool:
        """Whether all of a token is certainly part of the answer, and certainly not its last one."""
        if self._counts or self._beyond or self._scan is not None:
            return False
        return self.max_tokens is None or n_generated + token.n_tokens <= self.max_tokens

    def take(self, token: Token, n_generated: int, text: Callable[[], str] = str) -> tuple[list[Token], str | None]:
        """Return what of a token is part of the answer now, and the reason why it ends with that, if it does.

        `text` returns the answer's text before it.
        """
        if self.was_cut:
            return [], "length"
        if self._beyond:
            return [], self._wait(token)
        within, beyond = self._divided(token, n_generated, text)
        kept, stopped = ([], False) if within is None else ([within], False)
        if within is not None and self._scan is not None:
            kept, stopped = self._scan.take(within)
        if stopped and self._scan is not None:
            self.met = self._scan.stop
            return kept, "stop"
        if beyond is not None:
            if not self._counts and not token.ids:
                return kept, self._wait(beyond)
            self.cut()
            return [*kept, *(self._scan.rest() if self._scan is not None else ())], "length"
        n_generated += sum(piece.n_tokens for piece in kept)
        # A text may go on with a token that is counted already; where ids come, it does not.
        return kept, "length" if self._counts and token.ids and self.is_reached(n_generated) else None

    def _divided(self, token: Token, n_generated: int, text: Callable[[], str]) -> tuple[Token | None, Token | None]:
        """Return what of a token is within the limit, and what is beyond: what waits for a stop string counts, too."""
        if self.max_tokens is None:
            return token, None
        scan = self._scan
        n_left = self.max_tokens - n_generated - (scan.n_waiting if scan is not None else 0)
        if token.n_tokens <= n_left:
            return token, None
        return divided(token, n_left, text() + (scan.waiting if scan is not None else ""))

    def end(self, finish: Finish) -> str:
        """Cut what is beyond the limit, unless the endpoint says by its own end or count that it is not.

        Return the reason why the answer ends.
        """
        if self._beyond and finish.reason != "length":
            assert self.max_tokens is not None
            if finish.n_tokens is None or finish.n_tokens > self.max_tokens:
                self.cut()
        return "length" if self.was_cut else finish.reason

    def cut(self) -> None:
        """Admit nothing more; what waits for the rest of a stop string is within the limit, and stays."""
        self.was_cut, self._counts = True, True
        self._beyond.clear()

    def is_reached(self, n_generated: int) -> bool:
        """Whether no more than `n_generated` tokens, and those that wait, are allowed."""
        n_waiting = self._scan.n_waiting if self._scan is not None else 0
        return self.max_tokens is not None and n_generated + n_waiting >= self.max_tokens

    def rest(self) -> list[Token]:
        """Return what waited at the end that the endpoint made: for the rest of a stop string, or beyond the limit."""
        scan, self._scan = self._scan, None
        beyond, self._beyond = self._beyond, []
        return [*(scan.rest() if scan is not None else ()), *beyond]

    def _look_for_stops(self, text: str) -> None:
        self._scan = StopScan(self.stop, text) if self.stop and (self.may_move or text) else None

    def _wait(self, token: Token) -> str | None:
        """Let a token beyond the limit wait; return "length" once there are too many of them."""
        assert self.max_tokens is not None
        self._beyond.append(token)
        self._n_beyond += token.n_tokens
        if self._n_beyond <= max(SPARE_TOKENS, SPARE_SHARE * self.max_tokens):
            return None
        self.cut()
        return "length"
