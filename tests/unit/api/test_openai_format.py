from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from disco_daemon.api.control import control_requests
from disco_daemon.api.http.events import comment, event
from disco_daemon.api.http.sse import BodySink
from disco_daemon.api.openai import openai_request
from disco_daemon.api.openai.chat_messages import ROLES
from disco_daemon.api.openai.shapes import ChatShape, OpenAIShape, TextShape, error_body
from disco_daemon.engine import framing, wire
from disco_daemon.errors import ConfigError, DiscoError, EndpointError, RequestError
from disco_daemon.types import (
    BOTH,
    Attempt,
    CallForm,
    CallPart,
    Delivery,
    Delta,
    GenerationRequest,
    Outcome,
    Plan,
    Side,
    Token,
    Usage,
    is_text,
    top_logprobs,
)
from tests.fixtures import chat_bodies

HI = [{"role": "user", "content": "Hi"}]
BEGUN = {"role": "assistant", "content": "Once", "prefix": True}
CHAT = ChatShape("1", 1_700_000_000, "disco")
TEXT = TextShape("1", 1_700_000_000, "disco")


def body(**more: Any) -> bytes:
    return json.dumps({"model": "disco", "messages": HI} | more).encode()


def generation(**more: Any) -> GenerationRequest:
    return openai_request.to_generation(*chat_bodies.parse(body(**more)), "r", BOTH)


def raw(**more: Any) -> GenerationRequest:
    return openai_request.to_raw_generation(*openai_request.parse_completion({"model": "disco"} | more), "r", BOTH)


def outcome(finish_reason: str | None = "stop") -> Outcome:
    tokens = {Side.DEVICE: 2, Side.SERVER: 3}
    return Outcome(
        "r", 0.0, "m", "race", Plan(0, 0), 7, Side.SERVER, finish_reason, None, 0.1, 1.0, 0, tokens, (), 0.0, 0.0
    )


def whole(*tokens: Token, reason: str | None = "stop") -> dict[str, Any]:
    sink = BodySink(CHAT)
    for token in tokens:
        sink.token(token, Side.SERVER)
    found = sink.body(outcome(reason))
    ChatCompletion.model_validate(found)
    return found


# --- in -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"model"', None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b'{"a":' + b"[" * 50_000, None),
        (b"{}", "model"),
        (json.dumps({"messages": HI}).encode(), "model"),
        (body(model=3), "model"),
        (json.dumps({"model": "m"}).encode(), "messages"),
        (body(messages=[]), "messages"),
        (body(messages="Hi"), "messages"),
        (body(messages=[3]), "messages[0]"),
        (body(messages=[{"content": "Hi"}]), "messages[0].role"),
        (body(messages=[*HI, {"role": "wizard", "content": "Hi"}]), "messages[1].role"),
        (body(messages=[{"role": ["user"], "content": "Hi"}]), "messages[0].role"),
        (body(messages=[{"role": "user"}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": ["Hi"]}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": [{"text": "Hi"}]}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": None}]), "messages[0].content"),
        (body(messages=[{"role": "user", "content": []}]), "messages[0].content"),
        (body(continue_final_message=True), "continue_final_message"),
        (body(stream="yes"), "stream"),
        (body(stream_options=[]), "stream_options"),
        (body(max_tokens=-2), "max_tokens"),
        (body(max_tokens=0), "max_tokens"),
        (body(max_tokens=1.5), "max_tokens"),
        (body(max_tokens=2**70), "max_tokens"),
        (body(max_completion_tokens=0), "max_completion_tokens"),
        (body(temperature=2.1), "temperature"),
        (body(temperature="hot"), "temperature"),
        (body(top_p=1.1), "top_p"),
        (body(seed="s"), "seed"),
        (body(seed=2**70), "seed"),
        (body(stop=["a", "b", "c", "d", "e"]), "stop"),
        (body(stop=[1]), "stop[0]"),
        (body(frequency_penalty=-3), "frequency_penalty"),
        (body(presence_penalty=3), "presence_penalty"),
        (body(disco=None), "disco"),
        (body(disco={"route": "moon"}), "disco.route"),
        (body(disco={"rout": "device"}), "disco"),
        (body(disco={"private": 1}), "disco.private"),
        (body(disco={"max_cost": 1}), "disco"),
        (body(disco={"max_cost_usd": -1}), "disco.max_cost_usd"),
        (body(disco={"delivery": "slow"}), "disco.delivery"),
        (body(disco={"delivery": 1}), "disco.delivery"),
        (body(disco={"pace_tps": 0}), "disco.pace_tps"),
        (body(disco={"pace_tps": -1}), "disco.pace_tps"),
        (body(disco={"pace_tps": 1001}), "disco.pace_tps"),
        (body(disco={"pace_tps": "fast"}), "disco.pace_tps"),
        (body(return_token_ids="yes"), "return_token_ids"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_and_the_parameter_named(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        chat_bodies.parse(data)
    assert caught.value.param == param
    assert error_body(caught.value)["error"]["type"] == "invalid_request_error"
    assert str(caught.value)


@pytest.mark.parametrize("more", [{"n": 0}, {"n": 9}, {"n": 2, "messages": [*HI, BEGUN]}])
def test_an_answer_has_up_to_eight_choices_and_one_that_is_begun_has_one(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        generation(**more)
    assert caught.value.param == "n"
    assert generation(n=8).extra["n"] == 8


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": st.text() | json_values}
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(ROLES) | json_values,
        "content": st.text() | st.lists(parts, max_size=3) | json_values,
    },
    optional={"name": json_values, "tool_calls": json_values, "function_call": json_values},
)
nearly = st.fixed_dictionaries(
    {"model": st.just("disco"), "messages": st.lists(messages, min_size=1, max_size=3)},
    optional={
        "continue_final_message": st.booleans(),
        "stop": st.text() | st.lists(st.text(), max_size=5) | json_values,
        "max_tokens": st.integers() | json_values,
        "max_completion_tokens": st.integers(0, 9),
        "seed": st.integers() | json_values,
        "temperature": st.floats(0, 2) | json_values,
        "n": st.integers(-1, 2),
        "disco": st.fixed_dictionaries({}, optional={"route": st.sampled_from(["device", "server"]) | json_values}),
        "tools": json_values,
    },
)
plain = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()})
valid = st.fixed_dictionaries(
    {"model": st.just("disco"), "messages": st.lists(plain, min_size=1, max_size=3)},
    optional={"seed": st.integers(), "max_tokens": st.integers(1), "stop": st.lists(st.text(), max_size=4)},
)


@settings(max_examples=400)
@given(json_values | nearly | nearly | st.binary())
def test_whatever_comes_is_a_request_or_refused(value: Any) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        request, extra = chat_bodies.parse(data)
        found = openai_request.to_generation(request, extra, "r", BOTH)
    except RequestError:
        return
    assert found.messages
    assert isinstance(found.answer_so_far, str)
    assert found.n_chars >= 0
    assert not found.extra.keys() & set(request.__struct_fields__)
    assert not found.text_only or all(is_text(m.get("content")) for m in found.messages)


@given(valid)
def test_every_request_that_is_let_in_fits_through_the_engines_door(value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    try:
        found = openai_request.to_generation(*chat_bodies.parse(data), "r", BOTH)
    except RequestError:
        return
    s, sent = found.sampling, [dict(m) for m in found.messages]
    framing.frame(wire.Generate(id="r", messages=sent, max_tokens=s.max_tokens, seed=s.seed, stop=s.stop))


def test_text_parts_become_one_text_and_other_parts_stay() -> None:
    text = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    found = generation(messages=[{"role": "user", "content": text}, {"role": "user", "content": image}])
    assert [m["content"] for m in found.messages] == ["Hi there", image]
    assert not found.text_only
    assert generation(messages=[{"role": "user", "content": text}]).text_only


def test_extra_is_what_a_server_gets_as_it_is() -> None:
    _, extra = chat_bodies.parse(body(tools=[], logit_bias={"1": 2}, seed=1, disco={}, n=1, return_token_ids=True))
    assert extra == {"tools": [], "logit_bias": {"1": 2}, "n": 1}


def test_the_options_arrive_where_they_belong() -> None:
    found = generation(max_tokens=5, temperature=0, top_p=0.5, seed=1, stop=".", presence_penalty=1)
    s = found.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.seed, s.stop, s.presence_penalty) == (5, 0, 0.5, 1, (".",), 1)
    assert found.max_tokens_key == "max_tokens"
    assert generation(max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6
    assert generation(max_completion_tokens=6).max_tokens_key == "max_completion_tokens"


def test_a_route_and_privacy_restrict_who_may_serve() -> None:
    assert generation().allowed == BOTH
    assert generation(disco={"route": "server"}).allowed == {Side.SERVER}
    assert generation(disco={"private": True}).allowed == {Side.DEVICE}
    with pytest.raises(RequestError, match="contradict"):
        generation(disco={"private": True, "route": "server"})


def test_sides_are_told_only_where_they_are_asked_for() -> None:
    assert chat_bodies.parse(body())[0].options.sides is False
    assert chat_bodies.parse(body(disco={"sides": True}))[0].options.sides is True
    with pytest.raises(RequestError, match=r"disco\.sides"):
        chat_bodies.parse(body(disco={"sides": 1}))


def test_an_answer_to_continue_is_taken_off_the_messages() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}
    found = generation(messages=[*HI, said], continue_final_message=True)
    assert (found.messages, found.answer_so_far) == (tuple(HI), "Once")
    for messages in ([said], [*HI, said | {"content": [{"type": "image_url"}]}]):
        with pytest.raises(RequestError):
            generation(messages=messages, continue_final_message=True)


@pytest.mark.parametrize("mark", [{"prefix": True}, {}])
def test_a_last_message_marked_as_prefix_is_continued(mark: dict[str, Any]) -> None:
    found = generation(messages=[*HI, {"role": "assistant", "content": "Once"} | mark])
    assert found.answer_so_far == ("Once" if mark else "")
    assert len(found.messages) == (1 if mark else 2)


def test_delivery_and_pace_are_the_clients_where_somebody_watches() -> None:
    assert (generation(stream=True).delivery, generation(stream=True).pace_tps) == (None, None)
    found = generation(stream=True, disco={"delivery": "paced", "pace_tps": 7})
    assert (found.delivery, found.pace_tps) == (Delivery.PACED, 7)
    assert generation(disco={"delivery": "paced"}).delivery is Delivery.OFF
    assert raw(prompt="Once").delivery is Delivery.OFF


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ([1, 2], (1, 2)),
        ([[1, 2]], (1, 2)),
        ([0], (0,)),
    ],
)
def test_a_text_completion_is_for_the_device_alone(prompt: Any, read: Any) -> None:
    found = raw(prompt=prompt, seed=3, stop=["."])
    assert found.prompt == read
    assert found.messages == ()
    assert found.allowed == {Side.DEVICE}
    assert (found.sampling.max_tokens, found.sampling.seed, found.sampling.stop) == (16, 3, (".",))
    assert raw(prompt=prompt, max_tokens=5).sampling.max_tokens == 5
    assert raw(prompt=prompt, max_tokens=None).sampling.max_tokens is None, "as many as there will be"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["Once", "Twice"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "Once"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": {"text": "Once"}}, "prompt"),
        ({"prompt": "Once", "echo": True}, "echo"),
        ({"prompt": "Once", "logprobs": -1}, "logprobs"),
        ({"prompt": "Once", "logprobs": 21}, "logprobs"),
        ({"prompt": "Once", "best_of": 2}, "best_of"),
        ({"prompt": "Once", "best_of": True}, "best_of"),
        ({"prompt": "Once", "suffix": 5}, "suffix"),
        ({"prompt": [1, 2], "suffix": "end"}, "prompt"),
        ({"prompt": "Once", "logit_bias": [1]}, "logit_bias"),
        ({"prompt": "Once", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": "Once", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "Once", "n": 9}, "n"),
        ({"prompt": "Once", "disco": {"route": "server"}}, "disco"),
    ],
)
def test_a_text_completion_that_cannot_be_honoured_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        raw(**more)
    assert caught.value.param == param


def test_a_text_completion_may_name_what_it_does_not_use() -> None:
    found = raw(prompt="Once", echo=False, logprobs=None, best_of=1, suffix="", n=1, user="me", max_tokens=-1)
    assert found.extra == {"user": "me", "logprobs": None, "n": 1}
    assert top_logprobs(found.extra) is None
    assert found.sampling.max_tokens is None, "as many as there will be"
    with pytest.raises(RequestError, match="device only"):
        openai_request.to_raw_generation(
            *openai_request.parse_completion({"model": "x", "prompt": "a"}), "r", frozenset({Side.SERVER})
        )


@settings(max_examples=200)
@given(json_values, json_values)
def test_whatever_prompt_comes_is_read_or_refused(prompt: Any, suffix: Any) -> None:
    try:
        found = raw(prompt=prompt, suffix=suffix)
    except RequestError:
        return
    assert found.prompt
    assert found.n_chars >= 0


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{}", None),
        (b"[]", None),
        (b'{"pace_tps": null}', None),
        (b'{"pace_tps": 0}', "pace_tps"),
        (b'{"pace_tps": 1e9}', "pace_tps"),
        (b'{"delivery": "slow"}', "delivery"),
        (b'{"route": "device"}', None),
    ],
)
def test_an_adjustment_that_says_nothing_or_nonsense_is_refused(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        control_requests.parse_adjustment(data)
    assert caught.value.param == param


def test_an_adjustment_may_change_one_thing_or_both() -> None:
    assert control_requests.parse_adjustment(b'{"pace_tps": 9.5}') == control_requests.Adjustment(pace_tps=9.5)
    assert control_requests.parse_adjustment(b'{"delivery": "off", "pace_tps": 2}') == control_requests.Adjustment(
        "off", 2.0
    )


# --- out ----------------------------------------------------------------------------------------------------------


def test_a_body_is_a_chat_completion() -> None:
    found = whole(Token("Hi"), Token(" there"), Token("", 0))
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "Hi there"}
    assert found["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert found["disco"]["winner"] == "server"
    assert found["disco"]["ignored"] == []


def test_what_the_server_says_of_thoughts_cache_and_cost_comes_through() -> None:
    used = Usage(90, 5, cached_tokens=10, reasoning_tokens=4, cache_write_tokens=60, cost=0.0125)
    attempt = Attempt(Side.SERVER, "m", 0.0, 0.1, False, used)
    usage = CHAT.bill(replace(outcome(), attempts=(attempt,)))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10, "cache_write_tokens": 60}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert usage["cost"] == 0.0125


def call(index: int, arguments: str) -> Delta:
    return Delta(calls=(CallPart(index, arguments),))


def opened(index: int, name: str) -> Delta:
    return Delta(calls=(CallPart(index, "", f"call_{index}", name),))


def test_tool_calls_come_together_from_their_pieces() -> None:
    deltas = [opened(0, "add"), call(0, '{"a":'), opened(1, "sub"), call(0, "1}"), call(1, "{}")]
    tokens = [Token("", delta=d) for d in deltas]
    message = whole(*tokens, reason="tool_calls")["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
            {"id": "call_1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        ],
    }


def test_calls_in_the_older_form_and_of_text_tools_are_written_as_they_came() -> None:
    old = [CallPart(0, '{"a":', "x", "add", CallForm.OLD), CallPart(0, "1}", form=CallForm.OLD)]
    message = whole(*(Token("", delta=Delta(calls=(one,))) for one in old))["choices"][0]["message"]
    assert message["function_call"] == {"name": "add", "arguments": '{"a":1}'}
    assert "tool_calls" not in message
    text = CallPart(0, "1 + 1", "x", "sum", CallForm.CUSTOM, {"extra_content": {"signature": "s"}})
    message = whole(Token("", delta=Delta(calls=(text,))))["choices"][0]["message"]
    custom = {"id": "x", "type": "custom", "custom": {"name": "sum", "input": "1 + 1"}}
    assert message["tool_calls"] == [custom | {"extra_content": {"signature": "s"}}]


def test_other_deltas_grow_beside_the_text_and_log_probabilities_add_up() -> None:
    one = {"token": "Hi", "logprob": -0.1, "bytes": None, "top_logprobs": []}
    tokens = (
        Token("", delta=Delta(thought="a")),
        Token("Hi", 1, Delta(thought="b"), {"content": [one]}),
    )
    choice = whole(*tokens)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi", "reasoning_content": "ab"}
    assert choice["logprobs"] == {"content": [one]}


def test_list_items_without_an_index_are_kept_apart() -> None:
    notes = [
        {"type": "url_citation", "url_citation": {"url": u, "title": u, "start_index": 0, "end_index": 1}} for u in "ab"
    ]
    found = whole(Token("Hi"), Token("", delta=Delta(others={"annotations": notes, "citations": ["a"]})))
    assert found["choices"][0]["message"]["annotations"] == notes


def delta(token: Token, *, first: bool) -> Any:
    return CHAT.chunk(token, None, first=first)["choices"][0]["delta"]


def test_chunks_are_chat_completion_chunks() -> None:
    tool = Token("", delta=opened(0, "add"))
    chunks = [CHAT.chunk(Token("Hi"), [1], first=True), CHAT.chunk(tool, None, first=False), CHAT.end("stop")]
    for made in [*chunks, CHAT.bill(outcome())]:
        sent = event(made)
        assert sent.startswith(b"data: {")
        assert sent.endswith(b"}\n\n")
        ChatCompletionChunk.model_validate(json.loads(sent.removeprefix(b"data: ")))
    assert CHAT.end("stop")["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_chunks_and_bodies_of_text_are_completions() -> None:
    sink = BodySink(TEXT)
    for text in ("Once", " upon"):
        sink.token(Token(text), Side.DEVICE)
    found = sink.body(outcome("length"))
    assert found["choices"] == [{"index": 0, "text": "Once upon", "logprobs": None, "finish_reason": "length"}]
    assert found["usage"]["completion_tokens"] == 5
    assert found["disco"]["winner"] == "server"
    for made in (found, TEXT.end("stop"), TEXT.bill(outcome())):
        Completion.model_validate(made)
    assert TEXT.chunk(Token("Once"), None, first=True)["choices"] == [
        {"index": 0, "text": "Once", "logprobs": None, "finish_reason": None}
    ]
    assert {made["object"] for made in (found, TEXT.end("stop"), TEXT.bill(outcome()))} == {"text_completion"}


def test_only_the_first_chunk_has_a_role() -> None:
    assert delta(Token("Hi"), first=True) == {"role": "assistant", "content": "Hi"}
    assert delta(Token(""), first=True) == {"role": "assistant", "content": ""}
    assert delta(Token("Hi"), first=False) == {"content": "Hi"}
    assert delta(Token("", delta=Delta(refusal="no")), first=False) == {"refusal": "no"}


@pytest.mark.parametrize("shape", [CHAT, TEXT])
def test_token_ids_are_given_where_they_are_asked_for_and_known(shape: OpenAIShape) -> None:
    tokens = [Token("On", ids=(3,)), Token("", ids=()), Token("ce", 2, ids=(4, 5))]
    shown = {}
    for wanted in (True, False):
        sink = BodySink(shape, token_ids=wanted)
        for token in tokens:
            sink.token(token, Side.DEVICE)
        shown[wanted] = sink.body(outcome())["choices"][0].get("token_ids")
    assert shown == {True: [3, 4, 5], False: None}
    assert shape.chunk(tokens[2], tokens[2].ids, first=False)["choices"][0]["token_ids"] == (4, 5)
    assert "token_ids" not in shape.chunk(tokens[1], None, first=False)["choices"][0]


def test_ids_of_two_vocabularies_never_come_in_one_list() -> None:
    sink = BodySink(CHAT, token_ids=True)
    for side in (Side.DEVICE, Side.SERVER, Side.DEVICE):
        sink.token(Token("a", ids=(1,)), side)
    assert "token_ids" not in sink.body(outcome())["choices"][0]


@given(st.text())
def test_a_comment_is_one_line_whatever_it_says(text: str) -> None:
    sent = comment(text)
    assert sent.startswith(b": disco ")
    assert sent.endswith(b"\n\n")
    assert len(sent.decode().splitlines()) == 2


def test_a_comment_keeps_its_words() -> None:
    assert comment("handoff device → server\ndata: {}") == ": disco handoff device → server data: {}\n\n".encode()


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RequestError("no", param="n", code="c"), "invalid_request_error", "c"),
        (EndpointError(Side.SERVER, "rate_limited", "slow down"), "rate_limit_error", "rate_limited"),
        (EndpointError(Side.DEVICE, "engine_gone", "died"), "upstream_error", "engine_gone"),
        (ConfigError("no"), "server_error", None),
    ],
)
def test_errors_have_openais_shape(error: DiscoError, kind: str, code: str | None) -> None:
    shown = error_body(error)["error"]
    assert shown == {"message": str(error), "type": kind, "param": error.param, "code": code}
