"""Where an answer has to end: at `max_tokens`, and behind a seam also at a stop string. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..delivery.cut import first
from ..delivery.seam import StopScan
from ..types import Token


@dataclass(slots=True)
class Limits:
    """What the client allows. An endpoint keeps to it by itself, but cannot see what came before a seam.

    `was_cut`: an endpoint said more than `max_tokens`, and nothing more is admitted. Behind a seam (`begin_anew`) only
    we count the tokens, and a stop string may have begun before it: text that may grow into one waits in the scan.
    """

    max_tokens: int | None
    stop: tuple[str, ...]
    was_cut: bool = False
    _counts: bool = False
    _scan: StopScan | None = None

    def begin_anew(self, text: str) -> None:
        """Another endpoint goes on after `text`."""
        self._counts = True
        self._scan = StopScan(self.stop, text) if self.stop else None

    def admits(self, token: Token, n_generated: int) -> bool:
        """Whether all of a token is certainly part of the answer, and certainly not its last one."""
        return not self._counts and (self.max_tokens is None or n_generated + token.n_tokens <= self.max_tokens)

    def take(self, token: Token, n_generated: int) -> tuple[list[Token], str | None]:
        """Return what of a token is part of the answer now, and the reason why it ends with that, if it does."""
        if self.was_cut:
            return [], "length"
        said, stopped = ([token], False) if self._scan is None else self._scan.take(token)
        kept: list[Token] = []
        for piece in said:
            if self.max_tokens is not None and n_generated + piece.n_tokens > self.max_tokens:
                within = first(piece, self.max_tokens - n_generated)
                self.was_cut, self._counts, self._scan = (
                    True,
                    True,
                    None,
                )  # what the scan holds back is beyond the limit, too
                return kept if within is None else [*kept, within], "length"
            kept.append(piece)
            n_generated += piece.n_tokens
        if stopped:
            return kept, "stop"
        return kept, "length" if self._counts and self.is_reached(n_generated) else None

    def is_reached(self, n_generated: int) -> bool:
        """Whether no more than `n_generated` tokens, and those that wait, are allowed."""
        n_waiting = self._scan.n_waiting if self._scan is not None else 0
        return self.max_tokens is not None and n_generated + n_waiting >= self.max_tokens

    def rest(self) -> list[Token]:
        """Return what might have grown into a stop string, and has not."""
        scan, self._scan = self._scan, None
        return list(scan.rest()) if scan is not None else []
