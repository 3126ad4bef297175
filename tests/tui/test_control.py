"""The control panel before what a real daemon said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select

from disco_tui.screens.control import ControlScreen
from disco_tui.widgets.slider import Slider
from tests.fixtures.recorded_daemon import Stage, on_stage, playing, text_of, until
from tests.fixtures.snapshots import compare


async def loaded(app: Stage, pilot: Pilot[None]) -> None:
    """All figures are there."""
    await until(pilot, lambda: "requests" in text_of(app, "#prediction") or "too little" in text_of(app, "#prediction"))
    await pilot.pause()


def rate(app: Stage) -> float:
    return app.screen.query_one("#rate", Slider).value


async def test_it_opens_with_what_is_in_force() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        assert rate(app) == 0.3
        await until(
            pilot, lambda: "counts $0.30 on mains: server is scarce, device above $22.70" in text_of(app, "#effect")
        )
        assert app.screen.query_one("#caps-wh-per-day", Input).value == "20"
        assert app.screen.query_one("#caps-usd-per-month", Input).value == ""
        assert app.screen.query_one("#pace", Input).value == "4.8"
        await until(pilot, lambda: "TTFT mean 0.36 s, P99 0.65 s" in text_of(app, "#prediction"))
        assert daemon.changes == []


async def test_a_key_changes_the_rate_the_prediction_and_the_daemon() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("end")
        assert rate(app) == 1000.0
        await until(pilot, lambda: "device is scarce, server up to $22.70" in text_of(app, "#effect"))
        await until(pilot, lambda: "device scarce" in text_of(app, "#prediction"))
        await until(pilot, lambda: daemon.changes)
        assert daemon.changes == [{"device.usd_per_kwh": 1000.0}]
        await pilot.press("home")
        await until(pilot, lambda: len(daemon.changes) == 2)
        assert daemon.changes[1] == {"device.usd_per_kwh": 0.01}
        await until(pilot, lambda: "server scarce" in text_of(app, "#prediction"))


async def test_a_row_of_keys_is_one_change_and_the_what_if_follows_the_last() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        daemon.asked.clear()
        daemon.held.clear()
        await pilot.press("right")
        await until(pilot, lambda: daemon.asked)
        await pilot.press("right", "right", "pageup", "left")
        assert len(daemon.asked) == 1, "one question at a time"
        daemon.held.set()
        await until(pilot, lambda: len(daemon.asked) == 2)
        assert daemon.asked[1] == pytest.approx((rate(app), 0.5))
        await until(pilot, lambda: daemon.changes)
        assert daemon.changes[-1] == {"device.usd_per_kwh": rate(app)}
        await loaded(app, pilot)


async def test_the_budget_has_a_slider_of_its_own() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("tab", "end")
        await until(pilot, lambda: daemon.changes)
        assert daemon.changes == [{"policy.budget": 1.0}]
        await until(pilot, lambda: "1.00" in text_of(app, "#budget-value"))
        await until(pilot, lambda: daemon.asked[-1][1] == 1.0)


async def test_the_mouse_moves_the_knob() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        slider = app.screen.query_one("#rate", Slider)
        await pilot.click("#rate", offset=(slider.size.width - 1, 0))
        assert rate(app) == 1000.0
        await pilot.mouse_down("#rate", offset=(slider.size.width - 1, 0))
        await pilot.hover("#rate", offset=(0, 0))
        await pilot.mouse_up("#rate", offset=(0, 0))
        assert rate(app) == 0.01
        await until(pilot, lambda: daemon.changes[-1:] == [{"device.usd_per_kwh": 0.01}])


async def test_changes_are_undone_one_by_one() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("end")
        await until(pilot, lambda: len(daemon.changes) == 1)
        await pilot.press("tab", "home")
        await until(pilot, lambda: len(daemon.changes) == 2)
        await pilot.press("ctrl+z")
        await until(pilot, lambda: len(daemon.changes) == 3)
        assert daemon.changes[2] == {"policy.budget": 0.5}
        await pilot.press("ctrl+z")
        await until(pilot, lambda: len(daemon.changes) == 4)
        assert daemon.changes[3] == {"device.usd_per_kwh": 0.3}
        await until(pilot, lambda: rate(app) == 0.3)
        await pilot.press("ctrl+z")
        await until(pilot, lambda: "nothing to undo" in text_of(app, "#banner"))


async def test_what_is_said_of_the_last_act_stays_when_the_daemon_is_looked_at() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("ctrl+z")
        await until(pilot, lambda: "nothing to undo" in text_of(app, "#banner"))
        screen = app.screen
        assert isinstance(screen, ControlScreen)
        await screen._poll()
        await until(pilot, lambda: "nothing to undo" in text_of(app, "#banner"))
        await pilot.press("end")
        await until(pilot, lambda: "nothing to undo" not in text_of(app, "#banner"))


async def test_the_tail_of_the_policy_in_force_has_a_slider_of_its_own() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        assert daemon.knobs[-1] == {"kappa": 0.058}
        await pilot.press("tab", "tab", "end")
        await until(pilot, lambda: daemon.changes)
        assert daemon.changes == [{"policy.kappa": 10.0}]
        await until(pilot, lambda: text_of(app, "#kappa-value").strip() == "10")
        await until(pilot, lambda: daemon.knobs[-1] == {"kappa": 10.0})
        await pilot.press("ctrl+z")
        await until(pilot, lambda: daemon.changes[-1] == {"policy.kappa": 0.058})
        await until(pilot, lambda: text_of(app, "#kappa-value").strip() == "0.058")


@pytest.mark.parametrize(("policy", "shows"), [("optimal", "kappa"), ("paper", "alpha"), ("race", None)])
async def test_of_the_tails_knobs_the_one_is_shown_that_the_policy_has(policy: str, shows: str | None) -> None:
    async with playing() as daemon:
        daemon.settings["settings"]["policy"]["name"] = policy
        async with on_stage(daemon.root, ControlScreen()) as (app, pilot):
            await loaded(app, pilot)
            seen = [tail for tail in ("alpha", "kappa") if app.screen.query_one(f"#{tail}-block").display]
            assert seen == [shows] * (shows is not None)
            assert app.screen.query_one("#no-tail").display is (shows is None)
            assert daemon.knobs[-1] == ({} if shows is None else {shows: 0.05 if shows == "alpha" else 0.058})
            if shows is None:
                await until(pilot, lambda: "the policy race has no knob" in text_of(app, "#no-tail"))
                await pilot.press("tab", "tab")
                assert app.focused is app.screen.query_one("#pace"), "what is not shown is not in the way"


async def test_a_switch_keeps_everything_on_this_machine() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        app.screen.query_one("#private").focus()
        await until(pilot, lambda: text_of(app, "#private").startswith("[ ] Never leave this machine"))
        await pilot.press("space")
        await until(pilot, lambda: text_of(app, "#private").startswith("[x] "))
        await until(pilot, lambda: "this machine answers all" in text_of(app, "#effect"))
        await until(pilot, lambda: daemon.changes == [{"policy.private": True}])
        await pilot.press("ctrl+z")
        await until(pilot, lambda: daemon.changes[-1] == {"policy.private": False})
        await until(pilot, lambda: text_of(app, "#private").startswith("[ ] "))
        await pilot.click("#private")
        await until(pilot, lambda: daemon.changes[-1] == {"policy.private": True})
        daemon.refuses = "policy.private = false is refused here"
        await pilot.press("enter")
        await until(pilot, lambda: "is refused here" in text_of(app, "#banner"))
        await until(pilot, lambda: text_of(app, "#private").startswith("[x] "))


async def test_what_was_changed_is_undone_after_one_has_left_and_come_back() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("end")
        await until(pilot, lambda: len(daemon.changes) == 1)
        await pilot.press("tab", "home", "escape")
        await until(pilot, lambda: len(daemon.changes) == 2)
        await app.push_screen(ControlScreen())
        await loaded(app, pilot)
        assert rate(app) == 1000.0
        await pilot.press("ctrl+z")
        await until(pilot, lambda: daemon.changes[2:] == [{"policy.budget": 0.5}])
        await pilot.press("ctrl+z")
        await until(pilot, lambda: daemon.changes[3:] == [{"device.usd_per_kwh": 0.3}])
        await until(pilot, lambda: rate(app) == 0.3)
        await pilot.press("ctrl+z")
        await until(pilot, lambda: "nothing to undo" in text_of(app, "#banner"))


async def test_a_ready_made_set_is_chosen_and_undone() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        sets = app.screen.query_one("#set", Select)
        assert sets.value == "balanced"
        assert daemon.changes == [], "what is shown at first is no choice"
        sets.value = "frugal"
        await until(pilot, lambda: daemon.changes == [{"policy.set": "frugal"}])
        await pilot.press("ctrl+z")
        await until(pilot, lambda: daemon.changes[-1] == {"policy.set": "balanced"})
        await until(pilot, lambda: sets.value == "balanced")


async def test_an_undo_that_the_daemon_does_not_take_can_be_tried_again() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("end")
        await until(pilot, lambda: len(daemon.changes) == 1)
        daemon.refuses = "not now"
        await pilot.press("ctrl+z")
        await until(pilot, lambda: "not now" in text_of(app, "#banner"))
        daemon.refuses = ""
        await pilot.press("ctrl+z")
        await until(pilot, lambda: rate(app) == 0.3)
        assert daemon.changes[-1] == {"device.usd_per_kwh": 0.3}


async def test_undo_takes_back_what_was_not_sent_yet() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        screen = app.screen
        assert isinstance(screen, ControlScreen)
        screen.query_one("#rate", Slider).action_move(7)
        await until(pilot, lambda: screen._pending)
        screen.action_undo()
        assert rate(app) == 0.3
        await screen._changes.flush()
        assert daemon.changes == []


async def test_caps_are_typed_and_emptied() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        field = app.screen.query_one("#caps-usd-per-day", Input)
        field.focus()
        field.value = "2.5"
        await pilot.press("enter")
        await until(pilot, lambda: daemon.changes == [{"caps.usd_per_day": 2.5}])
        field.value = ""
        await pilot.press("enter")
        await until(pilot, lambda: daemon.changes[-1] == {"caps.usd_per_day": None})
        floor = app.screen.query_one("#caps-battery-floor", Input)
        floor.focus()
        await pilot.pause()
        floor.value = "25"
        await pilot.press("enter")
        await until(pilot, lambda: daemon.changes[-1] == {"caps.battery_floor": 0.25})
        n = len(daemon.changes)
        floor.value = "-1"
        await pilot.press("enter")
        await until(pilot, lambda: "a number is wanted, not '-1'" in text_of(app, "#banner"))
        assert len(daemon.changes) == n


async def test_what_is_typed_while_the_daemon_takes_a_change_stays_and_counts() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        field = app.screen.query_one("#caps-usd-per-day", Input)
        field.focus()
        daemon.taken.clear()
        field.value = "2.5"
        await pilot.press("enter")
        await until(pilot, lambda: daemon.changes == [{"caps.usd_per_day": 2.5}])
        await pilot.press("backspace", "backspace", "backspace", "enter")  # back to what the daemon still has
        await pilot.press("7")  # and something that is not entered yet
        daemon.taken.set()
        await until(pilot, lambda: daemon.changes[1:] == [{"caps.usd_per_day": None}])
        await until(pilot, lambda: len(app.undo_log) == 2)
        assert field.value == "7"
        await pilot.press("enter")
        await until(pilot, lambda: daemon.changes[-1] == {"caps.usd_per_day": 7})


async def test_a_preset_sets_the_pace() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        app.screen.query_one("#reader", Select).value = 6
        await until(pilot, lambda: daemon.changes)
        assert daemon.changes == [{"delivery.pace_tps": 3.3}]
        assert app.screen.query_one("#pace", Input).value == "3.3"


async def test_what_the_daemon_refuses_goes_back_and_is_said() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        daemon.refuses = "device.usd_per_kwh: too much"
        await pilot.press("end")
        await until(pilot, lambda: "too much" in text_of(app, "#banner"))
        await until(pilot, lambda: rate(app) == 0.3)


async def test_who_leaves_at_once_has_what_was_on_the_screen() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen()) as (app, pilot):
        await loaded(app, pilot)
        await pilot.press("end", "escape")
        await until(pilot, lambda: daemon.changes == [{"device.usd_per_kwh": 1000.0}])
        assert not isinstance(app.screen, ControlScreen)


async def test_with_too_little_history_there_is_no_prediction_and_the_knobs_work() -> None:
    async with playing() as daemon:
        daemon.too_little = True
        async with on_stage(daemon.root, ControlScreen()) as (app, pilot):
            await loaded(app, pilot)
            await until(pilot, lambda: "too little history" in text_of(app, "#prediction"))
            await pilot.press("end")
            await until(pilot, lambda: daemon.changes)


async def test_on_battery_the_rate_that_counts_is_another_one() -> None:
    async with playing() as daemon:
        money = daemon.state["money"]
        money |= {"effective_usd_per_kwh": 3.0, "power": {"charge": 0.2, "on_mains": False, "throttled": True}}
        async with on_stage(daemon.root, ControlScreen()) as (app, pilot):
            await loaded(app, pilot)
            await until(pilot, lambda: "counts $3.00 battery at 20 %, throttled by heat" in text_of(app, "#effect"))
            assert daemon.asked[-1][0] == pytest.approx(3.0)
            await pilot.press("end")
            await until(pilot, lambda: "counts $10,000" in text_of(app, "#effect"))


async def test_without_a_daemon_there_is_a_banner_and_no_traceback() -> None:
    async with playing() as daemon:
        root = daemon.root
    async with on_stage(root, ControlScreen()) as (app, pilot):
        await until(pilot, lambda: "disco up" in text_of(app, "#banner"))
        await pilot.press("end", "ctrl+z", "tab", "enter")
        assert isinstance(app.screen, ControlScreen)


@pytest.mark.parametrize("light", [False, True], ids=["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_the_control_panel_looks_as_it_did(size: tuple[int, int], light: bool) -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen(), size=size, light=light) as (app, pilot):
        await loaded(app, pilot)
        await compare(pilot, f"control-{size[0]}x{size[1]}-{'light' if light else 'dark'}")


def of_server(name: str, model: str, **more: Any) -> dict[str, Any]:
    """A server as `disco status --json` has it."""
    return {
        "name": name, "model": model, "state": "ready", "breaker": {"state": "closed", "why": None, "until_s": None},
        "ttft_p50_s": 0.21, "ttft_p99_s": 0.94, "share": 0.62, "hedges": 3, "usd_today": 0.0213,
        "price": {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.6}, **more,
    }  # fmt: skip


DOWN = {"state": "open", "why": "server_error", "until_s": 1_790_000_000.0}
SERVERS = [
    of_server("box", "qwen3-30b-a3b-instruct-2507-q8_0"),
    of_server(
        "openrouter", "meta-llama/llama-3.3-70b-instruct", price=None, ttft_p50_s=None, ttft_p99_s=None, share=0.02
    ),
    of_server("spare", "gpt-4o-mini", breaker=DOWN, share=0.36, usd_today=1.2),
]
NO_LIMIT: dict[str, Any] = {"usd_per_month": None, "requests_per_minute": None, "models": [], "private": False}
KEYS = [
    {"name": "anna", "usd_per_day": 1.0, "usd_today": 1.02, "usd_this_month": 7.3} | NO_LIMIT,
    {"name": "ci-bot", "usd_per_day": None, "usd_today": 0.0, "usd_this_month": 0.0} | NO_LIMIT
    | {"models": ["disco/device"], "requests_per_minute": 20},
]  # fmt: skip


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_servers_and_keys_are_in_view_beside_what_rules_them(size: tuple[int, int], in_utc: None) -> None:
    async with playing() as daemon:
        daemon.state |= {"servers": SERVERS, "keys": KEYS}
        async with on_stage(daemon.root, ControlScreen(), size=size) as (app, pilot):
            await loaded(app, pilot)
            app.screen.query_one("#private").focus()
            await until(pilot, lambda: "box/" in text_of(app, "#servers"))
            await pilot.pause()
            told = text_of(app, "#servers").splitlines()
            assert max(map(len, told[:4])) <= size[0] - 4
            assert "94" in told[1]
            assert "?" in told[2]
            assert "failing" in told[3]
            assert "left alone until" in told[4]
            assert "it has reached its $1.00 a day" in text_of(app, "#keys")
            await compare(pilot, f"control-servers-{size[0]}x{size[1]}-dark")
            daemon.state |= {"servers": SERVERS[:1], "keys": []}
            await until(pilot, lambda: not app.screen.query_one("#servers-block").display)
            assert not app.screen.query_one("#keys-block").display


async def test_the_control_panel_reads_well_without_boxes() -> None:
    async with playing() as daemon, on_stage(daemon.root, ControlScreen(), plain=True) as (app, pilot):
        await loaded(app, pilot)
        await compare(pilot, "control-plain")
        await until(pilot, lambda: all(ord(c) < 128 for c in text_of(app, "#rate")))
