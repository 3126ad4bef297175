from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from disco_daemon.api import openai
from disco_daemon.api.sse import BodySink, event
from disco_daemon.engine import wire
from disco_daemon.errors import ConfigError, DiscoError, EndpointError, RequestError
from disco_daemon.types import BOTH, GenerationRequest, Outcome, Plan, Side, Token

HI = [{"role": "user", "content": "Hi"}]
HEAD = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "disco"}


def body(**more: Any) -> bytes:
    return json.dumps({"model": "disco", "messages": HI} | more).encode()


def generation(**more: Any) -> GenerationRequest:
    data = body(**more)
    return openai.to_generation(openai.parse(data), openai.extra_of(data), "r", BOTH)


def outcome(finish_reason: str | None = "stop") -> Outcome:
    tokens = {Side.DEVICE: 2, Side.SERVER: 3}
    return Outcome(
        "r", 0.0, "m", "race", Plan(0, 0), 7, Side.SERVER, finish_reason, None, 0.1, 1.0, 0, tokens, (), 0.0, 0.0
    )


async def whole(*tokens: Token, reason: str | None = "stop") -> dict[str, Any]:
    sink = BodySink(HEAD, "r")
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
        (body(messages=[{"role": "assistant", "content": None}]), "messages[0].content"),
        (body(stream="yes"), "stream"),
        (body(stream_options=[]), "stream_options"),
        (body(max_tokens=-1), "max_tokens"),
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
        (body(n=2), "n"),
        (body(n=0), "n"),
        (body(disco=None), "disco"),
        (body(disco={"route": "moon"}), "disco.route"),
        (body(disco={"rout": "device"}), "disco"),
        (body(disco={"private": 1}), "disco.private"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_and_the_parameter_named(data: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        openai.parse(data)
    assert caught.value.param == param
    assert openai.error_body(caught.value)["error"]["type"] == "invalid_request_error"
    assert str(caught.value)


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
        "role": st.sampled_from(openai.ROLES) | json_values,
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
        request = openai.parse(data)
        found = openai.to_generation(request, openai.extra_of(data), "r", BOTH)
    except RequestError:
        return
    assert found.messages
    assert isinstance(found.answer_so_far, str)
    assert found.n_chars >= 0
    assert not found.extra.keys() & set(request.__struct_fields__)
    assert not found.text_only or all(isinstance(m["content"], str) for m in found.messages)


@given(valid)
def test_every_request_that_is_let_in_fits_through_the_engines_door(value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    try:
        found = openai.to_generation(openai.parse(data), {}, "r", BOTH)
    except RequestError:
        return
    s, sent = found.sampling, [dict(m) for m in found.messages]
    wire.frame(wire.Generate("r", sent, max_tokens=s.max_tokens, seed=s.seed, stop=s.stop))


def test_text_parts_become_one_text_and_other_parts_stay() -> None:
    text = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    found = generation(messages=[{"role": "user", "content": text}, {"role": "user", "content": image}])
    assert [m["content"] for m in found.messages] == ["Hi there", image]
    assert not found.text_only
    assert generation(messages=[{"role": "user", "content": text}]).text_only


def test_extra_is_what_only_a_server_understands() -> None:
    assert openai.extra_of(body(tools=[], logit_bias={"1": 2}, seed=1, disco={}, n=1)) == {
        "tools": [], "logit_bias": {"1": 2},
    }  # fmt: skip


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


def test_an_answer_to_continue_is_taken_off_the_messages() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}
    found = generation(messages=[*HI, said], continue_final_message=True)
    assert (found.messages, found.answer_so_far) == (tuple(HI), "Once")
    for messages in ([said], [*HI, said | {"content": [{"type": "image_url"}]}]):
        with pytest.raises(RequestError):
            generation(messages=messages, continue_final_message=True)


# --- out ----------------------------------------------------------------------------------------------------------


async def test_a_body_is_a_chat_completion() -> None:
    found = await whole(Token("Hi"), Token(" there"), Token("", 0))
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "Hi there"}
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert found["disco"]["winner"] == "server"


def call(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]}


def opened(index: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function", "function": function}]}


async def test_tool_calls_come_together_from_their_deltas() -> None:
    deltas = [
        opened(0, "add"),
        call(0, arguments='{"a":'),
        opened(1, "sub"),
        call(0, arguments="1}"),
        call(1, arguments="{}"),
    ]
    kept = copy.deepcopy(deltas)
    tokens = [Token("", delta=d) for d in deltas]
    message = (await whole(*tokens, reason="tool_calls"))["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
            {"id": "call_1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        ],
    }
    assert deltas == kept, "tokens are frozen values"


async def test_other_deltas_grow_beside_the_text_and_log_probabilities_add_up() -> None:
    one = {"token": "Hi", "logprob": -0.1, "bytes": None, "top_logprobs": []}
    tokens = (
        Token("", delta={"reasoning_content": "a"}),
        Token("Hi", 1, {"reasoning_content": "b"}, {"content": [one]}),
    )
    choice = (await whole(*tokens))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi", "reasoning_content": "ab"}
    assert choice["logprobs"] == {"content": [one]}


async def test_list_items_without_an_index_are_kept_apart() -> None:
    notes = [
        {"type": "url_citation", "url_citation": {"url": u, "title": u, "start_index": 0, "end_index": 1}} for u in "ab"
    ]
    found = await whole(Token("Hi"), Token("", delta={"annotations": notes, "citations": ["a"]}))
    assert found["choices"][0]["message"]["annotations"] == notes


def test_chunks_are_chat_completion_chunks() -> None:
    deltas = [openai.delta_of(Token("Hi"), first=True), openai.delta_of(Token("", delta=opened(0, "add")), first=False)]
    for made in [*(openai.chunk(HEAD, d) for d in deltas), openai.chunk(HEAD, {}, "stop")]:
        sent = event(made)
        assert sent.startswith(b"data: {")
        assert sent.endswith(b"}\n\n")
        ChatCompletionChunk.model_validate(json.loads(sent.removeprefix(b"data: ")))


def test_only_the_first_chunk_has_a_role() -> None:
    assert openai.delta_of(Token("Hi"), first=True) == {"role": "assistant", "content": "Hi"}
    assert openai.delta_of(Token(""), first=True) == {"role": "assistant", "content": ""}
    assert openai.delta_of(Token("Hi"), first=False) == {"content": "Hi"}
    assert openai.delta_of(Token("", delta={"refusal": "no"}), first=False) == {"refusal": "no"}


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
    shown = openai.error_body(error)["error"]
    assert shown == {"message": str(error), "type": kind, "param": error.param, "code": code}
