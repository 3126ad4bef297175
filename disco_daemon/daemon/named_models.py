"""The models of `[[models]]` as requests meet them: a context for each, with a planner that learns its own times.

`machines.resident_models` owns engines and memory; this gives the conductor what else an answer works with. Money,
privacy, traces and delivery are those of the race in force, of the moment in which a request begins. A daemon without
`[[models]]` loads none of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..conductor import AnswerContext, LocalModels
from ..config.schema import Config
from ..dispatch.migrate import Costs
from ..dispatch.mover import CostMover, Stay
from ..endpoints.base import Endpoint
from ..errors import DiscoError, RequestError
from ..machines.device_settings import load_measured
from ..machines.resident_device import ResidentModel
from ..machines.resident_memory import limit_of, taken_by
from ..machines.resident_models import ResidentModels, make_models, settings_of
from ..system.tasks import cancel_all
from ..types import EQUAL, Outcome, Side
from .assembly import Parts, Shared, make_planner
from .first_times import begin_with
from .tasks.learner import Learner
from .tasks.wattmeter import Wattmeter

log = logging.getLogger("disco.daemon")

Loaders = Callable[[], Sequence[tuple[object, bool]]]

SAVE_EVERY = 20  # requests; a crash forgets no more of when models are asked for


@dataclass(frozen=True, slots=True)
class _OtherWork:
    """Tells the wattmeter that this machine computed, for what it measures of a token is said of the race's device."""

    wattmeter: Wattmeter

    def begin(self, key: Hashable, now: float) -> None:
        del key, now
        self.wattmeter.observe_others()

    def observe_prefill(self, key: Hashable, now: float, tokens: float) -> None:
        del key, now, tokens
        self.wattmeter.observe_others()

    def end(self, key: Hashable, now: float, tokens: float = 0.0) -> None:
        del key, now, tokens
        self.wattmeter.observe_others()


@dataclass(frozen=True, slots=True, eq=False)
class _Learned:
    """What one model has of its own beside its engine: its learner, with its planner, and the task of that."""

    model: ResidentModel
    learner: Learner
    mover: Stay
    task: asyncio.Task[None]


class NamedModels(LocalModels):
    """The contexts of all named models.

    `parts` are those in force, `busy` says whether anything is answered, `loaders` has the devices of the race that
    have memory, or wait for it.
    """

    def __init__(self, shared: Shared, parts: Callable[[], Parts], busy: Callable[[], bool], loaders: Loaders) -> None:
        self._shared, self._parts, self._loaders = shared, parts, loaders
        self._resident = ResidentModels(shared.clock, lambda: taken_by(loaders()), busy)
        self._learned: dict[str, _Learned] = {}
        self._by_device: dict[int, _Learned] = {}
        self._n_used = 0

    # --- settings -----------------------------------------------------------------------------------------------------

    async def made(self, config: Config) -> dict[str, ResidentModel]:
        """Return the models of these settings, for `follow`; nothing has changed yet. Raises ConfigError."""
        return await asyncio.to_thread(
            make_models, config, self._shared.clock, dict(self._resident.by_name), self._saved_use
        )

    async def follow(self, config: Config, made: Mapping[str, ResidentModel]) -> None:
        """Have these models from the next request on."""
        before = self._learned
        for name, one in before.items():
            if made.get(name) is not one.model:
                one.learner.save()  # for the one that comes in its place
        await asyncio.to_thread(taken_by, self._loaders())  # reads a file, and remembers that
        changed = {name: one for name, one in made.items() if name not in before or before[name].model is not one}
        new = {name: await self._learner(one, config) for name, one in changed.items()}
        # All of it at once: no request is to find a model that nobody loads, or miss one that stays.
        self._learned = {
            name: self._learned_by(made[name], *new[name]) if name in new else before[name] for name in made
        }
        self._by_device = {id(one.model.device): one for one in self._learned.values()}
        self._resident.follow(made, limit_of(config))
        for settings in config.models:
            made[settings.name].settings = settings  # one that loads the same may have another `use`
        await cancel_all(*(one.task for name, one in before.items() if self._learned.get(name) is not one))

    async def close(self) -> None:
        """Close all engines, and save what was learned."""
        await self._resident.close()
        await cancel_all(*(one.task for one in self._learned.values()))
        self._save_uses()

    async def _learner(self, model: ResidentModel, config: Config) -> tuple[Learner, CostMover]:
        """Return what goes on from the times of this model, with its context: two of one file have their own."""
        parts, shared, load = self._parts(), self._shared, model.device.engine.config
        key = f"alone | {model.settings.name} | engine {load.model_path}"
        before = (
            f"{key} | n_ctx {load.n_ctx}"  # as it was called until a token was known to take as long in any context
        )
        learner = Learner(make_planner(parts.live, parts.spending), shared.history, shared.clock, key, before)
        costs = CostMover(learner.planner, lambda *tps: Costs(**self._parts().spending.prices.per_token(*tps)))
        learner.mover = costs
        await asyncio.to_thread(learner.restore)
        own = await asyncio.to_thread(settings_of, config, model.settings)
        await begin_with(await asyncio.to_thread(load_measured, own), own, learner, costs)
        return learner, costs

    def _learned_by(self, model: ResidentModel, learner: Learner, costs: CostMover) -> _Learned:
        name = f"learner of {model.settings.name}"
        return _Learned(model, learner, Stay(costs), asyncio.create_task(learner.run(), name=name))

    # --- LocalModels --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """The names of those that may be asked for now."""
        return self._learned.keys()

    def context(self, name: str) -> AnswerContext:
        """Return the context of a request for that model now. Raises RequestError."""
        return self._context_of(self._find(name))

    @contextmanager
    def held(self, name: str) -> Iterator[AnswerContext]:
        """Give that context; the model is loaded, and stays in memory until the end of this. Raises DiscoError."""
        one = self._find(name)
        with self._resident.hold(one.model):
            yield self._context_of(one)

    def about(self, name: str) -> Mapping[str, str]:
        """Return its state, and what its user says that it is for."""
        model = self._find(name).model
        return {"state": model.state} | ({"use": model.settings.use} if model.settings.use else {})

    def _find(self, name: str) -> _Learned:
        if (found := self._learned.get(name)) is None:  # since its name was looked up, the settings have changed
            msg = f"The model 'disco/{name}' is no longer in the settings: GET /v1/models lists all."
            raise RequestError(msg, status=404, param="model", code="model_not_found")
        return found

    def _context_of(self, one: _Learned) -> AnswerContext:
        parts = self._parts()
        return replace(
            parts.context,
            endpoints={Side.DEVICE: one.model.device},
            planner=one.learner.planner,
            mover=one.mover,
            energy=_OtherWork(parts.wattmeter),
            relation=lambda: EQUAL,
        )

    # --- answers and documents ----------------------------------------------------------------------------------------

    def record(self, context: AnswerContext, outcome: Outcome) -> bool:
        """Record an answer with the learner of the model that made it; return whether it was one of these."""
        one = self._by_device.get(id(context.endpoints.get(Side.DEVICE)))
        if one is None:
            return False
        one.learner.record(outcome)
        self._n_used += 1
        if self._n_used % SAVE_EVERY == 0:
            self._save_uses()
        return True

    def devices(self) -> dict[str, Endpoint]:
        """Return the device of each model by its name."""
        return {name: one.model.device for name, one in self._learned.items()}

    def document(self) -> list[dict[str, Any]]:
        """Return the `models` of `disco status --json`."""
        return self._resident.document()

    # --- what is known of their use -----------------------------------------------------------------------------------

    def _saved_use(self, name: str) -> dict[str, Any] | None:
        try:
            return self._shared.history.learned(_key(name))
        except DiscoError as e:
            log.warning("starting without what was known of the use of %s: %s", name, e)
            return None

    def _save_uses(self) -> None:
        now = self._shared.clock.wall()
        for name, one in self._learned.items():
            self._shared.history.save_learned(_key(name), now, one.model.use.to_json())


def _key(name: str) -> str:
    """Return the name under which the history keeps the use of a model."""
    return f"use | {name}"
