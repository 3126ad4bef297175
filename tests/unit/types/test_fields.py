"""Each field of the table does at each endpoint what its cell says: none is without an example."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_daemon.api.http.sse import MAX_NAMED, headers
from disco_daemon.api.openai import openai_request
from disco_daemon.clock import SystemClock
from disco_daemon.conductor import ignored_by
from disco_daemon.conductor import plan as planning
from disco_daemon.endpoints.continuation import chat, completion
from disco_daemon.endpoints.device import Device
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.engine import wire
from disco_daemon.engine.requests import generate_message
from disco_daemon.errors import RequestError
from disco_daemon.machines.split.split_device import SplitDevice
from disco_daemon.machines.split.split_rules import SplitRules
from disco_daemon.types import (
    AS_USUAL,
    BOTH,
    FIELDS,
    Drawing,
    Field,
    GenerationRequest,
    Plan,
    Readiness,
    Refusal,
    Side,
    Treatment,
    choice_of,
    field_of,
    ignored,
    is_for_a_server,
    most_tokens,
    n_choices,
    response_format,
)
from disco_daemon.types.drawing import BREAKERS, MAX_IDS, Wishes
from tests.fixtures import chat_bodies

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# A value of each field that asks for something, and that is not as usual.
ASKS: dict[str, Any] = {
    "model": "disco", "messages": HI, "prompt": "Once", "stream": True, "stream_options": {"include_usage": True},
    "return_token_ids": True, "continue_final_message": True, "max_tokens": 7, "max_completion_tokens": 7,
    "temperature": 0.3, "top_p": 0.4, "seed": 5, "stop": ["."], "frequency_penalty": 0.5, "presence_penalty": 0.6,
    "n": 2, "disco": {"private": True}, "add_generation_prompt": False,
    "top_k": 3, "min_p": 0.2, "typical_p": 0.9, "typ_p": 0.9, "repeat_penalty": 1.2, "repetition_penalty": 1.2,
    "repeat_last_n": 9, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8, "dry_base": 2,
    "dry_allowed_length": 3, "dry_penalty_last_n": 50, "dry_sequence_breakers": ["\n"], "mirostat": 2,
    "mirostat_tau": 4, "mirostat_eta": 0.2, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [1, 2],
    "logit_bias": {"3": 4, "5": False}, "n_indent": 4, "t_max_predict_ms": 250,
    "response_format": {"type": "json_object"}, "json_schema": SCHEMA, "guided_json": SCHEMA,
    "guided_choice": ["yes", "no"], "structured_outputs": {"choice": ["yes", "no"]},
    "grammar": 'root ::= "a"', "regex": "a+", "ebnf": 'root ::= "a"', "structural_tag": {"a": 1},
    "guided_regex": "a+", "guided_grammar": 'root ::= "a"', "bad_words": ["no"], "allowed_token_ids": [1],
    "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " ",
    "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "max", "enable_thinking": False,
    "think": False, "reasoning": {"effort": "low"}, "thinking": {"type": "disabled"},
    "thinking_budget_tokens": 9, "reasoning_budget_tokens": 9, "thinking_token_budget": 9, "thinking_budget": 9,
    "tools": [TOOL], "tool_choice": "required", "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "modalities": ["text", "audio"],
    "audio": {"voice": "a"}, "web_search_options": {}, "echo": True, "suffix": "end", "best_of": 2,
    "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "prompt_cache_options": {"a": 1}, "safety_identifier": "s",
    "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": False, "cache_prompt": False,
    "id_slot": 1, "t_max_prompt_ms": 9, "timings_per_token": True, "return_progress": True,
    "provider": {"order": ["a"]}, "models": ["a"], "route": "fallback", "transforms": ["middle-out"],
    "usage": {"include": True}, "request_id": "r", "keep_alive": "5m", "user": "me", "priority": 1,
    "top_n_sigma": 1.5, "top_a": 0.2, "dynatemp_range": 0.3, "length_penalty": 0.5, "dynatemp_exponent": 2,
    "samplers": ["top_k"], "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True, "use_beam_search": True, "verbosity": "low", "n_predict": 9,
    "documents": [{"text": "x"}], "search_parameters": {"mode": "on"}, "plugins": [{"id": "web"}],
    "data_sources": [{"type": "x"}], "include_reasoning": False,
} | dict.fromkeys([name for name, row in FIELDS.items() if row.server is Treatment.IGNORED], "x")  # fmt: skip
# What goes with a field that asks for something only together with another one.
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]}, "parallel_tool_calls": {"tools": [TOOL]},
}  # fmt: skip
OURS = {name for name, row in FIELDS.items() if row.own}
EXTRA = [row for row in FIELDS.values() if not row.own]
EACH = [pytest.param(row, id=row.name) for row in EXTRA]


def asked(**more: Any) -> GenerationRequest:
    data = json.dumps({"model": "disco", "messages": HI} | more).encode()
    return openai_request.to_generation(*chat_bodies.parse(data), "r", BOTH)


def asks(row: Field) -> GenerationRequest:
    return asked(**{row.name: ASKS[row.name]} | WITH.get(row.name, {}))


def continued(**more: Any) -> GenerationRequest:
    return openai_request.to_raw_generation(
        *openai_request.parse_completion({"model": "disco", "prompt": "Once"} | more), "r", BOTH
    )


def device(form: str = "hermes") -> Device:
    engine = SimpleNamespace(
        config=SimpleNamespace(model_path=Path("none.gguf")),
        clock=SystemClock(),
        info=SimpleNamespace(tool_format=form, fim=False, pooling=""),
    )
    return Device(cast("Any", engine), "m")


def at_engine(request: GenerationRequest) -> wire.Generate:
    return generate_message("g1", request, hold=False)


def test_every_field_has_an_example() -> None:
    assert ASKS.keys() == FIELDS.keys()
    assert all(FIELDS[name].asks(value) for name, value in ASKS.items())


# --- the server ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EACH)
def test_a_server_gets_a_field_as_it_is_or_not_at_all(row: Field) -> None:
    sent = chat(asks(row), "none").body
    assert sent.get(row.name) == (ASKS[row.name] if row.server is Treatment.PASSED_ON else None)


@pytest.mark.parametrize("row", EACH)
def test_a_raw_continuation_has_the_fields_that_say_how_tokens_are_drawn(row: Field) -> None:
    sent = completion(asks(row), "Once").body
    assert sent.get(row.name) == (ASKS[row.name] if row.draws else None)


@pytest.mark.parametrize("name", sorted(OURS - {"model", "prompt", "stream", "stream_options", "disco"}))
def test_what_this_daemon_reads_reaches_the_server_too(name: str) -> None:
    said = {"role": "assistant", "content": "Once"}
    more = {"messages": [*HI, said]} if name == "continue_final_message" else {}
    request = asked(**{name: ASKS[name]} | more)
    sent = chat(request, name if name == "continue_final_message" else "none", ids_back=name == "return_token_ids").body
    assert sent[name] == ASKS[name]


def test_a_field_that_nobody_knows_is_passed_on_and_keeps_the_device_away() -> None:
    request = asked(brand_new={"a": [1]})
    assert chat(request, "none").body["brand_new"] == {"a": [1]}
    assert is_for_a_server(request.extra)
    assert not is_for_a_server(asked(brand_new=None).extra)


@pytest.mark.parametrize("name", ["API_Key", "api-base", "aws_region", "X-Api-Key", "Mock-Response"])
def test_whom_to_ask_is_not_the_clients_however_it_is_spelled(name: str) -> None:
    request = asked(**{name: "x"})
    assert name not in chat(request, "none").body
    assert ignored(request.extra, on_device=False, is_raw=False) == [name]


# --- the device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", EACH)
def test_the_device_makes_of_a_field_what_the_table_says(row: Field) -> None:
    request, without = asks(row), asked(**WITH.get(row.name, {}))
    refusal, unheeded = device().refuses(request), ignored(request.extra, on_device=True, is_raw=False)
    refused = row.device in (Treatment.REFUSED, Treatment.FORM)
    assert (refusal is not None) == refused
    assert not refused or (isinstance(refusal, Refusal) and refusal.param == row.name and row.name in refusal)
    assert unheeded == ([row.name] if row.device in (Treatment.AWAY, Treatment.IGNORED) else [])
    assert is_for_a_server(request.extra) == (row.device is Treatment.AWAY or row.ids)
    assert (row.name in request.needs) == row.binds
    changed = at_engine(request) != at_engine(without)
    assert changed == (row.device is Treatment.HONOURED and row.name != "n")  # n such requests


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty"])
def test_what_this_daemon_reads_reaches_the_engine(name: str) -> None:
    assert at_engine(asked(**{name: ASKS[name]})) != at_engine(asked())


@pytest.mark.parametrize("row", EACH)
def test_null_and_values_that_ask_for_nothing_refuse_nobody(row: Field) -> None:
    for value in (None, *row.nothing):
        request = asked(**{row.name: value})
        assert device().refuses(request) is None
        assert not is_for_a_server(request.extra)
        assert ignored(request.extra, on_device=True, is_raw=False) == []
        assert request.needs == []


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tool_choice": "auto"},
        {"tools": [], "parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"max_tokens": -1},
        {"messages": [*HI, {"role": "assistant", "content": None}, *HI]},
    ],
)
def test_asking_for_nothing_refuses_nobody(more: dict[str, Any]) -> None:
    request = asked(**more)
    assert device().refuses(request) is None
    assert request.needs == []
    assert request.sampling.max_tokens is None


def test_text_that_says_nothing_is_an_empty_text_on_the_device_and_null_at_the_server() -> None:
    request = asked(messages=[*HI, {"role": "assistant", "content": None}, *HI])
    assert [m["content"] for m in device().prepare(request).messages] == ["Hi", "", "Hi"]
    assert [m["content"] for m in chat(request, "none").body["messages"]] == ["Hi", None, "Hi"]


def test_a_cached_part_reaches_the_server_and_the_device_gets_one_text() -> None:
    parts = [
        {"type": "text", "text": "Long. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Short?"},
    ]
    request = asked(messages=[{"role": "user", "content": parts}])
    assert request.text_only
    assert request.n_chars == len("Long. Short?")
    assert chat(request, "none").body["messages"][0]["content"] == parts
    assert device().prepare(request).messages[0]["content"] == "Long. Short?"


def test_fields_of_chats_are_named_where_nothing_is_rendered() -> None:
    request = continued(reasoning_effort="low", max_completion_tokens=3, top_k=3, user="me")
    assert ignored(request.extra, on_device=True, is_raw=True) == ["max_completion_tokens", "reasoning_effort"]
    assert request.drawing == Drawing(top_k=3)


def test_parts_of_a_field_count_by_themselves() -> None:
    thoughts = asked(reasoning={"effort": "low", "exclude": True}, thinking={"type": "enabled", "kind": 9})
    assert ignored(thoughts.extra, on_device=True, is_raw=False) == ["reasoning.exclude", "thinking.kind"]
    refusal = device().refuses(asked(structured_outputs={"regex": "a+"}))
    assert isinstance(refusal, Refusal)
    assert refusal.param == "structured_outputs.regex"


def test_a_device_over_two_machines_draws_without_mirostat_and_calls_no_tools() -> None:
    config = SimpleNamespace(exit=None, model_path=Path("none.gguf"))
    engine = SimpleNamespace(config=config, clock=SystemClock(), info=None)
    split = SplitDevice(cast("Any", engine), cast("Any", None), "m", (4, 4), rules=SplitRules())
    assert split.refuses(asked(top_k=3)) is None
    for name in ("mirostat", "tools"):
        refusal = split.refuses(asked(**{name: ASKS[name]}))
        assert isinstance(refusal, Refusal)
        assert refusal.param == name


def test_of_a_device_over_two_machines_only_the_whole_model_gives_choices_and_log_probabilities() -> None:
    config = SimpleNamespace(exit=None, model_path=Path("none.gguf"))
    engine = SimpleNamespace(config=config, clock=SystemClock(), info=None, state=None)
    split = SplitDevice(cast("Any", engine), cast("Any", None), "m", (4, 4), rules=SplitRules())
    wishes: tuple[dict[str, Any], ...] = ({"logprobs": True}, {"n": 2})
    for wish in wishes:
        refusal = split.refuses(asked(**wish))
        assert isinstance(refusal, Refusal)
        assert [refusal.param] == [*wish]
    split.whole = Device(cast("Any", engine), "m")
    assert all(split.refuses(asked(**wish)) is None for wish in wishes)


@pytest.mark.parametrize(
    ("more", "param"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 3}, "min_tokens")],
)
def test_an_answer_that_has_a_form_ends_where_that_does(more: dict[str, Any], param: str) -> None:
    refusal = device().refuses(asked(guided_json=SCHEMA, **more))
    assert isinstance(refusal, Refusal)
    assert refusal.param == param


# --- what a field means -------------------------------------------------------------------------------------------


def test_the_names_of_two_servers_mean_one_thing() -> None:
    assert asked(typ_p=0.5).drawing == asked(typical_p=0.5).drawing == Drawing(typical_p=0.5)
    assert asked(repeat_penalty=1.5, repeat_last_n=7).drawing == asked(repetition_penalty=1.5, repeat_last_n=7).drawing
    assert asked(repeat_penalty=1.5).drawing == Drawing(repeat_penalty=1.5, repeat_last_n=64)
    assert asked(repetition_penalty=1.5).drawing == Drawing(repeat_penalty=1.5, repeat_last_n=-1)
    assert asked().drawing == AS_USUAL
    assert asked(dry_sequence_breakers=list(BREAKERS), top_k=None).drawing == AS_USUAL
    assert asked(logit_bias={"7": 500, "8": False}).drawing.logit_bias == ((7, 100.0), (8, -100.0))


@pytest.mark.parametrize(
    "wish",
    [
        {"think": False}, {"enable_thinking": False}, {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)  # fmt: skip
def test_there_are_many_words_for_not_to_think(wish: dict[str, Any]) -> None:
    assert asked(**wish).template_args["enable_thinking"] is False


@pytest.mark.parametrize("effort", ["minimal", "low", "high", "xhigh", "max"])
def test_an_effort_is_one_whatever_it_is_called(effort: str) -> None:
    said = [asked(reasoning_effort=effort), asked(reasoning={"effort": effort}), asked(think=effort)]
    assert all(r.template_args == {"reasoning_effort": effort, "enable_thinking": True} for r in said)


@pytest.mark.parametrize(
    "more",
    [
        {"json_schema": SCHEMA}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
)  # fmt: skip
def test_a_schema_is_one_whatever_it_is_called(more: dict[str, Any]) -> None:
    assert response_format(asked(**more).extra) == {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.mark.parametrize(
    ("more", "n"),
    [
        ({}, None), ({"logprobs": False}, None), ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": 0}, 0), ({"logprobs": 5}, 5),
    ],
)  # fmt: skip
def test_log_probabilities_are_told_as_many_as_are_asked_for(more: dict[str, Any], n: int | None) -> None:
    assert at_engine(asked(**more)).top_logprobs == n
    assert at_engine(continued(**more)).top_logprobs == n


def test_the_first_choice_is_the_answer_itself_and_the_others_have_seeds_of_its() -> None:
    one, three = asked(seed=5), asked(seed=5, n=3)
    assert (n_choices(one.extra), n_choices(three.extra)) == (1, 3)
    choices = [choice_of(three, i) for i in range(3)]
    assert choices[0] == one
    assert len({choice.sampling.seed for choice in choices}) == 3
    assert choices == [choice_of(three, i) for i in range(3)], "it is the same again"
    assert [choice_of(asked(n=3), i) for i in range(3)] == [asked()] * 3, "by chance"
    assert (most_tokens(three), most_tokens(asked(n=3, max_tokens=4))) == (None, 12)


# --- bad values ---------------------------------------------------------------------------------------------------

BAD: dict[str, list[Any]] = {
    "model": [3, None], "prompt": [3, "", [], [""], [-1], [1.5], {}, ["a", "b"]],
    "messages": [
        "x", [], [3], [{}], [{"role": "nobody", "content": "Hi"}], [{"role": "user"}],
        [{"role": "user", "content": []}], [{"role": "user", "content": [{}]}], [{"role": "user", "content": ["Hi"]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": 3}],
    ],
    "stream": ["yes"], "stream_options": ["x", []], "return_token_ids": [1], "continue_final_message": ["x", True],
    "add_generation_prompt": ["x", 0], "max_tokens": [0, -2, "x", 1.5], "max_completion_tokens": [0, -2, "x"],
    "temperature": [-1, 3, "x"], "top_p": [2, -1], "seed": [1.5, "x"], "stop": [3, [3], ["x"] * 99],
    "frequency_penalty": [3, "x"], "presence_penalty": [-3],
    "disco": ["x", {"route": "nobody"}, {"unknown": 1}, {"max_cost_usd": -1}],
    "top_k": [1.5, "3", -2, 2**31], "min_p": [-0.1, 1.1, "x"], "typical_p": [2], "typ_p": [-1],
    "repeat_penalty": [0, 1e-9, 0.009, 101, "x"], "repetition_penalty": [0, 1e-300], "repeat_last_n": [-2, 1.5],
    "xtc_probability": [2], "xtc_threshold": [-1], "dry_multiplier": [-1], "dry_base": [0.5],
    "dry_allowed_length": [-1], "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": ["x", [""], ["x" * 41], ["x"] * 17],
    "mirostat": [3, True, "1"], "mirostat_tau": [-1], "mirostat_eta": [2], "min_tokens": [-1, 1.5],
    "n_indent": [-1, 1025, "x"], "t_max_predict_ms": [-2, 1.5, "x"],
    "ignore_eos": [1, "yes"], "stop_token_ids": [3, [-1], ["a"], [0] * (MAX_IDS + 1)],
    "logit_bias": [[1], {"a": 1}, {"1": "x"}, {"1": True}, {"-1": 1}, {"1": None}, {str(2**31): 1},
                   {str(i): 1 for i in range(MAX_IDS + 1)}],
    "n": [0, 9, -1, 1.5, "2"],
    "response_format": ["json", {}, [], {"type": 3}], "json_schema": ["x", True], "guided_json": [3, "{", "3"],
    "guided_choice": ["yes", [], [1], [""]],
    "structured_outputs": ["x", [1], {"choice": []}, {"json": 3}, {"json": "["}, {"json_object": 1}],
    "tools": [
        {}, "x", [1], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "f", "parameters": 3}}],
        [{"type": "function", "function": {"name": "f", "description": 3}}], [{"type": 3}],
    ],
    "tool_choice": [3, [], "required", {"type": "function", "function": {"name": "nobody"}}],
    "parallel_tool_calls": ["yes"], "functions": [{}], "function_call": [3],
    "logprobs": ["yes", 1.5, -1, 21], "top_logprobs": [-1, 21, "x", 2], "modalities": ["text", [1]],
    "chat_template_kwargs": ["x", []], "reasoning_effort": [3], "enable_thinking": ["no"], "think": [3],
    "reasoning": ["low", {"effort": 3}], "thinking": [True, {"type": "perhaps"}, {"budget_tokens": -1}],
    "thinking_budget_tokens": [-2, "9"], "reasoning_budget_tokens": [-2, "9"], "thinking_token_budget": [-2, "9"],
    "thinking_budget": [-2, "9"],
}  # fmt: skip


# Of these a text completion has none, and a chat has no prompt.
OF_CHATS = {"messages", "max_completion_tokens", "continue_final_message", "add_generation_prompt"}


@pytest.mark.parametrize("row", FIELDS.values(), ids=FIELDS)
def test_a_field_has_bad_values_or_is_read_by_nobody_here(row: Field) -> None:
    is_read = row.name in {*Wishes.__struct_fields__, *openai_request.ChatRequest.__struct_fields__, "prompt"}
    assert is_read == (row.name in BAD)
    if is_read:
        return
    assert row.device is not Treatment.HONOURED
    odd = {"a": [{"b": None}]}  # of no field a value
    body = chat(asked(**{row.name: odd}), "none").body
    assert body.get(row.name) == (odd if row.server is Treatment.PASSED_ON else None)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_an_error_that_names_the_parameter(name: str, value: Any) -> None:
    for ask in (asked, continued):
        if (ask is continued and name in OF_CHATS) or (ask is asked and name == "prompt"):
            continue
        with pytest.raises(RequestError) as caught:
            ask(**{name: value})
        assert caught.value.status == 400
        assert (caught.value.param or "").startswith(name)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"typical_p": 0.4, "typ_p": 0.5}, "typ_p"),
        ({"repeat_penalty": 1.4, "repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, "guided_json"),
    ],
)
def test_fields_that_contradict_each_other_are_an_error(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**more)
    assert caught.value.param == param


# --- the plan, and what is told -----------------------------------------------------------------------------------


class PlanContext:
    """What `fitted` looks at."""

    class planner:  # noqa: N801
        class knowledge:  # noqa: N801
            class outputs:  # noqa: N801
                @staticmethod
                def expected_remaining(made: int, length: int) -> float:
                    return 10.0

    def __init__(self, device: object) -> None:
        self.endpoints = {Side.DEVICE: device, Side.SERVER: None}


@pytest.mark.parametrize("row", EACH)
def test_what_the_device_does_not_know_keeps_it_away_while_a_server_can_be_asked(row: Field) -> None:
    request, both = asks(row), Plan(0.0, 0.5)
    here = {side: Readiness() for side in Side}
    context = cast("Any", PlanContext(device()))
    away = row.device is Treatment.AWAY or row.ids
    assert planning.fitted(both, request, 5, here, context) == (planning.NOT_THE_DEVICE if away else both)
    down = here | {Side.SERVER: Readiness(down_s=9.0)}
    assert planning.fitted(both, request, 5, down, context) == both
    alone = {Side.DEVICE: Readiness()}
    assert planning.fitted(both, request, 5, alone, context).device_s == 0
    local = Server(ServerConfig("http://127.0.0.1:1/v1", "m", ""), Side.DEVICE)
    assert planning.fitted(both, request, 5, here, cast("Any", PlanContext(local))) == both, "it passes on what it gets"


def test_the_header_of_ignored_fields_is_safe_whatever_they_are_called() -> None:
    names = ["a b", "ü\r\nX-Evil: 1", "plain_one"]
    assert headers("r", "device", ignored=names)["X-Disco-Ignored"] == "a%20b, %C3%BC%0D%0AX-Evil%3A%201, plain_one"
    assert headers("r", "device", ignored=["x"] * 99)["X-Disco-Ignored"].count("x") == MAX_NAMED
    assert "X-Disco-Ignored" not in headers("r", "device")


def test_a_field_of_another_spelling_is_not_in_the_table() -> None:
    assert field_of("Top_K").device is Treatment.AWAY
    assert field_of("guided_new").device is Treatment.FORM


@pytest.mark.parametrize("side", Side)
def test_what_a_translation_has_left_out_is_named_whoever_answers(side: Side) -> None:
    endpoint = device() if side is Side.DEVICE else Server(ServerConfig("http://127.0.0.1:1/v1", "m", ""))
    told = GenerationRequest("r", tuple(HI), extra={"base_url": "http://else"}, left_out=("tools.web_search",))
    assert ignored_by(endpoint, told) == ["base_url", "tools.web_search"]
