"""`disco eval --history`: the user's own requests under another exchange rate λ and another budget b.

Every request is played as a race under the plan that the policy would have made: the same table and budget as in the
daemon, the same server and device for all settings. What follows from that, and holds exactly:

- Along λ only the scarcer side changes, where the costs cross (`threshold`), and which answers move to the device.
  The policies `optimal`, `paper` and `stochastic-concurrent` always start the other side at once: below the threshold
  that is the device, above it the server. So with λ no request's bill falls, and no request's energy rises.
- Along b every request starts the scarcer side no later, and its first token comes no later. Two things make it so: one
  table per scarcer side, fitted at the budget in force, whose rungs only add starts (`_nested`), and the budget handed
  out being the largest at which the share used stays within b. The daemon's pacer steers to that share, too; what it
  takes to keep it over any 200 requests is not played.

Moves of a running answer to the cheaper device are played as the daemon decides them
(`dispatch.migrate.is_worthwhile`), and so are the rests of servers whose readers have enough text in stock
(`stock_to_rest` there); they keep this order as long as reading a token costs the device no more energy than writing
one. Moves to the server, which few servers can continue, are not played.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import BoolArray, FloatArray, IndexArray
from ..dispatch.migrate import (
    LATE,
    MAX_RESERVE,
    Costs,
    Prospect,
    catch_up_s,
    gain,
    is_worthwhile,
    margin,
    next_check,
    stock_to_rest,
)
from ..dispatch.mover import DECODE_TPS, SLOW, UNTOLD_S
from ..dispatch.policy import Policy, PolicyInput
from ..dispatch.table import Table
from ..money.exchange import threshold
from ..money.prices import J_PER_WH, Prices
from ..types import Side
from .recorded import Recorded

READER_TPS = 4.8  # token/s, reading; Andes §2.2
JUST_BELOW = 1e-12  # of a budget, so that rounding does not let one request more in
MOVE_BUCKETS = 24  # prompt lengths for which a move is decided
NEVER = 2 * MAX_RESERVE  # tokens; a stock that is not there by then never is


@dataclass(frozen=True, slots=True)
class WhatIfSetting:
    """The settings that a user can turn: the exchange rate λ, $/kWh, and the budget ratio b."""

    usd_per_kwh: float
    budget: float


@dataclass(frozen=True, slots=True)
class WhatIfPoint:
    """The outcome of the whole history under one setting. TTFTs in s.

    `server_usd` is the server's bill, $, and `device_wh` this machine's energy, Wh, both the sum over all requests.
    `used` is the share of all prompt tokens that the scarcer side started on, `device_won` the share of the requests in
    which the device was first, `moved` the share that then moved to the device.
    """

    policy: str
    usd_per_kwh: float
    budget: float
    constrained: str
    mean_ttft_s: float
    p99_ttft_s: float
    server_usd: float
    device_wh: float
    used: float
    device_won: float
    moved: float

    @property
    def cost_usd(self) -> float:
        """The bill, and what the energy is worth at this rate, $."""
        return self.server_usd + self.device_wh / 1000 * self.usd_per_kwh


@dataclass(frozen=True, slots=True)
class WhatIfTerms:
    """Terms that do not depend on the setting. `fitted_at` is the budget that tables are fitted at: the one in force.

    `scarcer` is the side that the user says is scarce, None for the dearer one. With `moves`, running answers go to the
    device where that pays. Where closing a stream does not end the bill (`stops_billing`), a server that was started
    bills the whole answer, and leaving it saves nothing. The reader takes `pace_tps` token/s. With `rests` the server
    of a move may be closed while a paced reader has text in stock: it is known to go on exactly.
    """

    prices: Prices
    fitted_at: float = 0.5
    scarcer: Side | None = None
    moves: bool = True
    stops_billing: bool = True
    pace_tps: float = READER_TPS
    rests: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Race:
    """The outcome of the starts; all [n]. `lead_s` is for how long the device had run by the first token, s."""

    ttft_s: FloatArray
    device_won: BoolArray
    server_ran: BoolArray
    lead_s: FloatArray


class WhatIf:
    """Answers for one policy, quickly: what settings have in common is worked out once, when it is first wanted.

    All that changes: the tables and the budgets they need by scarcer side, and the lengths at which answers move.
    """

    def __init__(self, recorded: Recorded, terms: WhatIfTerms, policy: Policy) -> None:
        self.recorded, self.terms, self.policy = recorded, terms, policy
        self._device_s = recorded.phone.ttft_s(recorded.fresh)
        self._tokens = float(recorded.prompt.sum())
        self._tables: dict[Side, Table] = {}
        self._ladders: dict[Side, tuple[FloatArray, FloatArray]] = {}
        self._moves: tuple[float, FloatArray, FloatArray] | None = None  # of the last rate: a slider of b keeps it
        self._stocks: dict[float, int] = {}
        phone = recorded.phone
        self._joules = terms.prices.joules(phone.prefill_tps, phone.decode_tps)

    @property
    def threshold_usd_per_kwh(self) -> float:
        """The rate above which the device is the scarcer side, unless the user says which is."""
        phone = self.recorded.phone
        return threshold(self.terms.prices, phone.prefill_tps, phone.decode_tps)

    def constrained(self, usd_per_kwh: float) -> Side:
        """The scarcer side at that rate."""
        phone = self.recorded.phone
        return self.terms.scarcer or self._prices(usd_per_kwh).scarcer(phone.prefill_tps, phone.decode_tps)

    def predict(self, usd_per_kwh: float, budget: float) -> WhatIfPoint:
        """Return what that setting would have made of the history. Raises ValueError for what is out of range."""
        if not (usd_per_kwh >= 0 and 0 <= budget <= 1):
            raise ValueError(f"a rate is >= 0 $/kWh and a budget in [0, 1]: {usd_per_kwh}, {budget}")
        side = self.constrained(usd_per_kwh)
        waits = self._waits(side, self._handed_out(side, budget), self.recorded.draw)
        race = self._race(*waits)
        moved, bill, joules = self._book(race, side, usd_per_kwh)
        return WhatIfPoint(
            policy=self.policy.name,
            usd_per_kwh=usd_per_kwh,
            budget=budget,
            constrained=side.value,
            mean_ttft_s=float(race.ttft_s.mean()),
            p99_ttft_s=float(np.quantile(race.ttft_s, 0.99)),
            server_usd=bill,
            device_wh=joules / J_PER_WH,
            used=float(self._booking(side) @ self._starts(side, *waits)) / self._tokens,
            device_won=float(race.device_won.mean()),
            moved=float(moved.mean()),
        )

    def _prices(self, usd_per_kwh: float) -> Prices:
        return replace(self.terms.prices, usd_per_kwh=usd_per_kwh)

    # --- who starts when -----------------------------------------------------------------------------------------

    def _table(self, side: Side) -> Table:
        if side not in self._tables:
            known = self.recorded
            inputs = PolicyInput(
                known.curve, known.lengths, known.phone.ttft_s(known.lengths.values), side, self.terms.fitted_at,
                known.contexts,
            )  # fmt: skip
            self._tables[side] = _nest(self.policy.fit(inputs), side)
        return self._tables[side]

    def _waits(self, side: Side, handed_out: float, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Start delays of device and server, s, when the policy is to spend `handed_out`; `draws` is [n]."""
        known = self.recorded
        waits = self._table(side).delays(known.fresh, np.array(handed_out), known.score, draws)
        device_s, server_s = (np.broadcast_to(w, known.n).copy() for w in waits)
        device_s[known.race] = server_s[known.race] = 0.0
        only_device, only_server = known.bound
        device_s[only_device], server_s[only_device] = 0.0, np.inf
        device_s[only_server], server_s[only_server] = np.inf, 0.0
        return device_s, server_s

    def _handed_out(self, side: Side, budget: float) -> float:
        """Return the largest budget for the policy with which at most `budget` of the tokens is used in the end."""
        if not self.policy.learns:
            return budget
        if side not in self._ladders:
            self._ladders[side] = self._ladder(side)
        needed, spent = self._ladders[side]
        n_within = int(np.searchsorted(spent, budget * self._tokens, side="right"))
        return 1.0 if n_within == len(needed) else float(np.clip(needed[n_within] - JUST_BELOW, 0.0, 1.0))

    def _ladder(self, side: Side) -> tuple[FloatArray, FloatArray]:
        """Beyond which budget handed out each request uses the side, ascending [n], and the tokens used by then [n].

        A request draws between two rungs in the same way at every budget, so it has one such point.
        """
        known, table = self.recorded, self._table(side)
        rungs = np.unique(table.budgets)
        needed = np.full(known.n, np.inf)
        for i in reversed(range(len(rungs))):
            used = self._starts(side, *self._waits(side, rungs[i], np.ones(known.n)))
            begin = -np.inf if i == 0 else rungs[i - 1] + known.draw[used] * (rungs[i] - rungs[i - 1])
            needed[used] = begin
        order = np.argsort(needed, kind="stable")
        return needed[order], self._booking(side)[order].cumsum()

    def _booking(self, side: Side) -> FloatArray:
        """Tokens of the budget that a start of the side takes; [n]. The server bills what the device has cached."""
        return self.recorded.fresh if side is Side.DEVICE else self.recorded.prompt

    def _starts(self, side: Side, device_wait: FloatArray, server_wait: FloatArray) -> BoolArray:
        """Return a mask of the requests that the side is started for; [n]."""
        if side is Side.DEVICE:
            started: BoolArray = device_wait < server_wait + self.recorded.server_s
        else:
            started = server_wait < device_wait + self._device_s
        return started

    def _race(self, device_wait: FloatArray, server_wait: FloatArray) -> _Race:
        server_at, device_at = server_wait + self.recorded.server_s, device_wait + self._device_s
        ttft = np.minimum(server_at, device_at)
        lead = np.where(device_wait < server_at, ttft - device_wait, 0.0)
        return _Race(ttft, device_at < server_at, server_wait < device_at, lead)

    # --- what it costs -------------------------------------------------------------------------------------------

    def _book(self, race: _Race, side: Side, usd_per_kwh: float) -> tuple[BoolArray, float, float]:
        """Return the answers that moved to the device [n], the server's bill, $, and the device's energy, J, of all.

        A prompt that was started is billed, also the loser's; a device that lost has read as much of it as it had time.
        """
        known, (prefill_j, decode_j) = self.recorded, self._joules
        price = self._prices(usd_per_kwh)
        input_usd, output_usd = price.server_input_usd_per_mtok / 1e6, price.server_output_usd_per_mtok / 1e6
        read = known.fresh * np.minimum(race.lead_s / self._device_s, 1.0)
        by_device = np.where(race.device_won, known.output, 0.0)
        begun, at = self._begin_moves(race, side, usd_per_kwh)
        by_device = np.where(begun, known.output - at, by_device)
        moved = begun & (by_device > 0)
        # It reads the prompt and all that the server had written; what comes after, it writes.
        read = np.where(begun, known.fresh + at, read)
        by_server = np.where(race.device_won, 0.0, at)
        if not self.terms.stops_billing:
            by_server = np.where(race.server_ran, known.output, 0.0)
        bill = float(race.server_ran @ known.prompt) * input_usd + float(by_server.sum()) * output_usd
        return moved, bill, float(read.sum()) * prefill_j + float(by_device.sum()) * decode_j

    def _begin_moves(self, race: _Race, side: Side, usd_per_kwh: float) -> tuple[BoolArray, FloatArray]:
        """Return a mask of the server's answers that begin to move, and the server's tokens of each; both [n].

        The device catches up while the server goes on; an answer that ends before that has moved in vain.
        """
        known, terms = self.recorded, self.terms
        none = np.zeros(known.n, np.bool_), known.output
        # A side that the budget limits is not handed answers that it was not started for.
        if not terms.moves or not terms.stops_billing or side is Side.DEVICE:
            return none
        begins, ends = self._lengths_of_moves(usd_per_kwh)
        only_server = known.bound[1]
        begun = ~race.device_won & ~only_server & (begins > 0) & (begins < known.output)
        return begun, np.where(begun, np.minimum(ends, known.output), known.output)

    def _lengths_of_moves(self, usd_per_kwh: float) -> tuple[FloatArray, FloatArray]:
        """Return the tokens of the server's answer to each prompt when its move begins (0: never) and when it ends."""
        if self._moves is None or self._moves[0] != usd_per_kwh:
            known = self.recorded
            edges = known.lengths.bucket_edges(MOVE_BUCKETS)
            bucket: IndexArray = np.searchsorted(edges, known.prompt, side="left")
            n = np.maximum(np.bincount(bucket, minlength=len(edges) + 1), 1)
            prompts, fresh = (np.bincount(bucket, a, len(edges) + 1) / n for a in (known.prompt, known.fresh))
            costs = Costs(**self._prices(usd_per_kwh).per_token(known.phone.prefill_tps, known.phone.decode_tps))
            rests = known.paced if self.terms.rests else np.zeros(known.n, np.bool_)
            begins, ends = np.zeros((2, known.n))
            for may_rest in np.unique(rests).tolist():
                of_bucket = [
                    self._decide(_Move(costs, p, f, may_rest=may_rest)) for p, f in zip(prompts, fresh, strict=True)
                ]
                mine = rests == may_rest
                begins[mine], ends[mine] = np.array(of_bucket)[bucket[mine]].T
            self._moves = usd_per_kwh, begins, ends
        return self._moves[1:]

    def _decide(self, move: _Move) -> tuple[float, float]:
        """Decide as the daemon would, look by look as the answer grows: the tokens when a move begins and ends.

        A device that lost the race goes on to read its prompt, as the daemon has it do when it foresees a move.
        """
        if move.costs.cheaper is not Side.DEVICE:
            return 0.0, 0.0
        generated = 1
        while (remaining := self.recorded.answers.expected_remaining(generated, round(move.prompt))) > 0:
            goes_on = self._prospect(move, generated, remaining, DECODE_TPS[Side.SERVER])
            if self._is_worthwhile(goes_on, move):
                caught_up = generated + float(np.ceil(goes_on.source_tps * goes_on.prefill_s - 1e-9))
                return float(generated), min(self._rests_at(move, generated, caught_up), caught_up)
            # Where a move pays only if the server rests, it begins when there is the stock for that.
            following = next_check(generated)
            if move.may_rest and self._is_worthwhile(self._prospect(move, generated, remaining, 0.0), move):
                at = self._rests_at(move, generated, following)
                if at < following:
                    return at, at
            generated = following
        return 0.0, 0.0

    def _is_worthwhile(self, prospect: Prospect, move: _Move) -> bool:
        return is_worthwhile(prospect, move.costs, self.terms.pace_tps, margin=margin(0))

    def _prospect(self, move: _Move, generated: int, remaining: float, server_tps: float) -> Prospect:
        """Return the conditions of a move now, with a server that goes on at `server_tps`, or rests at 0."""
        phone = self.recorded.phone
        missing = max(0.0, move.fresh - (generated - 1) / DECODE_TPS[Side.SERVER] * phone.prefill_tps)
        wait_s = catch_up_s(missing + generated, phone.prefill_tps, server_tps)
        return Prospect(
            Side.SERVER, Side.DEVICE, round(move.prompt), generated, round(max(0.0, move.prompt - missing)), remaining,
            server_tps, phone.decode_tps, wait_s, SLOW * wait_s, 0.0, exact_follow=True,
            p_again=0.0 if server_tps else LATE,
        )  # fmt: skip

    def _rests_at(self, move: _Move, first: int, end: float) -> float:
        """Return the token from `first` on, before `end`, with which the server rests; infinite if none.

        The reader's stock has to last (`_stocked`), and the rest has to gain something: that is looked at again with
        each look at a move.
        """
        at = max(first, self._stocked(move.fresh)) if move.may_rest else NEVER
        while at < end:
            remaining = self.recorded.answers.expected_remaining(at, round(move.prompt))
            rests, goes_on = (self._prospect(move, at, remaining, tps) for tps in (0.0, DECODE_TPS[Side.SERVER]))
            if gain(rests, move.costs) > gain(goes_on, move.costs):
                return float(at)
            at = next_check(at)
        return np.inf

    def _stocked(self, fresh: float) -> int:
        """Return the first token of the server's with which a paced reader has enough in stock for a rest; or NEVER.

        The stock has to last until the device comes and, should it not, until the server is back. Here the device is
        as fast as expected, so that no server is asked again.
        """
        if fresh not in self._stocks:
            pace_tps, phone, server_tps = self.terms.pace_tps, self.recorded.phone, DECODE_TPS[Side.SERVER]
            again95_s = UNTOLD_S + float(self.recorded.curve.quantile(0.95))
            self._stocks[fresh] = NEVER
            for n in range(1, NEVER):
                since_s = (n - 1) / server_tps
                wait_s = catch_up_s(max(0.0, fresh - since_s * phone.prefill_tps) + n, phone.prefill_tps, 0.0)
                n_shown = 1 + int(pace_tps * since_s)  # the first one passes at once
                if n - n_shown >= stock_to_rest(pace_tps, SLOW * wait_s, again95_s):
                    self._stocks[fresh] = n
                    break
        return self._stocks[fresh]


@dataclass(frozen=True, slots=True)
class _Move:
    """The terms of moves of like answers: to prompts of `prompt` tokens, of which the device has to read `fresh`."""

    costs: Costs
    prompt: float
    fresh: float
    may_rest: bool


def _nest(table: Table, side: Side) -> Table:
    """Return the table with each rung starting the scarcer side no later than the rung before it."""
    if side is Side.DEVICE:
        return replace(table, device_s=np.minimum.accumulate(table.device_s, axis=0))
    return replace(table, server_s=np.minimum.accumulate(table.server_s, axis=0))
