"""GET /disco/v1/whatif of a real daemon, and the control panel in front of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disco_daemon.client.stream import Link
from disco_daemon.config.layers import load
from disco_daemon.store import History
from disco_tui.screens.control import ControlScreen
from disco_tui.widgets.slider import Slider
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.recorded_daemon import Stage, until
from tests.fixtures.upstream import Upstream
from tests.unit.simulate.test_whatif import history

WAIT_S = 30.0


def remembered(folder: Path, n: int) -> None:
    """A daemon that starts in this folder has these requests behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    with History(folder / "history.sqlite") as file:
        for outcome in history(n):
            file.record(outcome)
        file.flush(WAIT_S)


async def whatif(daemon: DaemonProcess, query: str, status: int = 200) -> dict[str, Any]:
    async with daemon.session.get(f"{daemon.root}/disco/v1/whatif?{query}") as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
    return found


async def test_the_what_if_of_a_running_daemon(tmp_path: Path) -> None:
    remembered(tmp_path, 200)
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, policy="optimal") as daemon:
        cheap, dear = await whatif(daemon, "rate=0.01&budget=0.5"), await whatif(daemon, "rate=1000&budget=0.5")
        assert (cheap["scarcer"], dear["scarcer"]) == ("server", "device")
        assert cheap["usd_per_day"] < dear["usd_per_day"]
        assert cheap["wh_per_day"] > dear["wh_per_day"]
        assert 0 < cheap["mean_ttft_s"] <= cheap["p99_ttft_s"]
        assert (await whatif(daemon, "rate=0.01&budget=0.9"))["mean_ttft_s"] <= cheap["mean_ttft_s"]
        for query, param in (
            ("budget=0.5", "rate"), ("rate=1", "budget"), ("rate=nan&budget=0", "rate"), ("rate=inf&budget=0", "rate"),
            ("rate=1&budget=1.1", "budget"), ("rate=-1&budget=0", "rate"), ("rate=much&budget=0", "rate"),
        ):  # fmt: skip
            assert (await whatif(daemon, query, 400))["error"]["param"] == param
        async with Link(daemon.root) as link:
            assert await link.whatif(0.01, 0.5) == cheap


async def test_a_daemon_with_too_little_history_says_so(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        error = (await whatif(daemon, "rate=1&budget=0.5", 404))["error"]
        assert error["code"] == "too_little"
        assert "at least" in error["message"]
        async with Link(daemon.root) as link:
            assert await link.whatif(1.0, 0.5) is None


async def test_the_slider_from_end_to_end_flips_the_regime_and_is_written_down(tmp_path: Path) -> None:
    remembered(tmp_path, 60)
    async with Upstream() as upstream:
        async with running(tmp_path, server=upstream.url, policy="optimal") as daemon, Link(daemon.root) as link:
            before = await link.plan(400)
            app = Stage(link, ControlScreen())
            async with app.run_test() as pilot:
                slider = app.screen.query_one("#rate", Slider)
                await until(pilot, lambda: slider.has_focus)
                await pilot.press("home")
                await taken_up(daemon, 0.01, "server")
                await pilot.press("end")
                await taken_up(daemon, 1000.0, "device")
                assert slider.value == 1000.0
            after = await link.plan(400)
            assert before["learned"]["constrained"] == "server"
            assert after["plan"] != before["plan"], "the next request starts otherwise"
        assert load(tmp_path / "config.toml", {}).device.usd_per_kwh == 1000.0


async def taken_up(daemon: DaemonProcess, rate: float, scarcer: str) -> None:
    """Wait until the daemon has that rate, and plans with what follows from it."""
    await daemon.until(lambda state: state["money"]["usd_per_kwh"] == rate)
    state = await daemon.until(lambda state: state["learned"]["constrained"] == scarcer)
    assert state["money"]["scarcer"] == scarcer
