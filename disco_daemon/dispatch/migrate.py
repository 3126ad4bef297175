"""Whether a running answer moves to the other side: what a handoff now would save against what it would cost. Pure.

A device that takes over swallows the source's tokens while it prefills and goes on after the last of them: what the
source makes meanwhile is kept. A server continues the text it was given, so what the source makes meanwhile, as
insurance, is paid for and thrown away. A target that fails costs its prefill; the source has gone on.

Where the reader has a stock of text, the source may *rest* instead: it is stopped, and makes nothing meanwhile. The
stock has to last until the target comes and, should it not come, until the source does that is then asked again; a
server that is asked again bills prompt and answer so far once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..types import Side

HYSTERESIS = (0.25, 1.0)  # of the cost of trying, to be gained beyond it: for the first handoff, for one after it
MIN_GAIN_USD = 1e-6  # a dollar in a million handoffs: below it the seam is not worth its risk
MIN_TOKENS = 8  # fewer still to come are not worth it either; an estimate is never that good
LOOK_EVERY = 8  # tokens between two looks; later an eighth of the answer so far
MAX_RESERVE = 1024  # tokens: a reader waits that long for nothing
LATE = 0.05  # of the targets come later than the 95th percentile of their time: then a source that rests is asked again


@dataclass(frozen=True, slots=True)
class Costs:
    """$ of one token, prefilled or decoded, on either side."""

    device_prefill: float
    device_decode: float
    server_prefill: float
    server_decode: float

    def prefill(self, side: Side) -> float:
        """$ of one prompt token on that side."""
        return self.device_prefill if side is Side.DEVICE else self.server_prefill

    def decode(self, side: Side) -> float:
        """$ of one generated token on that side."""
        return self.device_decode if side is Side.DEVICE else self.server_decode

    @property
    def cheaper(self) -> Side | None:
        """The side whose generated tokens cost less: the only one an answer moves to by cost."""
        if self.device_decode == self.server_decode:
            return None
        return Side.DEVICE if self.device_decode < self.server_decode else Side.SERVER


@dataclass(frozen=True, slots=True)
class Prospect:
    """The conditions of a handoff begun now. Lengths in tokens, speeds in token/s.

    `generated` tokens are the answer so far, `cached` of it and the `prompt` the target need not prefill. `remaining`
    is E[remaining | generated], capped by max_tokens. `prefill_s` is the expected time to the target's first token,
    `prefill95_s` its 95th percentile; infinite where it would never come. `p_fail` is the chance that the target fails.
    `exact_follow`: the target swallows what the source makes meanwhile. A source that rests has a `source_tps` of 0,
    and reads prompt and answer again with the chance `p_again`. Raises ValueError where a number is negative or NaN, or
    both sides are the same.
    """

    source: Side
    target: Side
    prompt: int
    generated: int
    cached: int
    remaining: float
    source_tps: float
    target_tps: float
    prefill_s: float
    prefill95_s: float
    p_fail: float
    exact_follow: bool
    p_again: float = 0.0

    def __post_init__(self) -> None:
        lengths = (self.prompt, self.generated, self.cached, self.remaining)
        rest = (self.source_tps, self.target_tps, self.prefill_s, self.prefill95_s, self.p_fail, self.p_again)
        if (
            self.source is self.target
            or max(self.p_fail, self.p_again) > 1
            or not all(x >= 0 for x in (*lengths, *rest))
        ):
            msg = f"no handoff can be like this: {self}"
            raise ValueError(msg)

    @property
    def overlap(self) -> float:
        """Tokens that the source makes until the target's first one."""
        if math.isinf(self.prefill_s):
            return self.remaining
        return min(self.source_tps * self.prefill_s, self.remaining)

    @property
    def to_prefill(self) -> float:
        """Tokens that the target has to prefill."""
        followed = self.overlap if self.exact_follow else 0.0
        return max(0.0, self.prompt + self.generated + followed - self.cached)


def saving(prospect: Prospect, costs: Costs) -> float:
    """$ less for the rest of the answer, were there nothing to prefill and no overlap; negative to a dearer target."""
    moved = prospect.remaining - (prospect.overlap if prospect.exact_follow else 0.0)
    return (costs.decode(prospect.source) - costs.decode(prospect.target)) * moved


def cost(prospect: Prospect, costs: Costs) -> float:
    """$ that trying takes, whether it works or not.

    That is the target's prefill, the overlap where it is thrown away, and what a source reads again that has rested.
    """
    again = prospect.p_again * costs.prefill(prospect.source) * (prospect.prompt + prospect.generated)
    wasted = 0.0 if prospect.exact_follow else prospect.overlap * costs.decode(prospect.source)
    return costs.prefill(prospect.target) * prospect.to_prefill + wasted + again


def gain(prospect: Prospect, costs: Costs) -> float:
    """Expected $ saved by a handoff now; negative where it would lose."""
    return (1 - prospect.p_fail) * saving(prospect, costs) - cost(prospect, costs)


def margin(done: int) -> float:
    """Return the least gain of a handoff after `done` of them, in multiples of its cost: a move back needs more."""
    return HYSTERESIS[min(done, len(HYSTERESIS) - 1)]


def is_worthwhile(prospect: Prospect, costs: Costs, pace_tps: float, *, margin: float) -> bool:
    """Whether to begin a handoff now, for a reader of `pace_tps` token/s; `margin` as the function of that name."""
    if prospect.target_tps < pace_tps or prospect.remaining < MIN_TOKENS:
        return False
    expected = gain(prospect, costs)
    return expected >= MIN_GAIN_USD and expected > margin * cost(prospect, costs)


def reserve(pace_tps: float, t_m95_s: float) -> int:
    """B = ceil(r_c t_m), the tokens to hold back so that the reader has enough to read during a handoff of `t_m95_s`.

    At most MAX_RESERVE, which also stands for an infinite time.
    """
    return math.ceil(min(pace_tps * t_m95_s, MAX_RESERVE) - 1e-9)  # 4.8 * 0.625 is a little over 3


def stock_to_ask_again(pace_tps: float, again95_s: float) -> int:
    """Tokens in stock, or fewer, at which a source that rests is asked again: its first token takes `again95_s`.

    The stock is looked at after each token that the reader gets: from then on it lasts for one token more than it has.
    """
    return math.ceil(pace_tps * again95_s - 1e-9)


def stock_to_rest(pace_tps: float, wait95_s: float, again95_s: float) -> float:
    """Tokens that the reader has to have in stock before the source rests; infinite where the target may never come.

    They last until the target's first token, after `wait95_s`, and only then the source would have to be asked again.
    So nobody waits, whether the target comes or not.
    """
    if math.isinf(wait95_s) or math.isinf(again95_s):
        return math.inf
    return stock_to_ask_again(pace_tps, again95_s) + math.ceil(pace_tps * wait95_s - 1e-9) + 1


def catch_up_s(missing: float, prefill_tps: float, source_tps: float, wait_s: float = 0.0) -> float:
    """Time until a device that has `missing` tokens to prefill, after `wait_s`, has caught up with a running source, s.

    It swallows what the source makes meanwhile, at `prefill_tps` token/s; infinite where the source is faster. Less
    than nothing, as an estimate may have it, counts as nothing.
    """
    missing, wait_s = max(0.0, missing), max(0.0, wait_s)
    if missing == wait_s == 0:
        return 0.0
    if prefill_tps <= source_tps:
        return math.inf
    return (missing + prefill_tps * wait_s) / (prefill_tps - source_tps)


def next_check(generated: int) -> int:
    """Return the length of the answer at the next look, tokens: often at first, then rarer as it grows."""
    return generated + max(LOOK_EVERY, generated // LOOK_EVERY)
