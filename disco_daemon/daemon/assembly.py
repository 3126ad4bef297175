"""Assembles the parts of a daemon from its settings: all wiring is here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..api.control.metrics import Metrics
from ..clock import Clock
from ..conductor import AnswerContext, DeliveryDefaults, Privacy
from ..conductor.traces import Traces
from ..config.pricelist import load
from ..config.schema import Config
from ..config.servers import first_server, servers_of
from ..dispatch.migrate import Costs
from ..dispatch.mover import CostMover, Forced, Mover, Stay
from ..dispatch.planner import Planner
from ..dispatch.policy import Policy
from ..endpoints.base import Endpoint
from ..endpoints.server_off import Off
from ..endpoints.shaper import Shape
from ..engine.early import EarlyEngine
from ..estimation.knowledge import Knowledge
from ..machines.fleet.members import FleetMembers
from ..machines.kinds import kind_of
from ..machines.managed_device import Making, ManagedDevice, device_of
from ..machines.split.exit_trainer import ExitTrainer
from ..machines.split.hosted_range import make_exit_trainer
from ..money.caps import CapLimits
from ..money.catalog import Catalog
from ..money.spending import Speeds, Spending
from ..profiling.autotuner import Autotuner
from ..profiling.saved import Measured
from ..store import History
from ..system.net import without_credentials
from ..types import Delivery, LedgerEntry, Relation, Side
from .endpoints import make_endpoints
from .grading import Grading
from .money import ProbeAccount, limits_of, make_sensors, make_spending
from .prediction import policy_of
from .scarcity import ScarceSide, spending_now
from .tasks.learner import Learner
from .tasks.loop_monitor import LoopMonitor
from .tasks.wattmeter import Wattmeter

if TYPE_CHECKING:
    from ..conductor.context import Servers
    from .tasks.prober import Prober
    from .tasks.probers import Probers


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that live as long as the process, whatever the settings become.

    `price_lists` is the folder of the user's own price lists.
    """

    clock: Clock
    history: History
    metrics: Metrics
    loop_monitor: LoopMonitor
    privacy: Privacy
    traces: Traces
    price_lists: Path
    members: FleetMembers | None = None

    def book(self, entry: LedgerEntry) -> None:
        """Book a cost without an answer with the history and the metrics; neither blocks."""
        self.history.book(entry)
        self.metrics.book(entry)


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What parts in use take up of the settings: made whole, so that nothing can fail once the first of it is set."""

    config: Config
    limits: CapLimits
    defaults: DeliveryDefaults
    policy: Policy
    relation: Callable[[], Relation]

    @classmethod
    def of(cls, config: Config, endpoints: Mapping[Side, Endpoint]) -> LiveSettings:
        """Make them for those endpoints, whose device can follow them. Raises ConfigError."""
        device_of(endpoints).check(config)
        policy, relation = policy_of(config.policy), Grading(first_server(config), endpoints)
        return cls(config, limits_of(config), delivery_defaults(config), policy, relation)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that the settings make. A reload makes all of them anew, except the caps and a device that is the same.

    To make them changes nothing that is in use: `commit` does that, once nothing can go wrong any more. An answer keeps
    the parts that it began with.
    """

    live: LiveSettings
    endpoints: Mapping[Side, Endpoint]
    measured: Measured | None
    spending: Spending
    learner: Learner
    scarce_side: ScarceSide
    wattmeter: Wattmeter
    prober: Prober | Probers | None
    autotuner: Autotuner | None
    exit_trainer: ExitTrainer | None
    context: AnswerContext
    costs: CostMover
    device_speeds: Callable[[], Speeds]

    @property
    def config(self) -> Config:
        """The settings of these parts."""
        return self.live.config

    @property
    def device(self) -> ManagedDevice:
        """The device, as it is managed."""
        return device_of(self.endpoints)

    @property
    def planner(self) -> Planner:
        """The planner, which owns what was learned."""
        return self.learner.planner

    async def prepare(self, before: Parts | None = None) -> None:
        """Hand over what is known already, by the parts `before` these or on disk; disk and fits run in threads."""
        if before is not None and estimator_key(before.config) == estimator_key(self.config):
            learned = Knowledge.from_json(before.planner.knowledge.to_json())
            await asyncio.to_thread(self.planner.restore, learned)
            self.costs.go_on(before.costs.known_tps)
        else:
            await asyncio.to_thread(self.learner.restore)
            if before is not None:  # what is known of a side that stays, and of the user's prompts, holds as before
                same_device = device_key(before.config) == device_key(self.config)
                same_server = server_key(before.config) == server_key(self.config)
                self.planner.knowledge.take_over(before.planner.knowledge, device=same_device, server=same_server)
                stays = [side.value for side, same in ((Side.DEVICE, same_device), (Side.SERVER, same_server)) if same]
                self.costs.go_on({name: tps for name, tps in before.costs.known_tps.items() if name in stays})
                await self.learner.fit()
        if self.config.device.enabled:
            from .first_times import begin_with  # a daemon without a device needs none of it

            await begin_with(self.measured, self.config, self.learner, self.costs)
        await self.wattmeter.look()
        if self.prober is not None:
            await asyncio.to_thread(self.prober.restore)
        if self.context.servers is not None:
            await asyncio.to_thread(self.context.servers.restore)

    def under(self, config: Config) -> Parts:
        """Return these parts under other live settings, for `commit`. Raises ConfigError."""
        return replace(self, live=LiveSettings.of(config, self.endpoints))

    def commit(self, before: Parts | None = None) -> None:
        """Let what is in use go by these settings, all but the policy's: caps, rate, and a device that stays.

        The account of the parts `before`, whose place these take, goes on. This is the one place where new parts change
        what is in use: it sets what is made already, so nothing in it fails, and nobody runs in between.
        """
        self.spending.set_rate(self.config.device.usd_per_kwh)
        self.spending.set_limits(self.live.limits)
        self.context.defaults = self.live.defaults
        self.context.relation = self.live.relation
        self.device.follow(self.config, self.endpoints.get(Side.SERVER))
        if self.context.servers is not None:
            self.context.servers.allow_hedges(self.config.policy.hedge)
            self.context.servers.value_waiting(self.config.policy.usd_per_hour_waited)
        if before is not None:
            self.planner.succeed(before.planner)

    async def pursue(self) -> None:
        """Plan by the policy's settings from now on. Returns when the planner has been fitted to them."""
        settings = self.config.policy
        self.planner.pursue(self.live.policy)
        self.planner.allow_hedges(hedge_share(self.config, self.spending))
        self.scarce_side.set(settings.scarcer, settings.budget)
        if self.planner.due:
            await self.learner.fit()

    def start_tasks(self) -> list[asyncio.Task[None]]:
        """Start the background tasks of these parts."""
        tasks: dict[str, Coroutine[Any, Any, None]] = {"learner": self.learner.run(), "wattmeter": self.wattmeter.run()}
        if self.prober is not None:
            tasks["prober"] = self.prober.run()
        if self.autotuner is not None:
            tasks["autotuner"] = self.autotuner.run()
        if self.exit_trainer is not None:
            tasks["exit trainer"] = self.exit_trainer.run()
        if self.context.servers is not None:
            tasks["lists of models"] = self.context.servers.run()
        tasks |= self.device.tasks()
        return [asyncio.create_task(task, name=name) for name, task in tasks.items()]


@dataclass(frozen=True, slots=True)
class Assembly:
    """Makes parts. `shape` and `force` are for experiments: they shape the device's timing, and force handoffs.

    The first engine has the `early` process.
    """

    shared: Shared
    shape: Shape | None = None
    force: tuple[int, int] | None = None
    early: EarlyEngine | None = None

    def make(self, config: Config, busy: Callable[[], bool], before: Parts | None = None) -> Parts:
        """Return new parts, with the caps of those `before` and their device where it is the same; those do not change.

        `busy` says whether an answer is being made. Raises ConfigError.
        """
        shared = self.shared
        caps = None if before is None else before.spending.caps
        catalog = load(shared.price_lists)
        spending = make_spending(first_server(config), shared.price_lists, shared.clock, caps, catalog)
        endpoints = make_endpoints(
            first_server(config),
            Making(shared.clock, self.shape, shared.members, self.early),
            None if before is None else before.endpoints,
            listed=spending.price.capabilities,
            several=partial(self._make_pool, config, catalog, spending, before) if config.servers else None,
        )
        device = device_of(endpoints)
        measured = kind_of(config).measured(config) if config.device.enabled else None
        live = LiveSettings.of(config, endpoints)
        planner = make_planner(live, spending)
        learner = Learner(planner, shared.history, shared.clock, estimator_key(config))
        costs = CostMover(
            planner, lambda *tps: Costs(**spending.prices.per_token(*tps)), stops_billing=spending.stops_billing
        )
        learner.mover = costs

        def device_speeds() -> Speeds:
            return Speeds(planner.knowledge.device.prefill_tps, costs.decode_tps[Side.DEVICE])

        since, priced = before.scarce_side.changed_at if before else None, partial(spending_now, spending, endpoints)
        scarce_side = ScarceSide(learner, priced, shared.clock, config.policy, since)
        wattmeter = Wattmeter(
            make_sensors(config),
            spending,
            shared.clock,
            speeds=device_speeds,
            changed=scarce_side.follow,
            known=None if measured is None else measured.known_energy,
            partner_token_j=device.partner_token_j,
        )
        return Parts(
            live,
            endpoints,
            measured,
            spending,
            learner,
            scarce_side,
            wattmeter,
            self._make_probers(config, endpoints.get(Side.SERVER), spending),
            device.make_autotuner(config, busy, shared.clock),
            make_exit_trainer(config, busy, shared.clock),
            self._make_context(live, endpoints, planner, make_mover(config, costs, self.force), spending, wattmeter),
            costs,
            device_speeds,
        )

    def _make_context(
        self,
        live: LiveSettings,
        endpoints: Mapping[Side, Endpoint],
        planner: Planner,
        mover: Mover,
        spending: Spending,
        wattmeter: Wattmeter,
    ) -> AnswerContext:
        shared, config = self.shared, live.config
        return AnswerContext(
            endpoints=endpoints,
            planner=planner,
            mover=mover,
            clock=shared.clock,
            spending=spending,
            disturbed=shared.loop_monitor.was_disturbed,
            energy=wattmeter,
            shadow=config.policy.shadow,
            privacy=shared.privacy,
            keep_text=config.history.keep_text,
            defaults=live.defaults,
            traces=shared.traces,
            relation=live.relation,
            servers=cast("Servers", endpoints[Side.SERVER]) if config.servers else None,
        )

    def _make_pool(
        self, config: Config, catalog: Catalog, spending: Spending, before: Parts | None, device: Endpoint | None
    ) -> Endpoint:
        from .server_pool import ServerPool  # a daemon of one server needs none of it

        shared, old = self.shared, None if before is None else before.context.servers
        return ServerPool(
            config,
            device,
            catalog=catalog,
            spending=spending,
            history=shared.history,
            clock=shared.clock,
            is_private=lambda: shared.privacy.on,
            make_planner=lambda: make_planner(LiveSettings.of(config, {}), spending),
            before=old if isinstance(old, ServerPool) else None,
        )

    def _make_probers(self, config: Config, server: Endpoint | None, spending: Spending) -> Prober | Probers | None:
        if not config.servers:
            return self._make_prober(config, server, spending)
        from .server_pool import ServerPool
        from .tasks.probers import Probers

        assert isinstance(server, ServerPool)
        made = {
            key: self._make_prober(server.settings_of(one), one.endpoint, one.spending, one.server)
            for key, one in server.own.items()
        }
        return Probers({key: one for key, one in made.items() if one is not None})

    def _make_prober(
        self, config: Config, server: Endpoint | None, spending: Spending, name: str | None = None
    ) -> Prober | None:
        if server is None or isinstance(server, Off):
            return None
        from ..endpoints.server import Server  # with OpenAI's library, which nobody waits for who has no server
        from .tasks.prober import Prober

        if not isinstance(server, Server):
            return None
        shared = self.shared
        account = ProbeAccount(spending, config.server.model, shared.book, shared.clock, shared.privacy, name)
        return Prober(
            server,
            shared.history,
            shared.clock,
            enabled=config.server.probe,
            affordable=account.affordable,
            book=account.book,
        )


def delivery_defaults(config: Config) -> DeliveryDefaults:
    """Return the delivery defaults, for clients that ask for nothing else."""
    delivery = config.delivery
    return DeliveryDefaults(
        Delivery(delivery.mode),
        delivery.pace_tps,
        delivery.expected_ttft_s,
        config.handoff.stall_s,
        config.handoff.pause,
        delivery.stop_repetition,
    )


def make_mover(config: Config, costs: CostMover, force: tuple[int, int] | None) -> Mover:
    """Return the mover of running answers: by cost, none, or an experiment's."""
    if force is not None:
        return Forced(costs, *force)
    return costs if config.handoff.for_cost else Stay(costs)


def make_planner(live: LiveSettings, spending: Spending) -> Planner:
    """Return the planner of the configured policy; the scarcer side is the dearer one unless it is set."""
    config, settings = live.config, live.config.policy
    scarcer = Side(settings.scarcer) if settings.scarcer != "auto" else spending.regime.scarcer
    share = hedge_share(config, spending)
    return Planner(live.policy, scarcer, settings.budget, draw=random.random, hedge_share=share)


def hedge_share(config: Config, spending: Spending) -> float:
    """Return the share of the prompt tokens that may be sent a second time: none at an unknown price."""
    return config.policy.hedge if spending.price.known else 0.0


def estimator_key(config: Config) -> str:
    """Return the name of the pair of endpoints that learned figures are about: another pair starts from nothing."""
    return f"{server_key(config)} | {device_key(config)}"


def server_key(config: Config) -> str:
    """Return the name of the server that learned figures are about."""
    if not config.servers:
        return f"{without_credentials(config.server.base_url)} {config.server.model}"
    own = (f"{without_credentials(one.base_url)} {one.model}" for one in servers_of(config).values() if one.model)
    return f"several: {', '.join(own)}"


def device_key(config: Config) -> str:
    """Return the name of the device that learned figures are about."""
    return f"{kind_of(config).identity(config)} {config.device.model or 'default'}"
