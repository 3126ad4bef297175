"""Record the loops of a small model: its answers at temperature 0 that say the same again and again to their end.

    disco up &     # with the embedded model, or any other OpenAI server
    python -m benchmarks.repetition.record http://127.0.0.1:8080 OUT.jsonl [--model NAME] [--max-tokens 480]

The prompts below are asked in their order; none is chosen by what a detector says of its answer. A loop is an answer
that has not ended by itself, and whose last third is exactly periodic, seen by comparing every period. OUT gets a line
for each loop, with its `prompt` and the `tokens` as the text of each, and its first line says what made it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

TOPICS = ("fruits", "cities", "rivers", "inventions", "birds", "songs", "stars", "sailors", "bread", "winter")
ORDERS = (
    "Write a very long poem about {}.", "Tell me an endless story about {}.", "Write a song about {} with many verses.",
    "Say all that you know about {}, and do not stop.", "Write a very long essay about {}.",
)  # fmt: skip
AT_ONCE = 8  # answers, in one batch of a device


def period(tokens: Sequence[str]) -> tuple[int, int] | None:
    """Return the shortest period of a text's last third and the token where it begins; None for no loop."""
    least = len(tokens) // 3
    for p in range(1, least // 2):
        begin = len(tokens)
        while begin > p and tokens[begin - 1] == tokens[begin - 1 - p]:
            begin -= 1
        if len(tokens) - (begin - p) >= least:
            return p, begin - p
    return None


async def answer(session: aiohttp.ClientSession, model: str, prompt: str, max_tokens: int) -> list[str] | None:
    """Return the tokens of an answer as text, None if the model has ended it."""
    asked = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True,
        "max_tokens": max_tokens, "disco": {"delivery": "off", "stop_repetition": False},
    }  # fmt: skip
    tokens, finish = [], None
    async with session.post("/v1/chat/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                choice: Any = next(iter(json.loads(line[6:])["choices"]), {})
                tokens.append(choice.get("delta", {}).get("content") or "")
                finish = choice.get("finish_reason") or finish
    return [token for token in tokens if token] if finish == "length" else None


async def record(url: str, model: str, max_tokens: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Ask all prompts; `write` down what was asked, and each loop as it comes."""
    places = asyncio.Semaphore(AT_ONCE)
    prompts = [order.format(topic) for topic in TOPICS for order in ORDERS]
    write({"model": model, "temperature": 0, "max_tokens": max_tokens, "n_asked": len(prompts)})
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(3600)) as session:

        async def one(prompt: str) -> None:
            async with places:
                tokens = await answer(session, model, prompt, max_tokens)
            loop = period(tokens) if tokens else None
            print(prompt, loop, file=sys.stderr)
            if loop is not None:
                write({"prompt": prompt, "tokens": tokens})

        await asyncio.gather(*map(one, prompts))


def main() -> None:
    """Read the arguments, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="disco/device")
    parser.add_argument("--max-tokens", type=int, default=240)
    args = parser.parse_args()
    with args.out.open("w") as out:

        def write(line: dict[str, Any]) -> None:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()

        asyncio.run(record(args.url, args.model, args.max_tokens, write))


if __name__ == "__main__":
    main()
