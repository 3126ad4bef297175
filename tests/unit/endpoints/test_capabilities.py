"""What an endpoint can do, as it is declared, told, listed, set or refused; a request goes where it can be met."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.openai import openai_request
from disco_daemon.conductor.context import AnswerContext
from disco_daemon.conductor.eligible import eligible, roomy
from disco_daemon.conductor.plan import NOT_THE_DEVICE, NOT_THE_SERVER, fitted
from disco_daemon.config.schema import ServerSettings
from disco_daemon.daemon.tasks.prober import Prober
from disco_daemon.endpoints import model_facts
from disco_daemon.endpoints.refused import LIMITS, Understood, refused_limit, understand
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.endpoints.server_capabilities import REMEMBERED_S, ServerCapabilities
from disco_daemon.errors import ConfigError, EndpointError, RequestError
from disco_daemon.money.catalog import parse
from disco_daemon.types import (
    BOTH,
    FIELDS,
    UNKNOWN,
    Capabilities,
    Capability,
    Continuation,
    Finish,
    GenerationRequest,
    Plan,
    PromptLength,
    Readiness,
    Side,
    Tools,
    Usage,
    lacking,
    together,
    wanted,
)
from tests.fixtures import chat_bodies
from tests.fixtures.clock import StoppedClock
from tests.fixtures.upstream import Upstream

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
BEGUN = [*HI, {"role": "assistant", "content": "Once", "prefix": True}]
# What asks for each capability, and the parameter that does.
ASKS: dict[Capability, tuple[dict[str, Any], str]] = {
    Capability.TOOLS: ({"tools": [TOOL]}, "tools"),
    Capability.FORCED_TOOLS: ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    Capability.JSON_SCHEMA: ({"response_format": SCHEMA}, "response_format"),
    Capability.IMAGES: ({"messages": PICTURE}, "messages"),
    Capability.LOGPROBS: ({"logprobs": True}, "logprobs"),
    Capability.N: ({"n": 2}, "n"),
    Capability.FIM: ({"suffix": "end"}, "suffix"),
    Capability.CONTINUATION: ({"messages": BEGUN}, "messages"),
}
ALL = Capabilities.of(dict.fromkeys(Capability, True))
lengths = st.none() | st.integers(1, 9)
some = st.builds(
    Capabilities, lengths, lengths, st.none() | st.sampled_from(Tools), *[st.none() | st.booleans()] * 7
)  # fmt: skip


def asked(**more: Any) -> GenerationRequest:
    data = json.dumps({"model": "disco", "messages": HI} | more).encode()
    return openai_request.to_generation(*chat_bodies.parse(data), "r", BOTH)


def context(**sides: Capabilities) -> AnswerContext:
    """Endpoints that can do no more than that, and refuse nothing by themselves."""
    endpoints = {
        Side(side): SimpleNamespace(
            capabilities=can,
            refuses=lambda _: None,
            continuation=Continuation.EXACT,
            overlap_of=lambda _: None,
        )
        for side, can in sides.items()
    }
    outputs = SimpleNamespace(expected_remaining=lambda *_: 100.0)
    planner = SimpleNamespace(knowledge=SimpleNamespace(outputs=outputs))
    return cast("AnswerContext", SimpleNamespace(endpoints=endpoints, private=False, planner=planner))


# --- the gate -----------------------------------------------------------------------------------------------------


def test_every_capability_is_asked_for_by_a_field_of_the_table_or_by_the_messages() -> None:
    by_fields = {row.capability for row in FIELDS.values()} - {None}
    assert by_fields | {Capability.IMAGES, Capability.CONTINUATION} == set(Capability)


@pytest.mark.parametrize("capability", ASKS)
def test_a_request_goes_only_where_it_can_be_met(capability: Capability) -> None:
    more, param = ASKS[capability]
    request, without = asked(**more), Capabilities.of({capability: False}).over(ALL)
    assert wanted(request) == {capability: param}
    for here, there, side in ((without, ALL, Side.SERVER), (UNKNOWN, without, Side.DEVICE)):
        assert eligible(request, context(device=here, server=there))[1] == {side}
    with pytest.raises(RequestError, match=capability.words) as refused:
        eligible(request, context(device=without, server=without))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported", param)
    assert "the device does not support" in str(refused.value)
    assert "the server does not support" in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}}, {"logprobs": False}, {"suffix": ""},
        {"structured_outputs": {"choice": ["a", "b"]}},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_needs_no_capability(more: dict[str, Any]) -> None:
    assert wanted(asked(**more)) == {}


def test_a_model_whose_tools_are_generic_is_for_forced_calls_only() -> None:
    generic = Capabilities(tools=Tools.GENERIC, forced_tools=True)
    assert lacking("device", generic, asked(tools=[TOOL])) is not None
    assert lacking("device", generic, asked(tools=[TOOL], tool_choice="required")) is None


# --- prompts that do not fit --------------------------------------------------------------------------------------


def test_a_prompt_that_surely_does_not_fit_is_refused_by_the_gate() -> None:
    both = context(device=Capabilities(4096), server=Capabilities(2048))

    def sides(n: int, *, counted: bool = True) -> set[Side]:
        return set(roomy(BOTH, asked(), PromptLength(n, counted=counted), both))

    assert sides(4095) == {Side.DEVICE, Side.SERVER}, "the server's vocabulary may make fewer tokens of it"
    assert sides(4096, counted=False) == {Side.DEVICE, Side.SERVER}, "nobody has counted it"
    with pytest.raises(RequestError, match="4096 tokens at the device and 2048 tokens at the server") as refused:
        sides(4096)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert roomy(BOTH, asked(), PromptLength(10**9), context(device=Capabilities(9), server=UNKNOWN)) == {Side.SERVER}


def test_where_a_prompt_may_not_fit_the_other_side_begins() -> None:
    def plan(n: int, **down_s: float) -> Plan:
        ready = {side: Readiness(n_ctx=n_ctx) for side, n_ctx in ((Side.DEVICE, 4096), (Side.SERVER, 2048))}
        return fitted(Plan(0.0, 0.0), asked(), n, ready, context(device=Capabilities(4096), server=Capabilities(2048)))

    assert plan(100) == Plan(0.0, 0.0)
    assert plan(2000) == NOT_THE_SERVER
    assert plan(4090) == NOT_THE_DEVICE


# --- one after the other, and together ----------------------------------------------------------------------------


@given(some, some)
def test_what_is_known_first_counts(first: Capabilities, then: Capabilities) -> None:
    merged = first.over(then)
    for name in ("context_length", "max_output", *Capability):
        known = getattr(first, name)
        assert getattr(merged, name) == (getattr(then, name) if known is None else known)
    assert first.over(UNKNOWN) == UNKNOWN.over(first) == first


@given(st.lists(some, min_size=1, max_size=3))
def test_together_they_can_what_one_of_them_can(each: list[Capabilities]) -> None:
    able = together(each)
    for capability in Capability:
        found = [one.has(capability) for one in each]
        assert able.has(capability) is (True if True in found else None if None in found else False)
    for name in ("context_length", "max_output"):
        known = [getattr(one, name) for one in each]
        assert getattr(able, name) == (None if None in known else max(known))


def test_the_settings_name_the_capabilities() -> None:
    choices, _ = get_args(get_type_hints(ServerSettings)["capabilities"])
    assert set(get_args(choices)) == set(Capability) - {"continuation"}, "that one is server.continuation"


def test_a_price_list_says_what_a_model_can_do() -> None:
    model = {"input": 1, "output": 2, "context_length": 8192, "max_output": 1024, "capabilities": {"images": False}}
    (price,) = parse("mine", {"base_url": "http://x/v1", "models": {"m": model}}, "mine.toml", own=True).models.values()
    assert price.capabilities == Capabilities(8192, 1024, images=False)
    for wrong in ({"context_length": "8k"}, {"max_output": 0}, {"capabilities": {"image": True}}, {"capabilities": 3},
                  {"capabilities": {"images": "no"}}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"mine\.toml"):
            parse("mine", {"base_url": "http://x/v1", "models": {"m": model | wrong}}, "mine.toml", own=True)


# --- what servers tell --------------------------------------------------------------------------------------------

ENTRIES: list[tuple[dict[str, Any], Capabilities]] = [
    ({"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}, Capabilities(4096)),
    ({"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192, "n_ctx": 2048}}, Capabilities(2048)),
    ({"id": "m", "context_window": 131072, "max_completion_tokens": 8192}, Capabilities(131072, 8192)),
    (
        {
            "id": "m", "context_length": 128000, "architecture": {"input_modalities": ["text", "image"]},
            "top_provider": {"context_length": 64000, "max_completion_tokens": None},
            "supported_parameters": ["max_tokens", "tools", "tool_choice", "structured_outputs"],
        },
        Capabilities(64000, None, Tools.NATIVE, forced_tools=True, json_schema=True, images=True, logprobs=False),
    ),
    (
        {"id": "m", "max_context_length": 32768, "capabilities": {"function_calling": True, "vision": False}},
        Capabilities(32768, tools=Tools.NATIVE, images=False),
    ),
    (
        {"id": "m", "context_length": 4096, "max_output": 4096, "capabilities": {"tools": "none", "n": False}},
        Capabilities(4096, 4096, tools=Tools.NONE, n=False),
    ),
    ({"id": "m", "context_length": "long", "max_model_len": -1, "capabilities": ["a"], "meta": 3}, UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "can"), ENTRIES)
def test_a_list_of_models_tells_what_one_can(entry: dict[str, Any], can: Capabilities) -> None:
    body = json.dumps({"object": "list", "data": [{"id": "other", "max_model_len": 1}, entry]}).encode()
    found = model_facts.entry_of(body, "m")
    assert found is not None
    assert model_facts.of_entry(found) == can
    assert model_facts.entry_of(body, "unknown") is None
    assert model_facts.entry_of(json.dumps({"data": [entry]}).encode(), "an alias") == entry, "there is only this one"


def test_llama_server_tells_more_in_its_properties() -> None:
    props = {"default_generation_settings": {"n_ctx": 4096}, "modalities": {"vision": False, "audio": False}}
    assert model_facts.of_props(json.dumps(props).encode()) == Capabilities(4096, images=False)
    assert model_facts.is_llama_server(ENTRIES[1][0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["data", "id", "meta", "capabilities", "n_ctx", "tools"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(json_values)
def test_whatever_a_server_tells_breaks_nothing(value: Any) -> None:
    body = json.dumps(value).encode()
    model_facts.of_props(body)
    if (entry := model_facts.entry_of(body, "m")) is not None:
        model_facts.of_entry(entry)
    understand(400, value, set(Capability))
    refused_limit(400, value, LIMITS)


# --- what servers refuse ------------------------------------------------------------------------------------------

LACKS: list[tuple[Capability, int, Any]] = [
    (Capability.TOOLS, 400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
    (Capability.TOOLS, 400, "registry.ollama.ai/library/gemma:2b does not support tools"),
    (Capability.TOOLS, 400, "tools param requires --jinja flag"),
    (Capability.TOOLS, 404, "No endpoints found that support tool use. To learn more, visit the documentation."),
    (Capability.TOOLS, 400, "Unrecognized request argument supplied: tools"),
    (Capability.TOOLS, 400, "`tool calling` is not supported with this model"),
    (Capability.TOOLS, 422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "tools"], "msg": "Extra inputs"}]}),
    (Capability.FORCED_TOOLS, 404, "No endpoints found that support the provided 'tool_choice' value."),
    (Capability.JSON_SCHEMA, 400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported"),
    (Capability.IMAGES, 400, "image input is not supported - hint: you may need to provide the mmproj"),
    (Capability.IMAGES, 400, "llama-3-8b is not a multimodal model"),
    (Capability.IMAGES, 400, "This model does not support image input."),
    (Capability.IMAGES, 400, "At most 0 image(s) may be provided in one prompt."),
    (Capability.LOGPROBS, 400, "logprobs are not supported with this model"),
    (Capability.LOGPROBS, 400, {"code": "unsupported_parameter", "param": "logprobs", "message": "You may not."}),
    (Capability.LOGPROBS, 400, "Unsupported parameter: 'top_logprobs' is not supported with reasoning models."),
    (Capability.N, 400, "Unsupported parameter: 'n'"),
    (Capability.FIM, 400, "unknown field `suffix`, expected one of `model`"),
]


def document(said: Any) -> Any:
    return {"error": {"message": said}} if isinstance(said, str) else said


@pytest.mark.parametrize(("capability", "status", "said"), LACKS)
def test_servers_say_in_many_ways_that_they_lack_something(capability: Capability, status: int, said: Any) -> None:
    assert understand(status, document(said), {capability}) == Understood(capability)
    assert understand(503, document(said), {capability}) is None
    others = {Capability.IMAGES, Capability.LOGPROBS} - {capability}
    assert understand(status, document(said), others) is None, "nobody asked for it"


@pytest.mark.parametrize(
    "said",
    [
        "Invalid schema for function 'f': In context=('properties', 'x'), 'oneOf' is not permitted.",
        "tools[0].function.parameters: 'format' is not supported",
        "Unknown parameter: 'tools[0].strict'.",
        "Unsupported parameter: tools.0.custom",
        "Invalid schema for response_format 's': 'additionalProperties' is required to be supplied",
        "The provided JSON schema contains features not supported by xgrammar.",
        "Unsupported value: 'temperature' does not support 0.3 with this model.",
        "Invalid 'messages[1].tool_calls[0].id': string too long.",
        "The image could not be downloaded.",
        "An assistant message with 'tool_calls' must be followed by tool messages",
        "you may not ask that",
    ],
)
def test_a_request_that_is_wrong_by_itself_says_nothing_of_the_server(said: str) -> None:
    assert understand(400, document(said), set(Capability) - {Capability.N}) is None


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ("This model's maximum context length is 4097 tokens. However, you requested 5000 tokens", 4097),
        ("prompt is too long: 213000 tokens > 200000 maximum", 200_000),
        ({"type": "exceed_context_size_error", "message": "the request exceeds", "n_ctx": 512}, 512),
        ("Input tokens exceed the configured limit of 272,000 tokens. Your messages resulted in 297,006.", 272_000),
        ("the request exceeds the available context size (2048 tokens), try increasing it", 2048),
        ({"code": "context_length_exceeded", "message": "Please reduce the length of the messages."}, 0),
        ({"code": "context_length_exceeded", "message": "the context length 3 is too short", "n_ctx": True}, 0),
    ],
)
def test_a_prompt_that_was_too_long_tells_the_context(said: Any, length: int) -> None:
    assert understand(400, document(said), ()) == Understood(context_length=length)


def test_a_refusal_counts_for_a_day_and_less_than_what_the_user_says() -> None:
    clock = StoppedClock()
    known = ServerCapabilities(clock, listed=Capabilities(9999, logprobs=True))
    known.tell(Capabilities(8192, tools=Tools.NATIVE))
    assert (known.known.context_length, known.known.tools, known.known.logprobs) == (8192, Tools.NATIVE, True)
    known.learn(400, document("this model does not support tools"), "400: no tools", asked(tools=[TOOL]))
    known.learn(400, document("maximum context length is 4096 tokens"), "400: too long", asked())
    known.learn(400, document("this model does not support logprobs"), "400: not asked for", asked())
    clock.at += REMEMBERED_S - 1
    assert (known.known.context_length, known.known.tools, known.known.logprobs) == (4096, Tools.NONE, True)
    why = lacking("server", known.known, asked(tools=[TOOL]))
    assert why is not None
    assert "`disco config reload`" in why
    tools, length = known.status()["refused"]
    assert tools == {"what": "tools", "said": "400: no tools", "for_s": 1}
    assert length["what"] == "context_length"
    user = ServerCapabilities(clock, chosen=Capabilities(1024, tools=Tools.NATIVE))
    user.learn(400, document("this model does not support tools"), "", asked(tools=[TOOL]))
    assert lacking("server", user.known, asked(tools=[TOOL])) is None
    clock.at += 1
    assert (known.known.tools, known.status()["refused"]) == (Tools.NATIVE, [])


def test_a_reload_forgets_refusals() -> None:
    known = ServerCapabilities(StoppedClock())
    known.tell(UNKNOWN)
    known.learn(400, document("this model does not support tools"), "", asked(tools=[TOOL]))
    assert known.known.tools is Tools.NONE
    assert not known.is_due
    known.forget()
    assert known.known == UNKNOWN
    assert known.is_due, "it may be another server"


# --- the server ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(base_url: str) -> AsyncIterator[Server]:
    server = Server(ServerConfig(base_url, "m", ""))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def refusal(server: Server, request: GenerationRequest) -> EndpointError:
    try:
        async with aclosing(server.generate(request, Usage())) as events:
            return pytest.fail(f"it was answered with {await anext(events)}")
    except EndpointError as e:
        return e


async def test_a_refusal_that_is_learned_from_is_a_refusal_like_any_other() -> None:
    async with Upstream() as upstream, served(upstream.url) as server:
        with upstream.status(400, document("this model does not support tools")):
            error = await refusal(server, asked(tools=[TOOL]))
        assert (error.reason, error.code, error.param, error.status) == ("refused", "unsupported", "tools", 400)
        assert server.capabilities.tools is Tools.NONE
        with upstream.status(400, document("maximum context length is 64 tokens")):
            error = await refusal(server, asked())
        assert (error.reason, error.code) == ("refused", "context_length_exceeded")
        assert server.readiness().n_ctx == 64
        assert server.n_failures == 0, "it is not the server's fault"


LIMIT_REFUSALS: list[tuple[str, int, Any]] = [
    (
        "max_tokens", 400,
        {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                   "'max_completion_tokens' instead.", "param": "max_tokens", "code": "unsupported_parameter"}},
    ),
    ("max_completion_tokens", 400, "Unrecognized request argument supplied: max_completion_tokens"),
    ("max_completion_tokens", 422, {"object": "error", "message": {"detail": [
        {"type": "extra_forbidden", "loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}
    ]}}),
]  # fmt: skip


def limits_sent(upstream: Upstream) -> list[dict[str, int]]:
    return [{name: e.body[name] for name in LIMITS if name in e.body} for e in upstream.exchanges]


@pytest.mark.parametrize(("name", "status", "said"), LIMIT_REFUSALS)
async def test_a_limit_that_is_refused_by_its_name_goes_by_the_other_at_once_and_from_then_on(
    name: str, status: int, said: Any
) -> None:
    other = LIMITS[name]
    async with Upstream() as upstream, served(upstream.url) as server:
        for n_seen in (2, 3, 4):
            with upstream.status(status, document(said), times=1 if n_seen == 2 else 0):
                *_, last = [event async for event in server.generate(asked(**{name: 5}), Usage())]
            assert isinstance(last, Finish)
            assert limits_sent(upstream) == [{name: 5}] + (n_seen - 1) * [{other: 5}]
        assert (server.n_failures, server.status()["failing"]) == (0, None)
        assert [one["what"] for one in server.status()["refused"]] == [name]
        with upstream.status(status, json.loads(json.dumps(document(said)).replace(name, other)), times=1):
            [_ async for _ in server.generate(asked(**{other: 5}), Usage())]
        assert limits_sent(upstream)[4:] == [{other: 5}, {name: 5}], "it is another server by now"
        assert [one["what"] for one in server.status()["refused"]] == [other]
        server.forget()
        [_ async for _ in server.generate(asked(**{other: 5}), Usage())]
        assert limits_sent(upstream)[-1] == {other: 5}


@pytest.mark.parametrize(
    ("status", "said", "n_asked"),
    [
        (400, "Unsupported parameter: 'max_tokens'", 2), (400, "max_tokens must be at most 4", 1),
        (400, "this model does not support max_tokens above 4", 1),
        (400, {"error": {"code": "invalid_value", "param": "max_tokens", "message": "too large"}}, 1),
        (400, "Unsupported parameter: 'max_completion_tokens'", 1), (503, "Unsupported parameter: 'max_tokens'", 1),
    ],
)  # fmt: skip
async def test_a_limit_is_sent_by_its_other_name_once_and_only_where_its_name_was_refused(
    status: int, said: Any, n_asked: int
) -> None:
    async with Upstream() as upstream, served(upstream.url) as server:
        with upstream.status(status, document(said)):
            await refusal(server, asked(max_tokens=5))
        assert len(upstream.exchanges) == n_asked
        assert server.status()["refused"] == []


async def test_a_key_that_is_refused_with_the_list_is_said_before_the_first_question() -> None:
    async with Upstream() as upstream, served(upstream.url) as server:
        with upstream.status(403):
            await server.inquire()
        assert (server.status()["tried"], server.status()["failing"]) == (False, None), "it may be the list's alone"
        with upstream.status(401):
            await server.inquire()
        assert server.status()["failing"]["reason"] == "unauthorized"
        assert "refused the API key" in server.status()["last_error"]
        [_ async for _ in server.generate(asked(), Usage())]
        assert server.status()["failing"] is None
        with upstream.status(401):
            await server.inquire()
        assert server.status()["failing"] is None, "it answers, so the key is good enough"


async def test_a_server_that_was_away_may_be_another_one() -> None:
    async with Upstream() as upstream, served(upstream.url) as server:
        with upstream.status(400, document("this model does not support tools")):
            await refusal(server, asked(tools=[TOOL]))
        async with upstream.refuse():
            assert (await refusal(server, asked())).reason == "dropped", "the connection that was kept"
            assert (await refusal(server, asked())).reason == "unreachable"
        assert server.capabilities.tools is None


@pytest.mark.parametrize(("status", "is_known"), [(200, True), (404, True), (401, True), (500, False), (503, False)])
async def test_a_server_is_asked_again_what_it_can_do_where_it_could_not_say(status: int, is_known: bool) -> None:
    async with Upstream() as upstream, served(upstream.url) as server:
        with upstream.status(status, {"data": [{"id": "m", "max_model_len": 7}]}):
            await server.inquire()
    assert server.should_inquire is not is_known
    assert server.capabilities.context_length == (7 if status == 200 else None)


@pytest.mark.parametrize(("enabled", "may_ask", "n_inquiries"), [(True, True, 2), (True, False, 0), (False, True, 0)])
async def test_a_server_is_asked_what_it_can_do_at_the_start_and_later_unless_nothing_may_leave(
    enabled: bool, may_ask: bool, n_inquiries: int
) -> None:
    inquired = asyncio.Semaphore(0)

    async def inquire() -> None:
        inquired.release()

    server: Any = SimpleNamespace(should_inquire=True, should_probe=False, profile=None, inquire=inquire)
    prober = Prober(
        server, cast("Any", None), StoppedClock(), enabled=enabled, affordable=lambda: may_ask, book=lambda _: None
    )  # fmt: skip
    task = asyncio.create_task(prober.run())
    attempt = SimpleNamespace(side=Side.SERVER, censored=False, error=None)
    if n_inquiries:
        await inquired.acquire()
    for _ in range(9):  # turns of the loop
        await asyncio.sleep(0)
    prober.observe(cast("Any", SimpleNamespace(attempts=[attempt])))
    if n_inquiries:
        await inquired.acquire()
    for _ in range(9):
        await asyncio.sleep(0)
    assert inquired.locked()
    await prober.stop()
    task.cancel()
