"""`disco` as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from disco_daemon.models.default import models_dir
from tests.fixtures.daemon import running
from tests.fixtures.ports import free_port
from tests.fixtures.upstream import Upstream

ROOT = Path(__file__).parents[3]


async def disco(
    *args: str, home: Path, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run one verb in a home of its own; exit code, stdout, stderr."""
    own = {k: v for k, v in os.environ.items() if k == "XDG_RUNTIME_DIR" or not k.startswith(("DISCO_", "XDG_"))}
    own |= {"HOME": str(home), "DISCO_CONFIG": str(home / "config.toml"), "NO_COLOR": "1", "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *args,
        env=own | dict(env or {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate((stdin or "").encode()), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_version_and_help_tell_what_they_should(tmp_path: Path) -> None:
    code, out, _ = await disco("--version", home=tmp_path)
    assert (code, out) == (0, "disco 0.1.0\n")
    code, out, _ = await disco("--help", home=tmp_path)
    assert code == 0
    assert "up" in out
    for verb in ("up", "chat", "status", "demo", "config", "models", "bench"):
        code, out, _ = await disco(verb, "--help", home=tmp_path)
        assert code == 0
        assert "usage: disco" in out


@pytest.mark.parametrize("args", [["nonsense"], ["config"], ["up", "--port", "many"], ["chat"]])
async def test_wrong_usage_is_exit_code_2(args: list[str], tmp_path: Path) -> None:
    code, out, err = await disco(*args, home=tmp_path)
    assert code == 2
    assert out == ""
    assert err


async def test_a_measurement_that_became_a_script_says_where_it_is(tmp_path: Path) -> None:
    for options in ([], ["--json", "--minutes", "3"], ["--help"]):
        code, out, err = await disco("bench", "soak", *options, home=tmp_path)
        assert (code, out) == (2, "")
        assert "`python -m benchmarks.soak`" in err
        assert len(err.splitlines()) == 1
    assert (ROOT / "benchmarks/soak/__main__.py").exists()
    _, out, _ = await disco("bench", "--help", home=tmp_path)
    assert " soak " not in out


@pytest.mark.parametrize("args", [["status"], ["chat", "Hello!", "--no-start"]])
async def test_without_a_daemon_there_is_one_line_that_says_what_to_do(args: list[str], tmp_path: Path) -> None:
    code, out, err = await disco(*args, home=tmp_path, env={"DISCO_API_PORT": "1"})
    assert code == 1
    assert out == ""
    assert "disco up" in err
    assert len(err.splitlines()) == 1


async def test_chat_starts_a_daemon_where_none_runs_which_ends_with_it(tmp_path: Path) -> None:
    env = {
        "DISCO_API_PORT": str(free_port()), "DISCO_DEVICE_N_CTX": "256", "DISCO_MODELS_DIR": str(models_dir()),
    }  # fmt: skip
    code, out, err = await disco("chat", "Say hello.", "--max-tokens", "3", home=tmp_path, env=env)
    assert (code, err) == (0, "No daemon was running: one is starting, and ends with this chat …\n")
    assert out.strip()
    assert (await disco("status", home=tmp_path, env=env))[0] == 1
    broken = env | {"DISCO_DEVICE_MODEL": "/nowhere.gguf"}
    code, _, err = await disco("chat", "Hello?", home=tmp_path, env=broken)
    assert code == 1
    assert "the one that was started has ended: the device's model /nowhere.gguf does not exist" in err


async def test_config_is_set_shown_and_checked(tmp_path: Path) -> None:
    code, out, _ = await disco("config", "path", home=tmp_path)
    assert out.strip() == str(tmp_path / "config.toml")
    code, out, _ = await disco("config", "set", "server.base_url", "https://api.example.com/v1", home=tmp_path)
    assert code == 0
    code, out, _ = await disco("config", "get", "server.base_url", home=tmp_path)
    assert out == "https://api.example.com/v1\n"
    code, out, _ = await disco("config", "get", "--json", home=tmp_path)
    assert json.loads(out)["server"]["base_url"] == "https://api.example.com/v1"
    for key, value in (("policy.name", "guess"), ("api.port", "x"), ("no.such", "1"), ("server.base_url", "nowhere")):
        code, out, err = await disco("config", "set", key, value, home=tmp_path)
        assert code == 1
        assert key.split(".")[1] in err
        assert "Traceback" not in err
    code, out, _ = await disco("config", "set", "api.key", "hush", "--json", home=tmp_path)
    assert "hush" not in out
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o600


async def test_up_refuses_a_stranger_s_address_without_a_key_and_a_half_configured_server(tmp_path: Path) -> None:
    code, _, err = await disco("up", "--host", "0.0.0.0", home=tmp_path)
    assert code == 1
    assert "API key" in err
    code, _, err = await disco("up", home=tmp_path, env={"DISCO_SERVER_BASE_URL": "http://127.0.0.1:1/v1"})
    assert code == 1
    assert "server.model" in err
    code, _, err = await disco("up", "--no-device", home=tmp_path)
    assert code == 1
    assert "neither device nor server" in err
    code, _, err = await disco("up", "--model", str(tmp_path / "none.gguf"), home=tmp_path)
    assert code == 1
    assert "does not exist" in err


async def test_chat_answers_once_from_a_pipe_and_as_json(tmp_path: Path) -> None:
    async with Upstream(tokens=4) as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        code, out, err = await disco("chat", "one two", "--url", daemon.url, home=tmp_path)
        assert (code, out.split(), err) == (0, ["one", "two", "one", "two"], "")
        code, out, _ = await disco("chat", "--url", daemon.url, home=tmp_path, stdin="red green\n")
        assert out.split() == ["red", "green", "red", "green"]
        code, out, _ = await disco("chat", "Sum up:", "--url", daemon.url, home=tmp_path, stdin="a text")
        assert upstream.exchanges[2].body["messages"][0]["content"] == "Sum up:\n\na text"
        code, out, _ = await disco("chat", "x y", "--json", "--url", daemon.url, home=tmp_path)
        assert json.loads(out)["answer"] == "x y x y "
        assert json.loads(out)["disco"]["winner"] == "server"
        with upstream.status(500):
            code, out, err = await disco("chat", "x", "--url", daemon.url, home=tmp_path)
        assert (code, out) == (1, "")
        assert "500" in err
        code, out, err = await disco("chat", "x", "--model", "gpt-9", "--url", daemon.url, home=tmp_path)
        assert "disco/server" in err


async def test_status_shows_endpoints_and_the_last_failure(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        with upstream.status(401):
            await disco("chat", "x", "--url", daemon.url, home=tmp_path)
        code, out, _ = await disco("status", "--url", daemon.url, home=tmp_path)
        assert code == 0
        assert "refused the API key" in out
        code, out, _ = await disco("status", "--json", "--url", daemon.url, home=tmp_path)
        assert json.loads(out)["endpoints"]["server"]["failures"] == 1
        assert "secret-of-the-test" not in out


async def test_a_second_daemon_on_the_same_port_says_so(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        port = daemon.root.rpartition(":")[2]
        env = {"DISCO_SERVER_BASE_URL": upstream.url, "DISCO_SERVER_MODEL": "loopback"}
        code, _, err = await disco("up", "--port", port, "--no-device", home=tmp_path, env=env)
        assert code == 1
        assert "is a daemon running already?" in err
        assert "Traceback" not in err


@pytest.mark.slow
async def test_bench_relay_prints_its_figures(tmp_path: Path) -> None:
    code, out, err = await disco("bench", "relay", "--json", "--n", "20", "--streams", "10", home=tmp_path)
    assert code == 0, err
    figures = json.loads(out)
    assert set(figures) >= {"direct_ttft_ms_p50", "added_ttft_ms_p50", "added_ttft_ms_p99", "streams", "tokens_per_s"}
    assert figures["streams"] == 10
