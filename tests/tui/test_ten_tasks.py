"""What a new user wants to do, by a name each, with no more keys than it took when somebody counted (typed text aside).

Two of the ten wait: to make it cheaper by a fifth, and to see what the battery changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from disco_tui.app import DiscoApp
from disco_tui.data.store import Store
from disco_tui.screens.dialogs import ChoiceDialog
from disco_tui.screens.setup import SetupScreen
from disco_tui.screens.timeline import TimelineScreen
from tests.fixtures.provider import SECRET
from tests.fixtures.tui import DISCO, PRICE, STATE, Dictated, checked, dictated, screen_text, shown, until

TODAY = STATE | {"money": {"caps": {}, "spent": {"usd_today": 0.0191, "usd_this_month": 0.0191, "wh_today": 1.2}}}


@dataclass
class User:
    """Presses keys, and counts them; what is typed or pasted does not count."""

    app: DiscoApp
    pilot: Pilot[None]
    keys: int = 0

    async def press(self, *keys: str) -> None:
        self.keys += len(keys)
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        await self.pilot.press(*text)

    async def sees(self, *texts: str) -> None:
        await until(self.pilot, lambda: all(text in screen_text(self.app) for text in texts))


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        server.state = TODAY
        yield server


def last_week(store: Store) -> None:
    """Three conversations, the oldest about soup, and the latest with an answer that moved."""
    for question, answer in (("Lentil soup?", "Take red lentils."), ("Hello", "Good day."), ("Sky?", "It scatters ")):
        conversation = store.new()
        store.add(conversation.id, "user", question)
        turn = store.add(conversation.id, "assistant", "")
        store.append(turn, answer, "device")
        if question == "Sky?":
            store.append(turn, "blue light.", "server")
        store.finish(turn, "length" if question == "Sky?" else "stop", DISCO | {"cost_usd": 0.0001})


@asynccontextmanager
async def user(daemon: Dictated, *, opened: bool = True) -> AsyncIterator[User]:
    async with shown(daemon.root, size=(80, 24), before=last_week) as (app, pilot):
        if opened:
            app.conversations.open(app.store.list()[0].id)
            app.chat.show_conversation()
        await until(pilot, lambda: "ready" in screen_text(app))
        yield User(app, pilot)


async def test_what_did_today_cost(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.sees("$0.019 today")
        assert you.keys == 0


async def test_who_wrote_this_word(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.sees("◆ It scatters ⇢◇ blue light.", "◆ this machine", "◇ server")
        assert you.keys == 0


async def test_keep_this_question_here_and_the_next_conversation_is_free_again(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.press("f8")
        await until(you.pilot, lambda: isinstance(you.app.screen, ChoiceDialog))
        await you.press("down", "enter")
        await you.sees("disco/device: F8")
        await you.type("Who?")
        await you.pilot.press("enter")
        await until(you.pilot, lambda: daemon.asked)
        assert daemon.asked[0]["model"] == "disco/device"
        assert you.keys == 3
        daemon.end()
        await until(you.pilot, lambda: you.app.conversations.running is None)
        await you.press("ctrl+n")
        assert you.app.conversations.model == "disco"
        assert "disco/device: F8" not in screen_text(you.app)
        assert you.keys == 4


async def test_why_was_this_one_slow(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.press("ctrl+t")
        await until(you.pilot, lambda: isinstance(you.app.screen, TimelineScreen))
        await you.press("pagedown")
        await you.sees("first token")
        assert you.keys == 2


async def test_which_model_is_running(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.sees("◆ smollm2-135m · ready", "◇ big-one")
        assert you.keys == 0


async def test_continue_that_answer(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.sees("Ctrl+G goes on")
        await you.press("ctrl+g")
        await until(you.pilot, lambda: daemon.asked)
        assert daemon.asked[0]["continue_final_message"] is True
        assert you.keys == 1


async def test_find_last_weeks_conversation(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.press("ctrl+f")
        await you.type("lentils")
        await you.sees("Lentil soup?")
        await you.press("enter")
        await you.sees("Take red lentils.")
        assert you.keys == 2


async def test_add_a_server(daemon: Dictated) -> None:
    daemon.checks = [checked(models=["one"]), checked(ttft_s=0.4, price=PRICE)]
    async with user(daemon) as you:
        await you.sees("f5 Setup")
        await you.press("f5")
        await until(you.pilot, lambda: isinstance(you.app.screen, SetupScreen))
        await you.sees("1")
        await you.press("1")
        await you.sees("API key")
        you.app.screen.query_one("#field", Input).value = SECRET
        await you.press("enter")
        await you.sees("the model")
        await you.press("enter")
        await you.sees("done")
        await you.press("enter")
        await until(you.pilot, lambda: you.app.screen is you.app.chat)
        assert you.keys == 5
        assert [kind for kind, _ in daemon.wishes] == ["check", "check", "save"]


async def test_see_that_the_key_was_refused(daemon: Dictated) -> None:
    async with user(daemon) as you:
        failing = {"tried": True, "failing": {"reason": "unauthorized", "since": 0.0}, "last_error": "it said 401"}
        sides = STATE["endpoints"]
        daemon.state = TODAY | {"endpoints": sides | {"server": sides["server"] | failing}}
        await you.type("Who?")
        await you.pilot.press("enter")
        await until(you.pilot, lambda: daemon.asked)
        daemon.say("Me.")
        daemon.end()
        await you.sees("◇ big-one ✗ key refused · F5")
        assert you.keys == 0


async def test_find_any_action_by_its_name(daemon: Dictated) -> None:
    async with user(daemon) as you:
        await you.press("ctrl+p")
        await you.type("another model")
        await you.sees("Add a server or another model", "F5")
        await you.press("enter")
        await until(you.pilot, lambda: isinstance(you.app.screen, SetupScreen))
        assert you.keys == 2
