"""Dashboard and timeline before what a real daemon said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable

from disco_tui.screens.dashboard import DashboardScreen
from disco_tui.screens.timeline import TimelineScreen
from tests.fixtures.recorded_daemon import Stage, on_stage, playing, recorded, text_of, until
from tests.fixtures.snapshots import compare

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
THEMES = pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])


@pytest.fixture(autouse=True)
def _in_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table shows times of day."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def table(app: Stage) -> DataTable[str]:
    return app.screen.query_one(DataTable)


async def filled(app: Stage, pilot: Pilot[None]) -> None:
    await until(pilot, lambda: table(app).row_count)
    await pilot.pause()
    await pilot.pause()


async def test_it_shows_what_the_daemon_knows() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen()) as (app, pilot):
        await filled(app, pilot)
        await until(pilot, lambda: "60 served" in text_of(app, "#summary"))
        await until(pilot, lambda: "48 % censored" in text_of(app, "#server"))
        await until(pilot, lambda: "w(l): how long the server is held back" in text_of(app, "#starts"))
        await until(pilot, lambda: "of $1.00" in text_of(app, "#spend"))
        await until(pilot, lambda: "device" in text_of(app, "#wins"))
        assert table(app).row_count == 62


async def test_filters_leave_only_some_requests() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen()) as (app, pilot):
        await filled(app, pilot)

        def shows(n: int) -> bool:
            return table(app).row_count == n and f"{n} of 62" in text_of(app, "#filter")

        for key, n in (("d", 49), ("s", 12), ("m", 1), ("e", 1), ("a", 62)):
            await pilot.press(key)
            await until(pilot, partial(shows, n))


async def test_enter_opens_the_timeline_of_the_request_and_escape_comes_back() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen()) as (app, pilot):
        await filled(app, pilot)
        await pilot.press("m", "enter")
        assert app.screen_stack[-1].id == "timeline"
        await until(pilot, lambda: "handoff server to device" in text_of(app, "#words"))
        await pilot.press("escape")
        assert isinstance(app.screen, DashboardScreen)


async def test_new_requests_come_in_and_the_cursor_stays_on_its_own() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen()) as (app, pilot):
        await filled(app, pilot)
        await pilot.press("down", "down", "down")
        under = table(app).coordinate_to_cell_key(table(app).cursor_coordinate).row_key
        daemon.rows.insert(0, daemon.rows[5] | {"request_id": "req-new"})
        screen = app.screen
        assert isinstance(screen, DashboardScreen)
        await screen._poll()
        await until(pilot, lambda: table(app).row_count == 63)
        assert table(app).coordinate_to_cell_key(table(app).cursor_coordinate).row_key == under
        assert table(app).cursor_row == 4


async def test_a_daemon_that_goes_leaves_the_last_pictures_and_a_banner() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen()) as (app, pilot):
        await filled(app, pilot)
        await daemon.runner.cleanup()
        screen = app.screen
        assert isinstance(screen, DashboardScreen)
        await screen._poll()
        await until(pilot, lambda: "disco up" in text_of(app, "#banner"))
        assert table(app).row_count == 62


async def test_a_daemon_that_has_served_nothing_is_shown_too() -> None:
    async with playing() as daemon:
        daemon.state, daemon.rows, daemon.ledger = recorded("loading"), [], []
        async with on_stage(daemon.root, DashboardScreen()) as (app, pilot):
            await until(pilot, lambda: "served" in text_of(app, "#summary"))
            await until(pilot, lambda: "not seen yet" in text_of(app, "#server"))
            await until(pilot, lambda: "no requests yet" in text_of(app, "#wins"))
            await pilot.press("enter")
            assert isinstance(app.screen, DashboardScreen)


async def test_alone_nobody_is_held_back() -> None:
    async with playing() as daemon:
        daemon.state["endpoints"].pop("server")
        async with on_stage(daemon.root, DashboardScreen()) as (app, pilot):
            await filled(app, pilot)
            await until(pilot, lambda: "one side answers alone" in text_of(app, "#starts"))
            await until(pilot, lambda: "www" not in text_of(app, "#starts"))


SPLIT = {
    "state": "up", "partner": "desktop", "mode": "exact", "cut": 24, "codec": "f32", "rtt_ms": 21.4, "same_bits": True,
    "error": None, "tokens_per_round_trip": 2.31,
}  # fmt: skip


@pytest.mark.parametrize("plain", [False, True], ids=["pictures", "words"])
async def test_a_split_device_shows_its_link_and_what_a_round_trip_gives(plain: bool) -> None:
    async with playing() as daemon:
        daemon.state["split"] = SPLIT
        async with on_stage(daemon.root, DashboardScreen(), plain=plain) as (app, pilot):
            await filled(app, pilot)
            said = "desktop: exact, 21 ms, 2.3 tok a trip"
            await until(pilot, lambda: said in " ".join(text_of(app, "#server").split()))
            await compare(pilot, f"dashboard-split{'-plain' if plain else ''}")


@SIZES
@THEMES
async def test_the_dashboard_looks_as_it_did(size: tuple[int, int], light: bool) -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen(), size=size, light=light) as (app, pilot):
        await filled(app, pilot)
        await compare(pilot, f"dashboard-{size[0]}x{size[1]}-{'light' if light else 'dark'}")


async def test_the_dashboard_is_words_in_plain_mode() -> None:
    async with playing() as daemon, on_stage(daemon.root, DashboardScreen(), plain=True) as (app, pilot):
        await filled(app, pilot)
        await until(pilot, lambda: not {"|", "│"} & set(text_of(app, "#server")))
        await compare(pilot, "dashboard-plain")


@SIZES
@THEMES
async def test_the_timeline_looks_as_it_did(size: tuple[int, int], light: bool) -> None:
    screen = TimelineScreen(recorded("moved")["answer"])
    async with playing() as daemon, on_stage(daemon.root, screen, size=size, light=light) as (app, pilot):
        await until(pilot, lambda: "the last at 3.23 s" in text_of(app, "#words"))
        await until(pilot, lambda: app.screen.query("FooterKey"))
        await pilot.pause()
        await until(pilot, lambda: "H" in text_of(app, "#delivery"))
        await compare(pilot, f"timeline-{size[0]}x{size[1]}-{'light' if light else 'dark'}")


async def test_the_timeline_finds_the_answers_row_and_is_words_in_plain_mode() -> None:
    screen = TimelineScreen(recorded("moved")["answer"])
    async with playing() as daemon, on_stage(daemon.root, screen, plain=True) as (app, pilot):
        await until(pilot, lambda: "the last at 3.23 s" in text_of(app, "#words"))
        assert not app.screen.query_one("#lanes").display
        await pilot.press("down", "up", "q")
        assert not isinstance(app.screen, TimelineScreen)


async def test_the_timeline_stands_without_the_daemon() -> None:
    async with playing() as daemon:
        root = daemon.root
    async with on_stage(root, TimelineScreen(recorded("moved")["answer"])) as (app, pilot):
        await until(pilot, lambda: "the last at about" in text_of(app, "#words"))
