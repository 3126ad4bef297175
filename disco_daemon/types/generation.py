"""The work on an answer: what is known before it, its plan, the tokens that endpoints make, and their end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from .delta import Delta
from .fields import Json
from .request import Side


@dataclass(frozen=True, slots=True)
class Plan:
    """Start delays, s (`inf`: only where the other one fails); the server is asked again after `hedge_s` of silence."""

    device_s: float
    server_s: float
    hedge_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.device_s >= 0 and self.server_s >= 0 and self.hedge_s >= 0):
            raise ValueError(f"start delays must be >= 0: {self}")

    def delay(self, side: Side) -> float:
        """Start delay of one side, s."""
        return self.device_s if side is Side.DEVICE else self.server_s

    def restricted(self, available: frozenset[Side]) -> Plan:
        """The same plan when only `available` can serve: one alone starts at once, for it has nobody to wait for."""
        delays = {side: self.delay(side) if side in available else math.inf for side in Side}
        if len(available) == 1 or (available and all(math.isinf(d) for d in delays.values())):
            delays[next(side for side in Side if side in available)] = 0.0
        return Plan(delays[Side.DEVICE], delays[Side.SERVER], self.hedge_s)


@dataclass(frozen=True, slots=True)
class Readiness:
    """What an endpoint would meet a request with right now.

    `load_s` until it can begin (a model that is loading), `n_busy` answers it is working on, `down_s` for which it is
    left alone (Retry-After, failures; infinite where only the settings mend it). `prefill_tps` is measured, token/s.
    `cached` tokens of the prompt are in its KV cache. `n_ctx` tokens may have prompt and answer, if known. `hedgeable`:
    a slow request may be sent again.
    """

    load_s: float = 0.0
    n_busy: int = 0
    down_s: float = 0.0
    prefill_tps: float | None = None
    cached: int = 0
    n_ctx: int | None = None
    hedgeable: bool = False


@dataclass(frozen=True, slots=True)
class PromptLength:
    """Length of a prompt, tokens; `cached` are in the device's KV cache. Not `counted`: estimated, nobody could."""

    tokens: int
    cached: int = 0
    counted: bool = True


class Token(msgspec.Struct, frozen=True, gc=False):  # there are many, and none can be in a cycle
    """A piece of the answer: `text` of whole characters, beside it a `delta`; `logprobs` as OpenAI's, checked.

    `ids` are its endpoint's token ids, where the text up to here is exactly theirs; the next piece has all since. Of
    several choices each has an `index`, a `delta` (it stays whole), and in `ended` why it ended. `alone`: see `split`.
    """

    text: str
    n_tokens: int = 1
    delta: Delta | None = None
    logprobs: Json | None = None
    ids: tuple[int, ...] = ()
    alone: bool = False
    index: int = 0
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The regular end of an answer; `reason` is a `FinishReason`. `full`: its context has no more room.

    `repeated`: its endpoint has stopped it, since it said the same again and again.
    """

    reason: str
    full: bool = False
    stop: str | None = None  # the stop string that ended it, where its endpoint names one, of the client's or not
    n_tokens: int | None = None  # the endpoint's own count of all that it made, thoughts too, where it tells one
    repeated: bool = False
