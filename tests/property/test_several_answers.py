"""One answer of two or three servers by the real conductor, whatever they and its reader do, and what is in the way.

Servers fail, are silent and break off, a second one is asked as well, a device takes part, the reader leaves, all
becomes private, caps and the limit of the request are there. It always ends, in time and in few steps; no stream stays
open, each token that a server has made is booked, there is one winner, and no cap or limit is passed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.money.caps import PROMPT_MARGIN, CapLimits
from disco_daemon.money.catalog import Price
from disco_daemon.types import Continuation, Delivery, Sampling, Side
from tests.fixtures.jumping import JumpingLoop
from tests.fixtures.several import N_PROMPT, WHOLE, WORDS, Call, Source, Stage, asked

PRICES = (Price(1.0, 0.5, 2.0), Price(3.0, 1.5, 6.0), Price(300.0, 150.0, 600.0), Price(0.0, 0.0, 0.0, known=False))
FIRST_S = (0.0, 0.01, 0.3, 2.0, 30.0)
ERRORS = ("unreachable", "server_error", "timeout", "cut", "refused", "dropped")
ACTS = ("cancel", "private", "public")
EXACT = (Continuation.EXACT, Continuation.EXACT, Continuation.NONE)

calls = st.builds(
    Call, st.sampled_from(FIRST_S), st.sampled_from((0, 0, 1, 3, 7)), st.none() | st.sampled_from(ERRORS),
    st.sampled_from((0.0, 0.01, 0.4)),
)  # fmt: skip
sources = st.builds(
    lambda script, way: Source(Side.SERVER, "m", script, continuation=way),
    st.lists(calls, min_size=1, max_size=3), st.sampled_from(EXACT),
)  # fmt: skip
devices = st.builds(lambda script: Source(Side.DEVICE, "d", script), st.lists(calls, min_size=1, max_size=3))
several = st.lists(sources, min_size=2, max_size=3)
alike = st.builds(lambda price, made: [(one, price) for one in made], st.sampled_from(PRICES), several)
stages: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    servers=alike | st.lists(st.tuples(sources, st.sampled_from(PRICES)), min_size=2, max_size=3),
    device=st.none() | devices,
    policy=st.sampled_from(("race", "all-server", "all-device")),
    limits=st.builds(CapLimits, usd_per_day=st.sampled_from((None, None, None, 0.0, 1e-4, 0.01))),
    hedge_after_s=st.sampled_from((None, 0.0, 0.05, 0.5)),
    hedge_share=st.sampled_from((0.0, 1.0)),
    delivery=st.sampled_from((Delivery.OFF, Delivery.RESERVE)),
)
times = st.sampled_from((0.0, 0.02, 0.06, 0.31, 0.6, 2.1))
# Of the most that one request costs at the first server: none, no limit, one and no two, and two.
factors = st.sampled_from((None, None, 0.0, 1.3, 1.3, 2.5))
MOST_USD = 1.55e-4  # that one request costs where a million tokens of prompt cost $ 1, and of the answer $ 2


@given(stages, st.lists(st.tuples(times, st.sampled_from(ACTS)), max_size=3), factors, st.sampled_from((3, len(WORDS))))
def test_whatever_happens_an_answer_ends_and_all_of_it_is_closed_booked_and_within_its_limits(
    made: dict[str, Any], acts: list[tuple[float, str]], factor: float | None, max_tokens: int
) -> None:
    max_usd = None if factor is None else factor * MOST_USD * made["servers"][0][1].input
    with asyncio.Runner(loop_factory=lambda: JumpingLoop(0.0)) as runner:
        runner.run(_plays(made, acts, max_usd, max_tokens))


async def _plays(made: dict[str, Any], acts: list[tuple[float, str]], max_usd: float | None, max_tokens: int) -> None:
    stage = Stage(**made)  # it fails where the answer goes round and round, or does not end
    outcome = await stage.answer(asked(sampling=Sampling(max_tokens), max_cost_usd=max_usd), acts)
    metered = {name: one.metered for name, one in stage.sources.items()}
    requests = [meter for meters in metered.values() for meter in meters]
    device = [] if stage.device is None else stage.device.metered
    assert not any(meter.is_open for meter in (*requests, *device))
    assert all(not cap["reserved"] for cap in stage.caps.state(0.0).values())
    assert set(stage.told) <= {name for name, meters in metered.items() if meters}, "who was not asked has not failed"
    assert not any(
        len(stage.private_since) and meter.at > stage.private_since[0] for meter in requests if stage.context.private
    )
    if outcome is None:
        assert requests == []
        return
    for name, meters in metered.items():
        booked = [one for one in outcome.attempts if one.server == name]
        assert len(booked) >= len(meters)
        assert sum(one.usage.completion_tokens for one in booked) == sum(m.usage.completion_tokens for m in meters)
        seconds = [one.hedge for one in booked if one.hedge is not None]
        assert len(seconds) <= 1, "one request of an answer is sent twice"
        n_firsts = len(meters) - seconds.count("lost")  # a race's loser may go on with the answer later, as anybody
        assert n_firsts <= 2, "each is asked once, and again where a connection broke or an answer rests"
    assert outcome.cost_usd == sum(one.bill_usd + one.energy_j / 3.6e6 * 0.3 for one in outcome.attempts)
    assert WHOLE.startswith(stage.page.text)
    assert len(stage.page.routes) == (outcome.winner is not None) == bool(stage.page.text)
    if outcome.finish_reason == "stop":
        assert stage.page.text == WHOLE
    if max_usd is not None:
        assert outcome.server_usd <= max_usd
    if (most := stage.limits.usd_per_day) is not None:
        one_usd = max(
            (N_PROMPT + max_tokens) * PROMPT_MARGIN * p.input + max_tokens * p.output for _, p in stage.servers
        )
        assert outcome.server_usd <= most + one_usd / 1e6, "a cap is passed by one request at most"
        assert most or not requests or not any(one.bill_usd for one in outcome.attempts)
