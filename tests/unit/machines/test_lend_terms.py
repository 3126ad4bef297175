"""What an owner allows is changed while hosts are lent: by files, and in a process as soon as it takes no more."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from disco_daemon.engine.lent_messages import HostTerms
from disco_daemon.errors import ConfigError
from disco_daemon.machines.fleet import lend_terms
from disco_daemon.machines.fleet.lend_terms import TermsFolder
from disco_daemon.machines.fleet.lent_process import LentProcess, taken_by
from disco_daemon.machines.owner import OwnerTerms
from disco_daemon.system.control_socket import ControlSocket
from disco_daemon.system.supervised import ChildProcess

MUCH, LITTLE = OwnerTerms(4, 8 << 30, only_mains=True), OwnerTerms(2, 1 << 30)


@pytest.fixture
def lending(tmp_path: Path) -> Iterator[TermsFolder]:
    """A folder from which a program lends, which takes no wish by itself."""
    folder = TermsFolder(tmp_path / "home")
    folder.keep(MUCH)
    file = asyncio.run(folder.alone())
    yield folder
    file.close()


def test_terms_are_kept_as_they_were_given(tmp_path: Path) -> None:
    folder = TermsFolder(tmp_path / "home")
    assert folder.in_force() is None
    folder.keep(MUCH)
    assert folder.in_force() == MUCH
    (tmp_path / "home" / "terms.json").write_text('{"n_threads": 0}')
    assert folder.in_force() is None, "what is damaged says nothing"


def test_who_lends_takes_a_wish_once(lending: TermsFolder) -> None:
    took, deadline = list[OwnerTerms | None](), time.monotonic() + 60

    def take() -> None:
        while not took and time.monotonic() < deadline:
            if (wish := lending.take_wish()) is not None:
                lending.keep(wish)
                took.append(wish)

    taking = threading.Thread(target=take)
    taking.start()
    assert lending.is_lending()
    assert lending.agree(LITTLE)
    taking.join()
    assert (took, lending.in_force(), lending.take_wish()) == ([LITTLE], LITTLE, None)


def test_a_wish_that_nobody_takes_is_none(lending: TermsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend_terms, "TAKEN_S", 0.2)
    with pytest.raises(ConfigError, match="has not taken the new terms"):
        lending.agree(LITTLE)
    assert (lending.take_wish(), lending.in_force()) == (None, MUCH)


def test_where_nothing_lends_nobody_agrees(tmp_path: Path) -> None:
    folder = TermsFolder(tmp_path)
    folder.keep(MUCH)
    assert not folder.is_lending()
    assert not folder.agree(LITTLE)
    assert folder.take_wish() is None, "the next one begins with what it is given"
    assert not TermsFolder(tmp_path / "none").is_lending()


def test_two_programs_do_not_lend_from_one_folder(lending: TermsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend_terms, "OTHER_S", 0.2)
    with pytest.raises(ConfigError, match="lends hosts already"):
        asyncio.run(lending.alone())


async def test_a_process_has_less_memory_only_when_it_takes_no_more_and_all_else_at_once() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=PIPE)
    ours, theirs = socket.socketpair()
    host = ControlSocket(theirs)
    try:
        lent = LentProcess(ChildProcess(process, [ours]), asyncio.Event(), HostTerms(4, 8 << 30))

        async def heard() -> HostTerms:
            async with asyncio.timeout(30):
                return msgspec.msgpack.decode((await host.receive())[0], type=HostTerms)

        assert not await lent.go_by(OwnerTerms(1, 1000)), "it has more than 1000 bytes"
        assert await heard() == HostTerms(1, 8 << 30)
        assert await lent.go_by(OwnerTerms(1, 4 << 30))
        assert await heard() == HostTerms(1, 4 << 30)
        assert await lent.go_by(OwnerTerms(1))
        assert await heard() == HostTerms(1)
        assert not await lent.go_by(OwnerTerms(1, 1000)), "no limit is more than any"
        assert 1000 < (taken_by(process.pid) or 0) < 4 << 30
    finally:
        process.kill()
        await process.wait()
        host.close()
        ours.close()
    assert taken_by(process.pid) is None
