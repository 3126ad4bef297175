"""`benchmarks.qoe`: its requests, its open loop and its figures, on scripted servers; engines are for e2e tests."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from benchmarks.qoe import __main__
from benchmarks.qoe.figures import (
    ANDES,
    FCFS,
    PACE_TPS,
    PAPER,
    PEER,
    Curve,
    Served,
    against,
    measure,
    rate_between,
    summary,
    table,
    token_times,
)
from benchmarks.qoe.requests import Request, Setup, question, workload
from disco_daemon.bench import streamed
from disco_daemon.bench.child import BenchError
from disco_daemon.bench.loopback import LoopbackServer
from disco_daemon.bench.script import Exchange
from disco_daemon.bench.streamed import Door, StreamedAnswer
from tests.fixtures.upstream import PATIENCE_S, Upstream

STEP_S = 1 / PACE_TPS


def served(ttft_s: float, n: int, due: float = 100.0, *, failed: str | None = None, finish: str = "length") -> Served:
    """An answer of `n` tokens at the reader's very pace."""
    times = [due + ttft_s + i * STEP_S for i in range(n)]
    usage = {"completion_tokens": n, "prompt_tokens": 50}
    return Served(due, StreamedAnswer(due, times, "", finish, usage, times[-1] if times else due), failed)


def curve(scheduler: str, qoes: list[float], tps: float = 100.0, **more: Any) -> list[Curve]:
    """Points at loads 1, 2, …; the rate is twice the load."""
    kept = {"arrivals": "poisson", "throughput_tps": tps, "arriving_tps": tps, "failed": 0, "qoe_p10": 0.0}
    kept |= {"tds_p10": 4.8, "stalled_10s": 0.0, "stall_p99_s": 0.0}
    kept |= {"ttft_p50_s": 1.0, "ttft_p90_s": 2.0, "preemptions_per_request": 0.25, "loop_lag_ms_p99": 3.0}
    found = enumerate(qoes, start=1)
    return [kept | {"scheduler": scheduler, "load": i, "rate_rps": 2.0 * i, "qoe_mean": q} | more for i, q in found]


class Scripted(Upstream):
    """A scripted server with a state, whose answers stop before token `holds_at` until `until` answers have begun."""

    def __init__(self, *, holds_at: int = -1, until: int = 0) -> None:
        super().__init__(tokens=1000)
        self.states: list[dict[str, int]] = []  # the engine's, one after the other; the last one stays
        self.holds_at, self.until = holds_at, until
        self.enough = asyncio.Event()
        self._runner.app.router.add_get("/disco/v1/state", self.state)

    async def state(self, request: web.Request) -> web.Response:
        """GET /disco/v1/state."""
        engine = self.states.pop(0) if len(self.states) > 1 else next(iter(self.states), {})
        return web.json_response({"endpoints": {"device": {"engine": engine}}, "loop_lag_ms": {"p99": 1.5}})

    def on_request(self, exchange: Exchange) -> None:
        """Count those that have begun."""
        super().on_request(exchange)
        if self.n_requests >= self.until:
            self.enough.set()

    async def before(self, request: web.Request, response: web.StreamResponse, exchange: Exchange, i: int) -> None:
        """The stall."""
        if i == self.holds_at:
            async with asyncio.timeout(PATIENCE_S):
                await self.enough.wait()
        await super().before(request, response, exchange, i)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def door_to(stack: AsyncExitStack, server: LoopbackServer, name: str = ANDES) -> Door:
    """Start a server and open a door to it as the benchmark does."""
    await stack.enter_async_context(server)
    session = await stack.enter_async_context(__main__._session(name))
    return Door(name, server.url, session)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_are_the_same_for_a_seed_and_only_nearer_at_a_higher_rate() -> None:
    slow, again, fast = (workload(Setup(), "gamma", rate, 50, 7) for rate in (2.0, 2.0, 4.0))
    assert slow == again
    assert [r.at_s for r in fast] == pytest.approx([r.at_s / 2 for r in slow])
    assert [(r.chat, r.max_tokens) for r in fast] == [(r.chat, r.max_tokens) for r in slow]
    assert workload(Setup(seed=2), "gamma", 2.0, 50, 7) != slow


@pytest.mark.parametrize("arrivals", ["poisson", "gamma"])
def test_the_rate_is_that_asked_for_and_only_gamma_arrivals_come_in_bursts(arrivals: str) -> None:
    times = np.array([r.at_s for r in workload(Setup(), arrivals, 2.5, 2000, 0)])
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(2000 / 2.5)
    assert (gaps >= 0).all()
    low, high = {"poisson": (0.9, 1.1), "gamma": (2.5, 3.5)}[arrivals]
    assert low < gaps.std() / gaps.mean() < high


def test_lengths_stay_within_their_bounds_and_more_requests_begin_with_the_same() -> None:
    many, few = (workload(Setup(), "poisson", 1.0, n, 0) for n in (300, 20))
    answers = [r.max_tokens for r in many]
    assert (min(answers), max(answers)) == (8, 320)
    assert answers[:20] == [r.max_tokens for r in few]
    words = [len(r.chat[1]["content"].split()) for r in many]
    assert max(words) > 120
    assert min(words) < 15


def test_no_prompt_is_asked_twice_nor_begins_like_another() -> None:
    systems = [question(i, 60)[0]["content"] for i in range(1500)]
    assert len(set(systems)) == len(systems)


def test_unknown_arrivals_are_refused() -> None:
    with pytest.raises(BenchError, match="poisson, gamma"):
        workload(Setup(), "weekly", 1.0, 5, 0)


# --- one answer -------------------------------------------------------------------------------------------------------


def test_a_token_counts_when_its_piece_came() -> None:
    heard = StreamedAnswer(0.0, [1.0, 2.0, 3.0], "", "length", {"completion_tokens": 6}, 3.0)
    assert token_times(heard).tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    heard.usage = {"completion_tokens": 4}  # the end of the sequence is a token without a piece
    assert token_times(heard).tolist() == [1.0, 1.0, 2.0, 3.0]


def test_qoe_counts_from_when_the_request_was_due() -> None:
    assert served(1.0, 40).qoe == pytest.approx(1.0)
    late = served(5.0, 40)
    late.heard.sent += 4.5  # a client that sends late makes no reader happier
    assert late.qoe == served(5.0, 40).qoe < 0.9


def test_a_reader_who_stands_still_is_told_beside_the_quality() -> None:
    steady, stood = served(0.5, 60), served(0.5, 60)
    stood.heard.times[40:] = [at + 12.0 for at in stood.heard.times[40:]]
    assert steady.stall_s == pytest.approx(0.0, abs=1e-9)
    assert stood.stall_s == pytest.approx(12.0)
    found = measure([steady, stood])
    assert found["stalled_10s"] == 0.5
    assert found["stall_p99_s"] == pytest.approx(12.0, rel=0.02)
    assert found["tds_p10"] < PACE_TPS == pytest.approx(found["tds_p90"], rel=0.1)
    assert measure([steady, served(0.1, 40, failed="cut")])["qoe_whole"] == pytest.approx(1.0)


def test_a_failed_answer_has_no_quality_however_much_came() -> None:
    assert served(0.1, 40, failed="cut").qoe == 0.0


# --- one point --------------------------------------------------------------------------------------------------------


async def test_a_late_server_does_not_slow_arrivals(stack: AsyncExitStack) -> None:
    server = Scripted(holds_at=0, until=4)  # no token at all before the last request is there
    door = await door_to(stack, server)
    heard = await __main__.play(door, [Request(i / 100, question(i, 40), 32) for i in range(4)])
    assert [h.failed for h in heard] == [None] * 4
    assert max(h.heard.sent for h in heard) <= min(h.heard.first for h in heard)
    assert np.diff([h.due for h in heard]) == pytest.approx([0.01] * 3)
    assert all(h.heard.sent >= h.due for h in heard)


@pytest.mark.parametrize("name", [ANDES, PEER])
async def test_our_engine_is_told_the_pace_of_the_reader_and_the_peer_nothing_of_ours(
    stack: AsyncExitStack, name: str
) -> None:
    server = Scripted()
    door = await door_to(stack, server, name)
    await __main__.play(door, [Request(0.0, question(1, 40), 32)])
    told = {"delivery": "reserve", "pace_tps": PACE_TPS} if name == ANDES else None
    body = server.exchanges[0].body
    assert (body.get("disco"), body["max_tokens"], body["temperature"]) == (told, 32, 0)


async def test_a_refused_answer_and_a_broken_one_count_as_nothing_and_are_told(stack: AsyncExitStack) -> None:
    server = Scripted()
    door = await door_to(stack, server)
    requests = [Request(0.0, question(i, 40), 32) for i in range(2)]
    with server.status(429):
        refused = await __main__.play(door, requests[:1])
    with server.cut_after(5):
        broken = await __main__.play(door, requests[1:])
    whole = await __main__.play(door, requests)
    found = measure([*refused, *broken, *whole])
    assert (found["n"], found["failed"]) == (4, 2)
    assert found["qoe_mean"] == pytest.approx(0.5, abs=0.01)
    assert found["qoe_p10"] == 0.0
    assert any("429" in why for why in found["why"])
    with pytest.raises(BenchError, match=r"all 1 answers failed: .*429"):
        measure(refused)


def test_throughput_is_told_with_and_without_the_end() -> None:
    found = measure([served(0.0, 48, due=0.0), served(0.0, 96, due=10.0, finish="stop")])
    end = 10.0 + 95 * STEP_S
    assert found["throughput_tps"] == pytest.approx(144 / end)
    assert found["arriving_tps"] == pytest.approx(4.7, abs=0.15)  # the first token was there at once
    assert (found["ended_early"], found["prompt_tokens_mean"], found["answer_tokens_mean"]) == (1, 50, 72)


async def test_preemptions_are_those_of_the_point_when_the_engine_rests(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "LOOK_S", 0.0)
    server = Scripted()
    rest, busy = {"preemptions": 5, "running": 0}, {"preemptions": 6, "waiting": 1}
    server.states = [rest, busy, busy, rest | {"preemptions": 9}]
    door = await door_to(stack, server)
    found = await __main__._point(door, [Request(0.0, question(i, 40), 32) for i in range(2)])
    assert (found["preemptions_per_request"], found["loop_lag_ms_p99"]) == (2.0, 1.5)


async def test_an_engine_that_never_rests_is_not_waited_for(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "REST_S", 0.0)
    server = Scripted()
    server.states = [{"running": 1}]
    assert (await streamed.at_rest(await door_to(stack, server)))["loop_lag_ms"] == {"p99": 1.5}


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_answers_at_the_edges_count_by_their_share() -> None:
    inside, half, outside = (served(0.0, 48, due=due).heard for due in (10.0, 15.0, 40.0))
    assert rate_between([inside, half, outside], 5.0, 20.0) == pytest.approx(1.5 / 15, rel=0.02)


async def test_capacity_keeps_as_many_answers_under_way_as_it_says(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "IN_FLIGHT", 5)
    server = Scripted(holds_at=3, until=5)  # with fewer at a time nothing would ever end
    door = await door_to(stack, server)
    found = await __main__.measure_capacity(door, workload(Setup(), "poisson", 1.0, 60, 0))
    assert server.n_requests == 60
    assert found > 0


async def test_a_server_that_breaks_off_has_no_capacity(stack: AsyncExitStack) -> None:
    server = Scripted()
    door = await door_to(stack, server)
    with server.status(500), pytest.raises(BenchError, match="answered 500"):
        await __main__.measure_capacity(door, workload(Setup(), "poisson", 1.0, 20, 0))


# --- all points -------------------------------------------------------------------------------------------------------


async def test_all_servers_get_the_same_requests_and_none_goes_first_always(stack: AsyncExitStack) -> None:
    servers = {name: Scripted() for name in (ANDES, FCFS)}
    doors = {name: await door_to(stack, server, name) for name, server in servers.items()}
    setup = Setup(loads=(1.0, 2.0), arrivals=("poisson",), servers=(ANDES, FCFS), n_requests=3)
    said: list[str] = []
    curves = await __main__.measure_curves(doors, setup, 100.0, said.append)
    assert [(c["scheduler"], c["load"], c["rate_rps"]) for c in curves] == [
        (ANDES, 1.0, 100.0), (FCFS, 1.0, 100.0), (FCFS, 2.0, 200.0), (ANDES, 2.0, 200.0),
    ]  # fmt: skip
    asked = {name: sorted(json.dumps(e.body["messages"]) for e in s.exchanges) for name, s in servers.items()}
    assert asked[ANDES] == asked[FCFS]
    assert len(set(asked[ANDES])) == 6
    assert "4 of 4, about 0.0 min left" in said[-1]
    assert len(said) == setup.n_points == 4


async def test_a_point_has_as_many_requests_as_fill_its_time(stack: AsyncExitStack) -> None:
    server = Scripted()
    doors = {FCFS: await door_to(stack, server, FCFS)}
    setup = Setup(loads=(2.0,), arrivals=("poisson",), servers=(FCFS,), point_s=0.1)
    (found,) = await __main__.measure_curves(doors, setup, 150.0, lambda _: None)
    assert (found["n"], server.n_requests) == (15, 15)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_gains_are_those_of_equal_loads_and_of_the_rates_at_high_quality() -> None:
    ours, base = curve(ANDES, [1.0, 0.95, 0.85], 95.0), curve(FCFS, [1.0, 0.8, 0.2])
    found = against([*ours, *reversed(base)], FCFS)
    assert found["qoe_gain_max"] == pytest.approx(0.85 / 0.2)
    assert found["rate_gain"] == pytest.approx(5.0 / 3.0)  # 0.9 at 5 and at 3 requests/s
    assert found["throughput_loss"] == pytest.approx(0.05)
    assert not found["rate_gain_is_bound"]
    assert against([*ours, *curve(FCFS, [0.8, 0.5, 0.2])], FCFS)["rate_gain_is_bound"]
    assert against([*curve(ANDES, [1.0, 1.0, 0.9]), *base], FCFS)["rate_gain_is_bound"]
    assert against([*ours, *curve(FCFS, [1.0, 0.8, 0.2], 90.0)], FCFS)["throughput_loss"] == 0.0


def test_the_summary_is_of_all_arrivals_and_rates_of_the_first() -> None:
    poisson = [*curve(ANDES, [1.0, 0.8]), *curve(FCFS, [1.0, 0.8], preemptions_per_request=9.0)]
    gamma = [*curve(ANDES, [1.0, 0.6], loop_lag_ms_p99=7.0, failed=1), *curve(FCFS, [0.9, 0.2])]
    found = summary([*poisson, *(c | {"arrivals": "gamma"} for c in gamma)])
    assert found["qoe_gain_max"] == pytest.approx(3.0)
    assert found["rate_gain"] == 1.0
    assert (found["preemptions_per_request"], found["loop_lag_ms_p99"], found["failed"]) == (0.25, 7.0, 2)
    assert found["qoe_gain_max_peer"] is found["rate_gain_peer"] is None


def test_stalls_are_told_as_a_share_of_those_by_the_papers_rule() -> None:
    ours, paper = curve(ANDES, [1.0, 0.8, 0.5]), curve(PAPER, [1.0, 0.9, 0.6])
    for one, stalled in zip([*ours, *paper], (0.0, 0.05, 0.12, 0.0, 0.2, 0.3), strict=True):
        one["stalled_10s"] = stalled
    assert summary([*ours, *paper])["stalled_of_paper"] == pytest.approx(0.4)
    assert summary(ours)["stalled_of_paper"] is None


@pytest.mark.parametrize("servers", [(ANDES, FCFS, PEER), (ANDES,)])
def test_the_table_has_every_point(servers: tuple[str, ...]) -> None:
    curves = [c for name in servers for c in curve(name, [1.0, 0.5])]
    host = {"python": "3.11", "platform": "x", "cpus": 2}
    more = {"capacity_rps": 2.0, "host": host, "threads": 1, "n_cells": 4096, "model": "m.gguf"}
    peer = {"name": PEER, "version": "1"} if PEER in servers else None
    lines = table(summary(curves) | {"curves": curves, "peer": peer} | more).splitlines()
    assert [line.split()[3] for line in lines[1 : 1 + 2 * len(servers)]] == [s for s in servers for _ in range(2)]
    assert len({len(line) for line in lines[: 1 + 2 * len(servers)]}) == 1


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_cells", "n_ctx"), [(4096, 1024), (600, 600)])
def test_our_daemon_is_told_its_scheduler_and_its_cells(tmp_path: Path, n_cells: int, n_ctx: int) -> None:
    argv = __main__._up(tmp_path, FCFS, Setup(threads=1, n_cells=n_cells), Path("m.gguf"))
    config = tomllib.loads(Path(argv[argv.index("--config") + 1]).read_text("utf-8"))
    assert config == {"device": {"n_ctx": n_ctx, "n_cells": n_cells, "scheduler": FCFS}}
    assert argv[argv.index("--policy") + 1] == "all-device"


async def test_a_measurement_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: Any) -> None:
        raise aiohttp.ServerDisconnectedError

    monkeypatch.setattr(__main__, "_capacity", gone)
    with pytest.raises(BenchError, match="broke off: ServerDisconnected"):
        await __main__.bench_qoe(Setup(servers=(), model=Path("m.gguf")), lambda _: None)
