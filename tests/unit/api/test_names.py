"""Names of models: the daemon's own, the endpoints', aliases and their patterns, and what is told of each."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.http.sse import bill, headers
from disco_daemon.api.names import ModelNames
from disco_daemon.config import layers as config
from disco_daemon.config.schema import Api, Config
from disco_daemon.errors import ConfigError, RequestError
from disco_daemon.plain import is_like
from disco_daemon.types import BOTH, UNKNOWN, Capabilities, Outcome, Plan, Reason, Side, Tools

WRITTEN, STARTED = 1_700_000_000.5, 1_790_000_000.25
HERE = Capabilities(4096, 4096, tools=Tools.NONE, json_schema=True, images=False)
DEVICE, SERVER = frozenset({Side.DEVICE}), frozenset({Side.SERVER})
ALIASES = {
    "claude-*": "disco", "claude-haiku-*": "disco/device", "gpt-4o": "disco/server", "big": "gpt-4o", "lost": "nobody",
    "tuned": "disco/device:french",
}  # fmt: skip


def endpoint(model: str, since: float, can: Capabilities, adapters: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(model=model, known_since=since, capabilities=can, adapters=adapters or {})


def names(
    aliases: dict[str, str] | None = None,
    *,
    private: bool = False,
    server: Capabilities = UNKNOWN,
    local: object = None,
) -> ModelNames:
    endpoints = {
        Side.DEVICE: endpoint("SmolLM2", WRITTEN, HERE, {"french": "", "broken": "it is no adapter"}),
        Side.SERVER: endpoint("gpt-4o", STARTED, server),
    }
    conductor: Any = SimpleNamespace(
        endpoints=endpoints, context=SimpleNamespace(private=private, servers=None), local=local
    )
    return ModelNames(conductor, ALIASES if aliases is None else aliases)


@pytest.mark.parametrize(
    ("name", "target", "sides"),
    [
        ("disco", "disco", BOTH), ("disco/device", "disco/device", DEVICE), ("SmolLM2", "SmolLM2", DEVICE),
        ("gpt-4o", "disco/server", SERVER), ("claude-sonnet-4-5", "disco", BOTH),
        ("claude-haiku-4-5-20251001", "disco/device", DEVICE), ("claude-*", "disco", BOTH), ("claude-", "disco", BOTH),
        ("tuned", "disco/device:french", DEVICE), ("big", "gpt-4o", SERVER),
    ],
)  # fmt: skip
def test_a_name_stands_for_what_the_settings_or_the_endpoints_say(
    name: str, target: str, sides: frozenset[Side]
) -> None:
    found = names().find(name)
    assert (found.target, found.sides) == (target, sides)
    assert found.adapter == ("french" if name == "tuned" else "")


@pytest.mark.parametrize("name", ["claude", "gpt-4", "gpt-4o-mini", "Disco", "disco/nobody", "lost", ""])
def test_another_name_is_not_found_and_all_others_are_named(name: str) -> None:
    with pytest.raises(RequestError, match="does not exist") as raised:
        names().find(name)
    assert (raised.value.status, raised.value.param, raised.value.code) == (404, "model", "model_not_found")
    assert "disco/device:french, SmolLM2, gpt-4o" in str(raised.value)
    assert ("api.aliases" in str(raised.value)) is (name == "lost")


def test_an_adapter_that_was_not_loaded_says_why() -> None:
    with pytest.raises(RequestError, match="it is no adapter"):
        names().find("disco/device:broken")


def test_no_pattern_takes_the_daemons_own_names() -> None:
    every = names({"*": "disco/server"})
    assert every.find("disco").sides == BOTH
    assert every.find("disco/device").sides == DEVICE
    assert every.find("whatever").sides == SERVER


def test_the_list_has_every_name_once_and_a_pattern_as_it_stands() -> None:
    cards = asyncio.run(names().cards())
    ids = [card["id"] for card in cards]
    assert len(ids) == len(set(ids))
    assert set(ids) == {
        "disco", "disco/device", "disco/server", "disco/device:french", "SmolLM2", "gpt-4o", "claude-*",
        "claude-haiku-*", "big", "tuned",
    }  # fmt: skip
    aliases = {card["id"]: card["alias_of"] for card in cards if "alias_of" in card}
    assert aliases == {alias: target for alias, target in ALIASES.items() if alias != "lost"}
    assert all(names().card(name)["id"] == name for name in ids)


def test_what_only_the_server_has_is_not_listed_while_nothing_may_leave() -> None:
    ids = {card["id"] for card in asyncio.run(names(private=True).cards())}
    assert not ids & {"disco/server", "gpt-4o", "big"}
    assert {"disco", "claude-*", "SmolLM2"} <= ids


def test_a_card_has_a_date_and_the_context_where_that_is_known() -> None:
    by_id = {card["id"]: card for card in asyncio.run(names().cards())}
    assert by_id["SmolLM2"]["created"] == by_id["claude-haiku-*"]["created"] == int(WRITTEN)
    assert by_id["disco"]["created"] == by_id["gpt-4o"]["created"] == int(STARTED)
    assert by_id["disco/device"]["context_length"] == by_id["tuned"]["context_length"] == 4096
    assert "context_length" not in by_id["gpt-4o"]
    assert "context_length" not in by_id["disco"], "the server may have more"
    assert by_id["disco/device"]["capabilities"] == {"tools": "none", "json_schema": True, "images": False}
    assert by_id["disco"]["capabilities"] == {"json_schema": True}, "of the rest the server may have more"
    large = names(server=Capabilities(128_000, 16_384, tools=Tools.NATIVE, images=False)).card("disco")
    assert (large["context_length"], large["max_output"]) == (128_000, 16_384)
    assert large["capabilities"] == {"tools": "native", "json_schema": True, "images": False}
    private = names(private=True, server=Capabilities(128_000, tools=Tools.NATIVE)).card("disco")
    assert (private["context_length"], private["capabilities"]["tools"]) == (4096, "none"), "only the device may answer"
    assert names().card("claude-opus-9")["id"] == "claude-opus-9", "one that only a pattern has"


# --- patterns -----------------------------------------------------------------------------------------------------


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_a_pattern_means_what_it_means_elsewhere(pattern: str, name: str) -> None:
    if "*" in pattern:
        assert is_like(name, pattern) is bool(re.fullmatch(pattern.replace("*", ".*"), name))


def test_no_name_makes_a_pattern_slow() -> None:
    begun = time.process_time()
    assert not is_like("a" * 1_000_000, "*a*a*a*a*a*a*a*b")
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    "aliases", [{"disco": "x"}, {"disco/mine": "disco"}, {"a b": "disco"}, {"": "disco"}, {"a": ""}]
)
def test_an_alias_that_could_not_work_is_refused(aliases: dict[str, str], tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"api\.aliases|aliases"):
        config.set_values(tmp_path / "config.toml", {"api.aliases": aliases})


def test_aliases_are_written_and_read_as_a_table(tmp_path: Any) -> None:
    path = tmp_path / "config.toml"
    found = config.set_values(path, {"api.aliases": '{"claude-*" = "disco", "discovery" = "disco/device"}'})
    assert found.api.aliases == {"claude-*": "disco", "discovery": "disco/device"}
    assert config.load(path, env={}) == found
    assert Config(api=Api()).api.aliases == {}


# --- headers ------------------------------------------------------------------------------------------------------


def outcome(cost_usd: float, ttft_s: float | None = 0.25) -> Outcome:
    return Outcome(
        "r", 0.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, ttft_s, 1.0, 0, {}, (), cost_usd, 0.0
    )  # fmt: skip


def test_headers_have_words_of_the_answer_and_nothing_that_is_not_known() -> None:
    assert headers("r", Side.SERVER, model="gpt-4o", reason=Reason.RACE) == {
        "X-Disco-Request-Id": "r", "X-Disco-Route": "server", "X-Disco-Model": "gpt-4o", "X-Disco-Reason": "race",
    }  # fmt: skip
    assert headers("r", None) == {"X-Disco-Request-Id": "r"}


@pytest.mark.parametrize("model", ["a\r\nX-Evil: 1", "modèle", "模型", "a\x00b", "100%"])
def test_no_name_of_a_model_breaks_a_header(model: str) -> None:
    told = headers("r", Side.SERVER, model=model)["X-Disco-Model"]
    assert told.isascii()
    assert told.isprintable()


@pytest.mark.parametrize(
    ("cost", "told"), [(0.0, "0"), (1.5e-7, "0.00000015"), (0.1 + 0.2, "0.3"), (12.0, "12"), (1e-13, "0")]
)
def test_a_cost_is_a_plain_number(cost: float, told: str) -> None:
    assert bill(outcome(cost))["X-Disco-Cost-Usd"] == told


def test_a_time_is_there_if_a_token_was() -> None:
    assert bill(outcome(0.0))["X-Disco-Ttft-Ms"] == "250.0"
    assert "X-Disco-Ttft-Ms" not in bill(outcome(0.0, None))


def several(*names: str) -> Any:
    """Models of this machine beside the device's, all of them not loaded."""

    def context(name: str) -> Any:
        return SimpleNamespace(endpoints={Side.DEVICE: endpoint(name, WRITTEN, HERE)})

    return SimpleNamespace(names=set(names), context=context, about=lambda name: {"state": "unloaded", "use": name})


def test_one_of_several_models_is_asked_for_by_its_name_or_an_alias() -> None:
    known = names({"gpt-4o": "disco/coder"}, local=several("coder"))
    for name in ("disco/coder", "disco/coder:latest", "gpt-4o"):
        found = known.find(name)
        assert (found.target, found.sides, found.local) == ("disco/coder", DEVICE, "coder")
    assert known.find("disco/device").local == "", "the device of the race is none of them"
    card = known.card("gpt-4o")
    assert (card["alias_of"], card["state"], card["context_length"]) == ("disco/coder", "unloaded", 4096)
    assert [c["id"] for c in asyncio.run(known.cards())].count("disco/coder") == 1
    assert "state" not in known.card("disco/device")


@pytest.mark.parametrize("name", ["disco/codr", "disco/", "disco/coder/x", "coder", "/coder"])
def test_a_name_that_no_model_has_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(RequestError, match="disco/coder") as refused:
        names(local=several("coder")).find(name)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
