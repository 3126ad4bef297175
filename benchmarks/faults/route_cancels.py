"""How long a request whose client has gone still holds the device: writing, reading prompts, and before that."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.relay_apis import APIS

N_WORDS = 1200  # of a prompt: some seconds of reading
N_LONG = 3500  # of one that nearly fills the context: what takes longest before it is read
MAX_TOKENS = 2000  # of an answer that is being written: it does not end by itself
WORDS = ("sea", "fir", "elm", "oak", "ash", "bay", "box", "fig", "yew", "ivy", "nut", "hop")
LOOK_S = 0.002  # between two questions for how many requests the device has
GONE_S = 0.8  # without a request that has gone; longer than the daemon waits for the engine to confirm
PATIENCE_S = 120.0
MOST = 5  # tries of each, at most: an answer may end before its client goes


@dataclass(frozen=True, slots=True)
class Situation:
    """`n` clients ask, with `n_words` in their prompts; `delay_s` after the last one, `n_leaving` of them go.

    The delay begins when all requests are with the engine (`settled`), or when they are sent.
    """

    n: int
    n_words: int
    n_leaving: int
    delays_s: tuple[float, ...]
    settled: bool = True


SITUATIONS = {
    "its answer is being written, alone": Situation(1, 6, 1, (0.5,)),
    "its answer is being written beside seven": Situation(8, 6, 1, (1.0,)),
    "its prompt is being read, alone": Situation(1, N_WORDS, 1, (0.3,)),
    "eight prompts are being read, and one goes": Situation(8, N_WORDS, 1, (0.5, 1.0, 1.5)),
    "eight prompts are being read, and all go": Situation(8, N_WORDS, 8, (0.5, 1.0, 1.5)),
    "eight prompts have just come, and one goes": Situation(8, N_LONG, 1, (0.02, 0.05, 0.1, 0.2), settled=False),
    "eight prompts have just come, and all go": Situation(8, N_LONG, 8, (0.02, 0.05, 0.1, 0.2), settled=False),
}


class Asking:
    """Asks the device of a daemon at `root` by all APIs in turn, each time with another prompt."""

    def __init__(self, root: str, session: aiohttp.ClientSession) -> None:
        self._root, self._session = root, session
        self._apis = itertools.cycle(APIS.values())
        self._numbers = itertools.count()

    def begin(self, n_words: int, *, stays: bool) -> asyncio.Task[None]:
        """Ask, and read whatever comes; one that stays is asked for an answer that does not end by itself."""
        number = next(self._numbers)
        prompt = f"{number}: " + f"{WORDS[number % len(WORDS)]} " * n_words
        api = APIS["chat"] if stays else next(self._apis)
        body = json.loads(api.body(prompt, MAX_TOKENS)) | ({"ignore_eos": True} if stays else {})
        return asyncio.create_task(self._read(api.path, body))

    async def _read(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(f"{self._root}{path}", json=body) as response:
            if response.status != 200:
                raise BenchError(await response.text())
            async for _ in response.content:
                pass

    async def n_in_flight(self) -> int:
        """Return how many requests the device has, those that are being counted too."""
        async with self._session.get(f"{self._root}/disco/v1/state") as response:
            found: int = (await response.json())["endpoints"]["device"]["in_flight"]
            return found

    async def until(self, n: int) -> None:
        """Wait until the device has `n` requests."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.n_in_flight() != n:  # noqa: ASYNC110 - the other process has no event to wait for
                await asyncio.sleep(LOOK_S)


async def _held_s(asking: Asking, situation: Situation, delay_s: float, first: int) -> float | None:
    """Return how long the device was last seen with a request after its client had gone, s.

    Those that go are number `first` and the ones behind it; None if the answer of one has ended before.
    """
    n, n_going = situation.n, situation.n_leaving
    goes = [(i - first) % n < n_going for i in range(n)]
    tasks = [asking.begin(situation.n_words, stays=not one_goes) for one_goes in goes]
    if situation.settled:
        await asking.until(n)
    await asyncio.sleep(delay_s)
    going = list(itertools.compress(tasks, goes))
    is_early = not any(task.done() for task in going)
    began = seen = time.perf_counter()
    for task in going:
        task.cancel()
    while is_early and (now := time.perf_counter()) - seen < GONE_S:
        if await asking.n_in_flight() > n - n_going:
            seen = now
        await asyncio.sleep(LOOK_S)
    for task in tasks:
        if task not in going and task.done():
            await task
            raise BenchError("an answer that was to stay has ended")
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asking.until(0)
    return seen - began if is_early else None


async def measure(root: str, session: aiohttp.ClientSession, n_each: int) -> dict[str, Any]:
    """Return median and worst of `n_each` times in each situation, ms."""
    asking, found = Asking(root, session), {}
    for name, situation in SITUATIONS.items():
        times_s: list[float] = []
        for number in range(MOST * n_each):
            delay_s = situation.delays_s[number % len(situation.delays_s)]
            held_s = await _held_s(asking, situation, delay_s, number)
            times_s += [] if held_s is None else [held_s]
            if len(times_s) == n_each:
                break
        else:
            raise BenchError("the answers end too soon")
        found[name] = {
            "n": n_each,
            "median_ms": round(1e3 * statistics.median(times_s), 1),
            "worst_ms": round(1e3 * max(times_s), 1),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'after its client has gone, the device has a request for':56} {'median':>9} {'worst':>9}"]
    for name, times in found.items():
        lines.append(f"  {name:54} {times['median_ms']:6.1f} ms {times['worst_ms']:6.1f} ms")
    return "\n".join(lines)
