"""Says of a running answer whether it should move, from what is known now. Pure."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

from ..types import Readiness, Side
from .migrate import (
    LATE,
    MAX_RESERVE,
    Costs,
    Prospect,
    catch_up_s,
    gain,
    is_worthwhile,
    margin,
    next_check,
    reserve,
    stock_to_ask_again,
    stock_to_rest,
)
from .planner import Planner

DECODE_TPS = {Side.DEVICE: 30.0, Side.SERVER: 60.0}  # token/s until some have been seen: a laptop, a hosted model
SLOW = 1.5  # times the expected time, within which a device has its first token all but always
UNTOLD_S = 0.5  # for which a server that is asked again waits for token ids of a device that says nothing any more
SEEN = 0.2  # weight of the latest answer's decode speed
STEP_TOKENS = 12  # what a follower has to compute between the word to go and its first token, generously


@dataclass(frozen=True, slots=True)
class View:
    """A running answer as the decision sees it. Lengths in tokens, speeds in token/s.

    `cached` tokens of the prompt are in the target's KV cache; `follows`: the target can be held. `key` names it. The
    source may be stopped for a while (`rests`); it is busy with `source_busy` other answers.
    """

    key: str
    target: Side
    prompt: int
    generated: int
    cached: int
    max_tokens: int | None
    source_tps: float | None
    pace_tps: float
    readiness: Readiness
    handoffs: int
    follows: bool
    rests: bool = False
    source_busy: int = 0


class Mover(Protocol):
    """Decides about moves for money."""

    def advise(self, view: View) -> int | None:
        """The reserve B to move with now, tokens; None to stay."""
        ...

    def reserve(self, view: View) -> int:
        """The reserve B that bridges a move, tokens, whatever it is for."""
        ...

    def foresees(self, view: View) -> bool:
        """Whether a move of this answer is likely, so that the prefill of a loser is worth finishing."""
        ...

    def stock_to_rest(self, view: View) -> float:
        """The tokens that the reader has to have in stock before the source of a handoff rests."""
        ...

    def stock_to_ask_again(self, view: View) -> int:
        """The tokens in stock, or fewer, at which a source that rests is asked again."""
        ...

    def next_check(self, generated: int) -> int:
        """Return the length of the answer at which to ask again, tokens."""
        ...

    def observe(self, side: Side, tps: float) -> None:
        """Take the decode speed of one run, token/s."""
        ...

    def priced(self, costs: Callable[[float, float], Costs], stops_billing: Callable[[], bool]) -> Self:
        """Return this one for an answer whose server has other prices; speeds that one observes, both know."""
        ...


class CostMover:
    """Moves an answer when that saves more than it costs (docs/explain/design.md#handoff).

    `costs(prefill_tps, decode_tps)` are the prices of a token for a device of those speeds. Where closing a stream does
    not end the server's bill (`stops_billing`), leaving the server saves nothing.
    """

    def __init__(self, planner: Planner, costs: Callable[[float, float], Costs], *, stops_billing: bool = True) -> None:
        self._planner = planner
        self._costs = costs
        self._stops_billing: Callable[[], bool] = lambda: stops_billing
        self.decode_tps = dict(DECODE_TPS)

    def priced(self, costs: Callable[[float, float], Costs], stops_billing: Callable[[], bool]) -> Self:
        """See `priced` above."""
        other = copy.copy(self)
        other._costs, other._stops_billing = costs, stops_billing
        return other

    def next_check(self, generated: int) -> int:
        """See `next_check` above."""
        return next_check(generated)

    def observe(self, side: Side, tps: float) -> None:
        """Update the exponential mean of a side's decode speed; a throttled device shows within a few answers."""
        self.decode_tps[side] += SEEN * (tps - self.decode_tps[side])

    @property
    def known_tps(self) -> dict[str, float]:
        """The decode speeds that were seen or predicted, token/s, by the side's name."""
        return {side.value: tps for side, tps in self.decode_tps.items() if tps != DECODE_TPS[side]}

    def go_on(self, known_tps: Mapping[str, float]) -> None:
        """Go on from `known_tps`. Raises ValueError for speeds that none can be."""
        found = {side: float(known_tps[side.value]) for side in Side if side.value in known_tps}
        if not all(0 < tps < math.inf for tps in found.values()):
            raise ValueError(f"no speeds: {dict(known_tps)}")
        self.decode_tps |= found

    def foresees(self, view: View) -> bool:
        """Whether a move would pay now: then it will also pay in a moment, with the prefill done."""
        return self.advise(view) is not None

    def advise(self, view: View) -> int | None:
        """Return the reserve B to move with now, tokens; None if a move gains nothing or the target is unavailable."""
        if view.readiness.down_s > 0 or not self._affordable(view):
            return None
        if view.target is Side.DEVICE and not self._stops_billing():
            return None
        costs = self._prices()
        if costs.cheaper is not view.target:
            return None
        least = margin(view.handoffs)
        if is_worthwhile(self.prospect(view), costs, view.pace_tps, margin=least):
            return self.reserve(view)
        stock = self.stock_to_rest(view) if view.rests else MAX_RESERVE
        if stock < MAX_RESERVE and is_worthwhile(self.resting(view), costs, view.pace_tps, margin=least):
            return int(stock)
        return None

    def reserve(self, view: View) -> int:
        """Return the reserve B, tokens, for the longest wait: a follower's last step, or the server's whole TTFT.

        A source that may rest makes nothing in vain for a server as target, if the stock for that is there first.
        """
        stock = self.stock_to_rest(view) if view.rests and not view.follows else MAX_RESERVE
        if stock < MAX_RESERVE:
            return int(stock)
        return reserve(view.pace_tps, self._prefill_s(view, last_step=view.follows)[1])

    def stock_to_rest(self, view: View) -> float:
        """See `stock_to_rest` above; infinite where it gains nothing that the source rests, or the target never comes.

        A server that rests for an instant saves less than it costs, now and then, to have it read the prompt again.
        """
        costs = self._prices()
        if gain(self.resting(view), costs) <= gain(self.prospect(view), costs):
            return math.inf
        wait95_s = self._prefill_s(replace(view, source_tps=0.0))[1]
        return stock_to_rest(view.pace_tps, wait95_s, self._again95_s(view))

    def stock_to_ask_again(self, view: View) -> int:
        """See `stock_to_ask_again` above."""
        return stock_to_ask_again(view.pace_tps, self._again95_s(view))

    def resting(self, view: View) -> Prospect:
        """Return the conditions of a handoff begun now whose source rests. A device that does keeps its cells."""
        p_again = LATE if view.target is Side.DEVICE else 0.0
        return replace(self.prospect(replace(view, source_tps=0.0)), p_again=p_again)

    def prospect(self, view: View) -> Prospect:
        """Return the conditions of a handoff begun now whose source goes on."""
        know = self._planner.knowledge
        remaining = know.outputs.expected_remaining(view.generated, view.prompt)
        if view.max_tokens is not None:
            remaining = min(remaining, max(0, view.max_tokens - view.generated))
        prefill_s, prefill95_s = self._prefill_s(view)
        return Prospect(
            source=view.target.other,
            target=view.target,
            prompt=view.prompt,
            generated=view.generated,
            cached=view.cached,
            remaining=remaining,
            source_tps=self._source_tps(view),
            target_tps=self.decode_tps[view.target],
            prefill_s=prefill_s,
            prefill95_s=prefill95_s,
            p_fail=0.0 if view.target is Side.DEVICE else 1 - know.server.availability(),
            exact_follow=view.follows,
        )

    def _source_tps(self, view: View) -> float:
        return view.source_tps if view.source_tps is not None else self.decode_tps[view.target.other]

    def _prices(self) -> Costs:
        return self._costs(self._planner.knowledge.device.prefill_tps, self.decode_tps[Side.DEVICE])

    def _again95_s(self, view: View) -> float:
        """The 95th percentile of the time in which a source that rests has a first token, s."""
        know = self._planner.knowledge
        if view.target is Side.DEVICE:
            return UNTOLD_S + float(know.server.curve().quantile(0.95))
        return SLOW * (float(know.device.predict(STEP_TOKENS, view.source_busy)) + 1 / self.decode_tps[Side.DEVICE])

    def _prefill_s(self, view: View, *, last_step: bool = False) -> tuple[float, float]:
        """Time to the target's first token, s: expected, and its 95th percentile."""
        know = self._planner.knowledge
        if view.target is Side.SERVER:
            curve = know.server.curve()
            slow_s = float(curve.quantile(0.95))  # a target that is slower is overtaken by the source
            return float(curve.mean_below(slow_s)), slow_s
        device, busy = know.device, view.readiness.n_busy
        if last_step:
            expected = float(device.predict(STEP_TOKENS, busy)) + 1 / self.decode_tps[Side.DEVICE]
        else:
            missing = view.prompt + view.generated - view.cached
            slowdown = float(device.predict(max(1, missing), busy) / device.predict(max(1, missing)))
            speed = 1 / (device.k * slowdown)
            expected = catch_up_s(missing, speed, self._source_tps(view), device.c + view.readiness.load_s)
        return expected, SLOW * expected

    def _affordable(self, view: View) -> bool:
        """A handoff lets its target process the prompt: the scarcer side must have that left."""
        return self._planner.allows(view.target, view.prompt, min(view.cached, view.prompt))


class _Around:
    """The part that every mover has of the one by cost inside it."""

    def __init__(self, inner: CostMover) -> None:
        self._inner = inner

    def priced(self, costs: Callable[[float, float], Costs], stops_billing: Callable[[], bool]) -> Self:
        """See `CostMover`."""
        other = copy.copy(self)
        other._inner = self._inner.priced(costs, stops_billing)
        return other

    def reserve(self, view: View) -> int:
        """See `CostMover`."""
        return self._inner.reserve(view)

    def stock_to_rest(self, view: View) -> float:
        """See `CostMover`."""
        return self._inner.stock_to_rest(view)

    def stock_to_ask_again(self, view: View) -> int:
        """See `CostMover`."""
        return self._inner.stock_to_ask_again(view)

    def observe(self, side: Side, tps: float) -> None:
        """See `CostMover`."""
        self._inner.observe(side, tps)


class Stay(_Around):
    """Moves nothing for money."""

    def advise(self, view: View) -> None:
        """Never."""
        del view

    def foresees(self, view: View) -> bool:
        """Never."""
        del view
        return False

    def next_check(self, generated: int) -> int:
        """Return a count that no answer reaches."""
        return generated + (1 << 30)


class Forced(_Around):
    """A mover for experiments: it moves each answer once, between `low` and `high` tokens, whatever that costs."""

    def __init__(self, inner: CostMover, low: int, high: int) -> None:
        super().__init__(inner)
        self._low, self._high = low, high

    def advise(self, view: View) -> int | None:
        """Return the reserve from the drawn token on, None before it."""
        at = self._low + zlib.crc32(view.key.encode()) % (self._high - self._low + 1)
        return None if view.handoffs or view.generated < at else self._inner.reserve(view)

    def foresees(self, view: View) -> bool:
        """Whether the answer has not moved yet."""
        return not view.handoffs

    def next_check(self, generated: int) -> int:
        """Return the next token: every one is looked at."""
        return generated + 1
