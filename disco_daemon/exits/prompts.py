"""Prompts that exits are trained, calibrated and judged with: patterns filled with words, in three disjoint parts.

The patterns are `profiles/exit_prompts.toml`. No word and no report of one part is in another: what an exit is said to
be worth holds for text it never saw.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

SEED = 22
_PLANS = {"train": slice(0, 9), "calibrate": slice(9, 12), "judge": slice(12, None)}  # of what reports tell
_TENTHS = {"train": range(8), "calibrate": range(8, 9), "judge": range(9, 10)}  # of all other words


class PromptPart(StrEnum):
    """What prompts are for."""

    TRAIN = "train"
    CALIBRATE = "calibrate"
    JUDGE = "judge"


def prompts(patterns: str, part: PromptPart) -> Iterator[str]:
    """Yield the prompts of a part of the TOML text `patterns`, in an order that is always the same, each once."""
    data = tomllib.loads(patterns)
    words = {
        slot: [word for i, word in enumerate(found) if i % 10 in _TENTHS[part]] for slot, found in data["words"].items()
    }
    words["report"] = list(_reports(data["report"], part))
    filled = [
        text.replace("{" + pattern["slot"] + "}", word)
        for pattern in data["pattern"]
        for text in pattern["texts"]
        for word in words[pattern["slot"]]
    ]
    random.Random(SEED).shuffle(filled)
    yield from filled


def _reports(data: dict[str, list[str]], part: PromptPart) -> Iterator[str]:
    """Yield reports of four sentences or more; those of two parts have no plan in common."""
    chance = random.Random(f"{SEED} {part}")
    plans = data["plan"][_PLANS[part]]
    for _ in range(12 * len(plans)):
        sentences = [
            chance.choice(data["begin"]),
            chance.choice(data["middle"]),
            *chance.sample(data["more"], chance.choice((1, 2, 3))),
            chance.choice(data["end"]),
        ]
        slots = {slot: chance.choice(data[slot]) for slot in ("town", "day", "month", "money")}
        slots["plan"] = chance.choice(plans)
        yield " ".join(_filled(sentence, slots, data, chance) for sentence in sentences)


def _filled(sentence: str, slots: dict[str, str], data: dict[str, Any], chance: random.Random) -> str:
    return sentence.format(**slots, name=chance.choice(data["name"]), n=chance.choice(data["n"]))
