"""`disco config set` checks what can be checked before it writes, and says what is still missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.cli.main import main
from disco_daemon.config.layers import load
from disco_daemon.models.default import default_model_path
from disco_daemon.onboarding import before_writing
from disco_daemon.system.net import with_scheme

Tried = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tried:
    """Set a setting; return the exit code and what was said of it on stderr."""
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("DISCO_API_PORT", "1")

    def set_it(key: str, value: str) -> tuple[int, str]:
        code = main(["config", "set", key, value])
        return code, capsys.readouterr().err

    return set_it


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("device.model", "/nowhere.gguf", "device.model /nowhere.gguf does not exist: `disco models list`"),
        ("device.model", "{text}", "cannot be used"),
        ("device.model", "{folder}", "is a folder"),
        ("device.draft_model", "/nowhere.gguf", "device.draft_model /nowhere.gguf does not exist"),
        ("split.draft_model", "{text}", "cannot be used"),
        ("device.adapters", "{{a = '/nowhere.gguf'}}", "device.adapters a: /nowhere.gguf does not exist"),
        ("device.chat_template", "/nowhere.jinja", "device.chat_template /nowhere.jinja does not exist"),
        ("server.api_key_file", "{text}", "chmod 600"),
        ("server.api_key_file", "/nowhere", "cannot be read"),
        ("server.base_url", "nowhere", "is not a URL such as https://"),
        ("server.base_url", "https://api.example.com/v1/models", "end the address before it"),
        ("server.base_url", "https://me:secret@example.com/v1", "leave out user, password"),
        ("server.base_url", "http://127.0.0.1:4747/v1", "this daemon itself"),
        ("fleet.cuts", "3", "numbers, each above the one before"),
        ("fleet.policy", "paper", "fleet.policy must be one of measured, not 'paper'"),
        ("caps.usd_per_day", "many", "caps.usd_per_day must be a number or null, not 'many'"),
        ("policy.budget", "2", "policy.budget must be a number of at most 1, not '2'"),
        ("device.kv_type", "q8", "device.kv_type must be one of auto, f16, q8_0, not 'q8'; did you mean q8_0?"),
        ("caps.usd_per_dya", "1", "did you mean caps.usd_per_day"),
    ],
)
def test_what_cannot_be_right_is_not_written(key: str, value: str, says: str, tried: Tried, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no model\n", "utf-8")
    text.chmod(0o644)
    code, said = tried(key, value.format(text=text, folder=tmp_path))
    assert code == 1
    assert says in said
    assert not (tmp_path / "config.toml").exists()


def test_a_model_that_is_here_is_written_by_its_whole_path(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    path = default_model_path()
    monkeypatch.chdir(path.parent)
    assert tried("device.model", path.name) == (0, "")
    assert load(env={}).device.model == str(path)


def test_a_name_of_a_model_at_another_server_is_no_file(tried: Tried) -> None:
    assert tried("device.base_url", "localhost:11434")[0] == 0
    assert tried("device.model", "llama3.2") == (0, "")
    assert load(env={}).device.base_url == "http://localhost:11434"


def test_an_address_gets_its_scheme_and_a_look_that_never_blocks(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, said = tried("server.base_url", f"127.0.0.1:{server.getsockname()[1]}/v1")
        assert (code, said.count("\n")) == (0, 1)
        assert "server.model" in said
    assert load(env={}).server.base_url.startswith("http://127.0.0.1:")
    tried("server.model", "m")
    code, said = tried("server.base_url", load(env={}).server.base_url)
    assert code == 0
    assert "nothing answers at" in said
    assert "connection refused" in said
    waits = threading.Event()
    monkeypatch.setattr(before_writing, "LOOK_S", 0.1)
    monkeypatch.setattr(socket, "create_connection", lambda *_: waits.wait())
    began = time.monotonic()
    code, said = tried("server.base_url", "https://far.example.com/v1")
    waits.set()
    assert code == 0
    assert "no answer in time" in said
    assert time.monotonic() - began < 30


def test_nobody_is_looked_at_while_everything_is_private(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(before_writing, "within", look)
    assert tried("policy.private", "true") == (0, "")
    tried("server.model", "m")
    assert tried("server.base_url", "https://far.example.com/v1") == (0, "")


def test_what_is_still_missing_is_said(tried: Tried) -> None:
    assert "api.key" in tried("api.host", "0.0.0.0")[1]
    assert "`disco setup`" in tried("device.enabled", "false")[1]
    assert "`disco setup`" in tried("server.model", "m")[1]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:18700", "http://127.0.0.1:18700"),
        ("192.168.1.3:8000/v1", "http://192.168.1.3:8000/v1"),
        ("localhost", "http://localhost"),
        ("mybox:8080/v1", "http://mybox:8080/v1"),
        ("[::1]:80", "http://[::1]:80"),
        ("api.openai.com/v1", "https://api.openai.com/v1"),
        ("https://api.openai.com/v1", "https://api.openai.com/v1"),
        *((wrong, "") for wrong in ("", "openai", "a b.c", "ftp://x.y", "x.y:99999", "none", "://")),
    ],
)
def test_an_address_without_a_scheme_gets_the_likely_one(text: str, url: str) -> None:
    assert with_scheme(text) == url


@pytest.mark.parametrize(
    ("said", "value", "named", "name"),
    [
        ("server.grade", "10", "server.base_url", "http://127.0.0.1:9/v1"),
        ("server.capabilities", "{tools = false}", "server.model", "gpt-4o"),
        ("device.grade", "10", "device.base_url", "http://127.0.0.1:9/v1"),
        ("device.grade", "10", "device.model", ""),
    ],
)
def test_a_name_set_by_hand_keeps_what_was_said_of_another_one_and_that_is_said(
    tried: Tried, said: str, value: str, named: str, name: str
) -> None:
    """It may have been set for this one: the order is the user's."""
    assert tried(said, value) == (0, "")
    code, remarks = tried(named, name)
    assert code == 0
    assert f"{said}: kept as you set it" in remarks
    assert said not in tried("policy.budget", "0.5")[1]
