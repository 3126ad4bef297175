"""The choices of one answer by the device: answers of their own in the engine, as one stream of events.

The first one begins alone. The others follow with its first token: then its prompt is in the KV cache, and they share
its cells.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from ..system.tasks import cancel_all
from ..types import CaughtUp, Delta, Finish, Order, Paused, Token, Usage
from .base import Controls

Event = Token | CaughtUp | Paused | Finish
Ask = Callable[[int, Usage, Controls], AsyncGenerator[Event, None]]


async def several(n: int, ask: Ask, usage: Usage, controls: Controls) -> AsyncGenerator[Event, None]:
    """Yield the events of `n` choices, which `ask` begins by their numbers; the last Finish is that of the answer.

    `usage` has the prompt once, and the tokens of all. Raises what the first one to fail raises.
    """
    choices = _Choices(n, ask, usage)
    controls.bind(choices.send)
    try:
        async with aclosing(choices.events()) as events:
            async for event in events:
                yield event
    finally:
        await choices.close()


class _Choices:
    """The choices under way, each with a task that moves its events into one queue."""

    def __init__(self, n: int, ask: Ask, usage: Usage) -> None:
        self._n, self._ask, self._usage = n, ask, usage
        self._usages = [Usage() for _ in range(n)]
        self._controls = [Controls() for _ in range(n)]
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(n)
        self._open, self._paused = set(range(n)), set[int]()

    def send(self, order: Order) -> None:
        """Send an order to all choices, also to those that are still to begin."""
        for one in self._controls:
            one.send(order)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all choices as they come."""
        self._begin(0)
        while self._open:
            index, event = await self._queue.get()
            self._count()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Token | Finish):
                for other in range(len(self._tasks), self._n):
                    self._begin(other)
            for told in self._told(index, event):
                yield told

    def _begin(self, index: int) -> None:
        self._tasks.append(asyncio.create_task(self._pump(index), name="a choice of an answer"))

    async def _pump(self, index: int) -> None:
        try:
            async with aclosing(self._ask(index, self._usages[index], self._controls[index])) as events:
                async for event in events:
                    await self._queue.put((index, event))
        except Exception as e:  # of whatever kind: the reader of the queue raises it
            await self._queue.put((index, e))

    def _told(self, index: int, event: Event) -> list[Event]:
        """Return what an event of one choice says of the answer."""
        match event:
            case Token():
                return [msgspec.structs.replace(event, index=index, delta=event.delta or Delta())]
            case Paused(paused=paused):
                were = self._paused >= self._open
                (self._paused.add if paused else self._paused.discard)(index)
                are = self._paused >= self._open
                return [] if are is were else [Paused(are)]
            case Finish(reason=reason):
                self._open.discard(index)
                if self._open:
                    return [Token("", 0, Delta(), index=index, ended=reason)]
                return [Token("", 0, Delta(), index=index), Finish(reason)]  # it may have said nothing
            case CaughtUp():
                return []

    def _count(self) -> None:
        """Keep the usage of all up to date: the prompt, and the wait for the model, are the first one's."""
        first, total = self._usages[0], self._usage
        total.prompt_tokens, total.cached_tokens, total.load_s = first.prompt_tokens, first.cached_tokens, first.load_s
        total.rearranged = first.rearranged
        total.completion_tokens = sum(one.completion_tokens for one in self._usages)
        total.reasoning_tokens = sum(one.reasoning_tokens for one in self._usages)
        total.busy_s = sum(one.busy_s for one in self._usages)

    async def close(self) -> None:
        """End all choices, and wait until that is so."""
        await cancel_all(*self._tasks)
        self._count()
