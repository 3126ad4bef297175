"""Of a public list of prices what is certain is taken, whatever stands in it; the rest stays unknown."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.money.catalog import parse
from disco_daemon.money.genai_prices import price_lists

DAY = date(2026, 11, 29)
SHIPPED = {"openai": ("https://api.openai.com/v1",)}
WHOLE = {"input_mtok": 1, "output_mtok": 4}
TIERS = {"base": 3, "tiers": [{"start": 9, "price": 6}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["id", "name", "api_pattern", "models", "match", "equals", "or", "prices", "input_mtok", "output_mtok",
             "cache_read_mtok", "base", "tiers", "price", "requests_kcount", "constraint", "start_date",
             "context_window"]
        ),
        inner, max_size=5,
    ),
    max_leaves=30,
)  # fmt: skip


def model(name: str, prices: Any = WHOLE, match: Any = None, **more: Any) -> dict[str, Any]:
    return {"id": name, "match": match or {"equals": name}, "prices": prices, **more}


def provider(name: str, pattern: str, *models: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "name": name.upper(), "api_pattern": pattern, "models": list(models)}


def of_openai(*models: dict[str, Any]) -> dict[str, Any]:
    found = price_lists([provider("openai", "https://api\\.openai\\.com", *models)], SHIPPED, DAY)
    return found["openai"]["models"] if found else {}


@pytest.mark.parametrize(
    ("name", "pattern", "address"),
    [
        ("openai", "anything", "https://api.openai.com/v1"),
        ("x-ai", "https://api\\.x\\.ai", "https://api.x.ai"),
        ("meta", "https://api\\.meta\\.ai(?:/|$)", "https://api.meta.ai"),
        ("hf", "https://router\\.huggingface\\.co/groq", "https://router.huggingface.co/groq"),
        ("openai-too", "https://api\\.openai\\.com", None),
        ("aws", "https://bedrock-runtime\\.[a-z0-9-]+\\.amazonaws\\.com(/|$)", None),
        ("slow", "(a+)+$", None),
        ("clear", "http://api\\.x\\.ai", None),
    ],
)
def test_a_providers_address_is_our_own_or_written_out(name: str, pattern: str, address: str | None) -> None:
    found = price_lists([provider(name, pattern, model("m"))], SHIPPED, DAY)
    assert (found[name]["base_url"] if found else None) == address


def test_names_that_stand_there_whole_are_taken_and_each_once() -> None:
    either = {"or": [{"equals": "a-2024"}, {"equals": "A"}, {"starts_with": "a"}, {"regex": "a.*"}, {"contains": "a"}]}
    found = of_openai(model("a", match=either), model("A"), model("b", match={"starts_with": "b"}))
    assert {name: entry["aliases"] for name, entry in found.items()} == {"a": ["a-2024"], "b": []}


@pytest.mark.parametrize(
    ("prices", "amounts"),
    [
        (WHOLE, (1, None, 4)),
        (WHOLE | {"cache_read_mtok": 0.5}, (1, 0.5, 4)),
        (WHOLE | {"cache_read_mtok": 2}, (1, None, 4)),
        ({"input_mtok": TIERS, "output_mtok": 0}, (6, None, 0)),
        ({"input_mtok": TIERS, "output_mtok": 9, "cache_read_mtok": {"base": 0.3, "tiers": [{"price": 0.6}]}},
         (6, 0.6, 9)),
        ({"input_mtok": {"base": 3, "tiers": [{"price": 2}]}, "output_mtok": 4}, (3, None, 4)),
        *(({"input_mtok": {"base": 3, "tiers": tiers}, "output_mtok": 4}, None)
          for tiers in ([{"start": 9}], [{"price": "6"}], [{"price": {"base": 6}}], [6], {"price": 6}, None)),
        (WHOLE | {"requests_kcount": 12}, None), (WHOLE | {"requests_kcount": 0}, (1, None, 4)),
        (WHOLE | {"output_citation_mtok": 2}, None), (WHOLE | {"pages_kcount": {"base": 1}}, None),
        (WHOLE | {"web_searches_kcount": 10, "cache_write_mtok": 2, "input_audio_mtok": 9}, (1, None, 4)),
        ({"input_mtok": 0, "output_mtok": 0}, None), ({"input_mtok": 0, "output_mtok": {"base": 0}}, None),
        ([{"prices": WHOLE}, {"constraint": {"start_date": "2026-11-29"}, "prices": WHOLE | {"input_mtok": 2}}],
         (2, None, 4)),
        ([{"prices": WHOLE}, {"constraint": {"start_date": "2026-11-30"}, "prices": {}}], (1, None, 4)),
        ([{"prices": WHOLE}, {"constraint": {"start_time": "00:00", "end_time": "01:00"}, "prices": {}}], (1, None, 4)),
        ({}, None), ({"input_mtok": 1}, None), ([], None), (None, None), (7, None),
        (WHOLE | {"input_mtok": -1}, None), (WHOLE | {"input_mtok": float("nan")}, None),
        (WHOLE | {"output_mtok": float("inf")}, None), (WHOLE | {"output_mtok": 1e9}, None),
        (WHOLE | {"output_mtok": True}, None), (WHOLE | {"output_mtok": "4"}, None),
    ],
)  # fmt: skip
def test_a_price_is_that_of_the_day_and_what_is_not_all_there_is_not_known(prices: Any, amounts: Any) -> None:
    found = of_openai(model("m", prices))
    entry = found.get("m")
    said = None if entry is None else (entry["input"], entry.get("cached_input"), entry["output"])
    assert said == amounts


@given(JSON)
def test_whatever_stands_in_it_is_refused_or_a_list_like_any_other(document: object) -> None:
    try:
        tables = price_lists(document, SHIPPED, DAY)
    except ValueError:
        return
    for name, table in tables.items():
        parse(name, {"source": "s", "as_of": DAY.isoformat(), **table}, "f")
