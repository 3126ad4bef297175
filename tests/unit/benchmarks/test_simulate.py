from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.eval.evaluate import (
    LIMITS,
    POLICIES,
    SERVER_TPS,
    SERVER_USD,
    USD_PER_KWH,
    WATTS,
    Cell,
    EvaluationSetup,
    Scene,
    as_json,
    evaluate,
    measure,
)
from benchmarks.eval.limits import best_p99, clairvoyant
from benchmarks.eval.online import evaluate_online
from benchmarks.eval.player import Played, Stream, play, play_paced
from benchmarks.eval.traces import (
    MIN_ROWS,
    MIN_TTFT_S,
    LatencyTrace,
    Requests,
    read_lengths,
    read_requests,
    read_traces,
)
from benchmarks.qoe.steady import qoe_steady
from disco_daemon.arrays import FloatArray
from disco_daemon.dispatch.baselines import Fixed, Stochastic
from disco_daemon.dispatch.optimal import Optimal
from disco_daemon.dispatch.pacer import Pacer
from disco_daemon.dispatch.paper import Paper
from disco_daemon.dispatch.policy import Policy, PolicyInput
from disco_daemon.dispatch.table import RequestContext, Table
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.server_ttft import LEVELS, Predictor
from disco_daemon.estimation.ttft_context import Contexts
from disco_daemon.simulate.recorded import Phone, Recent
from disco_daemon.simulate.whatif import READER_TPS
from disco_daemon.types import Plan, Side
from tests.fixtures.scheduling import estimated, first_token, observed, policy_input

DEVICE, SERVER = Side.DEVICE, Side.SERVER
INF = math.inf
PHONE = Phone("phone", prefill_tps=80.0, decode_tps=20.0, start_s=0.05)
seeds = st.integers(0, 2**32 - 1)
sides = st.sampled_from(Side)
budgets = st.floats(0.02, 0.98)


def ttfts(seed: int, n: int) -> FloatArray:
    """An autocorrelated trace of median 0.6 s."""
    random = np.random.default_rng(seed)
    slow = np.convolve(random.normal(0, 0.3, n + 19), np.full(20, 0.3), "valid")
    return np.asarray(0.6 * np.exp(slow + random.normal(0, 0.4, n)))


def asked(seed: int, n: int) -> Requests:
    random = np.random.default_rng(seed)
    prompt = np.clip(np.rint(18 * random.lognormal(-0.15, 0.54, n)), 1, 144).astype(np.int64)
    return Requests(prompt, random.integers(1, 400, n))


def stream(seed: int, n: int = 60, lanes: int = 1) -> Stream:
    return Stream.draw(ttfts(seed, 50), asked(seed, 40), n, range(seed % 1000, seed % 1000 + lanes))


def ahead(budget: float, constrained: Side, contexts: Contexts | None = None) -> PolicyInput:
    requests = asked(1, 200)
    device = policy_input(estimated(2), requests.prompt, budget, constrained, contexts=contexts)
    return replace(device, device_s=PHONE.ttft_s(device.lengths.values))


ALL: list[Policy] = [
    Fixed("race", Plan(0.0, 0.0)),
    Fixed("all-device", Plan(0.0, INF)),
    Fixed("all-server", Plan(INF, 0.0)),
    Stochastic(concurrent=False),
    Stochastic(concurrent=True),
    Paper(),
    Paper(paced=True),
    Optimal(),
]
policies = st.sampled_from(ALL)


# --- recorded traces ------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, *rows: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def rows(trace: str, n: int = MIN_ROWS, column: str = "{i}.5") -> list[str]:
    return [f"{trace},{i},{column.format(i=i)}" for i in range(n)]


def test_traces_are_read_in_order_under_the_names_of_their_file(tmp_path: Path) -> None:
    write(tmp_path, "ttft_one.csv", "trace,seq,ttft_s", *rows("b"), *rows("a", MIN_ROWS + 3))
    write(tmp_path, "two.csv", "trace,seq,latency_s", *rows("c"))
    traces = read_traces(tmp_path)
    assert [(t.label, len(t.ttft_s)) for t in traces] == [("one/b", 10), ("one/a", 13), ("two/c", 10)]
    np.testing.assert_array_equal(traces[0].ttft_s, np.arange(MIN_ROWS) + 0.5)


@pytest.mark.parametrize(
    ("columns", "value"),
    [("ttft_s,latency_s", 1), ("latency_s,ttft_s", 2), ("ttft_est_s,latency_s", 1), ("latency_s,ttft_est_s", 2)],
)
def test_a_measured_ttft_goes_before_an_estimate_and_that_before_a_latency(
    tmp_path: Path, columns: str, value: float
) -> None:
    write(tmp_path, "x.csv", f"trace,{columns}", *["a,1,2"] * MIN_ROWS)
    assert set(read_traces(tmp_path)[0].ttft_s.tolist()) == {value}


def test_a_trace_of_a_few_rows_is_left_out_and_a_ttft_is_positive(tmp_path: Path) -> None:
    write(tmp_path, "x.csv", "trace,seq,ttft_s", *rows("short", MIN_ROWS - 1), *rows("odd", column="-0.3"))
    (only,) = read_traces(tmp_path)
    assert only.name == "odd"
    assert set(only.ttft_s.tolist()) == {MIN_TTFT_S}


@pytest.mark.parametrize(
    ("select", "found"),
    [
        (["*"], ["x/a", "x/b", "y/a"]),
        (["x/*"], ["x/a", "x/b"]),
        (["*/a"], ["x/a", "y/a"]),
        (["y/a", "x/b"], ["x/b", "y/a"]),
    ],
)
def test_traces_are_selected_by_pattern(tmp_path: Path, select: list[str], found: list[str]) -> None:
    write(tmp_path, "x.csv", "trace,seq,ttft_s", *rows("a"), *rows("b"))
    write(tmp_path, "y.csv", "trace,seq,ttft_s", *rows("a"))
    assert [t.label for t in read_traces(tmp_path, select)] == found


def test_a_selection_of_nothing_says_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, "x.csv", "trace,seq,ttft_s", *rows("a"))
    with pytest.raises(ConfigError, match=r"matches z/\*; there are x/a"):
        read_traces(tmp_path, ["z/*"])


def test_files_of_other_things_are_passed_over_but_one_must_be_of_use(tmp_path: Path) -> None:
    write(tmp_path, "stats.csv", "trace,mean_s", "a,1")
    write(tmp_path, "times.csv", "ttft_s", "1")
    with pytest.raises(ConfigError, match="has the columns `trace` and one of ttft_s, ttft_est_s, latency_s"):
        read_traces(tmp_path)
    with pytest.raises(ConfigError, match="no CSV file"):
        read_traces(tmp_path / "nowhere")


@pytest.mark.parametrize("value", ["", "fast", "nan", "inf"])
def test_what_is_no_number_is_told_with_its_file_column_and_row(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, "x.csv", "trace,seq,ttft_s", *rows("a"), f"a,77,{value}")
    with pytest.raises(ConfigError) as error:
        read_traces(tmp_path)
    for part in (str(path), repr(value), "column ttft_s", "'77'"):
        assert part in str(error.value)


def test_a_row_that_ends_early_is_told_too(tmp_path: Path) -> None:
    write(tmp_path, "x.csv", "trace,seq,ttft_s", *rows("a"), "a,77")
    with pytest.raises(ConfigError, match="None in column ttft_s is not a number"):
        read_traces(tmp_path)


def test_lengths_are_read_from_the_folder_that_is_common_first(tmp_path: Path) -> None:
    write(tmp_path, "a.csv", "prompt_tokens,output_tokens", "1,1")
    assert read_requests(tmp_path).prompt.tolist() == [1]
    write(tmp_path / "common", "arrivals.csv", "t_s,in_tok", "1,1")
    write(tmp_path / "common", "lengths.csv", "idx,prompt_tokens,output_tokens", "0,8,386", "1,0,0", "2,30,2")
    requests = read_requests(tmp_path)
    assert requests.prompt.tolist() == [8, 1, 30], "no prompt is empty"
    assert requests.output.tolist() == [386, 1, 2]
    past, future = requests.halves()
    assert (past.prompt.tolist(), future.output.tolist()) == ([8], [1, 2])


def test_without_lengths_it_says_where_they_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="common has the columns prompt_tokens and output_tokens"):
        read_requests(tmp_path)


def test_a_file_of_arrivals_has_lengths_too_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, "arrivals.csv", "t_s,in_tok,out_tok", "0.1,1200,44", "0.2,7,0")
    named = read_lengths(tmp_path / "arrivals.csv")
    assert (named.prompt.tolist(), named.output.tolist()) == ([1200, 7], [44, 1])
    with pytest.raises(ConfigError):
        read_requests(tmp_path)  # nobody has said that these are the requests
    write(tmp_path, "x.csv", "trace,ttft_s", "a,0.1")
    with pytest.raises(ConfigError, match="prompt_tokens and output_tokens, or in_tok and out_tok"):
        read_lengths(tmp_path / "x.csv")


def test_an_empty_file_of_lengths_is_an_error_of_the_users(tmp_path: Path) -> None:
    write(tmp_path, "lengths.csv", "prompt_tokens,output_tokens")
    with pytest.raises(ConfigError):
        read_requests(tmp_path)


def test_a_trace_that_is_sorted_by_kind_of_prompt_is_fitted_and_tested_on_all_kinds(tmp_path: Path) -> None:
    rows = [f"a,{kind},{kind + i / 1000}" for kind in range(1, 6) for i in range(40)]
    (tmp_path / "ttft_sorted.csv").write_text("\n".join(["trace,category,ttft_s", *rows]), "utf-8")
    [trace] = read_traces(tmp_path)
    past, future = trace.halves()
    assert len(past) == len(future) == 100
    assert set(past.astype(int)) == set(future.astype(int)) == {1, 2, 3, 4, 5}
    assert not set(past) & set(future)


def test_a_server_asked_twice_answers_sooner_and_is_sent_no_more_than_the_hedge() -> None:
    setup = EvaluationSetup(("optimal", "optimal-hedged"), (PHONE,), (DEVICE,), (0.2,), n_seeds=2, n_requests=1500)
    once, twice = evaluate(TRACES, asked(12, 300), setup)
    scene = Scene.of(TRACES[0], asked(12, 300), setup)
    slow = float(scene.tested.at(scene.hedge_s))  # 8 % of the first half, another share of this one
    assert once.asked_twice == 0.0
    assert 0.0 < twice.asked_twice < 1.1 * slow < 0.2
    assert twice.mean_ttft_s < once.mean_ttft_s


def test_intervals_of_a_cell_are_over_its_seeds_and_only_where_asked_for() -> None:
    setup = EvaluationSetup(("paper",), (PHONE,), (DEVICE,), (0.5,), n_seeds=6, n_requests=300, bootstrap=True)
    [cell] = evaluate(TRACES, asked(12, 300), setup)
    assert cell.ci95 is not None
    for key, (low, high) in cell.ci95.items():
        assert low < getattr(cell, key) < high
    assert as_json(cell)["ci95"] == cell.ci95
    assert "ci95" not in as_json(replace(cell, ci95=None))


def test_a_trace_is_fitted_on_its_first_half_and_tested_on_its_second() -> None:
    past, future = LatencyTrace("x", "a", np.arange(5.0)).halves()
    assert (past.tolist(), future.tolist()) == ([0, 1], [2, 3, 4])


# --- streams --------------------------------------------------------------------------------------------------------


@given(seeds)
def test_a_seed_always_draws_the_same_and_other_seeds_draw_others(seed: int) -> None:
    server_s, requests = ttfts(seed, 50), asked(seed, 40)
    alone, among = (Stream.draw(server_s, requests, 60, which) for which in ([seed], [seed + 1, seed]))
    for name in ("prompt", "output", "server_s", "draws"):
        np.testing.assert_array_equal(getattr(alone, name)[:, 0], getattr(among, name)[:, 1])
    assert not np.array_equal(among.draws[:, 0], among.draws[:, 1])


def test_the_server_keeps_the_order_of_its_trace_and_starts_again_at_its_end() -> None:
    drawn = Stream.draw(np.arange(1.0, 51.0), asked(0, 9), 120, range(5))
    for column in drawn.server_s.T:
        assert set(np.diff(column).tolist()) == {1.0, -49.0}


def test_prompts_keep_their_answers() -> None:
    requests = asked(3, 30)
    pairs = set(zip(requests.prompt.tolist(), requests.output.tolist(), strict=True))
    drawn = Stream.draw(np.ones(5), requests, 100, range(2))
    assert set(zip(drawn.prompt.ravel().tolist(), drawn.output.ravel().tolist(), strict=True)) <= pairs


def test_a_phones_ttft_is_a_line() -> None:
    np.testing.assert_allclose(PHONE.ttft_s(np.array([0.0, 80.0])), [0.05, 1.05])


# --- playing --------------------------------------------------------------------------------------------------------


def one_by_one(
    requests: Stream, lane: int, plans: list[Plan], constrained: Side
) -> list[tuple[float, bool, bool, bool]]:
    """TTFT, whether the device won, whether each ran: in plain words."""
    results = []
    for i, plan in enumerate(plans):
        server_at = plan.server_s + float(requests.server_s[i, lane])
        device_at = plan.device_s + float(PHONE.ttft_s(requests.prompt[i, lane]))
        results.append(
            (min(server_at, device_at), device_at < server_at, plan.device_s < server_at, plan.server_s < device_at)
        )
    return results


def same(played: Played, row: int, lane: int, expected: list[tuple[float, bool, bool, bool]]) -> None:
    ttft, won, device, server = zip(*expected, strict=True)
    np.testing.assert_allclose(played.ttft_s[:, row, lane], ttft, rtol=1e-12)
    np.testing.assert_array_equal(played.device_won[:, row, lane], won)
    np.testing.assert_array_equal(played.device_ran[:, row, lane], device)
    np.testing.assert_array_equal(played.server_ran[:, row, lane], server)


@given(seeds, policies, sides, budgets, budgets)
def test_playing_all_at_once_is_playing_one_by_one(
    seed: int, policy: Policy, constrained: Side, one: float, two: float
) -> None:
    requests, both = stream(seed, lanes=2), np.array([one, two])
    tables = [policy.fit(ahead(budget, constrained)) for budget in (one, two)]
    played = play(requests, PHONE, tables, both, constrained)
    for row, lane in itertools.product(range(2), range(2)):
        plans = [
            tables[row].plan(int(length), RequestContext(float(both[row]), draw=float(draw)))
            for length, draw in zip(requests.prompt[:, lane], requests.draws[:, lane], strict=True)
        ]
        results = one_by_one(requests, lane, plans, constrained)
        same(played, row, lane, results)
        assert played.lead_s is not None
        leads = [max(0.0, ttft - plan.device_s) for (ttft, *_), plan in zip(results, plans, strict=True)]
        np.testing.assert_allclose(played.lead_s[:, row, lane], leads, atol=1e-12)
        used = np.array([r[2 if constrained is DEVICE else 3] for r in results])
        length = requests.prompt[:, lane]
        assert played.ratio[row, lane] == pytest.approx(length @ used / length.sum())


UNMOVED = Recent(Predictor(np.zeros(3), np.zeros(3)), np.zeros(3), 0.0)


@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("policy", ALL, ids=lambda p: p.name)
def test_with_one_rung_the_pacer_has_nothing_to_say(policy: Policy, constrained: Side) -> None:
    requests, wanted = stream(5, 300, lanes=3), np.array([0.2, 0.6])
    tables = [first_rung(policy.fit(ahead(budget, constrained))) for budget in wanted.tolist()]
    pacer = Pacer(np.repeat(wanted[:, None], 3, axis=1), 18.0, windowed=False)
    plain = play(requests, PHONE, tables, wanted, constrained)
    paced = play_paced(requests, PHONE, tables, pacer, constrained, UNMOVED)
    for name in ("ttft_s", "device_won", "device_ran", "server_ran", "ratio"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(paced, name))


def first_rung(table: Table) -> Table:
    return replace(table, budgets=table.budgets[:1], device_s=table.device_s[:1], server_s=table.server_s[:1])


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("constrained", Side)
@pytest.mark.parametrize("policy", [Optimal(), Paper(paced=True)], ids=lambda p: p.name)
def test_playing_paced_lanes_side_by_side_is_playing_each_alone(
    policy: Policy, constrained: Side, windowed: bool
) -> None:
    quick, slow = estimated(3, 0.4), estimated(4, 0.9)
    known = Contexts(np.array([0.1]), np.array([0.5, 0.5]), (quick, slow))
    requests, wanted = stream(6, 400, lanes=2), (0.15, 0.4)
    tables = [policy.fit(ahead(budget, constrained, known)) for budget in wanted]
    recent = Recent(Predictor(np.array([-0.5, -0.5, -0.5]), np.array([0.5, 0.2, 0.1])), np.full(3, -0.5), math.log(0.8))
    lanes = np.repeat(np.array(wanted)[:, None], 2, axis=1)
    played = play_paced(requests, PHONE, tables, Pacer(lanes, 18.0, windowed=windowed), constrained, recent)
    for (row, budget), lane in itertools.product(enumerate(wanted), range(2)):
        pacer, levels, plans = Pacer(budget, 18.0, windowed=windowed), recent.levels, []
        for i in range(len(requests.prompt)):
            length, server_s = float(requests.prompt[i, lane]), float(requests.server_s[i, lane])
            score, draw = float(recent.predictor.score(levels)), float(requests.draws[i, lane])
            plan = tables[row].plan(int(length), RequestContext(float(pacer.handed_out()), score=score, draw=draw))
            if not pacer.allows(length):
                plan = Plan(INF, plan.server_s) if constrained is DEVICE else Plan(plan.device_s, INF)
            plans.append(plan)
            ((_, _, device_ran, server_ran),) = one_by_one(
                Stream(*(getattr(requests, f)[i : i + 1] for f in ("prompt", "output", "server_s", "draws"))),
                lane, [plan], constrained,
            )  # fmt: skip
            pacer.settle(length, length * (device_ran if constrained is DEVICE else server_ran))
            if server_ran:
                levels = LEVELS * levels + (1 - LEVELS) * min(math.log(server_s), recent.cap)
        same(played, row, lane, one_by_one(requests, lane, plans, constrained))


# --- limits ---------------------------------------------------------------------------------------------------------


@given(seeds, policies, sides, budgets)
def test_nobody_has_a_better_mean_than_the_clairvoyant_who_spends_as_much(
    seed: int, policy: Policy, constrained: Side, budget: float
) -> None:
    requests = stream(seed)
    played = play(requests, PHONE, [policy.fit(ahead(budget, constrained))], np.array([budget]), constrained)
    best = clairvoyant(requests, PHONE, played.ratio[:, 0] + 1e-12, constrained)
    slack = np.abs(PHONE.ttft_s(requests.prompt) - requests.server_s).max() / len(requests.prompt)  # of one request
    assert best.ttft_s.mean() <= played.ttft_s.mean() + slack
    assert best.ratio[0, 0] <= played.ratio[0, 0] + 1e-9


@given(seeds, sides, st.floats(0, 1))
def test_the_clairvoyant_is_within_one_request_of_the_best_choice_there_is(
    seed: int, constrained: Side, budget: float
) -> None:
    requests = stream(seed)
    length, server_s = requests.prompt[:, 0], requests.server_s[:, 0]
    own, other = PHONE.ttft_s(length), server_s
    if constrained is SERVER:
        own, other = other, own
    gain = np.maximum(other - own, 0.0)
    saved = np.zeros(int(budget * length.sum()) + 1)  # the most that can be saved with so many tokens
    for tokens, worth in zip(length.astype(int).tolist(), gain.tolist(), strict=True):
        saved[tokens:] = np.maximum(saved[tokens:], saved[: max(0, len(saved) - tokens)] + worth)
    played = clairvoyant(requests, PHONE, np.array([budget]), constrained)
    reached = float((other - played.ttft_s[:, 0, 0]).sum())
    assert saved[-1] - gain.max() - 1e-9 <= reached <= saved[-1] + 1e-9
    assert played.ratio[0, 0] <= budget


def p99(values: FloatArray, chances: FloatArray) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(chances[order].cumsum(), 0.99 - 1e-9)])


@given(seeds)
def test_no_start_delays_have_a_lower_p99_than_the_limit(seed: int) -> None:
    random = np.random.default_rng(seed)
    n, tau = int(random.integers(1, 5)), random.uniform(0.2, 3.0)
    lengths = np.sort(random.choice(np.arange(1, 300), n, replace=False)).astype(np.float64)
    shares, server = random.dirichlet(np.ones(n)), observed(random.lognormal(-0.5, random.uniform(0.1, 1.0), 30))
    device_s = lengths / lengths[-1] * random.uniform(0, server.times[-1])
    choices = [np.maximum(tau - device_s, 0.0), np.full(n, 30.0), np.zeros(n), random.uniform(0, 3, n)]
    waits = np.choose(random.integers(len(choices), size=n), choices)
    firsts = [first_token(server, at) for at in (waits + device_s).tolist()]
    chances = [share * p for share, (_, p) in zip(shares, firsts, strict=True)]
    reached = p99(np.concatenate([x for x, _ in firsts]), np.concatenate(chances))
    spent = float(lengths * shares @ server.at(waits) / (lengths @ shares))
    assert reached >= best_p99(server, lengths, shares, device_s, min(1.0, spent + 1e-9), DEVICE) - 1e-6


def test_a_limit_does_not_pay_for_what_rescues_nobody() -> None:
    even, quick = np.array([0.5, 0.5]), np.array([0.995, 0.005])
    server = observed(np.linspace(0.1, 2.0, 200))
    hopeless = best_p99(server, np.array([10.0, 20.0]), even, np.array([4.0, 10.0]), 0.0, DEVICE)
    assert hopeless <= 2.0, "the server never takes longer, whatever the device does"
    server = observed(np.linspace(1.0, 2.0, 200))
    rare = best_p99(server, np.array([10.0, 1000.0]), quick, np.array([0.1, 10.0]), 0.0, SERVER)
    assert rare == pytest.approx(0.1), "only 0.5 % are too long for the device"


@given(seeds, st.floats(0.02, 0.9))
def test_for_one_length_the_limit_is_where_the_budget_and_one_percent_meet(seed: int, budget: float) -> None:
    server, device_s = observed(np.random.default_rng(seed).lognormal(-0.5, 0.5, 1000)), 0.01
    limit = best_p99(server, np.array([50.0]), np.ones(1), np.array([device_s]), budget, DEVICE)
    # A request that may exceed the limit saves its own start: of S(limit - T_d) all but 1 % in S(limit) must be bought.
    price = [
        float(server.at(tau - device_s)) * (1 - 0.01 / max(float(server.at(tau)), 0.01))
        for tau in (limit, limit * 0.999)
    ]
    assert price[0] <= budget + 1e-6
    assert price[1] >= budget - 0.01


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_small_case_are_those_reckoned_by_hand() -> None:
    prompt, output = (
        np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]),
        np.array([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]),
    )
    requests = Stream(prompt, output, np.ones((3, 2)), np.zeros((3, 2)))
    ttft = np.array([[0.5, 2.0], [1.0, 0.1], [3.0, 0.2]])
    won = np.array([[True, False], [False, True], [False, False]])
    device = np.array([[True, True], [False, True], [True, False]])
    server = np.array([[False, True], [True, False], [True, True]])
    ratio = np.array([[0.1, 0.3]])
    played = Played(ttft[:, None], won[:, None], device[:, None], server[:, None], ratio)
    cell = asdict(measure(requests, "t", PHONE, DEVICE, "p", 0.2, played, 0, n_tested=3))
    busy_s = (device * prompt / 80 + won * output / 20).mean()
    paid = (server * prompt * SERVER_USD[0] + ~won * output * SERVER_USD[1]).mean()
    assert [cell.pop(key) for key in ("trace", "device", "constraint", "policy")] == ["t", "phone", "device", "p"]
    by_hand: dict[str, float] = {
        "budget": 0.2,
        "mean_ttft_s": float(ttft.mean()),
        "p50_ttft_s": (1.0 + 0.2) / 2,
        "p95_ttft_s": float(np.mean([np.quantile(ttft[:, seed], 0.95) for seed in range(2)])),
        "p99_ttft_s": float(np.mean([np.quantile(ttft[:, seed], 0.99) for seed in range(2)])),
        "cvar_ttft_s": (3.0 + 2.0) / 2,
        "realised_ratio": 0.2,
        "cost_usd": float(busy_s * WATTS / 3.6e6 * USD_PER_KWH + paid),
        "qoe": float(np.mean(qoe_steady(ttft, output, 1.0, READER_TPS))),
        "qoe_strict": float(np.mean(qoe_steady(ttft, output, 0.3, READER_TPS))),
        "handoffs": 0.0,
        "largest_gap_s": max(1 / 20, 1 / SERVER_TPS),
        "delayed_mean": 0.0,
        "delayed_p99": 0.0,
        "n_tested": 3,
        "asked_twice": 0.0,
    }
    assert (cell.pop("handoff"), cell.pop("ci95")) == ("none", None)
    assert cell == pytest.approx(by_hand)


def test_the_cvar_is_the_mean_of_the_worst_percent_of_each_seed() -> None:
    requests = stream(7, 400, lanes=2)
    played = play(requests, PHONE, [Fixed("race", Plan(0.0, 0.0)).fit()], np.array([0.5]), DEVICE)
    cell = measure(requests, "t", PHONE, DEVICE, "race", 0.5, played, 0, n_tested=3)
    worst = [np.sort(played.ttft_s[:, 0, seed])[-4:].mean() for seed in range(2)]
    assert cell.cvar_ttft_s == pytest.approx(np.mean(worst))


# --- whole evaluations ----------------------------------------------------------------------------------------------

SMALL = EvaluationSetup(
    policies=(*POLICIES, *LIMITS), phones=(PHONE,), budgets=(0.2, 0.6), n_seeds=2, n_requests=1500,
)  # fmt: skip
TRACES = [LatencyTrace("x", "a", ttfts(11, 200))]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return list(evaluate(TRACES, asked(12, 300), SMALL))


def test_every_cell_is_there_in_order(cells: list[Cell]) -> None:
    expected = itertools.product(["device", "server"], SMALL.policies, SMALL.budgets)
    assert [(c.constraint, c.policy, c.budget) for c in cells] == list(expected)


def test_the_same_again_is_the_same(cells: list[Cell]) -> None:
    assert [as_json(c) for c in evaluate(TRACES, asked(12, 300), SMALL)] == [as_json(c) for c in cells]
    assert json.loads(json.dumps([as_json(c) for c in cells], allow_nan=False))


def test_paced_policies_stay_near_their_budget_and_nobody_beats_the_clairvoyant(cells: list[Cell]) -> None:
    means = {(c.constraint, c.policy, c.budget): c.mean_ttft_s for c in cells}
    for cell in cells:
        if cell.policy in ("paper-paced", "optimal", "optimal-unconditioned"):
            assert cell.realised_ratio == pytest.approx(cell.budget, abs=0.03)
        if cell.policy not in ("all-device", "all-server", *LIMITS) and cell.realised_ratio <= cell.budget:
            assert cell.mean_ttft_s >= means[cell.constraint, "clairvoyant", cell.budget] - 0.02


def test_progress_is_told_once_a_group() -> None:
    ticks: list[int] = []
    setup = replace(SMALL, policies=("all-server",), n_requests=20)
    list(evaluate(TRACES, asked(12, 300), setup, lambda: ticks.append(1)))
    assert len(ticks) == setup.n_groups == 2


def test_with_the_window_any_200_requests_keep_their_promise() -> None:
    requests, wanted = stream(13, 1000, lanes=2), np.array([0.2])
    pacer = Pacer(np.repeat(wanted[:, None], 2, axis=1), float(asked(1, 200).prompt.mean()))
    played = play_paced(requests, PHONE, [Optimal().fit(ahead(0.2, DEVICE))], pacer, DEVICE, UNMOVED)
    used = (played.device_ran[:, 0] * requests.prompt).cumsum(axis=0)
    offered: NDArray[np.float64] = requests.prompt.cumsum(axis=0)
    assert ((used[200:] - used[:-200]) / (offered[200:] - offered[:-200])).max() <= 0.22


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'fast'; choose from all-device, .*, best-p99"):
        EvaluationSetup(policies=("optimal", "fast"))


def test_online_only_learners_play_and_always_the_same() -> None:
    setup = replace(SMALL, policies=("optimal", "paper-paced"), budgets=(0.3,), n_requests=120)
    one, two = (list(evaluate_online(TRACES, asked(12, 300), setup)) for _ in range(2))
    assert one == two
    assert [(c.constraint, c.policy) for c in one] == list(itertools.product(["device", "server"], setup.policies))
    with pytest.raises(ConfigError, match="all-device does not learn: with --online choose from stochastic, "):
        list(evaluate_online(TRACES, asked(12, 300), replace(setup, policies=("optimal", "all-device"))))
