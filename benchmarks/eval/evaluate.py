"""Policies against recorded traces, cell by cell (trace x device x constraint x policy x budget)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.dispatch import hedge
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.migrate import Costs
from disco_daemon.dispatch.optimal import KAPPA, Optimal
from disco_daemon.dispatch.pacer import Pacer
from disco_daemon.dispatch.paper import Paper
from disco_daemon.dispatch.policies import REGISTRY
from disco_daemon.dispatch.policy import Policy, PolicyInput
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.lengths import LengthDistribution, OutputLengths
from disco_daemon.estimation.server_ttft import ServerTtft
from disco_daemon.estimation.survival import Survival, kaplan_meier
from disco_daemon.estimation.ttft_context import Contexts, estimate_contexts
from disco_daemon.simulate.recorded import Phone, Recent
from disco_daemon.simulate.whatif import READER_TPS
from disco_daemon.types import Side

from ..qoe.steady import qoe_steady
from .bootstrap import interval
from .limits import best_p99, clairvoyant
from .paper_variants import PaperText, PaperTuned
from .player import Played, Stream, play, play_paced
from .traces import LatencyTrace, Requests

N_REQUESTS = 2000  # a lane; twenty requests make up the worst 1 %
TAIL = 0.01  # of the requests, for the CVaR
MIN_TESTED = 100  # rows: of fewer the worst 1 % are not known
MAX_BUCKETS = 64  # Alpaca has 62 prompt lengths: each its own
SERVER_TPS = 60.0  # token/s between two tokens of a server; the traces have none for all services
WATTS, USD_PER_KWH = 5.0, 0.30  # a phone under load, household electricity
SERVER_USD = (0.15e-6, 0.60e-6)  # $ per input and output token: gpt-4o-mini

PHONES = (
    Phone("pixel7pro-bloom1.1b", 31.32, 13.93),
    Phone("pixel7pro-bloom560m", 51.80, 20.14),
    Phone("xiaomi14-qwen0.5b", 79.90, 21.47),
)
LIMITS = ("clairvoyant", "best-p99")
# Two policies are played in forms of the simulator's own (`make`), all others of the registry as the daemon makes them.
PAPER = ("paper", "paper-eq1", "paper-paced", "paper-tuned")
OPTIMAL = ("optimal", "optimal-unconditioned", "optimal-hedged")
OTHERS = [entry for entry in REGISTRY if entry.is_simulated and entry.name not in (*PAPER, *OPTIMAL)]
POLICIES = (*(entry.name for entry in sorted(OTHERS, key=lambda entry: entry.learns)), *PAPER, *OPTIMAL)
PACED = frozenset({*PAPER[1:], *OPTIMAL, *(entry.name for entry in OTHERS if entry.is_paced)})


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the result: means over the seeds. TTFTs and gaps in s, `cost_usd` and `handoffs` per request.

    `handoff` is the variant that was simulated, or `none`; with one, `delayed_mean` and `delayed_p99` are the tokens
    that came too late for the reader, per handoff. `n_tested` rows of the trace were played: below MIN_TESTED of them
    the P99 and the CVaR are one or two rows, and count in no table. `asked_twice` is the share of all prompt tokens
    that the server was sent a second time. `ci95` has the 95 % intervals of some figures over the seeds, by their
    names, where they were asked for.
    """

    trace: str
    device: str
    constraint: str
    policy: str
    budget: float
    mean_ttft_s: float
    p50_ttft_s: float
    p95_ttft_s: float
    p99_ttft_s: float
    cvar_ttft_s: float
    realised_ratio: float
    cost_usd: float
    qoe: float
    qoe_strict: float
    handoffs: float
    largest_gap_s: float
    handoff: str = "none"
    delayed_mean: float = 0.0
    delayed_p99: float = 0.0
    n_tested: int = 0
    asked_twice: float = 0.0
    ci95: dict[str, tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class EvaluationSetup:
    """The setting of an evaluation. `windowed`: the pacer keeps its 200-request promise, which costs some gain.

    With `bootstrap` each cell has intervals. `optimal-hedged` asks a server again that is slower than in all but
    `hedge_share` of its answers.
    """

    policies: Sequence[str]
    phones: Sequence[Phone] = PHONES
    constraints: Sequence[Side] = (Side.DEVICE, Side.SERVER)
    budgets: Sequence[float] = tuple(round(0.1 * i, 1) for i in range(1, 10))
    alpha: float = 0.05
    kappa: float = KAPPA
    n_seeds: int = 10
    n_requests: int = N_REQUESTS
    windowed: bool = False
    bootstrap: bool = False
    hedge_share: float = hedge.SHARE

    def __post_init__(self) -> None:
        unknown = [p for p in self.policies if p not in (*POLICIES, *LIMITS)]
        if unknown:
            msg = f"unknown policy {unknown[0]!r}; choose from {', '.join((*POLICIES, *LIMITS))}"
            raise ConfigError(msg)

    @property
    def n_groups(self) -> int:
        """Groups of cells per trace, for a progress bar."""
        return len(self.phones) * len(self.constraints)


def make(name: str, setup: EvaluationSetup) -> Policy:
    """Make the policy of that name for the simulator: `paper` as published, `optimal` with a bucket for each length."""
    if name == "paper-tuned":
        return PaperTuned(setup.kappa)
    if name == "paper-eq1":
        return PaperText(setup.alpha, setup.kappa)
    if name in PAPER:
        return Paper(setup.alpha, paced=name in PACED)
    if name in OPTIMAL:
        return Optimal(setup.kappa, MAX_BUCKETS)
    return make_policy(name, alpha=setup.alpha, kappa=setup.kappa)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """One trace fitted on its first half, to be tested on its second. `past` [n] are the TTFTs of the first, s.

    The server is silent for `hedge_s`, s, before `optimal-hedged` asks it again.
    """

    trace: LatencyTrace
    past: FloatArray
    samples: Survival
    fitted: Survival
    contexts: Contexts
    recent: Recent
    lengths: LengthDistribution
    answers: OutputLengths
    stream: Stream
    tested: Survival
    tested_lengths: LengthDistribution
    n_tested: int
    hedge_s: float

    @classmethod
    def of(cls, trace: LatencyTrace, requests: Requests, setup: EvaluationSetup) -> Scene:
        """Fit on the first halves of the trace and the lengths, and draw from the second ones."""
        past, future = trace.halves()
        seen, unseen = requests.halves()
        estimator = ServerTtft(window=len(past), watchful=False)
        for ttft in past.tolist():
            estimator.add(ttft, censored=False)
        own = kaplan_meier(past, np.ones(len(past), dtype=np.bool_))
        return cls(
            trace,
            past,
            own,
            estimator.curve(),
            estimate_contexts(*estimator.samples()),
            Recent(estimator.predictor(), estimator.levels, math.log(own.quantile(0.95)) + 0.1),
            LengthDistribution.of(seen.prompt),
            _answers(seen),
            Stream.draw(future, unseen, setup.n_requests, range(setup.n_seeds)),
            kaplan_meier(future, np.ones(len(future), dtype=np.bool_)),
            LengthDistribution.of(unseen.prompt),
            len(future),
            hedge.silence_s(own, setup.hedge_share),
        )

    def policy_input(self, phone: Phone, constrained: Side, budget: float, name: str) -> PolicyInput:
        """Return the input that the policy of that name is fitted to; the prior and the contexts are our own."""
        device_s = phone.ttft_s(self.lengths.values)
        server = self.fitted if name.startswith("optimal") else self.samples
        contexts = self.contexts if name in ("optimal", "optimal-hedged") else None
        once = PolicyInput(server, self.lengths, device_s, constrained, budget, contexts)
        return hedge.hedged(once, self.hedge_s) if name == "optimal-hedged" and constrained is Side.DEVICE else once


def _answers(seen: Requests) -> OutputLengths:
    answers = OutputLengths()
    for tokens, prompt in zip(seen.output.tolist(), seen.prompt.tolist(), strict=True):
        answers.add(tokens, censored=False, prompt=prompt)
    return answers


def evaluate(
    traces: Sequence[LatencyTrace],
    requests: Requests,
    setup: EvaluationSetup,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Cell]:
    """Yield all cells in the order of their names; call `advance` after each group of trace, phone and constraint."""
    for trace in traces:
        scene = Scene.of(trace, requests, setup)
        for constrained in setup.constraints:
            for phone in setup.phones:
                for name in setup.policies:
                    yield from _cells(scene, phone, constrained, name, setup)
                advance()


def _cells(scene: Scene, phone: Phone, constrained: Side, name: str, setup: EvaluationSetup) -> Iterator[Cell]:
    budgets = np.array(setup.budgets)
    if name == "best-p99":
        yield from _best_p99(scene, phone, constrained, setup)
        return
    played = (
        clairvoyant(scene.stream, phone, budgets, constrained)
        if name == "clairvoyant"
        else play_policy(scene, phone, constrained, make(name, setup), name, setup)
    )
    for i, budget in enumerate(setup.budgets):
        yield measure(
            scene.stream, scene.trace.name, phone, constrained, name, budget, played, i,
            n_tested=scene.n_tested, bootstrap=setup.bootstrap,
        )  # fmt: skip


def play_policy(
    scene: Scene, phone: Phone, constrained: Side, policy: Policy, name: str, setup: EvaluationSetup
) -> Played:
    """Play the test half with `policy` at every budget of the set-up; `name` says what it is fitted to."""
    budgets = np.array(setup.budgets)
    tables = [policy.fit(scene.policy_input(phone, constrained, b, name)) for b in setup.budgets]
    if name not in PACED:
        return play(scene.stream, phone, tables, budgets, constrained)
    lanes = np.repeat(budgets[:, None], setup.n_seeds, axis=1)
    pacer = Pacer(lanes, scene.lengths.mean, windowed=setup.windowed)
    if name != "optimal-hedged" or constrained is Side.SERVER:
        return play_paced(scene.stream, phone, tables, pacer, constrained, scene.recent)
    stream = scene.stream.asking_twice(scene.hedge_s)
    played = play_paced(stream, phone, tables, pacer, constrained, scene.recent)
    is_slow = scene.stream.server_s[:, None, :] > scene.hedge_s
    return replace(played, asked_twice=is_slow & (played.ttft_s > scene.hedge_s))


def measure(
    stream: Stream, trace: str, phone: Phone, constrained: Side, name: str, budget: float, played: Played, i: int, *,
    n_tested: int, bootstrap: bool = False,
) -> Cell:  # fmt: skip
    """The cell of the `i`-th budget of what was played, of `n_tested` rows of a trace."""
    ttft, won = played.ttft_s[:, i], played.device_won[:, i]
    cvar = np.sort(ttft, axis=0)[-max(1, round(TAIL * len(ttft))) :].mean(axis=0)
    quantiles = np.quantile(ttft, (0.5, 0.95, 0.99), axis=0)
    p50, p95, p99 = quantiles.mean(axis=1)
    of_seeds = {"mean_ttft_s": ttft.mean(axis=0), "p99_ttft_s": quantiles[2], "cvar_ttft_s": cvar}
    qoe, strict = (float(qoe_steady(ttft, stream.output, expected, READER_TPS).mean()) for expected in (1.0, 0.3))
    return Cell(
        trace=trace,
        device=phone.name,
        constraint=constrained.value,
        policy=name,
        budget=budget,
        mean_ttft_s=float(ttft.mean()),
        p50_ttft_s=float(p50),
        p95_ttft_s=float(p95),
        p99_ttft_s=float(p99),
        cvar_ttft_s=float(cvar.mean()),
        realised_ratio=float(played.ratio[i].mean()),
        cost_usd=float(request_usd(stream, played.at(i), prices(phone, USD_PER_KWH)).mean()),
        qoe=qoe,
        qoe_strict=strict,
        handoffs=0.0,
        largest_gap_s=float(np.where(won, 1 / phone.decode_tps, 1 / SERVER_TPS).max(axis=0).mean()),
        n_tested=n_tested,
        asked_twice=_share_twice(stream, played, i),
        ci95={key: interval(of_seed) for key, of_seed in of_seeds.items()} if bootstrap else None,
    )


def _share_twice(stream: Stream, played: Played, i: int) -> float:
    if played.asked_twice is None:
        return 0.0
    return float((played.asked_twice[:, i] * stream.prompt).sum() / stream.prompt.sum())


def prices(phone: Phone, usd_per_kwh: float) -> Costs:
    """$ per token of that phone at that price of its energy, and of the server."""
    usd_per_s = WATTS / 3.6e6 * usd_per_kwh
    return Costs(usd_per_s / phone.prefill_tps, usd_per_s / phone.decode_tps, *SERVER_USD)


def request_usd(stream: Stream, played: Played, costs: Costs) -> FloatArray:
    """$ of each request [requests, budgets, seeds]: every prompt that was started, and the answer by who gave it."""
    prompts = played.device_ran * costs.device_prefill + played.server_ran * costs.server_prefill
    if played.asked_twice is not None:
        prompts = prompts + played.asked_twice * costs.server_prefill
    answers = np.where(played.device_won, costs.device_decode, costs.server_decode)
    total: FloatArray = prompts * stream.prompt[:, None, :] + answers * stream.output[:, None, :]
    return total


def _best_p99(scene: Scene, phone: Phone, constrained: Side, setup: EvaluationSetup) -> Iterator[Cell]:
    """A bound on one figure only: the others are not defined."""
    lengths, nan = scene.tested_lengths, float("nan")
    for budget in setup.budgets:
        device_s = phone.ttft_s(lengths.values)
        p99 = best_p99(scene.tested, lengths.values, lengths.shares, device_s, budget, constrained)
        row: dict[str, Any] = dict.fromkeys(
            (f for f in Cell.__dataclass_fields__ if f.endswith("_s") or f.startswith("qoe")), nan
        )
        yield Cell(
            scene.trace.name, phone.name, constrained.value, "best-p99", budget,
            **{**row, "p99_ttft_s": p99, "realised_ratio": nan, "cost_usd": nan, "handoffs": nan, "asked_twice": nan},
            n_tested=scene.n_tested,
        )  # fmt: skip


def as_json(cell: Cell) -> dict[str, Any]:
    """The cell with None for what is not defined; without `ci95` where no intervals were asked for."""
    found = {key: None if isinstance(v, float) and np.isnan(v) else v for key, v in asdict(cell).items()}
    if cell.ci95 is None:
        del found["ci95"]
    return found
