"""What an endpoint computes of texts that it does not answer: vectors, or how well they fit a query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Given = str | tuple[int, ...]  # a text, or token ids of the model that reads it
Purpose = Literal["", "query", "document", "classification", "clustering", "similarity"]


@dataclass(frozen=True, slots=True)
class TextTask:
    """What vectors of texts are for, and how many numbers they shall have (None: all).

    With a `query` each text's vector is two numbers: how well it answers that by the model's own rating, and the same
    from 0 to 1.
    """

    purpose: Purpose = ""
    dimensions: int | None = None
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """What texts of `n_tokens` in all mean: little-endian float32 numbers of each.

    A vector has length 1, unless it is a rating.
    """

    vectors: tuple[bytes, ...]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class TextFamily:
    """What a family of such models was trained with: a text in front of what is read, by its purpose.

    Vectors can be cut to `least_dimensions` numbers and more (Matryoshka); None where they cannot. Their mean is taken
    off before that if they are `centred`.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    least_dimensions: int | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class TextKind:
    """A model that makes vectors of texts, or rates them where its `pooling` is rank, and answers nothing."""

    pooling: str
    family: TextFamily = field(default_factory=TextFamily)

    @property
    def rates(self) -> bool:
        """Whether it rates texts by a query, in place of vectors."""
        return self.pooling == "rank"
