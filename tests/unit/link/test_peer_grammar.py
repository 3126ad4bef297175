"""A grammar from another machine reaches llama.cpp only in the form that disco writes: others end the process there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama.ambiguity import noted, readings
from disco_daemon.engine.llama.grammar import grammar_of, grammar_of_calls, grammar_of_others
from disco_daemon.link.protocol import AnswerFailed, BadFrameError, BeginDrawing, DrawRules, OpenAnswer, decode, frame
from disco_daemon.link.rows.content import ContentManager, credits_for
from disco_daemon.link.rows.gbnf import MAX_GRAMMAR, MAX_NESTED, check_grammar
from disco_daemon.tools.format import tools_of
from disco_daemon.tools.formats import BY_NAME


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": of}}


# The first three end llama.cpp's process by a signal, the fourth never ends (seen with llama-cpp-python 0.3.36).
HOSTILE = {
    "groups without an end": "root ::= " + "(" * 100_000,
    "groups nested deeply": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "a token that is none": "root ::= <[99999999]>",
    "from 5 to 2 times": 'root ::= "a"{5,2}',
    "another token": "root ::= !<[5]>",
    "a token's text": "root ::= <think>",
    "a billion times": 'root ::= "a"{1000000000}',
    "from 2001 times": 'root ::= "a"{2001,}',
    "up to 9999 times": 'root ::= "a"{0,9999}',
    "minus one time": 'root ::= "a"{-1}',
    "a text that ends in C": 'root ::= "a"\0 x',
    "a text with such an end": 'root ::= "a\0"',
    "a text without an end": 'root ::= "a',
    "a text over two lines": 'root ::= "a\nb"',
    "a class without an end": "root ::= [a-z",
    "an escape without its digits": 'root ::= "\\x"',
    "an escape of half a character": 'root ::= "\\uD800"',
    "a character that is none": "root ::= [^\\U00110000]",
    "an escape that is none": 'root ::= "\\q"',
    "a group too many closed": 'root ::= "a")',
    "a group that is not": 'root ::= ("a"',
    "one deeper than allowed": "root ::= " + "(" * (MAX_NESTED + 1) + '"a"' + ")" * (MAX_NESTED + 1),
    "another sign": "root ::= a & b",
    "too long": 'root ::= "' + "a" * MAX_GRAMMAR + '"',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_grammar_that_could_end_the_process_ends_its_answer_only(text: str) -> None:
    with pytest.raises(BadFrameError):
        check_grammar(text)
    manager = ContentManager(4, 100, 50, 4, credits_for(4))
    manager.open(1, OpenAnswer(id="a", tokens=(1, 2)), 0)
    manager.open(1, OpenAnswer(id="b", tokens=(1, 2)), 0)
    [failed] = manager.begin(1, BeginDrawing(id="a", sampling=DrawRules(grammar=text))).send
    assert isinstance(failed, AnswerFailed)
    assert (failed.reason, failed.your_fault) == ("bad_grammar", True)
    assert not manager.begin(1, BeginDrawing(id="b", sampling=DrawRules())).ended


def written() -> dict[str, str]:
    """Grammars that disco writes: of schemas that people ask for, of patterns, and of calls in all formats."""
    of: list[Any] = [
        {"type": "string", "minLength": 2, "maxLength": 1000},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 1000},
        {"type": "string", "pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"},
        {"type": "string", "pattern": r"^[^\d\]]\x41\u00e9$"},
        {"type": "string", "pattern": r"^\$\^\-\/.$"},
        {"enum": [f"v{i}" for i in range(300)]},
        {"type": "number", "minimum": -7, "maximum": 12.5},
        {"type": "integer", "minimum": 3},
        {"const": 'a"\\\n\u20ac]{'},
        {"enum": ["é", "\U0001f600", "\x07", "]", None, 1.5]},
        {"type": "string", "format": "date-time"},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(30)}, "required": ["p3"]},
    ]
    found = {f"schema {i}": grammar_of(schema(one)) for i, one in enumerate(of)}
    found["any"] = grammar_of({"type": "json_object"})
    found["choice"] = grammar_of({"type": "choice", "choice": ["yes", 'no "', "\u20ac"]})
    parameters = {"type": "object", "properties": {"where": {"type": "string"}, "n": {"type": "integer"}}}
    functions = [{"name": "look-up", "parameters": parameters}, {"name": "go_on", "parameters": {"type": "object"}}]
    tools = tools_of([{"type": "function", "function": one} for one in functions])
    for name, kind in BY_NAME.items():
        found[f"calls {name}"] = grammar_of_calls(kind.grammar(tools, parallel=True))
    return found


@pytest.mark.parametrize(("name", "text"), written().items())
def test_what_disco_itself_writes_is_taken(name: str, text: str) -> None:
    check_grammar(text)
    assert readings(grammar_of_others(text)) == readings(text), "what its note says is counted again"


DOUBLING = 'root ::= s\ns ::= "x" s "a" | "x" s "b" | "x"'
MULTIPLYING = {
    "by each character": DOUBLING,
    "in each group": 'root ::= ("x" root "a" | "x" root "b" | "x")',
    "by a choice of two letters": 'root ::= [xy] root "a" | [xz] root "b" | "x"',
    "in rules that hold themselves at their head": 'root ::= root "x" | "x"',
    "behind a comment that opens a text": 'root ::= s # "\ns ::= "x" s "a" | "x" s "b" | "x"\nt ::= "#"',
    "behind a second note": DOUBLING + " # readings: 2",
    "by blanks, of which one token has 64": 'root ::= " " root "a" | " " root "b" | " "',
}


@pytest.mark.parametrize("note", ["", " # readings: 1"])
@pytest.mark.parametrize("text", MULTIPLYING.values(), ids=MULTIPLYING)
def test_a_grammar_whose_readings_multiply_is_refused_whatever_it_says_of_itself(text: str, note: str) -> None:
    """One token of an answer that is to be followed would hold llama.cpp, and everybody's answers, for ever."""
    check_grammar(text + note)
    with pytest.raises(GrammarError, match="too many readings"):
        grammar_of_others(text + note)


def test_a_large_schema_that_holds_itself_is_counted_again_and_taken() -> None:
    node = {"$ref": "#"}
    properties = {**{f"p{i}": {"type": "string"} for i in range(60)}, "left": node, "right": node}
    text = grammar_of(schema({"type": "object", "properties": properties, "required": ["p0"]}))
    assert grammar_of_others(text) == noted(text[: text.rindex(" # readings")], readings(text))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(['"x"', "[a-c]", "root", "a", " ::= ", "\n", "|", "(", ")", "*", "{2}", "+", "?", "."]))
)
def test_whatever_is_let_through_is_counted_or_refused(signs: list[str]) -> None:
    text = "root ::= " + " ".join(signs)
    try:
        check_grammar(text)
        assert readings(grammar_of_others(text)) >= 0
    except (BadFrameError, GrammarError):
        return


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='rot:= "[]()|{}*+?<>!\\x9a,-\n#\0', max_size=60))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        check_grammar(text)
    except BadFrameError:
        return
    assert text.count("(") == text.count(")") or '"' in text or "[" in text or "#" in text


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")}, {"temperature": -1.0}, {"temperature": 1e300}, {"top_p": float("nan")},
        {"top_p": 1.5}, {"frequency_penalty": float("inf")}, {"presence_penalty": -1e9}, {"seed": 1 << 64},
    ],
    ids=str,
)  # fmt: skip
def test_rules_of_drawing_are_numbers_that_servers_take(change: dict[str, Any]) -> None:
    rules = DrawRules(temperature=0.7, top_p=0.9, seed=-5, frequency_penalty=-2.0, presence_penalty=2.0)
    said = BeginDrawing(id="a", sampling=rules)
    assert decode(frame(said)[12:]) == said
    with pytest.raises((BadFrameError, OverflowError)):
        decode(frame(msgspec.structs.replace(said, sampling=msgspec.structs.replace(rules, **change)))[12:])
