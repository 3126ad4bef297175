"""A range of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers from `first` to `last` (exclusive) of a model with `of` layers. Raises ValueError for none of them."""

    first: int
    last: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.of:
            raise ValueError(f"layers {self.first} to {self.last} of {self.of} are no range of them")

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.last == self.of

    @property
    def n_layers(self) -> int:
        """The number of its layers, without a tail."""
        return self.last - self.first

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"
