"""How the end of an answer gets into the store: beside the screen's work, and before all that comes after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from textual.message import Message

from disco_daemon.client.stream import Link
from disco_tui.data.store import Store, StoreError
from disco_tui.draw.entry import Entry
from disco_tui.draw.message_cache import MessageCache
from disco_tui.screens.conversations import AnswerEnded, Conversations
from tests.fixtures.tui import Dictated, dictated

PATIENCE_S = 60.0


class Slow(Store):
    """A store whose disk waits, when an answer ends, until the test lets it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go = threading.Event()
        self.begun = threading.Event()
        self.threads: list[int] = []
        self.broken = False

    def finish(self, turn: int, finish: str | None, disco: Mapping[str, Any] | None) -> None:
        self.threads.append(threading.get_ident())
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        if self.broken:
            raise StoreError("the disk is full")
        super().finish(turn, finish, disco)


async def _at_once() -> None:
    """A daemon is there."""


class Talking:
    """Conversations, without a screen."""

    def __init__(self, daemon: Dictated, link: Link, store: Slow) -> None:
        self.daemon, self.store = daemon, store
        self.ended: list[Entry] = []
        self.conversations = Conversations(link, store, post=self._post, ready=_at_once)

    def _post(self, message: Message) -> None:
        if isinstance(message, AnswerEnded):
            self.ended.append(message.entry)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.001)

    async def ending(self) -> Entry:
        """An answer whose end is being written."""
        _, answer = self.conversations.ask("Why?")
        self.daemon.say("So.")
        self.daemon.end()
        await self.until(self.store.begun.is_set)
        return answer

    def stored(self) -> list[tuple[str, str | None]]:
        assert self.conversations.current is not None
        return [(turn.text, turn.finish) for turn in self.store.turns(self.conversations.current.id)]


@pytest.fixture
async def talking() -> AsyncIterator[Talking]:
    async with dictated() as daemon, Link(daemon.root) as link:
        with Slow() as store:
            found = Talking(daemon, link, store)
            try:
                yield found
            finally:
                store.go.set()
                await found.conversations.close()


async def test_the_loop_goes_on_while_the_end_of_an_answer_is_written(talking: Talking) -> None:
    answer = await talking.ending()
    assert talking.store.threads != [threading.get_ident()]
    assert (answer.live, answer.finish, answer.text) == (False, "stop", "So.")
    assert talking.conversations.running is not None, (
        "nobody can ask before it is written: the order of the calls is kept"
    )
    assert talking.ended == []
    talking.store.go.set()
    await talking.until(lambda: talking.ended)
    assert talking.ended == [answer]
    assert talking.stored()[1] == ("So.", "stop")


async def test_who_leaves_while_it_is_written_waits_for_it(talking: Talking) -> None:
    await talking.ending()
    leaving = asyncio.create_task(talking.conversations.close())
    await asyncio.sleep(0)
    leaving.cancel()  # even those in a hurry
    running = talking.conversations.running
    assert running is not None
    running.task.cancel()
    await asyncio.sleep(0)
    assert not running.task.done()
    talking.store.go.set()
    await asyncio.wait([running.task, leaving], timeout=PATIENCE_S)
    assert talking.stored()[1] == ("So.", "stop")


async def test_a_disk_that_is_full_at_the_end_is_the_answers_failure(talking: Talking) -> None:
    talking.store.broken = True
    answer = await talking.ending()
    talking.store.go.set()
    await talking.until(lambda: talking.ended)
    assert answer.finish == "error"
    assert answer.disco == {"error": "the disk is full"}
    assert talking.stored()[1] == ("So.", None), "its words are safe"


# --- words that rest --------------------------------------------------------------------------------------------------


async def test_what_was_said_rests_in_the_store_and_is_still_said(talking: Talking) -> None:
    talking.store.go.set()
    question, answer = talking.conversations.ask("Why?")
    talking.daemon.say("So.")
    talking.daemon.end()
    await talking.until(lambda: talking.ended)
    assert not question.is_loaded
    assert not answer.is_loaded
    talking.conversations.cache.clear()
    assert (question.text, answer.text, answer.finish) == ("Why?", "So.", "stop")
    talking.conversations.ask("And why that?")
    await talking.until(lambda: len(talking.daemon.asked) == 2)
    said = [(message["role"], message["content"]) for message in talking.daemon.asked[-1]["messages"]]
    assert said == [("user", "Why?"), ("assistant", "So."), ("user", "And why that?")]


async def test_words_that_are_not_in_the_store_stay_in_memory_and_are_sent(talking: Talking) -> None:
    talking.store.broken = True
    answer = await talking.ending()
    talking.store.go.set()
    await talking.until(lambda: talking.ended)
    assert answer.is_loaded
    talking.conversations.cache.clear()
    assert answer.text == "So."
    talking.store.broken = False
    talking.conversations.ask("And why that?")
    await talking.until(lambda: len(talking.daemon.asked) == 2)
    assert talking.daemon.asked[-1]["messages"][1]["content"] == "So."


def test_a_cache_says_why_it_has_no_words() -> None:
    store = Store(None)
    cache = MessageCache(store)
    assert "removed" in (cache(7).disco or {})["error"]
    store.close()
    assert "cannot be read" in (cache(7).disco or {})["error"]
