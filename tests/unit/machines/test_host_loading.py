"""A host loads a segment beside its batches, and what is known of its cells by then is not tried out again."""

from __future__ import annotations

import socket
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.hosts import process
from disco_daemon.engine.hosts.messages import HostSocket, LoadSegment, ReleaseSegment
from disco_daemon.engine.hosts.pool import HostPool
from disco_daemon.engine.llama.refusals import ModelError
from disco_daemon.types import LayerRange

LOAD = wire.Load(model_path="m.gguf", n_ctx=64, n_threads=1, n_gpu_layers=0, layers=(5, 15, 30))


class Link:
    """A host's process: what it was told to load, and what it knew of cells then."""

    def __init__(self, build: str, *, is_lent: bool = False) -> None:
        self.build, self.is_lent, self.known = build, is_lent, list[bool | None]()

    def load(self, _: int, __: wire.Load, moves_states: bool | None = None) -> None:
        self.known.append(moves_states)


@pytest.mark.parametrize("says", [True, False])
def test_what_one_process_says_of_a_build_is_told_to_those_after_it(says: bool) -> None:
    def no_process() -> socket.socket:
        raise OSError

    pool = HostPool(no_process, (), 4, LOAD, {})
    links = [Link("b"), Link("b"), Link("another")]
    for number, link in enumerate(links):
        segment = pool._segment(number, LayerRange(5, 15, 30), LOAD)
        host: Any = segment.host
        host.link = link
        host.load(segment)
        if number == 0:
            host.loaded(says)
    assert [link.known for link in links] == [[None], [says], [None]]
    assert pool.hosts[0].moves_states is says


@pytest.mark.parametrize("says", [True, False])
def test_what_another_machines_process_says_of_a_build_holds_for_that_machine_only(says: bool) -> None:
    def no_process() -> socket.socket:
        raise OSError

    pool = HostPool(no_process, (), 4, LOAD, {})
    links = [Link("b", is_lent=True), Link("b", is_lent=True), Link("b")]
    for number, link in enumerate(links):
        host: Any = pool._segment(number, LayerRange(5, 15, 30), LOAD).host
        host.link = link
        host.load(pool._segment(number, LayerRange(5, 15, 30), LOAD))
        if number == 0:
            host.loaded(says)
    assert [link.known for link in links] == [[None], [None], [None]]
    assert [pool.hosts[number].moves_states for number in range(3)] == [says, True, True]


@pytest.mark.parametrize("known", [None, True, False])
def test_a_process_that_is_told_does_not_try_it_out(monkeypatch: pytest.MonkeyPatch, known: bool | None) -> None:
    tried = list[object]()

    def moves_states(segment: object) -> bool:
        tried.append(segment)
        return True

    monkeypatch.setattr(process, "SegmentModel", lambda *_: SimpleNamespace())
    monkeypatch.setattr(process, "moves_states", moves_states)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = process.Host(HostSocket(theirs))
        for number in (1, 2):
            host._load(LoadSegment(segment=number, load=LOAD, moves_states=known))
        assert len(tried) == (known is None)
        assert host._moves_states is (known is not False)


class Home:
    """What a host sends, each with the number of orders that its main thread has not looked at then."""

    def __init__(self) -> None:
        self.heard, self.waiting = SimpleQueue[tuple[str, int]](), SimpleQueue[object]()

    def send(self, message: object, _: bytes = b"") -> None:
        self.heard.put((type(message).__name__, self.waiting.qsize()))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_host_that_computes_loads_meanwhile_and_a_segment_is_there_before_home_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    def model(*_: object) -> SimpleNamespace:
        if not is_loaded:
            raise ModelError("no room")
        return SimpleNamespace()

    monkeypatch.setattr(process, "SegmentModel", model)
    home: Any = Home()
    host = process.Host(home)
    home.waiting = host.orders
    host.load(LoadSegment(segment=1, load=LOAD, moves_states=True))  # and its main thread does nothing
    heard, n_waiting = home.heard.get(timeout=30)
    assert heard == ("SegmentLoaded" if is_loaded else "SegmentRefused")
    if is_loaded:
        assert n_waiting == 1
    host.carry_out([host.orders.get(timeout=30)])
    assert list(host._segments) == [1] * is_loaded


def test_a_segment_that_was_released_while_it_was_loaded_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()
    monkeypatch.setattr(process, "SegmentModel", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    home: Any = Home()
    host = process.Host(home)
    host.carry_out([((ReleaseSegment(segment=1), b""), 0.0)])
    host.load(LoadSegment(segment=1, load=LOAD, moves_states=True))
    host.carry_out([host.orders.get(timeout=30)])
    assert (closed, host._segments) == ([True], {})
