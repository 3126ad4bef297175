"""An answer whose source rests: whatever then comes, fails or is late, it is whole, and nothing of it is said twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_daemon.answer import Start, State
from disco_daemon.types import Continuation, Delivery, Side
from tests.fixtures.answer import ASK_AGAIN, REST
from tests.property.test_answer_machine import Played, whole_answer

DEVICE, SERVER = Side.DEVICE, Side.SERVER
ALONE = {DEVICE: (0.0, math.inf), SERVER: (math.inf, 0.0)}  # start delays
STEPS = ("the source speaks", "the target speaks", "it follows", "the target breaks", "the stock is low", "time passes")


@dataclass(frozen=True)
class Manner:
    """How the sides speak: whether the device follows, the server knows ids and its limit; where the client ends it."""

    follows: bool = True
    server_ids: bool = True
    heeds: bool = True
    max_tokens: int | None = None
    stop_at: int | None = None


class Resting(Played):
    """The world of `Played`, for an answer that moves, and whose source rests."""

    def __init__(self, source: Side, pieces: tuple[str, ...], manner: Manner) -> None:
        super().__init__()
        self.asked: list[str] = []  # what each start of the source, once it was one, was to go on from
        self.begin(
            pieces=pieces, delays=ALONE[source], delivery=Delivery.PACED, reserve=0, follows=manner.follows,
            server=Continuation.EXACT, manner="exact", server_ids=manner.server_ids, max_tokens=manner.max_tokens,
            stop_at=manner.stop_at, n_first=1, heeds=manner.heeds, room=None, n_begun=0,
        )  # fmt: skip

    def start(self, effect: Start) -> None:
        super().start(effect)
        if effect.side is self.watch.answer.source:
            self.asked.append(effect.answer_so_far)

    @property
    def moves(self) -> bool:
        return self.watch.answer.state is State.HANDOFF

    def step(self, name: str, source: Side) -> None:
        match name:
            case "the source speaks":
                self.a_side_speaks(source, 1, 1, 0.05)
            case "the target speaks":
                self.a_side_speaks(source.other, 1, 1, 0.05)
            case "it follows" if self.watch.held:
                self.a_follower_has_caught_up()
            case "the target breaks":
                self.a_side_breaks(source.other, engine=False, early=0)
            case "the stock is low":
                self.on(ASK_AGAIN)
            case "time passes":
                self.time_passes(1.0)
            case _:
                pass


@given(
    source=st.sampled_from(Side),
    pieces=st.builds(whole_answer, st.integers(0, 1 << 16), st.just(40)),
    before=st.integers(1, 12),
    between=st.integers(0, 4),
    steps=st.lists(st.sampled_from(STEPS), max_size=12),
    manner=st.builds(
        Manner,
        follows=st.booleans(),
        server_ids=st.booleans(),
        heeds=st.booleans(),
        max_tokens=st.sampled_from([None, None, 20, 32]),
        stop_at=st.sampled_from([None, None, 30, 60, 90]),
    ),
)
@example(SERVER, whole_answer(1, 40), 5, 2, ["the target breaks"], Manner())
@example(DEVICE, whole_answer(1, 40), 5, 2, ["the stock is low", "the target speaks"], Manner(stop_at=30))
@settings(max_examples=150)
@example(
    source=Side.DEVICE,
    pieces=whole_answer(185, 40),
    before=1,
    between=0,
    steps=[],
    manner=Manner(follows=False, server_ids=False, heeds=False, max_tokens=20, stop_at=60),
)
def test_nothing_is_lost_or_doubled_and_a_source_is_asked_from_the_very_end(
    source: Side, pieces: tuple[str, ...], before: int, between: int, steps: list[str], manner: Manner
) -> None:
    world = Resting(source, pieces, manner)
    world.the_answer_is_to_move(before, 0.05, "cost")
    world.a_side_speaks(source, 1, between, 0.05)
    if world.moves:
        at = world.watch.answer.text
        world.on(REST)
        rested = world.watch.rests is source
        assert world.watch.answer.text == at, "what is there stays"
        for name in steps:
            if world.moves:
                world.step(name, source)
            world.the_answer_is_one_that_the_endpoints_could_have_given()
        assert all(asked.startswith(at) for asked in world.asked), "not from an earlier place"
        assert all(move.source is not move.target for move in world.watch.answer.moves), "to be asked again is no move"
        if not rested:
            assert world.asked == []
    world.teardown()
