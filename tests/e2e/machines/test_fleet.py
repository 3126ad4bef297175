"""A real daemon whose device is a fleet, asked by an OpenAI client; a host that is killed costs no word."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from disco_daemon.config.layers import set_values
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from tests.e2e.cli.test_cli import disco
from tests.fixtures.daemon import PATIENCE_S, DaemonProcess, Heard, ask, running

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")

PROMPTS = [
    f"Tell me something about {word}, and why people like it." for word in ("rivers", "lamps", "stones", "gardens")
]
SEGMENT = {"first", "last", "replicas", "sequences"}
HOST = {
    "name", "state", "epoch", "exact", "cpu_share", "memory_bytes", "memory_free_bytes", "excess_bytes",
    "cells_used", "segments",
}  # fmt: skip
STATUS = {
    "mode", "policy", "paused", "hosts", "parallelism", "speedup_predicted", "speedup_measured", "slo_violation",
    "vacancy", "last_steps",
}  # fmt: skip


def parts_of(daemon_pid: int, module: str) -> list[psutil.Process]:
    children = psutil.Process(daemon_pid).children()
    return [child for child in children if f"disco_daemon.engine.{module}" in child.cmdline()]


def hosts_of(pid: int) -> list[psutil.Process]:
    """The processes that compute layers, without the one in store: that has not given up any rights yet (Linux)."""
    found = parts_of(pid, "hosts.process")
    if sys.platform != "linux":
        return found
    return [one for one in found if Path(f"/proc/{one.pid}/oom_score_adj").read_text().strip() == "500"]


async def spare_of(pid: int) -> psutil.Process:
    """The process in store for the next host that is lost, once it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := [one for one in parts_of(pid, "hosts.process") if one not in hosts_of(pid)]) != 1:
            await asyncio.sleep(0.05)
    return found[0]


async def answers(daemon: DaemonProcess, prompts: Sequence[str] = PROMPTS, **more: Any) -> list[str]:
    heard = await asyncio.gather(*(ask(daemon, prompt, max_tokens=20, **more) for prompt in prompts))
    return [one.text for one in heard]


async def test_a_fleet_answers_as_the_whole_model_does_whatever_becomes_of_its_host(tmp_path: Path) -> None:
    async with running(tmp_path, policy="all-device", settings={"device": {"n_ctx": 1024}}) as daemon:
        pid = (await daemon.device_ready())["pid"]
        expected = await answers(daemon)
        set_values(tmp_path / "config.toml", {"fleet.enabled": True, "fleet.cuts": "5,22"})
        async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
            assert (await response.json())["changed"] == ["fleet.cuts", "fleet.enabled"]

        await daemon.until(lambda s: (s["endpoints"]["device"].get("fleet") or {}).get("state") == "up")
        assert await answers(daemon) == expected
        state = await daemon.state()
        brief = state["endpoints"]["device"]["fleet"]
        confined = brief.pop("confined")
        assert brief == {"hosts": 1, "layers_away": 17, "replicas": 0, "state": "up"}

        [host], spare = hosts_of(pid), await spare_of(pid)
        if sys.platform == "linux":
            assert Path(f"/proc/{host.pid}/oom_score_adj").read_text().strip() == "500"
            given_up = Path(f"/proc/{host.pid}/status").read_text()
            assert "NoNewPrivs:\t1" in given_up
            assert "Seccomp:\t2" in given_up
            assert {"no new privileges", "seccomp"} <= set(confined)

        await its_documents_say_so(daemon, tmp_path)
        await what_it_cannot_do_is_refused(daemon)

        def kill(heard: Heard) -> None:
            if len(heard.pieces) == 6 and host.is_running():
                host.kill()

        assert await answers(daemon, on_piece=kill) == expected
        [another] = hosts_of(pid)
        assert another.pid == spare.pid, "which was in store"
        assert (await spare_of(pid)).pid != spare.pid

        [engine] = parts_of(pid, "worker")
        engine.kill()
        await daemon.until(lambda s: s["endpoints"]["device"]["pid"] not in (engine.pid, None))
        await daemon.device_ready()
        assert await answers(daemon, PROMPTS[:1]) == expected[:1]
        assert not another.is_running(), "a host ends with its home"
        left = psutil.Process(pid).children(recursive=True)
        assert (len(parts_of(pid, "worker")), len(hosts_of(pid))) == (1, 1)
        assert len(left) <= 3, "the one in store may be there already"
    assert not any(process.is_running() for process in left), "none outlives the daemon"


async def its_documents_say_so(daemon: DaemonProcess, folder: Path) -> None:
    code, out, err = await disco("fleet", "status", "--json", "--url", daemon.root, home=folder)
    assert code == 0, err
    found = json.loads(out)
    assert set(found) == STATUS
    home, host = found["hosts"]
    assert set(home) == set(host) == HOST
    assert [(one["first"], one["last"]) for one in home["segments"]] == [(0, 5), (22, 30)]
    assert [(one["first"], one["last"]) for one in host["segments"]] == [(5, 22)]
    assert set(host["segments"][0]) == SEGMENT
    assert (home["name"], host["name"], host["state"], host["epoch"]) == ("home", "local-1", "up", 1)
    assert found["parallelism"] == [1] * 30
    async with daemon.session.get(f"{daemon.root}/metrics") as response:
        metrics = await response.text()
    assert "\ndisco_fleet_hosts 1.0\n" in metrics
    assert "\ndisco_fleet_layers_away 17.0\n" in metrics
    async with daemon.session.get(f"{daemon.root}/disco/v1/fleet") as response:
        assert response.status == 403, "over TCP without a key"
    files = SegmentFiles(folder / "disco" / "segments", 1 << 30)
    assert len(files.of_model(default_model_path())) == 6, "both ends are two files; `disco models rm` takes them"


async def what_it_cannot_do_is_refused(daemon: DaemonProcess) -> None:
    with pytest.raises(openai.APIStatusError, match="is a fleet, and makes no embeddings"):
        await daemon.client.embeddings.create(model="disco", input="a text")
