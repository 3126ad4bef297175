"""What a fleet's operator keeps between two looks: what owners want, counts of answers, its steps, and its limit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...config.schema import Config, FleetSettings
from ...engine import wire
from ...fleet.control import FleetSeen
from ...fleet.layout import FleetLayout
from ...fleet.steps import FleetStep, StepKind
from ...types import Outcome, Side
from .layer_plan import StepDone

MAX_STEPS = 20  # that are shown
REST_S = 30.0  # after a step that failed, and twice as long after each further one; what owners call for is not bound
MAX_REST_S = 3600.0  # an hour: what stands in the way may have gone by then
SMOOTH = 0.8  # of a rate that is shown: it is counted by the second, and answers come and go


@dataclass(frozen=True, slots=True)
class OwnerWishes:
    """What owners want: the live settings, whether the fleet rests, and which hosts are to have no layers.

    `placed` is where layers are to lie, where they do not move by themselves.
    """

    settings: FleetSettings
    paused: bool = False
    drained: frozenset[int] = frozenset()
    placed: FleetLayout | None = None

    def following(self, settings: FleetSettings, layout: FleetLayout) -> OwnerWishes:
        """Return the wishes under other live settings; layers that stop moving by themselves stay in `layout`."""
        placed = None if settings.mode == "auto" else self.placed or layout
        return replace(self, settings=settings, placed=placed)


@dataclass(slots=True)
class SeenRate:
    """Tokens that the engine draws a second, from its statistics."""

    tokens_per_s: float = 0.0
    _stats: wire.Stats | None = None
    _at_s: float = 0.0

    def observe(self, now: float, stats: wire.Stats | None, n_active: int) -> float:
        """Return the present rate; between two reports it is as before while answers are drawn."""
        if stats is None or not n_active:
            self.tokens_per_s = 0.0
        elif stats is not self._stats and self._stats is not None and now > self._at_s:
            n_tokens = stats.completion_tokens - self._stats.completion_tokens
            self.tokens_per_s = max(0, n_tokens) / (now - self._at_s)
        if stats is not self._stats:
            self._stats, self._at_s = stats, now
        return self.tokens_per_s


@dataclass(slots=True)
class AnswerCounts:
    """Answers of this device since the last look, and how many of them were late."""

    n_answers: int = 0
    n_late: int = 0

    def observe(self, outcome: Outcome, config: Config) -> None:
        """Count an answer: late are those with less QoE, or a later first token, than is expected."""
        if outcome.winner is not Side.DEVICE or outcome.ttft_s is None:
            return
        qoe = 1.0 if outcome.reading is None else outcome.reading.qoe
        self.n_answers += 1
        self.n_late += qoe < config.fleet.slo_qoe or outcome.ttft_s > config.delivery.expected_ttft_s


@dataclass(slots=True)
class AnswerLimit:
    """How many answers run at a time, 0 for as many as come, and whether those that wait leave the KV cache.

    Without a limit `full_batch` of them ran.
    """

    n_answers: int = 0
    offloaded: bool = False
    full_batch: int = 1

    def see(self, n_active: int) -> None:
        """Take note of how many answers run."""
        if not self.n_answers:
            self.full_batch = max(1, n_active)

    def follow(self, step: FleetStep, seen: FleetSeen) -> None:
        """Let fewer answers run at a time, or more again, as a step says."""
        after = seen.state.after(step)
        self.n_answers = 0 if after.batch >= self.full_batch and step.kind is StepKind.RAISE_BATCH else after.batch
        self.offloaded = after.offloaded


@dataclass(slots=True)
class StepLog:
    """The latest steps, and how long there are no others after some that failed.

    `measured` has the factor by which the rate has changed, by the time at which a step was decided on.
    """

    n_moves: int = 0
    measured: dict[float, float | None] = field(default_factory=dict)
    _n_failed: int = 0
    _rests_until_s: float = 0.0
    _steps: deque[tuple[float, StepDone]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def rests(self, now: float) -> bool:
        """Whether it is too early for a step after the one that failed."""
        return now < self._rests_until_s

    def count(self, now: float, *, failed: bool, moves: bool) -> None:
        """Count a step; `moves`: it moves layers, if it has not failed."""
        self._n_failed = self._n_failed + 1 if failed else 0
        if failed:
            self._rests_until_s = now + min(MAX_REST_S, REST_S * 2 ** (self._n_failed - 1))
        self.n_moves += moves and not failed

    def note(self, at_s: float, step: StepDone) -> None:
        """Take a step that has ended, with the time at which it was decided on."""
        self._steps.append((at_s, step))

    def shown(self) -> list[dict[str, Any]]:
        """Return the latest steps, the last one last, with what was expected of them and what came of it."""
        found: list[dict[str, Any]] = []
        for at_s, step in self._steps:
            factor = self.measured.get(at_s)
            shown = msgspec.structs.replace(step, measured=None if factor is None else round(factor, 3))
            found.append(msgspec.to_builtins(shown))
        return found


@dataclass(slots=True)
class FleetFigures:
    """What is shown of a fleet: late answers, what is unused, bytes beyond what owners allow, and its speed-up."""

    violation: float | None = None
    vacancy: float | None = None
    excess: tuple[float, ...] = ()
    speedup: float | None = None

    def compare(self, factor: float) -> None:
        """Take how many times the whole model's rate in one process the present one is."""
        self.speedup = factor if self.speedup is None else SMOOTH * self.speedup + (1 - SMOOTH) * factor
