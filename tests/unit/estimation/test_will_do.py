"""The learned chance that an answer by the device will do: nothing without evidence, and the truth with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.estimation.will_do import (
    KINDS,
    LEAST_EACH,
    LEAST_EXAMPLES,
    LEAST_READ_S,
    DeviceAnswer,
    WillDo,
    answer_of,
)

ROW: dict[str, Any] = {
    "followed": None, "stopped": None, "finish_reason": "stop", "prompt_tokens": 40, "kind": "",
    "ttft_s": 2.0, "duration_s": 5.0,
}  # fmt: skip
SHORT, LONG = 30, 3000  # tokens
answers = st.builds(DeviceAnswer, st.integers(1, 10**6), st.frozensets(st.sampled_from(KINDS)), st.booleans())


def drawn(n: int, seed: int = 0) -> list[DeviceAnswer]:
    """Answers that do for 9 short prompts of 10, 3 long ones of 10, and 1 of 10 with tools."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        tokens, tools = rng.choice([SHORT, LONG]), rng.random() < 0.3
        share = 0.1 if tools else 0.9 if tokens == SHORT else 0.3
        found.append(DeviceAnswer(tokens, frozenset({"tools"} if tools else ()), rng.random() < share))
    return found


@given(st.lists(answers, max_size=LEAST_EXAMPLES - 1))
def test_too_few_answers_say_nothing(few: list[DeviceAnswer]) -> None:
    assert WillDo(few).chance(SHORT, ()) is None


@pytest.mark.parametrize("did", [True, False])
def test_answers_that_all_did_or_all_failed_say_nothing(did: bool) -> None:
    one = [DeviceAnswer(40, frozenset(), did)] * 500
    other = [DeviceAnswer(40, frozenset(), not did)] * (LEAST_EACH - 1)
    assert WillDo([*one, *other]).chance(40, ()) is None
    assert WillDo([*one, *other, *other]).chance(40, ()) is not None


@given(st.lists(answers, min_size=LEAST_EXAMPLES, max_size=200), st.integers(1, 10**7), st.sets(st.sampled_from(KINDS)))
def test_a_chance_is_one_whatever_was_seen(seen: list[DeviceAnswer], tokens: int, kinds: set[str]) -> None:
    chance = WillDo(seen).chance(tokens, kinds)
    assert chance is None or 0 <= chance <= 1


def test_what_readers_did_next_is_learned_by_length_and_kind() -> None:
    known = WillDo(drawn(600))
    short, long, tools = known.chance(SHORT, ()), known.chance(LONG, ()), known.chance(SHORT, {"tools"})
    assert short == pytest.approx(0.9, abs=0.08)
    assert long == pytest.approx(0.3, abs=0.1)
    assert tools is not None
    assert tools < 0.4


def test_it_sorts_new_requests_better_than_length_alone() -> None:
    known, alone = WillDo(drawn(600)), WillDo([DeviceAnswer(a.tokens, frozenset(), a.did) for a in drawn(600)])
    new = drawn(2000, seed=1)

    def kept(by: WillDo, kinds: bool, share: float = 0.4) -> float:
        """How many did of those that stay here, with so many of the least likely sent away."""
        chances = [(by.chance(one.tokens, one.kinds if kinds else ()) or 0.0, i) for i, one in enumerate(new)]
        here = [new[i] for _, i in sorted(chances)[int(share * len(new)) :]]
        return sum(one.did for one in here) / len(here)

    at_random = sum(one.did for one in new) / len(new)
    assert kept(known, kinds=True) > kept(alone, kinds=False) > at_random


@pytest.mark.parametrize(
    ("row", "did"),
    [
        ({}, True),
        ({"followed": "redone"}, False),
        ({"followed": "regenerated"}, False),
        ({"followed": "outdone"}, False),
        ({"finish_reason": "cancelled"}, False),
        ({"stopped": "repetition", "finish_reason": "length"}, False),
        ({"followed": "edited"}, None),
        ({"finish_reason": "cancelled", "followed": "edited"}, None),
        ({"finish_reason": "cancelled", "duration_s": 2 + LEAST_READ_S}, None),
        ({"finish_reason": "cancelled", "duration_s": 1 + LEAST_READ_S}, False),
        ({"finish_reason": "cancelled", "duration_s": 60.0, "followed": "regenerated"}, False),
        ({"duration_s": 60.0}, True),
    ],
)
def test_a_row_of_the_history_says_whether_the_devices_answer_did(row: dict[str, Any], did: bool | None) -> None:
    found = answer_of(ROW | row)
    assert (found.did if found is not None else None) is did


def test_a_row_has_the_kinds_of_its_request() -> None:
    found = answer_of(ROW | {"kind": "tools,code"})
    assert found == DeviceAnswer(40, frozenset({"tools", "code"}), did=True)
