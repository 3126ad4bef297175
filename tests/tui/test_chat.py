"""Every action of the chat by its key, against a daemon whose words the test dictates."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, TextArea

from disco_tui.app import DiscoApp
from disco_tui.data.store import Store, StoreError
from disco_tui.draw.entry import Entry
from disco_tui.draw.theme import TextTheme
from disco_tui.screens.dialogs import ChoiceDialog, HelpDialog, LineDialog, TextDialog
from disco_tui.widgets.prompt import Prompt
from disco_tui.widgets.sidebar import Sidebar
from disco_tui.widgets.transcript import Transcript
from tests.fixtures.tui import STATE, Dictated, dictated, screen_text, shown, until


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        yield server


async def ask(app: DiscoApp, pilot: Pilot[None], daemon: Dictated, text: str) -> None:
    """Type a question, and wait until the daemon has it."""
    n = len(daemon.asked)
    await pilot.press(*text, "enter")
    await until(pilot, lambda: len(daemon.asked) > n)


async def answered(app: DiscoApp, pilot: Pilot[None]) -> None:
    await until(pilot, lambda: app.conversations.running is None)
    await pilot.pause()


async def exchange(app: DiscoApp, pilot: Pilot[None], daemon: Dictated, question: str, answer: str) -> None:
    """One question, wholly answered."""
    await ask(app, pilot, daemon, question)
    daemon.say(answer)
    daemon.end()
    await answered(app, pilot)


def prompt(app: DiscoApp) -> Prompt:
    return app.chat.query_one(Prompt)


def said(app: DiscoApp) -> list[tuple[str, str]]:
    return [(entry.role, entry.text) for entry in app.conversations.entries]


def titles(app: DiscoApp) -> list[str]:
    options = app.chat.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt)[2:] for i in range(options.option_count)]


async def test_an_answer_streams_with_its_sides_and_is_kept(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "Why?")
        daemon.say("Because ")
        await until(pilot, lambda: "◆ Because" in screen_text(app))
        daemon.say("**so**.", "server")
        daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: "Because ⇢◇ so." in screen_text(app))
        await until(pilot, lambda: "QoE 0.98" in screen_text(app))
        conversation = app.conversations.current
        assert conversation is not None
        turns = app.store.turns(conversation.id)
        assert [(t.role, t.text, t.finish) for t in turns][1] == ("assistant", "Because **so**.", "stop")
        assert turns[1].sides == ((0, "device"), (8, "server"))
        await until(pilot, lambda: titles(app) == ["Why?"])
        assert daemon.asked[0]["disco"] == {"sides": True}


async def test_a_thought_is_seen_until_the_answer_comes_and_then_folded(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "Why?")
        daemon.say("", thought="let me see")
        await until(pilot, lambda: "let me see" in screen_text(app))
        daemon.say("So.")
        daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: "let me see" not in screen_text(app))
        assert "▸ thought, about" in screen_text(app)
        await pilot.press("alt+t")
        await until(pilot, lambda: "let me see" in screen_text(app))
        await pilot.press("alt+t")
        await until(pilot, lambda: "let me see" not in screen_text(app))
        await exchange(app, pilot, daemon, "And?", "No more.")
        assert "let me see" not in str(daemon.asked[-1]), "it is not part of the conversation"
        await pilot.press("alt+t")
        await until(pilot, lambda: "no thought is kept" in screen_text(app))


async def test_the_conversation_goes_along_with_each_question(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "2")
        assert [m["content"] for m in daemon.asked[1]["messages"]] == ["one", "1", "two"]


async def test_escape_stops_and_what_was_heard_stays(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "Why?")
        daemon.say("Half")
        await until(pilot, lambda: "Half" in screen_text(app))
        await pilot.press("escape")
        await answered(app, pilot)
        await until(pilot, lambda: daemon.left)
        assert app.conversations.entries[-1].finish == "cancelled"
        await until(pilot, lambda: "stopped" in screen_text(app))
        assert app.conversations.current is not None
        assert app.store.turns(app.conversations.current.id)[-1].text == "Half"


async def test_a_second_question_waits_for_the_answer(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "one")
        await pilot.press(*"two", "enter")
        assert len(daemon.asked) == 1
        assert prompt(app).text == "two"


async def test_regenerate_and_undo(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "Why?", "First.")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: len(daemon.asked) == 2)
        daemon.say("Second.")
        daemon.end()
        await answered(app, pilot)
        assert said(app) == [("user", "Why?"), ("assistant", "Second.")]
        assert [m["content"] for m in daemon.asked[1]["messages"]] == ["Why?"]
        await pilot.press("ctrl+z")
        assert said(app) == [("user", "Why?"), ("assistant", "First.")]
        await until(pilot, lambda: "First." in screen_text(app))


async def test_an_answer_is_redone_by_the_server_and_the_daemon_is_told_which(daemon: Dictated) -> None:
    daemon.state = STATE | {"policy_set": "balanced"}
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "Why?", "First.")
        await until(pilot, lambda: app.conversations.state is not None)
        app.conversations.set_model("disco/device")
        await pilot.press("alt+r")
        await until(pilot, lambda: len(daemon.asked) == 2)
        assert (daemon.asked[1]["model"], daemon.asked[1]["disco"]["redo_of"]) == ("disco", "req-1")
        daemon.say("Second.", "server")
        daemon.end()
        await answered(app, pilot)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: len(daemon.asked) == 3)
        assert (daemon.asked[2]["model"], daemon.asked[2]["disco"]["regenerates"]) == ("disco/device", "req-1")
        daemon.say("Third.")
        daemon.end()
        await answered(app, pilot)
        assert said(app) == [("user", "Why?"), ("assistant", "Third.")]


async def test_nothing_is_redone_where_no_server_may_be_asked(daemon: Dictated) -> None:
    daemon.state = STATE | {"policy_set": "private", "private": True}
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "Why?", "First.")
        await until(pilot, lambda: app.conversations.state is not None)
        await pilot.press("alt+r")
        await until(pilot, lambda: "Nothing leaves" in screen_text(app))
        assert len(daemon.asked) == 1


async def test_continue_goes_on_with_the_same_answer(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "Count.")
        daemon.say("1, 2, ")
        daemon.end("length")
        await answered(app, pilot)
        await until(pilot, lambda: "Ctrl+G" in screen_text(app))
        await pilot.press("ctrl+g")
        await until(pilot, lambda: len(daemon.asked) == 2)
        assert daemon.asked[1]["continue_final_message"] is True
        assert daemon.asked[1]["messages"][-1] == {"role": "assistant", "content": "1, 2, "}
        daemon.say("3.", "server")
        daemon.end()
        await answered(app, pilot)
        assert said(app)[-1] == ("assistant", "1, 2, 3.")
        assert app.conversations.current is not None
        assert app.store.turns(app.conversations.current.id)[-1].text == "1, 2, 3."


async def test_edit_and_resend(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "2")
        await pilot.press("ctrl+up")
        assert prompt(app).text == "two"
        await pilot.press("ctrl+up")
        assert prompt(app).text == "one"
        await pilot.press(*" more")
        await ask(app, pilot, daemon, "")
        daemon.say("1+")
        daemon.end()
        await answered(app, pilot)
        assert said(app) == [("user", "one more"), ("assistant", "1+")]
        await pilot.press("ctrl+z")
        assert len(said(app)) == 4


async def test_escape_gives_up_editing(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await pilot.press("ctrl+up", "escape")
        assert prompt(app).text == ""
        await exchange(app, pilot, daemon, "two", "2")
        assert len(said(app)) == 4


async def test_several_lines_and_history(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert prompt(app).text == "a\nb\nc"
        await exchange(app, pilot, daemon, "", "1")
        await exchange(app, pilot, daemon, "second", "2")
        await pilot.press(*"draft", "up")
        assert prompt(app).text == "second"
        await pilot.press("up", "up", "up")
        assert prompt(app).text == "a\nb\nc"
        prompt(app).move_cursor(prompt(app).document.end)
        await pilot.press("down")
        assert prompt(app).text == "second"
        await pilot.press("down", "down")
        assert prompt(app).text == "draft"


async def test_new_rename_open_delete_undo(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await pilot.press("ctrl+n")
        assert said(app) == []
        await exchange(app, pilot, daemon, "two", "2")
        await until(pilot, lambda: titles(app) == ["two", "one"])
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, LineDialog))
        app.screen.query_one(Input).value = "Second"
        await pilot.press("enter")
        await until(pilot, lambda: titles(app) == ["Second", "one"])
        await pilot.press("ctrl+d")
        await until(pilot, lambda: titles(app) == ["one"])
        assert said(app) == []
        await pilot.press("ctrl+z")
        await until(pilot, lambda: titles(app) == ["Second", "one"])
        assert said(app) == [("user", "two"), ("assistant", "2")]
        app.chat.query_one(OptionList).focus()
        await pilot.press("down", "enter")
        await until(pilot, lambda: said(app) == [("user", "one"), ("assistant", "1")])


async def test_search_finds_words_of_messages(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "a tortoise")
        await pilot.press("ctrl+n")
        await exchange(app, pilot, daemon, "two", "a hare")
        assert not app.chat.query_one(Sidebar).display
        await pilot.press("ctrl+f", *"tort")
        await until(pilot, lambda: titles(app) == ["one"])
        assert app.chat.query_one(Sidebar).display
        await pilot.press("enter")
        await until(pilot, lambda: said(app)[-1] == ("assistant", "a tortoise"))
        assert not app.chat.query_one(Sidebar).display
        await pilot.press("escape")
        await until(pilot, lambda: titles(app) == ["two", "one"])


def marked(app: DiscoApp) -> list[str]:
    """The words that stand out in the view."""
    transcript = app.chat.query_one(Transcript)
    lines = [transcript.render_line(y) for y in range(transcript.size.height)]
    return [part.text for line in lines for part in line if part.style and part.style.reverse]


def long_talk(store: Store) -> None:
    """Two conversations of some pages; a word is in the first one's middle, in a long answer."""
    for title, word in (("Cooking", "the crème of it"), ("Stars", "the red giants")):
        conversation = store.new()
        for n in range(6):
            store.add(conversation.id, "user", f"{title} {n}?")
            lines = [f"Line {n}.{line} of the answer.  " for line in range(40)]
            if n == 2:
                lines[25] = f"Here is {word}, as **written**.  "
            store.finish(store.add(conversation.id, "assistant", "\n".join(lines)), "stop", None)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["narrow", "wide"])
@pytest.mark.parametrize(("typed", "found"), [("creme", "crème"), ("iant", "iant"), ("giant writ", "giant")])
async def test_the_words_that_were_searched_for_are_in_view_and_stand_out_until_the_search_ends(
    daemon: Dictated, size: tuple[int, int], typed: str, found: str
) -> None:
    async with shown(daemon.root, size=size, before=long_talk) as (app, pilot):
        await pilot.press("ctrl+f", *(key if key != " " else "space" for key in typed))
        await until(pilot, lambda: len(titles(app)) == 1)
        await pilot.press("enter")
        await until(pilot, lambda: found in marked(app))
        assert "Here is the" in screen_text(app)
        if size[0] == 80:  # with the list its width has changed
            assert not app.chat.query_one(Sidebar).display
        assert ("writ" in marked(app)) == ("writ" in typed)
        await pilot.press("escape")
        await until(pilot, lambda: not marked(app))
        assert "Here is the" in screen_text(app), "the view stays"


async def test_a_conversation_that_was_found_by_its_title_is_shown_from_its_end(daemon: Dictated) -> None:
    def renamed(store: Store) -> None:
        long_talk(store)
        store.rename(store.list()[0].id, "Dwarfs")

    async with shown(daemon.root, before=renamed) as (app, pilot):
        await pilot.press("ctrl+f", *"dwarf")
        await until(pilot, lambda: titles(app) == ["Dwarfs"])
        await pilot.press("enter")
        await until(pilot, lambda: "Line 5.39" in screen_text(app))
        assert not marked(app)


@pytest.mark.parametrize(("size", "before"), [((80, 24), False), ((120, 40), True)], ids=["narrow", "wide"])
async def test_the_list_is_shown_where_there_is_room_and_by_key(
    daemon: Dictated, size: tuple[int, int], before: bool
) -> None:
    async with shown(daemon.root, size=size) as (app, pilot):
        assert app.chat.query_one(Sidebar).display is before
        await pilot.press("ctrl+b")
        assert app.chat.query_one(Sidebar).display is not before


async def test_copy_an_answer_or_its_code(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "plain words")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.clipboard == "plain words")
        await exchange(app, pilot, daemon, "two", "see\n\n```py\nx = 1\n```\n")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.clipboard == "x = 1")


async def test_a_selected_message_is_what_keys_are_about(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "first answer")
        await exchange(app, pilot, daemon, "two", "second answer")
        await pilot.press("alt+up", "alt+up", "alt+up")
        selected = app.chat.query_one(Transcript).selected
        assert selected is not None
        assert selected.text == "first answer"
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.clipboard == "first answer")


@pytest.mark.parametrize("kind", ["md", "json"])
async def test_export(daemon: Dictated, tmp_path: Path, kind: str) -> None:
    wanted = tmp_path / f"out.{kind}"
    wanted.write_text("something else")
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "an answer")
        await pilot.press("ctrl+e")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press(*["down"] * (kind == "json"), "enter")
        await until(pilot, lambda: isinstance(app.screen, LineDialog))
        app.screen.query_one(Input).value = str(wanted)
        await pilot.press("enter")
        written = tmp_path / f"out-2.{kind}"
        await until(pilot, lambda: written.exists() and written.read_text().endswith("\n"))
    assert wanted.read_text() == "something else"
    assert "an answer" in written.read_text("utf-8")
    if kind == "json":
        assert json.loads(written.read_text("utf-8"))["turns"][1]["text"] == "an answer"


async def test_attach_a_text_file(daemon: Dictated, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the secret is 42")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\x00")
    async with shown(daemon.root) as (app, pilot):
        for name in ("image.png", "notes.txt"):
            await pilot.press("ctrl+o")
            await until(pilot, lambda: isinstance(app.screen, LineDialog))
            app.screen.query_one(Input).value = str(tmp_path / name)
            await pilot.press("enter")
            await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: "attached: notes.txt" in screen_text(app))
        assert [file.name for file in app.conversations.attached] == ["notes.txt"]
        await exchange(app, pilot, daemon, "what is it?", "42")
        asked = daemon.asked[0]["messages"][0]["content"]
        assert "the secret is 42" in asked
        assert asked.endswith("what is it?")
        assert app.conversations.attached == []


async def test_a_system_prompt_and_a_model_for_this_conversation(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("f7")
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        app.screen.query_one(TextArea).text = "Be brief."
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.conversations.system == "Be brief.")
        await pilot.press("f8")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog))
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.conversations.model == "disco/device")
        await exchange(app, pilot, daemon, "one", "1")
        assert daemon.asked[0]["model"] == "disco/device"
        assert daemon.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        stored = app.store.list()[0]
        assert (stored.system, stored.model) == ("Be brief.", "disco/device")


async def test_light_and_dark_and_help(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        dark = app.text_theme
        await pilot.press("ctrl+l")
        assert not app.current_theme.dark
        assert app.text_theme != dark
        await pilot.press("f1")
        assert type(app.screen) is HelpDialog
        await until(pilot, lambda: "Ctrl+Up" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)


async def test_other_screens_and_back(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        for key, name in (("f3", "ControlScreen"), ("f4", "DashboardScreen"), ("f4", "DashboardScreen")):
            await pilot.press(key)
            assert type(app.screen).__name__ == name
            assert len(app.screen_stack) == 3
        await pilot.press("f2")
        assert type(app.screen).__name__ == "ChatScreen"
        await pilot.press("ctrl+t")
        assert type(app.screen).__name__ == "TimelineScreen"
        await pilot.press("f2")
        assert said(app) == [("user", "one"), ("assistant", "1")]


async def test_a_timeline_that_is_not_there_yet_says_when_it_is(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "Ask something first" in screen_text(app))
        await ask(app, pilot, daemon, "slow")
        daemon.say("half")
        await until(pilot, lambda: "half" in screen_text(app))
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "when the answer has ended" in " ".join(screen_text(app).split()))
        daemon.end()
        await until(pilot, lambda: app.conversations.running is None)


async def test_an_answer_goes_on_while_another_conversation_is_open(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "slow")
        first = app.conversations.current
        assert first is not None
        daemon.say("begun, ")
        await until(pilot, lambda: "begun" in screen_text(app))
        await pilot.press("ctrl+n")
        daemon.say("done")
        daemon.end()
        await until(pilot, lambda: app.store.turns(first.id)[-1].finish == "stop")
        await until(pilot, lambda: "begun" not in screen_text(app))
        app.chat.query_one(OptionList).focus()
        await pilot.press("down", "enter")
        await until(pilot, lambda: said(app) == [("user", "slow"), ("assistant", "begun, done")])


async def test_a_failure_is_a_sentence_below_the_words_heard(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "Why?")
        daemon.say("Half")
        daemon.fail("the server has gone away")
        await answered(app, pilot)
        await until(pilot, lambda: "the server has gone away" in screen_text(app))
        await until(pilot, lambda: "Half" in screen_text(app))
        assert app.conversations.entries[-1].finish == "error"


async def test_a_disk_that_fails_is_said_and_the_words_stay(daemon: Dictated, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, *_: object) -> None:
        raise StoreError("the disk is full")

    async with shown(daemon.root) as (app, pilot):
        monkeypatch.setattr(Store, "add", full)
        await pilot.press(*"one", "enter")
        await until(pilot, lambda: "the disk is full" in screen_text(app))
        assert prompt(app).text == "one"
        assert daemon.asked == []


async def test_banners_for_what_is_wrong(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: app._poll is not None)
        daemon.state = STATE | {"endpoints": {"device": {"model": "m.gguf", "state": "loading"}}}
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: "m.gguf is being loaded" in screen_text(app))
        daemon.state = STATE
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: "being loaded" not in screen_text(app))


async def test_a_key_that_is_refused() -> None:
    async with dictated(local=False) as daemon:
        daemon.key = "right"
        async with shown(daemon.root, key="wrong") as (app, pilot):
            await until(pilot, lambda: "refuses the key" in screen_text(app))
            await pilot.press("f9")
            assert not app.launcher.running
        async with shown(daemon.root, key="right") as (app, pilot):
            await exchange(app, pilot, daemon, "one", "1")


@pytest.mark.parametrize(
    ("script", "why"),
    [("echo it cannot be; exit 3", "it cannot be"), ("echo all is well; kill -9 $$", "it was killed by signal 9")],
)
async def test_without_a_daemon_one_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, why: str
) -> None:
    async with shown("http://127.0.0.1:9", path=tmp_path / "c.sqlite") as (app, pilot):
        await until(pilot, lambda: "F9 starts one" in screen_text(app))
        command = ["/bin/sh", "-c", script]
        monkeypatch.setattr(app.launcher, "command", lambda: command)
        await pilot.press("f9")
        await until(pilot, lambda: app.launcher.has_failed)
        await app.check_daemon()
        await pilot.pause()
        await until(pilot, lambda: f"has ended: {why}" in screen_text(app))
        await pilot.press(*"one", "enter")
        await answered(app, pilot)
        assert app.conversations.entries[-1].finish == "error"


async def test_half_an_answer_of_a_window_that_was_killed_is_on_the_screen_again(
    daemon: Dictated, tmp_path: Path
) -> None:
    path = tmp_path / "c.sqlite"
    with Store(path) as store:
        conversation = store.new()
        store.add(conversation.id, "user", "Why?")
        store.append(store.add(conversation.id, "assistant", ""), "Half an answ", "device")
    async with shown(daemon.root, path=path, size=(80, 24)) as (app, pilot):
        await until(pilot, lambda: "Half an answ" in screen_text(app))
        await until(pilot, lambda: "interrupted: Ctrl+G goes on" in screen_text(app))
        await pilot.press("ctrl+g")
        await until(pilot, lambda: daemon.asked)
        daemon.say("er.")
        daemon.end()
        await answered(app, pilot)
    async with shown(daemon.root, path=path, size=(80, 24)) as (app, pilot):
        await pilot.pause()
        assert app.conversations.current is None, "what is whole does not come back by itself"


@pytest.mark.parametrize("keys", [["f1"], ["f6"], ["f7"], ["f8"], ["ctrl+o"], ["ctrl+p"], ["f5"]])
async def test_no_dialog_has_a_frame_in_plain_mode(daemon: Dictated, keys: list[str]) -> None:
    async with shown(daemon.root, size=(80, 24), plain=True) as (app, pilot):
        await pilot.press(*keys)
        await until(pilot, lambda: app.screen is not app.chat)
        await pilot.pause()
        assert not set(screen_text(app)) & set("─│╭╮╰╯▏▔▊▎┌┐└┘━┃"), "what is left is the scroll bar's"


async def test_a_new_conversation_begins_with_the_route_that_decides(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        app.conversations.set_model("disco/server")
        app.chat.show_line()
        await until(pilot, lambda: "disco/server: F8" in screen_text(app))
        await pilot.press("ctrl+n")
        await exchange(app, pilot, daemon, "one", "1")
        assert daemon.asked[0]["model"] == "disco"
        assert "disco/server: F8" not in screen_text(app)


async def test_the_state_goes_before_the_title_at_eighty_columns(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(app, pilot, daemon, "Write a long and detailed essay about why the sky is blue, please")
        await until(pilot, lambda: "answering: Escape stops · ◆ this machine  ◇ server" in screen_text(app))


@pytest.mark.parametrize("size", [(30, 8), (80, 24), (120, 40)])
async def test_how_the_sides_are_is_always_on_the_screen(daemon: Dictated, size: tuple[int, int]) -> None:
    sides = STATE["endpoints"]
    async with shown(daemon.root, size=size) as (app, pilot):
        await until(pilot, lambda: "◆" in screen_text(app) and "ready" in screen_text(app))
        failing = {"tried": True, "failing": {"reason": "unauthorized", "since": 0.0}}
        daemon.state = STATE | {"endpoints": sides | {"server": sides["server"] | failing}}
        await exchange(app, pilot, daemon, "one", "1")
        await until(pilot, lambda: "✗ key refused" in screen_text(app))


async def test_quitting_in_mid_answer_keeps_it(daemon: Dictated, tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite"
    async with shown(daemon.root, path=path) as (app, pilot):
        await ask(app, pilot, daemon, "Why?")
        daemon.say("Half")
        await until(pilot, lambda: "Half" in screen_text(app))
        await pilot.press("ctrl+q")
    with Store(path) as store:
        turn = store.turns(store.list()[0].id)[-1]
        assert (turn.text, turn.finish) == ("Half", "cancelled")


async def test_only_messages_near_the_view_are_drawn(daemon: Dictated, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(store: Store) -> None:
        conversation = store.new()
        for i in range(200):
            role = "assistant" if i % 2 else "user"
            turn = store.add(conversation.id, role, f"Message {i}. " + "word " * 60)
            store.finish(turn, "stop", None)

    drawn: list[Entry] = []
    draw = Entry.draw

    def noted(self: Entry, width: int, theme: TextTheme) -> list[Text]:
        drawn.append(self)
        return draw(self, width, theme)

    monkeypatch.setattr(Entry, "draw", noted)
    async with shown(daemon.root, before=fill) as (app, pilot):
        app.chat.query_one(OptionList).focus()
        await pilot.press("down", "enter")
        await until(pilot, lambda: "Message 199" in screen_text(app))
        assert len(set(map(id, drawn))) < 60
        for _ in range(400):
            await pilot.press("pageup")
            if app.chat.query_one(Transcript).scroll_y == 0:
                break
        await until(pilot, lambda: "Message 0." in screen_text(app))
        transcript = app.chat.query_one(Transcript)
        transcript.focus()
        await pilot.press("end")
        await until(pilot, lambda: "Message 199" in screen_text(app))


async def test_the_view_stays_while_an_answer_grows_below_it(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "\n\n".join(f"Paragraph {i}." for i in range(40)))
        await ask(app, pilot, daemon, "two")
        transcript = app.chat.query_one(Transcript)
        await pilot.press("pageup", "pageup")
        before = re.findall(r"Paragraph \d+", screen_text(app))
        daemon.say("\n\n".join(f"More {i}." for i in range(30)))
        daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: re.findall(r"Paragraph \d+", screen_text(app)) == before != [])
        transcript.focus()
        await pilot.press("end")
        await until(pilot, lambda: "More 29." in screen_text(app))


async def test_words_can_be_selected_with_the_mouse(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "alpha beta gamma")
        transcript = app.chat.query_one(Transcript)
        y = next(i for i, line in enumerate(screen_text(app).splitlines()) if "alpha" in line) - transcript.region.y
        await pilot.mouse_down(Transcript, offset=(3, y))
        await pilot.hover(Transcript, offset=(8, y))
        await pilot.mouse_up(Transcript, offset=(8, y))
        assert "alpha".startswith((app.screen.get_selected_text() or "!").strip()[:4])
