"""The chats that `bench.engine` asks: no two of them begin alike, and some have a given length."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

from .child import BenchError
from .demo import PASSAGE
from .streamed import Chat, Door, ask

Count = Callable[[Chat], Awaitable[int]]  # of the tokens of a chat when rendered


def story(i: int) -> Chat:
    """Return a short question, other words for each i, with a long answer: of a hundred tokens or more."""
    words = PASSAGE.split()
    begin = " ".join(words[(7 * i) % len(words) :][:8])
    return _chat(i, f"Write a long story with many details that begins like this: {begin}")


def _chat(i: int, content: str) -> Chat:
    """Return a chat that no cache knows: the system message is of this one alone, and stands in front."""
    words = list(dict.fromkeys(PASSAGE.split()))  # each once
    name = f"{words[i % len(words)]} {words[i // len(words) % len(words)]}"
    return [{"role": "system", "content": name}, {"role": "user", "content": content}]


async def chat_of_length(n_tokens: int, i: int, count: Count) -> Chat:
    """Return a chat that no cache knows, of `n_tokens` tokens when rendered, as `count` counts them. Raises BenchError.

    Whole words come next to the length, single-letter ones fill it up.
    """
    words = list(itertools.islice(itertools.cycle(PASSAGE.split()), 11 * i % 180, 11 * i % 180 + n_tokens))

    def chat(n: int, fill: int = 0) -> Chat:
        return _chat(i, " ".join([*words[:n], *["a"] * fill]))

    low, high = 0, n_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if await count(chat(middle)) <= n_tokens else (low, middle - 1)
    missing = n_tokens - await count(chat(low))
    if missing < 0:
        raise BenchError(f"a prompt of {n_tokens} tokens is shorter than the chat template alone")
    return chat(low, missing)


async def calibrate_count(door: Door) -> Count:
    """Return a count that is right to a few tokens, from what two prompts took: for a server that counts no others."""

    def words(chat: Chat) -> tuple[int, int]:
        said = chat[-1]["content"].split()
        n_single = said.count("a")  # a token wherever it stands
        return len(said) - n_single, n_single

    short, long = _chat(0, "a"), _chat(0, PASSAGE)
    n_short, n_long = [(await ask(door, chat, 1)).prompt["prompt_tokens"] for chat in (short, long)]
    each = (n_long - n_short + 1 - words(long)[1]) / words(long)[0]

    async def count(chat: Chat) -> int:
        n_words, n_single = words(chat)
        return int(n_short - 1 + n_words * each + n_single + 0.5)

    return count
