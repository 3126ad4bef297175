"""The results of `disco split check` on this machine: one small TOML file for each model, build and processor."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..engine.measure.split_messages import SplitCompared
from .tuned_profile import ProfileKey, place, read, write


class SplitCheck(msgspec.Struct, frozen=True):
    """What was found for a model cut behind the layers `cuts`; `checked` is a date."""

    key: ProfileKey
    cuts: list[int]
    result: SplitCompared
    checked: str


class SplitChecks:
    """The checks of this machine's models, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: ProfileKey, cuts: list[int]) -> Path:
        """Return the place of a check. A changed model has the same place: the file is written anew."""
        return place(self._folder, key, cuts)

    def load(self, key: ProfileKey, cuts: list[int]) -> SplitCheck | None:
        """Return the check of just this model, build and cut; a damaged file is none."""
        found = read(self.path(key, cuts), SplitCheck)
        return found if found is not None and found.key == key else None

    def save(self, check: SplitCheck) -> Path:
        """Write a check, whole or not at all. Raises OSError."""
        comment = "Written by `disco split check`. Delete it, and the model is checked again."
        return write(self.path(check.key, check.cuts), comment, msgspec.to_builtins(check))
