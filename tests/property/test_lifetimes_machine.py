"""Reloads, answers, embeddings and the stop in any order: who holds an endpoint has it open, and nobody else does.

The machine carries the effects out as the daemon does, but closing takes as long as hypothesis likes.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disco_daemon.conductor.lifetimes import Close, Lifetimes, Open, Phase

Effects = list[Open[str] | Close[str]] | list[Open[str]] | list[Close[str]]


def is_device(endpoint: str) -> bool:
    return endpoint.startswith("device")


class Daemon(RuleBasedStateMachine):
    """Contexts by number, each with a device, a server or both."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: Lifetimes[int, str] = Lifetimes(alone=is_device)
        self.new = count(1)
        self.casts: dict[int, list[str]] = {}
        self.held: Counter[int] = Counter()  # by answers, embeddings and the daemon
        self.current = 0
        self.ended = False
        self.open: set[str] = set()
        self.closing: list[str] = []
        self.n_opened: Counter[str] = Counter()
        self.n_closed: Counter[str] = Counter()
        self._play(["device-0", "server-0"])

    def _play(self, cast: list[str]) -> None:
        context = next(self.new)
        self.casts[context] = cast
        self.held[context] += 1
        self._carry_out(self.lives.use(context, cast))
        before, self.current = self.current, context
        if before:
            self._leave(before)

    def _leave(self, context: int) -> None:
        self.held[context] -= 1
        self.held += Counter()  # without those that nobody holds
        self._carry_out(self.lives.leave(context))

    def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Open(endpoint=endpoint):
                    self.n_opened[endpoint] += 1
                    self.open.add(endpoint)
                case Close(endpoint=endpoint):
                    self.open.remove(endpoint)
                    self.closing.append(endpoint)

    @property
    def wanted(self) -> set[str]:
        return {endpoint for context in self.held for endpoint in self.casts[context]}

    # --- what happens ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.ended)
    @rule(device=st.sampled_from(["kept", "another", "none"]), server=st.booleans())
    def reload(self, device: str, server: bool) -> None:
        """The server is always made anew; the device only if its settings have changed."""
        now = [e for e in self.casts[self.current] if is_device(e)]
        number = next(self.new)
        cast = {"kept": now, "another": [f"device-{number}"], "none": []}[device]
        self._play([*cast, f"server-{number}"] if server or not cast else cast)

    @precondition(lambda self: not self.ended)
    @rule()
    def begin(self) -> None:
        """An answer, or the embeddings of some texts."""
        self.lives.hold(self.current)
        self.held[self.current] += 1

    @precondition(lambda self: self.held.total() > (not self.ended))
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        """Also after the stop: what was cancelled lets go then."""
        others = self.held - Counter() if self.ended else self.held - Counter([self.current])
        self._leave(data.draw(st.sampled_from(sorted(others))))

    @precondition(lambda self: self.closing)
    @rule(data=st.data())
    def is_closed(self, data: st.DataObject) -> None:
        endpoint = data.draw(st.sampled_from(self.closing))
        self.closing.remove(endpoint)
        self.n_closed[endpoint] += 1
        self._carry_out(self.lives.closed(endpoint))

    @precondition(lambda self: not self.ended)
    @rule()
    def stop(self) -> None:
        self.ended = True
        self._carry_out(self.lives.end())

    @rule()
    def what_is_not_held_cannot_be_had(self) -> None:
        for context in set(self.casts) - set(self.held):
            for wrong in (self.lives.hold, self.lives.leave):
                with pytest.raises(KeyError):
                    wrong(context)
        for endpoint in {e for cast in self.casts.values() for e in cast} - set(self.closing):
            with pytest.raises(ValueError, match="was not to be closed"):
                self.lives.closed(endpoint)

    # --- what holds -----------------------------------------------------------------------------------------------

    @invariant()
    def no_endpoint_in_use_is_closed(self) -> None:
        if not self.ended:
            assert not self.wanted & ({*self.closing} | set(self.n_closed))

    @invariant()
    def none_that_is_not_in_use_stays_open(self) -> None:
        assert self.open <= (set() if self.ended else self.wanted)

    @invariant()
    def at_most_one_model_is_in_memory(self) -> None:
        assert sum(map(is_device, (*self.open, *self.closing))) <= 1

    @invariant()
    def who_waits_waits_for_a_model_to_go(self) -> None:
        waiting = {e for e in self.wanted if self.lives.phase(e) is Phase.WAITING}
        assert all(map(is_device, waiting))
        assert not waiting or any(map(is_device, (*self.open, *self.closing)))
        if not self.ended:
            assert self.wanted == waiting | (self.wanted & self.open)

    @invariant()
    def each_is_opened_once_and_closed_once_at_most(self) -> None:
        assert set(self.n_opened.values()) <= {1}
        assert set(self.n_closed.values()) <= {1}
        assert set(self.n_closed) <= set(self.n_opened)

    def teardown(self) -> None:
        """In the end all that was opened is closed, and nothing was opened for that."""
        if not self.ended:
            self.stop()
        while self.closing:
            endpoint = self.closing.pop()
            self.n_closed[endpoint] += 1
            self._carry_out(self.lives.closed(endpoint))
        assert self.n_opened == self.n_closed
        assert not self.open


TestLifetimes = Daemon.TestCase
TestLifetimes.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_of_two_changes_in_a_row_only_the_last_model_is_loaded() -> None:
    """What a user does who chooses a model twice while an answer runs."""
    lives: Lifetimes[str, str] = Lifetimes(is_device)
    assert lives.use("first", ["device-1"]) == [Open("device-1")]
    lives.hold("first")  # an answer
    assert lives.use("second", ["device-2"]) == []
    assert lives.leave("first") == []
    assert lives.use("third", ["device-3"]) == []
    assert lives.leave("second") == [], "never opened, so never closed"
    assert lives.phase("device-2") is None
    assert lives.leave("first") == [Close("device-1")]
    assert lives.closed("device-1") == [Open("device-3")]
    assert lives.end() == [Close("device-3")]
