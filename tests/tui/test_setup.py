"""First steps in the terminal UI: F5, the greeting, a daemon that is started by itself, and a theme that stays."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static

from disco_tui.app import LIGHT, DiscoApp
from disco_tui.data.preferences import NAME, Preferences
from disco_tui.data.setup_draft import SetupDraft, fitting, result_of
from disco_tui.screens.setup import SetupScreen
from tests.fixtures.provider import SECRET
from tests.fixtures.snapshots import compare
from tests.fixtures.tui import (
    KNOWN,
    PRICE,
    STATE,
    Dictated,
    checked,
    dictated,
    fetching,
    screen_text,
    shown,
    trouble,
    until,
)

GROQ = "https://api.groq.com/openai/v1"
ALONE = STATE | {"endpoints": {"device": STATE["endpoints"]["device"]}}
LISTED = checked(models=["llama-3.1-8b-instant", "llama-3.3-70b-versatile", "qwen/qwen3-32b"])
TESTED = checked(ttft_s=0.421, price=PRICE)


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        yield server


def type_in(app: DiscoApp, text: str) -> None:
    """As if it was pasted: all at once."""
    app.screen.query_one("#field", Input).value = text


def head(app: DiscoApp) -> str:
    return str(app.screen.query_one("#head").render()) if isinstance(app.screen, SetupScreen) else ""


async def at(app: DiscoApp, pilot: Pilot[None], words: str) -> None:
    """Wait for a step."""
    await until(pilot, lambda: words in head(app))
    await pilot.pause()


async def to_models(app: DiscoApp, pilot: Pilot[None], daemon: Dictated) -> None:
    """F5, the first provider, the key."""
    daemon.checks.insert(0, LISTED)
    await pilot.press("f5")
    await at(app, pilot, "who shall answer")
    await pilot.press("1")
    await at(app, pilot, "API key")
    type_in(app, SECRET)
    await pilot.press("enter")
    await at(app, pilot, "the model")


def saved(daemon: Dictated) -> list[object]:
    return [body for kind, body in daemon.wishes if kind == "save"]


async def test_provider_key_model_test_and_saved(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await to_models(app, pilot, daemon)
        await until(pilot, lambda: "3 models" in screen_text(app))
        daemon.checks = [TESTED]
        await pilot.press(*"70b", "enter")
        await at(app, pilot, "done")
        await until(pilot, lambda: "answered after 0.42 s" in screen_text(app))
        await until(pilot, lambda: "$0.15 and $0.6" in screen_text(app))
        await until(pilot, lambda: "restart it without that flag" in screen_text(app))
        wanted = {"base_url": GROQ, "api_key": SECRET, "model": "llama-3.3-70b-versatile"}
        assert daemon.wishes == [("check", wanted | {"model": ""}), ("check", wanted), ("save", wanted)]
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is app.chat)


async def test_the_key_is_never_on_the_screen_and_in_no_repr(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("1")
        await at(app, pilot, "API key")
        type_in(app, SECRET)
        await pilot.pause()
        assert SECRET not in screen_text(app)
        await until(pilot, lambda: "•" in screen_text(app))
        assert SECRET not in repr(SetupDraft(key=SECRET))


@pytest.mark.parametrize("step", ["who", "key", "model", "test"])
async def test_escape_leaves_everything_as_it_was(daemon: Dictated, step: str) -> None:
    async with shown(daemon.root) as (app, pilot):
        if step in ("model", "test"):
            await to_models(app, pilot, daemon)
        else:
            await pilot.press("f5")
            await at(app, pilot, "who shall answer")
        if step == "key":
            await pilot.press("1")
            await at(app, pilot, "API key")
        if step == "test":
            daemon.held.clear()
            daemon.checks = [TESTED]
            await pilot.press("enter")
            await until(pilot, lambda: len(daemon.wishes) == 2)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)
        daemon.held.set()
        await pilot.pause(0.05)
        assert saved(daemon) == []
        assert app.screen is app.chat


async def test_a_wrong_key_and_a_wrong_model_are_asked_for_again(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        daemon.checks = [trouble("key", "the server refuses the key")]
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("enter")
        await at(app, pilot, "API key")
        type_in(app, "sk-wrong")
        await pilot.press("enter")
        await until(pilot, lambda: "refuses the key" in screen_text(app))
        assert "API key" in head(app)
        daemon.checks = [LISTED, trouble("model", "it does not answer"), TESTED]
        type_in(app, SECRET)
        await pilot.press("enter")
        await at(app, pilot, "the model")
        await pilot.press("enter")
        await until(pilot, lambda: "it does not answer" in screen_text(app))
        assert saved(daemon) == []
        await pilot.press("down", "enter")
        await at(app, pilot, "done")
        assert saved(daemon) == [{"base_url": GROQ, "api_key": SECRET, "model": "llama-3.3-70b-versatile"}]


async def test_a_key_that_is_there_is_used_with_enter(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        daemon.checks = [LISTED]
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("2")
        await at(app, pilot, "API key")
        await until(pilot, lambda: "Enter takes the key in $OPENAI_API_KEY" in screen_text(app))
        await pilot.press("enter")
        await at(app, pilot, "the model")
        assert daemon.wishes[0][1]["api_key"] == ""


async def test_another_address_without_a_list_of_models(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        daemon.checks = [trouble("network", "Connection refused"), checked(notes=["It gives no list."]), TESTED]
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("0")
        for address in ("http://127.0.0.1:1/v1", "http://127.0.0.1:8080/v1"):
            await at(app, pilot, "address")
            type_in(app, address)
            await pilot.press("enter")
            await at(app, pilot, "API key")
            await pilot.press("enter")
        await at(app, pilot, "the model")
        await until(pilot, lambda: "It gives no list." in screen_text(app))
        await pilot.press(*"llama", "enter")
        await at(app, pilot, "done")
        assert saved(daemon) == [{"base_url": "http://127.0.0.1:8080/v1", "api_key": "", "model": "llama"}]


async def test_an_address_is_mended_or_refused_before_a_key_is_asked_for(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("0")
        await at(app, pilot, "address")
        type_in(app, "nonsense")
        await pilot.press("enter")
        await until(pilot, lambda: "That is no address" in screen_text(app))
        type_in(app, "127.0.0.1:18700")
        await pilot.press("enter")
        await at(app, pilot, "API key")
        assert "http://127.0.0.1:18700" in screen_text(app)


async def test_no_server_and_another_local_model(daemon: Dictated) -> None:
    daemon.known = KNOWN | {"server": {"base_url": GROQ, "model": "m"}}
    async with shown(daemon.root) as (app, pilot):
        for key in ("n", "m"):
            await pilot.press("f5")
            await at(app, pilot, "who shall answer")
            await until(pilot, lambda: "(in use)" in screen_text(app))
            await pilot.press(key)
            if key == "m":
                await at(app, pilot, "this machine's model")
                await pilot.press(*["down"] * 4, "enter")
            await at(app, pilot, "done")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)
        assert saved(daemon) == [
            {"base_url": "", "api_key": "", "model": ""},
            {"model": "/models/qwen.gguf"},
        ]


async def test_p_goes_back_to_the_model_before_where_there_is_one(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        for previous in ("", "older.gguf"):
            daemon.known = KNOWN | {"device": KNOWN["device"] | {"previous": previous}}
            await pilot.press("f5")
            await at(app, pilot, "who shall answer")
            await pilot.press("m")
            await at(app, pilot, "this machine's model")
            assert ("older.gguf  the one before" in screen_text(app)) == bool(previous)
            await pilot.press("p")
            if previous:
                await at(app, pilot, "done")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)
        assert saved(daemon) == [{"model": "previous"}]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("ready", "loaded, 1.2 GB of memory."),
        ("waiting", "waits for a place"),
        ("loading", "is being loaded"),
        ("failed", "cannot be loaded"),
        ("unloaded", "here, loaded when"),
    ],
)
async def test_the_list_of_models_says_how_named_ones_are_and_what_others_fetch(
    daemon: Dictated, state: str, words: str
) -> None:
    daemon.state = STATE | {
        "models": [{"name": "coder", "state": state, "memory_bytes": 1.2e9}],
        "fetches": [fetching(5e8), fetching(5e8) | {"title": "Another", "id": "a"}],
    }
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("m")
        await at(app, pilot, "this machine's model")
        for found in (f"disco/coder: {words}", "Fetching Qwen3 4B", "Fetching Another"):
            assert found in screen_text(app)


async def test_many_named_models_leave_room_for_the_choice(daemon: Dictated) -> None:
    named = [{"name": f"m{i}", "state": "unloaded", "memory_bytes": 0} for i in range(20)]
    named[-1] |= {"state": "ready", "memory_bytes": 1.2e9}
    daemon.state = STATE | {
        "models": named,
        "fetches": [fetching(5e8), fetching(5e8) | {"title": "Another", "id": "a"}],
    }
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("m")
        await at(app, pilot, "this machine's model")
        text = screen_text(app)
        for words in (
            "disco/m19: loaded",
            "disco/m1: here",
            "And 17 more",
            "fetch Qwen3 4B",
            "fetch Llama 3.2",
            "fetch Qwen3 8B",
        ):
            assert words in text, text
        assert "disco/m2:" not in text


async def test_without_a_daemon_it_says_so() -> None:
    async with shown("http://127.0.0.1:9") as (app, pilot):
        await pilot.press("f5")
        await until(pilot, lambda: "no daemon at" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is app.chat)


async def test_the_daemon_goes_by_it_at_once_and_the_chat_goes_on(daemon: Dictated) -> None:
    daemon.flagged = False
    async with shown(daemon.root) as (app, pilot):
        await pilot.press(*"Why?", "enter")
        await until(pilot, lambda: daemon.asked)
        await to_models(app, pilot, daemon)
        daemon.checks = [TESTED]
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: "Saved." in screen_text(app))
        assert app.conversations.answering, "the answer under way goes on"


@pytest.mark.parametrize("way", ["server", "none", "device"])
async def test_what_went_with_the_choice_before_is_said_and_what_goes_before_the_new_one(
    daemon: Dictated, way: str
) -> None:
    daemon.notes, daemon.shadowed, daemon.checks = ["server.grade = 10 is taken out."], ["DISCO_X"], [TESTED]
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        screen = app.screen
        assert isinstance(screen, SetupScreen)
        if way == "none":
            screen._wait("", screen._set_none)
        else:
            screen._wait("", screen._try if way == "server" else screen._set_local, "m")
        await until(pilot, lambda: "DISCO_X" in screen_text(app))
        text = str(screen.query_one("#said").render())
        assert "server.grade = 10 is taken out. But the variable DISCO_X is set, and goes before it." in text


@pytest.mark.parametrize(("code", "told"), [(0, "Setup: done"), (1, "who shall answer")])
async def test_the_service_takes_over_from_the_daemon_of_this_window(
    code: int, told: str, daemon: Dictated, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(daemon.root) as (app, pilot):
        monkeypatch.setattr(app.launcher, "command", lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
        says = f"print('wrote a unit'); raise SystemExit({code})"
        monkeypatch.setattr(app.launcher, "service_command", lambda: [sys.executable, "-c", says])
        await app.launcher.start()
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("s")
        await until(pilot, lambda: "wrote a unit" in screen_text(app))
        await until(pilot, lambda: told in screen_text(app))
        assert app.launcher.running is (code != 0), "the port is the service's, or still ours"


async def test_a_long_list_is_shortened_by_typing(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await to_models(app, pilot, daemon)
        options = app.screen.query_one(OptionList)
        assert options.option_count == 3
        await pilot.press(*"qwen")
        await until(pilot, lambda: options.option_count == 1)
        await pilot.press("backspace", "backspace", "backspace", "backspace")
        await until(pilot, lambda: options.option_count == 3)
    assert fitting(["a/B-c", "b"], "B a") == ["a/B-c"]
    assert len(fitting([f"m{i}" for i in range(1000)], "m")) == 200


@pytest.mark.parametrize(
    ("price", "words"),
    [
        (None, "m answered after 0.42 s."),
        (PRICE, "It charges $0.15 and $0.6 per million"),
        (PRICE | {"known": False}, "is not known, so it counts as $0.15 and $0.6"),
        (PRICE | {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0}, "bills nothing"),
    ],
)
def test_what_an_answer_costs_is_a_sentence(price: dict[str, object] | None, words: str) -> None:
    assert words in result_of(TESTED | {"model": "m", "price": price})


# --- the greeting, the start, what stays ------------------------------------------------------------------------------


async def test_who_has_no_server_is_greeted_once(daemon: Dictated, tmp_path: Path) -> None:
    daemon.state = ALONE
    path = tmp_path / "c.sqlite"
    async with shown(daemon.root, path=path) as (app, pilot):
        await until(pilot, lambda: "F5 adds a server" in screen_text(app))
        await pilot.press("escape")
        await pilot.pause()
        await until(pilot, lambda: "F5 adds a server" not in screen_text(app))
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: "F5 adds a server" not in screen_text(app))
    async with shown(daemon.root, path=path) as (app, pilot):
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: "F5 adds a server" not in screen_text(app))


async def test_who_has_a_server_is_not_greeted(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: "F5 adds a server" not in screen_text(app))


async def test_the_setup_waits_for_a_daemon_that_is_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemon: Dictated
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("disco_daemon.client.launcher.DaemonLauncher.command", lambda self: command)
    async with shown("http://127.0.0.1:9", path=tmp_path / "c.sqlite", start=True) as (app, pilot):
        await until(pilot, lambda: app.launcher.running)
        await pilot.press("f5")
        await until(pilot, lambda: "Asking the daemon" in screen_text(app))
        await app.check_daemon()  # it is not there yet
        await pilot.pause()
        assert "Asking the daemon" in screen_text(app)
        app.link.root = daemon.root
        await at(app, pilot, "who shall answer")


async def test_a_daemon_is_started_where_none_runs_and_a_question_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemon: Dictated
) -> None:
    """The daemon comes up (here: the link finds it) after the question was asked."""
    up = daemon.root
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("disco_daemon.client.launcher.DaemonLauncher.command", lambda self: command)
    async with shown("http://127.0.0.1:9", path=tmp_path / "c.sqlite", start=True) as (app, pilot):
        await until(pilot, lambda: app.launcher.running)
        await until(pilot, lambda: "The daemon is starting" in screen_text(app))
        await until(pilot, lambda: "the daemon is starting" in screen_text(app).splitlines()[-2])
        await pilot.press(*"Why?", "enter")
        await pilot.pause(0.05)
        assert app.conversations.running is not None
        app.link.root = up
        await until(pilot, lambda: daemon.asked)
        daemon.say("So.")
        daemon.end()
        await until(pilot, lambda: app.conversations.running is None)
        assert app.conversations.entries[-1].text == "So."


async def test_without_start_none_is_started() -> None:
    async with shown("http://127.0.0.1:9") as (app, pilot):
        await until(pilot, lambda: "F9 starts one" in screen_text(app))
        await app.check_daemon()
        assert not app.launcher.running


async def test_a_daemon_that_ends_at_once_is_told_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "disco_daemon.client.launcher.DaemonLauncher.command", lambda self: ["/bin/sh", "-c", "echo no model; exit 1"]
    )
    async with shown("http://127.0.0.1:9", path=tmp_path / "c.sqlite", start=True) as (app, pilot):
        await until(pilot, lambda: "has ended: no model" in screen_text(app))
        await pilot.press(*"one", "enter")
        await until(pilot, lambda: app.conversations.running is None)
        assert app.conversations.entries[-1].finish == "error"
        await app.check_daemon()
        assert app.launcher.has_failed


async def test_the_theme_stays(daemon: Dictated, tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    async with shown(daemon.root, path=path) as (app, pilot):
        await pilot.press("ctrl+l")
        await until(pilot, lambda: app.preferences.theme == LIGHT)
    file = tmp_path / NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with shown(daemon.root, path=path) as (app, pilot):
        assert app.theme == LIGHT
        app.theme = "nord"
        await until(pilot, lambda: app.preferences.theme == "nord")
    async with shown(daemon.root) as (app, pilot):
        assert app.theme != "nord", "without a store nothing is kept"
    assert json.loads(file.read_text())["theme"] == "nord"


@pytest.mark.parametrize("text", ["", "[", "[]", '{"theme": 7, "welcomed": "yes"}', '{"theme": "no-such-theme"}'])
async def test_preferences_that_make_no_sense_cost_nothing(daemon: Dictated, tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert not Preferences.load(tmp_path / NAME).welcomed
    async with shown(daemon.root, path=tmp_path / "c.sqlite") as (app, _):
        assert app.theme in app.available_themes


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_pictures(daemon: Dictated, size: tuple[int, int], light: bool) -> None:
    async with shown(daemon.root, size=size) as (app, pilot):
        if light:
            app.theme = LIGHT
        name = f"{size[0]}x{size[1]}-{'light' if light else 'dark'}"
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await compare(pilot, f"setup-who-{name}")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)
        await to_models(app, pilot, daemon)
        app.screen.query_one(Input).cursor_blink = False
        daemon.checks = [trouble("model", "qwen/qwen3-32b does not answer (404)")]
        await pilot.press(*"qwen", "enter")
        await until(pilot, lambda: "does not answer" in screen_text(app))
        await pilot.pause()
        await compare(pilot, f"setup-model-{name}")


async def test_plain_mode_has_no_frame(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24), plain=True) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await until(pilot, lambda: not set(screen_text(app)) & set("─│╭╮╰╯▏"))
        await compare(pilot, "setup-plain-80x24-dark")


async def test_the_greeting_is_one_quiet_line(daemon: Dictated) -> None:
    daemon.state = ALONE
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        app.chat.query_one("Prompt").cursor_blink = False  # type: ignore[attr-defined]
        await until(pilot, lambda: "F5 adds a server" in screen_text(app))
        await pilot.pause()
        await compare(pilot, "welcome-80x24-dark")


# --- a model that is fetched ------------------------------------------------------------------------------------------

STAND_IN = ALONE | {"stand_in": "135M"}


async def to_offers(app: DiscoApp, pilot: Pilot[None]) -> None:
    """F5, and a real model."""
    await pilot.press("f5")
    await at(app, pilot, "who shall answer")
    await pilot.press("enter")
    await at(app, pilot, "this machine's model")


async def test_a_stand_in_is_called_one_in_every_window_until_it_is_dismissed(daemon: Dictated, tmp_path: Path) -> None:
    daemon.state = STAND_IN
    for _ in range(2):
        async with shown(daemon.root, path=tmp_path / "store.sqlite") as (app, pilot):
            await until(pilot, lambda: "Answers come from a 135M stand-in. F5 gets a real model" in screen_text(app))
            await pilot.press("escape")
            await until(pilot, lambda: "stand-in" not in screen_text(app))


OFFERED = "Models that suit this machine"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
async def test_the_first_window_offers_models_and_a_key_fetches_one(
    daemon: Dictated, tmp_path: Path, size: tuple[int, int]
) -> None:
    daemon.state = STAND_IN
    path = tmp_path / "store.sqlite"
    async with shown(daemon.root, path=path, size=size) as (app, pilot):
        app.chat.query_one("Prompt").cursor_blink = False  # type: ignore[attr-defined]
        await until(pilot, lambda: OFFERED in screen_text(app))
        for title, n_bytes, speed in (
            ("Qwen3 4B", "2.5 GB", "7.9"),
            ("Llama 3.2 1B", "810 MB", "24"),
            ("Qwen3 8B", "5.0 GB", "3.9"),
        ):
            line = next(line for line in screen_text(app).splitlines() if title in line)
            assert n_bytes in line
            assert f"about {speed} token/s" in line
            assert "Apache-2.0" in line
        await compare(pilot, f"welcome-models-{size[0]}x{size[1]}-dark")
        assert daemon.wishes == [], "nothing is fetched without a yes"
        await pilot.press("up", "down", "enter")
        await at(app, pilot, "a model for this machine")
        await until(pilot, lambda: "20 %, 500 MB of 2.5 GB" in screen_text(app))
        assert daemon.wishes == [("fetch", {"model": "llama-3.2-1b"})]
        daemon.state = ALONE | {"fetch": fetching(2.5e9, "done")}
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: "is in use." in screen_text(app))
        assert OFFERED not in screen_text(app)
        assert app.focused is app.chat.query_one("Prompt")
    daemon.state = STAND_IN
    async with shown(daemon.root, path=path, size=size) as (app, pilot):
        await until(pilot, lambda: "F5 gets a real model" in screen_text(app))
    assert daemon.n_looks == 1, "later windows do not ask, and measure nothing"


async def test_a_fetch_that_fails_from_the_first_window_shows_the_list_again(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: OFFERED in screen_text(app))
        await pilot.press("up", "enter")
        await at(app, pilot, "a model for this machine")
        daemon.state = STAND_IN | {"fetch": fetching(5e8, "failed", "the Hub cannot be reached")}
        await at(app, pilot, "this machine's model")
        await until(pilot, lambda: "is not in use: the Hub cannot be reached" in screen_text(app))
        assert "Llama 3.2 1B Instruct" in screen_text(app)


@pytest.mark.parametrize("keys", [["escape"], [*"Why?", "enter"], ["ctrl+n"]], ids=["escape", "a question", "new"])
async def test_who_goes_on_is_not_held_up_by_the_offers(daemon: Dictated, keys: list[str]) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: OFFERED in screen_text(app))
        await pilot.press(*keys)
        await until(pilot, lambda: OFFERED not in screen_text(app))
        await pilot.press("up", "a")
        await until(pilot, lambda: app.focused is app.chat.query_one("Prompt"))
        assert daemon.wishes == []


async def test_offers_that_come_late_do_not_come_between_question_and_answer(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    daemon.held.clear()
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: daemon.n_looks)
        await pilot.press(*"Why?", "enter")
        await until(pilot, lambda: daemon.asked)
        daemon.held.set()
        daemon.say("So.")
        daemon.end()
        await until(pilot, lambda: app.conversations.running is None)
        await until(pilot, lambda: app._offers)
        assert OFFERED not in screen_text(app)


async def test_a_model_is_fetched_with_its_progress_shown_and_is_in_use(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root) as (app, pilot):
        await to_offers(app, pilot)
        text = screen_text(app)
        assert "Qwen3 4B Instruct 2507" in text
        assert "about 7.9 token/s" in text
        assert "Apache-2.0" in text
        assert daemon.wishes == [], "nothing is fetched without a yes"
        await pilot.press("enter")
        await at(app, pilot, "a model for this machine")
        await until(pilot, lambda: "20 %, 500 MB of 2.5 GB, 20.0 MB/s, 1 min left" in screen_text(app))
        assert daemon.wishes == [("fetch", {"model": "qwen3-4b"})]
        other = fetching(5e8) | {"id": "llama-3.2-1b", "title": "Llama 3.2 1B"}
        daemon.state = STAND_IN | {"fetch": fetching(2.5e9, "loading"), "fetches": [other, fetching(2.5e9, "loading")]}
        await until(pilot, lambda: "is being loaded" in screen_text(app))
        await until(pilot, lambda: "Fetching Llama 3.2 1B: 20 %" in screen_text(app))
        assert screen_text(app).count("is being loaded") == 1
        daemon.state = ALONE | {"fetch": fetching(2.5e9, "done")}
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: "Qwen3 4B Instruct 2507 is in use." in screen_text(app))


async def test_a_fetch_goes_on_behind_the_chat_is_found_again_and_can_be_cancelled(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root) as (app, pilot):
        await to_offers(app, pilot)
        await pilot.press("enter")
        await at(app, pilot, "a model for this machine")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: "Fetching Qwen3 4B Instruct 2507: 20 %" in screen_text(app))
        await pilot.press("f5")
        await at(app, pilot, "a model for this machine")
        await pilot.press("down", "enter")
        await at(app, pilot, "this machine's model")
        await until(pilot, lambda: "What came is kept" in screen_text(app))
        assert [kind for kind, _ in daemon.wishes] == ["fetch", "cancel"]


async def test_a_fetch_that_failed_says_why_at_the_list(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root) as (app, pilot):
        await to_offers(app, pilot)
        await pilot.press("enter")
        await at(app, pilot, "a model for this machine")
        daemon.state = STAND_IN | {"fetch": fetching(5e8, "failed", "the Hub cannot be reached")}
        await at(app, pilot, "this machine's model")
        await until(pilot, lambda: "is not in use: the Hub cannot be reached" in screen_text(app))


@pytest.mark.parametrize("size", [(120, 40), (80, 24)], ids=str)
async def test_the_picture_of_the_offers(daemon: Dictated, size: tuple[int, int]) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root, size=size) as (app, pilot):
        await to_offers(app, pilot)
        await compare(pilot, f"setup-offers-{size[0]}x{size[1]}-dark")


async def test_each_offer_is_one_line_with_its_licence_at_any_usual_width(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await to_offers(app, pilot)
        await pilot.press("down")
        choices = app.screen.query_one("#choices", OptionList)
        for columns, said in ((80, "Apache-2.0  "), (70, "Apache-2.0"), (120, "Apache-2.0"), (160, "MMLU-Pro")):
            await pilot.resize_terminal(columns, 24)
            lines = [line for line in screen_text(app).splitlines() if "fetch " in line]
            assert [said in line for line in lines] == [True] * 3, columns
            assert choices.virtual_size.height == choices.option_count, columns
            assert choices.highlighted == 1, columns


async def test_the_smallest_terminal_shows_the_choice_that_is_highlighted(daemon: Dictated) -> None:
    daemon.state = STAND_IN
    async with shown(daemon.root, size=(30, 8)) as (app, pilot):
        await pilot.press("f5")
        await until(pilot, lambda: "real model for" in screen_text(app))
        await pilot.press("down", "down")
        choices = app.screen.query_one("#choices", OptionList)
        chosen = choices.get_option_at_index(2).prompt
        await until(pilot, lambda: str(chosen)[:16] in screen_text(app))
        await pilot.press("m")
        await until(pilot, lambda: "fetch Qwen3 4B" in screen_text(app))


async def test_what_works_for_a_screen_is_over_before_its_parts_go(daemon: Dictated) -> None:
    gone = asyncio.Event()

    class Part(Static):
        def on_unmount(self) -> None:
            gone.set()

    class Late(Screen[None]):
        def compose(self) -> ComposeResult:
            yield Part(id="part")

        def on_mount(self) -> None:
            self.run_worker(self.look())

        async def look(self) -> None:
            await gone.wait()
            self.query_one("#part")

    async with shown(daemon.root) as (app, pilot):
        await app.push_screen(Late())
        await pilot.pause()
    assert gone.is_set()


# --- several servers ------------------------------------------------------------------------------------------------

BOX = {"name": "box", "base_url": "http://10.0.0.2:8080/v1", "model": "qwen3-30b-a3b", "key": "/keys/box@10.0.0.2"}
MANY = KNOWN | {
    "server": {"base_url": "https://api.openai.com/v1", "model": "gpt-4o-mini"},
    "servers": [
        {"name": "server", "base_url": "https://api.openai.com/v1", "model": "gpt-4o-mini", "key": "$OPENAI_API_KEY"},
        BOX,
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_several_servers_are_listed_and_one_is_tried_changed_and_taken_away(
    daemon: Dictated, size: tuple[int, int]
) -> None:
    shut = {"state": "open", "why": "server_error", "until_s": 9.0}
    daemon.known, daemon.flagged = MANY, False
    price = {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.6}
    daemon.state = STATE | {"servers": [
        {"name": "server", "model": "gpt-4o-mini", "state": "ready", "breaker": None, "price": price},
        {"name": "box", "model": "qwen3-30b-a3b", "state": "ready", "breaker": shut, "price": None},
    ]}  # fmt: skip
    async with shown(daemon.root, size=size) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        assert "Your servers (also box)" in screen_text(app)
        await pilot.press("v")
        await at(app, pilot, "your servers")
        await until(pilot, lambda: "$0.15/$0.60" in screen_text(app))
        assert "failing" in screen_text(app)
        await compare(pilot, f"setup-servers-{size[0]}x{size[1]}-dark")
        await pilot.press("down", "enter")
        await at(app, pilot, "one of your servers")
        daemon.checks = [trouble("network", "nobody answers"), TESTED, LISTED, TESTED]
        await pilot.press("enter")
        await until(pilot, lambda: "nobody answers" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: "answered after 0.42 s" in screen_text(app))
        wanted = {"base_url": BOX["base_url"], "api_key": "", "name": "box"}
        assert daemon.wishes == [("check", wanted | {"model": BOX["model"]})] * 2
        await pilot.press("down", "enter")
        await at(app, pilot, "the model")
        await pilot.press(*"70b", "enter")
        await until(pilot, lambda: app.screen is app.chat)
        assert saved(daemon) == [wanted | {"model": "llama-3.3-70b-versatile"}]
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("v")
        await at(app, pilot, "your servers")
        await pilot.press("down", "enter")
        await at(app, pilot, "one of your servers")
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: app.screen is app.chat)
        assert saved(daemon)[1:] == [{"base_url": "", "api_key": "", "model": "", "name": "box"}]


@pytest.mark.parametrize("beside", [True, False])
async def test_a_new_server_comes_beside_the_others_or_in_place_of_the_first(daemon: Dictated, beside: bool) -> None:
    daemon.known, daemon.flagged = MANY, False
    daemon.checks = [LISTED, TESTED]
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("1")
        await at(app, pilot, "beside the others?")
        assert "Beside the others, as api.groq.com" in screen_text(app)
        assert "In place of gpt-4o-mini" in screen_text(app)
        await pilot.press(*([] if beside else ["down"]), "enter")
        await at(app, pilot, "API key")
        type_in(app, SECRET)
        await pilot.press("enter")
        await at(app, pilot, "the model")
        await pilot.press(*"70b", "enter")
        await until(pilot, lambda: app.screen is app.chat)
        named = {"name": "api.groq.com"} if beside else {}
        assert saved(daemon) == [{"base_url": GROQ, "api_key": SECRET, "model": "llama-3.3-70b-versatile"} | named]


async def test_servers_without_a_first_one_are_somebody(daemon: Dictated) -> None:
    daemon.known = KNOWN | {"servers": [BOX]}
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await until(pilot, lambda: "now box." in screen_text(app))


async def test_a_server_that_is_there_is_set_up_anew_without_a_question(daemon: Dictated) -> None:
    daemon.known = MANY
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f5")
        await at(app, pilot, "who shall answer")
        await pilot.press("2")
        await at(app, pilot, "API key")
