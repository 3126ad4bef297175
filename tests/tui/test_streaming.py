"""An answer that grows: as fast as it comes, the line that is read stays, and pace is a choice of the reader."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from textual.pilot import Pilot

from disco_daemon.client.side_health import waiting_for
from disco_tui.app import DiscoApp
from disco_tui.data.readers import ReadingPlace, tokens_in
from disco_tui.draw import markdown
from disco_tui.draw.entry import Entry
from disco_tui.draw.theme import TextTheme, text_theme_of
from disco_tui.widgets.transcript import Transcript
from tests.fixtures.tui import STATE, Dictated, dictated, screen_text, shown, until

THEME = text_theme_of({}, dark=True, plain=False)


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        yield server


async def ask(pilot: Pilot[None], daemon: Dictated, text: str) -> None:
    n = len(daemon.asked)
    await pilot.press(*text, "enter")
    await until(pilot, lambda: len(daemon.asked) > n)


async def grown(app: DiscoApp, pilot: Pilot[None], daemon: Dictated, text: str) -> None:
    """Have the answer grow by a text, and wait until what is drawn of it is drawn."""
    length = len(app.conversations.entries[-1].text) + len(text)
    daemon.say(text)
    transcript = app.chat.query_one(Transcript)
    await until(pilot, lambda: len(app.conversations.entries[-1].text) >= length and transcript._timer is None)


def seen(app: DiscoApp) -> list[str]:
    return re.findall(r"Paragraph \d+", screen_text(app))


def paragraphs(first: int, last: int) -> str:
    return "".join(f"Paragraph {i}.\n\n" for i in range(first, last))


async def test_the_line_that_is_read_stays_and_a_mark_says_that_there_is_more(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(pilot, daemon, "why")
        await grown(app, pilot, daemon, paragraphs(0, 3))
        assert "more below" not in screen_text(app)
        for i in range(3, 60, 3):
            await grown(app, pilot, daemon, paragraphs(i, i + 3))
        await until(pilot, lambda: "▼ more below: End" in screen_text(app))
        lines = screen_text(app).split("\n")
        assert "◆ Paragraph 0." in next(line for line in lines if "Paragraph" in line)
        assert app.chat.query_one(Transcript).scroll_y == 2, "the answer's first line is the first of the view"
        daemon.end()
        await until(pilot, lambda: app.conversations.running is None)
        assert "Paragraph 0." in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "Paragraph 59." in screen_text(app) and "more below" not in screen_text(app))


@pytest.mark.parametrize("key", ["end", "pagedown"])
async def test_who_scrolls_to_the_end_follows_from_there(daemon: Dictated, key: str) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(pilot, daemon, "why")
        await grown(app, pilot, daemon, paragraphs(0, 40))
        for _ in range(12):
            await pilot.press(key)
        await until(pilot, lambda: "Paragraph 39." in screen_text(app))
        await grown(app, pilot, daemon, paragraphs(40, 80))
        await until(pilot, lambda: "Paragraph 79." in screen_text(app))
        await pilot.press("pageup")
        before = seen(app)
        await grown(app, pilot, daemon, paragraphs(80, 120))
        assert seen(app) == before != []


async def test_a_resize_leaves_the_answer_at_its_top(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(pilot, daemon, "why")
        await grown(app, pilot, daemon, paragraphs(0, 30))
        for size in ((30, 8), (120, 40), (80, 24)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda: "Paragraph 0." in screen_text(app))
            await grown(app, pilot, daemon, paragraphs(30, 60))
            await until(pilot, lambda: "Paragraph 0." in screen_text(app) and "▼ more below: End" in screen_text(app))


async def test_an_answer_that_goes_on_stays_where_its_new_words_begin(daemon: Dictated) -> None:
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(pilot, daemon, "why")
        daemon.say(paragraphs(0, 30))
        daemon.end("length")
        await until(pilot, lambda: app.conversations.running is None)
        await pilot.press("ctrl+g")
        await until(pilot, lambda: len(daemon.asked) == 2)
        await grown(app, pilot, daemon, paragraphs(30, 90))
        await until(pilot, lambda: "Paragraph 30." in screen_text(app) and "▼ more below" in screen_text(app))


async def test_what_grows_beyond_the_view_is_drawn_when_the_reader_comes_near(
    daemon: Dictated, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = Entry.draw

    def noted(self: Entry, width: int, theme: TextTheme) -> list[Text]:
        drawn.append(len(self.text))
        return draw(self, width, theme)

    monkeypatch.setattr(Entry, "draw", noted)
    async with shown(daemon.root, size=(80, 24)) as (app, pilot):
        await ask(pilot, daemon, "why")
        await grown(app, pilot, daemon, paragraphs(0, 60))
        drawn.clear()
        for i in range(60, 200, 4):
            await grown(app, pilot, daemon, paragraphs(i, i + 4))
        assert drawn == []
        await pilot.press("end")
        await until(pilot, lambda: "Paragraph 199." in screen_text(app))


async def test_words_ahead_of_the_readers_pace_are_faded_if_the_reader_wants_it(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await pilot.press("alt+p")
        await until(pilot, lambda: app.chat.query_one(Transcript).pace_tps == 4.8)
        await ask(pilot, daemon, "why")
        daemon.say("One two three four five six seven eight nine ten. " * 20)
        entry = app.conversations.entries[-1]
        await until(pilot, lambda: entry.read is not None)
        assert "One two three" in screen_text(app), "nothing is held back"
        daemon.end()
        await until(pilot, lambda: app.conversations.running is None)
        assert entry.read is not None, "the reader goes on after the end"
        await pilot.press("alt+p")
        await until(pilot, lambda: entry.read is None)


async def test_until_the_first_word_the_time_and_both_sides_are_seen(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: "◇ big-one" in screen_text(app))
        await ask(pilot, daemon, "why")
        times: set[str] = set()

        def has_moved() -> bool:
            times.update(re.findall(r"◆ reading (\d+\.\d) s   ◇ asked \1 s", screen_text(app)))
            return len(times) > 2

        await until(pilot, has_moved)
        await grown(app, pilot, daemon, "Because.")
        assert "asked" not in screen_text(app)
        assert "◆ Because." in screen_text(app)


async def test_a_side_that_cannot_answer_is_not_said_to_be_asked(daemon: Dictated) -> None:
    sides = STATE["endpoints"]
    failing = {"tried": True, "failing": {"reason": "unauthorized", "since": 0.0}}
    daemon.state = STATE | {"endpoints": sides | {"server": sides["server"] | failing}}
    async with shown(daemon.root, plain=True) as (app, pilot):
        await until(pilot, lambda: "key refused" in screen_text(app))
        await ask(pilot, daemon, "why")
        await until(pilot, lambda: "[device] reading, [server] key refused" in screen_text(app))
        assert app.chat.query_one(Transcript)._timer is None, "nothing moves for a screen reader"


async def test_a_side_that_becomes_ill_while_it_is_waited_for_is_said_to_be(daemon: Dictated) -> None:
    async with shown(daemon.root, plain=True) as (app, pilot):
        await until(pilot, lambda: "big-one" in screen_text(app))
        await ask(pilot, daemon, "why")
        await until(pilot, lambda: "[device] reading, [server] asked" in screen_text(app))
        sides = STATE["endpoints"]
        failing = {"failing": {"reason": "unreachable", "since": 0.0}}
        daemon.state = STATE | {"endpoints": sides | {"server": sides["server"] | failing}}
        await until(pilot, lambda: "[device] reading, [server] unreachable" in screen_text(app))


async def test_another_model_for_the_next_question_changes_nothing_of_whom_an_answer_waits_for(
    daemon: Dictated,
) -> None:
    async with shown(daemon.root, plain=True) as (app, pilot):
        await until(pilot, lambda: "big-one" in screen_text(app))
        await ask(pilot, daemon, "why")
        await until(pilot, lambda: "[device] reading, [server] asked" in screen_text(app))
        app.conversations.set_model("disco/device")
        app.conversations.follow(STATE)
        assert [side for side, _, _ in app.conversations.entries[-1].asked_of] == ["device", "server"]


@pytest.mark.parametrize(
    ("model", "state", "sides"),
    [
        ("disco", STATE, ["device", "server"]), ("disco/device", STATE, ["device"]),
        ("disco/server", STATE, ["server"]),
        ("disco", STATE | {"private": True}, ["device"]), ("disco", None, []), ("gpt-4o", STATE, ["device", "server"]),
    ],
)  # fmt: skip
def test_an_answer_waits_for_the_sides_that_its_route_has(model: str, state: Any, sides: list[str]) -> None:
    assert [side for side, _, _ in waiting_for(state, model)] == sides


def test_a_stand_in_stands_by_while_the_better_side_is_well() -> None:
    grades = {"grades": {"stand_in": "device", "unequal": "stand-in", "why": "It is small."}}
    assert waiting_for(STATE | grades, "disco")[0] == ("device", "stands by", False)
    assert waiting_for(STATE | grades, "disco/device") == [("device", "reading", True)]
    sides = STATE["endpoints"]
    ill = {"endpoints": sides | {"server": sides["server"] | {"failing": {"reason": "unauthorized", "since": 0.0}}}}
    assert waiting_for(STATE | grades | ill, "disco") == [("device", "reading", True), ("server", "key refused", False)]
    assert waiting_for(STATE | {"grades": {"stand_in": "device", "unequal": "race"}}, "disco")[0][1] == "reading"


def test_a_reader_waits_for_words_and_skips_none() -> None:
    place = ReadingPlace(5.0, 10.0)
    assert place.advance(0, 10.0) == 0.0
    assert place.advance(100, 12.0) == pytest.approx(0.1)
    assert place.advance(20, 100.0) == 1.0
    assert place.advance(40, 101.0) == pytest.approx(25 / 40)


def test_a_long_piece_is_several_tokens() -> None:
    assert [tokens_in(piece) for piece in ("a", " international", "word " * 8)] == [1, 1, 10]


def faded(lines: list[Text]) -> list[bool]:
    """Whether each letter that is drawn is faded."""
    segments = [segment for line in lines for segment in line.render(markdown._CONSOLE)]
    dim = THEME.dim.color
    return [s.style is not None and s.style.color == dim for s in segments for c in s.text if c.isalnum()]


SOURCE = (
    "First words here.\n\n```\nx = 1\ny = 2\n```\n\n- an item\n- another\n\n| a | b |\n|---|---|\n| c | d |\n\n"
    "See the end of `it`"
)


@given(read=st.integers(0, len(SOURCE)), step=st.integers(1, 40))
def test_faded_words_are_those_ahead_however_the_answer_grew(read: int, step: int) -> None:
    entry = Entry(1, "assistant", live=True)
    lines: list[Text] = []
    for at in range(0, len(SOURCE), step):
        entry.grow(SOURCE[at : at + step], "device" if at < 40 else "server")
        entry.read = min(read, len(entry.text))
        lines = entry.draw(60, THEME)
    found = faded(lines)
    assert found == sorted(found), "once it is faded, all that follows is"
    assert any(found) == (read < len(SOURCE) - 1)
    assert all(found) == (read == 0)
