"""Which price a model at an address has, and what is wrong with a list that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.errors import ConfigError
from disco_daemon.money.catalog import Catalog, Price, is_private, parse

OPENAI = "https://api.openai.com/v1"
HEAD = {"as_of": date(2026, 11, 1), "source": "https://example.com/prices"}


def entry(input_price: float, output: float, **more: Any) -> dict[str, Any]:
    return {"input": input_price, "output": output} | more


def listing(models: Mapping[str, Any], url: str = OPENAI, **more: Any) -> dict[str, Any]:
    return {"base_url": url, "models": models} | HEAD | more


def make(*tables: dict[str, Any]) -> Catalog:
    return Catalog(tuple(parse(f"list{n}", table, f"list{n}.toml") for n, table in enumerate(tables)))


PRICES = make(
    listing(
        {
            "gpt-5": entry(1.25, 10, cached_input=0.125),
            "gpt-5-pro": entry(15, 120),
            "gpt-4o": entry(2.5, 10),
            "gpt-4o-2024-05-13": entry(5, 15),
            "mistral-large-2411": entry(2, 6, aliases=["Large-Old"]),
        }
    ),
    {"private": True, "models": {"*": entry(0, 0)}} | HEAD,
)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("gpt-5", "gpt-5"),
        ("GPT-5", "gpt-5"),
        ("models/gpt-5", "gpt-5"),
        ("gpt-5-2025-08-07", "gpt-5"),
        ("gpt-5-20250807", "gpt-5"),
        ("gpt-5@20250807", "gpt-5"),
        ("gpt-5-pro-2025-10-06", "gpt-5-pro"),
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("gpt-4o-2024-05-13", "gpt-4o-2024-05-13"),
        ("large-old", "mistral-large-2411"),
    ],
)
def test_a_model_is_found_by_its_name_with_or_without_a_date(model: str, found: str) -> None:
    price = PRICES.price(OPENAI, model)
    assert price.known
    assert price.entry == f"list0: {found}"


@pytest.mark.parametrize(
    "model",
    [
        "gpt-5-fast",
        "gpt-5-mini",
        "gpt-50",
        "gpt",
        "mistral-large-2512",
        "gpt-5-2025-13-01",
        "gpt-5-2025-08-07-x",
        "",
        "*",
    ],
)
def test_no_other_ending_is_taken_off(model: str) -> None:
    assert not PRICES.price(OPENAI, model).known


def test_an_unknown_model_costs_the_dearest_of_each_kind_without_a_discount() -> None:
    price = PRICES.price(OPENAI, "gpt-7")
    assert (price.input, price.cached_input, price.output, price.known) == (15, 15, 120, False)
    assert PRICES.price("https://other.example/v1", "gpt-5") == price


def test_a_reference_is_found_by_its_name_only_and_makes_nothing_dearer() -> None:
    paper = parse("paper", {"reference": True, "models": {"Dear": entry(999, 999)}} | HEAD, "paper.toml")
    both = Catalog((*PRICES.profiles, paper))
    assert both.dearest == PRICES.dearest
    assert not both.price(OPENAI, "Dear").known
    assert both.named("paper") is paper
    assert both.named("none") is None


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("https://api.openai.com/v1/", True),
        ("https://API.OpenAI.com./v1", True),
        ("https://api.openai.com:443/v1/x", True),
        ("https://user:key@api.openai.com/v1", True),
        ("https://api.openai.com", False),
        ("https://api.openai.com/v11", False),
        ("https://api.openai.com:8443/v1", False),
        ("https://eu.api.openai.com/v1", False),
        ("https://api.openai.com.evil.example/v1", False),
        ("https://api.openai.com:bad/v1", False),
        ("no url", False),
    ],
)
def test_an_address_is_a_host_a_port_and_the_beginning_of_a_path(url: str, same: bool) -> None:
    assert PRICES.price(url, "gpt-5").known is same
    assert (PRICES.server(url) is not None) is same


def test_the_users_list_goes_before_and_leaves_the_rest() -> None:
    own = parse("mine", {"base_url": OPENAI, "models": {"gpt-5": entry(1, 2)}}, "mine.toml", own=True)
    both = Catalog((*PRICES.profiles, own))
    assert (both.price(OPENAI, "gpt-5").output, both.price(OPENAI, "gpt-5-pro").output) == (2, 120)
    assert both.price(OPENAI, "gpt-5").source == "mine.toml"


def test_a_private_address_is_free_by_the_rule_only() -> None:
    assert PRICES.price("http://127.0.0.1:8000/v1", "anything").cost_usd(10**6, 10**6) == 0
    without = Catalog(PRICES.profiles[:1])
    assert not without.price("http://127.0.0.1:8000/v1", "anything").known
    proxy = parse("proxy", listing({"gpt-5": entry(3, 4)}, "http://localhost:4000/v1"), "proxy.toml")
    both = Catalog((proxy, *PRICES.profiles))
    assert both.price("http://localhost:4000/v1", "gpt-5").output == 4, (
        "a name goes before the rule, wherever it stands"
    )
    assert both.price("http://localhost:8000/v1", "gpt-5").output == 0


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("localhost", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.7", True), ("192.168.1.2", True),
        ("172.16.0.1", True), ("fd00::1", True), ("fe80::1", True), ("gpu-box", True), ("nas.local", True),
        ("llm.home.arpa", True), ("vllm.internal", True), ("LOCALHOST.", True),
        ("8.8.8.8", False), ("172.32.0.1", False), ("api.openai.com", False), ("2001:4860:4860::8888", False),
        ("::ffff:8.8.8.8", False), ("134744072", False), ("0x08080808", False), ("local", True),
        ("notlocal.com", False), ("127.0.0.1.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_private(host: str, private: bool) -> None:
    assert is_private(host) is private


def test_closing_a_stream_helps_only_where_somebody_says_so() -> None:
    yes = parse("yes", listing({}, "https://yes.example/v1", closing_stops_billing=True), "f")
    unknown = parse("unknown", listing({}, "https://unknown.example/v1", closing_stops_billing="unknown"), "f")
    no = parse("no", listing({}, "https://yes.example/v1/slow", closing_stops_billing=False), "f")
    both = Catalog((yes, unknown, no))
    assert both.stops_billing("https://yes.example/v1")
    assert not both.stops_billing("https://yes.example/v1/slow/x")
    assert not both.stops_billing("https://unknown.example/v1")
    assert not both.stops_billing("https://nobody.example/v1")


def test_advice_names_the_server_the_price_and_the_file_but_no_password() -> None:
    advice = PRICES.advice("https://me:secret@x.example/v1", "m", "servers/x.toml")
    assert advice is not None
    assert all(part in advice for part in ("https://x.example/v1", "$15", "$120", "servers/x.toml", '[models."m"]'))
    assert "secret" not in advice
    assert PRICES.advice(OPENAI, "gpt-5", "x") is None


def test_a_request_costs_its_tokens_the_cached_ones_less() -> None:
    price = Price(1.25, 0.125, 10)
    assert price.cost_usd(10**6, 10**6) == pytest.approx(11.25)
    assert price.cost_usd(10**6, 0, 10**6) == pytest.approx(0.125)
    assert price.cost_usd(1000, 0, 5000) == pytest.approx(0.000125), "no more tokens are cached than there are"


amounts = st.floats(0, 1000)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), amounts, amounts, amounts)
def test_a_cache_only_ever_saves(prompt: int, answer: int, cached: int, a: float, b: float, output: float) -> None:
    price = Price(max(a, b), min(a, b), output)
    full = price.cost_usd(prompt, answer)
    assert 0 <= price.cost_usd(prompt, answer, cached) <= full * (1 + 1e-12)


@given(st.text(max_size=40), st.text(max_size=40))
def test_every_question_has_an_answer(url: str, model: str) -> None:
    assert PRICES.price(url, model).output >= 0


ONE = {"m": entry(1, 2)}


@pytest.mark.parametrize(
    ("table", "key", "mend"),
    [
        (listing(ONE, colour="red"), "colour", "choose one, such as"),
        ({"models": ONE} | HEAD, "base_url", "https://"),
        (listing(ONE, "ftp://x"), "base_url", "https://"),
        (listing(ONE, other_urls=["x"]), "other_urls", "https://"),
        (listing(ONE, other_urls="https://x"), "other_urls", "list of texts"),
        (listing(ONE, continuation="magic"), "continuation", "it is one of"),
        (listing(ONE, closing_stops_billing="maybe"), "closing_stops_billing", "true, false"),
        (listing(ONE, private="yes"), "private", "true or false"),
        (listing(ONE, notes=3), "notes", "text"),
        (listing({}) | {"models": 3}, "models", "table"),
        (listing({"m": 3}), "m", "table"),
        (listing({"m": {"input": 1}}), 'models."m".output', "0.15"),
        (listing({"m": entry(-1, 2)}), 'models."m".input', "0.15"),
        (listing({"m": entry(float("nan"), 2)}), 'models."m".input', "0.15"),
        (listing({"m": entry(1, float("inf"))}), 'models."m".output', "0.15"),
        (listing({"m": entry(True, 2)}), 'models."m".input', "0.15"),
        (listing({"m": {"input": "1", "output": 2}}), 'models."m".input', "0.15"),
        (listing({"m": entry(1, 2, cached_input=3)}), 'models."m".cached_input', "lower it"),
        (listing({"m": entry(1, 2, price=3)}), 'models."m".price', "it is one of"),
        (listing({"m": entry(1, 2, as_of="yesterday")}), 'models."m".as_of', "2026-11-21"),
        (listing({"m": entry(1, 2, as_of=7)}), 'models."m".as_of', "2026-11-21"),
        (listing({"m": entry(1, 2, aliases=["M"])}), 'models."m".aliases', "twice"),
        (listing({"m": entry(1, 2), "M": entry(1, 2)}), 'models."M"', "twice"),
        ({"base_url": OPENAI, "models": ONE}, 'models."m"', "as_of"),
        ({"base_url": OPENAI, "models": ONE, "as_of": date(2026, 1, 1)}, 'models."m"', "source"),
    ],
)
def test_a_wrong_list_is_named_with_key_and_mend(table: dict[str, Any], key: str, mend: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse("bad", table, "bad.toml")
    assert str(e.value).startswith("bad.toml: ")
    assert key in str(e.value)
    assert mend in str(e.value)


def test_days_are_read_as_toml_writes_them() -> None:
    for day in (date(2026, 3, 4), "2026-03-04", datetime(2026, 3, 4, 5)):  # noqa: DTZ001 - a local TOML date-time
        profile = parse("x", listing({"m": entry(1, 2, as_of=day)}), "x")
        assert profile.models["m"].as_of == date(2026, 3, 4)
