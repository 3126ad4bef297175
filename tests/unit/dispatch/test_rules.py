"""The user's rules: the first that fits decides, nothing is ever widened, and no fact is found that nobody asks for."""

# ruff: noqa: RUF001 - letters of other alphabets

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.language import LANGUAGES, has_code, language_of
from disco_daemon.dispatch.request_facts import KINDS, MOST_SAID_CHARS, RequestFacts, SaidFacts, Surroundings
from disco_daemon.dispatch.rules import DAYS, UNCOUNTED, WORDS, NobodyLeft, Rule, decide, narrowed
from disco_daemon.estimation.will_do import DeviceAnswer, WillDo
from disco_daemon.types import BOTH, EQUAL, GenerationRequest, Grade, Relation, Side

DEVICE, SERVER = Side.DEVICE, Side.SERVER
FRIDAY_NIGHT = datetime(2026, 11, 27, 23, 30)  # noqa: DTZ001 - a user's own time of day
INSTRUCTIONS = Path(__file__).parents[2] / "fixtures" / "instructions.jsonl"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def around(battery: float | None = None, cap_used: float = 0.0, now: datetime = FRIDAY_NIGHT) -> Surroundings:
    return Surroundings(lambda: now, lambda: battery, lambda: cap_used)


def said(**facts: Any) -> SaidFacts:
    return SaidFacts(facts.pop("around", around()), **{"tokens": 100, **facts})


def rule(use: str = "device", name: str = "r", **wanted: Any) -> Rule:
    return Rule.of({"use": use, **wanted}, name)


def facts_of(*texts: str, model: str = "disco", headers: dict[str, str] | None = None, **more: Any) -> RequestFacts:
    messages = tuple({"role": "user", "content": text} for text in texts)
    return RequestFacts(GenerationRequest("q", messages, **more), model, headers or {}, around())


# --- which rule decides -----------------------------------------------------------------------------------------------

lengths = st.integers(0, 2000) | st.none()
shares = st.floats(0, 1) | st.none()
flags = st.booleans() | st.none()
names = st.lists(st.sampled_from(["disco", "gpt-*", "*", "ann", "agent-?"]), max_size=2).map(tuple)
whens: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(KINDS, flags),
    "prompt_at_least": lengths,
    "prompt_at_most": lengths,
    "language": st.lists(st.sampled_from(LANGUAGES[:4]), max_size=2).map(tuple),
    "model": names,
    "user": names,
    "headers": st.dictionaries(st.sampled_from(["X-Team", "x-app"]), st.sampled_from(["sales*", "*"]), max_size=2),
    "hours": st.sampled_from(["", "22:00-06:00", "09:00-17:00"]),
    "days": st.lists(st.sampled_from(DAYS), max_size=3).map(tuple),
    "battery_below": shares,
    "cap_above": shares,
    "device_chance_below": shares,
    "min_parameters": st.floats(0.1, 100) | st.none(),
    "min_grade": st.floats(0, 100) | st.none(),
}
rules = st.builds(
    lambda use, wanted, n: Rule.of({"use": use, **wanted}, f"r{n}"),
    st.sampled_from([*sorted(WORDS), "disco/small"]), st.fixed_dictionaries({}, optional=whens), st.integers(0, 10**9),
)  # fmt: skip
kinds = st.builds(
    lambda flags_, tokens, language, model, user, battery, cap_used: said(
        around=around(battery, cap_used), tokens=tokens, language=language, model=model, user=user, **flags_
    ),
    st.fixed_dictionaries({kind: st.booleans() for kind in KINDS}), st.integers(1, 2000),
    st.sampled_from(["", *LANGUAGES[:4]]), st.sampled_from(["disco", "gpt-4o"]), st.sampled_from(["", "ann"]),
    shares, st.floats(0, 1),
)  # fmt: skip
grades = st.builds(Grade, st.none() | st.floats(0, 100), parameters=st.none() | st.floats(0.1, 200))
relations = st.builds(
    lambda lower, device, server: Relation(lower, "", device=device, server=server),
    st.sampled_from([None, *Side]), grades, grades,
)  # fmt: skip
requests = st.builds(
    lambda allowed, prefers, private: GenerationRequest(
        "q", (), allowed=frozenset({DEVICE}) if private else allowed, prefers=prefers, private=private
    ),
    st.sampled_from([BOTH, frozenset({DEVICE}), frozenset({SERVER})]), st.sampled_from([None, *Side]), st.booleans(),
)  # fmt: skip


@given(st.lists(rules, max_size=8), kinds)
def test_the_first_rule_that_fits_decides(read: Sequence[Rule], facts: SaidFacts) -> None:
    alone = [one for one in read if decide([one], facts) is not None]
    assert decide(read, facts) == (alone[0] if alone else None)


@given(st.lists(rules, max_size=5), rules, kinds, st.integers(0, 5))
def test_a_rule_that_does_not_fit_changes_nothing(read: list[Rule], more: Rule, facts: SaidFacts, at: int) -> None:
    if decide([more], facts) is None:
        assert decide([*read[:at], more, *read[at:]], facts) == decide(read, facts)


@given(rules, requests, relations)
def test_no_rule_widens_what_a_request_may_do(one: Rule, asked: GenerationRequest, relation: Relation) -> None:
    try:
        found = narrowed(asked, one, relation)
    except NobodyLeft:
        return
    assert found.allowed
    assert found.allowed <= asked.allowed
    assert found.private >= asked.private
    assert asked.prefers is None or found.prefers is asked.prefers
    if found.private:
        assert found.allowed == {DEVICE}
    if not found.ruled:
        assert (found.allowed, found.prefers, found.private) == (asked.allowed, asked.prefers, asked.private)


def test_without_a_rule_that_fits_nobody_decides() -> None:
    assert decide([], said()) is None
    assert decide([rule(images=True)], said()) is None


def test_a_rule_without_conditions_fits_every_request() -> None:
    assert decide([rule(images=True), last := rule(name="last")], said()) == last


@pytest.mark.parametrize(
    ("wanted", "fits", "not_these"),
    [
        ({"tools": True}, {"tools": True}, [{}]),
        ({"tools": False}, {}, [{"tools": True}]),
        ({"prompt_at_least": 50, "prompt_at_most": 60}, {"tokens": 50}, [{"tokens": 49}, {"tokens": 61}]),
        ({"language": "de"}, {"language": "de"}, [{"language": ""}, {"language": "nl"}]),
        ({"language": ["de", "nl"]}, {"language": "nl"}, [{"language": "en"}]),
        ({"model": "gpt-*"}, {"model": "GPT-4o"}, [{"model": "disco"}]),
        ({"user": ["ann", "bob"]}, {"user": "bob"}, [{"user": ""}, {"user": "bobby"}]),
        ({"headers": {"X-Team": "sales*"}}, {"headers": {"x-team": "sales-eu"}}, [{}, {"headers": {"X-Team": "it"}}]),
        ({"hours": "22:00-06:00"}, {}, [{"around": around(now=FRIDAY_NIGHT.replace(hour=6, minute=0))}]),
        ({"hours": "09:00-17:00"}, {"around": around(now=FRIDAY_NIGHT.replace(hour=9, minute=0))}, [{}]),
        ({"days": ["fri", "sat"]}, {}, [{"around": around(now=FRIDAY_NIGHT.replace(day=26))}]),
        ({"battery_below": 0.3}, {"around": around(0.29)}, [{}, {"around": around(0.3)}]),
        ({"cap_above": 0.8}, {"around": around(cap_used=0.8)}, [{}, {"around": around(cap_used=0.79)}]),
        ({"tools": True, "code": True}, {"tools": True, "code": True}, [{"tools": True}, {"code": True}]),
    ],
)
def test_a_condition_holds_where_it_says(
    wanted: dict[str, Any], fits: dict[str, Any], not_these: list[dict[str, Any]]
) -> None:
    assert decide([rule(**wanted)], said(**fits)) is not None
    for other in not_these:
        assert decide([rule(**wanted)], said(**other)) is None, other


def test_a_prompt_is_counted_only_where_a_rule_depends_on_its_length() -> None:
    read = [rule(tools=True, prompt_at_least=1000), rule(code=True), rule("server", prompt_at_least=2000)]
    assert decide(read, said(tokens=None, code=True)) == read[1], "no rule before it could have fitted"
    assert decide(read, said(tokens=None, tools=True)) is UNCOUNTED
    assert decide(read, said(tokens=None)) is UNCOUNTED


def test_what_was_learned_decides_only_where_enough_was() -> None:
    read = [rule("prefer-server", device_chance_below=0.5)]
    answers = [DeviceAnswer(100, frozenset({"code"} if i % 2 else ()), did=not i % 2) for i in range(200)]
    known = Surroundings(lambda: FRIDAY_NIGHT, lambda: None, lambda: 0.0, lambda: WillDo(answers))
    assert decide(read, said(code=True)) is None, "nothing is known yet"
    assert decide(read, said(around=known)) is None
    assert decide(read, said(around=known, code=True)) is read[0]
    assert decide(read, said(around=known, code=True, tokens=None)) is UNCOUNTED


# --- what a request is ------------------------------------------------------------------------------------------------


def test_a_request_is_known_by_what_it_asks_for() -> None:
    assert facts_of("x", extra={"tools": [TOOL]}).tools
    assert not facts_of("x", extra={"tools": [TOOL], "tool_choice": "none"}).tools
    assert facts_of("x", extra={"response_format": {"type": "json_object"}}).schema
    assert facts_of("x", extra={"reasoning_effort": "high"}).thinking
    assert not facts_of("x", extra={"reasoning_effort": "none"}).thinking
    assert facts_of("x", extra={"user": "ann"}).user == "ann"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    asked = GenerationRequest("q", (picture,), text_only=False)
    assert RequestFacts(asked, "disco", {}, around()).images
    plain = facts_of("x")
    assert not any((plain.tools, plain.schema, plain.thinking, plain.images, plain.code, plain.user))


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("What is 12 times 7, plus 1?", True), ("A robe takes 2 bolts and 30 pins, 0.5 m each.", True),
        ("In 1990 Anna was 12.", False), ("Why is the sky blue?", False), ("", False), ("٣ و ٤ و ٥", True),
        ("word " * 10**6, False), ("1" * 10**6, False),
    ],
)  # fmt: skip
def test_numbers_are_seen_in_the_latest_question(text: str, seen: bool) -> None:
    asked = facts_of("Add 1, 2, 3 and 4.", text)
    assert asked.numbers is seen
    assert ("numbers" in asked.learned_kinds) is seen


def test_the_language_of_a_conversation_is_that_of_its_latest_question() -> None:
    german, french = "Wie wird das Wetter morgen in Berlin?", "Quelle est la capitale de la France ?"
    assert facts_of(german, french).language == "fr"
    assert facts_of(french, german).language == "de"
    assert facts_of(german, "und jetzt?").language == "de"
    assert facts_of("1 + 1 = ?").language == ""


def test_the_language_of_175_instructions_by_people_is_english() -> None:
    read = [json.loads(line)["prompt"] for line in INSTRUCTIONS.read_text("utf-8").splitlines()]
    found = [language_of(text) for text in read]
    assert found.count("en") >= 0.98 * len(read)
    assert set(found) <= {"en", ""}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("de", "Schreibe einen Brief an meine Vermieterin."), ("fr", "Explique-moi pourquoi le ciel est bleu."),
        ("es", "¿Cuál es la capital de España?"), ("it", "Qual è la capitale dell'Italia?"),
        ("pt", "Qual é a capital do Brasil?"), ("nl", "Wat is de hoofdstad van Nederland?"),
        ("sv", "Vad heter huvudstaden i Sverige?"), ("pl", "Jaka jest stolica Polski?"),
        ("tr", "Türkiye'nin başkenti neresi ve oraya nasıl gidilir?"), ("vi", "Thủ đô của Việt Nam là gì?"),
        ("id", "Apa ibu kota Indonesia?"), ("ru", "Какая столица России?"), ("uk", "Яка столиця України?"),
        ("ja", "日本の首都はどこですか"), ("zh", "中国的首都是哪里"), ("ko", "한국의 수도는 어디입니까"),
        ("ar", "ما هي عاصمة مصر؟"), ("he", "מהי בירת ישראל?"), ("el", "Ποια είναι η πρωτεύουσα της Ελλάδας;"),
        ("hi", "भारत की राजधानी क्या है"), ("th", "เมืองหลวงของไทยคืออะไร"), ("", "Ok."), ("", "42"), ("", ""),
    ],
)  # fmt: skip
def test_a_language_is_known_by_script_and_common_words(code: str, text: str) -> None:
    assert language_of(text) == code


def test_code_in_a_question_is_not_its_language() -> None:
    assert language_of("Was macht das hier?\n```python\nfor the in of and to is a: print(the)\n```") == "de"


@pytest.mark.parametrize(
    "text",
    [
        "Why does this fail?\n```\nx\n```",
        "def f(x):\n    return x + 1\nWhat is wrong?",
        "#include <stdio.h>\nint main() {\n  return 0;\n}",
        "const a = 1;\nlet b = a + 1;",
        "SELECT name FROM users WHERE id = 1\nCREATE TABLE users (id INT);",
        "Traceback (most recent call last):\n  File 'x.py'\nimport os\n",
        "import {a, b} from 'x'\nimport os\n  public static int main(\n",
        "\tclass A extends B {\n\t  } else {\n",
        "Error: x\n    at Object.run (x.js:1:2)\n    at a.b.C.run(C.java:12)\n    at a.b.D.run(D.java:7)",
    ],
)
def test_program_code_is_seen(text: str) -> None:
    assert has_code(text)


def test_prose_is_no_code() -> None:
    read = [json.loads(line)["prompt"] for line in INSTRUCTIONS.read_text("utf-8").splitlines()]
    seen = [text for text in read if has_code(text)]
    assert all(any(sign in text.lower() for sign in ("code", "html", "python", "function")) for text in seen)


# What a pattern may begin with, and what may then come 20,000 times. Each pair is read in the event loop.
BEGUN = (
    "", "def x", "class ", "class x", "from ", "from x import", "import ", "import x", "public ", "static x", "export ",
    "async ", "function ", "const ", "const x", "let x:", "#include ", "using x", "package x", "fn x", "fn x<",
    "func ", "func (", "if (", "for ", "return ", "} ", "SELECT ", "SELECT x FROM ", "INSERT INTO ", "UPDATE x", "x",
    "x.", "x(", "x = ", "x[", "<", "</x", "<x ", '<x a="b"', '<x a="', "at ", "at x.", "@@ ", "$ ", "`", "``",
)  # fmt: skip
REPEATED = (
    " ", "\t", "\u2003", "x", "1", "é", ".", ",", "{", "}", "(", ")", "[", "<", ">", "=", ";", ":", "-", "'", '"', "*",
    "x ", "x.", "x,", "x=", "x:", ' a="b"', "(x)", "<x>", ") ", " FROM ", "else ", "` ", "\v", "x\n", "\n ",
)  # fmt: skip
LONGEST_S = 0.1  # of computing, for a text of 20,000 characters; it was 18 s


@pytest.mark.parametrize("begun", BEGUN)
def test_no_text_of_a_stranger_holds_up_the_event_loop(begun: str) -> None:
    for repeated in REPEATED:
        line = begun + repeated * (20_000 // len(repeated)) + "!"
        many = f"{begun}{repeated * (190 // len(repeated))}!\n" * 100
        for text in (line, many, many.replace("\n", " ")):
            facts = facts_of(text)
            began = process_time()
            _ = facts.code, facts.language
            assert process_time() - began < LONGEST_S, (begun, repeated)


def test_of_a_conversation_without_end_the_latest_messages_are_read() -> None:
    old, new = "def f(x):\n    return x + 1", "a word of prose " * 1000
    assert facts_of(old, new).code
    assert not facts_of(old, *[new] * (1 + MOST_SAID_CHARS // len(new))).code


# --- who may answer ---------------------------------------------------------------------------------------------------


def test_a_word_says_a_side_a_preference_or_privacy() -> None:
    asked = GenerationRequest("q", ())
    found = {use: narrowed(asked, rule(use), EQUAL) for use in WORDS}
    assert {use: (one.allowed, one.prefers, one.private) for use, one in found.items()} == {
        "device": (frozenset({DEVICE}), None, False),
        "server": (frozenset({SERVER}), None, False),
        "private": (frozenset({DEVICE}), None, True),
        "race": (BOTH, None, False),
        "plan": (BOTH, None, False),
        "better": (BOTH, None, False),
        "prefer-device": (BOTH, DEVICE, False),
        "prefer-server": (BOTH, SERVER, False),
    }
    assert {one.rule for one in found.values()} == {"r"}
    assert [use for use, one in found.items() if one.race] == ["race"]


@pytest.mark.parametrize(
    ("device", "server", "lower", "begins"),
    [
        (Grade(30), Grade(70), DEVICE, SERVER),
        (Grade(70), Grade(30), SERVER, DEVICE),
        (Grade(50, spread=12), Grade(55, spread=12), None, SERVER),  # equal for a race, and yet one is better
        (Grade(50), Grade(50), None, None),
        (Grade(), Grade(50), None, None),
        (Grade(40, model="one"), Grade(50, model="one"), None, None),
    ],
)
def test_the_better_side_is_the_one_with_the_higher_grade(
    device: Grade, server: Grade, lower: Side | None, begins: Side | None
) -> None:
    relation = Relation(lower, "", device=device, server=server)
    assert narrowed(GenerationRequest("q", ()), rule("better"), relation).prefers is begins


def test_a_floor_leaves_those_sides_whose_model_is_known_to_reach_it() -> None:
    relation = Relation(device=Grade(30.0, parameters=1.5), server=Grade(70.0))
    asked = GenerationRequest("q", ())
    assert narrowed(asked, rule("race", min_grade=60), relation).allowed == {SERVER}
    assert narrowed(asked, rule("race", min_parameters=1.5), relation).allowed == {DEVICE}
    with pytest.raises(NobodyLeft, match=r"^Rule 'r' asks for 7 billion parameters, .*server.grade"):
        narrowed(asked, rule("server", min_parameters=7), relation)


def test_what_the_client_says_stays_and_an_error_names_the_rule() -> None:
    here = GenerationRequest("q", (), allowed=frozenset({DEVICE}))
    with pytest.raises(NobodyLeft, match=r"Rule 'r' lets only the server answer this, and the request is for the devi"):
        narrowed(here, rule("server"), EQUAL)
    with pytest.raises(NobodyLeft, match=r"and the request is private"):
        narrowed(GenerationRequest("q", (), allowed=frozenset({DEVICE}), private=True), rule("server"), EQUAL)
    asked = GenerationRequest("q", (), prefers=DEVICE)
    assert narrowed(asked, rule("prefer-server"), EQUAL).prefers is DEVICE
