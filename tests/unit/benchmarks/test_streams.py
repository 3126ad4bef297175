"""What servers send, odd as it may be: one form behind the endpoint's door, and an end that is none is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.relay.server_streams import FOLDER, Answer, bodies, read, run, streamed, streams
from disco_daemon.endpoints.finish_reasons import CUTS, ENDS
from disco_daemon.types import FinishReason

EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
END: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def sent(*chunks: Any, done: bool = True) -> list[bytes]:
    """A body of these chunks; bytes are written as they are."""
    written = [one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode() for one in chunks]
    return [b"\n\n".join([*written, b"data: [DONE]" if done else b"", b""])]


def delta(reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": more, "finish_reason": reason}]}


def text_of(answer: Answer) -> str:
    return "".join(token.text for token in answer.tokens)


def called(*calls: Any, end: str = "tool_calls") -> list[bytes]:
    """A body with these entries in `tool_calls`, each in a chunk of its own; lists are one chunk's."""
    return sent(*(delta(tool_calls=one if isinstance(one, list) else [one]) for one in calls), delta(end))


# --- recorded streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXPECTED))
async def test_a_recorded_stream_is_read_as_its_provider_means_it(name: str) -> None:
    answer, expected = await read([streams()[name]]), EXPECTED[name]
    assert text_of(answer) == expected["text"]
    deltas = [token.delta for token in answer.tokens if token.delta]
    assert "".join(one.thought for one in deltas) == expected.get("thought", "")
    assert "".join(one.refusal for one in deltas) == expected.get("refusal", "")
    assert [list(call) for call in answer.calls()] == expected.get("calls", [])
    assert (answer.error and answer.error.reason, answer.finish) == (expected.get("error"), expected.get("finish"))
    ids = [piece.id for one in deltas for piece in one.calls if piece.id]
    assert len(set(ids)) == len(ids) == len(answer.calls())


async def test_no_cutting_no_odd_event_and_no_order_changes_an_answer_in_any_shape() -> None:
    """A short run of `python -m benchmarks.relay.server_streams`, which makes 10,000."""
    figures = await run(190, seed=7)
    assert (figures["differences"], figures["shapes"]) == (0, 5)
    assert figures["streams"] >= 30
    assert figures["providers"] >= 10
    assert set(EXPECTED) == set(streams())


# --- why it ended -----------------------------------------------------------------------------------------------------

WORDS = {
    FinishReason.STOP: ("stop", "end_turn", "completed", "stop"),
    FinishReason.LENGTH: ("length", "max_tokens", "incomplete", "length"),
    FinishReason.CONTENT_FILTER: ("content_filter", "refusal", "incomplete", "content_filter"),
    FinishReason.TOOL_CALLS: ("tool_calls", "tool_use", "completed", "stop"),
}


def told(answer: Answer) -> tuple[str, ...]:
    """How the four chats' bodies tell the end of an answer."""
    found = {name: json.loads(body)[1] for name, body in bodies(answer).items()}
    chat, responses = found["chat"]["choices"][0]["finish_reason"], found["responses"]["status"]
    return chat, found["messages"]["stop_reason"], responses, found["ollama"]["done_reason"]


@pytest.mark.parametrize("reason", [*ENDS, "STOP", "FinishReason.STOP", "FINISH_REASON_MAX_TOKENS", "content-filter"])
async def test_an_end_that_is_known_is_told_in_each_apis_words(reason: str) -> None:
    call = {"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    word = reason.lower().replace("-", "_").removeprefix("finishreason.").removeprefix("finish_reason_")
    is_call = ENDS[word] in (FinishReason.TOOL_CALLS, FinishReason.FUNCTION_CALL)
    answer = await read(sent(delta(content="Hi"), *([delta(tool_calls=[call])] if is_call else []), delta(reason)))
    assert answer.error is None
    assert told(answer) == WORDS[FinishReason.TOOL_CALLS if is_call else ENDS[word]]


@pytest.mark.parametrize("reason", [*CUTS, "ERROR", "soon", "<b>", "x" * 5000, "stop!", 7, True, {"type": "stop"}, [1]])
async def test_an_end_that_is_no_known_one_is_the_servers_failure_in_every_shape(reason: Any) -> None:
    answer = await read(sent(delta(content="Half an"), delta(reason)))
    assert text_of(answer) == "Half an"
    assert answer.error is not None
    assert answer.error.reason == "cut"
    assert len(str(answer.error)) < 200
    wire = streamed(answer)
    assert b'"error"' in wire["chat"]
    assert b"[DONE]" not in wire["chat"]
    assert b"message_stop" not in wire["messages"]
    assert b"response.failed" in wire["responses"]
    assert b'"done":true' not in wire["ollama"]


@pytest.mark.parametrize("reason", ["", "null", "None", " NULL ", None, "undefined"])
async def test_a_word_for_no_reason_is_no_end(reason: str | None) -> None:
    answer = await read(sent(delta(reason, content="Hel"), delta(reason, content="lo"), delta("stop")))
    assert (text_of(answer), answer.finish) == ("Hello", "stop")
    cut = await read(sent(delta(reason, content="Hel"), done=False))
    assert cut.error is not None
    assert cut.error.reason == "cut"


@pytest.mark.parametrize("body", [[b""], [b": hi\n\n"], [b"data: [DONE]\n\n"], [b"{}"], [b"<html>no</html>"],
                                  sent(delta(role="assistant")), sent({"choices": []}, {"usage": {}})])  # fmt: skip
async def test_an_end_without_anything_is_no_success(body: list[bytes]) -> None:
    answer = await read(body)
    assert answer.error is not None
    assert answer.error.reason == "cut"


async def test_calls_that_end_with_stop_are_calls_and_an_end_of_calls_without_any_is_a_stop() -> None:
    call = {"index": 0, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    assert told(await read(called(call, end="stop"))) == WORDS[FinishReason.TOOL_CALLS]
    assert told(await read(called(call, end="length"))) == WORDS[FinishReason.LENGTH]
    assert told(await read(sent(delta(content="Hi"), delta("tool_calls")))) == WORDS[FinishReason.STOP]


async def test_the_last_word_on_an_end_counts_but_no_failure_is_taken_back() -> None:
    assert (await read(sent(delta("stop", content="a"), delta("length")))).finish == "length"
    assert (await read(sent(delta("network_error", content="a"), delta("stop")))).error is not None


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (sent(delta("stop", content="Hello"), delta(content=" behind"), END), "Hello behind"),
        (sent({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]}, END), "Hi"),
        (sent({"choices": [{"message": {"content": "H"}}]}, {"choices": [{"message": {"content": "i"}}]}, END), "Hi"),
        (sent(delta(content="Hi"), {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}), "Hi"),
        (sent(delta(content="Hi"), {"choices": [{"index": 1, "delta": {"content": "OTHER"}}]}, END), "Hi"),
        (sent({"choices": [{"index": 1, "delta": {"content": "OTHER"}}]}, delta(content="Hi"), END), "Hi"),
        (sent(b'data: {"choices":[{"delta":{"content":"a\\ud83d"}}]}', delta(content="b"), END), "a\ufffdb"),
        (sent(b'data: {"choices":[{"delta":{"content":"\\ude00 a \\ud83d"}}]}', END), "\ufffd a \ufffd"),
        (sent(b'data: {"choices":[{"delta":{"content":"caf\xe9"}}]}', END), "caf\ufffd"),
        (sent(b'data: {"choices":[{"delta":{"content":"a\tb"}}]}', END), "a\tb"),
        (sent(b'data: {"choices":[{"delta":{"content":"Hi"}}],"x":Infinity}', END), "Hi"),
        (sent(delta(content=["H", {"type": "text", "text": "i"}, {"type": "image_url"}, None]), END), "Hi"),
        (sent({"choices": [{"text": "Hi", "index": 0}]}, {"choices": [{"text": "", "finish_reason": "stop"}]}), "Hi"),
        ([b'{"choices":[{"message":{"content":"Hi"},"finish_reason":null}]}'], "Hi"),
        ([json.dumps(one).encode() + b"\n" for one in (delta(content="H"), delta("stop", content="i"))], "Hi"),
        ([b"[\n", json.dumps(delta(content="H")).encode(), b",\n", json.dumps(END).encode() + b"]"], "H"),
    ],
)  # fmt: skip
async def test_text_is_neither_lost_nor_invented(body: list[bytes], text: str) -> None:
    answer = await read(body)
    assert (text_of(answer), answer.finish) == (text, "stop"), answer.error
    for wire in streamed(answer).values():
        wire.decode()


async def test_a_document_that_is_cut_is_no_answer() -> None:
    answer = await read([b'{\n "choices": [\n  {"message": {"content": "Hi"}'])
    assert answer.error is not None
    assert answer.error.reason == "garbage"


async def test_a_server_that_gives_fewer_choices_than_asked_ends_nevertheless() -> None:
    answer = await read(sent(delta(content="Hi"), delta("stop"), done=False), n=3)
    assert (text_of(answer), answer.finish) == ("Hi", "stop")
    chat = json.loads(bodies(answer)["chat"])[1]
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["Hi"]


async def test_what_no_json_can_hold_is_written_nevertheless() -> None:
    odd = (
        b'data: {"choices":[{"delta":{"content":"x","cit\\ud83d":[NaN,{"a":"\\udfff"}],"deep":'
        + b"[" * 200
        + b"]" * 200
    )
    answer = await read(sent(odd + b'},"logprobs":{"content":[{"token":"\\ud83d","logprob":-Infinity}]}}]}', END))
    assert text_of(answer) == "x"
    for wire in streamed(answer).values():
        wire.decode()
    choice = json.loads(bodies(answer)["chat"])[1]["choices"][0]
    assert choice["message"]["cit\ufffd"] == [None, {"a": "\ufffd"}]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0


# --- calls ------------------------------------------------------------------------------------------------------------


def entry(index: int | None = None, call_id: str | None = None, name: str = "", arguments: Any = "") -> dict[str, Any]:
    """An entry of `tool_calls`; what is not given is not there."""
    told = {"index": index, "id": call_id}
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value != ""}
    return {key: value for key, value in told.items() if value is not None} | {"function": function}


A1, A2 = '{"a":1}', '{"a":2}'
UNREADABLE: list[Any] = [
    3, "x", [3], [[]], [{"index": 0, "function": "f"}], [{"index": 0, "function": 3}], [entry(0, "a", name=5)],  # type: ignore[arg-type]
    *([entry(0, "a", "f", odd)] for odd in (5, [1], True, 1.5)), [entry(0, "a", "", A1)],
    [entry(0, "a", "f", A1), entry(0, "a", "", A2)],
]  # fmt: skip


@pytest.mark.parametrize("calls", UNREADABLE)
async def test_calls_that_cannot_be_read_are_an_error_that_names_the_server(calls: Any) -> None:
    answer = await read(sent(delta(tool_calls=calls), delta("tool_calls")))
    assert answer.error is not None
    assert (answer.error.reason, answer.error.status) == ("garbage", 502)


@pytest.mark.parametrize(
    "calls", [None, [], [None], [{}], {}, "", [{"index": 0}], [{"index": 0, "function": {"arguments": ""}}]]
)
async def test_calls_that_say_nothing_are_left_out(calls: Any) -> None:
    answer = await read(sent(delta(content="Hi"), delta(tool_calls=calls), END))
    assert (text_of(answer), answer.calls(), answer.finish) == ("Hi", [], "stop")


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (called(entry(0, None, "f"), entry(0, "late", "", A1)), [("f", A1)]),
        (called(entry(None, None, "f", A1), entry(None, None, "f", A2)), [("f", A1), ("f", A2)]),
        (called(entry(0, "a", "f", "{}"), entry(0, "a", "f", A1)), [("f", A1)]),
        (called(entry(0, "a", "f", A1), entry(0, "a", "f", A1)), [("f", A1)]),
        (called(entry(0, "a", "get_"), entry(0, None, "it")), [("get_it", "{}")]),
        (called(entry(0, "a", "get_"), entry(0, None, "get_it")), [("get_it", "{}")]),
        (called(entry(0, "", "f", A1[:3]), entry(0, "", "f", A1[3:])), [("f", A1)]),
        (called(entry(0, None, "f", A1), entry(0, None, "f", A2)), [("f", A1), ("f", A2)]),
        (called({"id": 17, "function": {"name": "f", "arguments": {"a": [1, None]}}}), [("f", '{"a":[1,null]}')]),
        (called({"index": "1", "id": "a", "name": "f", "arguments": "{}"}), [("f", "{}")]),
        (called([entry(None, None, "f", "{}")] * 2), [("f", "{}"), ("f", "{}")]),
        (called([entry(None, None, "f"), entry(None, None, "g")],
                [entry(None, None, "", '{"a":'), entry(None, None, "", '{"b":')],
                [entry(None, None, "", "1}"), entry(None, None, "", "2}")]), [("f", A1), ("g", '{"b":2}')]),
        (called(entry(0, "same", "f", A1), entry(1, "same", "f", A2)), [("f", A1), ("f", A2)]),
        (called(entry(0, "a", "f"), entry(0, "b", "g"), entry(0, "a", "", A1), entry(0, "b", "", A2)),
         [("f", A1), ("g", A2)]),
        (called(entry(5, "a", "f", A1), entry(3, "b", "g", A2)), [("f", A1), ("g", A2)]),
        (sent(delta(tool_calls=entry(0, "a", "f", "{}")), END), [("f", "{}")]),
        (sent(delta(content=None, tool_calls=[entry(0, "a", "f", A1)]), delta(content="\n"),
              delta(tool_calls=[entry(1, "b", "g", A2)]), END), [("f", A1), ("g", A2)]),
    ],
)  # fmt: skip
async def test_calls_are_told_apart_and_put_together(body: list[bytes], calls: list[tuple[str, str]]) -> None:
    answer = await read(body)
    assert answer.error is None
    assert answer.calls() == calls
    found = json.loads(bodies(answer)["messages"])[1]["content"]
    assert [(block["name"], block["input"]) for block in found] == [(name, json.loads(text)) for name, text in calls]
    assert all(block["id"] for block in found)
    assert len({block["id"] for block in found}) == len(found)
