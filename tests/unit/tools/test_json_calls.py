from __future__ import annotations

from disco_daemon.tools.format import Arguments, CallBegun, CallEnded, Event, Text, Tool, ToolParser
from disco_daemon.tools.json_calls import Generic, Hermes

ADD = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '{"name": "add", "arguments": {"a": 1}}'


def read(parser: ToolParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = Hermes().parser([ADD])
    assert parser.push("Hm. <tool") == [Text("Hm. ")]
    assert parser.push('_call>\n{"name": "add", "arguments": {"a"') == [CallBegun(0, "add"), Arguments(0, '{"a"')]
    assert parser.push(": 1") == [Arguments(0, ": 1")]
    assert parser.push("}}\n</tool_call>\n") == [Arguments(0, "}"), CallEnded(0)]
    assert parser.finish() == []


def test_a_forced_call_of_a_model_without_tools_is_an_object_and_nothing_else() -> None:
    whole: list[Event] = [CallBegun(0, "add"), Arguments(0, '{"a": 1}'), CallEnded(0)]
    assert read(Generic().parser([ADD]), CALL) == whole
    assert read(Generic().parser([ADD]), f"Well: {CALL}") == [Text(f"Well: {CALL}")]
