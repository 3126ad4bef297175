"""Scales, sliders, curves and stories as pure text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.client.amounts import amount_of, dollars, figure
from disco_tui.data.debounce import Debounce
from disco_tui.data.model import Money, RequestRow, filter_requests
from disco_tui.data.readers import presets
from disco_tui.data.scale import BUDGET, RATE, Scale, factor_of, in_force, seconds
from disco_tui.draw import pictures
from disco_tui.draw.charts import Axes, Curve, bar, plot, sparkline
from disco_tui.draw.timeline_model import TimelineModel, delivery, lanes, words
from disco_tui.widgets.slider import draw_track
from tests.fixtures.recorded_daemon import recorded

# --- scales -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [RATE, BUDGET], ids=["rate", "budget"])
def test_key_by_key_a_slider_gets_from_end_to_end_and_back(scale: Scale) -> None:
    value, up = scale.low, [scale.low]
    while value < scale.high:
        value = scale.step(value, 1)
        up.append(value)
    assert (len(up), up[-1]) == (scale.steps + 1, scale.high)
    assert up == sorted(set(up)), "every key moves it"
    down = [value]
    while value > scale.low:
        value = scale.step(value, -1)
        down.append(value)
    assert down == up[::-1]


@given(value=st.floats(0.01, 1000.0), by=st.integers(-30, 30).filter(bool))
def test_a_key_moves_in_its_direction_from_anywhere(value: float, by: int) -> None:
    moved = RATE.step(value, by)
    assert RATE.low <= moved <= RATE.high
    assert (moved > value) == (by > 0) or moved in (RATE.low, RATE.high)


@given(share=st.floats(0, 1))
def test_where_one_clicks_is_where_the_knob_goes(share: float) -> None:
    assert abs(RATE.share(RATE.at(share)) - share) <= 0.51 / RATE.steps + 0.01


@pytest.mark.parametrize("scale", [{"low": 1.0, "high": 1.0}, {"low": 0.0, "high": 1.0, "log": True}])
def test_a_scale_that_goes_nowhere_is_refused(scale: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="upward"):
        Scale(steps=10, **scale)


def test_the_effective_rate_is_the_one_set_times_what_the_battery_makes_of_it() -> None:
    factor = factor_of(0.3, 3.0)
    assert in_force(1.0, factor) == pytest.approx(10.0)
    assert in_force(0.001, factor) == pytest.approx(0.1), "below the range the daemon clamps, too"


def test_the_slider_shows_knob_marks_and_ends() -> None:
    track, names = draw_track(RATE, 0.01, 78, plain=True)
    assert track[0] == "O"
    assert track.count("+") == 3
    for name in ("0.01", "1000", "mains price", "battery precious", "battery sacred"):
        assert name in names
    assert draw_track(RATE, 1000.0, 60, plain=False)[0][-1] == "●"
    track, names = draw_track(RATE, 1000.0, 20, plain=True)
    assert (len(track), track[-1]) == (20, "O")
    assert names.startswith("0.01")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "$0"),
        (1234.5, "$1,234"),
        (3.456, "$3.46"),
        (0.3, "$0.30"),
        (0.0191, "$0.019"),
        (0.00123, "$0.0012"),
        (0.000999, "$0.0010"),
        (2e-7, "<$0.0001"),
        (9.99e-5, "<$0.0001"),
    ],
)
def test_amounts_read_well(amount: float, text: str) -> None:
    assert dollars(amount) == text


@given(st.floats(0, 1e9))
def test_no_amount_and_no_figure_has_an_exponent(value: float) -> None:
    for text in (dollars(value), figure(value), amount_of(value, "$"), amount_of(value, "Wh")):
        assert "e" not in text


def test_times_read_well() -> None:
    assert [seconds(t) for t in (None, 0.0123, 1.239, 250.0)] == ["-", "12 ms", "1.24 s", "250 s"]


def test_presets_have_a_reading_and_a_listening_pace() -> None:
    by_name = {reader.name: reader.pace_tps for reader in presets()}
    assert (by_name["reading"], by_name["listening"]) == (4.8, 3.3)
    assert by_name["reading, 18 to 24 years"] == 5.1
    assert all(1 < pace < 10 for pace in by_name.values())
    paces = [pace for name, pace in by_name.items() if "years" in name]
    assert paces == sorted(paces, reverse=True), "the older, the slower"


# --- drawing ------------------------------------------------------------------------------------------------------


def test_a_curve_goes_from_corner_to_corner() -> None:
    axes = Axes((0.0, 9.0), (0.0, 1.0), ("0", "9 s"), ("0", "1"))
    picture = plot([Curve([(0.0, 0.0), (9.0, 1.0)], "*")], axes, 13, 6).plain
    assert picture.split("\n") == [
        "1┤          *",
        " │       *** ",
        " │    ***    ",
        "0┤****       ",
        " └┬─────────┬",
        "  0      9 s ",
    ]


@given(
    points=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), max_size=20),
    width=st.integers(10, 60), height=st.integers(4, 20), log=st.booleans(),
)  # fmt: skip
def test_a_picture_is_as_large_as_its_place_whatever_is_drawn(
    points: list[tuple[float, float]], width: int, height: int, log: bool
) -> None:
    axes = Axes((0.0, 5.0), (0.0, 5.0), ("0", "5"), ("0", "5"), log_x=log)
    lines = plot([Curve(points, "*")], axes, width, height).plain.split("\n")
    assert len(lines) == max(4, height)
    assert all(len(line) <= width for line in lines)


def test_bars_and_sparklines() -> None:
    assert bar(0.5, 4) == "██░░"
    assert bar(2.0, 4) == "████"
    assert bar(0.5, 4, plain=True) == "##.."
    assert sparkline([0.0, 1.0, 2.0], 2) == "▅█"
    assert sparkline([0.0], 5) == "▁"


# --- what the dashboard says --------------------------------------------------------------------------------------


def test_the_pictures_say_in_words_what_they_show() -> None:
    state = recorded("state")
    assert "48 % censored" in pictures.server_words(state)
    assert "ms a token" in pictures.device_words(state)
    assert pictures.summary(state).startswith("0 in flight, 60 served; optimal")
    alone = state | {"endpoints": {"device": state["endpoints"]["device"] | {"state": "loading"}}}
    assert pictures.server_words(alone) == "no server is configured"
    assert pictures.summary(alone).endswith("device loading")
    picture = pictures.server_ttft(state, 40, 8).plain
    assert {"s", "d"} <= set(picture)
    held = pictures.starts(recorded("plan"), 40, 8).plain
    assert {"w", "d", "x"} <= set(held)


def test_before_the_first_request_the_dashboard_shows_the_prior() -> None:
    state = recorded("loading")
    assert "not seen yet: the prior says" in pictures.server_words(state)
    assert pictures.wins([], 40).plain == "no requests yet"


def test_spending_is_shown_against_the_caps() -> None:
    money = Money.of(recorded("state")["money"])
    text = pictures.spend(money, recorded("ledger"), 60).plain
    assert "$0.00035 of $1.00" in text
    assert "of 20 Wh" in text
    days = [{"server_usd": 0.0}, {"server_usd": 2.0}, {"server_usd": 1.0}]
    assert "$ by day ▅█▁" in pictures.spend(Money(), days, 60).plain
    assert "no cap is set" in pictures.spend(Money(), [], 60).plain


def test_filters_show_who_won_what_moved_and_what_failed() -> None:
    rows = [RequestRow.of(row) for row in recorded("moved")["history"] + recorded("history")]
    assert {name: len(filter_requests(rows, name)) for name in ("all", "device", "server", "moved", "errors")} == {
        "all": 62, "device": 49, "server": 12, "moved": 1, "errors": 1,
    }  # fmt: skip


# --- one answer ---------------------------------------------------------------------------------------------------


def test_the_story_of_an_answer_that_moved() -> None:
    moved = recorded("moved")
    row = next(row for row in moved["history"] if row["handoffs"])
    story = TimelineModel.of(moved["answer"], row)
    said = "\n".join(words(story))
    assert "plan: device not used, server at once" in said
    assert "handoff server to device at token 21 (cost), took 1.10 s" in said
    assert story.exact_end
    server, device, axis = lanes(story, 60).plain.split("\n")
    assert server.rstrip().endswith("=")
    assert device.index("=") == len(server.rstrip()), "the device goes on where the server stops"
    assert axis.endswith("s")
    curve = delivery(story, 4.8, 1.0, 60, 12)
    assert curve is not None
    assert "H" in curve.plain
    assert "." in curve.plain


def test_the_story_of_an_answer_whose_source_rested_says_so() -> None:
    moved = recorded("moved")
    row = next(row for row in moved["history"] if row["handoffs"])
    (move,) = moved["answer"]["moves"]

    def told(**how: bool | str) -> str:
        return "\n".join(words(TimelineModel.of(moved["answer"] | {"moves": [move | how]}, row)))

    assert "took 1.10 s; the server rested\n" in told(paused=True, asked_again=False)
    late = told(paused=True, asked_again=True, dropped="timeout")
    assert "dropped: timeout; the server rested and was asked again\n" in late
    assert "rested" not in told(paused=False, asked_again=False)


def test_the_story_of_an_answer_over_two_machines_has_its_round_trips() -> None:
    moved = recorded("moved")
    split = {
        "mode": "exact", "quality": "whole", "alone_from": None, "codec": "f32", "same_bits": True, "n_rows": 84,
        "round_trips": 35, "drafted": 60, "accepted": 45, "partner_s": 0.52, "bytes": {"up": 193536, "down": 2100},
    }  # fmt: skip
    said = words(TimelineModel.of(moved["answer"] | {"split": split}, None))
    assert "two machines (exact, whole): 35 round trips, 2.3 tokens each; 45 of 60 drafts right" in said
    assert "partner: 84 rows, busy for 0.52 s; 193.5 KB up as f32, 2.1 KB down" in said
    alone = split | {"mode": "confident", "quality": "alone", "alone_from": 12, "round_trips": 0, "same_bits": False}
    said = words(TimelineModel.of(moved["answer"] | {"split": alone}, None))
    assert "two machines (confident, alone; from token 12 on this machine was alone): 0 round trips; " in said[-2]
    assert "other bits than the whole model's" in said[-1]


def test_the_row_of_the_history_is_enough_for_a_story_and_so_is_the_answers_object() -> None:
    moved = recorded("moved")
    row = next(row for row in moved["history"] if row["handoffs"])
    from_row, from_object = TimelineModel.of(None, row), TimelineModel.of(moved["answer"], None)
    assert from_row.ttft_s == from_object.ttft_s
    assert from_row.tokens == from_object.tokens
    assert not from_object.exact_end
    assert "the last at about" in "\n".join(words(from_object))
    with pytest.raises(ValueError, match="needs"):
        TimelineModel.of(None, None)


def test_a_request_that_nobody_answered_has_a_story_too() -> None:
    row = next(row for row in recorded("moved")["history"] if row["error"])
    story = TimelineModel.of(None, row)
    assert "no answer: unreachable" in words(story)
    assert delivery(story, 4.8, 1.0, 60, 12) is None
    assert "x" in lanes(story, 60).plain


def test_all_recorded_requests_can_be_drawn_at_any_width() -> None:
    for row in recorded("history"):
        story = TimelineModel.of(None, row)
        for width in (20, 40, 120):
            assert all(len(line) <= max(20, width) for line in lanes(story, width).plain.split("\n"))
            picture = delivery(story, 4.8, 1.0, width, 10)
            assert picture is not None
            assert all(len(line) <= width for line in picture.plain.split("\n"))


# --- the latest wish ----------------------------------------------------------------------------------------------


async def test_only_the_latest_of_many_wishes_is_carried_out() -> None:
    done: list[int] = []
    free, begun = asyncio.Event(), asyncio.Event()

    async def work(value: int) -> None:
        begun.set()
        await free.wait()
        done.append(value)

    latest = Debounce(work)
    running = asyncio.create_task(latest.run())
    latest.call(0)
    await begun.wait()
    for i in range(1, 6):
        latest.call(i)
    assert latest.waiting
    free.set()
    await latest.flush()
    assert done == [0, 5]
    latest.call(6)
    latest.forget()
    await latest.flush()
    assert done == [0, 5]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_fleet_is_one_line_and_a_whole_device_is_none() -> None:
    fleet = {"hosts": 0, "layers_away": 0, "replicas": 0, "state": "lost"}
    assert pictures.link_words({"endpoints": {"device": {"fleet": fleet}}}) == "fleet lost: 0 layers at 0 hosts"
    assert pictures.link_words({"endpoints": {"device": {}}}) == ""
