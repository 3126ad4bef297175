"""When to change a fleet: one step at a time, each with what was expected of it and what came of it.

A fleet grows while hosts are vacant and readers content; it shrinks, or gives way, while too many answers miss what
their readers expect. A host that its owner wants to be left, or that has more than its owner allows, is relieved before
anything else is thought of. What left it comes back once it may, where layers lie as their owner has placed them, and
else as pays. After each other step it rests, what was observed before it no longer counts, nothing that
was just done is undone within a minute, and what was undone twice waits twice as long for a third time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .forecast import FleetModel
from .measured import next_steps
from .placement import Placement
from .reduction import FleetView, ReducedState, reductions, undo_reduction
from .relief import relief
from .returning import returning
from .steps import BATCH_KINDS, FleetStep, Pressure, StepKind

VACANCY = 0.3  # T_up: share of a host that is unused, above which it gets replicas
VIOLATION = 0.1  # T_down: share of answers that miss what their reader expects, above which the fleet gives way
CALM = 0.5  # of VIOLATION: only below this a fleet grows, or takes a reduction back
BAND = 0.1  # a host counts as vacant until its vacancy is this much below the threshold
WINDOW_S = 30.0  # in which answers are counted
MIN_ANSWERS = 8  # in the window, before their share says anything
PEAK_S = 600.0  # plans are made for the busiest moment in this time: the best placement is another for each load
VACANT_S = 10.0  # a host is vacant for this long before it gets something
COOLDOWN_S = 5.0  # after a step
LOOK_AGAIN_S = 10.0  # after a look for a gain that found none
NO_REVERSAL_S = 60.0  # in which nothing is undone; twice as long each time it was undone
MAX_HOLD_S = 3600.0  # for which something that was undone again and again is left alone
MOVES_PER_MINUTE = 6  # steps that copy weights
MINUTE_S = 60.0  # in which moves are counted
MAX_RECORDS = 100  # steps that are remembered
NO_SHARE = 1e-3  # of a host whose owner gives nothing: it is the worst one then

Grow = Callable[[FleetModel, Placement, Sequence[int]], list[FleetStep]]


@dataclass(frozen=True, slots=True)
class FleetSeen:
    """What the monitor saw last: the fleet with its load, and how far it is reduced; shares of each host in use.

    `n_answers` ended since the last report, `n_violating` of them later than their readers expect. `full_batch` is the
    number of answers at a time without a reduction; `tokens_per_s` what the fleet gave. Hosts `leaving` are to be
    without layers; `excess` has for each host the bytes that are there beyond what its owner allows.
    """

    fleet: FleetModel
    state: ReducedState
    full_batch: int
    cpu_shares: tuple[float, ...]
    memory_shares: tuple[float, ...]
    n_answers: int = 0
    n_violating: int = 0
    tokens_per_s: float = 0.0
    leaving: frozenset[int] = frozenset()
    excess: tuple[float, ...] = ()

    def vacancy(self, host: int) -> float:
        """Return the share of a host that is unused, of processors or memory, whichever is less."""
        return 1 - max(self.cpu_shares[host], self.memory_shares[host])


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step, when it was decided on, the rate before it, and the factor by which it changed, once that is known."""

    step: FleetStep
    at_s: float
    rate_before: float
    measured: float | None = None


def grow_measured(fleet: FleetModel, placement: Placement, eligible: Sequence[int]) -> list[FleetStep]:
    """Return the steps that raise the forecast rate most; hosts that are not vacant get nothing new."""
    hosts = tuple(replace(host, accepts=host.accepts and number in eligible) for number, host in enumerate(fleet.hosts))
    return next_steps(replace(fleet, hosts=hosts), placement)


@dataclass(slots=True)
class _Hold:
    """How long something stays undone, from `since`; each time it was undone makes it longer."""

    since: float
    for_s: float


@dataclass(slots=True)
class FleetController:
    """Decides what to change, by thresholds on vacancy and violations. It keeps no clock: `now` is seconds of any."""

    grow: Grow = grow_measured
    vacancy: float = VACANCY
    violation: float = VIOLATION
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    _answers: deque[tuple[float, int, int]] = field(default_factory=deque)
    _loads: deque[tuple[float, float]] = field(default_factory=deque)
    _vacant_since: dict[int, float] = field(default_factory=dict)
    _left: dict[tuple[int, int], _Hold] = field(default_factory=dict)
    _came: dict[tuple[int, int], _Hold] = field(default_factory=dict)
    _lowered: _Hold | None = None
    _looked_s: float = float("-inf")
    _done_s: float = float("-inf")

    def decide(
        self, now: float, seen: FleetSeen, *, may_scale: bool = True, placed: Placement | None = None
    ) -> list[FleetStep]:
        """Return the step to take now: one, or none. It counts as taken.

        Unless it `may_scale`, only what owners call for is done, a reduction is taken back, which would last for ever,
        and modules go back to where they were `placed`, if they were.
        """
        self._observe(now, seen)
        is_cool = not self.records or now >= self._calm_s()
        step = next((step for step in _called_for(seen) if is_cool or self.records[-1].step != step), None)
        if step is None and is_cool:
            wanted = self._wanted(now, seen) if may_scale else self._taken_back(seen, placed)
            step = next((step for step in wanted if self._may(now, step)), None)
        if step is None:
            return []
        self._remember(now, step, seen)
        return [step]

    def carried_out(self, now: float) -> None:
        """Note that the latest step has come to its end, which may be long after it was decided on."""
        self._done_s = now
        self._answers.clear()

    def _calm_s(self) -> float:
        """Return when the latest step was so long ago that its effect can be seen."""
        return max(self.records[-1].at_s, self._done_s) + COOLDOWN_S

    @property
    def n_counted(self) -> int:
        """The number of answers in the window."""
        return sum(n for _, n, _ in self._answers)

    def violating_share(self) -> float:
        """Return the share of answers in the window that their readers had to wait for; 0 while there are too few."""
        n = self.n_counted
        return sum(late for _, _, late in self._answers) / n if n >= MIN_ANSWERS else 0.0

    def _observe(self, now: float, seen: FleetSeen) -> None:
        self._answers.append((now, seen.n_answers, seen.n_violating))
        while self._answers and self._answers[0][0] <= now - WINDOW_S:
            self._answers.popleft()
        self._loads.append((now, seen.fleet.load.n_sequences))
        while self._loads[0][0] <= now - PEAK_S:
            self._loads.popleft()
        for host in range(len(seen.fleet.hosts)):
            vacancy = seen.vacancy(host)
            if vacancy > self.vacancy:
                self._vacant_since.setdefault(host, now)
            elif vacancy < self.vacancy - BAND:
                self._vacant_since.pop(host, None)
        if self.records and self.records[-1].measured is None and now >= self._calm_s():
            last = self.records[-1]
            if last.rate_before > 0:
                self.records[-1] = replace(last, measured=seen.tokens_per_s / last.rate_before)

    def _wanted(self, now: float, seen: FleetSeen) -> Iterator[FleetStep]:
        """Yield the steps that the state calls for, the best first."""
        share = self.violating_share()
        eligible = [h for h, since in sorted(self._vacant_since.items()) if now - since >= VACANT_S]
        if share > self.violation:
            source, pressure = _worst_host(seen)
            if pressure is Pressure.COMPUTE:
                yield from self._grow(now, seen, eligible)  # what raises the rate comes before what lowers it
            yield from reductions(seen.state, source, pressure, _view(seen), seen.full_batch)
        elif share <= CALM * self.violation:
            undo = undo_reduction(seen.state, seen.full_batch)
            if undo is not None:
                yield undo
            elif eligible:
                yield from self._grow(now, seen, eligible)

    def _taken_back(self, seen: FleetSeen, placed: Placement | None) -> Iterator[FleetStep]:
        """Yield the step that takes a reduction back when it is calm, and those that bring modules back."""
        undo = undo_reduction(seen.state, seen.full_batch)
        if undo is not None and self.violating_share() <= CALM * self.violation:
            yield undo
        if placed is not None:
            yield from returning(seen.state, placed, _view(seen))

    def _grow(self, now: float, seen: FleetSeen, eligible: Sequence[int]) -> Iterator[FleetStep]:
        """Yield the policy's first step for the busiest load of late; the ones after it are decided anew."""
        if now < self._looked_s + LOOK_AGAIN_S:
            return
        self._looked_s = now
        yield from self.grow(self.at_peak(seen.fleet), seen.state.placement, eligible)[:1]

    def at_peak(self, fleet: FleetModel) -> FleetModel:
        """Return the fleet under the busiest load of late, for which plans are made."""
        peak = max((n for _, n in self._loads), default=fleet.load.n_sequences)
        return replace(fleet, load=replace(fleet.load, n_sequences=peak))

    def _may(self, now: float, step: FleetStep) -> bool:
        """Whether a step undoes nothing that was just done, and is not one too many of its kind."""
        if step.kind is StepKind.RAISE_BATCH:
            return self._lowered is None or now >= self._lowered.since + self._lowered.for_s
        if step.kind in BATCH_KINDS:
            return True
        recent = [r for r in self.records if r.at_s > now - MINUTE_S and r.step.kind not in BATCH_KINDS]
        if len(recent) >= MOVES_PER_MINUTE:
            return False
        arriving = [self._left.get((m, step.target)) for m in step.modules if step.target is not None]
        leaving = [self._came.get((m, step.source)) for m in step.modules if step.source is not None]
        holds = [hold for hold in (*arriving, *leaving) if hold is not None]
        return all(now >= hold.since + hold.for_s for hold in holds)

    def _remember(self, now: float, step: FleetStep, seen: FleetSeen) -> None:
        """Record the step. What was observed before it says nothing about the fleet after it."""
        self.records.append(StepRecord(step, now, seen.tokens_per_s))
        self._answers.clear()
        if step.kind in (StepKind.LOWER_BATCH, StepKind.OFFLOAD):
            hold_s = self._lowered.for_s if self._lowered else NO_REVERSAL_S
            was_raised = len(self.records) > 1 and self.records[-2].step.kind is StepKind.RAISE_BATCH
            self._lowered = _Hold(now, min(MAX_HOLD_S, 2 * hold_s) if was_raised else hold_s)
        elif step.kind is StepKind.RAISE_BATCH and self._lowered:
            self._lowered.since = now
        for module in step.modules:
            if step.source is not None:
                _hold(self._left, (module, step.source), now)
            if step.target is not None:
                _hold(self._came, (module, step.target), now)


def _hold(holds: dict[tuple[int, int], _Hold], key: tuple[int, int], now: float) -> None:
    before = holds.get(key)
    holds[key] = _Hold(now, min(MAX_HOLD_S, 2 * before.for_s) if before else NO_REVERSAL_S)


def _called_for(seen: FleetSeen) -> Iterator[FleetStep]:
    """Yield the steps that owners of hosts call for."""
    view = _view(seen)
    for host in sorted(seen.leaving):
        yield from relief(seen.state, host, float("inf"), view, "the host is to be left")
    for host, n_bytes in enumerate(seen.excess):
        if n_bytes > 0 and host not in seen.leaving:
            yield from relief(seen.state, host, n_bytes, view, "it has more than its owner allows")


def _worst_host(seen: FleetSeen) -> tuple[int, Pressure]:
    """Return the host that is nearest to its safeguards, and what is short there."""
    hosts = seen.fleet.hosts
    cpu = [share / max(NO_SHARE, host.cpu_share) for share, host in zip(seen.cpu_shares, hosts, strict=True)]
    memory = [share / max(NO_SHARE, host.memory_share) for share, host in zip(seen.memory_shares, hosts, strict=True)]
    worst = max(range(len(cpu)), key=lambda host: max(cpu[host], memory[host]))
    return worst, Pressure.MEMORY if memory[worst] > cpu[worst] else Pressure.COMPUTE


def _view(seen: FleetSeen) -> FleetView:
    return FleetView(
        seen.fleet.hosts, seen.fleet.model, lambda placement: [float(b) for b in seen.fleet.forecast(placement).busy]
    )
