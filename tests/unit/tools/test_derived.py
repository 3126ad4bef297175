"""Formats whose marks are read off a template: what the template itself writes is what has to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.engine.llama.grammar import grammar_of_calls
from disco_daemon.engine.llama.template import ChatTemplate
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.tools.detect import TemplateTools, detect
from disco_daemon.tools.format import Arguments, CallBegun, CallEnded, Event, Text, Tool, WrittenCall
from disco_daemon.tools.framed import Framed
from disco_daemon.tools.tagged import Tagged
from tests.unit.tools.test_grammars import SEARCH, Drawing, Matcher, fits

Form = Tagged | Framed
FOLDERS = [Path(__file__).parents[2] / "fixtures" / "templates" / name for name in ("calls", "tools")]
BAR = "\uff5c"
MARKS = {  # what opens calls, stands in front of a name, and closes calls
    "Apertus-8B-Instruct": ("<|tools_prefix|>[", '{"', "]<|tools_suffix|>"),
    "Apriel-1.6-15b-Thinker-fixed": ("<tool_calls>[", '{"name": "', "]</tool_calls>"),
    "GigaChat3.1-10B-A1.8B": ("<|function_call|>", '{"name": "', ""),
    "MiniMax-M1": ("<tool_calls>\n", '{"name": "', "</tool_calls>"),
    "ibm-granite-granite-3.3-2B-Instruct": ("<|tool_call|>[", '{"name": "', "]"),
    "meetkai-functionary-medium-v3.1": ("", "<function=", ""),
    "moonshotai-Kimi-K2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        "<|tool_calls_section_end|>",
    ),
    "Kimi-K2-Instruct": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", "<|tool_calls_section_end|>"),
    "Kimi-K2-Thinking": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", "<|tool_calls_section_end|>"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (
        f"<{BAR}tool\u2581calls\u2581begin{BAR}>",
        f"<{BAR}tool\u2581call\u2581begin{BAR}>function<{BAR}tool\u2581sep{BAR}>",
        f"<{BAR}tool\u2581calls\u2581end{BAR}>",
    ),
    "deepseek-ai-DeepSeek-V3.1": (
        f"<{BAR}tool\u2581calls\u2581begin{BAR}>",
        f"<{BAR}tool\u2581call\u2581begin{BAR}>",
        f"<{BAR}tool\u2581calls\u2581end{BAR}>",
    ),
    "llama-cpp-deepseek-r1": (
        f"<{BAR}tool\u2581calls\u2581begin{BAR}>",
        f"<{BAR}tool\u2581call\u2581begin{BAR}>function<{BAR}tool\u2581sep{BAR}>",
        f"<{BAR}tool\u2581calls\u2581end{BAR}>",
    ),
    "openbmb-MiniCPM5-1B": ("", '<function name="', ""),
    "upstage-Solar-Open-100B": ("<|tool_calls|>", "<|tool_call:begin|>\0<|tool_call:name|>", "<|calls|>"),
    "unsloth-Apriel-1.5": ("<tool_calls>[", '{"name": "', "]</tool_calls>"),
    "ByteDance-Seed-OSS": ("<seed:tool_call>", "<function=", "</seed:tool_call>"),
    "GLM-4.6": ("", "<tool_call>", ""),
    "GLM-4.7-Flash": ("", "<tool_call>", ""),
    "MiniMax-M2": ("<minimax:tool_call>", '<invoke name="', "</minimax:tool_call>"),
    "Qwen3-Coder": ("<tool_call>", "<function=", "</tool_call>"),
    "Qwen3.5-4B": ("<tool_call>", "<function=", "</tool_call>"),
    "deepseek-ai-DeepSeek-V3.2": (
        f"<{BAR}DSML{BAR}function_calls>",
        f'<{BAR}DSML{BAR}invoke name="',
        f"</{BAR}DSML{BAR}function_calls>",
    ),
    "deepseek-ai-DeepSeek-V4": (
        f"<{BAR}DSML{BAR}tool_calls>",
        f'<{BAR}DSML{BAR}invoke name="',
        f"</{BAR}DSML{BAR}tool_calls>",
    ),
    "inclusionai-ling-3.0-flash": ("", "<tool_call>", ""),
    "poolside-Laguna-XS.2": ("", "<tool_call>", ""),
}
WRITE_ONE = {"GigaChat3.1-10B-A1.8B"}  # call a turn
SHOW_NO_TOOLS = {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"}
EDIT = Tool(
    "edit",
    "Edits.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "force": {"type": "boolean"}},
        "required": ["path"],
    },
)
SET = Tool("set", "Sets.", {"type": "object", "properties": {"to": {"type": "object"}, "n": {"type": "integer"}}})
NOW = Tool("now", "Tells the time.", {"type": "object", "properties": {}})
TOOLS = (EDIT, SET, NOW)
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("edit", {"path": "a b.txt"})],
    [("edit", {"path": "12345", "text": "Zürich & \"so\" 'on' \\ 東 🙂"})],
    [("edit", {"path": "p", "text": "if x < 1:\n    y = '<a>'\n\t{\"k\": 1}\n\nend"})],
    [("set", {"to": {"a": [1, -2.5, {"b": "c"}], "d": {}}, "n": -12})],
    [("now", {})],
    [("edit", {"path": "p"}), ("set", {"n": 2}), ("edit", {"path": "q"})],
]


@lru_cache
def template_of(name: str) -> ChatTemplate:
    path = next(path for folder in FOLDERS if (path := folder / f"{name}.jinja").exists())
    return ChatTemplate(path.read_text("utf-8"), "<s>", "</s>")


@lru_cache
def found_in(name: str) -> tuple[TemplateTools, Form]:
    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return template_of(name).render(messages, tools=tools)

    found = detect(render)
    assert isinstance(found.format, Tagged | Framed)
    return found, found.format


def written_by(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template itself writes for the calls of a turn, from the first mark to the last."""
    asked = [
        {"id": f"{n}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for n, (tool, arguments) in enumerate(calls)
    ]
    shown = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    found, form = found_in(name)
    if not found.writes_calls:
        return form.write([WrittenCall(tool, arguments) for tool, arguments in calls])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Zq7"}, {"role": "assistant", "content": ""}]
    messages[1]["tool_calls"] = asked
    text = template_of(name).render(messages, tools=shown).partition("Zq7")[2]
    marks = form.tags if isinstance(form, Tagged) else form.frame
    last = marks.closing or marks.end
    return text[text.index(marks.opening or marks.call) : text.rindex(last) + len(last)]


def read(form: Form, pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> list[Event]:
    parser = form.parser(tools)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def said(events: list[Event]) -> tuple[list[tuple[str, str]], str]:
    """The calls, each whole, and the text beside them."""
    calls = [
        (e.name, "".join(a.text for a in events if isinstance(a, Arguments) and a.index == e.index))
        for e in events
        if isinstance(e, CallBegun) and CallEnded(e.index) in events
    ]
    return calls, "".join(e.text for e in events if isinstance(e, Text))


@pytest.mark.parametrize("name", MARKS)
def test_the_marks_of_a_template_are_found(name: str) -> None:
    found, form = found_in(name)
    marks = form.tags if isinstance(form, Tagged) else form.frame
    assert (marks.opening, marks.call, marks.closing) == MARKS[name]
    assert found.shows_tools is (name not in SHOW_NO_TOOLS)
    told = form.instructions(TOOLS)
    assert bool(told) is not found.shows_tools
    assert not told or (marks.opening in told and all(tool.name in told for tool in TOOLS))
    assert found.writes_calls is (name != "ibm-granite-granite-3.3-2B-Instruct")
    assert found.writes_results


@pytest.mark.parametrize("calls", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("name", MARKS)
def test_what_a_template_writes_is_read_wherever_it_is_cut(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    form, text = found_in(name)[1], written_by(name, calls)
    calls = calls[: 1 if name in WRITE_ONE else None]
    whole = said(read(form, [text]))
    assert [(tool, json.loads(arguments)) for tool, arguments in whole[0]] == calls, text
    assert not whole[1]
    assert said(read(form, list(text))) == whole, "character by character"
    for place in range(1, len(text)):
        assert said(read(form, [text[:place], text[place:]])) == whole, text[:place]


@pytest.mark.parametrize("name", MARKS)
def test_a_call_of_a_tool_that_was_not_given_is_text(name: str) -> None:
    form, text = found_in(name)[1], written_by(name, CALLS[2])
    for place in range(len(text)):
        assert said(read(form, [text[:place], f"{text[place:]} Well."], (SET, NOW))) == ([], f"{text} Well.")


@pytest.mark.parametrize("name", MARKS)
def test_calls_that_are_written_are_read_as_they_were(name: str) -> None:
    form = found_in(name)[1]
    for calls in CALLS:
        written = form.write([WrittenCall(tool, arguments) for tool, arguments in calls])
        found, text = said(read(form, [f"Well. {written}"]))
        assert [(tool, json.loads(arguments)) for tool, arguments in found] == calls
        assert text == "Well. "


@pytest.mark.parametrize("name", MARKS)
def test_whatever_the_grammar_lets_through_is_calls_by_their_schemas(name: str) -> None:
    form, tools = found_in(name)[1], (SEARCH, *TOOLS)
    schemas = {each.name: each.parameters for each in tools}
    for seed in range(60):
        drawing = Drawing(form.grammar(tools, parallel=seed % 2 == 0), seed)
        events = read(form, [drawing.text], tools)
        found, text = said(events)
        assert found, drawing.text
        assert len(found) == sum(isinstance(e, CallBegun) for e in events), drawing.text
        assert not text, drawing.text
        for tool, arguments in found:
            assert fits(json.loads(arguments), schemas[tool], schemas[tool]), (drawing.text, arguments)


@pytest.mark.parametrize("name", MARKS)
def test_llama_cpp_lets_through_what_the_template_writes(name: str, vocabulary: Vocabulary) -> None:
    form, two = found_in(name)[1], written_by(name, CALLS[5])
    with closing(Matcher(vocabulary, grammar_of_calls(form.grammar(TOOLS, parallel=True)))) as matcher:
        odd = {"ByteDance-Seed-OSS": [3], "openbmb-MiniCPM5-1B": [3]}.get(name, [])  # it writes objects as Python does
        assert [n for n, calls in enumerate(CALLS) if not matcher.matches(written_by(name, calls))] == odd
        assert not matcher.matches(f"{two}!")
        assert not matcher.matches(form.write([WrittenCall("launch", {})])), "a tool that was not given"
    with closing(Matcher(vocabulary, grammar_of_calls(form.grammar(TOOLS, parallel=False)))) as matcher:
        assert matcher.matches(written_by(name, CALLS[0]))
        assert matcher.matches(two) is (name in WRITE_ONE)


@pytest.mark.parametrize("name", MARKS)
def test_a_forced_call_begins_as_the_template_writes_it(name: str) -> None:
    form = found_in(name)[1]
    begun = "".join(form.begin([EDIT]).split())
    assert "".join(written_by(name, CALLS[0]).split()).startswith(begun)


@pytest.mark.parametrize("before", ["", "\n", " "])
@pytest.mark.parametrize("behind", ["", "\n", " "])
def test_white_space_beside_a_section_of_text_is_no_part_of_it(before: str, behind: str) -> None:
    form, texts = found_in("openbmb-MiniCPM5-1B")[1], [written_by("openbmb-MiniCPM5-1B", calls) for calls in CALLS]
    written = next(text for text in texts if "<![CDATA[" in text)
    whole = said(read(form, [written]))
    spaced = written.replace("<![CDATA[", f"{before}<![CDATA[").replace("]]>", f"]]>{behind}")
    assert said(read(form, [spaced])) == said(read(form, list(spaced))) == whole


def test_a_template_that_escapes_some_texts_has_no_tagged_format() -> None:
    source = (FOLDERS[0] / "openbmb-MiniCPM5-1B.jinja").read_text("utf-8").replace("<![CDATA[", "<![TEXT[")
    template = ChatTemplate(source, "<s>", "</s>")
    assert detect(lambda messages, tools: template.render(messages, tools=tools)).format.name == "generic"


def test_a_template_whose_tags_are_not_alike_in_both_calls_has_no_tagged_format() -> None:
    source = (FOLDERS[0] / "GLM-4.6.jinja").read_text("utf-8").replace("+ tc.name", "~ loop.index ~ tc.name")
    template = ChatTemplate(source, "<s>", "</s>")
    assert detect(lambda messages, tools: template.render(messages, tools=tools)).format.name == "generic"


def test_calls_that_a_template_refuses_are_no_format_of_its_own() -> None:
    source = (FOLDERS[0] / "meetkai-functionary-medium-v3.2.jinja").read_text("utf-8")
    template = ChatTemplate(source, "<s>", "</s>")  # it adds a text to the arguments; they are told as JSON instead
    found = detect(lambda messages, tools: template.render(messages, tools=tools))
    assert found.format.name == "generic"
    assert not found.shows_tools


def test_white_space_within_a_frame_is_the_models() -> None:
    form = found_in("Apriel-1.6-15b-Thinker-fixed")[1]
    text = (
        '<tool_calls>\n[{"name":"edit","arguments":{"path":"p"}},{ "name" : "now", "arguments" : {} }\n]</tool_calls>'
    )
    assert said(read(form, list(text))) == ([("edit", '{"path":"p"}'), ("now", "{}")], "")
