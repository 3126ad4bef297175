"""What the doctor says of this machine, check by check, from what was seen; and that it shows no secret."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from disco_daemon import __version__
from disco_daemon.cli import doctor
from disco_daemon.cli.doctor import files, listening, machine
from disco_daemon.cli.doctor.finding import Finding, Level
from disco_daemon.cli.doctor.listening import Listener
from disco_daemon.client import once as client
from disco_daemon.config.schema import Api, CapSettings, Config, DeviceSettings, NamedServer, ServerSettings
from disco_daemon.engine.llama.memory import GIB
from disco_daemon.errors import ConfigError, Unavailable
from disco_daemon.models.default import SIZE
from disco_daemon.onboarding.asking import within
from disco_daemon.power.measurement import Charge, Covers, PowerReading, Skipped, Thermal
from disco_daemon.power.sensors import PowerState, assumed_reading
from disco_daemon.store import History
from disco_daemon.store.checkup import NEWEST, HistoryFacts, look, profile
from disco_daemon.store.migrations import HISTORY
from tests.fixtures.gguf import gguf
from tests.unit.store.test_store import OUTCOME

OK, WARN, WRONG = Level
NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)
BOX = NamedServer(name="box", base_url="http://127.0.0.1:1/v1", model="m")


# --- configuration and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "level", "word"),
    [
        (Config(), OK, "defaults"),
        (Config(server=ServerSettings(base_url="http://127.0.0.1:1/v1")), WRONG, "server.model"),
        (Config(device=DeviceSettings(base_url="http://example.com/v1", model="m")), WRONG, "device.base_url"),
        (Config(device=DeviceSettings(enabled=False)), WRONG, "neither device nor server"),
        (Config(device=DeviceSettings(enabled=False), servers=(BOX,)), OK, "defaults"),
        (Config(api=Api(host="0.0.0.0")), WRONG, "api.key"),
        (Config(api=Api(host="0.0.0.0", key="hush")), OK, "defaults"),
    ],
)
def test_settings_that_do_not_go_together_are_named(config: Config, level: Level, word: str, tmp_path: Path) -> None:
    found = files.configuration(tmp_path / "config.toml", config, "")
    assert found.level is level
    assert word in found.found


def test_a_key_with_a_name_is_as_good_as_the_owners_where_others_reach_the_daemon(tmp_path: Path) -> None:
    others = Config(api=Api(host="0.0.0.0"))
    assert files.configuration(tmp_path / "config.toml", others, "", has_keys=True).level is OK


def test_keys_with_names_are_told_with_the_caps_that_they_have_reached() -> None:
    assert files.named_keys([], ()) is None
    limits = {"usd_per_day": 1.0, "usd_per_month": None, "usd_today": 0.2, "usd_this_month": 3.0}
    found = files.named_keys(["anna", "bert"], [{"name": "anna"} | limits])
    assert found is not None
    assert (found.level, found.found) == (OK, "2 keys with names: anna, bert")
    found = files.named_keys(["anna"], [{"name": "anna"} | limits | {"usd_today": 1.0}])
    assert found is not None
    assert (found.level, "anna: it has reached its $1.00 a day" in found.found) == (WARN, True)
    found = files.named_keys(ConfigError("keys.json is damaged"), ())
    assert found is not None
    assert (found.level, found.found) == (WRONG, "keys.json is damaged")


def test_what_cannot_be_read_is_told_with_the_reason(tmp_path: Path) -> None:
    found = files.configuration(tmp_path / "config.toml", Config(), "api.port: Expected `int`")
    assert (found.level, found.found) == (WRONG, "api.port: Expected `int`")
    assert "defaults" in found.mend


def test_a_file_with_the_key_in_it_is_to_be_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.touch(0o600)
    path.chmod(0o640)
    secret = Config(api=Api(key="hush"))
    assert files.configuration(path, Config(), "").level is OK
    found = files.configuration(path, secret, "")
    assert (found.level, found.mend) == (WARN, f"`chmod 600 {path}`")
    path.chmod(0o600)
    assert files.configuration(path, secret, "").level is OK


def test_the_model_file_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    settings = DeviceSettings(model=str(path))
    assert files.model(settings).level is WRONG
    assert "does not exist" in files.model(settings).found
    path.write_bytes(b"<html>")
    assert "no GGUF" in files.model(settings).found
    gguf(path)
    assert files.model(settings).level is OK
    assert files.model(DeviceSettings(model=str(tmp_path))).level is WRONG  # a folder
    assert files.model(DeviceSettings(enabled=False, model="none")).level is OK
    assert files.model(DeviceSettings(base_url="http://127.0.0.1/v1", model="phi")).level is OK


def test_the_default_model_may_be_missing_but_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path))
    found = files.model(DeviceSettings())
    assert found.level is WARN
    assert "disco models fetch" in found.mend
    path = gguf(files.model_path(DeviceSettings()))
    assert files.model(DeviceSettings()).level is WRONG
    with path.open("ab") as f:
        f.truncate(SIZE)
    assert files.model(DeviceSettings()).level is OK


def test_other_files_that_settings_name_are_looked_for(tmp_path: Path) -> None:
    assert files.device_files(DeviceSettings()) is None
    there = gguf(tmp_path / "a.gguf")
    found = files.device_files(DeviceSettings(adapters={"a": str(there)}, draft_model=str(there)))
    assert found == Finding("device files", OK, "device.draft_model, device.adapters.a")
    found = files.device_files(DeviceSettings(adapters={"a": str(there), "b": str(tmp_path / "b")}))
    assert found is not None
    assert found.level is WARN  # the engine goes on without it
    assert "device.adapters.b" in found.found
    assert "device.adapters.a" not in found.found
    found = files.device_files(DeviceSettings(chat_template=str(tmp_path / "none.jinja")))
    assert found is not None
    assert found.level is WRONG


@pytest.mark.parametrize(("free", "level"), [(10, WRONG), (2 * 10**8, WARN), (2 * GIB, OK)])
def test_room_on_the_disk(free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert files.folder("data folder", tmp_path / "not" / "yet").level is level
    assert asked == [tmp_path]  # what does not exist yet is not made
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert files.folder("data folder", tmp_path).level is WRONG
    monkeypatch.undo()
    (tmp_path / "file").touch()
    assert files.folder("data folder", tmp_path / "file").level is WRONG


def test_a_folder_behind_a_closed_one_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def closed(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(tmp_path / "closed" / "own"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may do all
    found = files.folder("data folder", tmp_path / "closed" / "own" / "data")
    assert (found.level, found.found) == (WRONG, f"{tmp_path / 'closed'} cannot be written to")


# --- the history ------------------------------------------------------------------------------------------------------


def test_a_history_of_this_version_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    with History(path) as history:
        history.record(OUTCOME)
        history.flush(30)
        seen = look(path)  # beside the daemon that writes it
        assert seen == HistoryFacts(NEWEST, 1, OUTCOME.created)
        assert files.history(path, seen).level is OK
    before = path.read_bytes()
    assert look(path) == seen
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert files.history(path, seen).found.startswith(f"{path}, 1 requests, schema {NEWEST}, ")


def test_what_the_history_knows_of_a_server_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    with History(path) as history:
        history.save_profile("http://127.0.0.1/v1 m", 1.7e9, {"method": "prefix"})
        history.flush(30)
        assert profile(path, "http://127.0.0.1/v1 m") == {"method": "prefix"}
    assert profile(path, "http://127.0.0.1/v1 other") is None
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(Unavailable):
        profile(path, "http://127.0.0.1/v1 m")


def test_a_history_that_is_none_newer_or_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    assert files.history(path, None).level is OK
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(Unavailable) as raised:
        look(path)
    assert files.history(path, str(raised.value)).level is WRONG
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        assert look(path) == HistoryFacts(0, 0, None)
        connection.execute("CREATE TABLE requests (created REAL)")
        connection.execute(f"PRAGMA application_id = {HISTORY.application_id}")
        connection.execute(f"PRAGMA user_version = {NEWEST + 1}")
        connection.commit()
    path.chmod(0o600)
    found = files.history(path, look(path))
    assert found.level is WRONG
    assert f"schema {NEWEST + 1}" in found.found
    path.chmod(0o644)
    found = files.history(path, HistoryFacts(NEWEST, 0, None))
    assert (found.level, found.mend) == (WARN, f"`chmod 600 {path}`")
    path.chmod(0o600)
    path.with_name("history.sqlite-wal").touch()
    path.with_name("history.sqlite-wal").chmod(0o644)
    assert "-wal" in files.history(path, HistoryFacts(NEWEST, 0, None)).mend
    path.with_name("history.sqlite-wal").unlink()
    assert "brings it" in files.history(path, HistoryFacts(1, 0, None)).found


# --- the port ---------------------------------------------------------------------------------------------------------


@contextmanager
def taken(host: str = "127.0.0.1") -> Iterator[int]:
    with closing(socket.create_server((host, 0))) as s:
        yield s.getsockname()[1]


def test_other_users_are_out_unless_they_are_let_in_and_it_is_told_where_nobody_can_know() -> None:
    assert listening.users(Api(), is_reported=True).found == "are kept out"
    assert "api.key" in listening.users(Api(key="hush"), is_reported=True).found
    assert "api.any_user" in listening.users(Api(any_user=True), is_reported=True).found
    on_macos = listening.users(Api(), is_reported=False, platform="darwin")
    assert (on_macos.level, "does not say whose" in on_macos.found, "api.key" in on_macos.mend) == (OK, True, True)
    on_linux = listening.users(Api(), is_reported=False, platform="linux")
    assert (on_linux.level, "api.any_user" in on_linux.mend) == (WRONG, True)


def test_a_free_port_a_taken_one_and_one_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(root: str, path: str, key: str) -> Any:
        asked.append(root + path)
        raise client.DaemonError("HTTP 404")

    monkeypatch.setattr(client, "get", get)
    with taken() as port:
        found = listening.listener(Api(port=port))
        assert not found.free
        assert asked == [f"http://127.0.0.1:{port}/disco/v1/state"]
        assert listening.port(Api(port=port), found).level is WRONG
        assert "HTTP 404" in listening.port(Api(port=port), found).found
    assert listening.listener(Api(port=port)) == Listener(free=True)
    assert listening.port(Api(port=port), Listener(free=True)).level is OK
    assert "free one" in listening.port(Api(port=0), listening.listener(Api(port=0))).found
    for host in ("192.0.2.1", "example.com"):  # RFC 5737: nobody's; and a name, which is not looked up
        assert listening.port(Api(host), listening.listener(Api(host))).level is WRONG
    assert len(asked) == 1


@pytest.mark.parametrize("said", [{"version": "1"}, [], "hello", OSError("reset"), ValueError("no JSON")])
def test_what_is_no_daemon_is_not_taken_for_one(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: str) -> object:
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(client, "get", get)
    with taken() as port:
        found = listening.listener(Api(port=port))
    assert found.state is None
    assert found.problem


def test_a_daemon_that_runs_is_good_news_unless_it_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"version": __version__, "endpoints": {}}
    monkeypatch.setattr(client, "get", lambda *_: state)
    with taken() as port:
        found = listening.listener(Api(port=port))
    assert found == Listener(state=state)
    assert listening.port(Api(), found).level is OK
    old = listening.port(Api(), Listener(state={"version": "0.0.1", "endpoints": {}}))
    assert (old.level, old.mend) == (WARN, "restart it")


# --- energy and time --------------------------------------------------------------------------------------------------


RAPL = PowerReading("rapl", Covers.CPU, 0.1, joules=5.0, note="package-0")


@pytest.mark.parametrize(
    ("reading", "level", "words"),
    [
        (RAPL, OK, ("rapl (package-0)", "10 %", "not battery: there is no battery")),
        (assumed_reading(25.0, 4, frugal=True), OK, ("device.watts = 25 W", "20 %", "not measured")),
        (assumed_reading(0.0, 4, frugal=True), WARN, ("4 busy cores at 4 W", "16 W", "60 %")),
        (assumed_reading(0.0, 1, frugal=False), WARN, ("a rule of thumb, 1 busy core at 9 W = 9 W)",)),
    ],
)
def test_the_source_of_energy_and_why_no_better_one(
    reading: PowerReading, level: Level, words: tuple[str, ...]
) -> None:
    found = machine.energy(PowerState(reading, (Skipped("battery", "there is no battery"),)))
    assert found.level is level
    assert [word for word in words if word not in found.found] == []
    assert ("device.watts" in found.mend) == (level is WARN)


@pytest.mark.parametrize(
    ("charge", "floor", "level", "word"),
    [
        (None, None, OK, "none"),
        (Charge(0.8, on_mains=True), None, OK, "80%, on mains"),
        (Charge(0.1, on_mains=True), None, OK, "on mains"),
        (Charge(0.8, on_mains=False, seconds_left=5400.0), None, OK, "1.5 h left"),
        (Charge(0.1, on_mains=False), None, WARN, "on battery"),
        (Charge(0.4, on_mains=False), 0.5, WARN, "on battery"),
        (Charge(0.1, on_mains=False), 0.05, OK, "on battery"),
    ],
)
def test_the_battery(charge: Charge | None, floor: float | None, level: Level, word: str) -> None:
    found = machine.battery(charge, CapSettings(battery_floor=floor).battery_floor)
    assert found.level is level
    assert word in found.found


def test_heat() -> None:
    assert machine.heat(None).level is OK
    assert machine.heat(Thermal(throttled=False, headroom_k=30.0)).found == "30 K below throttling"
    hot = machine.heat(Thermal(throttled=True, headroom_k=None, note="slowed 40% of the time"))
    assert hot.level is WARN
    assert "40%" in hot.found


@pytest.mark.parametrize(
    ("now", "latest", "skew", "level", "word"),
    [
        (NOW, None, None, OK, "2026-11-22 12:00 UTC"),
        (NOW - 400 * DAY, None, None, WRONG, "cannot be"),  # a dead battery on the board
        (NOW + 9000 * DAY, None, None, WRONG, "cannot be"),
        (NOW, None, 30.0, OK, ""),
        (NOW, None, 3600.0, WARN, "3600 s ahead of"),
        (NOW, None, -3600.0, WARN, "3600 s behind"),
        (NOW, NOW.timestamp() - 60, None, OK, ""),
        (NOW, NOW.timestamp() + 86400, None, WARN, "2026-11-23"),
        (NOW, 1e300, None, WARN, "far ahead"),
    ],
)
def test_the_clock(now: datetime, latest: float | None, skew: float | None, level: Level, word: str) -> None:
    found = machine.clock(now, NOW - DAY, latest, skew)
    assert found.level is level
    assert word in found.found


# --- showing ----------------------------------------------------------------------------------------------------------


def test_no_secret_and_no_control_character_is_shown() -> None:
    env = {"OPENAI_API_KEY": "sesame", "HF_TOKEN": "tapioca", "TOKENIZERS_PARALLELISM": "false", "HOME": "/home/a"}
    hidden = doctor._secrets(env, "own-key", "", "ses")
    assert hidden == ["own-key", "tapioca", "sesame"]
    told = "sesame own-key tapioca false https://user:pass@example.com sk-abcdefghijklmnop \x1b[31mred"
    found = doctor.clean(Finding("server", WARN, told, told), hidden)
    assert found.found == found.mend
    assert found.found == "******** ******** ******** false https://example.com ******** \ufffd[31mred"


def test_a_finding_is_a_line_and_a_longer_mend_is_indented() -> None:
    assert doctor.line(Finding("port", OK, "free")) == "ok    port            free"
    lines = doctor.line(Finding("price", WARN, "not known", "put\n[models]")).splitlines()
    assert lines[0] == "warn  price           not known -> put"
    assert lines[1] == " " * lines[0].index("not known") + "[models]"


def test_on_a_terminal_it_is_coloured_folded_and_no_markup() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60, _environ={})
    terminal.print(doctor._row(Finding("model", WRONG, "[red]x[/red] " + "word " * 20, "mend it")))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;31mwrong" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "[red]x[/red]" in plain
    assert "→ mend it" in plain
    assert max(map(len, plain.splitlines())) <= 60


@pytest.mark.parametrize(("levels", "code"), [((OK, WARN), 0), ((OK, WRONG), 1), ((), 0)])
def test_the_exit_code_says_whether_something_is_wrong(
    levels: tuple[Level, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(f"check {n}", level, "[bold] is no markup") for n, level in enumerate(levels)]
    monkeypatch.setattr(doctor, "findings", lambda **_: iter(found))
    run: Callable[[Any], int] = doctor.run
    assert run(SimpleNamespace(json=True, offline=False, online=False)) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is (code == 0)
    assert [row["level"] for row in shown["findings"]] == [str(level) for level in levels]
    assert run(SimpleNamespace(json=False, offline=False, online=False)) == code
    plain = capsys.readouterr().out.splitlines()
    assert len(plain) == len(levels) + 1
    assert all("[bold] is no markup" in line for line in plain[:-1])


def test_work_that_nobody_waits_for_any_longer() -> None:
    assert within(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)
    done = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, done.wait)
    done.set()
