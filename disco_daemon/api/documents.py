"""What the daemon tells of itself, and its settings: one JSON document a route."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..errors import ConfigError, RequestError
from . import openai, servers
from .connections import body
from .doors import fit

MAX_PLAN_TOKENS = 1_000_000  # of a prompt that `disco plan` is asked about; longer than any context
TAIL_KNOBS = {"alpha": 1.0, "kappa": math.inf}  # what the policies have to protect the tail, up to which value


class Reports(servers.Servers, Protocol):
    """What the API shows of the daemon; implemented by the composition root."""

    def state(self) -> dict[str, Any]:
        """The whole state as JSON."""
        ...

    def history(self, limit: int) -> list[dict[str, Any]]:
        """The latest requests; may block on disk, so it is called in a thread."""
        ...

    def ledger(self, days: int) -> list[dict[str, Any]]:
        """What was spent on each of the latest days; may block on disk, so it is called in a thread."""
        ...

    def plan(self, tokens: int, waited_s: float) -> dict[str, Any]:
        """What would be done with a prompt of so many tokens now, and why."""
        ...

    async def whatif(self, usd_per_kwh: float, budget: float, tail: Mapping[str, float]) -> dict[str, Any]:
        """What that exchange rate and budget would have made of the requests on record. Raises RequestError.

        `tail` may have other values for the policy's knobs `alpha` and `kappa`.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """All settings in force; secrets are masked."""
        ...

    async def reload(self) -> dict[str, Any]:
        """Read the configuration again. Raises ConfigError, and then nothing has changed."""
        ...

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write settings and take them up as far as a running daemon can. Raises ConfigError."""
        ...


REPORTS = web.AppKey("reports", Reports)


def add_routes(app: web.Application, reports: Reports) -> None:
    """The routes, and what is behind them."""
    app[REPORTS] = reports
    app.router.add_get("/disco/v1/state", _state)
    app.router.add_get("/disco/v1/history", _history)
    app.router.add_get("/disco/v1/ledger", _ledger)
    app.router.add_get("/disco/v1/plan", _plan)
    app.router.add_get("/disco/v1/whatif", _whatif)
    app.router.add_get("/disco/v1/settings", _settings)
    app.router.add_patch("/disco/v1/settings", _change)
    app.router.add_post("/disco/v1/reload", _reload)


async def _state(request: web.Request) -> web.Response:
    """GET /disco/v1/state: Return the state of the daemon, as `disco status` shows it."""
    return _json(fit(request, request.app[REPORTS].state()))


async def _history(request: web.Request) -> web.Response:
    """GET /disco/v1/history: Return the latest requests, newest first; `?limit=20`."""
    rows = await asyncio.to_thread(request.app[REPORTS].history, _number(request, "limit", 20))
    return _json({"data": rows})


async def _ledger(request: web.Request) -> web.Response:
    """GET /disco/v1/ledger: Return what each day has cost, newest first; `?days=31`."""
    rows = await asyncio.to_thread(request.app[REPORTS].ledger, _number(request, "days", 31))
    return _json({"data": rows})


def _number(request: web.Request, name: str, usual: int) -> int:
    """A number of rows out of the query, between 1 and 1,000. Raises RequestError."""
    try:
        return min(1000, max(1, int(request.query.get(name, usual))))
    except ValueError:
        msg = f"{name} must be a number"
        raise RequestError(msg, param=name) from None


async def _settings(request: web.Request) -> web.Response:
    """GET /disco/v1/settings: Return all settings in force; secrets are masked."""
    return _json(request.app[REPORTS].settings())


async def _change(request: web.Request) -> web.Response:
    """PATCH /disco/v1/settings: Write settings, such as `{"device.usd_per_kwh": 2.5}`: all that it names, or none."""
    changes = openai.parse_settings(await body(request))
    try:
        return _json(await request.app[REPORTS].change(changes))
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting") from e


async def _reload(request: web.Request) -> web.Response:
    """POST /disco/v1/reload: Read config.toml again; the next request goes by it."""
    try:
        return _json(await request.app[REPORTS].reload())
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting") from e


async def _plan(request: web.Request) -> web.Response:
    """GET /disco/v1/plan: Return what would be done with such a prompt now, and why; `?tokens=120&waited=0`."""
    try:
        tokens, waited_s = int(request.query.get("tokens", "")), float(request.query.get("waited", "0"))
    except ValueError:
        raise RequestError("tokens must be a whole number, waited a number of seconds", param="tokens") from None
    if not (1 <= tokens <= MAX_PLAN_TOKENS and 0 <= waited_s < float("inf")):
        msg = f"tokens must be between 1 and {MAX_PLAN_TOKENS}, waited at least 0"
        raise RequestError(msg, param="tokens")
    return _json(request.app[REPORTS].plan(tokens, waited_s))


async def _whatif(request: web.Request) -> web.Response:
    """GET /disco/v1/whatif: Return what another rate ($/kWh) and budget would have made of the requests on record.

    The query is `?rate=2&budget=0.5`, with `alpha` or `kappa` for the policies that have them.
    """
    tail = {name: _amount(request, name, most) for name, most in TAIL_KNOBS.items() if name in request.query}
    rate, budget = _amount(request, "rate", math.inf), _amount(request, "budget", 1.0)
    return _json(await request.app[REPORTS].whatif(rate, budget, tail))


def _amount(request: web.Request, name: str, most: float) -> float:
    """A number out of the query, finite and from 0 to `most`. Raises RequestError."""
    amount = math.nan
    with suppress(ValueError):
        amount = float(request.query.get(name, ""))
    if not (0 <= amount <= most and amount < math.inf):
        msg = f"{name} must be a number from 0{f' to {most:g}' if most < math.inf else ' on'}"
        raise RequestError(msg, param=name)
    return amount


def _json(payload: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
