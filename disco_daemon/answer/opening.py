"""How a side begins where the client has begun the answer: it may say all of that again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..delivery.seam import Diverged, Seam
from ..errors import EndpointError
from ..types import Side, Token
from .events import Arrived, Ended


@dataclass(slots=True)
class Opening:
    """The first text of one side, held while it may still repeat `before`, which is how the client has begun.

    As long as it is open the side has said nothing: its tokens neither count nor win the race. `guarded`: the side may
    start the answer again. `overlap` is what it was asked to repeat.
    """

    side: Side
    before: str
    guarded: bool
    overlap: str | None
    _seam: Seam = field(init=False)

    def __post_init__(self) -> None:
        self._seam = Seam(self.before, guarded=self.guarded, overlap=self.overlap, least=1)

    def on(self, event: Arrived | Ended) -> list[Token] | EndpointError | None:
        """Take an event of the side; return its tokens once they are no repetition, None while that is open.

        A side that says something else than it should, or nothing new, has failed: its error is returned.
        """
        try:
            if isinstance(event, Arrived):
                self._seam.feed(event.token)
                return self._seam.join("")
            tokens = self._seam.ended("")
        except Diverged as e:
            return EndpointError(self.side, "diverged", str(e))
        if not tokens and event.finish.reason == "length":
            return EndpointError(self.side, "diverged", "the continuation is nothing new")
        return tokens
