"""How long a server's model may think before its first text, while it shows that it is alive.

Some models think unseen for minutes. Meanwhile a server sends comments, a first chunk with nothing but a role, empty
chunks, or nothing at all behind its headers; it bills the thoughts, and whoever gives up and asks again pays for them
again. So signs of life are waited with, up to a limit that follows what the model has been seen to take, by how hard it
was asked to think.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..clock import Deadlines
from ..estimation.silence import Silences
from ..types import GenerationRequest, Json, Usage
from ..types.needs import template_args
from .stream import Patience

MAX_EFFORTS = 16  # kinds of requests that are told apart; the one that was longest not asked for is forgotten
LEAST_S = 120.0  # with signs of life, however quick the model was till then: one hard question takes it that long

Effort = tuple[object, object]  # whether to think, and how hard, as far as the request says it


@dataclass(slots=True)
class _Seen:
    """What is known of one effort: the times to the first text, s, and whether it was thought of before, unseen."""

    silences: Silences = field(default_factory=Silences)
    thinks: bool = False


class Thoughts:
    """The patience with one server; `most_s` is the longest that anybody waits for a token of it."""

    def __init__(self, first_token_s: float, token_s: float, most_s: float) -> None:
        self._first_token_s, self._token_s, self._most_s = first_token_s, token_s, most_s
        self._seen: OrderedDict[Effort, _Seen] = OrderedDict()
        self._deadlines = Deadlines()

    def close(self) -> None:
        """Cancel the timers that are kept for the next answers."""
        self._deadlines.close()

    def patience(self, request: GenerationRequest, max_tokens: int | None) -> Patience:
        """Return the patience with the answer to a request, which may have so many tokens."""
        args = template_args(request.extra)
        seen = self._of(args)
        alive_s, thinks = self._limit_s(seen), _thinks(args, seen)
        times = self._first_token_s, self._token_s, max_tokens
        return Patience(*times, alive_s=alive_s, thinks=thinks, deadlines=self._deadlines)

    def limit_s(self, request: GenerationRequest) -> float:
        """Return how long the first text may take, or the next one, as long as there are signs of life, s."""
        return self._limit_s(self._of(template_args(request.extra)))

    def thinks(self, request: GenerationRequest) -> bool:
        """Whether a long silence behind a sign of life may be a thought: it was asked for, or is known to come."""
        args = template_args(request.extra)
        return _thinks(args, self._of(args))

    def add(self, request: GenerationRequest, first: tuple[float, bool] | None, usage: Usage) -> None:
        """Take the end of an answer whose first token came so many s after the request, as more than text or not."""
        if first is not None:
            first_s, shown = first
            seen = self._of(template_args(request.extra))
            seen.silences.add(first_s)
            seen.thinks = usage.reasoning_tokens > 0 and not shown

    def _limit_s(self, seen: _Seen) -> float:
        return min(self._most_s, max(LEAST_S, seen.silences.bound_s))

    def _of(self, args: Json) -> _Seen:
        """Return what is known of the effort that arguments of the chat template ask for."""
        effort = (str(args.get("enable_thinking")), str(args.get("reasoning_effort")))
        seen = self._seen.get(effort)
        if seen is None:
            seen = self._seen[effort] = _Seen()
            while len(self._seen) > MAX_EFFORTS:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(effort)
        return seen


def _thinks(args: Json, seen: _Seen) -> bool:
    asked = args.get("enable_thinking")
    return asked is True or (asked is None and seen.thinks)
