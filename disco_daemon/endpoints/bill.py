"""A server's usage numbers, checked against what can be true: they are booked, and close caps. Pure.

A server counts by its own tokenizer and thinks unseen, so only bounds can be told; but nobody makes a token of less
than a byte, or a hundred thousand of them in a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..types import Json, Token, Usage, n_choices

MESSAGE_TOKENS = 64  # a chat template's for one message; those known take 3 to 10
OWN_TOKENS = 16_384  # of a prompt that a server adds unseen: its system prompt, its description of tools
FOUND_TOKENS = 262_144  # for each part that is no text, and for what it looks up: pages of a document, or of the web
MAX_TPS = 5_000.0  # token/s that a server may think unseen; the quickest known make half of that
MAX_COST = 1e6  # of one answer, in a server's own currency: what is more is no price
# Times the tokens that a server tells which its text may have by our count: beyond, it tells of a part. The coarsest
# vocabulary known joins words (SuperBPE, arXiv 2503.13423): a third fewer tokens than BPE on average, of whose count
# ours misses a tenth, makes 1.35. Where several choices were asked for, a bill may be of one: none is let pass there.
COARSER = 1.5
SPARE_TOKENS = 256  # of an answer: marks of its format, and a limit that is taken not quite exactly

# Parameters with which a server adds to the prompt what it has found.
_FINDS = ("web_search_options", "search_parameters", "plugins", "data_sources", "documents")


class Bill:
    """The bill of one answer, put into `usage` as it comes.

    `body` is what was sent, `max_tokens` its limit. `odd` is what could not be true of it, or be read; "" if all was.
    """

    def __init__(self, usage: Usage, body: Mapping[str, Any], max_tokens: int | None) -> None:
        self.odd = ""
        self._usage = usage
        self._body = body
        self._max_tokens = max_tokens
        self._n_tokens = 0
        self._n_bytes = 0

    @property
    def n_billed(self) -> int | None:
        """Tokens of the answer so far, if the server says so."""
        return self._usage.completion_tokens if self._usage.told else None

    def count_token(self, token: Token, n_tokens: int, *, counted: bool = False) -> None:
        """A token has come, the last of `n_tokens` of the answer, `counted` by a usage block that came with it.

        It is billed even if the server never says so. Told is what comes with the last token or after it.
        """
        self._n_tokens = n_tokens
        self._n_bytes += _bytes(token.text)
        if token.delta:
            self._n_bytes += _bytes(str(token.delta))
        usage = self._usage
        if not counted or n_tokens > usage.completion_tokens:
            usage.completion_tokens, usage.told = max(usage.completion_tokens, n_tokens), False

    def take(self, billed: object, elapsed_s: float) -> None:
        """A usage block, `elapsed_s` after the request was sent; zeros and what is missing say nothing.

        Of the prompt, OpenAI tells in `prompt_tokens_details` how much was in its cache, which is cheaper.
        """
        if not isinstance(billed, dict):
            self.odd = self.odd or "it is no object"
            return
        usage = self._usage
        thought = self._count(billed.get("completion_tokens_details"), "reasoning_tokens")
        prompt, completion = self._count(billed, "prompt_tokens"), self._count(billed, "completion_tokens")
        if thought and self._count(billed, "total_tokens") == prompt + completion + thought:
            completion += thought  # xAI, and Google at times, count what was thought beside the answer
        most = self._most_completion(elapsed_s)
        usage.told = 0 < completion <= most  # what cannot be true is booked up to there, and believed by nobody
        coarser = COARSER if n_choices(self._body) == 1 else 1.0
        if 0 < coarser * completion < self._n_tokens:  # no running sum; of choices llama-server tells of one only
            completion, usage.told = self._n_tokens, False
        if completion:
            usage.completion_tokens = self._at_most(completion, most, "completion_tokens")
            usage.reasoning_tokens = min(thought, usage.completion_tokens)
        if prompt:
            # What lies within the allowance needs no look at the prompt.
            most = OWN_TOKENS if prompt <= OWN_TOKENS else self._most_prompt()
            prompt = self._at_most(prompt, most, "prompt_tokens")
            cached = min(prompt, self._count(billed.get("prompt_tokens_details"), "cached_tokens"))
            usage.prompt_tokens, usage.cached_tokens = prompt - cached, cached
            usage.cache_write_tokens = min(prompt, self._written(billed))
        if (cost := _cost(billed.get("cost"))) is not None:
            usage.cost = cost

    def _written(self, billed: Json) -> int:
        """Return how much of the prompt was written into the server's cache: OpenAI's name, or Anthropic's."""
        told = self._count(billed.get("prompt_tokens_details"), "cache_write_tokens")
        return told or self._count(billed, "cache_creation_input_tokens")

    def _count(self, told: Any, key: str) -> int:
        """A count of a usage block, 0 where there is none that can be read."""
        n = told.get(key) if isinstance(told, dict) else None
        if isinstance(n, float) and n.is_integer():
            n = int(n)
        if type(n) is int and n >= 0:
            return n
        if n is not None:
            self.odd = self.odd or f"{key} is no count"
        return 0

    def _at_most(self, n: int, most: int, key: str) -> int:
        if n > most:
            self.odd = f"{key} of {n:.3g} cannot be true" if n < 1 << 1000 else f"{key} cannot be true"
            self.odd += f": {most} are booked"
        return min(n, most)

    def _most_completion(self, elapsed_s: float) -> int:
        said = max(self._n_tokens, self._n_bytes)
        most = said + int(MAX_TPS * max(0.0, elapsed_s)) + SPARE_TOKENS
        return most if self._max_tokens is None else min(most, max(said, self._max_tokens) + SPARE_TOKENS)

    def _most_prompt(self) -> int:
        """No token has less than a byte; a chat's template, and what a server adds, come on top."""
        messages = self._body.get("messages") or ()
        found = finds(self._body) + sum(map(_n_found, messages))
        n_bytes = len(msgspec.json.encode(self._body))
        return n_bytes + MESSAGE_TOKENS * len(messages) + OWN_TOKENS + FOUND_TOKENS * found


def _cost(told: object) -> float | None:
    """Return what a server says that the answer costs, as OpenRouter does; None for what is no such number."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told < MAX_COST:
        return None
    return float(told)


def finds(parameters: Json) -> int:
    """The number of parameters with which a server looks things up: that may cost more than tokens."""
    return sum(key in parameters for key in _FINDS)


def is_open_ended(parameters: Json, messages: Sequence[Json]) -> bool:
    """Whether a server may bill more than text: it looks things up, or reads images and documents."""
    return finds(parameters) > 0 or any(map(_n_found, messages))


def _n_found(message: Json) -> int:
    """Parts of a message that are no text: images by their address, documents."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return sum(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
