"""Predicts what another exchange rate and budget would make of the requests on record, as fast as a slider moves.

Reading the history and fitting to it takes about a second, a prediction then milliseconds; another value of a policy's
knob is fitted first, which takes tens of milliseconds. One thread does all of it: predictions follow each other, and
one whose client has moved on before its turn is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import Clock
from ..config.schema import Config, PolicySettings, ServerSettings
from ..config.servers import alone, first_server, servers_of
from ..dispatch.make import make_policy
from ..dispatch.policy import Policy
from ..endpoints.base import Resumption
from ..endpoints.continuation import Profile, known_resumption, profile_name
from ..errors import ConfigError, RequestError, Unavailable
from ..store import History
from ..types import finite

if TYPE_CHECKING:
    from ..simulate.recorded import Recorded
    from ..simulate.whatif import WhatIf, WhatIfTerms

REBUILD_AFTER = 200  # requests; as long as the window of what the daemon learns from
REBUILD_S = 600.0  # and no later than this, if there was a request since
TIMEOUT_S = 30.0  # 20,000 requests are read and fitted within a few seconds
LEAST_DAYS = 1.0  # an hour says nothing about a day: a shorter history counts as one day
MAX_MODELS = 16  # one for each policy asked about; each holds some arrays as long as the history


def policy_of(settings: PolicySettings) -> Policy:
    """Return the policy that the settings name, with its knobs."""
    return make_policy(settings.name, delay_s=settings.delay_s, alpha=settings.alpha, kappa=settings.kappa)


@dataclass(slots=True)
class _Past:
    """The history as read, and a model of it for each policy, the latest used last."""

    recorded: Recorded
    terms: WhatIfTerms
    models: dict[Policy, WhatIf] = field(default_factory=dict)

    def model(self, policy: Policy) -> WhatIf:
        """Return the model of a policy; it fits its tables when they are first wanted."""
        from ..simulate.whatif import WhatIf

        model = self.models.pop(policy, None) or WhatIf(self.recorded, self.terms, policy)
        self.models[policy] = model
        if len(self.models) > MAX_MODELS:
            del self.models[next(iter(self.models))]
        return model


@dataclass(frozen=True, slots=True)
class _Made:
    """A history to predict with, or why there is none; `at` is when it was read, s, `served` the requests by then."""

    past: _Past | None
    why_not: str
    served: int
    at: float
    terms: object

    def holds(self, config: Config, served: int, now: float) -> bool:
        """Whether it may still be used. A history that was too short may be long enough after one more request."""
        if self.terms != _terms_of(config):
            return False
        news = served - self.served
        if self.past is None:
            return news == 0
        return news < REBUILD_AFTER and (news == 0 or now - self.at < REBUILD_S)


def _terms_of(config: Config) -> object:
    """Return the live settings that all models rest on. The budget is not one: tables hold for all budgets."""
    return config.policy.scarcer, config.delivery.pace_tps, config.handoff.pause


class HistoryReplay:
    """Owns the thread, and what it has read. `served` counts the requests; `own` is the folder of price lists."""

    def __init__(self, history: History, own: Path, clock: Clock, served: Callable[[], int]) -> None:
        self._history, self._own, self._clock, self._served = history, own, clock, served
        self._thread = ThreadPoolExecutor(1, "whatif")
        self._made: _Made | None = None  # touched by the thread only
        self.n_builds = 0

    def close(self) -> None:
        """Drop waiting predictions; a running one ends by itself, within seconds."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def predict(self, config: Config, usd_per_kwh: float, budget: float) -> dict[str, Any]:
        """Return the whole history under that rate, $/kWh, and budget ratio as JSON.

        Raises RequestError (404, `too_little`) where the history is too short, Unavailable if it cannot be read.
        """
        now, loop = self._clock.now(), asyncio.get_running_loop()
        work = loop.run_in_executor(
            self._thread, self._predict, config, self._served(), now, (usd_per_kwh, budget)
        )  # fmt: skip
        try:
            return await asyncio.wait_for(work, TIMEOUT_S)
        except TimeoutError as e:
            msg = f"the history could not be replayed within {TIMEOUT_S:g} s"
            raise Unavailable(msg) from e

    def _predict(self, config: Config, served: int, now: float, setting: tuple[float, float]) -> dict[str, Any]:
        if self._made is None or not self._made.holds(config, served, now):
            self._made = self._make(config, served, now)
        if self._made.past is None:
            raise RequestError(self._made.why_not, status=404, code="too_little")
        return as_json(self._made.past.model(policy_of(config.policy)), *setting)

    def _make(self, config: Config, served: int, now: float) -> _Made:
        from ..money.exchange import MAX_USD_PER_KWH, MIN_USD_PER_KWH
        from ..simulate.recorded import Recorded

        self.n_builds += 1
        past, why_not = None, ""
        try:
            recorded = Recorded.of(self._history.outcomes())
        except ConfigError as e:
            why_not = str(e)
        else:
            played = with_played_server(config, recorded).server
            server = profile_name(played.base_url, played.model)
            past = _Past(recorded, terms(config, recorded, self._own, self._history.profile(server)))
            model = past.model(policy_of(config.policy))
            for rate in (MIN_USD_PER_KWH, MAX_USD_PER_KWH):  # whichever side is scarce, its table is there
                model.predict(rate, config.policy.budget)
        return _Made(past, why_not, served, now, _terms_of(config))


def as_json(model: WhatIf, usd_per_kwh: float, budget: float) -> dict[str, Any]:
    """Return one prediction as JSON: TTFTs in s, the server's bill and this machine's energy a day, their basis."""
    cell, recorded = model.predict(usd_per_kwh, budget), model.recorded
    days = max(recorded.days, LEAST_DAYS)
    return {
        "usd_per_kwh": usd_per_kwh,
        "budget": budget,
        "policy": cell.policy,
        "scarcer": cell.constrained,
        "threshold_usd_per_kwh": finite(model.threshold_usd_per_kwh),
        "mean_ttft_s": cell.mean_ttft_s,
        "p99_ttft_s": cell.p99_ttft_s,
        "usd_per_day": cell.server_usd / days,
        "wh_per_day": cell.device_wh / days,
        "used": cell.used,
        "device_won": cell.device_won,
        "moved": cell.moved,
        "requests": recorded.n,
        "days": recorded.days,
    }


def with_played_server(config: Config, recorded: Recorded) -> Config:
    """Return the settings with the server alone whose times are replayed: of several, the one that was asked last."""
    name, _, model = recorded.server.partition("/")
    one = servers_of(config).get(name)
    return first_server(config) if one is None or one.model != model else alone(config, one)


def terms(config: Config, recorded: Recorded, own: Path, probed: Mapping[str, Any] | None) -> WhatIfTerms:
    """Return today's prices, with the power that computing drew as booked, else as set.

    `own` is the folder of the user's own price lists, and `probed` what a probe has found of the server in force.
    """
    from ..config.pricelist import load as load_prices
    from ..money.prices import Prices
    from ..simulate.whatif import WhatIfTerms
    from ..types import Side
    from .money import price_of

    config, catalog = with_played_server(config, recorded), load_prices(own)
    price, scarcer = price_of(config, catalog), config.policy.scarcer
    return WhatIfTerms(
        Prices(price.input, price.output, recorded.watts or config.device.watts, config.device.usd_per_kwh),
        fitted_at=config.policy.budget,
        scarcer=None if scarcer == "auto" else Side(scarcer),
        moves=config.handoff.for_cost,
        stops_billing=catalog.stops_billing(config.server.base_url),
        pace_tps=config.delivery.pace_tps,
        rests=config.handoff.pause and _goes_on_alone(config.server, probed),
    )


def _goes_on_alone(server: ServerSettings, probed: Mapping[str, Any] | None) -> bool:
    """Whether that server is known to go on exactly where it was stopped, also where the device says nothing."""
    try:
        profile = Profile.from_json(probed) if probed is not None else None
    except ValueError:  # of another version: the server is probed again
        profile = None
    return known_resumption(server.continuation, server.base_url, profile) is Resumption.ALONE
