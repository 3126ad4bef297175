"""Calls of tools in an answer: what is shown as text, where a grammar begins, and what of a prompt is the client's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.engine.tool_schemas import TOOLS as REAL
from disco_daemon.engine import wire
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama.calling import Calling
from disco_daemon.engine.llama.calls import CallingText, OpeningMark
from disco_daemon.engine.llama.grammar import grammar_of_calls
from disco_daemon.engine.llama.refusals import FormatError, ToolsError
from disco_daemon.engine.llama.sampler import Sampler
from disco_daemon.engine.llama.template import ChatTemplate
from disco_daemon.engine.llama.text import TextStream
from disco_daemon.engine.llama.thinking import ThinkingText
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.tools.detect import TemplateTools, detect
from disco_daemon.tools.format import Tool, WrittenCall, tools_of
from disco_daemon.tools.formats import BY_NAME, GENERIC
from disco_daemon.types import ToolUse
from disco_daemon.types.thought_marks import ThoughtLimit
from tests.fixtures.gbnf import Language

TEMPLATES = Path(__file__).parents[2] / "fixtures/templates/tools"
HERMES = BY_NAME["hermes"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUESTED = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": CITY}}
TOOLS = tools_of([REQUESTED])
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'


def stream(*, thinks: bool = False, stop: Sequence[str] = (), begun: str = "") -> CallingText:
    return CallingText(ThinkingText() if thinks else TextStream(), HERMES.parser(TOOLS), stop, begun)


def read(text: CallingText, pieces: Sequence[bytes]) -> tuple[str, list[tuple[str, str]], str]:
    """Return the text, the calls and the thoughts of an answer in these pieces."""
    shown, thought, calls = "", "", dict[int, list[str]]()
    for piece in (*pieces, None):
        shown += text.flush() if piece is None else text.feed(piece)
        thought += text.take_thought()
        for number, name, arguments in text.take_calls():
            call = calls.setdefault(number, ["", ""])
            call[0] += name
            call[1] += arguments
    return shown, [(name, arguments) for name, arguments in calls.values()], thought


# --- text and calls -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 200)))
@settings(max_examples=50)
def test_an_answer_is_the_same_text_and_calls_however_its_bytes_are_cut(cuts: list[int]) -> None:
    data = f"<think>\nHm…</think>\nLet me look 🔍. {CALL}".encode()
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert read(stream(thinks=True), pieces) == ("Let me look 🔍. ", [("look", '{"city": "Paris"}')], "Hm…")


def test_arguments_are_shown_as_they_arrive() -> None:
    text, at = stream(), CALL.index('"city"')
    assert (text.feed(CALL[:at].encode()), text.take_calls()) == ("", [(0, "look", "{")])
    assert (text.feed(b'"city": '), text.take_calls()) == ("", [(0, "", '"city": ')])
    assert (text.feed(b'"Par'), text.take_calls()) == ("", [(0, "", '"Par')])


def test_what_is_no_call_is_text_to_the_letter() -> None:
    said = 'A <tool_call>{"name": "nobody"}</tool_call> is <tool'
    assert read(stream(), [said[:20].encode(), said[20:].encode()]) == (said, [], "")


def test_what_was_begun_is_not_shown_again() -> None:
    assert read(stream(begun="Well, <tool"), [b"_box>"]) == ("_box>", [], "")
    assert read(stream(begun=CALL[:40]), [CALL[40:].encode()]) == ("", [("look", '{"city": "Paris"}')], "")


def test_stop_strings_count_in_the_text_and_not_in_a_call() -> None:
    text = stream(stop=["Paris"])
    assert read(text, [CALL.encode()])[1] == [("look", '{"city": "Paris"}')]
    assert not text.stopped
    assert read(text := stream(stop=["Paris"]), [b"Go to Paris"])[0] == "Go to "
    assert text.stopped


def test_ids_are_known_where_the_text_is_exactly_theirs() -> None:
    text, whole = stream(), []
    for piece in (b"Sure", b" <tool", b"box> ", CALL.encode()):
        text.feed(piece)
        whole.append(text.whole)
    assert whole == [True, False, True, False]


def test_thoughts_that_belong_to_the_format_are_kept_apart_without_tools_too() -> None:
    calling = Calling(TemplateTools(BY_NAME["gpt-oss"], shows_tools=True, writes_calls=True, writes_results=True))
    assert calling.reads(None)
    assert not BLIND.reads(None)
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    assert read(calling.text(None, TextStream(), ()), [said[:30].encode(), said[30:].encode()]) == ("Hello", [], "Hm.")
    assert read(calling.text(None, TextStream(), ()), [b'{"a": 1}']) == ('{"a": 1}', [], "")


# --- where a grammar begins ---------------------------------------------------------------------------------------


def mark(vocabulary: Vocabulary, name: str = "hermes", *, thinks: bool = False) -> OpeningMark:
    inner = ThinkingText() if thinks else TextStream()
    return OpeningMark(BY_NAME[name], inner, vocabulary.piece, vocabulary.answer_tokens)


def opened(found: OpeningMark, vocabulary: Vocabulary, text: str) -> list[str]:
    return [begun for token in vocabulary.tokenize(text) if (begun := found.push(token))]


def test_a_call_begins_at_its_mark_and_not_within_a_thought(vocabulary: Vocabulary) -> None:
    assert "".join(opened(mark(vocabulary), vocabulary, "Well, <tool_call>")).startswith("<tool_call>")
    thought = "<think>A <tool_call> may help.</think>\n"
    assert opened(mark(vocabulary, thinks=True), vocabulary, thought + "No.") == []
    assert len(opened(mark(vocabulary, thinks=True), vocabulary, thought + "<tool_call>")) == 1
    assert opened(mark(vocabulary), vocabulary, "<tool_box> and <tool") == []


def test_some_marks_count_at_the_begin_only(vocabulary: Vocabulary) -> None:
    assert len(opened(mark(vocabulary, "generic"), vocabulary, '\n{"name": "look')) == 1
    assert opened(mark(vocabulary, "generic"), vocabulary, 'It is {"name": "look') == []


def test_a_grammar_that_has_no_room_for_a_thought_ends_its_budget_and_no_process(vocabulary: Vocabulary) -> None:
    """Whoever asks for both: a client, or a paired machine that sends both in one message."""
    budget = vocabulary.thought_budget(ThoughtLimit(family="think", n_tokens=0, is_begun=True))
    assert budget is not None
    assert budget.forced is not None
    request = wire.Generate(id="r", messages=[])
    held = Sampler(request, vocabulary.n_tokens, vocab=vocabulary.handle, grammar='root ::= "a"+', budget=budget)
    assert held.forced is None
    assert allows(held, vocabulary, "a")
    assert not allows(held, vocabulary, "nonsense")
    held.close()


def lazy(vocabulary: Vocabulary, answer: str = "") -> Sampler:
    use = ToolUse(tools=(REQUESTED,), allowed=("look",))
    grammar = grammar_of_calls(HERMES.grammar(TOOLS, parallel=False))
    return Sampler(
        wire.Generate(id="r", messages=[], tools=use, temperature=0.0), vocabulary.n_tokens,
        vocabulary.tokenize(answer), vocab=vocabulary.handle, grammar=grammar, mark=mark(vocabulary),
    )  # fmt: skip


def allows(sampler: Sampler, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the likeliest token, if that is the first one of a text, is drawn."""
    logits = np.zeros(vocabulary.n_tokens, np.float32)
    logits[token := vocabulary.tokenize(text)[0]] = 100.0
    return sampler.draw(logits) == token


def test_the_grammar_holds_from_the_mark_on(vocabulary: Vocabulary) -> None:
    free, held = lazy(vocabulary, "Sure."), lazy(vocabulary, "Sure. <tool_call>\n")
    assert free.greedy
    assert allows(free, vocabulary, "nonsense")
    assert not held.greedy
    assert allows(held, vocabulary, "{")
    assert not allows(held, vocabulary, "nonsense")
    for sampler in (free, held):
        sampler.close()


@pytest.mark.parametrize("said", ["<tool_call>nonsense", '<tool_call>\n{"name": "nobody"', "<tool_call>" * 3])
def test_what_begins_like_a_call_and_is_none_ends_no_process(vocabulary: Vocabulary, said: str) -> None:
    sampler = lazy(vocabulary, said)
    assert allows(sampler, vocabulary, "nonsense") or said.endswith("<tool_call>")
    sampler.close()


def test_a_second_mark_is_looked_for_where_the_first_one_was_none(vocabulary: Vocabulary) -> None:
    sampler = lazy(vocabulary, "<tool_call>nonsense <tool_call>\n")
    assert not allows(sampler, vocabulary, "nonsense")
    sampler.close()


# --- grammars of several tools ------------------------------------------------------------------------------------


def tool(name: str, **properties: Any) -> Tool:
    return tools_of([{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": properties, "required": list(properties), "$defs": {"of": {"enum": [name]}},
    }}}])[0]  # fmt: skip


INNER = {
    "type": "object",
    "properties": {"k": {"enum": ["yes", "no"]}},
    "required": ["k"],
    "additionalProperties": False,
}
REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "a member": ("#/properties/a", {}),
    "within a member": ("#/properties/list/items", {}),
    "an alternative": ("#/$defs/of/anyOf/0", {"$defs": {"of": {"anyOf": [INNER]}}}),
    "definitions": ("#/definitions/of", {"definitions": {"of": INNER}}),
    "a name with signs": ("#/$defs/a%20b~1c%25", {"$defs": {"a b/c%": INNER}}),
    "an anchor": ("#of", {"$defs": {"x": {"$anchor": "of", **INNER}}}),
    "an address": ("https://own.example/s#/properties/a", {"$id": "https://own.example/s"}),
    "an address within": ("of.json", {"$id": "https://own.example/s", "$defs": {"x": {"$id": "of.json", **INNER}}}),
    "by way of others": ("#/$defs/b", {"$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/properties/a"}}}),
}


@pytest.mark.parametrize("reference", sorted(REFERENCES))
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_an_argument_may_refer_to_anything_in_its_tools_schema(name: str, reference: str) -> None:
    to, beside = REFERENCES[reference]
    parameters = {
        "type": "object", "properties": {"a": INNER, "list": {"type": "array", "items": INNER}, "x": {"$ref": to}},
        "required": ["x"], "additionalProperties": False, **beside,
    }  # fmt: skip
    tools = tools_of([{"type": "function", "function": {"name": "look", "parameters": parameters}}])
    known = BY_NAME[name]
    found = Language(grammar_of_calls(known.grammar(tools, parallel=False)))
    assert found.allows(known.write([WrittenCall("look", {"x": {"k": "yes"}})]))
    for wrong in ({"k": "maybe"}, "yes", {}, 1):
        assert not found.allows(known.write([WrittenCall("look", {"x": wrong})])), wrong


def test_definitions_of_one_name_in_two_tools_are_two() -> None:
    ref = {"$ref": "#/$defs/of"}
    grammar = grammar_of_calls(HERMES.grammar([tool("a", x=ref), tool("b", x=ref)], parallel=False))
    assert '"\\"a\\""' in grammar
    assert '"\\"b\\""' in grammar


def test_a_schema_that_no_grammar_can_say_leaves_the_arguments_free_unless_the_call_is_forced() -> None:
    strange = [tool("a", x={"type": "nonsense"}), tool("b", x={"type": "integer"})]
    with pytest.raises(GrammarError, match="it has to be one of JSON's types"):
        grammar_of_calls(HERMES.grammar(strange, parallel=False))
    loose = grammar_of_calls(HERMES.grammar(strange, parallel=False), lenient=True)
    assert '"\\"x\\"" space ":" space call-value-2-integer' in loose or '"\\"x\\"" space ":" space integer' in loose


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_llama_cpp_understands_the_calls_of_twenty_real_tools_in_each_format(vocabulary: Vocabulary, name: str) -> None:
    for parallel in (False, True):
        grammar = grammar_of_calls(BY_NAME[name].grammar(tools_of(REAL), parallel=parallel))
        request = wire.Generate(id="r", messages=[])
        Sampler(request, vocabulary.n_tokens, vocab=vocabulary.handle, grammar=grammar).close()


WORDS = st.sampled_from(["a", "string", "x-y", 'q"', "é\n", "root", "", "\\\\", "[", "$defs", "日本"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), WORDS)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "nonsense"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named, several = st.dictionaries(WORDS, inner, max_size=3), st.lists(inner, max_size=3)
    return st.fixed_dictionaries({}, optional={
        "type": KINDS | st.lists(KINDS, max_size=3), "properties": named, "required": st.lists(WORDS, max_size=3),
        "additionalProperties": st.booleans() | inner, "enum": st.lists(VALUES, max_size=3), "const": VALUES,
        "anyOf": several, "oneOf": several, "allOf": several, "items": inner | several,
        "$ref": st.sampled_from(["#/$defs/a", "#/properties/a", "#", "#/nowhere", "https://example.invalid/x"]),
        "$defs": named, "minItems": st.integers(0, 3), "maxItems": st.integers(0, 3), "maxLength": st.integers(0, 9),
        "pattern": st.sampled_from(["^a+$", "^(a|b{2,3})$", "a", "^[", "^\\\\d$", '^"$']),
        "format": st.sampled_from(["date", "uuid", "email"]), "not": inner,
    })  # fmt: skip


@given(st.recursive(keywords(st.just({})), keywords, max_leaves=8), st.sampled_from(sorted(BY_NAME)), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_whatever_schema_a_client_writes_is_a_grammar_or_refused(
    vocabulary: Vocabulary, of: dict[str, Any], name: str, forced: bool
) -> None:
    schema = {"type": "object", "properties": {"x": of}, "required": ["x"], "$defs": of.get("$defs", {})}
    odd = {"type": "function", "function": {"name": "look", "parameters": schema}}
    calling = Calling(TemplateTools(BY_NAME[name], shows_tools=True, writes_calls=True, writes_results=True))
    try:
        grammar = calling.grammar(ToolUse(tools=(odd,), allowed=("look",), forced=forced))
        request = wire.Generate(id="r", messages=[])
        Sampler(request, vocabulary.n_tokens, vocab=vocabulary.handle, grammar=grammar).close()
    except FormatError:
        return


# --- prompts ------------------------------------------------------------------------------------------------------

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}]},
    {"role": "tool", "tool_call_id": "1", "name": "look", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "name": "look", "content": "rainy"},
]  # fmt: skip
BLIND = Calling(TemplateTools(GENERIC, shows_tools=False, writes_calls=False, writes_results=False))
FORCED = ToolUse(tools=(REQUESTED,), allowed=("look",), forced=True)


def test_a_template_that_knows_no_tools_gets_them_and_calls_and_results_as_text() -> None:
    system, user, called, results = BLIND.messages(HISTORY, FORCED)
    assert system["role"] == "system"
    assert "look" in system["content"]
    assert user == HISTORY[0]
    assert called == {"role": "assistant", "content": GENERIC.write([WrittenCall("look", {"city": "Rome"})])}
    assert results["role"] == "user"
    assert [json.loads(line)["tool_response"]["content"] for line in results["content"].split("\n")] == [
        "sunny",
        "rainy",
    ]
    assert BLIND.shown(FORCED) is None
    assert [m["role"] for m in BLIND.messages([{"role": "system", "content": "Be brief."}], FORCED)] == ["system"]


def test_mistrals_templates_get_ids_of_nine_characters_and_calls_and_results_still_belong_together() -> None:
    template = TEMPLATES / "mistralai-Mistral-Nemo-Instruct-2407.jinja"
    chat = ChatTemplate(template.read_text(), "<s>", "</s>")
    calling = Calling(detect(lambda messages, tools: chat.render(messages, tools=tools)))
    long = "call_0123456789abcdef01234567"
    call = {"id": long, "type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": long, "name": "look", "content": "sunny"},
    ]
    shown: list[Any] = calling.messages(said, FORCED)
    assert shown[1]["tool_calls"][0]["id"] == shown[2]["tool_call_id"]
    assert "sunny" in chat.render(shown, tools=calling.shown(FORCED))


def test_a_model_that_knows_no_tools_has_no_grammar_for_calls_of_its_own() -> None:
    by_itself = ToolUse(tools=(REQUESTED,), allowed=("look",))
    with pytest.raises(ToolsError, match="knows no tools"):
        BLIND.grammar(by_itself)
    assert BLIND.messages(HISTORY[:1], by_itself) == HISTORY[:1], "a server's prompt is still counted"


SHOWS = ChatTemplate(
    "{{ tools | tojson }}{% for m in messages %}<|s|>{{ m.role }} {{ m.name }}{{ m.tool_call_id }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<|s|>", "", "",
)  # fmt: skip


@given(st.lists(st.sampled_from(["<|s|>", "a", "<|", "s|>", '"', "é"]), max_size=5))
@settings(max_examples=50)
def test_neither_tools_nor_calls_nor_results_can_spell_a_control_token(parts: list[str]) -> None:
    said = "".join(parts)
    spoken: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"c " + said: [said]}}}]},
        {"role": "tool", "content": said, "name": said, "tool_call_id": said},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "description": said}}]
    found = SHOWS.segments(spoken, ["<|s|>"], tools=tools)
    assert "".join(text for text, _ in found) == SHOWS.render(spoken, tools=tools)
    assert sum(text.count("<|s|>") for text, is_template in found if is_template) == 3
