"""Several servers by the daemon's own assembly: what a name stands for, whose prices count, and what is kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disco_daemon.api.names import ModelNames
from disco_daemon.conductor import Conductor, Keeper
from disco_daemon.conductor.answer_server import AnswerServer
from disco_daemon.conductor.cost_limit import CostLimit
from disco_daemon.config.schema import Config, HandoffSettings, NamedServer, PolicySettings
from disco_daemon.config.servers import first_server, of_model
from disco_daemon.daemon.assembly import Parts
from disco_daemon.daemon.making_rules import ModelGrades
from disco_daemon.daemon.scarcity import MIN_CHANGE_S
from disco_daemon.daemon.server_chooser import TRIAL_AFTER_S, TRIAL_AT_LEAST_S, Trials
from disco_daemon.daemon.server_pool import MOST_NAMED, MOST_SHOWN, ServerPool
from disco_daemon.dispatch.mover import DECODE_TPS, CostMover
from disco_daemon.dispatch.pool import HEDGE_SHARE, Candidate
from disco_daemon.dispatch.rules import Rule, narrowed
from disco_daemon.endpoints.server import Server
from disco_daemon.errors import EndpointError, RequestError
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.system.tasks import cancel_all
from disco_daemon.types import (
    BOTH,
    Caller,
    GenerationRequest,
    Grade,
    Outcome,
    PromptLength,
    Relation,
    Sampling,
    Side,
)
from tests.unit.daemon.test_wiring import Scene, constrained, scene  # noqa: F401 - a fixture
from tests.unit.store.test_ledger import outcome

UNPRICED: dict[str, Any] = {"input_usd_per_mtok": None, "output_usd_per_mtok": None}
HELLO = ({"role": "user", "content": "hello"},)
BOX = NamedServer(
    name="box", base_url="http://127.0.0.1:9001/v1", model="large", input_usd_per_mtok=1.0, output_usd_per_mtok=2.0
)
ROUTER = NamedServer(
    name="router", base_url="http://127.0.0.1:9002/v1", map={"gpt-4o": "openai/gpt-4o", "mine": "own/a"}
)
SHORT = NamedServer(name="short", base_url="http://127.0.0.1:9003/v1", models=("a", "b"), map={"mine": "a"})


Take = Callable[[ServerPool], Awaitable[None]]


def pool_of(parts: Parts) -> ServerPool:
    assert isinstance(parts.context.servers, ServerPool)
    return parts.context.servers


def several(scene: Scene, *servers: NamedServer, **more: Any) -> Parts:  # noqa: F811
    return scene.parts(replace(scene.config(servers=servers), **more))


def names_of(parts: Parts, aliases: dict[str, str]) -> ModelNames:
    return ModelNames(Conductor(Keeper(parts.context), lambda *_: None, lambda _: None), aliases)


def test_a_name_stands_for_a_model_of_one_server_or_of_those_that_map_it(scene: Scene) -> None:  # noqa: F811
    names = names_of(several(scene, BOX, ROUTER, SHORT), {"claude-*": "router/x", "fast": "gpt-4o"})
    for name, servers in {
        "box/anything": ("box/anything",), "router/owner/deep/model": ("router/owner/deep/model",),
        "server/other": ("server/other",), "short/b": ("short/b",), "short/mine": ("short/a",),
        "gpt-4o": ("router/openai/gpt-4o",), "mine": ("router/own/a", "short/a"),
        "large": ("server/large", "box/large"), "claude-opus": ("router/x",), "fast": ("router/openai/gpt-4o",),
    }.items():  # fmt: skip
        found = names.find(name)
        assert (found.sides, found.servers) == (frozenset({Side.SERVER}), servers), name
    assert (names.find("disco").sides, names.find("disco").servers) == (BOTH, ())
    assert names.find("disco/server").servers == ()
    for name in ("short/c", "nobody/x", "box/", "/x"):
        with pytest.raises(RequestError):
            names.find(name)


def test_what_is_said_of_a_model_is_not_said_of_another_of_its_server() -> None:
    assert first_server(Config(servers=(ROUTER, BOX))).server is BOX
    assert (of_model(BOX, "large").input_usd_per_mtok, of_model(BOX, "small").input_usd_per_mtok) == (1.0, None)
    plain = replace(BOX, model="", grade=70.0)
    assert [of_model(plain, model).grade for model in ("a", "b")] == [70.0, 70.0]


def test_each_model_has_its_own_price_and_all_have_one_account(scene: Scene) -> None:  # noqa: F811
    parts = several(scene, BOX, ROUTER)
    pool = pool_of(parts)
    request = GenerationRequest("r", HELLO, allowed=frozenset({Side.SERVER}), servers=("box/large",))
    context = pool.context(parts.context, request)
    assert (context.spending.price.input, context.spending.price.output) == (1.0, 2.0)
    assert context.spending.caps is parts.spending.caps
    assert pool.member("box/small").spending.price.source != "your settings"  # said of its own model alone
    parts.spending.set_rate(7.0)
    assert context.spending.prices.usd_per_kwh == parts.spending.prices.usd_per_kwh
    assert context.spending.prices.server_input_usd_per_mtok == 1.0
    assert set(context.endpoints) == {Side.SERVER}
    assert context.planner is not parts.planner  # of its times the race learns nothing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("server/large", "Set server.input_usd_per_mtok and server.output_usd_per_mtok,"),
        ("nobody/large", "Set input_usd_per_mtok and output_usd_per_mtok of [[servers]] nobody,"),
        ("nobody/other", "Set the price of other in a list of your own"),
    ],
)
def test_an_unknown_price_is_said_where_that_of_its_server_and_model_is_set(
    scene: Scene,  # noqa: F811
    name: str,
    said: str,
) -> None:
    nobody = replace(BOX, name="nobody", base_url="https://nobody.example/v1", input_usd_per_mtok=None)
    config = scene.config(servers=(nobody,))
    parts = scene.parts(replace(config, server=replace(config.server, base_url="https://x.example/v1", **UNPRICED)))
    asked = GenerationRequest(
        "r", HELLO, allowed=frozenset({Side.SERVER}), servers=(name,), max_cost_usd=1.0
    )  # fmt: skip
    context = pool_of(parts).context(parts.context, asked)
    assert said in str(CostLimit(asked, context.spending).reached())


@pytest.mark.parametrize("dear_first", [True, False])
def test_a_limit_that_fits_once_the_prompt_is_counted_finds_the_server_that_it_pays_for(
    scene: Scene,  # noqa: F811
    dear_first: bool,
) -> None:
    """The choice goes by bytes, of which English has twice as many as are held of a prompt that was counted."""
    dear = replace(BOX, name="dear", input_usd_per_mtok=15.0)
    cheap = replace(BOX, name="cheap", input_usd_per_mtok=5.0)
    nobody = replace(BOX, name="nobody", base_url="https://nobody.example/v1", **UNPRICED)
    parts = several(scene, nobody, *((dear, cheap) if dear_first else (cheap, dear)))
    asked = GenerationRequest(
        "r", ({"role": "user", "content": "word" * 1000},), allowed=frozenset({Side.SERVER}),
        servers=("nobody/large", "dear/large", "cheap/large"), sampling=Sampling(1), max_cost_usd=0.01,
    )  # fmt: skip
    context = pool_of(parts).context(parts.context, asked)
    counted = PromptLength(1000)
    assert not CostLimit(asked, pool_of(parts).member("dear/large").spending).allows(asked, counted, 0, ())
    assert CostLimit(asked, context.spending).within(frozenset({Side.SERVER}), asked, counted) == {Side.SERVER}


async def test_the_scarce_side_is_that_of_the_server_that_is_asked_now(scene: Scene) -> None:  # noqa: F811
    """[server] is dear, the box in the cellar costs nothing: which of them is asked says which side is to be spared."""
    free = replace(BOX, input_usd_per_mtok=0.0, output_usd_per_mtok=0.0)
    parts, first = several(scene, free), "server/large"
    pool = pool_of(parts)
    for _ in range(50):
        pool.choice.observe(first, 0.2, 0.0)
        pool.choice.observe("box/large", 0.3, 0.0)
    parts.spending.set_rate(0.1 * parts.spending.regime.threshold_usd_per_kwh)  # the dear one is the scarcer side
    pool.value_waiting(1e6)
    assert pool.asked_now is pool.own[first]
    await parts.wattmeter.look()
    assert constrained(parts) is Side.SERVER
    pool.value_waiting(1e-6)  # now only prices count
    scene.clock.at += 2 * MIN_CHANGE_S
    await parts.wattmeter.look()
    assert pool.asked_now is pool.own["box/large"]
    assert constrained(parts) is Side.DEVICE
    assert parts.scarce_side.spending() is pool.own["box/large"].spending
    pool.own["box/large"].endpoint.breaker.bar("unauthorized")  # type: ignore[attr-defined]
    scene.clock.at += 2 * MIN_CHANGE_S
    await parts.wattmeter.look()
    assert constrained(parts) is Side.SERVER


def test_what_an_hour_of_waiting_is_worth_holds_from_the_change_of_the_setting_on(scene: Scene) -> None:  # noqa: F811
    def chosen(parts: Parts) -> str:
        weighed = pool_of(parts).choice.weigh([Candidate("box/large", 0.01), Candidate("short/a", 0.0)])
        return min(weighed, key=lambda one: one.cost_s or 0.0).name

    parts = several(scene, BOX, SHORT)
    parts.commit()
    for _ in range(50):
        pool_of(parts).choice.observe("box/large", 0.2, 0.0)
        pool_of(parts).choice.observe("short/a", 1.0, 0.0)
    for usd_per_hour, name in ((30.0, "short/a"), (100.0, "box/large"), (3.0, "short/a"), (1e6, "box/large")):
        settings = replace(parts.config, policy=PolicySettings(usd_per_hour_waited=usd_per_hour))
        parts.under(settings).commit()  # a cent is 1.2 s at 30 $, and the dear one is 0.8 s sooner
        assert chosen(parts) == name, usd_per_hour
    after = scene.parts(replace(parts.config, policy=PolicySettings(usd_per_hour_waited=3.0)))
    after.commit()
    assert pool_of(after).choice.usd_per_hour_waited == 3.0


def test_what_is_private_is_never_given_a_server(scene: Scene) -> None:  # noqa: F811
    parts = several(scene, BOX)
    pool, asked = pool_of(parts), GenerationRequest("r", HELLO)
    assert pool.context(parts.context, asked).endpoints[Side.SERVER] is not pool
    assert pool.context(parts.context, dataclasses.replace(asked, private=True)) is parts.context
    scene.shared.privacy.on = True
    assert pool.context(parts.context, asked) is parts.context


def test_wishes_that_no_server_fits_leave_the_device(scene: Scene) -> None:  # noqa: F811
    parts = several(scene, BOX)
    wish = {"provider": {"ignore": ["box", "server"]}}
    asked = GenerationRequest("r", HELLO, extra=wish)
    assert set(pool_of(parts).context(parts.context, asked).endpoints) == {Side.DEVICE}
    with pytest.raises(RequestError, match="provider"):
        pool_of(parts).context(parts.context, dataclasses.replace(asked, allowed=frozenset({Side.SERVER})))


@pytest.mark.parametrize("wish", [{"data_collection": "deny"}, {"zdr": True}])
def test_who_may_not_keep_the_text_is_not_given_it(scene: Scene, wish: dict[str, Any]) -> None:  # noqa: F811
    like_it = replace(BOX, name="like", base_url="https://notopenrouter.ai/v1", insecure=True)
    parts = several(scene, BOX, like_it)
    asked = GenerationRequest("r", HELLO, extra={"provider": wish})
    assert set(pool_of(parts).context(parts.context, asked).endpoints) == {Side.DEVICE}
    with pytest.raises(RequestError, match="data_collection or zdr only OpenRouter"):
        pool_of(parts).context(parts.context, dataclasses.replace(asked, allowed=frozenset({Side.SERVER})))
    for host in ("openrouter.ai", "eu.openrouter.ai"):
        known = several(scene, BOX, replace(BOX, name="or", base_url=f"https://{host}/api/v1"))
        server = pool_of(known).context(known.context, asked).endpoints[Side.SERVER]
        assert isinstance(server, AnswerServer)
        assert (server.now.server, server.left) == ("or", [])


def test_a_floor_leaves_out_each_server_whose_own_model_does_not_reach_it(scene: Scene) -> None:  # noqa: F811
    parts = several(scene, replace(BOX, grade=80.0), replace(BOX, name="small", model="small-1b"))
    asked = GenerationRequest("r", HELLO, min_grade=60.0, rule="work")
    server = pool_of(parts).context(parts.context, asked).endpoints[Side.SERVER]
    assert isinstance(server, AnswerServer)
    assert (server.now.server, server.left) == ("box", []), "nor may it be hedged by, or handed to, a small one"
    pool, only = pool_of(parts), frozenset({Side.SERVER})
    for key in ("small/small-1b", "box/another-1b"):
        named = dataclasses.replace(asked, allowed=only, servers=(key,))
        with pytest.raises(RequestError, match="Rule 'work'"):
            pool.context(parts.context, named)
    assert set(pool.context(parts.context, dataclasses.replace(asked, min_grade=99.0)).endpoints) == {Side.DEVICE}


def test_a_floor_is_judged_by_the_model_that_is_asked_for(scene: Scene) -> None:  # noqa: F811
    parts = several(scene, replace(BOX, name="small", model="small-1b"), replace(BOX, grade=80.0))
    rule, grade = Rule("work", "plan", min_grade=60.0), ModelGrades.of(parts, has_floor=True)
    for servers, number in {(): 80.0, ("box/large",): 80.0}.items():
        found = grade(GenerationRequest("r", HELLO, servers=servers), rule).relation
        assert found.server.number == number, servers
    low = grade(GenerationRequest("r", HELLO, servers=("small/small-1b",)), rule).relation.server
    assert low.number is None or low.number < 60
    assert grade(GenerationRequest("r", HELLO), Rule("work", "small/small-1b", min_grade=60.0)).relation.server == low
    of_local = ModelGrades(lambda: Relation(device=Grade(80.0)), {"tiny": Grade(1.0)}, None)
    assert of_local(GenerationRequest("r", HELLO, local="tiny"), rule).relation.device.number == 1.0
    assert (
        of_local(GenerationRequest("r", HELLO), Rule("work", "disco/tiny", min_grade=60.0)).relation.device.number
        == 1.0
    )
    assert of_local(GenerationRequest("r", HELLO), rule).relation.device.number == 80.0


@pytest.mark.parametrize("worse_first", [True, False])
def test_better_holds_for_whichever_server_is_chosen(scene: Scene, worse_first: bool) -> None:  # noqa: F811
    worse, best = replace(BOX, name="worse", grade=20.0), replace(BOX, grade=80.0)
    others = (worse, best) if worse_first else (best, worse)
    config = replace(scene.config(servers=others), device=replace(scene.config().device, grade=50.0))
    config = replace(config, server=replace(config.server, grade=90.0))
    rule, asked = Rule("the better model", "better"), GenerationRequest("r", HELLO)

    def ruled(parts: Parts, one: Rule = rule) -> tuple[Side | None, set[str]]:
        """The side that begins, and the servers that may answer."""
        stands = ModelGrades.of(parts, has_floor=True)(asked, one)
        found = narrowed(asked, one, stands.relation, stands.servers)
        server = pool_of(parts).context(parts.context, found).endpoints[Side.SERVER]
        assert isinstance(server, AnswerServer)
        return found.prefers, {server.now.server, *(left.server for left in server.left)}

    assert ruled(scene.parts(config)) == (Side.SERVER, {"server", "box"})
    assert ruled(scene.parts(config), dataclasses.replace(rule, use="plan", min_parameters=None, min_grade=1.0)) == (
        None,
        {"server", "box", "worse"},
    )
    low = replace(config, server=replace(config.server, grade=30.0))
    assert ruled(scene.parts(low)) == (Side.SERVER, {"box"}), "the first one alone is worse than the device"
    lowest = replace(low, device=replace(low.device, grade=95.0))
    assert ruled(scene.parts(lowest)) == (Side.DEVICE, {"server", "box", "worse"}), "all of them may help"
    unknown = replace(lowest, server=replace(low.server, grade=None, model="of-nobody"))
    assert ruled(scene.parts(unknown)) == (None, {"server"}), "no one that is worse may be chosen"


def test_a_request_that_is_left_some_of_the_servers_is_refused_where_those_cannot_serve_it(
    scene: Scene,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(several(scene, BOX, SHORT))
    asked = GenerationRequest("r", HELLO, servers=("box/large",))
    assert pool.refuses(asked) is None
    monkeypatch.setattr(pool.own["box/large"].endpoint, "refuses", lambda _: "no pictures")
    assert pool.refuses(asked) == "no pictures"
    assert pool.refuses(dataclasses.replace(asked, servers=())) is None, "others can"
    assert pool.refuses(dataclasses.replace(asked, servers=("box/another",))) is None, "of that one nothing is known"


def test_a_name_that_the_device_has_as_well_is_answered_by_both(scene: Scene) -> None:  # noqa: F811
    here = scene.parts(scene.config()).endpoints[Side.DEVICE].model
    parts = several(scene, replace(BOX, model=here), replace(BOX, name=here.partition("/")[0], model=""))
    pool, names = pool_of(parts), names_of(parts, {})
    found = names.find(here)
    assert (found.sides, found.servers) == (BOTH, (f"box/{here}",))
    context = pool.context(parts.context, GenerationRequest("r", HELLO, allowed=found.sides, servers=found.servers))
    assert context.endpoints.keys() == BOTH
    assert context.endpoints[Side.SERVER].model == here
    assert context.planner is parts.planner
    assert [card["id"] for card in asyncio.run(names.cards())].count(here) == 1
    scene.shared.privacy.on = True
    assert pool.context(parts.context, GenerationRequest("r", HELLO, servers=found.servers)) is parts.context
    assert names.card(here)["id"] == here


def test_a_move_for_money_goes_by_the_prices_of_the_server_that_answers(scene: Scene) -> None:  # noqa: F811
    dear = replace(BOX, name="dear", input_usd_per_mtok=15.0, output_usd_per_mtok=75.0)
    free = replace(BOX, name="free", input_usd_per_mtok=0.0, output_usd_per_mtok=0.0)
    parts = several(scene, free, dear, handoff=HandoffSettings(for_cost=True))
    cheaper = {}
    for only in ("free", "dear"):
        asked = GenerationRequest("r", HELLO, extra={"provider": {"only": [only]}})
        mover = pool_of(parts).context(parts.context, asked).mover
        assert isinstance(mover, CostMover)
        cheaper[only] = mover._prices().cheaper
        mover.observe(Side.DEVICE, 100.0)
    assert cheaper == {"free": Side.SERVER, "dear": Side.DEVICE}
    assert isinstance(parts.context.mover, CostMover)
    assert parts.context.mover.decode_tps[Side.DEVICE] > DECODE_TPS[Side.DEVICE]  # all learn of one device
    asked = GenerationRequest("r", HELLO, extra={"provider": {"order": ["dear", "free"], "ignore": ["server"]}})
    context = pool_of(parts).context(parts.context, asked)
    server, mover = context.endpoints[Side.SERVER], context.mover
    assert isinstance(server, AnswerServer)
    assert isinstance(mover, CostMover)
    assert mover._prices().cheaper is Side.DEVICE
    server.leave(EndpointError(Side.SERVER, "cut", "it broke"), lambda _: True)
    assert mover._prices().cheaper is Side.SERVER


@pytest.mark.parametrize("limits", [CapLimits(usd_per_day=0.0), CapLimits(usd_per_month=0.0)])
@pytest.mark.parametrize("of_key", [True, False], ids=["of the key", "of the whole"])
def test_beyond_any_cap_a_server_that_costs_nothing_is_asked(
    scene: Scene,  # noqa: F811
    of_key: bool,
    limits: CapLimits,
) -> None:
    dear = replace(BOX, name="dear", input_usd_per_mtok=15.0, output_usd_per_mtok=75.0)
    free = replace(BOX, name="free", input_usd_per_mtok=0.0, output_usd_per_mtok=0.0)
    parts = several(scene, free, dear)
    wish = {"provider": {"order": ["dear", "free"], "ignore": ["server"]}}
    asked = GenerationRequest("r", HELLO, extra=wish, caller=Caller("anna", "1"))
    caps = parts.spending.caps
    caps.keys["anna"] = Caps(limits if of_key else CapLimits(), None, 0.0, key="anna")
    if not of_key:
        caps.set_limits(limits)
    chosen = pool_of(parts).context(parts.context, asked).endpoints[Side.SERVER]
    assert isinstance(chosen, AnswerServer)
    assert chosen.now.server == "free"
    other = dataclasses.replace(asked, caller=Caller("bert", "2"))
    chosen = pool_of(parts).context(parts.context, other).endpoints[Side.SERVER]
    assert isinstance(chosen, AnswerServer)
    assert chosen.now.server == ("dear" if of_key else "free"), "another key has caps of its own"


def test_hundreds_of_models_keep_some_members_only(scene: Scene) -> None:  # noqa: F811
    pool = pool_of(several(scene, BOX, ROUTER))
    first = pool.member("router/0")
    for n in range(400):
        pool.member(f"router/{n}")
    assert len(pool.documents()) <= 256 + 2
    assert pool.member("router/399") is pool.member("router/399")
    assert pool.member("router/0") is not first
    assert pool.member("box/large") is pool.own["box/large"]


def test_a_key_file_is_read_with_the_settings_and_in_no_request(scene: Scene, tmp_path: Path) -> None:  # noqa: F811
    key = tmp_path / "key"
    key.write_text("first")
    key.chmod(0o600)
    private = replace(BOX, api_key_file=str(key), api_key_env="")
    pool = pool_of(several(scene, private, replace(private, name="astray", key_origin="https://elsewhere.example")))
    key.unlink()
    asked = pool.member("box/other").endpoint
    assert isinstance(asked, Server)
    assert asked.config.api_key == "first"
    off = pool.member("astray/other").endpoint.status()
    assert off["state"] == "off"
    assert "[[servers]] astray" in off["last_error"]
    assert str(tmp_path) not in str(off)


def told_of(pool: ServerPool) -> dict[str, Any]:
    return {one["name"]: one for one in pool.documents()}


@pytest.fixture
async def take() -> AsyncIterator[Take]:
    """Have a pool take its place, as a daemon does."""
    taken: list[ServerPool] = []

    async def take(pool: ServerPool) -> None:
        taken.append(pool)
        await asyncio.to_thread(pool.restore)
        await pool.start()

    yield take
    for pool in taken:
        await pool.close()


def answered(server: str, model: str, ttft_s: float = 0.25, usd: float = 0.0) -> Outcome:
    whole = outcome(1, usd, 0.0)
    attempt = dataclasses.replace(
        whole.attempts[0], side=Side.SERVER, server=server, model=model, ttft_s=ttft_s, bill_usd=usd,
        censored=False, error=None, continued=False, disturbed=False, hedge=None,
    )  # fmt: skip
    return dataclasses.replace(whole, attempts=(attempt,))


async def test_what_was_learned_outlives_a_daemon_and_a_change_of_the_settings(scene: Scene, take: Take) -> None:  # noqa: F811
    parts = several(scene, BOX)
    pool = pool_of(parts)
    await take(pool)
    for _ in range(5):
        pool.record(parts.context, answered("box", "large", usd=0.5))
    changed = scene.parts(replace(scene.config(servers=(BOX, ROUTER))), parts)
    await take(pool_of(changed))
    assert pool_of(changed).choice is pool.choice
    assert told_of(pool_of(changed))["box"]["usd_today"] == 2.5
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    await cancel_all(running)  # as at an end of the daemon
    scene.shared.history.flush(5.0)
    again = pool_of(several(scene, BOX))
    await take(again)
    assert told_of(again)["box"]["ttft_p50_s"] == pytest.approx(0.25, rel=0.2)
    assert told_of(again)["server"]["ttft_p50_s"] is None


async def test_times_of_one_machine_say_nothing_of_another_with_its_name(scene: Scene, take: Take) -> None:  # noqa: F811
    parts = several(scene, BOX)
    pool = pool_of(parts)
    await take(pool)
    for _ in range(5):
        pool.record(parts.context, answered("box", "large"))
    await pool._learned.save()
    scene.shared.history.flush(5.0)
    moved = replace(BOX, base_url="http://127.0.0.1:9009/v1")
    there = scene.parts(replace(scene.config(servers=(moved,))), parts)
    assert told_of(pool)["box"]["ttft_p50_s"] is not None  # nothing has changed before the new one takes its place
    await take(pool_of(there))
    pool.record(parts.context, answered("box", "large"))  # it began before
    assert told_of(pool_of(there))["box"]["ttft_p50_s"] is None
    restarted = pool_of(several(scene, moved))
    await take(restarted)
    assert told_of(restarted)["box"]["ttft_p50_s"] is None
    none = scene.parts(scene.config(), there)  # all are taken away …
    back = pool_of(scene.parts(replace(scene.config(servers=(BOX,))), none))  # … and one comes back
    await take(back)
    assert told_of(back)["box"]["ttft_p50_s"] == pytest.approx(0.25, rel=0.2)


async def test_what_servers_have_cost_today_is_known_after_a_restart(scene: Scene, take: Take) -> None:  # noqa: F811
    spent = answered("box", "large", usd=0.75)
    scene.shared.history.record(dataclasses.replace(spent, created=scene.shared.clock.wall()))
    scene.shared.history.flush(5.0)
    pool = pool_of(several(scene, BOX))
    await take(pool)
    assert told_of(pool)["box"]["usd_today"] == pytest.approx(0.75)
    assert told_of(pool)["server"]["usd_today"] == 0.0


async def test_names_without_end_take_no_memory_without_end(scene: Scene, take: Take) -> None:  # noqa: F811
    parts = several(scene, BOX, ROUTER)
    pool = pool_of(parts)
    await take(pool)
    for n in range(3 * MOST_NAMED):
        request = GenerationRequest("r", HELLO, allowed=frozenset({Side.SERVER}), servers=(f"router/{n}",))
        server = pool.context(parts.context, request).endpoints[Side.SERVER]
        assert isinstance(server, AnswerServer)
        server.leave(EndpointError(Side.SERVER, "not_found", "no such model"), lambda _: True)
        pool.record(parts.context, answered("router", str(n), usd=0.1))
    pool.record(parts.context, answered("router", "0"))  # one that began long ago
    assert len(pool.choice.names) <= MOST_NAMED + 2
    assert all(len(counted) <= MOST_NAMED + 3 for counted in (pool._learned._n_asked, pool._learned._usd_today))
    assert len(pool.documents()) <= MOST_SHOWN + 2
    assert pool.documents()[2]["model"] == str(3 * MOST_NAMED - 1)


async def test_to_save_what_was_learned_leaves_the_loop_to_answers(scene: Scene, take: Take) -> None:  # noqa: F811
    own = tuple(replace(BOX, name=f"box{n}", base_url=f"http://127.0.0.1:{9100 + n}/v1") for n in range(20))
    parts = several(scene, *own)
    pool, kept = pool_of(parts), list[str]()
    await take(pool)
    for server in own:
        for _ in range(5):
            pool.record(parts.context, answered(server.name, "large"))
    pool.record(parts.context, answered("box0", "by name"))
    ready: list[int] = []
    scene.shared.history.save_learned = lambda name, *_: kept.append(name)  # type: ignore[method-assign]
    saving = asyncio.create_task(pool._learned.save())
    while not saving.done():
        ready.append(len(kept))
        await asyncio.sleep(0)
    assert max(b - a for a, b in pairwise([*ready, len(kept)])) <= 1
    assert len(kept) == len(set(kept)) == len(own)  # none that a caller has named


async def test_only_what_has_changed_is_saved_and_all_of_it_at_the_end(scene: Scene, take: Take) -> None:  # noqa: F811
    parts = several(scene, BOX, SHORT, replace(BOX, name="other", base_url="http://127.0.0.1:9007/v1"))
    pool, kept = pool_of(parts), list[str]()
    await take(pool)
    scene.shared.history.save_learned = lambda name, *_: kept.append(name.split(":")[-1])  # type: ignore[method-assign]

    async def saved() -> list[str]:
        kept.clear()
        await pool._learned.save()
        return sorted(kept)

    pool.member("short/a")  # somebody has asked for it
    for server, model in (("box", "large"), ("other", "large"), ("short", "a")):
        pool.record(parts.context, answered(server, model))
    assert await saved() == ["9001/v1 large", "9003/v1 a", "9007/v1 large"]
    assert await saved() == []
    pool.record(parts.context, answered("box", "large"))
    assert await saved() == ["9001/v1 large"]
    pool._failed(pool.member("other/large"))
    assert await saved() == ["9007/v1 large"]
    after = scene.parts(replace(parts.config, policy=PolicySettings(hedge=0.0)), parts)
    await take(pool_of(after))
    assert len(await saved()) == 3, "under other settings a name may be another server's"
    kept.clear()
    running = asyncio.create_task(pool_of(after).run())
    await asyncio.sleep(0)
    await cancel_all(running)
    assert len(kept) == 3, "also how long ago each was asked"


@given(st.lists(st.floats(0.0, 60.0), max_size=30))
def test_a_server_that_shows_nothing_is_tried_ever_more_rarely_until_it_answers(gaps: list[float]) -> None:
    trials, now, wait_s, due = Trials(), 0.0, TRIAL_AFTER_S, 0.0
    for gap in gaps:
        now += gap
        assert trials.take("a", 1, now) == (now >= due)
        if now >= due:
            trials.begin("a", 1, now)
            due, wait_s = now + wait_s, min(2 * wait_s, TRIAL_AT_LEAST_S)
    assert trials.take("a", 2, now), "it has failed since, and has rested as its breaker had it"
    trials.end("a")
    assert trials.take("a", 2, now)


@given(st.lists(st.floats(0.0, 60.0), max_size=30))
def test_a_server_that_was_not_asked_after_all_is_tried_again_soon(gaps: list[float]) -> None:
    """A device that answers first keeps the trial from being sent: that says nothing of the server."""
    trials, now = Trials(), 0.0
    for gap in gaps:
        now += gap
        trials.take("a", 1, now)
    assert trials.take("a", 1, now + TRIAL_AFTER_S)


def test_the_share_of_second_requests_is_that_of_the_settings_and_changes_at_once(scene: Scene) -> None:  # noqa: F811
    for hedge, share in ((0.0, 0.0), (0.01, 0.01), (0.5, HEDGE_SHARE)):
        config = scene.config(servers=(BOX,))
        parts = several(scene, BOX, policy=replace(config.policy, hedge=hedge))
        assert pool_of(parts).choice.hedges.share == share
        off = parts.under(replace(parts.config, policy=replace(config.policy, hedge=0.0)))
        off.commit()
        assert pool_of(parts).choice.hedges.share == 0.0


def test_new_parts_change_the_share_when_they_are_taken_up_and_not_before(scene: Scene) -> None:  # noqa: F811
    before = several(scene, BOX)
    off = replace(scene.config(servers=(BOX, ROUTER)), policy=replace(before.config.policy, hedge=0.0))
    after = scene.parts(off, before)
    assert pool_of(before).choice.hedges.share > 0
    after.commit(before)
    assert pool_of(before).choice.hedges.share == 0.0
