"""The engine's process, as far as it needs no model: what ends a warm-up, and what comes before peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

from disco_daemon.engine.llama.model import Llama
from disco_daemon.engine.serve.edge import SplitEdge
from disco_daemon.engine.serve.partner import SplitPartner
from disco_daemon.engine.worker import Worker
from disco_daemon.scheduler.latency import IterationLatency

LONG_S = 10.0
SHORT_S = 0.1  # in which a thread that nothing holds would be done


class SlowLlama:
    """A model whose warm-up takes until `go_on`."""

    prefill_tps = 0.0

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def warm_up(self) -> bool:
        self.begun.set()
        assert self.go_on.wait(LONG_S)
        return False


def test_what_ends_a_warm_up_does_so_before_the_request_that_came_is_computed() -> None:
    # else a request that comes just as the warm-up ends would have its own first decode stopped
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, llama = Worker(theirs), SlowLlama()
        latency = IterationLatency((0.01, 0.001, 0.001, 0.0))
        warming = threading.Thread(target=worker._warm_up, args=(cast("Llama", llama), latency))
        still_warming: list[bool] = []

        class Abort:
            """A flag that the thread that computes cannot overtake, however late it is set."""

            def set(self) -> None:
                llama.go_on.set()
                warming.join(SHORT_S)
                still_warming.append(warming.is_alive())

        worker._abort = cast("Any", Abort())
        warming.start()
        assert llama.begun.wait(LONG_S)
        worker._put(lambda: None)
        warming.join(LONG_S)
        assert still_warming == [True]
        worker._put(lambda: None)
        assert still_warming == [True], "nothing is warmed up any more: the decode of a request goes on"


def test_a_partner_knows_the_first_characters_of_its_tokens_before_a_peer_is_heard() -> None:
    # else the first grammar that a peer sends would hold the thread that computes for everybody
    order: list[str] = []

    class SlowVocabulary:
        @property
        def initials(self) -> None:
            order.append("initials")

    class NoPeers:
        def sockets(self) -> Iterator[socket.socket]:
            order.append("peers")
            yield from ()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for kind, wanted in ((SplitPartner, ["initials", "peers"]), (SplitEdge, ["peers"])):
            order.clear()
            given = cast("Any", (NoPeers(), None, object.__new__(kind), SlowVocabulary()))
            Worker(theirs)._read_peers(*given)
            assert order == wanted
