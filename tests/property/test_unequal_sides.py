"""Answers of unequal sides under any plan, fault, move, hedge and reload.

No token of a stand-in is shown while the better side is able, unless the request is pinned to the stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from disco_daemon.dispatch.migrate import Costs
from disco_daemon.dispatch.mover import CostMover, Forced
from disco_daemon.dispatch.planner import DOUBT_S, UNRELIABLE
from disco_daemon.errors import EndpointError
from disco_daemon.types import (
    Continuation,
    Delivery,
    Finish,
    Readiness,
    Relation,
    Side,
    Token,
    Unequal,
)
from tests.fixtures.jumping import in_jumps
from tests.unit.conductor.test_answer_run import STALL_S, Page, Scripted, Step, asked, context, played

DEVICE, SERVER = Side.DEVICE, Side.SERVER
TTFT_S = 0.2  # of either side, as it is known
CLOSE_S = 0.02  # timers
N_KNOWN = 60
N_FAILED = 200  # requests that a server was seen to fail: hardly ever it answers
COSTS = Costs(device_prefill=1e-9, device_decode=2e-8, server_prefill=1.5e-7, server_decode=6e-7)

waits = st.sampled_from([0.01, 0.1, 0.5 * STALL_S, 1.5 * STALL_S, 1.0, 3.0])


@st.composite
def scripts(draw: st.DrawFn, side: Side) -> Sequence[Step]:
    """What an endpoint does: it waits, speaks, stalls, and ends or breaks."""
    steps: list[Step] = [draw(waits)]
    for i in range(draw(st.integers(1, 8))):
        steps.append(Token(f"{side[0]}{i} "))
        if draw(st.booleans()):
            steps.append(draw(waits))
    if draw(st.integers(0, 3)) == 0:
        cut = draw(st.integers(0, len(steps)))
        return [
            *steps[:cut],
            EndpointError(side, draw(st.sampled_from(["unreachable", "stalled", "engine_gone"])), "!"),
        ]
    return [*steps, Finish("stop")]


@st.composite
def endpoints(draw: st.DrawFn, side: Side) -> Scripted:
    ready = Readiness(
        load_s=draw(st.sampled_from([0.0, 0.0, 2.0])) if side is DEVICE else 0.0,
        down_s=draw(st.sampled_from([0.0, 0.0, 0.0, 9.0])),
        hedgeable=draw(st.booleans()),
    )
    continuation = draw(st.sampled_from(Continuation))
    return Scripted(side, draw(scripts(side)), ready, continuation)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@in_jumps
async def test_no_token_of_a_stand_in_is_shown_while_the_better_side_is_able(data: st.DataObject) -> None:
    lower = data.draw(st.sampled_from(Side))
    better = lower.other
    sides = {side: data.draw(endpoints(side)) for side in Side}
    caps = data.draw(st.sampled_from([{}, {}, {"usd_per_day": 0.0}]))
    policy, budget = data.draw(st.sampled_from(["optimal", "paper", "stochastic"])), data.draw(st.floats(0, 1))
    on = context(sides[DEVICE], sides[SERVER], policy=policy, budget=budget, **caps)
    on.planner.constrained = data.draw(st.sampled_from(Side))
    for _ in range(data.draw(st.sampled_from([0, N_KNOWN]))):
        on.planner.knowledge.server.add(TTFT_S, censored=False)
        on.planner.knowledge.device.add(10, TTFT_S)
    for _ in range(data.draw(st.sampled_from([0, 0, N_FAILED]))):
        on.planner.knowledge.server.add_failure(None)
    on.planner.refit()
    on.shadow = data.draw(st.booleans())
    pace_tps = data.draw(st.sampled_from([0.1, 20.0]))  # a slow reader needs next to nothing held back for a move
    on.defaults = replace(on.defaults, delivery=data.draw(st.sampled_from(Delivery)), pace_tps=pace_tps)
    on.mover = Forced(CostMover(on.planner, lambda *_: COSTS), 1, 3)
    relation = Relation(lower, "It is one.", Unequal.STAND_IN)
    on.relation = lambda: relation
    page = Reloading(on, data.draw(st.sampled_from([None, Relation(), replace(relation, stand_in=better)])))
    wish: dict[str, Any] = data.draw(st.sampled_from([{}, {}, {}, {"prefers": better}]))
    length = sides[DEVICE].n_prompt
    seen_s = on.planner.knowledge.server.silence_s
    if on.planner.knowledge.server.availability() < UNRELIABLE:
        seen_s = min(seen_s, DOUBT_S)
    patience_s = seen_s if better is SERVER else on.planner.silence_s(better, length, sides[DEVICE].ready)

    _, outcome = await played(on, asked(**wish), page)

    shown, moves = outcome.tokens.get(lower, 0), [move for move in outcome.moves if move.dropped is None]
    assert all(move.reason != "cost" or move.target is better for move in outcome.moves)
    assert all(move.target is better for move in outcome.moves if move.reason == "grade")
    failed = any(a.side is better and a.error is not None for a in outcome.attempts)
    capped, down = better is SERVER and bool(caps), sides[better].ready.down_s > 0
    starts = [a.started_s for a in outcome.attempts if a.side is lower and not a.continued]
    left = any(move.target is lower and move.reason in {"stall", "failure", "context"} for move in moves)
    late = bool(starts) and min(starts) >= patience_s - CLOSE_S
    loading = lower is SERVER and sides[DEVICE].ready.load_s > 0
    if shown:
        event(f"shown: {failed=} {capped=} {down=} {left=} {late=} {loading=}")
        assert failed or capped or down or left or late or (loading and min(starts) >= 5.0), outcome
    else:
        event("not shown")


class Reloading(Page):
    """A reader in whose answer the settings change."""

    def __init__(self, on: Any, relation: Relation | None) -> None:
        self._on, self._relation = on, relation

    def prompt(self, n_tokens: int) -> None:
        super().prompt(n_tokens)
        if (relation := self._relation) is not None:
            self._on.relation = lambda: relation
