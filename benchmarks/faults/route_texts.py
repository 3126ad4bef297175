"""Whether each API gives the same text for a prompt at temperature 0, in one piece and streamed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress
from disco_daemon.bench.relay_apis import APIS, StreamApi

MAX_TOKENS = 16
ASKS = (
    "Tell me a story about {}.", "Name three kinds of {}.", "What is {} good for?", "Write a haiku about {}.",
    "Explain {} to a child; use emoji.", "Qu'est-ce que c'est, {} ?", "Wie beschreibt man {} auf Deutsch?",
    "Write a Python function about {}.", "List facts about {} as JSON.", "Say one sentence about {}, in Japanese.",
)  # fmt: skip
THINGS = ("rain", "trains", "bread", "the sea", "chess", "cats", "winter", "glass", "music", "a lighthouse")
PROMPTS = tuple(ask.format(thing) for thing, ask in itertools.product(THINGS, ASKS))

WHOLE: dict[str, Callable[[Any], str]] = {
    "chat": lambda body: body["choices"][0]["message"]["content"],
    "responses": lambda body: "".join(
        part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
    ),
    "messages": lambda body: "".join(block["text"] for block in body["content"] if block["type"] == "text"),
    "ollama": lambda body: body["message"]["content"],
}


async def text_of(
    root: str, session: aiohttp.ClientSession, name: str, prompt: str, max_tokens: int, *, stream: bool
) -> str:
    """Return what the API of a name answers to a prompt at temperature 0. Raises BenchError for a failure."""
    api = APIS[name]
    body = json.loads(api.body(prompt, max_tokens)) | {"stream": stream}
    body.get("options", body)["temperature"] = 0
    async with session.post(f"{root}{api.path}", json=body) as response:
        said = await response.read()
    if response.status != 200:
        msg = f"{name}: {said.decode()}"
        raise BenchError(msg)
    return _streamed(api, said) if stream else WHOLE[name](json.loads(said))


def _streamed(api: StreamApi, said: bytes) -> str:
    lines = said.splitlines()
    if not api.is_whole(lines):
        raise BenchError("a stream has no end")
    return api.text(lines)


async def texts_of(root: str, session: aiohttp.ClientSession, prompt: str, max_tokens: int) -> dict[str, str]:
    """Return the text of each API for one prompt, in one piece and streamed, all asked at once."""
    ways = {f"{name}, {how}": (name, how == "streamed") for name in APIS for how in ("whole", "streamed")}
    asked = (text_of(root, session, name, prompt, max_tokens, stream=stream) for name, stream in ways.values())
    return dict(zip(ways, await asyncio.gather(*asked), strict=True))


async def measure(root: str, session: aiohttp.ClientSession, n: int) -> dict[str, Any]:
    """Return for how many of `n` prompts all texts are the same, and those that are not."""
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), n))
    unlike: dict[str, Any] = {}
    n_chars = 0
    for number, prompt in enumerate(prompts, 1):
        texts = await texts_of(root, session, prompt, MAX_TOKENS)
        n_chars += len(next(iter(texts.values())))
        if len(set(texts.values())) > 1:
            unlike[prompt] = texts
        if number % 20 == 0:
            progress(f"{number} prompts, {len(unlike)} with texts that are not alike")
    return {"prompts": n, "ways": 2 * len(APIS), "alike": n - len(unlike), "mean_chars": n_chars / n, "unlike": unlike}


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    said = f"{found['alike']} of {found['prompts']} prompts have the same text in all of {found['ways']} ways"
    lines = [f"{said} ({', '.join(APIS)}; whole and streamed), of {found['mean_chars']:.0f} characters on average"]
    lines += [f"{prompt!r}: {json.dumps(texts, ensure_ascii=False)}" for prompt, texts in found["unlike"].items()]
    return "\n".join(lines)
