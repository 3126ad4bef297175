"""Ollama's API: a request becomes a chat or a raw prompt, and the lines of a stream say what its body says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.api.ollama.ollama_request import to_chat, to_generation, to_inputs
from disco_daemon.api.ollama.ollama_shape import ChatLines, GenerateLines, OllamaShape, error_body, rfc3339
from disco_daemon.api.openai.openai_request import parse_chat
from disco_daemon.errors import DiscoError, RequestError, Unavailable
from disco_daemon.types import Attempt, CallPart, Delta, Outcome, Plan, Side, Token, Usage

USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=4, load_s=0.25)
WON = Attempt(Side.DEVICE, "small", 0.5, 1.0, censored=False, usage=USAGE, load_s=0.2)
OUTCOME = Outcome(
    "r", 5.0, "m", "race", Plan(0, 0), 7, Side.DEVICE, "stop", None, 1.5, 2.0, 0, {Side.DEVICE: 5}, (WON,), 0.0, 0.0
)  # fmt: skip
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(*said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return to_chat({"model": "disco", "messages": [*said] or [HI]} | more).body


# --- in ---------------------------------------------------------------------------------------------------------------


def test_a_request_is_a_chat_that_streams_unless_it_is_told_not_to() -> None:
    assert chat() == {"model": "disco", "messages": [HI], "stream": True}
    assert chat(stream=False, tools=[TOOL], keep_alive="5m", disco={"private": True}) == {
        "model": "disco", "messages": [HI], "stream": False, "tools": [TOOL], "disco": {"private": True},
    }  # fmt: skip


def test_options_go_by_the_fields_table_and_others_are_named() -> None:
    options = {
        "num_predict": 9.0, "temperature": 0.5, "top_k": 40, "seed": 7.0, "stop": ["x"], "mirostat": 0,
        "min_p": None, "num_thread": 3, "use_mmap": True, "num_ctx": 8192, "n": 3, "api_base": "http://evil.example",
        "tfs_z": 1.0, "dry_multiplier": 0.5,
    }  # fmt: skip
    found = to_chat({"model": "m", "messages": [HI], "options": options, "seed": 1})
    assert {name: found.body[name] for name in found.body if name not in ("model", "messages", "stream")} == {
        "max_tokens": 9, "temperature": 0.5, "top_k": 40, "seed": 7, "stop": ["x"], "mirostat": 0,
        "dry_multiplier": 0.5,
    }  # fmt: skip
    assert type(found.body["max_tokens"]) is type(found.body["seed"]) is int
    assert found.left_out == ("seed", "options.num_ctx", "options.n", "options.api_base", "options.tfs_z")


@pytest.mark.parametrize(("told", "limit"), [(-1, -1), (-2, -1), (1, 1)])
def test_no_limit_has_two_names(told: int, limit: int) -> None:
    assert chat(options={"num_predict": told})["max_tokens"] == limit


@pytest.mark.parametrize(
    ("think", "made"),
    [
        (True, {"reasoning_effort": "medium"}), ("high", {"reasoning_effort": "high"}), (False, {"think": False}),
        (None, {}), ("", {}),
    ],
)  # fmt: skip
def test_how_much_to_think_is_an_effort(think: Any, made: dict[str, Any]) -> None:
    assert chat(think=think) == chat() | made


@pytest.mark.parametrize("form", ["json", {"type": "object"}, "", None])
def test_a_form_is_any_json_or_a_schema(form: Any) -> None:
    found = chat(format=form).get("response_format")
    assert found == (
        {"type": "json_object"} if form == "json"
        else {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}} if form
        else None
    )  # fmt: skip


def test_calls_get_ids_that_their_results_name() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("look", "hear", "look")]
    said = chat(
        HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "hear", "content": "a bird"},
        {"role": "tool", "tool_name": "look", "content": "a tree"},
        {"role": "tool", "content": "a house"},
        {"role": "user", "content": "Well?"},
    )["messages"]
    ids = [call["id"] for call in said[1]["tool_calls"]]
    assert len(set(ids)) == 3
    assert said[1] == {
        "role": "assistant", "content": None, "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": f'{{"at":"{name}"}}'}}
            for id_, name in zip(ids, ("look", "hear", "look"), strict=True)
        ],
    }  # fmt: skip
    assert [(m["tool_call_id"], m["content"]) for m in said[2:5]] == [
        (ids[1], "a bird"), (ids[0], "a tree"), (ids[2], "a house"),
    ]  # fmt: skip


def test_ids_that_a_client_gives_are_kept() -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": {}}}
    said = chat(HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"})
    assert said["messages"][1]["tool_calls"][0]["id"] == said["messages"][2]["tool_call_id"] == "a"


def test_images_are_parts_of_a_message_with_their_kind() -> None:
    said = chat(
        {"role": "user", "content": "What?", "images": ["iVBORw0KGgo=", "/9j/4AAQ", "data:image/gif;base64,R0"]}
    )
    assert said["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/4AAQ"}},
        {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0"}},
    ]


def test_an_answer_that_the_client_has_begun_is_continued() -> None:
    begun = {"role": "assistant", "content": "Two"}
    assert chat(HI, begun)["messages"][-1] == begun | {"prefix": True}


def test_a_prompt_is_a_chat_of_one_turn_and_a_raw_one_is_none() -> None:
    made = to_generation({"model": "m", "prompt": "Hi", "system": "Be brief.", "template": "x", "context": [1]})
    assert made.body["messages"] == [{"role": "system", "content": "Be brief."}, HI]
    assert (made.is_raw, made.left_out) == (False, ("template", "context"))
    raw = to_generation({"model": "m", "prompt": "Hi", "raw": True, "stream": False, "logprobs": True})
    assert raw.body == {"model": "m", "stream": False, "prompt": "Hi", "max_tokens": None, "logprobs": 0}
    assert raw.is_raw
    filled = to_generation({"model": "m", "prompt": "def f(", "suffix": "return 1", "options": {"num_predict": 5}})
    assert filled.body == {
        "model": "m", "stream": True, "prompt": "def f(", "suffix": "return 1", "max_tokens": 5,
    }  # fmt: skip
    assert filled.is_raw


@pytest.mark.parametrize(("alive", "word"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0", "unload")])
def test_without_a_question_a_model_is_only_loaded_or_unloaded(alive: Any, word: str) -> None:
    assert to_chat({"model": "m", "messages": [], "keep_alive": alive}).only == word
    assert to_generation({"model": "m", "keep_alive": alive}).only == word
    assert to_generation({"model": "m", "prompt": "x", "keep_alive": alive}).only == ""


def test_texts_for_vectors() -> None:
    assert to_inputs({"model": "m", "input": "a"}) == ("m", ["a"], None)
    assert to_inputs({"model": "m", "input": ["a", "b"], "dimensions": 3, "truncate": True}) == ("m", ["a", "b"], 3)
    assert to_inputs({"model": "m", "prompt": "a"}) == ("m", ["a"], None)
    assert to_inputs({"model": "m", "input": ""})[1] == to_inputs({"model": "m"})[1] == []


BAD: dict[str, dict[str, Any]] = {
    "model": {"model": 3}, "stream": {"stream": "yes"}, "format": {"format": "xml"}, "options": {"options": [1]},
    "options.num_predict": {"options": {"num_predict": 0}}, "think": {"think": 3}, "tools": {"tools": {}},
    "messages": {"messages": "Hi"}, "messages[0].role": {"messages": [{"role": "king", "content": ""}]},
    "messages[0].content": {"messages": [{"role": "user", "content": 3}]},
    "messages[0].images": {"messages": [{"role": "user", "content": "", "images": [3]}]},
    "messages[0].thinking": {"messages": [{"role": "assistant", "content": "", "thinking": 3}]},
    "messages[0].tool_calls": {"messages": [{"role": "assistant", "tool_calls": 3}]},
    "messages[0].tool_calls[0]": {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "messages[0].tool_calls[0].function.arguments": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]
    },
    "messages[0].tool_calls[0].id": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "x"}}]}]
    },
    "messages[0].tool_call_id": {"messages": [{"role": "tool", "content": "", "tool_call_id": 3}]},
}  # fmt: skip


@pytest.mark.parametrize("param", BAD)
def test_bad_input_names_the_parameter(param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**BAD[param])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("raw", "param"),
    [({"raw": True, "images": ["AA"]}, "images"), ({"prompt": 3}, "prompt"), ({"suffix": 3}, "suffix")],
)
def test_bad_prompts_do_too(raw: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_generation({"model": "m", "prompt": "Hi"} | raw)
    assert caught.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        "model", "messages", "stream", "format", "options", "think", "tools", "keep_alive", "logprobs", "top_logprobs",
        "disco", "prompt", "suffix", "system", "raw", "images", "input", "dimensions",
    ]
)  # fmt: skip
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": JSON}, optional={"arguments": JSON})})
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "images", "thinking", "tool_calls", "tool_call_id", "tool_name"]),
    JSON | st.sampled_from(["user", "assistant", "tool"]) | st.lists(CALL, max_size=2),
    max_size=5,
)


@settings(max_examples=300)
@given(st.dictionaries(FIELDS, JSON, max_size=5), st.lists(MESSAGE, max_size=3))
def test_whatever_comes_is_read_or_refused(raw: dict[str, Any], said: list[dict[str, Any]]) -> None:
    for given_ in (raw, raw | {"model": "m"}, raw | {"model": "m", "messages": said}):
        for read in (to_chat, to_generation, to_inputs):
            try:
                made = read(given_)
                if read is to_chat and not getattr(made, "only", ""):
                    parse_chat(getattr(made, "body"))  # noqa: B009
            except DiscoError as e:
                assert 400 <= e.status < 500  # noqa: PT017


# --- out --------------------------------------------------------------------------------------------------------------


def lines_of(sent: bytes) -> list[dict[str, Any]]:
    assert sent == b"" or sent.endswith(b"\n")
    return [json.loads(line) for line in sent.split(b"\n")[:-1]]


def streamed(shape: type[OllamaShape], tokens: Sequence[Token], outcome: Outcome = OUTCOME) -> list[dict[str, Any]]:
    made = shape("r", 1, "disco")
    sent = b"".join(made.token(token, None, first=i == 0) for i, token in enumerate(tokens))
    return lines_of(sent + made.ending(outcome, include_usage=False))


def gathered(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client makes of a stream."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = dict(lines[-1])
    if "message" in whole:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(x["message"]["content"] for x in lines)}
        if thought := "".join(line["message"].get("thinking", "") for line in lines):
            message["thinking"] = thought
        if calls := [call for line in lines for call in line["message"].get("tool_calls", [])]:
            message["tool_calls"] = calls
        return whole | {"message": message}
    whole["response"] = "".join(line["response"] for line in lines)
    thought = "".join(line.get("thinking", "") for line in lines)
    return whole | ({"thinking": thought} if thought else {})


def call(index: int, arguments: str, **head: Any) -> Token:
    """A piece of a call; the first one of each has an `id`, which is its name as well."""
    return Token("", 1, Delta(calls=(CallPart(index, arguments, head.get("id", ""), head.get("id", "")),)))


WORDS = st.text("ab \n<>é👩", min_size=1, max_size=4)
SAID = st.lists(st.one_of(WORDS.map(Token), WORDS.map(lambda text: Token("", 1, Delta(thought=text)))), max_size=9)
CALLED = st.lists(st.dictionaries(WORDS, WORDS, max_size=2), max_size=3)


@settings(max_examples=100)
@given(SAID, CALLED, st.integers(1, 5), st.sampled_from([ChatLines, GenerateLines]))
def test_a_stream_says_what_a_body_says_wherever_it_is_cut(
    said: list[Token], called: list[dict[str, str]], size: int, shape: type[OllamaShape]
) -> None:
    tokens = list(said)
    for i, given_ in enumerate(called):
        text = json.dumps(given_)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        tokens += [call(i, "", id=f"c{i}"), *(call(i, piece) for piece in pieces)]
    whole = json.loads(json.dumps(shape("r", 1, "disco").body(tokens, {}, OUTCOME)))
    assert gathered(streamed(shape, tokens)) == whole
    if shape is ChatLines:
        assert [c["function"]["arguments"] for c in whole["message"].get("tool_calls", [])] == called


def test_times_are_parts_of_the_whole_in_ns() -> None:
    (line,) = streamed(ChatLines, [])
    told = {name: line[name] for name in line if name.endswith(("_duration", "_count"))}
    assert told == {
        "total_duration": 2_000_000_000, "load_duration": 250_000_000, "prompt_eval_duration": 750_000_000,
        "eval_duration": 500_000_000, "prompt_eval_count": 7, "eval_count": 5,
    }  # fmt: skip
    none = Outcome(
        "r", 5.0, "m", "race", Plan(0, 0), 7, None, "stop", None, None, 2.0, 0, {}, (), 0.0, 0.0
    )  # fmt: skip
    assert streamed(ChatLines, [], none)[0]["eval_duration"] == 0


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")])
def test_why_an_answer_ended(reason: str, told: str) -> None:
    assert streamed(ChatLines, [], replace(OUTCOME, finish_reason=reason))[0]["done_reason"] == told


def test_calls_that_cannot_be_read_break_nothing() -> None:
    (line, _) = streamed(ChatLines, [call(0, "{not", id="a")])
    assert line["message"]["tool_calls"] == [{"id": "a", "function": {"name": "a", "arguments": {}}}]


def test_log_probabilities_are_told_beside_the_message() -> None:
    told = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]
    token = Token("Hi", logprobs={"content": told})
    assert streamed(ChatLines, [token])[0]["logprobs"] == told
    assert ChatLines("r", 1, "m").body([token], {}, OUTCOME)["logprobs"] == told


@pytest.mark.parametrize("shape", [ChatLines, GenerateLines])
def test_a_sign_of_life_is_a_line_without_a_word_and_a_failure_is_one_with_an_error(shape: type[OllamaShape]) -> None:
    made = shape("r", 1, "disco")
    sent = made.sign_of_life() + made.note("moved") + made.token(Token("Hi"), None, first=True, side=Side.DEVICE)
    *said, failed = lines_of(sent + made.failed(Unavailable("all is lost")))
    said_by = [line["message"]["content"] if "message" in line else line["response"] for line in said]
    assert said_by == ["", "Hi"]
    assert said[1]["disco"] == {"side": "device"}
    assert failed["error"] == "all is lost"


def test_errors_are_a_text_with_our_code_beside_it() -> None:
    assert error_body(RequestError("no")) == {"error": "no"}
    assert error_body(RequestError("no", code="model_not_found")) == {"error": "no", "code": "model_not_found"}


def test_times_of_day_are_written_as_ollama_does() -> None:
    assert rfc3339(1.5) == "1970-01-01T00:00:01.500000Z"
