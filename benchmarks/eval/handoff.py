"""What moving running answers saves, on recorded traces, by the daemon's own decision.

Every request is played as without handoffs; then, look by look as its answer grows, `is_worthwhile` decides whether it
moves to the side whose tokens are cheaper. What the decision expects comes from the past half of the trace (TTFTs,
answer lengths); what happens comes from the other half: a server asked to go on takes the next TTFT of its trace.
Prefill, overlap and handoffs begun in vain are charged. The reader takes READER_TPS tokens a second from a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from disco_daemon.arrays import BoolArray, FloatArray
from disco_daemon.dispatch.migrate import Costs, Prospect, catch_up_s, is_worthwhile, margin, next_check
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.survival import Survival
from disco_daemon.simulate.recorded import Phone
from disco_daemon.simulate.whatif import READER_TPS
from disco_daemon.types import Side

from .evaluate import (
    LIMITS,
    SERVER_TPS,
    SERVER_USD,
    USD_PER_KWH,
    WATTS,
    Cell,
    EvaluationSetup,
    Scene,
    make,
    measure,
    play_policy,
    prices,
    request_usd,
)
from .player import Played, Stream
from .published import GFLOP, MAX_TOKENS, SERVICES, token_usd
from .traces import LatencyTrace, Requests

# handoff (docs/explain/design.md#handoff): the source runs on until the target takes over, which prefills all.
# kept: the same, but a device that lost the race keeps and completes its prefill of the prompt.
# paused: kept, and the source rests once the reader has enough to read until the target comes; a device goes on
# in time should it not, a server is closed.
# paper: paused, with the mean wait for a reserve, nothing prefilled again and no overlap: as a published figure may
# have been reckoned, not a thing that can be had.
VARIANTS = ("handoff", "kept", "paused", "paper")
NONE = "none"
STOPS, KEEPS = frozenset({"paused", "paper"}), frozenset({"kept", "paused", "paper"})
NOT_RUN = -1.0  # in place of the prompt tokens that a device has left to prefill


def dear_usd_per_kwh(phones: Sequence[Phone], times: float) -> float:
    """The exchange rate, $/kWh, at which every phone's cheapest token costs `times` the server's dearest or more.

    Above `times` = 1 all of them are device-constrained by the definition of docs/explain/design.md#policies.
    """
    quickest = max(max(p.prefill_tps, p.decode_tps) for p in phones)
    return times * max(SERVER_USD) * quickest * 3.6e6 / WATTS


@dataclass(frozen=True, eq=False)
class HandoffTerms:
    """The terms of a decision about one phone and one trace, without the request.

    `blind`: the rest of an answer is expected as of all prompts together, whatever the length of its own.
    """

    scene: Scene
    phone: Phone
    costs: Costs
    variant: str
    target: Side
    server_tps: float = SERVER_TPS
    blind: bool = False

    @property
    def tps(self) -> tuple[float, float]:
        """Speeds of the source and the target, token/s."""
        speeds = {Side.DEVICE: self.phone.decode_tps, Side.SERVER: self.server_tps}
        return speeds[self.target.other], speeds[self.target]

    @cached_property
    def _looks(self) -> dict[Survival, list[tuple[int, float]]]:
        return {}

    def looks(self, prompt: int) -> list[tuple[int, float]]:
        """Tokens generated at each look, and how many are then expected to come."""
        curve = self.scene.answers.curve(0 if self.blind else prompt)
        if curve not in self._looks:
            looks, at = [], 1
            while (remaining := float(curve.expected_remaining(at))) > 0:
                looks.append((at, remaining))
                at = next_check(at)
            self._looks[curve] = looks
        return self._looks[curve]

    @property
    def slack_s(self) -> float:
        """The reading time that each further token of the source adds beyond its own generation, s."""
        return 1 / READER_TPS - 1 / self.tps[0]

    def decide(self, prompt: int, left: float) -> tuple[int, float]:
        """Return the token at which the handoff begins (0: never), and a device target's prefill time from then on, s.

        `left` prompt tokens are still to prefill on a device that lost the race; NOT_RUN where it did not run.
        """
        for generated, remaining in self.looks(prompt):
            prospect = self._prospect(prompt, left, generated, remaining)
            if prospect is not None and is_worthwhile(prospect, self.costs, READER_TPS, margin=margin(0)):
                return generated, prospect.prefill_s
        return 0, 0.0

    def _prospect(self, prompt: int, left: float, generated: int, remaining: float) -> Prospect | None:
        """Return the conditions of a handoff now; None where the source would rest and the reader wait."""
        stops, slack = self.variant in STOPS, self.slack_s * generated
        source_tps, target_tps = self.tps
        cached = prompt if left != NOT_RUN and self.target is Side.DEVICE else 0
        wait_s = self._device_s(prompt, left, generated) if self.target is Side.DEVICE else self._server_s(slack)
        if stops and (self.target is Side.DEVICE or self.variant == "paper"):
            if wait_s > slack:
                return None
            source_tps = 0.0
        if self.variant == "paper":
            cached = prompt + generated
        follows = self.target is Side.DEVICE
        return Prospect(
            self.target.other, self.target, prompt, generated, cached, remaining, source_tps, target_tps,
            wait_s, wait_s, 0.0, follows,
        )  # fmt: skip

    def _device_s(self, prompt: int, left: float, generated: int) -> float:
        """Return the time until the device has caught up, s. A kept one has prefilled its prompt meanwhile."""
        start_s = self.phone.start_s if left == NOT_RUN else 0.0
        since_s = (generated - 1) / self.tps[0]
        missing = prompt if left == NOT_RUN else max(0.0, left - since_s * self.phone.prefill_tps)
        follow_tps = 0.0 if self.variant in STOPS else self.tps[0]
        return catch_up_s(missing + generated, self.phone.prefill_tps, follow_tps, start_s)

    def _server_s(self, slack: float) -> float:
        """Return how long the source is expected to run on, s: a resting device goes on when the reader runs out."""
        return float(np.maximum(self.scene.past - (slack if self.variant == "paused" else 0.0), 0.0).mean())


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """The outcome of the handoffs: $ of each request and whether it moved, [requests, budgets, seeds].

    `delayed` are the tokens that came too late for the reader, and `gap_s` the largest gap as read, s, of the same
    shape; 0 and 1 / READER_TPS where nothing moved.
    """

    cost_usd: FloatArray
    done: BoolArray
    delayed: FloatArray
    gap_s: FloatArray


def move(terms: HandoffTerms, stream: Stream, played: Played) -> Moved:
    """Hand over every answer of `played` for which that is worth it, and charge it."""
    source_tps, target_tps = terms.tps
    running = played.device_won if terms.target is Side.SERVER else ~played.device_won
    at, wait = _decisions(terms, stream, played, running)
    if terms.target is Side.SERVER:
        wait = np.broadcast_to(np.roll(stream.server_s, -1, axis=0)[:, None, :], at.shape)
    output = stream.output[:, None, :]
    begun = (at > 0) & (at < output)
    overlap = np.where(begun, np.minimum(_overlap(terms, at, wait), output - at), 0.0)
    done = begun & (output - at > overlap)
    cost = request_usd(stream, played, terms.costs) + _extra(terms, stream, played, at, begun, done, overlap, wait)
    # The target's first token against the time at which the reader, who never waited before, wants it.
    late = np.where(done, np.maximum((at - 1) / source_tps + wait - (at + overlap) / READER_TPS, 0.0), 0.0)
    caught_up = np.ceil(late / max(1 / READER_TPS - 1 / target_tps, 1e-9))
    delayed = np.where(late > 1e-9, np.clip(caught_up, 1.0, np.maximum(output - at - overlap, 1.0)), 0.0)
    return Moved(cost, done, delayed, 1 / READER_TPS + late)


def _decisions(
    terms: HandoffTerms, stream: Stream, played: Played, running: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """`decide` of each request that runs on the dearer side; equal ones are decided once."""
    prompt = np.broadcast_to(stream.prompt[:, None, :], running.shape)
    left = np.full(running.shape, NOT_RUN)
    if terms.variant in KEEPS and terms.target is Side.DEVICE:
        assert played.lead_s is not None
        prefilled = (played.lead_s - terms.phone.start_s) * terms.phone.prefill_tps
        left = np.where(played.device_ran, np.ceil(np.clip(prompt - prefilled, 0.0, prompt)), NOT_RUN)
    keys, which = np.unique(np.stack([prompt[running], left[running]]), axis=1, return_inverse=True)
    decided = np.array([terms.decide(int(p), rest) for p, rest in keys.T.tolist()]).reshape(-1, 2)
    at, wait = np.zeros((2, *running.shape))
    at[running], wait[running] = decided[which.ravel()].T
    return at, wait


def _overlap(terms: HandoffTerms, at: FloatArray, wait: FloatArray) -> FloatArray:
    """Tokens that the source makes until the target's first one, were the answer long enough."""
    if terms.variant == "paper" or (terms.variant == "paused" and terms.target is Side.DEVICE):
        return np.zeros_like(at)
    slack = terms.slack_s * at if terms.variant == "paused" else 0.0
    tokens: FloatArray = np.ceil(terms.tps[0] * np.maximum(wait - slack, 0.0) - 1e-9)
    return tokens


def _extra(
    terms: HandoffTerms,
    stream: Stream,
    played: Played,
    at: FloatArray,
    begun: BoolArray,
    done: BoolArray,
    overlap: FloatArray,
    wait: FloatArray,
) -> FloatArray:
    """$ that the handoffs add to each request; negative where they save."""
    source, target = terms.costs.decode(terms.target.other), terms.costs.decode(terms.target)
    prompt, output = stream.prompt[:, None, :], stream.output[:, None, :]
    if terms.target is Side.SERVER:
        prefilled = prompt + at
        moved, wasted = output - at, overlap
    else:
        again = np.where(played.device_ran, 0.0, prompt) if terms.variant in KEEPS else prompt
        in_time = (output - at) / terms.tps[0] * terms.phone.prefill_tps  # by the end of an answer it never caught up
        prefilled = again + at + overlap
        prefilled = np.where(done, prefilled, np.minimum(prefilled, in_time))
        moved, wasted = output - at - overlap, np.zeros_like(overlap)
    if terms.variant == "paper":
        prefilled = np.zeros_like(at)
    tried = begun * prefilled * terms.costs.prefill(terms.target)
    added: FloatArray = tried + done * (wasted * source - moved * (source - target))
    return added


def evaluate_handoffs(
    traces: Sequence[LatencyTrace],
    requests: Requests,
    setup: EvaluationSetup,
    advance: Callable[[], None] = lambda: None,
    *,
    dearer: float = 2.0,
    server_tps: float = SERVER_TPS,
    published_prices: bool = False,
    blind: bool = False,
) -> Iterator[Cell]:
    """Yield all cells, without handoff and with each variant. Raises ConfigError for a policy that is only a limit.

    Server-constrained cells price the device's energy as a household does; device-constrained ones at the rate of
    `dear_usd_per_kwh(phones, dearer)`. Servers generate `server_tps` token/s. With `published_prices` costs are the
    paper's, and so is the longest answer; only its services and phones have them. `blind` as in `HandoffTerms`.
    """
    if limits := [p for p in setup.policies if p in LIMITS]:
        msg = f"{limits[0]} is a limit, not a policy that could hand over"
        raise ConfigError(msg)
    rates = {Side.DEVICE: dear_usd_per_kwh(setup.phones, dearer), Side.SERVER: USD_PER_KWH}
    if published_prices:
        _require_published(traces, setup.phones)
        requests = Requests(requests.prompt, np.minimum(requests.output, MAX_TOKENS))
    for trace in traces:
        scene = Scene.of(trace, requests, setup)
        for constrained in setup.constraints:
            for phone in setup.phones:
                costs = (
                    Costs(*token_usd(trace.name, phone.name, constrained))
                    if published_prices
                    else prices(phone, rates[constrained])
                )
                for name in setup.policies:
                    played = play_policy(scene, phone, constrained, make(name, setup), name, setup)
                    variants = [
                        HandoffTerms(scene, phone, costs, variant, costs.cheaper, server_tps, blind)
                        for variant in VARIANTS
                        if costs.cheaper is not None
                    ]
                    yield from _cells(scene, phone, constrained, costs, name, setup, played, variants)
                advance()


def _require_published(traces: Sequence[LatencyTrace], phones: Sequence[Phone]) -> None:
    """Raise ConfigError for a trace or a phone whose prices the paper does not state."""
    unknown = [t.name for t in traces if t.name not in SERVICES.values()] + [
        p.name for p in phones if p.name not in GFLOP
    ]
    if unknown:
        msg = (
            f"the paper states no price for {unknown[0]}: --published-prices goes with its services "
            f"({', '.join(SERVICES.values())}) and its phones ({', '.join(GFLOP)})"
        )
        raise ConfigError(msg)


def _cells(
    scene: Scene, phone: Phone, constrained: Side, costs: Costs, name: str, setup: EvaluationSetup, played: Played,
    variants: Sequence[HandoffTerms],
) -> Iterator[Cell]:  # fmt: skip
    base = [
        measure(scene.stream, scene.trace.name, phone, constrained, name, b, played, i, n_tested=scene.n_tested)
        for i, b in enumerate(setup.budgets)
    ]
    stay = request_usd(scene.stream, played, costs)
    for i, cell in enumerate(base):
        yield replace(cell, cost_usd=float(stay[:, i].mean()), largest_gap_s=1 / READER_TPS)
    for terms in variants:
        moved = move(terms, scene.stream, played)
        yield from (_cell(cell, terms.variant, moved, i) for i, cell in enumerate(base))


def _cell(cell: Cell, variant: str, moved: Moved, i: int) -> Cell:
    delayed = moved.delayed[:, i][moved.done[:, i]]
    return replace(
        cell,
        handoff=variant,
        cost_usd=float(moved.cost_usd[:, i].mean()),
        handoffs=float(moved.done[:, i].mean()),
        largest_gap_s=float(moved.gap_s[:, i].max(axis=0).mean()),
        delayed_mean=float(delayed.mean()) if delayed.size else 0.0,
        delayed_p99=float(np.quantile(delayed, 0.99)) if delayed.size else 0.0,
    )


def savings(cells: Sequence[Cell]) -> list[tuple[Cell, float]]:
    """Each cell with a handoff, and the share of its cost without one that it saves; negative where it lost."""
    places = {_place(c): c.cost_usd for c in cells if c.handoff == NONE}
    return [(c, 1 - c.cost_usd / places[_place(c)]) for c in cells if c.handoff != NONE]


def _place(cell: Cell) -> tuple[str, str, str, str, float]:
    return cell.trace, cell.device, cell.constraint, cell.policy, cell.budget
