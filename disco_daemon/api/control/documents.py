"""The daemon's own JSON documents, one a route, and the protocol of what stands behind them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web

from ...errors import ConfigError, RequestError
from ...keys.named_key import KeyTerms
from ...link.trust.roles import Role
from ...plain import which
from ...types import NextAct
from ..doors import fit, sees_keys, state_for_key
from ..http.bodies import convert, decoded
from ..http.connections import body
from ..http.guard import key_of
from ..ollama.ollama_models import DeviceFile
from ..openai.openai_request import MAX_ID
from .control_requests import parse_settings

# What a request may be said to be, for the user's rules and for what was learned of answers.
KINDS = ("tools", "images", "schema", "code", "thinking", "numbers")
MAX_PLAN_TOKENS = 1_000_000  # of a prompt that `disco plan` is asked about; longer than any context
TAIL_KNOBS = {
    "alpha": 1.0,
    "kappa": math.inf,
}  # the policies' knobs that protect the tail, with the largest value of each


By = Literal["key", "model", "server", "day"]  # by which usage is summed up


class OutdoneAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request of the answer that another one was preferred to."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]


class FetchedFile(Protocol):
    """A file of a model that is being fetched: its checksum in hex, and its bytes, `done` of which are here."""

    @property
    def digest(self) -> str:
        """The checksum."""
        ...

    @property
    def done(self) -> int:
        """The bytes that are here."""
        ...

    @property
    def n_bytes(self) -> int:
        """All its bytes."""
        ...


class FollowedFetch(Protocol):
    """A fetch that a client looks at."""

    def followed(self) -> AbstractAsyncContextManager[AsyncIterator[tuple[dict[str, Any], FetchedFile | None]]]:
        """Give its document and the file at hand at each step. One that all have left ends, if it is not to be used."""
        ...


class Documents(Protocol):
    """The daemon as its API shows and changes it; implemented by the composition root."""

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON."""
        ...

    async def device_files(self) -> dict[str, DeviceFile]:
        """Return the models that this machine has, by their files: the device's as "", others by their names."""
        ...

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest requests, newest first; called in a thread, since it blocks on disk."""
        ...

    def outdone(self, request_id: str) -> None:
        """Note that its reader preferred another model's answer to this one."""
        ...

    def ledger(self, days: int) -> list[dict[str, Any]]:
        """Return what was spent on each of the latest days, newest first; called in a thread, as `history`."""
        ...

    def usage(self, by: By, days: int) -> list[dict[str, Any]]:
        """Return what was used in the latest days, by key, model, server or day; called in a thread, as `history`."""
        ...

    async def usage_of_key(self, name: str, days: int) -> dict[str, Any]:
        """Return what one key may and has spent, with what it has used on each of the latest days as `data`."""
        ...

    async def keys(self) -> list[dict[str, Any]]:
        """Return what the keys with names may and have spent, and nothing of their secrets. Raises ConfigError."""
        ...

    async def add_key(self, name: str, terms: KeyTerms) -> dict[str, Any]:
        """Make a key; it is returned this once. Raises ConfigError."""
        ...

    async def change_key(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Give a key other terms from the next request on. Raises ConfigError, RequestError."""
        ...

    async def revoke_key(self, name: str) -> dict[str, Any]:
        """Let a key in no more, and end what runs for it. Raises ConfigError for an unknown one."""
        ...

    async def plan(self, tokens: int, waited_s: float, kind: Mapping[str, Any]) -> dict[str, Any]:
        """Return what would be done now with a prompt of that length, and why; `waited_s` of its wait are over.

        `kind` says what else the request is, for the user's rules. Raises RequestError where one leaves nobody.
        """
        ...

    async def whatif(self, usd_per_kwh: float, budget: float, tail: Mapping[str, float]) -> dict[str, Any]:
        """Return what that exchange rate and budget would have made of the requests on record. Raises RequestError.

        `tail` may have other values for the policy's knobs `alpha` and `kappa`.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """Return all settings in force, by section, and which of them are live; secrets are masked."""
        ...

    async def reload(self) -> dict[str, Any]:
        """Read the configuration again. Raises ConfigError, and then nothing has changed."""
        ...

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write live settings and apply them. Raises ConfigError, RequestError, and then nothing has changed."""
        ...

    def fleet(self) -> dict[str, Any]:
        """Return which hosts compute which layers of the device's model; no hosts for a whole device."""
        ...

    def steer_fleet(self, order: str, host: str = "") -> dict[str, Any]:
        """Carry out `pause`, `resume` or `drain` of a host; return the fleet as then. Raises ConfigError."""
        ...

    def machines(self, role: Role) -> dict[str, Any]:
        """Return which machines have joined in a role, and how they are; called in a thread, since it reads files."""
        ...

    async def new_code(self, role: Role, address: str) -> dict[str, Any]:
        """Make a code with which one machine may join; `address` is what it calls this one. Raises ConfigError."""
        ...

    async def revoke(self, role: Role, name: str) -> dict[str, Any]:
        """Refuse a machine of a role from now on. Raises ConfigError for an unknown one."""
        ...

    def providers(self) -> dict[str, Any]:
        """Return the known servers and the models here; called in a thread, since it blocks on disk."""
        ...

    async def check_server(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        """Check whether a server works: its models, and with a model one short answer of it. Raises DiscoError."""
        ...

    async def set_server(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        """Write the server down and go by it; "" takes it away. `name` is one of several. Raises DiscoError."""
        ...

    async def set_device(self, model: str) -> dict[str, Any]:
        """Have the device answer with one of the models on this machine. Raises ConfigError, RequestError."""
        ...

    async def offers(self) -> dict[str, Any]:
        """Return the models of the list that suit this machine now. Takes some seconds where nothing was measured."""
        ...

    async def fetch_model(self, name: str) -> dict[str, Any]:
        """Begin to fetch a model of the list, which is in use once it is there. Raises ConfigError, RequestError."""
        ...

    async def pull_model(self, name: str) -> FollowedFetch:
        """Begin to fetch a model of the list or of the Hub, as clients of Ollama name it. Raises RequestError."""
        ...

    async def cancel_fetch(self) -> dict[str, Any]:
        """End a fetch, the newest one to be used before others; what came is kept."""
        ...


DOCUMENTS = web.AppKey("documents", Documents)


def add_routes(app: web.Application, documents: Documents) -> None:
    """Add the routes, and what stands behind them."""
    app[DOCUMENTS] = documents
    app.router.add_get("/disco/v1/state", _state)
    app.router.add_get("/disco/v1/history", _history)
    app.router.add_post("/disco/v1/history/outdone", _outdone)
    app.router.add_get("/disco/v1/ledger", _ledger)
    app.router.add_get("/disco/v1/plan", _plan)
    app.router.add_get("/disco/v1/whatif", _whatif)
    app.router.add_get("/disco/v1/settings", _settings)
    app.router.add_patch("/disco/v1/settings", _change)
    app.router.add_post("/disco/v1/reload", _reload)


async def _state(request: web.Request) -> web.Response:
    """GET /disco/v1/state: Return the state of the daemon, as `disco status` shows it."""
    state = request.app[DOCUMENTS].state()
    if key_of(request) is not None:
        state = state_for_key(state)
    elif not sees_keys(request):
        del state["keys"]
    return as_json(fit(request, state))


async def _history(request: web.Request) -> web.Response:
    """GET /disco/v1/history: Return the latest requests, newest first; `?limit=20`."""
    rows = await asyncio.to_thread(request.app[DOCUMENTS].history, number(request, "limit", 20))
    return as_json({"data": rows})


async def _outdone(request: web.Request) -> web.Response:
    """POST /disco/v1/history/outdone: Note that another model's answer was preferred to that of `{request_id}`."""
    wish = convert(decoded(await body(request)), OutdoneAnswer)
    request.app[DOCUMENTS].outdone(wish.request_id)
    return as_json({"request_id": wish.request_id, "followed": NextAct.OUTDONE.value})


async def _ledger(request: web.Request) -> web.Response:
    """GET /disco/v1/ledger: Return what each day has cost, newest first; `?days=31`."""
    rows = await asyncio.to_thread(request.app[DOCUMENTS].ledger, number(request, "days", 31))
    return as_json({"data": rows})


def number(request: web.Request, name: str, usual: int) -> int:
    """Return a number of rows from the query, between 1 and 1,000. Raises RequestError."""
    try:
        return min(1000, max(1, int(request.query.get(name, usual))))
    except ValueError:
        raise RequestError(f"{name} must be a number", param=name) from None


async def _settings(request: web.Request) -> web.Response:
    """GET /disco/v1/settings: Return all settings in force; secrets are masked."""
    return as_json(request.app[DOCUMENTS].settings())


async def _change(request: web.Request) -> web.Response:
    """PATCH /disco/v1/settings: Write settings, such as `{"device.usd_per_kwh": 2.5}`: all that it names, or none."""
    changes = parse_settings(await body(request))
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].change(changes))


async def _reload(request: web.Request) -> web.Response:
    """POST /disco/v1/reload: Read config.toml again; the next request goes by it."""
    with settings_at_fault():
        return as_json(await request.app[DOCUMENTS].reload())


async def _plan(request: web.Request) -> web.Response:
    """GET /disco/v1/plan: Return what would be done with such a prompt now, and why; `?tokens=120&waited=0`.

    For rules the query may say more: `is=tools,images,schema,code,thinking,numbers`, `language`, `model`, `user`,
    `header`.
    """
    try:
        tokens, waited_s = int(request.query.get("tokens", "")), float(request.query.get("waited", "0"))
    except ValueError:
        raise RequestError("tokens must be a whole number, waited a number of seconds", param="tokens") from None
    if not (1 <= tokens <= MAX_PLAN_TOKENS and 0 <= waited_s < float("inf")):
        raise RequestError(f"tokens must be between 1 and {MAX_PLAN_TOKENS}, waited at least 0", param="tokens")
    return as_json(await request.app[DOCUMENTS].plan(tokens, waited_s, _kind(request)))


def _kind(request: web.Request) -> dict[str, Any]:
    """Return what the query says that a request is, for rules. Raises RequestError."""
    query = request.query
    kind: dict[str, Any] = {name: query[name] for name in ("language", "model", "user") if name in query}
    for one in filter(None, ",".join(query.getall("is", [])).split(",")):
        if one not in KINDS:
            raise RequestError(f"is={one}: {which(one, KINDS)}", param="is")
        kind[one] = True
    headers = [header.partition(":") for header in query.getall("header", [])]
    return kind | ({"headers": {name.strip(): value.strip() for name, _, value in headers}} if headers else {})


async def _whatif(request: web.Request) -> web.Response:
    """GET /disco/v1/whatif: Return what another rate ($/kWh) and budget would have made of the requests on record.

    The query is `?rate=2&budget=0.5`, with `alpha` or `kappa` for the policies that have them.
    """
    tail = {name: _amount(request, name, most) for name, most in TAIL_KNOBS.items() if name in request.query}
    rate, budget = _amount(request, "rate", math.inf), _amount(request, "budget", 1.0)
    return as_json(await request.app[DOCUMENTS].whatif(rate, budget, tail))


def _amount(request: web.Request, name: str, most: float) -> float:
    """Return a number from the query, finite and from 0 to `most`. Raises RequestError."""
    amount = math.nan
    with suppress(ValueError):
        amount = float(request.query.get(name, ""))
    if not (0 <= amount <= most and amount < math.inf):
        raise RequestError(f"{name} must be a number from 0{f' to {most:g}' if most < math.inf else ' on'}", param=name)
    return amount


@contextmanager
def settings_at_fault(param: str | None = None) -> Iterator[None]:
    """Make a RequestError, which has the mend, of settings that cannot be read, written or carried out."""
    try:
        yield
    except ConfigError as e:
        raise RequestError(str(e), code="invalid_setting", param=param) from e


def as_json(payload: Any) -> web.Response:
    """Answer with one JSON document."""
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
