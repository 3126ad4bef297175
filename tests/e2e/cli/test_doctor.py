"""`disco doctor` as a user types it: on a fresh machine, with a broken file, beside a server and a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from aiohttp import web

from disco_daemon.cli.doctor import engine
from disco_daemon.config.schema import DeviceSettings
from disco_daemon.engine.llama.metadata import Metadata
from disco_daemon.engine.measure.checkup_messages import CheckupRequest
from disco_daemon.models.default import default_model_path, models_dir
from tests.fixtures.daemon import running
from tests.fixtures.provider import Provider
from tests.fixtures.upstream import Upstream

SECRET = "secret-of-the-test"


async def doctor(
    home: Path, *args: str, code: int = 0, env: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Run it in a home of its own, on a port that is free; findings by name."""
    own = {
        k: v for k, v in os.environ.items() if k == "XDG_RUNTIME_DIR" or not k.startswith(("DISCO_", "XDG_", "OPENAI_"))
    }
    own |= {"HOME": str(home), "DISCO_MODELS_DIR": str(models_dir()), "DISCO_API_PORT": "0"} | dict(env or {})
    own |= {f"XDG_{name}_HOME": str(home / name) for name in ("DATA", "CONFIG", "CACHE")}
    command = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "doctor", "--json", *args]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=own, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == code, (out, err)
    assert SECRET.encode() not in out + err
    assert err == b""
    told: dict[str, Any] = json.loads(out)
    assert told["ok"] is (code == 0)
    assert told["wrong"] == sum(row["level"] == "wrong" for row in told["findings"])
    found = {row["name"]: row for row in told["findings"]}
    assert len(found) == len(told["findings"])
    assert all(row["found"] and (row["mend"] or row["level"] == "ok") for row in found.values())
    return found


async def test_on_a_fresh_machine_all_is_well_and_nothing_is_made(tmp_path: Path) -> None:
    found = await doctor(tmp_path)
    assert list(found) == [
        "configuration", "python", "model", "llama.cpp", "confinement", "compiler", "processor", "memory",
        "data folder", "cache folder", "history", "port", "other users", "service", "server", "energy", "battery",
        "heat", "clock",
    ]  # fmt: skip
    assert llama_cpp.__version__ in found["llama.cpp"]["found"]
    assert "GiB" in found["memory"]["found"]
    assert list(tmp_path.iterdir()) == []


async def test_without_the_default_model_it_says_how_to_get_it(tmp_path: Path) -> None:
    found = await doctor(tmp_path, env={"DISCO_MODELS_DIR": str(tmp_path / "models")})
    assert found["model"]["level"] == "warn"
    assert "disco models fetch" in found["model"]["mend"]
    assert "models folder" in found
    assert "memory" not in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[policy]\nbudget = 'half'\n", ("policy.budget",)),
        ("[api\n", ("not valid TOML", "line 1")),
        ("[server]\nurl = 'x'\n", ("url", "server")),
        (f"[server]\nbase_url = 'ftp://me:{SECRET}@example.com'\n", ("server.base_url", "ftp://example.com")),
    ],
)
async def test_a_broken_file_is_named_and_all_else_is_looked_at(
    text: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, "utf-8")
    found = await doctor(tmp_path, code=1, env={"DISCO_CONFIG": str(path)})
    assert found["configuration"]["level"] == "wrong"
    assert [word for word in words if word not in found["configuration"]["found"]] == []
    assert found["llama.cpp"]["level"] == "ok"
    assert "clock" in found


async def test_a_server_is_asked_once_and_its_secrets_stay_hidden(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        env = {
            "DISCO_SERVER_BASE_URL": upstream.url, "DISCO_SERVER_MODEL": "loopback", "OPENAI_API_KEY": SECRET,
            "DISCO_DEVICE_ENABLED": "false",
        }  # fmt: skip
        found = await doctor(tmp_path, env=env)
        for name in ("server", "server key", "network", "server model", "continuation", "price"):
            assert found[name]["level"] == "ok", found[name]
        assert "llama.cpp" not in found
        with upstream.status(401):
            found = await doctor(tmp_path, code=1, env=env)
        assert "refuses the key" in found["server model"]["found"]
        assert not upstream.exchanges  # no answer was asked for, none has to be paid
        async with upstream.refuse():
            found = await doctor(tmp_path, code=1, env=env)
        assert found["network"]["level"] == "wrong"
        assert "server model" not in found


async def test_offline_no_connection_is_made(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.setblocking(False)
        env = {
            "DISCO_SERVER_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}/v1", "DISCO_SERVER_MODEL": "m",
            "DISCO_DEVICE_ENABLED": "false", "OPENAI_API_KEY": "two words\n",
        }  # fmt: skip
        found = await doctor(tmp_path, "--offline", code=1, env=env)
        assert "--offline" in found["network"]["found"]
        assert found["price"]["level"] == "ok"
        with pytest.raises(BlockingIOError):
            server.accept()
        found = await doctor(tmp_path, code=1, env=env)
        assert "server model" not in found  # no header can carry that key
        server.accept()[0].close()


async def test_a_price_that_nobody_knows_is_asked_for_and_taken(tmp_path: Path) -> None:
    env = {
        "DISCO_SERVER_BASE_URL": "https://api.openai.com/v1", "DISCO_SERVER_MODEL": "gpt-9", "OPENAI_API_KEY": SECRET,
        "DISCO_DEVICE_ENABLED": "false", "DISCO_CONFIG": str(tmp_path / "config.toml"),
    }  # fmt: skip
    found = await doctor(tmp_path, "--offline", env=env)
    assert found["price"]["level"] == "warn"
    head, _, toml = found["price"]["mend"].partition(":\n")
    file = Path(head.removeprefix("put into "))
    file.parent.mkdir()
    file.write_text(toml, "utf-8")
    found = await doctor(tmp_path, "--offline", code=1, env=env)
    assert str(file) in found["price lists"]["found"]  # the figures are still to be put in
    file.write_text(toml.replace("…", "3"), "utf-8")
    found = await doctor(tmp_path, "--offline", env=env)
    assert found["price"]["found"].startswith("$3 and $3")


async def test_beside_a_running_daemon(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        env = {
            "DISCO_API_PORT": daemon.root.rpartition(":")[2],
            "DISCO_HISTORY_PATH": str(tmp_path / "d/history.sqlite"),
        }
        found = await doctor(tmp_path, env=env)
        assert "a disco daemon" in found["port"]["found"]
        assert "0 requests" in found["history"]["found"]
        found = await doctor(tmp_path, code=1, env=env | {"DISCO_API_PORT": str(upstream.port)})
        assert found["port"]["level"] == "wrong"


def test_the_memory_of_the_model_is_what_the_engine_will_find() -> None:
    asked = engine.checkup_question(DeviceSettings(n_ctx=0), 0)
    assert isinstance(asked, CheckupRequest)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(default_model_path()), params)
    try:
        header = Metadata(model)
        told = (asked.n_layers, asked.n_embd, 2 * asked.kv_numbers, asked.n_ctx)
        keys = ("block_count", "context_length")
        layers, n_ctx = (header.number(key) for key in keys)
        assert told == (layers, header.n_embd, header.kv_bytes("auto"), n_ctx)
        assert asked.n_vocab == llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    finally:
        llama_cpp.llama_model_free(model)


class Late(Provider):
    """A server whose clock is an hour behind."""

    async def models(self, request: web.Request) -> web.StreamResponse:
        response = await super().models(request)
        response.headers["Date"] = format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)
        return response


async def test_each_of_several_servers_is_looked_at_and_told_with_a_mend_of_its_own(tmp_path: Path) -> None:
    """One is well, one has another key, and one is not there; `disco config set` reaches the settings of none."""
    async with Late("key-of-a", ["small"]) as a, Provider("key-of-b", ["small"]) as b:
        with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
            gone = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        text = "[device]\nenabled = false\n"
        for name, url, key, model in (
            ("a", a.url, "key-of-a", "small"), ("b", b.url, "key-of-a", "small"), ("typo", a.url, "key-of-a", "smal"),
            ("gone", gone, "", "m"),
        ):  # fmt: skip
            text += f'[[servers]]\nname = "{name}"\nbase_url = "{url}"\nmodel = "{model}"\nprobe = false\n'
            text += f'api_key_env = "KEY_{key[-1:].upper()}"\n' if key else ""
        (tmp_path / "CONFIG" / "disco").mkdir(parents=True)
        (tmp_path / "CONFIG" / "disco" / "config.toml").write_text(text)
        found = await doctor(tmp_path, code=1, env={"KEY_A": "key-of-a"})
    assert found["configuration"]["level"] == "ok"
    for check in ("server", "server key", "network", "server model"):
        assert found[f"a: {check}"]["level"] == "ok", found
    assert "price" in {name.partition(": ")[2] for name in found if name.startswith("a: ")}
    assert found["b: server model"]["level"] == "wrong"
    assert "refuses the key" in found["b: server model"]["found"]
    assert found["typo: server model"]["mend"] == "set `model = NAME` of [[servers]] typo in config.toml: small"
    assert found["gone: network"]["level"] == "wrong"
    assert (
        found["a: continuation"]["mend"]
        == "`probe = true`, or set continuation to what this server can do (in [[servers]] a)"
    )
    assert found["clock"]["level"] != "ok", "a server of the list says that ours is an hour off"
    assert not [row for row in found.values() if "config set server." in row["mend"]]
