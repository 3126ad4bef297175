"""One answer: asked for, heard piece by piece, and every piece handed to the store before it is shown. No widget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link

from ..data.store import Store, StoreError
from ..draw.entry import Entry

# An answer at reading speed, and with each word the side that wrote it.
WISH = {"delivery": "paced", "sides": True}
Message = dict[str, Any]


def messages_of(said: Iterable[tuple[str, str]], system: str) -> Iterator[Message]:
    """What the daemon is sent: the system prompt, and all that was `said`, of (role, text).

    Answers without a word are left out.
    """
    if system:
        yield {"role": "system", "content": system}
    for role, text in said:
        if text or role == "user":
            yield {"role": role, "content": text}


async def hear(
    link: Link,
    store: Store,
    entry: Entry,
    messages: Iterable[Mapping[str, Any]],
    *,
    model: str,
    touched: Callable[[], None],
    ready: Callable[[], Awaitable[None]],
) -> None:
    """Have `entry` answered, or go on with it if it has words already; it is finished however this ends.

    It waits for `ready` first, and reads `messages` then. A failure is kept in the entry, as the end of the answer;
    only a cancellation (somebody stopped it) leaves.
    """
    entry.wake()
    more = {"continue_final_message": True} if entry.text else {}
    entry.live = True
    entry.end(None, None)
    ending: tuple[str, Mapping[str, Any] | None] = ("cancelled", None)
    try:
        await ready()
        async with aclosing(link.chat(messages, model=model, disco=WISH, **more)) as pieces:
            async for piece in pieces:
                side = None if piece.side is None else str(piece.side)
                if piece.text:
                    store.append(entry.turn, piece.text, side)
                entry.grow(piece.text, side)
                entry.thought += piece.thought
                entry.end(piece.finish or entry.finish, piece.disco or entry.disco)
                touched()
        ending = (entry.finish or "stop", entry.disco)
    except (DaemonError, StoreError) as e:
        ending = ("error", {"error": str(e)})
    except asyncio.CancelledError:
        ending = ("cancelled", entry.disco)
        raise
    finally:
        entry.live = False
        entry.end(*ending)
        await _finish(store, entry.turn, *ending)


async def _finish(store: Store, turn: int, finish: str, disco: Mapping[str, Any] | None) -> None:
    """Have the end written, in a thread: a long answer takes tens of ms. Returns when it is; raises StoreError.

    Whoever cancels this waits, too: what comes after it finds the answer written. SQLite bounds the time.
    """
    writing = asyncio.create_task(asyncio.to_thread(store.finish, turn, finish, disco), name=f"finish {turn}")
    cancelled = False
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            cancelled = True
    writing.result()
    if cancelled:
        raise asyncio.CancelledError
