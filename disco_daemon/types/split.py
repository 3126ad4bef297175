"""How an answer is made by a device over two machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitMode = Literal[
    "exact", "confident", "alone"
]  # the partner decides a token, or the exit where it is sure, or always


@dataclass(frozen=True, slots=True)
class SplitWish:
    """Who decides a token: None as the settings say. In the mode confident the exit does, if it is as sure as `theta`.

    `goes_on`: the exit goes on alone while the partner is gone.
    """

    mode: SplitMode | None = None
    theta: float | None = None
    goes_on: bool = False


AS_SET = SplitWish()
