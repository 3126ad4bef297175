# mypy: disable-error-code="unreachable"
"""Text that says the same again and again is found soon; text that only looks like it is left alone."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.repetition.record import period
from disco_daemon.delivery.repetition import (
    BLANK_LINES,
    DATA,
    MAX_PERIOD,
    REPEATS,
    STEP,
    STRICT,
    STRICT_REPEATS,
    Repetition,
)

LOOPS = Path(__file__).parents[2] / "fixtures" / "recorded" / "loops.jsonl"
LATE = 64  # tokens after the third time, at most
UNITS = st.text(st.sampled_from("ab ,.\n-|0é哈"), min_size=1, max_size=40)
PROSE = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "He laughed. Then he laughed again: ha ha ha ha ha ha ha ha! And again, until nobody knew why he had begun to.",
]


def stop_of(text: str, cuts: list[int] | None = None, *, strict: bool = False) -> int | None:
    """After how many characters a text is stopped, given in pieces of these lengths, in turn."""
    found, at, i = Repetition(strict=strict), 0, 0
    while at < len(text):
        n = cuts[i % len(cuts)] if cuts else len(text)
        if (stop := found.add(text[at : at + n])) is not None:
            return at + stop
        at, i = at + n, i + 1
    return None


def recorded() -> list[list[str]]:
    return [json.loads(line)["tokens"] for line in LOOPS.read_text().splitlines()[1:]]


@pytest.mark.parametrize("tokens", recorded(), ids=lambda tokens: "".join(tokens[-6:]).strip()[:30])
def test_a_small_models_loop_is_stopped_soon_after_the_third_time(tokens: list[str]) -> None:
    loop = period(tokens)
    assert loop is not None
    n_tokens, begin = loop
    third = begin + REPEATS * n_tokens
    found = Repetition()
    stopped = next((i + 1 for i, token in enumerate(tokens) if found.add(token) is not None), None)
    assert stopped is not None
    assert begin < stopped <= third + LATE


@given(UNITS, st.integers(0, 200), st.lists(st.integers(1, 400), min_size=1, max_size=20), st.booleans())
@example("a" * 1000 + "b", 7, [3], False)
@example("ha ha ha ha " * 30 + "he said, and went away. ", 0, [64], False)
@example("x" * MAX_PERIOD, 0, [1], False)
def test_whatever_goes_on_for_ever_is_stopped_however_it_comes(
    unit: str, n_before: int, cuts: list[int], strict: bool
) -> None:
    before = "".join(chr(0x3400 + i) for i in range(n_before))  # nothing is there twice
    repeats, more = (STRICT_REPEATS, STRICT * DATA) if strict else (REPEATS, DATA)
    bound = repeats * len(unit) + more + 2 * STEP
    text = before + unit * (1 + bound // len(unit))
    stopped = stop_of(text, cuts, strict=strict)
    assert stopped is not None
    assert n_before < stopped <= n_before + bound
    assert stopped == stop_of(text, strict=strict) == stop_of(text, [1], strict=strict)


def test_units_of_every_length_are_stopped() -> None:
    draw = random.Random(1)
    for n in [*range(1, 60), *range(60, MAX_PERIOD, 173), MAX_PERIOD]:
        unit = "".join(draw.choices("abcdefgh ", k=n))
        stopped = stop_of(unit * (1 + (REPEATS * n + DATA) // n + STEP))
        assert stopped is not None, n
        assert stopped <= REPEATS * n + DATA + 2 * STEP, n


@given(st.integers(0, 2**32), st.integers(1, 500))
def test_text_that_never_says_the_same_is_never_stopped(seed: int, n: int) -> None:
    draw = random.Random(seed)
    text = "".join(f"{draw.choice(('so', 'and', 'then'))} {i:x}{draw.getrandbits(40):x}; " for i in range(n))
    assert stop_of(text, [draw.randrange(1, 90)]) is None


@given(st.text(max_size=600), st.integers(0, 600))
def test_what_follows_a_seam_is_looked_at_as_if_there_was_none(text: str, at: int) -> None:
    whole = text + "round and round and " * 60
    at = min(at, len(whole))
    before, found = whole[:at], Repetition()
    if found.add(before) is None:
        again = Repetition(before=before)
        assert again.add(whole[at:]) == found.add(whole[at:])


HONEST = {
    "a rule": "-" * 1200,
    "an empty table": "|" + "   |" * 12 + "\n" + ("|" + "   |" * 12 + "\n") * 22,
    "a board": ("[ ] " * 19 + "\n") * 19,
    "zeros in base64": base64.encodebytes(bytes(1000)).decode(),
    "zeros in base64 without a line end": base64.b64encode(bytes(1100)).decode(),
    "an array of zeros": "{" + "0x00, " * 256 + "};",
    "a matrix": json.dumps([[0] * 16] * 16),
    "nulls": json.dumps([None] * 256),
    "equal objects": json.dumps([{"name": "", "count": 0, "tags": []}] * 40, indent=1),
    "equal cells": "<tr>" + "<td></td>" * 60 + "</tr>",
    "equal rows": "| yes | no | yes |\n" * 40,
    "a chorus": "Oh, carry me home to the sea, my love,\nOh, carry me home to the sea.\n\n" * 4,
    "na na": "na na na " * 24,
    "blank lines": "def f():\n    pass" + "\n" * (BLANK_LINES - 2) + "f()",
    "spaces": " " * 600 + "x",
    "a dump": "\n".join(f"{i:08x}  {'00 ' * 16} |{'.' * 16}|" for i in range(0, 4096, 16)),
    "a refrain in a list": "\n".join(f"{i}. Breathe in, breathe out" for i in range(1, 7)),
    "laughter": "ha" * 100,
    "a gene": "ATG" + "CTG" * 300,
    "a scale": "A G F E D C B " * 40,
}


@pytest.mark.parametrize("text", HONEST.values(), ids=HONEST)
def test_honest_text_that_repeats_itself_is_left_alone(text: str) -> None:
    assert stop_of(PROSE[0] + text + PROSE[1]) is None


def test_the_numbers_of_a_list_do_not_hide_a_loop_and_others_do() -> None:
    numbered = "\n".join(f"{i}. The capital of the country is a large city." for i in range(1, 99))
    stopped = stop_of(numbered)
    assert stopped is not None
    assert stopped < 8 * len("10. The capital of the country is a large city.\n")
    assert stopped == stop_of(numbered, [1]) == stop_of(numbered, [7, 2])
    rows = "\n".join(f"INSERT INTO people VALUES ({i}, 'person{i}', 'unknown');" for i in range(1, 99))
    assert stop_of(rows) is None


def test_a_loop_is_likely_before_it_is_certain() -> None:
    found, sentence = Repetition(), "The sky is blue, since the sky is reflected by the blue sea below, they say. "
    likely = []
    for text in (PROSE[0] + sentence, sentence * 2 + sentence[:64], PROSE[1] * 2):
        assert found.add(text) is None
        likely.append(found.is_likely)
    assert likely == [False, True, False]


def test_data_that_was_asked_for_may_repeat_itself_for_longer() -> None:
    for said in ("the same few words of text again\n" * 15, json.dumps(["the same few words of text again"] * 15)):
        assert stop_of(said) is not None
        assert stop_of(said, strict=True) is None
