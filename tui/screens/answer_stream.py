"""The stream of one answer: every piece goes to the store before it is shown. No widget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from disco_daemon.client.compaction import TOO_LONG, with_summary
from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link

from ..data.store import Store, StoreError
from ..draw.entry import Entry
from ..draw.theme import ALONE

WISH: Mapping[str, Any] = {
    "sides": True
}  # who wrote each word; the delivery is what the user has set: as fast as it comes, by default
ApiMessage = dict[str, Any]


def in_place_of(state: Mapping[str, Any] | None, answer: Entry | None, act: str) -> Mapping[str, Any]:
    """Return the wish for an answer in place of another one; `act` is its field. Older daemons know of none."""
    earlier = ((answer.disco if answer is not None else None) or {}).get("request_id")
    return {act: earlier} if earlier and "policy_set" in (state or {}) else {}


def messages_of(said: Iterable[tuple[str, str]], system: str, summary: str = "") -> Iterator[ApiMessage]:
    """Yield the messages for the daemon: the system prompt with a `summary` of what was said before, then `said`.

    Those are pairs of (role, text). Answers without words are left out.
    """
    if system := with_summary(system, summary):
        yield {"role": "system", "content": system}
    for role, text in said:
        if text or role == "user":
            yield {"role": role, "content": text}


async def stream_answer(
    link: Link,
    store: Store,
    entry: Entry,
    messages: Iterable[Mapping[str, Any]],
    *,
    model: str,
    touched: Callable[[], object],
    ready: Callable[[], Awaitable[None]],
    max_tokens: int | None = None,
    wish: Mapping[str, Any] | None = None,
) -> None:
    """Stream an answer into `entry`, or continue it if it has words; afterwards it has an end, whatever happened.

    Waits for `ready()` before it reads `messages`. Calls `touched()` after each piece. A failure becomes the end of the
    answer; only a cancellation is raised.
    """
    entry.load()
    more: dict[str, Any] = {"continue_final_message": True} if entry.text else {}
    if max_tokens is not None:
        more["max_tokens"] = max_tokens
    entry.live = True
    entry.end(None, None)
    ending: tuple[str, Mapping[str, Any] | None] = ("cancelled", None)
    try:
        await ready()
        async with aclosing(link.chat(messages, model=model, disco={**WISH, **(wish or {})}, **more)) as pieces:
            async for piece in pieces:
                side = ALONE if piece.alone else None if piece.side is None else str(piece.side)
                if piece.text:
                    store.append(entry.turn, piece.text, side)
                entry.grow(piece.text, side)
                entry.think(piece.thought)
                entry.end(piece.finish or entry.finish, piece.disco or entry.disco)
                touched()
        ending = (entry.finish or "stop", entry.disco)
    except (DaemonError, StoreError) as e:
        is_too_long = isinstance(e, DaemonError) and e.code == TOO_LONG
        ending = ("error", {"error": str(e)} | ({"code": TOO_LONG} if is_too_long else {}))
    except asyncio.CancelledError:
        ending = ("cancelled", entry.disco)
        raise
    finally:
        entry.live = False
        entry.end(*ending)
        await _finish(store, entry.turn, *ending)


async def _finish(store: Store, turn: int, finish: str, disco: Mapping[str, Any] | None) -> None:
    """Write the end of an answer, in a thread: a long one takes tens of ms. Raises StoreError.

    A cancellation waits until it is written, so that what follows finds it. SQLite bounds the time.
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
