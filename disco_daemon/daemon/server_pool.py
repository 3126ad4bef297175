"""Several servers as the one server side: which models they have, which of them answers a request, and what is learned.

A model of a server, `SERVER/MODEL`, is a member: an endpoint with its own errors, capabilities and prices. Those that
answer `disco` are made at once; any other one when it is first asked for, so that hundreds of models cost nothing. A
daemon without `[[servers]]` loads none of this.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ..conductor import AnswerContext
from ..conductor.answer_server import AnswerServer, ServerMember
from ..config.layers import KeyRefusedError, server_api_key
from ..config.schema import Config, NamedServer, ServerSettings
from ..config.servers import alone, of_model, price_settings, servers_of
from ..dispatch.migrate import Costs
from ..dispatch.mover import CostMover, Mover, Stay
from ..dispatch.planner import Planner
from ..dispatch.pool import HEDGE_SHARE, Candidate, Pool
from ..dispatch.server_wishes import ServerWishes
from ..endpoints.base import Endpoint, Sized
from ..endpoints.server import Server
from ..endpoints.server_client import ServerClient
from ..errors import RequestError
from ..money.catalog import Catalog
from ..money.spending import Spending
from ..store import History
from ..system.net import hostname, is_plain, without_credentials
from ..system.tasks import cancel_all
from ..types import EQUAL, Capabilities, GenerationRequest, Grade, Relation, Side, together
from ..types.outcome import Outcome
from .endpoints import make_server
from .grading import Grading, server_grade
from .money import price_of
from .server_chooser import MemberChooser, Trials, offer_of
from .server_learned import LearnedServers
from .server_lists import ServerLists
from .several_servers import NOBODY, SeveralServers

MOST_NAMED = 256  # models asked for by name that are kept, the latest; each has some kB, and takes a millisecond
ROUTES_ITSELF = "openrouter.ai"  # the host, and those below it, that gets what a request says of `provider`
MOST_SHOWN = 32  # of those in a daemon's state, which is asked for every second: each takes some 25 us of the loop

NO_WISHES = ServerWishes()
NO_FIT = "no server fits what 'provider' says"
NO_PRIVATE = (
    "no server fits what 'provider' says: with data_collection or zdr only OpenRouter may be asked, which keeps to it"
)


class ServerPool(SeveralServers):
    """`Endpoint` of the server side, and its members. `make_planner` makes one for models asked for by name."""

    def __init__(
        self,
        config: Config,
        device: Endpoint | None,
        *,
        catalog: Catalog,
        spending: Spending,
        history: History,
        clock: Any,
        is_private: Callable[[], bool],
        make_planner: Callable[[], Planner],
        before: ServerPool | None = None,
    ) -> None:
        self._config, self._device, self._catalog, self._spending = config, device, catalog, spending
        self._history, self._clock, self._make_planner = history, clock, make_planner
        self._servers = servers_of(config)
        self._keys = {name: _key_of(alone(config, settings)) for name, settings in self._servers.items()}
        self._clients: dict[str, ServerClient] = {}
        self._named: OrderedDict[str, ServerMember] = OrderedDict()
        self._is_open = False
        self._apart: tuple[Planner, Mover] | None = None
        self._cards: list[dict[str, Any]] | None = None
        self._learned: LearnedServers = LearnedServers(history, clock) if before is None else before._learned
        self.choice = self._learned.choice
        self._kept: tuple[Pool, dict[str, float]] = Pool(), {}
        if before is None:  # else the new settings hold from the swap on
            self.allow_hedges(config.policy.hedge)
        self._trials = Trials()
        self.known_since = clock.wall()
        addresses = {
            name: (settings.base_url, key)
            for name, settings in self._servers.items()
            if isinstance(key := self._keys[name], str) and not _models_of(settings)
        }
        self.lists = ServerLists(addresses, self._client, clock, is_private, self._listed)
        if before is not None:
            self.lists.take_over(before.lists)
        self.own = {
            key: self._make(name, settings.model)
            for name, settings in self._servers.items()
            if settings.model and (key := f"{name}/{settings.model}")
        }
        self.model = "" if self._first is None else self._first.model
        self._mapped: dict[str, tuple[str, ...]] = {}
        for name, settings in self._servers.items():
            if isinstance(settings, NamedServer):
                for asked, model in settings.map.items():
                    self._mapped[asked] = (*self._mapped.get(asked, ()), f"{name}/{model}")
        for key, member in self.own.items():
            model = member.endpoint.model
            if model not in self._mapped:
                same = tuple(k for k, other in self.own.items() if other.endpoint.model == model)
                self._mapped[model] = same or (key,)
        by_maps = (key for keys in self._mapped.values() for key in keys)
        self._by_settings = tuple(dict.fromkeys((*self.own, *by_maps)))

    # --- members ------------------------------------------------------------------------------------------------------

    def member(self, key: str) -> ServerMember:
        """Return a member, made now if it was not asked for lately. Raises RequestError where its server is gone."""
        if (found := self.own.get(key) or self._named.get(key)) is not None:
            if key in self._named:
                self._named.move_to_end(key)
            return found
        name, _, model = key.partition("/")
        if name not in self._servers:  # since its name was looked up, the settings have changed
            msg = f"The server '{name}' is no longer in the settings: GET /v1/models lists all models."
            raise RequestError(msg, status=404, param="model", code="model_not_found")
        member = self._named[key] = self._make(name, model)
        if len(self._named) > MOST_NAMED:
            self._named.popitem(last=False)
            self._learned.keep({*self._by_settings, *self._named})
        return member

    def _make(self, name: str, model: str) -> ServerMember:
        settings = of_model(self._servers[name], model)
        seen = alone(self._config, settings)
        price = price_of(seen, self._catalog)
        told = self.lists.of(name).get(model)
        listed = price.capabilities if told is None else told.over(price.capabilities)
        endpoint = make_server(
            seen, self._clock, self._device, listed, lambda: self._client(name), lambda _: self._key(name)
        )  # fmt: skip
        if isinstance(endpoint, Server) and self._is_open:
            endpoint.open()
        stops, said_in = self._catalog.stops_billing(settings.base_url), price_settings(self._servers[name], model)
        spending = self._spending.at(price, stops_billing=stops, price_settings=said_in)
        sides = {Side.SERVER: endpoint} | ({} if self._device is None else {Side.DEVICE: self._device})
        relation: Callable[[], Relation] = Grading(seen, sides) if model == self._servers[name].model else _equal
        routes = f".{hostname(settings.base_url)}".endswith(f".{ROUTES_ITSELF}")
        return ServerMember(name, f"{name}/{model}", endpoint, spending, relation, passes_wishes=routes)

    def _key(self, name: str) -> str:
        """Return a server's key as it was read when these settings were taken. Raises KeyRefusedError."""
        if isinstance(key := self._keys[name], KeyRefusedError):
            raise KeyRefusedError(str(key))
        return key

    def _client(self, name: str) -> ServerClient:
        if (found := self._clients.get(name)) is None:
            settings, key = self._servers[name], self._key(name)
            confined = bool(key) and is_plain(settings.base_url) and not settings.insecure
            found = self._clients[name] = ServerClient(settings.base_url, key, confined=confined)
        return found

    # --- Servers ------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> tuple[str, ...]:
        """Return the models that a name stands for: `SERVER/MODEL`, one in their maps, or what answers `disco`."""
        server, _, asked = name.partition("/")
        if asked and (settings := self._servers.get(server)) is not None:
            names = settings.map if isinstance(settings, NamedServer) else {}
            model = names.get(asked, asked)
            offered = _models_of(settings)
            if offered and model not in offered and asked not in names:
                return ()
            return (f"{server}/{model}",)
        return self._mapped.get(name, ())

    def cards(self) -> list[dict[str, Any]]:
        """Return the documents of all models that the servers offer; made anew when a list has changed."""
        if self._cards is None:
            self._cards = self._made_cards()
        return self._cards

    async def _listed(self) -> None:
        """Make the documents anew, beside the loop: of thousands of models that takes too long for it."""
        self._cards = await asyncio.to_thread(self._made_cards)

    def _made_cards(self) -> list[dict[str, Any]]:
        names = [
            f"{name}/{model}"
            for name, settings in self._servers.items()
            for model in _models_of(settings) or self.lists.of(name) or ([settings.model] if settings.model else [])
        ]
        return [dict(self.card(name)) for name in (*names, *self._mapped)]

    def card(self, name: str) -> Mapping[str, Any]:
        """Return what is known of the model behind a name that `find` knows."""
        keys = self.find(name)
        able = together(self._able(key) for key in keys)
        lengths = {"context_length": able.context_length, "max_output": able.max_output}
        return {
            "id": name,
            "object": "model",
            "created": int(self.known_since),
            "owned_by": " ".join(dict.fromkeys(key.partition("/")[0] for key in keys)),
            **{name: length for name, length in lengths.items() if length is not None},
            "capabilities": able.to_json(),
        }

    def _able(self, key: str) -> Capabilities:
        if (made := self.own.get(key) or self._named.get(key)) is not None:
            return made.endpoint.capabilities
        name, _, model = key.partition("/")
        return self.lists.of(name).get(model, Capabilities())

    def grades(self, keys: Sequence[str]) -> dict[str, Grade]:
        """Return how good these models are; those that answer `disco` where none are named."""
        return {key: self._grade(self.member(key)) for key in keys or self.own}

    def _grade(self, member: ServerMember) -> Grade:
        """Return how good a member's model is, by its settings, its name, and what its catalogue has told."""
        told = member.endpoint.n_parameters if isinstance(member.endpoint, Sized) else None
        return server_grade(self.settings_of(member), told)

    def context(self, base: AnswerContext, request: GenerationRequest) -> AnswerContext:
        """Return the context of one answer, with the server chosen that is asked first. Raises RequestError."""
        if base.private or request.private or Side.SERVER not in request.allowed:
            return base
        members = self._members(request)
        if not members and (self.own or request.servers) and Side.DEVICE not in request.allowed:
            msg = f"Rule '{request.rule}' asks for a better model than those servers have."
            raise RequestError(msg, status=403, param="model", code="rule")
        groups = [members] if members else []
        wishes = NO_WISHES
        if (provider := request.extra.get("provider")) is not None:
            wishes = ServerWishes.of(provider)
            groups = wishes.narrow(members, offer_of)
        may_fall_back = wishes.allow_fallbacks
        if not groups:
            why = (NO_PRIVATE if wishes.is_confidential else NO_FIT) if members else NOBODY
            if Side.DEVICE in request.allowed and Side.DEVICE in base.endpoints:
                return replace(base, endpoints={Side.DEVICE: base.endpoints[Side.DEVICE]})
            raise RequestError(f"{why[:1].upper()}{why[1:]}.", param="provider" if members else "model")
        chooser = MemberChooser(self.choice, self._trials, base, request, groups)
        first = chooser.first()
        others = [one for group in groups for one in group] if may_fall_back else []
        hedge = chooser.hedge if may_fall_back else None
        choice = AnswerServer(first, others, chooser.next, self._failed, hedge, chooser.asked)
        has_device = not request.servers or Side.DEVICE in request.allowed  # its model may have the same name
        planner, mover = (base.planner, base.mover) if has_device else self._planner_apart(base)
        mover = mover.priced(
            lambda *tps: Costs(**choice.now.spending.prices.per_token(*tps)),
            lambda: choice.now.spending.stops_billing,
        )
        endpoints = {**base.endpoints, Side.SERVER: choice} if has_device else {Side.SERVER: choice}
        return replace(
            base, endpoints=endpoints, spending=first.spending, planner=planner, mover=mover,
            relation=first.relation if has_device else _equal,
        )  # fmt: skip

    def _members(self, request: GenerationRequest) -> list[ServerMember]:
        """Return those that a request names, or that answer `disco`, as far as they reach the floors of its rule."""
        members = [self.member(key) for key in request.servers] or list(self.own.values())
        least = request.min_parameters, request.min_grade
        return members if least == (None, None) else [one for one in members if self._grade(one).reaches(*least)]

    def explain(self, base: AnswerContext, request: GenerationRequest, n_prompt: int) -> list[dict[str, Any]]:
        """Return which of them such a request would be asked of, and what the others would have been; for a plan."""
        return MemberChooser(self.choice, self._trials, base, request, [self._members(request)], n_prompt).explain()

    def allow_hedges(self, share: float) -> None:
        """Ask another server as well for this share of the requests from now on, also for answers that run."""
        self.choice.hedges.share = min(share, HEDGE_SHARE)

    def _planner_apart(self, base: AnswerContext) -> tuple[Planner, Mover]:
        """Return what plans for models that are asked for by name: of their times the race is to learn nothing."""
        if self._apart is None:
            planner, spending = self._make_planner(), base.spending
            costs = CostMover(planner, lambda *tps: Costs(**spending.prices.per_token(*tps)))
            self._apart = planner, Stay(costs)
        return self._apart

    def record(self, context: AnswerContext, outcome: Outcome) -> bool:
        """Learn from one answer of these servers; whether it was one of models that were asked for by name alone."""
        for attempt in outcome.attempts:
            if (server := self._servers.get(attempt.server or "")) is not None:
                key = f"{attempt.server}/{attempt.model}"
                if self._is_kept(key) and self._learned.learn(attempt, server.base_url):
                    self._trials.end(key)
        self._learned.recorded()
        is_apart = self._apart is not None and context.planner is self._apart[0]
        if is_apart:
            self._history.record(outcome)
        return is_apart

    def _failed(self, member: ServerMember) -> None:
        """Note at once that a member gave no answer."""
        if self._is_kept(member.key):
            self.choice.fail(member.key, self._clock.now())

    def _is_kept(self, key: str) -> bool:
        """Whether a member is still there: callers may have named many others since."""
        return key in self.own or key in self._named

    # --- what is kept -------------------------------------------------------------------------------------------------

    def value_waiting(self, usd_per_hour: float) -> None:
        """Weigh prices and waits by what an hour of waiting is worth, $, from now on."""
        self.choice.usd_per_hour_waited = usd_per_hour

    def restore(self) -> None:
        """Look up what an earlier daemon has learned of these servers, for `start`; blocks on disk."""
        self._kept = self._learned.restored(self._addresses, self._by_settings)

    @property
    def _addresses(self) -> dict[str, str]:
        return {name: settings.base_url for name, settings in self._servers.items()}

    async def run(self) -> None:
        """Keep the lists of models up to date, and save what is learned, until cancelled."""
        saving = asyncio.create_task(self._learned.run(), name="what is learned of servers")
        try:
            await self.lists.run()
        finally:
            await cancel_all(saving)

    async def stop(self) -> None:
        """End a question for one: when this returns, nothing more is sent."""
        await self.lists.stop()

    def settings_of(self, member: ServerMember) -> Config:
        """Return the settings as if a member were the only server."""
        return alone(self._config, of_model(self._servers[member.server], member.endpoint.model))

    def documents(self) -> list[dict[str, Any]]:
        """Return the `servers` of `disco status --json`: those that answer `disco`, then the latest by name."""
        named = list(islice(reversed(self._named.items()), MOST_SHOWN))
        return [self._document(key, one) for key, one in (*self.own.items(), *named)]

    def _document(self, key: str, member: ServerMember) -> dict[str, Any]:
        status = member.endpoint.status()
        (weighed,) = self.choice.weigh([Candidate(key)])
        return {
            "name": member.server,
            "model": member.endpoint.model,
            "state": status["state"],
            "breaker": status.get("breaker"),
            "ttft_p50_s": weighed.p50_s,
            "ttft_p99_s": weighed.p99_s,
            **self._learned.counts(key),
            "base_url": without_credentials(self._servers[member.server].base_url),
            "down_s": status["down_s"],
            "last_error": status["last_error"],
            "price": member.spending.price.to_json(),
            "in_pool": key in self.own,
        }

    # --- its life -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Ask again for all that was refused."""
        for one in (*self.own.values(), *self._named.values()):
            if isinstance(one.endpoint, Server):
                one.endpoint.forget()

    async def start(self) -> None:
        """Open the members that answer `disco`, and go on with what is known of them; nothing is sent."""
        self._is_open = True
        self._learned.follow(self._addresses, self._by_settings, self._kept)
        for one in self.own.values():
            await one.endpoint.start()
        await self._listed()

    async def close(self) -> None:
        """Close all connections."""
        for one in (*self.own.values(), *self._named.values()):
            await one.endpoint.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()


def _key_of(config: Config) -> str | KeyRefusedError:
    """Return the key of the one server of these settings, or why it may not go there, so that the server is off.

    Blocks on disk. Raises ConfigError for its file.
    """
    try:
        return server_api_key(config)
    except KeyRefusedError as e:
        return KeyRefusedError(str(e))


def _models_of(settings: ServerSettings) -> tuple[str, ...]:
    return settings.models if isinstance(settings, NamedServer) else ()


def _equal() -> Relation:
    return EQUAL
