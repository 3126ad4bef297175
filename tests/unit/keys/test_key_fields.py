"""What of a request's body could name a model at a server, beside `model`, is held against the key's patterns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.keys.key_fields import _COSTLY, CONTENT, kept, models_named, unheld
from disco_daemon.types import FIELDS, Treatment, field_of

DEAR = "openai/o1-pro"
GOES_ON = [name for name, row in FIELDS.items() if not row.own and row.server is Treatment.PASSED_ON]
SHAPES: list[Any] = [
    {"model": DEAR},
    {"models": [DEAR]},
    [{"id": "auto-router", "allowed_models": [DEAR]}],
    {"parameters": {"Model": DEAR}},
    {"models": {"answering_model": DEAR}},
    {"model": {DEAR: 1}},
    {"model": {"id": DEAR}},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GOES_ON)
def test_no_field_that_goes_to_a_server_hides_the_name_of_a_model(name: str, shape: Any) -> None:
    """Of a field that is not looked into, the content is the client's own text: the list of those is short."""
    left = kept({name: shape})
    is_text = name in CONTENT or field_of(name).device is Treatment.FORM
    assert is_text or not left or DEAR in models_named(left)


def test_models_of_openrouter_and_tools_of_routers_are_seen() -> None:
    assert list(models_named({"models": [DEAR, "b"], "route": "fallback"})) == ["b", DEAR]
    assert list(models_named({"models": DEAR})) == [DEAR]
    advisor = {"type": "openrouter:advisor", "parameters": {"model": DEAR}}
    assert list(models_named({"tools": [advisor]})) == [DEAR]
    assert list(models_named({"tools": [advisor | {"function": {"model": DEAR}}]})) == [DEAR, DEAR]


@pytest.mark.parametrize("name", ["preset", "Models", "MODEL", "compound_custom", "plugins", "lora_request", "zzz"])
def test_what_disco_does_not_know_stays_here(name: str) -> None:
    assert kept({name: {"x": DEAR}, "top_p": 0.5}) == {"top_p": 0.5}


@pytest.mark.parametrize("name", ["guided_json", "guided_of_a_later_vllm", "response_format", "json_schema"])
def test_a_form_with_a_property_that_is_called_model_is_no_model(name: str) -> None:
    extra = {name: {"properties": {"model": {"enum": [DEAR]}}}}
    assert kept(extra) == extra
    assert not list(models_named(extra))


def test_a_function_with_a_parameter_that_is_called_model_is_no_model() -> None:
    function = {"name": "book", "parameters": {"properties": {"model": {"enum": [DEAR]}}}}
    for tool in ({"type": "function", "function": function}, {"function": function}):
        assert not list(models_named({"tools": [tool], "tool_choice": "auto"}))


@given(
    st.recursive(
        st.text(max_size=3) | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(max_size=3), x)
    )
)
def test_whatever_the_tools_are_they_are_looked_through(tools: Any) -> None:
    assert all(isinstance(name, str) for name in models_named({"tools": tools, "provider": tools}))


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]}
SPEECH = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
SEARCH_TOOL = {"type": "web_search"}


@pytest.mark.parametrize(
    ("extra", "messages", "name"),
    [
        ({"service_tier": "priority"}, [], "service_tier"), ({"service_tier": "flex"}, [], ""),
        ({"service_tier": None, "web_search_options": False, "modalities": ["text"]}, [], ""),
        ({"web_search_options": {}}, [], "web_search_options"), ({"modalities": ["text", "audio"]}, [], "modalities"),
        ({"models": [], "plugins": [], "data_sources": [], "search_parameters": {"mode": "off"}}, [], ""),
        ({"search_parameters": {"mode": "auto"}}, [], "search_parameters"), ({"n_predict": 9}, [], "n_predict"),
        ({"models": ["a", "b"]}, [], "models"), ({"tools": [SEARCH_TOOL]}, [], "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, [], ""),
        ({"n": 4, "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "high"}, [], ""),
        ({}, [PICTURE], ""), ({}, [PICTURE, SPEECH], "messages"), ({}, [{"role": "user", "content": "hi"}], ""),
    ],
)  # fmt: skip
def test_what_cannot_be_held_of_a_cap_is_named(
    extra: dict[str, Any], messages: list[dict[str, Any]], name: str
) -> None:
    assert unheld(extra, messages) == name


def test_every_field_that_costs_apart_is_one_of_the_table() -> None:
    assert all(name in FIELDS for name in _COSTLY)
