"""The trace of an answer in the timeline: real curves, the level of the buffer, and the same in words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import DataTable

from disco_tui.draw import token_timeline
from disco_tui.draw.timeline_model import TimelineModel, delivery, lanes, level, words
from disco_tui.draw.token_timeline import TokenTimes, count_curve, fullest, peaks
from disco_tui.screens.dashboard import DashboardScreen
from disco_tui.screens.timeline import TimelineScreen
from tests.fixtures.recorded_daemon import RecordedDaemon, on_stage, playing, recorded, text_of, until
from tests.fixtures.snapshots import compare

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
THEMES = pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
MADE = TokenTimes([0.5, 0.5, 0.6, 2.0], [0.5, 1.5, 2.5, 3.5], 4, 4, pace_tps=1.0, expected_s=0.5)


def rows(picture: Any) -> list[str]:
    """The field of a picture, without its axis."""
    return [line.partition("┤")[2] or line.partition("│")[2] for line in picture.plain.split("\n")[:-2]]


# --- curves -----------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_over_time() -> None:
    assert count_curve([0.5, 0.5, 0.6, 2.0], 4.0, 4) == [(0.5, 1.0), (1.0, 3.0), (2.0, 4.0)]
    assert count_curve([2.0], 4.0, 4, before=7) == [(2.0, 8.0), (2.0, 8.0)]
    assert count_curve([], 4.0, 4) == []


def test_the_level_is_what_came_and_was_not_shown_yet() -> None:
    assert token_timeline.levels(MADE) == [(0.5, 1), (0.6, 2), (1.5, 1), (2.0, 2), (2.5, 1), (3.5, 0)]
    assert fullest(MADE) == (0.6, 2)
    assert [tokens for _, tokens in peaks(MADE, 4.0, 4)] == [2.0, 2.0, 2.0, 1.0]


def test_a_token_that_passes_is_not_held() -> None:
    passing = TokenTimes([0.1, 0.2], [0.1, 0.2], 2, 2, 5.0, 1.0)
    assert token_timeline.levels(passing) == [(0.1, 0), (0.2, 0)]
    assert "the buffer held nothing" in token_timeline.words(passing)


def test_behind_the_end_of_what_was_kept_the_level_is_not_known() -> None:
    cut = TokenTimes([0.1, 0.2], [0.3, 0.4], 9, 9, 5.0, 1.0)
    assert token_timeline.levels(cut) == [(0.1, 1), (0.2, 2)], "others came after those, before these were shown"
    assert "times are kept of the first 2 of 9 tokens" in token_timeline.words(cut)


times = st.lists(st.floats(0, 100), min_size=1, max_size=40).map(sorted)


@given(put=times, waits=st.lists(st.floats(0, 10), min_size=40, max_size=40), columns=st.integers(1, 50))
def test_curves_rise_and_the_highest_level_is_in_some_column(
    put: list[float], waits: list[float], columns: int
) -> None:
    shown: list[float] = []
    for came, wait in zip(put, waits, strict=False):
        shown.append(max(came + wait, shown[-1] if shown else 0.0))
    trace = TokenTimes(put, shown, len(put), len(shown), 5.0, 1.0)
    curve = count_curve(put, shown[-1] + 1.0, columns)
    assert curve == sorted(curve)
    assert curve[-1] == (put[-1], float(len(put)))
    assert len(curve) <= columns + 3
    tops = [tokens for _, tokens in peaks(trace, shown[-1] + 1.0, columns)]
    assert len(tops) == columns
    assert min(tops) >= 0
    assert max(tops) == fullest(trace)[1]


# --- in words ---------------------------------------------------------------------------------------------------------


def test_the_words_say_what_the_pictures_show() -> None:
    assert token_timeline.words(MADE) == [
        "generated from 0.50 s to 2.00 s, shown from 0.50 s to 3.50 s",
        "the buffer held 2 tokens at most, 2.00 s of reading, at 0.60 s",
        "no token was later than the reader wanted it (expected: the first at 0.50 s, then 1 a second)",
    ]
    late = TokenTimes([0.5, 4.0], [0.5, 4.0], 2, 2, pace_tps=1.0, expected_s=0.5)
    assert token_timeline.words(late)[2].startswith("token 2 was the latest, 2.50 s after its time")
    left = TokenTimes([0.5, 0.6], [0.5], 2, 1, 1.0, 0.5)
    assert token_timeline.words(left)[0].endswith("shown from 0.50 s to 0.50 s (1 of 2 tokens never)")
    unseen = TokenTimes([0.5, 0.6], [], 2, 0, 1.0, 0.5)
    assert token_timeline.words(unseen)[0].endswith("shown none of it")
    assert token_timeline.words(TokenTimes([], [], 0, 0, 1.0, 0.5)) == ["no token was generated"]


# --- a real answer ----------------------------------------------------------------------------------------------------


def test_the_story_of_a_traced_answer() -> None:
    said = recorded("trace")
    story = TimelineModel.of(None, None, said)
    (move,) = story.moves
    assert story.exact_end
    assert story.end_s == said["duration_s"]
    curve = delivery(story, 4.8, 1.0, 60, 12)
    assert curve is not None
    assert {"+", "*", ".", "H"} <= set(curve.plain)
    assert {span.style for span in curve.spans} >= {"$primary", "$success", "$accent"}, "who made it, what was shown"
    field = rows(curve)
    ahead = [line.find("+") < line.find("*") for line in field if "+" in line and "*" in line]
    assert all(ahead), "generated before it is shown"
    assert len(ahead) > 3
    held = level(story, 4.8, 1.0, 60, 6)
    assert held is not None
    assert f"{fullest(story.trace or MADE)[1]} tokens" in held.plain.split("\n")[0]
    assert rows(held)[-1].count("#") > rows(held)[0].count("#") >= 1
    assert held.plain.split("\n")[-1] == curve.plain.split("\n")[-1], "one time axis"
    assert f"at token {move.at} " in "\n".join(words(story))
    assert any(line.startswith("generated from") for line in words(story))


def test_a_trace_takes_the_place_of_object_and_row() -> None:
    said = recorded("trace")
    assert TimelineModel.of(None, None, said) == TimelineModel.of(said["disco"], None, said)
    straight = TimelineModel.of(said["disco"], None)
    assert straight.trace is None
    assert level(straight, 4.8, 1.0, 60, 6) is None
    assert lanes(straight, 60).plain.count("\n") == lanes(TimelineModel.of(None, None, said), 60).plain.count("\n")
    curve = delivery(straight, 4.8, 1.0, 60, 12)
    assert curve is not None
    assert "+" not in curve.plain


def test_an_answer_whose_reader_saw_nothing_is_drawn_without_its_delivery() -> None:
    said = recorded("trace")
    unseen = {"put_s": [], "released_s": [], "put": 0, "released": 0}
    disco = said["disco"] | {"ttft_s": None, "tokens": {"device": 0, "server": 0}, "moves": []}
    story = TimelineModel.of(None, None, said | unseen | {"disco": disco, "error": "timeout"})
    assert delivery(story, 4.8, 1.0, 60, 12) is None
    assert level(story, 4.8, 1.0, 60, 12) is None
    assert {"no answer: timeout", "no token was generated"} <= set(words(story))


# --- on the screen ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def remembering() -> AsyncIterator[RecordedDaemon]:
    """A recorded daemon that still has the trace of the answer."""
    said = recorded("trace")
    async with playing() as daemon:
        daemon.traces[said["request_id"]] = said
        yield daemon


def screen() -> TimelineScreen:
    return TimelineScreen(recorded("trace")["disco"])


@SIZES
@THEMES
async def test_the_timeline_of_a_traced_answer_looks_as_it_did(size: tuple[int, int], light: bool) -> None:
    async with remembering() as daemon, on_stage(daemon.root, screen(), size=size, light=light) as (app, pilot):
        await until(pilot, lambda: "the buffer held" in text_of(app, "#words"))
        await until(pilot, lambda: app.screen.query("FooterKey"))
        await pilot.pause()
        await until(pilot, lambda: "#" in text_of(app, "#level"))
        await until(pilot, lambda: "+ generated" in text_of(app, "#delivery"))
        await compare(pilot, f"timeline-trace-{size[0]}x{size[1]}-{'light' if light else 'dark'}")


async def test_in_plain_mode_it_is_all_words() -> None:
    async with remembering() as daemon, on_stage(daemon.root, screen(), plain=True) as (app, pilot):
        await until(pilot, lambda: "the buffer held" in text_of(app, "#words"))
        for name in ("#lanes", "#delivery", "#level"):
            assert not app.screen.query_one(name).display


async def test_without_a_trace_the_line_is_straight_and_said_to_be() -> None:
    async with playing() as daemon, on_stage(daemon.root, screen()) as (app, pilot):
        await until(pilot, lambda: "you saw" in text_of(app, "#words"))
        await until(pilot, lambda: "a straight line: there is no trace of it" in text_of(app, "#delivery"))
        assert not app.screen.query_one("#level").display


async def test_a_request_of_the_dashboard_has_its_trace_too() -> None:
    row = recorded("history")[0]
    said = recorded("trace") | {"request_id": row["request_id"]}

    async with playing() as daemon:
        daemon.rows, daemon.traces[row["request_id"]] = [row], said
        async with on_stage(daemon.root, DashboardScreen()) as (app, pilot):
            await until(pilot, lambda: app.screen.query_one(DataTable).row_count)
            await pilot.press("enter")
            await until(pilot, lambda: "the buffer held" in text_of(app, "#words"))
