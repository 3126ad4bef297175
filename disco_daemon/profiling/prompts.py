"""The prompts of the measurement: prompts that no cache knows, of the lengths that the measurement needs. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from ..types import Delivery, GenerationRequest, Json, Sampling

SHORTEST, LONGEST, N_LENGTHS = 32, 2048, 7  # tokens, doubling
SPARE = 32  # tokens of the context for the answer, and for a chat template
LEAST_LONGEST = 256  # tokens: a span of 1 to 8 is the least to fit on


def lengths(n_ctx: int, prefill_tps: float, repeats: int, budget_s: float) -> list[int]:
    """N_LENGTHS prompt lengths, evenly spaced on a logarithmic scale, whose repeats take about `budget_s` at most.

    A slow device or a short context gets shorter prompts, not fewer. Raises ValueError for a context so short that no
    line can be fitted.
    """
    longest = min(LONGEST, n_ctx - SPARE)
    if longest < 2 * SHORTEST:
        raise ValueError(f"a context of {n_ctx} tokens is too short to measure prompts of different lengths")
    while repeats * sum(_spaced_lengths(longest)) > budget_s * prefill_tps and longest > LEAST_LONGEST:
        longest = max(LEAST_LONGEST, longest // 2)
    return _spaced_lengths(longest)


def _spaced_lengths(longest: int) -> list[int]:
    return [round(float(n)) for n in np.geomspace(SHORTEST, longest, N_LENGTHS)]


class Prompts:
    """Prompts of a text's token ids, each with a first token of its own: so no cache knows any part of them.

    Text rather than random tokens: in a mixture of experts the tokens decide what is computed. There is no
    beginning-of-text token, which all would share.
    """

    def __init__(self, ids: Sequence[int], rng: random.Random) -> None:
        """`ids` of a text without special tokens. Raises ValueError for fewer than 16 different ones."""
        if len(set(ids)) < 16:
            raise ValueError("the text has too few different tokens")
        self._ids = tuple(ids)
        # What is between the ids of a text is of the same vocabulary; special tokens stand in front of it or behind it.
        self._first = list(range(min(ids), max(ids) + 1))
        rng.shuffle(self._first)
        self._rng = rng

    def fresh(self, n: int) -> tuple[int, ...]:
        """A prompt of `n` tokens. Raises IndexError when the vocabulary is used up, after thousands."""
        start = self._rng.randrange(len(self._ids))
        return self._first.pop(), *(self._ids[(start + i) % len(self._ids)] for i in range(n - 1))


def prompt_request(name: str, ids: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    """Ask for what follows these tokens."""
    return GenerationRequest(name, (), Sampling(max_tokens=max_tokens), prompt=ids, delivery=Delivery.OFF)


def chat_request(name: str, messages: tuple[Json, ...], max_tokens: int) -> GenerationRequest:
    """Ask in a chat, as clients do."""
    return GenerationRequest(name, messages, Sampling(max_tokens=max_tokens), delivery=Delivery.OFF)


def chats(text: str, longest: int, rng: random.Random) -> Iterator[tuple[Json, ...]]:
    """Chats about parts of a text, of 8 to about `longest` tokens, evenly spread on a logarithmic scale; without end.

    A token is taken for a word: what it really was, the engine tells. Each begins with a number of its own.
    """
    words = text.split()
    while True:
        n = round(8 * (longest / 8) ** rng.random())
        start = rng.randrange(len(words))
        part = " ".join(words[(start + i) % len(words)] for i in range(n))
        yield ({"role": "user", "content": f"{rng.randrange(10**8)}: {part}"},)
