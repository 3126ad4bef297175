"""How the chat looks: at two sizes, dark and light, in plain mode and without colour."""

from __future__ import annotations

import re

import pytest

from disco_tui.app import LIGHT, DiscoApp
from disco_tui.data.store import Store
from disco_tui.widgets.prompt import Prompt
from disco_tui.widgets.transcript import Transcript
from tests.fixtures.snapshots import compare
from tests.fixtures.tui import DISCO, STATE, dictated, screen_text, shown, until

ANSWER = (
    "## Two ways\n\nA **list** holds what comes, a `set` holds it *once*. For example:\n\n"
    "```python\nseen = set()\nfor word in words:\n    seen.add(word)  # only once\n```\n\n"
    "| type | order | twice |\n|---|---|---|\n| list | kept | yes |\n| set | none | no |\n\n"
    "1. Use a list to keep order.\n2. Use a set to ask *is it there?*\n"
)
SEAM = ANSWER.index("For example")


def fill(store: Store) -> None:
    """Three conversations; the latest is about lists."""
    for title in ("Plan a week in the mountains", "Why is the sky blue?"):
        conversation = store.new()
        store.add(conversation.id, "user", title)
    conversation = store.new()
    store.add(conversation.id, "user", "When do I want a list, and when a set?")
    turn = store.add(conversation.id, "assistant", "")
    store.append(turn, ANSWER[:SEAM], "device")
    store.append(turn, ANSWER[SEAM:], "server")
    store.finish(turn, "stop", DISCO)


async def opened(app: DiscoApp) -> None:
    """The latest conversation, with a cursor that does not blink."""
    app.chat.query_one(Prompt).cursor_blink = False
    app.conversations.open(app.store.list()[0].id)
    app.chat.show_conversation()


@pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_chat(size: tuple[int, int], light: bool) -> None:
    async with dictated() as daemon, shown(daemon.root, size=size, before=fill) as (app, pilot):
        await opened(app)
        if light:
            app.theme = LIGHT
        await pilot.pause()
        await compare(pilot, f"chat-{size[0]}x{size[1]}-{'light' if light else 'dark'}")


async def test_first_look() -> None:
    async with dictated() as daemon, shown(daemon.root, size=(80, 24)) as (app, pilot):
        app.chat.query_one(Prompt).cursor_blink = False
        await pilot.pause()
        await compare(pilot, "first-80x24-dark")


async def test_help_and_banner() -> None:
    async with dictated() as daemon, shown(daemon.root, size=(80, 24), before=fill) as (app, pilot):
        daemon.state = STATE | {"endpoints": {"device": {"model": "smollm2-135m", "state": "loading"}}}
        await app.check_daemon()
        await opened(app)
        await pilot.press("f1")
        await pilot.pause()
        await compare(pilot, "help-80x24-dark")


async def test_plain_mode_has_no_frame() -> None:
    async with dictated() as daemon, shown(daemon.root, size=(80, 24), plain=True, before=fill) as (app, pilot):
        await opened(app)
        await pilot.pause()
        await compare(pilot, "plain-80x24-dark")
        app.chat.query_one(Transcript).action_end(0)
        await pilot.pause()
        text = screen_text(app)
        assert "disco [device]:" in text
        assert not set(text) & set("─│╭╮╰╯▏")


async def test_without_colour_marks_say_who_wrote_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with dictated() as daemon, shown(daemon.root, size=(80, 24), before=fill) as (app, pilot):
        await opened(app)
        await pilot.pause()
        app.chat.query_one(Transcript).action_end(0)
        await until(pilot, lambda: "⇢◇ For example" in screen_text(app))
        drawn = app.export_screenshot()
        colours = set(re.findall(r"fill: #([0-9a-f]{6})", drawn)) - {"c5c8c6"}  # that one is the picture's own
        assert colours
        assert all(c[:2] == c[2:4] == c[4:] for c in colours), "only greys"
