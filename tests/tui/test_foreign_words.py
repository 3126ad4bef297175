"""Foreign words on every screen: names, errors, addresses and figures that a daemon was told by others."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

import disco_tui as tui
from disco_daemon.plain import plain
from disco_tui.app import DiscoApp
from disco_tui.screens.control import ControlScreen
from disco_tui.screens.dashboard import DashboardScreen
from tests.fixtures.recorded_daemon import on_stage, playing
from tests.fixtures.tui import DISCO, KNOWN, STATE, Dictated, checked, dictated, shown, trouble, until

# Sequences for a terminal, a turn of the writing direction, a forged line, markup of Textual that is never closed, and
# an action that a click would carry out.
EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b31m\u202egnp\r\x08[/][b][@click=app.quit]x"
WORDS = frozenset(
    {"model", "last_error", "title", "name", "base_url", "key_url", "source", "mend", "text", "error", "message", "why",
     "reason", "url", "path", "probed", "version", "device_name", "host", "provider", "note", "said", "id", "winner"}
)  # fmt: skip


def evil(document: Any, key: str = "") -> Any:
    """A document whose words have something hidden behind them."""
    if isinstance(document, dict):
        return {name: evil(value, name) for name, value in document.items()}
    if isinstance(document, list):
        return [evil(value, key) for value in document]
    return f"{document}{EVIL}" if isinstance(document, str) and key in WORDS else document


def cells(app: App[None]) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def require_plain(app: App[None]) -> None:
    text = cells(app)
    assert text == plain(text), {hex(ord(c)) for c in text if plain(c) != c}
    assert app.is_running


@pytest.mark.parametrize("is_plain", [False, True], ids=["drawn", "plain"])
async def test_an_answer_with_all_that_a_server_may_say_is_plain_on_every_screen(is_plain: bool) -> None:
    async with dictated() as daemon:
        daemon.state, daemon.models, daemon.known = evil(STATE), ["disco", f"disco{EVIL}"], evil(KNOWN)
        async with shown(daemon.root, plain=is_plain) as (app, pilot):
            await ask(app, pilot, daemon)
            daemon.say("", thought=f"hm {EVIL}")
            await until(pilot, lambda: "hm" in cells(app))
            require_plain(app)
            daemon.say(f"word {EVIL} `{EVIL}` **{EVIL}**\n\n```{EVIL}\n{EVIL}\n```\n| {EVIL} |\n|-|\n\n[x](<{EVIL}>)")
            daemon.say(f"\n\nmore {EVIL}", "server")
            daemon.end("length", evil(DISCO))
            await until(pilot, lambda: app.conversations.running is None)
            await until(pilot, lambda: "more" in cells(app))
            require_plain(app)
            await ask(app, pilot, daemon)
            daemon.fail(f"no {EVIL}")
            await until(pilot, lambda: app.conversations.running is None)
            await pilot.pause()
            require_plain(app)
            for key in ("f1", "escape", "f3", "f4", "f2", "f5", "escape"):
                await pilot.press(key)
                await pilot.pause()
                require_plain(app)


@pytest.mark.parametrize("screen", [ControlScreen, DashboardScreen])
async def test_what_a_daemon_was_told_is_plain_on_the_other_screens(screen: type[Screen[None]]) -> None:
    async with playing() as daemon:
        daemon.state, daemon.settings = evil(daemon.state), evil(daemon.settings)
        daemon.rows, daemon.ledger, daemon.plan = evil(daemon.rows), evil(daemon.ledger), evil(daemon.plan)
        daemon.whatif = evil(daemon.whatif)
        daemon.refuses = f"no {EVIL}"
        async with on_stage(daemon.root, screen(), size=(120, 40)) as (app, pilot):
            for key in ("right", "tab", "down", "enter", "right", "tab", "left"):
                await pilot.press(key)
                await pilot.pause(0.05)
                require_plain(app)


async def test_what_a_server_says_when_it_is_set_up_is_plain() -> None:
    async with dictated() as daemon:
        daemon.known = evil(KNOWN)
        daemon.checks = [
            evil(trouble("refused", "the server said no")),
            evil(checked(models=[f"m{EVIL}", "n"], notes=[f"a note {EVIL}"])),
            evil(checked(ttft_s=0.4, price={"known": True, "input_usd_per_mtok": 0.1, "output_usd_per_mtok": 0.6,
                                            "source": "groq", "mend": "m"}, notes=[f"a note {EVIL}"])),
        ]  # fmt: skip
        async with shown(daemon.root) as (app, pilot):
            await pilot.press("f5")
            for _ in range(12):
                await pilot.pause(0.05)
                require_plain(app)
                await pilot.press("enter")


async def ask(app: DiscoApp, pilot: Pilot[None], daemon: Dictated) -> None:
    """Ask for something, and wait until the daemon has it."""
    n = len(daemon.asked)
    await pilot.press(*"Why?", "enter")
    await until(pilot, lambda: len(daemon.asked) > n)


def test_no_screen_has_a_label_that_reads_markup() -> None:
    """Whoever writes a new one takes a kind whose words are shown as they are."""
    folder = Path(tui.__file__).parent
    made = {
        f"{path.name}: {call.func.id}"
        for path in [*folder.glob("screens/*.py"), *folder.glob("widgets/*.py")]
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("Label", "Static")
    }
    assert not made
