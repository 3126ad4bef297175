"""The grades of both sides' models, and which side is a stand-in for the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .request import Side

TOY = 0.2  # billions of parameters: a model with fewer writes sentences, and hardly ever to the point
SMALL = 45.0  # a grade, of some 5 billion parameters: servers mostly have larger models
UNKNOWN_WINS = "of the server's model nothing is known, and this machine's is small"
HOW_TO_SET = "`disco config set server.grade N` says how good it is, 0 to 100"


class Unequal(StrEnum):
    """What becomes of a side that is a stand-in."""

    STAND_IN = "stand-in"  # it answers only where the better one does not
    FIRST_WORDS = "first-words"  # it also begins where the better one can go on with its words, and does
    RACE = "race"  # whatever the other one may: grades are ignored


@dataclass(frozen=True, slots=True)
class Grade:
    """How good a model is, and where that is known from.

    `number` is the accuracy in MMLU-Pro, %, or what stands for it; None is unknown. It may be off by `spread`. `model`
    is the model's plain name, `parameters` their number in billions, `n_parameters` their exact one; each if known.
    """

    number: float | None = None
    reason: str = "unknown"
    spread: float = 0.0
    model: str = ""
    parameters: float | None = None
    n_parameters: int | None = None
    chosen: bool = False  # by the user

    def __str__(self) -> str:
        return self.reason if self.number is None else f"{self.number:.0f} ({self.reason})"

    @property
    def is_toy(self) -> bool:
        """Whether it has too few parameters for any task; not if the user says how good it is."""
        return not self.chosen and self.parameters is not None and self.parameters < TOY

    def reaches(self, parameters: float | None, number: float | None) -> bool:
        """Whether it has so many parameters, in billions, and such a grade, where those are asked; unknown is less."""
        if parameters is not None and (self.parameters is None or self.parameters < parameters):
            return False
        return number is None or (self.number is not None and self.number >= number)

    def is_same(self, other: Grade) -> bool:
        """Whether both sides have one model, by its name or by the exact number of its parameters."""
        by_name = self.model != "" and self.model == other.model
        return by_name or (self.n_parameters is not None and self.n_parameters == other.n_parameters)

    def to_json(self) -> dict[str, Any]:
        """Return it for the API."""
        return {"grade": None if self.number is None else round(self.number, 1), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Relation:
    """Which side is a stand-in for the other, if one is, what is to become of it, and why in a sentence."""

    stand_in: Side | None = None
    why: str = "One side alone is there."
    unequal: Unequal = Unequal.STAND_IN
    device: Grade = Grade()
    server: Grade = Grade()

    @property
    def lower(self) -> Side | None:
        """The side that the better one goes before; None where both may race."""
        return None if self.unequal is Unequal.RACE else self.stand_in

    @property
    def better(self) -> Side | None:
        """The side that goes before the lower one; None where both may race."""
        return None if self.lower is None else self.lower.other

    def to_json(self) -> dict[str, Any]:
        """Return it for the API."""
        return {
            "stand_in": self.stand_in, "unequal": self.unequal.value, "why": self.why,
            "device": self.device.to_json(), "server": self.server.to_json(),
        }  # fmt: skip


EQUAL = Relation()


def raced(found: Relation) -> Relation:
    """Return the relation for an answer that both sides race for, whichever of them is a stand-in."""
    return replace(found, unequal=Unequal.RACE)


def relation(device: Grade, server: Grade, unequal: Unequal = Unequal.STAND_IN) -> Relation:
    """Return how two sides stand to each other, by one threshold: what both grades together may be off by.

    A toy is a stand-in for every other model. A server of which nothing is known goes before a small model.
    """
    stand_in, why = _compared(device, server)
    if stand_in is not None and unequal is Unequal.RACE:
        why += " They race all the same (policy.unequal)."
    return Relation(stand_in, why, unequal, device, server)


def _compared(device: Grade, server: Grade) -> tuple[Side | None, str]:
    grades = {Side.DEVICE: device, Side.SERVER: server}
    if device.is_same(server):
        return None, "Both sides have one model."
    toys = [side for side in Side if grades[side].is_toy]
    if len(toys) == 1:
        return toys[0], _sentence(toys[0], f"a toy of {_count(grades[toys[0]].parameters)} parameters", grades)
    if device.number is None or server.number is None:
        if server.number is None and device.number is not None and not device.chosen and device.number < SMALL:
            return Side.DEVICE, f"{_sentence(Side.DEVICE, UNKNOWN_WINS, grades)} {HOW_TO_SET}."
        unknown = " and ".join(f"{side}.grade" for side in Side if grades[side].number is None)
        return None, f"Both sides count as equal, since a grade is unknown: set {unknown}."
    if abs(device.number - server.number) <= device.spread + server.spread:
        return None, f"Both sides count as equal: device {device}, server {server}."
    lower = Side.DEVICE if device.number < server.number else Side.SERVER
    return lower, _sentence(lower, "by its grade", grades)


def _sentence(lower: Side, why: str, grades: dict[Side, Grade]) -> str:
    names = {Side.DEVICE: "This machine's model", Side.SERVER: "The server's model"}
    return f"{names[lower]} is a stand-in, {why}: device {grades[Side.DEVICE]}, server {grades[Side.SERVER]}."


def _count(parameters: float | None) -> str:
    """Return a number of parameters, given in billions, as models are named by it."""
    assert parameters is not None
    return f"{1000 * parameters:.0f}M" if parameters < 1 else f"{parameters:.3g}B"
