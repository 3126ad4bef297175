"""Where the daemon's Unix socket is, how it is made, and how a client finds it."""

from __future__ import annotations

import fcntl
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import platformdirs
import pytest

from disco_daemon.system import socketfile
from disco_daemon.system.socketfile import SocketFileError, SocketTakenError, found, listening

PORT = 4747


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, of this user alone."""
    with tempfile.TemporaryDirectory(prefix="disco-") as folder:
        yield Path(folder)


def runtime(folder: Path) -> Mapping[str, str]:
    return {"XDG_RUNTIME_DIR": str(folder)}


def test_it_is_named_by_the_port_and_nobody_else_may_use_it(short: Path) -> None:
    env = runtime(short)
    assert found(PORT, env) is None
    with listening(PORT, env) as made:
        path = short / "disco" / f"{PORT}.sock"
        assert made.getsockname() == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert found(PORT, env) == path
        assert found(PORT + 1, env) is None
    assert not path.exists(), "it is removed at the end"
    assert found(PORT, env) is None


def test_a_dead_one_is_replaced_and_a_living_one_is_not(short: Path) -> None:
    env = runtime(short)
    (short / "disco").mkdir(mode=0o700)
    path = short / "disco" / f"{PORT}.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed daemon leaves it
    assert found(PORT, env) is None
    with listening(PORT, env):
        assert found(PORT, env) == path
        with pytest.raises(SocketTakenError, match="another daemon of yours"), listening(PORT, env):
            pass
        assert found(PORT, env) == path, "who was refused has removed nothing"


def test_the_socket_of_a_daemon_that_came_after_us_stays(short: Path) -> None:
    with listening(PORT, runtime(short)) as first, socket.socket(socket.AF_UNIX) as later:
        path = Path(first.getsockname())
        first.close()  # as if its process hung at its end
        path.unlink()
        later.bind(str(path))
    assert path.exists()


def test_a_folder_that_others_may_enter_is_not_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = short / "state"
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: state / name)
    for mode in (0o755, 0o770, 0o1777):
        open_folder = short / f"r{mode:o}"
        open_folder.mkdir()
        open_folder.chmod(mode)
        with listening(PORT, runtime(open_folder)) as made:
            assert Path(made.getsockname()) == state / "disco" / f"{PORT}.sock"
            assert stat.S_IMODE((state / "disco").stat().st_mode) == 0o700
            assert found(PORT, runtime(open_folder)) == Path(made.getsockname())
        assert not (open_folder / "disco").exists()


def test_a_client_trusts_no_socket_that_others_could_have_made(short: Path) -> None:
    env = runtime(short)
    with listening(PORT, env) as made:
        path = Path(made.getsockname())
        path.chmod(0o666)
        assert found(PORT, env) is None
        path.chmod(0o600)
        path.parent.chmod(0o777)
        assert found(PORT, env) is None
        path.parent.chmod(0o700)
        assert found(PORT, env) == path


def test_a_path_that_is_too_long_gives_way_to_the_state_folder_or_says_what_to_do(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = short / ("x" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: short / "s" / name)
    with listening(PORT, runtime(long)) as made:
        assert Path(made.getsockname()).parent == short / "s" / "disco"
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: long / name)
    with (
        pytest.raises(SocketFileError, match=r"longer than the 103 bytes.*XDG_RUNTIME_DIR"),
        listening(PORT, runtime(long)),
    ):
        pass


def test_who_holds_the_lock_for_too_long_is_not_waited_for(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socketfile, "LOCK_TIMEOUT_S", 0.05)
    folder = short / "disco"
    folder.mkdir(mode=0o700)
    with (folder / socketfile.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SocketFileError, match="cannot be made"), listening(PORT, runtime(short)):
            pass
