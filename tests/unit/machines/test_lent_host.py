"""A host that is lent takes its own files by their base names, within what its owner allows, and nothing else."""

from __future__ import annotations

import queue
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from disco_daemon.engine.hosts.lent import LentHost
from disco_daemon.engine.lent_messages import FileAnswer, HostTerms
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.engine.wire import AdapterFile, Load
from disco_daemon.link.relay.handshake import SegmentFact, is_segment_name
from disco_daemon.machines.owner import OwnerTerms, is_idle_by_ioreg, is_idle_by_loginctl
from disco_daemon.system.control_socket import BlockingControl

LOAD = Load(
    model_path="/home/other/segments/m-5-22.v1.gguf", n_ctx=64, n_threads=9, n_gpu_layers=4, layers=(5, 22, 30),
    draft_path="/etc/passwd", adapters=(AdapterFile(name="a", path="/etc/passwd"),),
)  # fmt: skip


class Lender:
    """The program that lends a host: its end of the socket."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.control = BlockingControl(self.ours)

    def host(self, folder: Path, n_threads: int = 1, memory_bytes: int = 0) -> LentHost:
        return LentHost(folder, HostTerms(n_threads, memory_bytes), BlockingControl(self.theirs))


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    with lender.ours, lender.theirs:
        yield lender


def test_a_segment_is_taken_by_its_base_name_with_the_owners_threads(lender: Lender, tmp_path: Path) -> None:
    (tmp_path / "m-5-22.v1.gguf").write_bytes(b"x")
    taken = lender.host(tmp_path, 2).take(LOAD)
    assert taken.model_path == str(tmp_path / "m-5-22.v1.gguf")
    assert (taken.n_threads, taken.n_threads_batch, taken.n_gpu_layers) == (2, 2, 0)
    assert (taken.draft_path, taken.adapters, taken.layers) == ("", (), (5, 22, 30))


@pytest.mark.parametrize(
    "path", ["", "..", "/", "/etc/passwd", "a/..", ".hidden.gguf", "a\n.gguf", "a" * 300 + ".gguf", "..\\x\\.gguf"]
)
def test_what_is_no_name_of_a_segment_is_refused(lender: Lender, tmp_path: Path, path: str) -> None:
    load = Load(model_path=path, n_ctx=64, n_threads=1, n_gpu_layers=0, layers=(5, 22, 30))
    with pytest.raises(ModelError, match="is no name"):
        lender.host(tmp_path).take(load)


def test_names_of_models_as_users_have_them_are_names() -> None:
    assert is_segment_name("My Model (1) é Q4_K_M-472dcf5ea7fc-3-26.v1.gguf")
    assert not is_segment_name("a/b.gguf")


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        (FileAnswer("the layers 5-22 are not those of attic"), "are not those of attic"),
        (None, "the program that fetches files has gone"),
        (FileAnswer(), "the file m-5-22.v1.gguf is not there"),
    ],
)
def test_a_missing_file_is_asked_for_and_the_reason_is_said(
    lender: Lender, tmp_path: Path, heard: FileAnswer | None, why: str
) -> None:
    host = lender.host(tmp_path)
    host.listen(lambda _: None)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(host.take, LOAD)
        asked = msgspec.msgpack.decode(lender.control.receive()[0], type=SegmentFact)
        assert asked == SegmentFact(first=5, last=22, name="m-5-22.v1.gguf")
        if heard is None:
            lender.ours.close()
        else:
            lender.control.send(heard)
        with pytest.raises(ModelError, match=why):
            taking.result(10)


def test_other_terms_are_gone_by_at_once_and_more_may_be_allowed_again(
    lender: Lender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, heard = list[tuple[int, int]](), queue.SimpleQueue[int]()
    monkeypatch.setattr("resource.getrlimit", lambda _: (1, resource.RLIM_INFINITY))
    monkeypatch.setattr("resource.setrlimit", lambda _, limit: limits.append(limit))
    (tmp_path / "m-5-22.v1.gguf").write_bytes(b"x")
    host = lender.host(tmp_path, 1, 10**9)
    host.limit_memory()
    host.listen(heard.put)
    lender.control.send(HostTerms(3, 5000))
    lender.control.send(HostTerms(2))
    assert [heard.get(timeout=10), heard.get(timeout=10)] == [3, 2]
    assert [soft for soft, _ in limits] == [10**9, 5000, resource.RLIM_INFINITY]
    assert {hard for _, hard in limits} == {resource.RLIM_INFINITY}
    assert (host.take(LOAD).n_threads, host.terms.memory_bytes) == (2, 0)


def test_more_than_the_owner_allows_is_refused_with_the_numbers(lender: Lender, tmp_path: Path) -> None:
    (tmp_path / "m-5-22.v1.gguf").write_bytes(b"x" * 100_000)
    with pytest.raises(ModelError, match=r"takes 0\.00 GB, and its owner allows 0\.00 GB"):
        lender.host(tmp_path, memory_bytes=50_000).take(LOAD)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (OwnerTerms(1), ""),
        (OwnerTerms(1, only_mains=True, on_mains=lambda: True), ""),
        (OwnerTerms(1, only_mains=True, on_mains=lambda: False), "battery"),
        (OwnerTerms(1, only_idle=True, nobody_at_work=lambda: True), ""),
        (OwnerTerms(1, only_idle=True, nobody_at_work=lambda: False), "somebody works"),
    ],
)
def test_nothing_is_lent_against_the_owners_terms(terms: OwnerTerms, why: str) -> None:
    assert why in terms.why_not()
    assert bool(terms.why_not()) == bool(why)


@pytest.mark.parametrize(("said", "idle"), [(b"yes\n", True), (b"no\n", False), (b"", False), (b"maybe", False)])
def test_loginctl_says_whether_all_sessions_are_idle(said: bytes, idle: bool) -> None:
    assert is_idle_by_loginctl(said) is idle


@pytest.mark.parametrize(
    ("said", "idle"),
    [(b'  "HIDIdleTime" = 301000000000', True), (b'"HIDIdleTime" = 5000000', False), (b"nothing", False)],
)
def test_a_mac_says_for_how_long_nobody_has_typed(said: bytes, idle: bool) -> None:
    assert is_idle_by_ioreg(said) is idle
