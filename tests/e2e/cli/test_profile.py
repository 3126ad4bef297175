"""`disco profile` on the real model and a loopback server: what it prints, keeps and draws, and how it fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.config import layers as config
from disco_daemon.estimation.device_ttft import DeviceTtft
from disco_daemon.machines.device_settings import key_for, knobs_for, model_path, profiles
from disco_daemon.models.default import default_model_path
from disco_daemon.profiling import saved
from tests.fixtures.daemon import running
from tests.fixtures.upstream import Upstream

PATIENCE_S = 500.0


async def disco(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a verb with its own folders; exit code, stdout, stderr."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "XDG_"))}
    own |= {f"XDG_{name}_HOME": str(folder) for name in ("DATA", "CONFIG", "CACHE", "STATE")} | {"HOME": str(folder)}
    own |= {"DISCO_DEVICE_MODEL": str(default_model_path()), "DISCO_API_PORT": "1", "OPENAI_API_KEY": "test"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *words, stdout=pipe, stderr=pipe,
        env=own | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | dict(env or {}),
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.slow
async def test_the_real_model_and_a_server_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"device.model": str(default_model_path()), "device.n_ctx": "256", "server.model": "loopback"}
    picture = tmp_path / "ttft.png"
    async with Upstream(tokens=64) as upstream:
        settings["server.base_url"] = upstream.url
        env = {f"DISCO_{key.replace('.', '_').upper()}": value for key, value in settings.items()}
        words = ("profile", "--quick", "--json", "--check", "3", "--plot", str(picture))
        code, out, err = await disco(tmp_path, *words, env=env)
        assert code == 0, err
        assert len(upstream.exchanges) > 5, "five streams, and the probe"
    found: dict[str, Any] = json.loads(out)
    device, server = found["device"], found["server"]
    assert {"model", "load_s", "prefill_tps", "decode_tps", "ttft_fit", "energy"} <= set(device)
    assert {"k_s_per_token", "q_s_per_token2", "c_s", "r2"} <= set(device["ttft_fit"])
    assert {"source", "prefill_j_per_token", "decode_j_per_token", "relative_error"} <= set(device["energy"])
    assert device["model"] == default_model_path().stem
    assert min(device[name] for name in ("load_s", "prefill_tps", "decode_tps")) > 0
    assert device["n_warm"] == 0, "a fresh prompt of token ids has no part that any cache knows"
    assert len({n for n, _ in device["samples"]}) == 7
    assert max(n for n, _ in device["samples"]) <= 256
    assert device["check"]["n"] == 3
    assert (server["n"], server["continuation"], server["probed"]) == (5, "continue_final_message", True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "drew" in err

    monkeypatch.setattr("disco_daemon.machines.device_settings.data_path", lambda: tmp_path / "disco")
    same = config.load(tmp_path / "none.toml", {}, settings)
    model = model_path(same.device)
    read = saved.load(profiles(), key_for(same, model), knobs_for(same, model))
    assert read is not None, "the daemon with the same settings finds it"
    assert saved.path_of(profiles(), read.key) == Path(found["profile"])
    assert DeviceTtft(*read.prior).predict(saved.TYPICAL) == pytest.approx(read.device.ttft_fit.predict(saved.TYPICAL))
    assert read.device.ttft_fit.r2 == device["ttft_fit"]["r2"]


async def test_what_cannot_be_measured_is_told_with_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    cases = [
        ({"DISCO_DEVICE_MODEL": str(tmp_path / "none.gguf")}, "does not exist: check device.model"),
        ({"DISCO_DEVICE_MODEL": str(broken)}, "cannot load"),
        ({"DISCO_DEVICE_ENABLED": "false"}, "no engine to measure"),
        ({"DISCO_SERVER_BASE_URL": "http://127.0.0.1:1/v1"}, "server.model is not"),
    ]
    for env, why in cases:
        code, out, err = await disco(tmp_path, "profile", "--quick", "--json", env=env)
        assert (code, out) == (1, "")
        assert why in err
        assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.measured.toml")), "nothing is kept of what failed"


async def test_a_daemon_beside_it_is_told_about(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF" + bytes(100))
        env = {"DISCO_API_PORT": daemon.root.rpartition(":")[2], "DISCO_DEVICE_MODEL": str(broken)}
        code, _, err = await disco(tmp_path, "profile", "--quick", env=env)
    assert code == 1, "that is no model"
    assert f"a daemon runs at {daemon.root}" in err


@pytest.mark.parametrize("words", [("--check", "0"), ("--check", "many"), ("--plot",)])
async def test_wrong_usage_is_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, out, _ = await disco(tmp_path, "profile", *words)
    assert (code, out) == (2, "")
