"""The server of one answer, of several: who is asked next, and what a planner with one server learns of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.conductor.answer_server import MAX_AT_FAULT, AnswerServer, OtherServer, ServerMember, as_one_server
from disco_daemon.endpoints.hedge import Hedge
from disco_daemon.errors import EndpointError
from disco_daemon.types import EQUAL, Attempt, Continuation, Side, Usage


class Place:
    """As much of an endpoint as a choice looks at."""

    known_since = 0.0

    def __init__(self, name: str, continuation: Continuation = Continuation.EXACT) -> None:
        self.model, self.continuation = name, continuation


def member(name: str, continuation: Continuation = Continuation.EXACT) -> ServerMember:
    return ServerMember(name, f"{name}/m", cast(Any, Place(name, continuation)), cast(Any, None), lambda: EQUAL)


def anyone(member: ServerMember) -> bool:
    """Whether a start there fits: no cap and no limit is in the way."""
    del member
    return True


def first_of(left: Sequence[ServerMember]) -> ServerMember | None:
    return left[0] if left else None


DOWN = EndpointError(Side.SERVER, "server_error", "it is down")
AT_FAULT = EndpointError(Side.SERVER, "refused", "no such field", your_fault=True)


@given(st.integers(1, 6), st.booleans(), st.lists(st.sampled_from(list(Continuation)), min_size=6, max_size=6))
def test_each_is_asked_once_at_most_and_none_that_cannot_go_on(n: int, begun: bool, ways: list[Continuation]) -> None:
    members = [member(f"s{i}", ways[i]) for i in range(n)]
    failed: list[ServerMember] = []
    server, asked = AnswerServer(members[0], members, first_of, failed.append), [members[0]]
    while server.leave(DOWN, anyone, begun=begun):
        assert server.is_fresh
        assert server.model == server.now.endpoint.model
        asked.append(server.now)
    assert not server.is_fresh
    able = [one for one in members[1:] if not begun or one.endpoint.continuation is not Continuation.NONE]
    assert sorted(one.key for one in asked[1:]) == sorted(one.key for one in able)
    assert failed == asked
    if begun:  # what nobody has tried comes after what is known to go on
        untried = [one.endpoint.continuation is Continuation.UNTRIED for one in asked[1:]]
        assert untried == sorted(untried)


def test_who_was_asked_as_well_and_lost_may_still_go_on_with_the_answer() -> None:
    first, second = member("a"), member("b")
    server = AnswerServer(first, [first, second], first_of, hedge=OtherServer(second, 0.1, lambda: True))
    hedge = Hedge(0.1, lambda: True, sent_at=0.2)
    server.ask_twice(hedge)
    assert server.leave(DOWN, anyone, begun=True)
    assert server.now is second
    assert not server.leave(DOWN, anyone, begun=True)


def test_a_request_that_several_say_is_at_fault_is_not_sent_to_all() -> None:
    members = [member(f"s{i}") for i in range(5)]
    failed: list[ServerMember] = []
    server = AnswerServer(members[0], members, first_of, failed.append)
    n = 1
    while server.leave(AT_FAULT, anyone):
        n += 1
    assert n == MAX_AT_FAULT
    assert not failed  # that says nothing of the servers


LACKING = (
    EndpointError(Side.SERVER, "refused", "no tools here", your_fault=True, param="tools", code="unsupported"),
    EndpointError(Side.SERVER, "refused", "too long", your_fault=True, code="context_length_exceeded"),
)


@given(st.lists(st.sampled_from([AT_FAULT, *LACKING]), min_size=5, max_size=5))
def test_what_one_server_lacks_is_no_fault_of_the_request(errors: list[EndpointError]) -> None:
    """A third one, which may be the cheapest, can have it; what nobody understands would be said by that one, too."""
    members = [member(f"s{i}") for i in range(6)]
    server, met = AnswerServer(members[0], members, first_of), list[EndpointError]()
    for error in errors:
        met.append(error)
        if not server.leave(error, anyone):
            break
    assert (met.count(AT_FAULT) == MAX_AT_FAULT) is not server.is_fresh
    assert server.is_fresh or met[-1] is AT_FAULT
    assert len(met) == 5 or not server.is_fresh


def attempt(server: str | None, at: float, ttft: float, error: str | None = None, **more: Any) -> Attempt:
    plain = Attempt(Side.SERVER, "m", at, ttft, error is not None, Usage(), error=error, server=server)
    return replace(plain, **more)


def test_one_that_was_replaced_is_a_part_of_the_time_of_who_came_in_its_place() -> None:
    device = Attempt(Side.DEVICE, "d", 0.0, 1.0, False, Usage())
    found = as_one_server([attempt("a", 0.0, 0.4, "server_error"), device, attempt("b", 0.5, 0.3)])
    assert [(one.server, one.started_s, one.ttft_s, one.error) for one in found] == [
        (None, 0.0, 1.0, None), ("b", 0.0, 0.8, None),
    ]  # fmt: skip


def test_where_nobody_answered_the_last_failure_counts() -> None:
    found = as_one_server([attempt("a", 0.0, 0.4, "server_error"), attempt("b", 0.5, 0.3, "timeout")])
    assert [(one.server, one.started_s, one.ttft_s, one.error) for one in found] == [("b", 0.0, 0.8, "timeout")]


def test_of_one_server_and_of_moves_nothing_is_changed() -> None:
    alone = [attempt(None, 0.0, 0.4, "dropped"), attempt(None, 0.5, 0.3)]
    moved = [attempt("a", 0.0, 0.4), attempt("b", 0.5, 0.3, "cut", continued=True)]
    assert as_one_server(alone) == tuple(alone)
    assert as_one_server(moved) == tuple(moved)
