"""The clients of the soak: their questions, and whether the answers keep the promises."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

KEY = "soak"
PRIVATE = "the-private-word"  # in every private question; a server that hears it has heard too much
MAX_TOKENS = 48
QUESTIONS = (
    "Tell me a story about a fox and a crow.", "Name ten rivers of Europe and say where they end.",
    "What is the difference between a list and a tuple?", "Write a short letter to a landlord about a broken heater.",
    "Explain how bread rises, step by step.", "Why is the sky blue?", "Give me a plan for a week of dinners.",
    "Describe a lighthouse in a storm.",
)  # fmt: skip
# What a client does, and how often.
KINDS = {
    "stream": 10, "paced": 3, "leaves": 4, "whole body": 3, "device": 2, "server": 2, "private": 3, "embedding": 1,
    "garbage": 1, "state": 1,
}  # fmt: skip
GARBAGE = (
    b"",
    b"{",
    b'{"model":"disco"}',
    b'{"model":"disco","messages":[]}',
    b"\xff\xfe",
    b'{"model":"x","messages":1}',
)
CROWD = 20


class Broken(Exception):
    """A promise was not kept; the message says which."""


@dataclass(slots=True)
class SoakVerdict:
    """Counts of questions by kind, and of answers: whole, reported as broken off, moved; and the `broken` promises."""

    kinds: Counter[str] = field(default_factory=Counter)
    n_whole: int = 0
    n_told: int = 0
    n_moved: int = 0
    broken: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SoakAnswer:
    """One answer as far as it came; `error`: why it is not whole, or cannot be had."""

    text: str = ""
    finish: str | None = None
    error: str | None = None
    moved: bool = False


def judge(heard: SoakAnswer, reference: str, *, left: bool) -> str | None:
    """Return the fault of an answer whose whole text is `reference`, or None. `left`: the client went."""
    if not reference.startswith(heard.text):
        return f"no beginning of the answer: {heard.text!r}, not {reference!r}"
    if left:
        return None
    if heard.error is None and heard.finish is None:
        return f"the end was not told after {heard.text!r}"
    if heard.finish is not None and heard.error is None and heard.text != reference:
        return f"{heard.finish} after {len(heard.text)} of {len(reference)} characters"
    return None


class Clients:
    """Asks the daemon at `url`, draws what, and judges what comes."""

    def __init__(self, session: aiohttp.ClientSession, url: str, drawn: random.Random, verdict: SoakVerdict) -> None:
        self._session, self._url, self._drawn = session, url, drawn
        self.verdict = verdict
        self._references: dict[str, str] = {}
        self._stopping = False

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopping = True

    async def learn(self, server: str) -> None:
        """Ask the server behind for each answer, undisturbed. Raises Broken where that fails."""
        for question in [*QUESTIONS, *(f"{PRIVATE}: {q}" for q in QUESTIONS)]:
            body = {
                "model": "disco/device",
                "messages": _messages(question),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            async with self._session.post(f"{server}/chat/completions", json=body) as response:
                response.raise_for_status()
                self._references[question] = (await response.json())["choices"][0]["message"]["content"]

    async def ask_for_ever(self, number: int) -> None:
        """Be one client: ask one question after the other until cancelled."""
        self._stopping = False
        drawn = random.Random(self._drawn.random() + number)
        while not self._stopping:
            kind = drawn.choices(list(KINDS), list(KINDS.values()))[0]
            self.verdict.kinds[kind] += 1
            try:
                await self._one(kind, drawn)
            except Broken as e:
                self.verdict.broken.append(f"{kind}: {e}")
            except (aiohttp.ClientError, TimeoutError) as e:
                self.verdict.broken.append(f"{kind}: the daemon did not answer: {e!r}")

    async def crowd(self) -> None:
        """Many at once, who leave after their first word."""
        drawn = random.Random(self._drawn.random())
        tasks = [asyncio.create_task(self._answer(drawn.choice(QUESTIONS), {}, leave_after=1)) for _ in range(CROWD)]
        self.verdict.kinds["crowd"] += CROWD
        for task in tasks:
            try:
                await task
            except Broken as e:
                self.verdict.broken.append(f"crowd: {e}")

    # --- one request -----------------------------------------------------------------------------------------------

    async def _one(self, kind: str, drawn: random.Random) -> None:
        question = drawn.choice(QUESTIONS)
        match kind:
            case "stream":
                await self._answer(question, {})
            case "paced":
                await self._answer(question, {"disco": {"delivery": "paced", "pace_tps": 40.0}})
            case "leaves":
                await self._answer(question, {}, leave_after=drawn.randint(1, 20))
            case "whole body":
                await self._whole(question)
            case "device" | "server":
                await self._answer(question, {"model": f"disco/{kind}"})
            case "private":
                await self._answer(f"{PRIVATE}: {question}", {"disco": {"private": True}})
            case "embedding":
                await self._document("/embeddings", json.dumps({"model": "disco", "input": question}).encode())
            case "garbage":
                if await self._document("/chat/completions", drawn.choice(GARBAGE)) == 200:
                    raise Broken("garbage was answered")
            case "state":
                async with self._session.get(f"{self._url.removesuffix('/v1')}/disco/v1/state") as response:
                    if response.status != 200:
                        msg = f"the state is {response.status}"
                        raise Broken(msg)

    async def _answer(self, question: str, more: dict[str, Any], leave_after: int | None = None) -> None:
        """Stream one answer and judge it."""
        heard, left = SoakAnswer(), False
        body = {"model": "disco", "messages": _messages(question), "max_tokens": MAX_TOKENS, "temperature": 0}
        n_pieces = 0
        async with self._session.post(f"{self._url}/chat/completions", json=body | {"stream": True} | more) as response:
            if response.status != 200:
                heard.error = _error_of(await response.read())
            else:
                async for chunk in _chunks(response):
                    n_pieces += _take(chunk, heard)
                    if leave_after is not None and n_pieces >= leave_after:
                        left = True
                        response.close()
                        break
        self._judge(heard, question, left=left)

    async def _whole(self, question: str) -> None:
        body = {"model": "disco", "messages": _messages(question), "max_tokens": MAX_TOKENS, "temperature": 0}
        async with self._session.post(f"{self._url}/chat/completions", json=body) as response:
            data = await response.read()
        heard = SoakAnswer()
        if response.status != 200:
            heard.error = _error_of(data)
        else:
            found = json.loads(data)
            choice = found["choices"][0]
            heard.text, heard.finish = choice["message"]["content"], choice["finish_reason"]
            heard.moved = bool(found["disco"]["handoffs"])
        self._judge(heard, question, left=False)

    def _judge(self, heard: SoakAnswer, question: str, *, left: bool) -> None:
        if (wrong := judge(heard, self._references[question], left=left)) is not None:
            raise Broken(wrong)
        self.verdict.n_moved += heard.moved
        if heard.error is not None:
            self.verdict.n_told += 1
        elif not left:
            self.verdict.n_whole += 1

    async def _document(self, path: str, body: bytes) -> int:
        """Post a body; the status. Raises Broken for an error that is none of OpenAI's shape."""
        head = {"Content-Type": "application/json"}
        async with self._session.post(self._url + path, data=body, headers=head) as response:
            data = await response.read()
            if response.status != 200:
                _error_of(data)
            return response.status


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _error_of(data: bytes) -> str:
    """The message of an error in OpenAI's shape. Raises Broken for any other."""
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(data)["error"]
        if isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys():
            return str(error["message"])
    msg = f"an error in no shape: {data[:200]!r}"
    raise Broken(msg)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream up to `[DONE]` or its end."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _take(chunk: dict[str, Any], heard: SoakAnswer) -> int:
    """Add one chunk to the answer, and return its number of pieces of text."""
    if "error" in chunk:
        heard.error = _error_of(json.dumps(chunk).encode())
        return 0
    heard.moved |= bool((chunk.get("disco") or {}).get("handoffs"))
    n_pieces = 0
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            heard.text += text
            n_pieces += 1
        heard.finish = choice["finish_reason"] or heard.finish
    return n_pieces
