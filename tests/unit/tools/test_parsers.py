from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.tools.format import Arguments, CallBegun, CallEnded, Event, Text, Thought, ToolFormat, WrittenCall
from disco_daemon.tools.formats import BY_NAME
from tests.fixtures.tool_outputs import OUTPUTS, TOOLS, Output

IDS = [f"{output.format}-{n}" for n, output in enumerate(OUTPUTS)]
FORMATS = [pytest.param(known, id=name) for name, known in BY_NAME.items()]


def read(known: ToolFormat, pieces: Iterable[str]) -> list[Event]:
    parser = known.parser(TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def said(events: list[Event]) -> dict[str, Any]:
    """Join what was said, and check its order."""
    calls: list[list[Any]] = []
    for event in events:
        match event:
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case Arguments(index, text):
                assert index == len(calls) - 1, "a piece belongs to the call that began last"
                assert text
                assert not calls[index][2], "no arguments behind the end"
                calls[index][1] += text
            case CallEnded(index):
                assert index == len(calls) - 1
                calls[index][2] = True
            case _:
                assert event.text
    return {
        "text": "".join(e.text for e in events if isinstance(e, Text)),
        "thought": "".join(e.text for e in events if isinstance(e, Thought)),
        "calls": calls,
    }


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_the_calls_of_an_answer_are_found(output: Output) -> None:
    found = said(read(BY_NAME[output.format], [output.written]))
    assert (found["text"], found["thought"]) == (output.text, output.thought)
    assert [name for name, _, _ in found["calls"]] == [name for name, _ in output.calls]
    for (_, arguments, is_whole), (_, expected) in zip(found["calls"], output.calls, strict=True):
        assert is_whole is not output.is_cut
        if output.is_cut:
            assert arguments == expected
        else:
            assert json.loads(arguments) == json.loads(expected)
            assert list(json.loads(arguments)) == list(json.loads(expected)), "in their order"


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_wherever_an_answer_is_cut_the_same_is_found(output: Output) -> None:
    known, written = BY_NAME[output.format], output.written
    whole = said(read(known, [written]))
    assert said(read(known, written)) == whole, "character by character"
    for place in range(1, len(written)):
        assert said(read(known, [written[:place], written[place:]])) == whole, written[:place]


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_an_answer_that_ends_early_says_no_more_than_the_whole_one(output: Output) -> None:
    known = BY_NAME[output.format]
    whole = said(read(known, [output.written]))
    for place in range(len(output.written)):
        early = said(read(known, [output.written[:place]]))
        for (name, arguments, _), (whole_name, whole_arguments, _) in zip(early["calls"], whole["calls"], strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
        assert len(early["calls"]) <= len(whole["calls"])


WRITTEN = [
    WrittenCall(
        "edit", {"filename": 'a "b".c', "oldString": "\n  <x>\t", "newString": "東京 🙂\n", "replaceAll": True}
    ),
    WrittenCall("set_config", {"config": {"a": [1, -2.5, None, {"b": False}], "c": {}, "d": "'"}}),
    WrittenCall("empty_args", {}),
]


@pytest.mark.parametrize("known", FORMATS)
def test_calls_that_are_written_are_read_as_they_were(known: ToolFormat) -> None:
    found = said(read(known, known.write(WRITTEN)))
    assert [(name, json.loads(arguments)) for name, arguments, _ in found["calls"]] == [
        (call.name, call.arguments) for call in WRITTEN
    ]
    assert not found["text"]


@pytest.mark.parametrize("known", FORMATS)
def test_a_call_of_a_tool_that_was_not_given_is_text(known: ToolFormat) -> None:
    written = known.write([WrittenCall("launch", {"x": 1})])
    assert said(read(known, f"{written} Well.")) == {"text": f"{written} Well.", "thought": "", "calls": []}


@pytest.mark.parametrize("known", FORMATS)
def test_without_tools_nothing_is_a_call(known: ToolFormat) -> None:
    written = known.write([WrittenCall("get_time", {"city": "Bern"})])
    parser = known.parser(())
    assert said([*parser.push(written), *parser.finish()]) == {"text": written, "thought": "", "calls": []}


@pytest.mark.parametrize("known", FORMATS)
def test_text_is_held_back_only_while_it_may_begin_a_call(known: ToolFormat) -> None:
    parser = known.parser(TOOLS)
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(", world. ") == [Text(", world. ")]
    for mark in known.opening:
        held = parser.push(mark[:-1])
        assert (
            parser.push("#") == [Text(f"{mark[:-1]}#")]
            or "".join(e.text for e in held if isinstance(e, Text)) + "#" == f"{mark[:-1]}#"
        )


# --- random texts ------------------------------------------------------------------------------------------------

CONTENT = "XYZÉ東🙂"  # in no mark
PIECES = [
    *'{}[]()<>|":,=\\', "'", "\n", " ", *CONTENT, "\\u00e9", "\\ud83d", "1", "true", "None", '{"name": "',
    '", "arguments": {', '", "parameters": {', "</tool_call>", "<function=", "<parameter=city>\n", "\n</parameter>\n",
    "</function>", "[ARGS]", "[CALL_ID]", "<tool_call|>", "call:", '<|"|>', "thought", "<|start|>assistant",
    "<|channel|>", "final", "analysis", "commentary", " to=functions.", " <|constrain|>json", "<|message|>", "<|end|>",
    "<|call|>", "<|tool_call_end|>", "city=",
]  # fmt: skip
MARKS = [mark for known in BY_NAME.values() for mark in known.marks]
NAMES = ["get_time", "empty_args", "get_time(", "get_time>", "get_time{"]


def check(known: ToolFormat, text: str, place: int, *, may_call: bool) -> None:
    """Read a text whole, and in two pieces if `place` is not 0; nothing is lost if no tool's name is in it."""
    events = read(known, [text])
    whole = said(events)
    if place:
        assert said(read(known, [text[:place], text[place:]])) == whole, (known.name, text, place)
    if may_call:
        return
    assert not whole["calls"], (known.name, text)
    if known.name in ("gemma", "gpt-oss"):  # they have marks of their own round thoughts, and headers
        passed = "".join(e.text for e in events if isinstance(e, Text | Thought))
        written, kept = ([c for c in t if c in CONTENT] for t in (text, passed))
        assert written == kept, (known.name, text)
    else:
        assert whole["text"] == text, known.name


def pieces_of(known: ToolFormat, *, may_call: bool) -> list[str]:
    return [*PIECES, *MARKS, *[*known.marks, *known.opening, *known.opening_at_start] * 4, *NAMES * (6 * may_call)]


@given(st.data(), st.sampled_from(list(BY_NAME.values())), st.booleans())
@settings(max_examples=100)
def test_no_text_loses_a_character(data: st.DataObject, known: ToolFormat, may_call: bool) -> None:
    pieces = st.sampled_from(pieces_of(known, may_call=may_call)) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    check(known, text, data.draw(st.integers(0, len(text))), may_call=may_call)


@pytest.mark.slow
def test_a_hundred_thousand_texts_lose_no_character() -> None:
    random_ = random.Random(1)
    choices = [(known, may_call) for known in BY_NAME.values() for may_call in (False, False, True)]
    pieces = [pieces_of(known, may_call=may_call) for known, may_call in choices]
    for i in range(100_000):
        known, may_call = choices[i % len(choices)]
        text = "".join(random_.choices(pieces[i % len(choices)], k=random_.randrange(1, 12)))
        check(known, text, random_.randrange(len(text) + 1) if i % 4 == 0 else 0, may_call=may_call)
