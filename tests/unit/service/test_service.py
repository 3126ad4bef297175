"""The service's files, and what a daemon and its service manager tell each other."""

from __future__ import annotations

import asyncio
import os
import plistlib
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.service import launchd, systemd
from disco_daemon.service.managers import Launchd, Systemd
from disco_daemon.service.notify import ServiceChannel
from disco_daemon.service.spec import STOP_S, Spec

PATIENCE_S = 60.0
SPEC = Spec(
    (sys.executable, "-m", "disco_daemon.cli.main", "up"), environment={"DISCO_CONFIG": "/home/me/my config.toml"},
    memory_bytes=4 << 30, log=Path("/tmp/logs"),
)  # fmt: skip
# launchd.plist(5), those that we use, and their types.
PLIST_KEYS = {
    "Label": str, "ProgramArguments": list, "EnvironmentVariables": dict, "RunAtLoad": bool, "KeepAlive": dict,
    "ThrottleInterval": int, "ExitTimeOut": int, "ProcessType": str, "Umask": int, "SoftResourceLimits": dict,
    "HardResourceLimits": dict, "StandardOutPath": str, "StandardErrorPath": str,
}  # fmt: skip
LIMIT_KEYS = {"NumberOfFiles", "ResidentSetSize"}


def values(unit: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.partition("=")[0] == name]


# --- systemd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, Spec(SPEC.command, port=None), Spec(SPEC.command, host="::1", port=8080)])
def test_systemd_itself_accepts_the_units(spec: Spec, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    for name, text in systemd.units(spec).items():
        (tmp_path / name).write_text(text)
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    found = subprocess.run(
        ["systemd-analyze", "--user", "verify", *files], capture_output=True, text=True, env=env, timeout=60
    )
    ours = [line for line in (found.stdout + found.stderr).splitlines() if "disco" in line]
    assert found.returncode == 0, found.stderr
    assert not ours, ours


def test_the_unit_is_ready_when_it_says_so_watched_and_restarted() -> None:
    unit = systemd.units(SPEC)[systemd.SERVICE]
    assert values(unit, "Type") == ["notify"]
    assert values(unit, "Restart") == ["on-failure"]
    assert int(values(unit, "WatchdogSec")[0]) > 0
    assert values(unit, "KillMode") == ["mixed"], "the engine must not get the signal before the answers are ended"
    assert int(values(unit, "TimeoutStopSec")[0]) == STOP_S
    assert values(unit, "MemoryMax") == [str(4 << 30)]
    assert values(unit, "NoNewPrivileges") == ["yes"]


def test_the_unit_takes_away_what_no_daemon_needs_and_leaves_the_engine_the_means_to_confine_itself() -> None:
    unit = systemd.units(SPEC)[systemd.SERVICE]
    filters = " ".join(values(unit, "SystemCallFilter")).split()
    assert filters[0] == "@system-service"
    assert {"seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= set(filters)
    assert values(unit, "RestrictAddressFamilies") == ["AF_UNIX AF_INET AF_INET6 AF_NETLINK"]
    for name, value in {"RestrictNamespaces": "yes", "LimitCORE": "0", "SystemCallErrorNumber": "EPERM"}.items():
        assert values(unit, name) == [value]
    assert int(values(unit, "TasksMax")[0]) >= 256
    assert 0 < int(values(unit, "MemoryHigh")[0]) < int(values(unit, "MemoryMax")[0])


def test_the_port_is_listened_on_by_systemd_unless_the_daemon_picks_one() -> None:
    unit = systemd.units(SPEC)[systemd.SOCKET]
    assert values(unit, "ListenStream") == ["127.0.0.1:4747", "%t/disco/4747.sock"]
    assert (values(unit, "SocketMode"), values(unit, "DirectoryMode")) == (["0600"], ["0700"])
    six = systemd.units(Spec(("x",), host="::1", port=8080))[systemd.SOCKET]
    assert values(six, "ListenStream") == ["[::1]:8080", "%t/disco/8080.sock"]
    alone = systemd.units(Spec(("x",), port=None))
    assert list(alone) == [systemd.SERVICE]
    assert "Requires=" not in alone[systemd.SERVICE]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_a_word_comes_back_as_it_was(word: str) -> None:
    [back] = shlex.split(systemd.quote(word))
    assert back.replace("$$", "$").replace("%%", "%") == word
    [value] = shlex.split(systemd.quote(word, command=False))
    assert value.replace("%%", "%") == word, "in an assignment `$` is itself"


def test_a_line_end_cannot_smuggle_a_directive_in() -> None:
    with pytest.raises(ValueError, match="line end"):
        systemd.units(Spec(("disco\nExecStartPre=/bin/evil",)))


def test_files_go_where_the_user_manager_looks(tmp_path: Path) -> None:
    manager = Systemd(tmp_path / "units")
    manager.write(SPEC)
    assert sorted(path.name for path in manager.installed_files()) == [systemd.SERVICE, systemd.SOCKET]
    assert "ExecStart=" in (tmp_path / "units" / systemd.SERVICE).read_text()


def test_a_unit_that_is_not_as_the_settings_say_is_told(tmp_path: Path) -> None:
    manager = Systemd(tmp_path)
    assert manager.differs(SPEC) == "", "it is not installed"
    manager.write(SPEC)
    assert manager.differs(SPEC) == ""
    unit = tmp_path / systemd.SOCKET
    as_now = unit.read_text()
    unit.write_text(as_now.replace("ListenStream=%t/disco/4747.sock\n", ""))
    assert "older version, without the Unix socket" in manager.differs(SPEC)
    unit.write_text(as_now.replace("127.0.0.1", "0.0.0.0"))
    assert "listens on 0.0.0.0:4747" in manager.differs(SPEC)
    assert "the settings say 127.0.0.1:4747" in manager.differs(SPEC)
    unit.write_text(as_now)
    assert "the settings say 127.0.0.1:8080" in manager.differs(Spec(SPEC.command, port=8080))
    assert "the settings say a free port" in manager.differs(Spec(SPEC.command, port=None))
    unit.unlink()
    assert "listens on nothing" in manager.differs(SPEC)
    assert Launchd(tmp_path).differs(SPEC) == "", "there the daemon listens by itself, as it is set"


# --- launchd ------------------------------------------------------------------------------------------------------


def test_the_property_list_parses_and_holds_to_the_documented_keys() -> None:
    found = plistlib.loads(launchd.property_list(SPEC).encode())
    assert {name: type(value) for name, value in found.items()} == PLIST_KEYS
    assert found["ProgramArguments"] == list(SPEC.command)
    assert found["KeepAlive"] == {"SuccessfulExit": False}, "it is started again unless it ended well"
    for limits in (found["SoftResourceLimits"], found["HardResourceLimits"]):
        assert set(limits) <= LIMIT_KEYS
        assert all(isinstance(value, int) for value in limits.values())
    assert found["Umask"] == 0o077
    [path] = Launchd(Path("/Users/me/Library/LaunchAgents")).files(SPEC)
    assert path.name == f"{found['Label']}.plist"


# --- what they tell each other ------------------------------------------------------------------------------------


class Listening:
    """The manager's end of the notify socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def heard(self) -> dict[str, str]:
        return dict(line.partition("=")[::2] for line in self.socket.recv(4096).decode().splitlines())


def test_ready_and_stopping_arrive_on_a_real_datagram_socket(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    env = {"NOTIFY_SOCKET": address}
    with Listening(address) as listening:
        manager = ServiceChannel(env)
        assert env == {}, "a child must not speak in the daemon's name"
        manager.ready("listens on\nhttp://127.0.0.1:4747/v1")
        heard = listening.heard()
        assert heard["READY"] == "1"
        assert heard["STATUS"] == "listens on http://127.0.0.1:4747/v1", "a line end would be another assignment"
        assert heard["MAINPID"] == str(os.getpid())
        manager.reloading()
        heard = listening.heard()
        assert heard["RELOADING"] == "1"
        assert int(heard["MONOTONIC_USEC"]) > 0
        manager.stopping("3 answers are running")
        assert listening.heard()["STOPPING"] == "1"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_address_works_too() -> None:
    name = f"disco-test-{os.getpid()}"
    with Listening(f"\0{name}") as listening:
        assert ServiceChannel({"NOTIFY_SOCKET": f"@{name}"}).tell(STATUS="here")
        assert listening.heard() == {"STATUS": "here"}


async def test_the_watchdog_hears_from_a_loop_that_turns(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with Listening(address) as listening:
        manager = ServiceChannel(
            {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())}
        )
        assert manager.watchdog_s == 0.2
        watching = asyncio.create_task(manager.watch())
        for _ in range(3):
            assert await asyncio.to_thread(listening.heard) == {"WATCHDOG": "1"}
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching


async def test_nobody_is_told_where_nobody_asked() -> None:
    manager = ServiceChannel({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"})
    assert not manager.present
    assert manager.watchdog_s is None
    await asyncio.wait_for(manager.watch(), PATIENCE_S)  # returns at once
    assert not manager.tell(READY=1)
    assert ServiceChannel({"NOTIFY_SOCKET": "/nowhere/at/all"}).tell(READY=1) is False


def test_sockets_of_another_process_are_not_taken() -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c"}
    assert ServiceChannel(env).sockets() == []
    assert env == {}


CHILD = """
import os, sys
from disco_daemon.service.notify import ServiceChannel
os.environ["LISTEN_PID"] = str(os.getpid())
[taken] = ServiceChannel().sockets()
assert not os.get_inheritable(taken.fileno())
taken.setblocking(True)
there, _ = taken.accept()
there.sendall(b"served")
there.close()
"""


def test_a_socket_that_is_handed_over_is_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # The child's third descriptor is the listening socket, as systemd leaves it.
        script = "import os, sys; os.dup2(int(sys.argv[1]), 3); exec(sys.argv[2])"
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(listening.fileno()), CHILD], pass_fds=[listening.fileno()],
            env=os.environ | {"LISTEN_FDS": "1"},
        )  # fmt: skip
        with socket.create_connection(listening.getsockname(), timeout=PATIENCE_S) as there:
            assert there.recv(100) == b"served"
        assert child.wait(PATIENCE_S) == 0
