"""First steps for real: `disco setup` by flags and at a terminal, and the same over a daemon's API."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link
from disco_daemon.config.layers import load, set_values
from disco_daemon.models.default import DEFAULT_MODEL
from tests.e2e.cli.test_cli import disco
from tests.e2e.conductor.test_link import PATIENCE_S, Terminal
from tests.fixtures.daemon import ask, running
from tests.fixtures.gguf import model_file
from tests.fixtures.provider import SECRET, Provider

NOWHERE = {"DISCO_API_PORT": "9"}  # no daemon of anybody is asked


def everything(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_text("utf-8", "replace") for p in files}


# --- by flags ---------------------------------------------------------------------------------------------------------


async def test_flags_test_save_and_take_away(tmp_path: Path) -> None:
    async with Provider() as server:
        args = ("setup", "--server", server.url, "--model", "small", "--key-file", "-")
        code, out, err = await disco(*args, home=tmp_path, stdin=f"{SECRET}\n", env=NOWHERE)
        assert (code, err) == (0, "")
        assert "small at" in out
        assert "bills nothing" in out
        assert "disco up" in out
        assert SECRET not in out
        assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
        (file,) = (tmp_path / "keys").iterdir()
        assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, f"{SECRET}\n")
        set_values(tmp_path / "config.toml", {"server.grade": 10})
        again = ("setup", "--server", server.url, "--model", "large-2", "--json")
        code, out, err = await disco(*again, home=tmp_path, env=NOWHERE)
        told = json.loads(out)
        assert (code, told["check"]["ok"], told["saved"]["server.model"]) == (0, True, "large-2")
        assert told["daemon_runs"] is False
        assert told["notes"] == ["server.grade = 10.0 was for the model before, and is taken out."]
        set_values(tmp_path / "config.toml", {"device.base_url": "http://127.0.0.1:1/v1", "device.model": "theirs"})
        model = model_file(tmp_path / "own.gguf")
        code, out, err = await disco("setup", "--local", str(model), home=tmp_path, env=NOWHERE)
        assert (code, err) == (0, "")
        assert "device.base_url = http://127.0.0.1:1/v1 is taken out: this machine's own model answers." in out
        assert SECRET not in out
        assert server.seen == [SECRET] * 4, "the key that is there is used"
    code, out, _ = await disco("setup", "--server", "none", "--json", home=tmp_path, env=NOWHERE)
    assert code == 0
    assert json.loads(out)["saved"]["server.base_url"] == ""


async def test_flags_add_change_and_remove_one_more_server(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[[servers]]  # mine\nname = "box"\nbase_url = "http://127.0.0.1:1/v1"\n')
    async with Provider() as server:
        args = ("setup", "--as", "more", "--server", server.url, "--model")
        code, out, err = await disco(*args, "small", "--key-file", "-", home=tmp_path, stdin=f"{SECRET}\n", env=NOWHERE)
        assert (code, err) == (0, "")
        assert "small at" in out
        assert "more@127.0.0.1" in out
        code, out, err = await disco(*args, "large-2", "--json", home=tmp_path, env=NOWHERE)
        told = json.loads(out)
        assert (code, told["saved"]) == (0, {"servers.more": {"base_url": server.url, "model": "large-2"}})
        assert set(server.seen) == {SECRET}, "the key that is there is used"
        found = load(tmp_path / "config.toml", {}).servers
        assert [(one.name, one.model) for one in found] == [("box", ""), ("more", "large-2")]
    code, out, _ = await disco("setup", "--as", "more", "--server", "none", "--json", home=tmp_path, env=NOWHERE)
    assert (code, json.loads(out)["saved"]) == (0, {"servers.more": None})
    assert [one.name for one in load(tmp_path / "config.toml", {}).servers] == ["box"]
    assert "# mine" in (tmp_path / "config.toml").read_text()
    code, _, err = await disco("setup", "--as", "box", home=tmp_path, env=NOWHERE)
    assert (code, "--as is for a server" in err) == (2, True)


async def test_what_does_not_work_is_not_saved(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    before = everything(tmp_path)
    async with Provider() as server:
        args = ("setup", "--server", server.url, "--key-file", str(key))
        code, out, err = await disco(*args, "--model", "smal", home=tmp_path, env=NOWHERE)
        assert (code, out) == (1, "")
        assert "small" in err
        assert "Nothing was changed." in err
        server.key = "another"
        code, out, err = await disco(*args, "--model", "small", "--json", home=tmp_path, env=NOWHERE)
        assert (code, json.loads(out)["saved"], json.loads(out)["check"]["problem"]["code"]) == (1, None, "key")
        assert SECRET not in out + err
        assert everything(tmp_path) == before
        server.seen.clear()
        code, out, err = await disco(*args, "--model", "small", "--no-test", home=tmp_path, env=NOWHERE)
        assert (code, err, server.seen) == (0, "", []), "asked nobody, as told"
        assert server.url in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--json"],
        ["--model", "m"],
        ["--server", "openai"],
        ["--server", "none", "--key-file", "x"],
        ["--server"],
    ],
)
async def test_wrong_usage_is_exit_code_2_and_changes_nothing(args: list[str], tmp_path: Path) -> None:
    code, out, err = await disco("setup", *args, home=tmp_path, env=NOWHERE)
    assert (code, out) == (2, "")
    assert "--server" in err
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--server", "nobody", "--model", "m"], "openrouter"),
        (["--server", "openai", "--model", "m", "--key-file", "none"], "cannot be read"),
        (["--server", "openai", "--model", "m", "--key-file", "-"], "is empty"),
        (["--server", "https://u:p@x.example.com/v1", "--model", "m", "--no-test"], "more than an address"),
        (["--local", "none.gguf"], "cannot be read"),
    ],
)
async def test_what_is_not_there_is_one_line(args: list[str], word: str, tmp_path: Path) -> None:
    code, out, err = await disco("setup", *args, home=tmp_path, env=NOWHERE)
    assert (code, out) == (1, "")
    assert word in err
    assert len(err.splitlines()) == 1
    assert everything(tmp_path) == {}


# --- at a terminal ----------------------------------------------------------------------------------------------------


class Setup(Terminal):
    """`disco setup` on a terminal of its own."""

    def __init__(self, home: Path) -> None:
        self.seen = ""
        self._argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "setup"]
        here = home / "models" / DEFAULT_MODEL
        here.parent.mkdir()
        here.write_bytes(b"GGUF")  # it is there, and there is no choice
        own = {k: v for k, v in os.environ.items() if k == "XDG_RUNTIME_DIR" or not k.startswith(("XDG_", "DISCO_"))}
        own |= {"DISCO_MODELS_DIR": str(here.parent)}
        self._env = own | NOWHERE | {"HOME": str(home), "DISCO_CONFIG": str(home / "config.toml"), "TERM": "dumb"}


async def test_at_a_terminal_one_is_asked_and_the_key_is_not_shown(tmp_path: Path) -> None:
    async with Provider() as server, Setup(tmp_path) as terminal:
        await terminal.until("or none [none]: ")
        terminal.type(f"{server.url}\n")
        await terminal.until("API key")
        terminal.type(f"{SECRET}\n")
        await terminal.until("part of its name: ")
        terminal.type("small\n")
        await terminal.until("[Y/n] ")
        terminal.type("\n")
        await terminal.until("Enter for none: ")
        terminal.type("\n")
        await terminal.until("Saved in ")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_S) == 0
        assert SECRET not in terminal.seen
        assert 'model = "small"' in (tmp_path / "config.toml").read_text()


async def test_ctrl_c_leaves_everything_as_it_was(tmp_path: Path) -> None:
    async with Provider() as server, Setup(tmp_path) as terminal:
        await terminal.until("or none [none]: ")
        terminal.type(f"{server.url}\n")
        await terminal.until("API key")
        terminal.type(f"{SECRET}\n")
        await terminal.until("part of its name: ")
        await terminal.interrupt()
        await terminal.until("Nothing was changed.")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_S) == 130
        assert "Traceback" not in terminal.seen
        assert list(everything(tmp_path)) == [f"models/{DEFAULT_MODEL}"]


# --- over the API -----------------------------------------------------------------------------------------------------


def lacks(folder: Path, secret: str) -> None:
    """The secret is in the key's own file and in no other: no log, no history, no settings."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    holding = [p.relative_to(folder).parts for p in files if secret.encode() in p.read_bytes()]
    assert [parts[0] for parts in holding] == ["keys"], holding


async def test_a_daemon_lists_checks_and_saves_and_it_and_its_successor_go_by_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"server": {"probe": False}}
    async with Provider() as server:
        async with (
            running(tmp_path, settings=settings, more=("--log-level", "debug")) as daemon,
            Link(daemon.root) as link,
        ):
            known = await link.providers()
            assert [p["name"] for p in known["providers"]][:2] == ["anthropic", "cohere"]
            assert next(p["key"] for p in known["providers"] if p["name"] == "openai") == "$OPENAI_API_KEY"
            assert known["server"] == {"base_url": "", "model": ""}
            assert known["device"]["enabled"] is True
            listed = await link.check_server(server.url, SECRET)
            assert (listed["ok"], listed["ttft_s"]) == (True, None)
            assert listed["models"] == ["large-2", "small", "text-embed-1"]
            wrong = await link.check_server(server.url, "sk-wrong-key-1234567", "small")
            assert wrong["problem"]["code"] == "key"
            tested = await link.check_server(server.url, SECRET, "small")
            assert tested["ttft_s"] > 0
            assert not (tmp_path / "keys").exists(), "a check writes nothing"
            saved = await link.set_server(server.url, SECRET, "small")
            assert saved["needs_restart"] is False
            assert (await link.state())["endpoints"]["server"]["model"] == "small", "from now on, without a restart"
            assert (await ask(daemon, "one two", model="disco/server")).text == "one two one two "
            assert (await link.providers())["server"] == {"base_url": server.url, "model": "small"}
            again = await link.check_server(server.url, "", "small")
            assert again["ok"], "the key that is there"
            for answer in (known, listed, wrong, tested, saved, again, await link.settings(), await link.state()):
                assert SECRET not in json.dumps(answer)
            lacks(tmp_path, SECRET)
        config = (tmp_path / "config.toml").read_text()
        kept: dict[str, Any] = {"server": {"base_url": server.url, "model": "small", "api_key_env": ""}}
        assert 'api_key_env = ""' in config
        kept["server"]["api_key_file"] = str(next((tmp_path / "keys").iterdir()))
        server.seen.clear()
        more = ("--log-level", "debug")
        async with running(tmp_path, device=False, settings=kept, more=more) as daemon:
            assert (await ask(daemon, "one two")).text == "one two one two "
            lacks(tmp_path, SECRET)
        assert server.seen == [SECRET], "and not that of the variable"


async def test_a_daemon_takes_up_one_more_server_and_lets_it_go(tmp_path: Path) -> None:
    async with Provider() as server, Provider("other-key") as other:
        async with running(tmp_path, device=False, server=other.url) as daemon, Link(daemon.root) as link:
            row = next(p for p in (await link.providers())["providers"] if p["name"] == "openai")
            assert row["free_name"] == "openai"
            checked = await link.check_server(server.url, SECRET, "small", "more")
            assert checked["ok"]
            saved = await link.set_server(server.url, SECRET, "small", "more")
            assert (saved["saved"], saved["needs_restart"]) == (["servers.more"], False)
            assert [one["name"] for one in (await link.state())["servers"]] == ["server", "more"]
            known = (await link.providers())["servers"]
            assert [(one["name"], one["model"]) for one in known][1] == ("more", "small")
            assert known[1]["key"].endswith("more@127.0.0.1" + f"_{server.url.split(':')[2].split('/')[0]}")
            assert (await ask(daemon, "one two", model="more/small")).text == "one two one two "
            async with daemon.session.get(f"{daemon.root}/disco/v1/providers") as response:
                assert (await response.json())["servers"][1]["key"] == "set", "not where, to a stranger"
            await link.set_server("", name="more")
            assert [one["name"] for one in (await link.state())["servers"]] == ["server"]
            with pytest.raises(DaemonError, match="has no server called"):
                await link.set_server("", name="more")
        lacks(tmp_path, SECRET)


async def test_what_the_api_refuses(tmp_path: Path) -> None:
    async with Provider() as server, running(tmp_path, server=server.url, device=False) as daemon:
        before = (tmp_path / "config.toml").read_text()
        async with Link(daemon.root) as link:
            for url, key, model, word in (
                ("nowhere", "", "m", "no address"),
                (server.url, "two words", "m", "white space"),
                (server.url, SECRET, "", "server.model"),
                ("https://u:p@x.example.com/v1", "", "m", "more than an address"),
            ):
                with pytest.raises(DaemonError, match=word) as raised:
                    await link.set_server(url, key, model)
                assert raised.value.code == "invalid_setting"
                assert SECRET not in str(raised.value)
            own = await link.check_server("nowhere", SECRET)
            assert own["problem"]["code"] == "address"
        for path in ("server/check", "server"):
            method = "POST" if path.endswith("check") else "PUT"
            url = f"{daemon.root}/disco/v1/{path}"
            body = {"base_url": server.url, "api_key": SECRET, "model": "small"}
            async with daemon.session.request(method, url, json=body, headers={"Origin": "https://evil.example"}) as r:
                assert r.status == 403
            async with daemon.session.request(method, url, json=body, headers={"Host": "evil.example"}) as r:
                assert r.status == 403
            async with daemon.controls.request(method, url, json={"base_url": 7, "api_key": SECRET}) as r:
                assert r.status == 400
                assert SECRET not in await r.text()
            async with daemon.controls.request(method, url, json=body | {"keep": True}) as r:
                assert r.status == 400
        assert (tmp_path / "config.toml").read_text() == before
        assert not (tmp_path / "keys").exists()
        assert not server.exchanges, "nobody was asked anything that costs"


async def test_one_check_at_a_time_and_strangers_need_the_key(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"api": {"key": "hush"}}
    async with Provider() as server, running(tmp_path, server=server.url, device=False, settings=settings) as daemon:
        body = {"base_url": server.url, "api_key": SECRET, "model": "small"}
        async with daemon.session.put(f"{daemon.root}/disco/v1/server", json=body) as response:
            assert response.status == 401
        server.hangs = True
        async with Link(daemon.root, "hush") as link:
            first = asyncio.create_task(link.check_server(server.url, SECRET, "small"))
            async with asyncio.timeout(PATIENCE_S):
                while not server.exchanges:
                    await asyncio.sleep(0.01)  # the other process has no event to wait for
            with pytest.raises(DaemonError, match="under way") as raised:
                await link.check_server(server.url, SECRET, "small")
            assert raised.value.code == "busy"
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        assert server.n_requests == 1
