"""The simulated serving engine, what is measured on it, and how it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.eval.traces import Requests
from benchmarks.qoe import report
from benchmarks.qoe.__main__ import main
from benchmarks.qoe.machine import (
    EXPECTED_TTFT_S,
    OPT_66B,
    Machine,
    SimulatedRun,
    Simulation,
    Workload,
)
from benchmarks.qoe.simulation import (
    ARRIVALS_CV,
    READERS,
    SCHEDULERS,
    Curve,
    QoeSetting,
    azure_lengths,
    gains,
    learned,
    measure,
    n_points,
    rate_at,
    scheduler,
    sharegpt_lengths,
    simulate_qoe,
    workload,
)
from disco_daemon.errors import ConfigError
from disco_daemon.scheduler.jobs import Capacity, Job
from disco_daemon.scheduler.latency import IterationLatency

# An iteration takes 10 ms, 1 ms for each sequence and prompt token, and 1 us for each cell read.
SMALL = Machine((0.010, 0.001, 0.001, 1e-6), n_cells=400, n_seqs=8, n_host_cells=10_000, swap_cps=20_000.0, n_chunk=16)
ROOMY = Machine((0.010, 0.001, 0.001, 1e-6), n_cells=40_000, n_seqs=64, n_host_cells=0, swap_cps=1.0, n_chunk=16)


def requests(arrived: Sequence[float], prompt: Sequence[int], output: Sequence[int], pace: float = 5.0) -> Workload:
    return Workload(np.array(arrived), np.array(prompt), np.array(output), np.full(len(arrived), pace))


def play(machine: Machine, load: Workload, name: str = "fcfs", quantum: int = 10) -> SimulatedRun:
    latency = IterationLatency(machine.latency)
    return Simulation(machine, load, scheduler(name, latency), latency, quantum).run()


def crowd(n: int = 60, rate: float = 20.0, seed: int = 1) -> Workload:
    """More than SMALL can serve."""
    random = np.random.default_rng(seed)
    arrived = np.cumsum(random.exponential(1 / rate, n))
    return requests(list(arrived), list(random.integers(1, 60, n)), list(random.integers(1, 60, n)))


# --- the engine -------------------------------------------------------------------------------------------------------


def test_one_request_is_prefilled_in_chunks_and_then_gets_a_token_each_iteration() -> None:
    (times,) = play(ROOMY, requests([2.0], [40], [3])).tokens_s
    prefill = 3 * 0.010 + 40 * 0.001  # 16, 16 and 8 tokens; the first token comes with the last chunk
    decode = [0.011 + 41e-6, 0.011 + 42e-6]
    assert times == pytest.approx(2.0 + prefill + np.cumsum([0.0, *decode]))


def test_a_long_prompt_does_not_stop_who_runs() -> None:
    long, running = 64, 30
    played = play(ROOMY, requests([0.0, 0.05], [1, long], [running, 2]))
    gaps = np.diff(played.tokens_s[0])
    chunk = 0.010 + 0.001 + 16 * 0.001 + 100e-6
    assert gaps.max() <= chunk
    assert np.count_nonzero(gaps > 0.02) == long // 16


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_request_gets_all_its_tokens_in_order(name: str) -> None:
    load = crowd()
    played = play(SMALL, load, name)
    assert [len(t) for t in played.tokens_s] == list(load.output)
    assert all((np.diff(t) > 0).all() for t in played.tokens_s)
    assert (played.ttfts() > 0).all()


def test_iterations_skipped_at_once_are_the_same_as_one_by_one() -> None:
    load = crowd(rate=5.0)
    at_once, single = play(ROOMY, load, quantum=1000), play(ROOMY, load, quantum=1)
    assert at_once.n_decisions < single.n_decisions
    for a, b in zip(at_once.tokens_s, single.tokens_s, strict=True):
        assert a == pytest.approx(b)


def telling() -> Requests:
    """Prompts of 20 tokens get 10, prompts of 40 tokens get 50, about."""
    random = np.random.default_rng(3)
    is_long = random.random(800) < 0.5
    return Requests(np.where(is_long, 40, 20), np.where(is_long, 50, 10) + random.integers(0, 5, 800))


def test_jobs_know_the_rest_that_other_answers_foretell_and_what_has_ended_teaches() -> None:
    class Asked:
        """Serves the first that came, and keeps what it was told."""

        def __init__(self) -> None:
            self.rests: dict[object, list[float]] = {}

        def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
            for one in jobs:
                self.rests.setdefault(one.key, []).append(one.expected_rest)
            return list(jobs[: capacity.n_seqs])

    setting, asked = QoeSetting("text", "poisson", 20), Asked()
    load = workload(setting, telling(), 5.0, 1)
    answers = learned(setting, telling(), 1)
    Simulation(ROOMY, load, asked, answers=answers).run()
    for i, prompt in enumerate(load.prompt.tolist()):
        assert asked.rests[i][0] == pytest.approx(52 if prompt == 40 else 12, rel=0.3)
    assert answers.to_json()["samples"][-1][0] in load.output
    blind = Asked()
    Simulation(ROOMY, load, blind).run()
    assert {rest for rests in blind.rests.values() for rest in rests} == {0.0}


def test_what_was_learned_before_a_run_is_of_other_requests() -> None:
    lengths, setting = Requests(np.arange(1, 401), np.arange(1, 401)), QoeSetting("text", "poisson", 60)
    played = workload(setting, lengths, 1.0, 4).prompt
    samples = {prompt for _, _, prompt in learned(setting, lengths, 4).to_json()["samples"]}
    assert samples == set(range(1, 401)) - set(played.tolist())


class Watch:
    """A scheduler that asserts what the engine promises it, and leaves the choice to another."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.rest = scheduler(name, IterationLatency(machine.latency))
        self.machine = machine
        self.n_swapped = self.n_forgotten = 0

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        assert sum(j.n_context for j in jobs if j.resident) <= self.machine.n_cells
        assert all(j.resident for j in jobs if j.waiting_since is None)
        assert all(j.waiting_since is None or j.waiting_since <= now for j in jobs)
        assert all(0 <= j.n_missing <= j.n_context for j in jobs)
        assert all(j.resume_s == 0 for j in jobs if j.resident)
        self.n_swapped += sum(j.resume_s > 0 for j in jobs)
        begun = [j for j in jobs if j.timeline.n_tokens and not j.resident]
        self.n_forgotten += sum(j.n_missing == j.n_context for j in begun)
        return self.rest.choose(jobs, capacity, now)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("n_host_cells", [0, 10_000])
def test_cells_are_never_more_than_there_are(name: str, n_host_cells: int) -> None:
    machine = Machine(SMALL.latency, 400, 8, n_host_cells, 20_000.0, 16)
    watch = Watch(name, machine)
    played = Simulation(machine, crowd(), watch).run()
    if name == "round-robin":
        assert played.n_preempted > 0
        assert (watch.n_swapped > 0) == (n_host_cells > 0)
        assert (watch.n_forgotten > 0) == (n_host_cells == 0)


def test_swapping_costs_its_copies_and_recomputing_its_prefill() -> None:
    load = crowd()
    ends = []
    for swap_cps, n_host_cells in ((1e9, 10_000), (2_500.0, 10_000), (2_500.0, 0)):
        machine = Machine(SMALL.latency, 400, 8, n_host_cells, swap_cps, 16)
        ends.append(max(t[-1] for t in play(machine, load, "round-robin").tokens_s))
    free, copied, computed = ends
    assert free < copied < computed


class Bad:
    """Chooses what it must not: everybody, or nobody."""

    def __init__(self, everybody: bool) -> None:
        self.everybody = everybody

    def choose(self, jobs: Sequence[Job], capacity: Capacity, now: float) -> list[Job]:
        return list(jobs) if self.everybody else []


@pytest.mark.parametrize("everybody", [True, False])
def test_a_scheduler_that_overfills_or_starves_the_engine_is_an_error(everybody: bool) -> None:
    with pytest.raises(RuntimeError, match="the scheduler chose"):
        Simulation(SMALL, requests([0.0] * 20, [30] * 20, [9] * 20), Bad(everybody)).run()


def test_a_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="more KV cells"):
        play(SMALL, requests([0.0], [390], [10]))


def test_the_scheduler_learns_the_latency_from_the_iterations() -> None:
    latency = IterationLatency(tuple(3 * c for c in ROOMY.latency))  # type: ignore[arg-type]
    Simulation(ROOMY, crowd(), scheduler("fcfs", latency), latency).run()
    assert latency.predict(8, 0, 400) == pytest.approx(ROOMY.iteration_s(8, 0, 400), rel=0.05)


def test_the_capacity_is_what_fcfs_serves() -> None:
    lengths = sharegpt_lengths()
    rate = OPT_66B.capacity_rps(lengths.prompt, lengths.output)
    load = workload(QoeSetting("text", "poisson", 1200), lengths, 3 * rate, seed=2)
    played = play(OPT_66B, load)
    done = np.sort([t[-1] for t in played.tokens_s])
    served = 600 / (done[800] - done[200])  # away from the beginning and the end
    assert served == pytest.approx(rate, rel=0.15)


# --- the requests -----------------------------------------------------------------------------------------------------


def test_the_requests_of_a_seed_are_the_same_at_every_rate() -> None:
    lengths, setting = sharegpt_lengths(), QoeSetting("text", "gamma", 50)
    slow, fast = workload(setting, lengths, 1.0, 7), workload(setting, lengths, 2.0, 7)
    assert slow.arrived_s == pytest.approx(2 * fast.arrived_s)
    assert (slow.output == fast.output).all()
    assert (slow.pace_tps == fast.pace_tps).all()
    assert (workload(setting, lengths, 1.0, 8).output != slow.output).any()


@pytest.mark.parametrize("arrivals", ARRIVALS_CV)
def test_gaps_have_the_mean_and_the_variation_asked_for(arrivals: str) -> None:
    gaps = np.diff(workload(QoeSetting("voice", arrivals, 40_000), sharegpt_lengths(), 4.0, 1).arrived_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(ARRIVALS_CV[arrivals], rel=0.05)


def test_readers_have_the_paces_of_their_table() -> None:
    load = workload(QoeSetting("text", "poisson", 20_000), sharegpt_lengths(), 1.0, 1)
    shares, paces = READERS["text"]
    for share, pace in zip(shares, paces, strict=True):
        assert (load.pace_tps == pace).mean() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("setting", [QoeSetting("deaf", "poisson"), QoeSetting("text", "never")])
def test_unknown_readers_or_arrivals_are_an_error(setting: QoeSetting) -> None:
    with pytest.raises(ConfigError, match="readers are text, voice, arrivals poisson, gamma"):
        workload(setting, sharegpt_lengths(), 1.0, 0)


def test_an_unknown_scheduler_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no token scheduler 'lifo'"):
        scheduler("lifo", IterationLatency(SMALL.latency))


def test_lengths_without_a_trace_have_the_published_means() -> None:
    lengths = sharegpt_lengths()
    assert lengths.prompt.mean() == pytest.approx(161, rel=0.02)
    assert lengths.output.mean() == pytest.approx(338, rel=0.02)
    assert lengths.prompt.min() >= 2
    assert (lengths.prompt + lengths.output).max() <= 2048


def test_lengths_of_a_trace_are_those_that_fit(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    rows = "t_s,in_tok,out_tok\n0.0,374,44\n1.5,3000,20\n2.0,2000,48\n2.5,2000,49\n3.0,7,0\n"
    (tmp_path / "common" / "arrivals_azure2023_conv.csv").write_text(rows)
    lengths = azure_lengths(tmp_path)
    assert list(lengths.prompt) == [374, 2000]
    assert list(lengths.output) == [44, 48]


@pytest.mark.parametrize("text", [None, "t_s,in_tok\n0,1\n", "t_s,in_tok,out_tok\n0,a,1\n", "t_s,in_tok,out_tok\n"])
def test_a_trace_without_lengths_is_an_error(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "common").mkdir()
    if text is not None:
        (tmp_path / "common" / "arrivals_azure2023_conv.csv").write_text(text)
    with pytest.raises(ConfigError, match="arrivals_azure2023_conv"):
        azure_lengths(tmp_path)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_measures_are_of_the_readers_side() -> None:
    at_once = SimulatedRun(np.array([1.0]), np.array([5.0]), (1.0 + EXPECTED_TTFT_S + np.arange(10) / 5.0,), 0, 1)
    late = SimulatedRun(np.array([1.0]), np.array([5.0]), (10.0 + np.arange(10) / 50.0,), 3, 1)
    one, two = measure([at_once]), measure([at_once, late])
    assert one["qoe_mean"] == pytest.approx(1.0)
    assert one["qoe_perfect"] == 1.0
    assert one["ttft_p50_s"] == pytest.approx(EXPECTED_TTFT_S)
    assert one["tds_p50"] == pytest.approx(5.0)
    assert two["qoe_perfect"] == 0.5
    assert two["qoe_p10"] < 0.3 < two["qoe_mean"] < 1.0
    assert two["ttft_p90_s"] == pytest.approx(1.0 + 0.9 * 8.0)
    assert two["preemptions_per_request"] == 1.5


def test_throughput_is_of_the_time_in_which_requests_arrive() -> None:
    played = SimulatedRun(np.array([0.0, 4.0]), np.array([5.0, 5.0]), (np.arange(1.0, 9.0), np.array([5.0])), 0, 1)
    assert played.throughput_tps() == pytest.approx(3 / 4)


def curve(name: str, qoes: Sequence[float], **more: float) -> list[Curve]:
    rest = {"throughput_tps": 100.0, "preemptions_per_request": 0.0, **more}
    return [
        {"scheduler": name, "load": i, "rate_rps": 2.0 * i, "qoe_mean": q, **rest} for i, q in enumerate(qoes, start=1)
    ]


def test_the_rate_at_a_quality_lies_between_the_points() -> None:
    assert rate_at(curve("fcfs", [1.0, 0.95, 0.85, 0.3]), 0.9) == pytest.approx(5.0)
    assert rate_at(curve("fcfs", [1.0, 0.99]), 0.9) == 4.0  # a lower bound
    assert rate_at(curve("fcfs", [0.8, 0.7]), 0.9) == 2.0
    assert rate_at(curve("fcfs", [1.0, 0.8, 0.95]), 0.9) == pytest.approx(3.0)  # the first fall counts


def test_gains_are_against_fcfs_at_the_same_rates() -> None:
    ours = curve("andes", [1.0, 0.95, 0.9, 0.6], throughput_tps=95.0, preemptions_per_request=0.4)
    found = gains([*ours, *curve("fcfs", [1.0, 0.8, 0.4, 0.2]), *curve("round-robin", [0.1] * 4)])
    assert found["qoe_gain_max"] == pytest.approx(3.0)
    assert found["rate_gain"] == pytest.approx(6.0 / 3.0)
    assert found["throughput_loss"] == pytest.approx(0.05)
    assert found["preemptions_per_request"] == 0.4


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    ticks: list[int] = []
    random = np.random.default_rng(5)
    lengths = Requests(random.integers(5, 60, 300), random.integers(5, 60, 300))
    settings = (("text", "poisson"), ("voice", "poisson"))
    out = simulate_qoe(
        lengths, settings=settings, loads=(0.3, 1.1, 3.0), n_requests=150, machine=SMALL, tick=lambda: ticks.append(1)
    )
    assert len(ticks) == n_points(2, 3, 4) == len(out["curves"])
    return out


def test_the_result_is_json_with_the_names_others_read(result: dict[str, object]) -> None:
    read = json.loads(json.dumps(result, allow_nan=False))
    assert {"qoe_gain_max", "rate_gain", "throughput_loss", "preemptions_per_request", "curves"} <= set(read)
    for c in read["curves"]:
        assert {"scheduler", "arrivals", "readers", "load", "rate_rps", "qoe_mean", "ttft_p50_s"} <= set(c)
        assert {"tds_p10", "tds_p50", "tds_p90", "stalled_10s", "stall_p99_s"} <= set(c)
    assert read["qoe_gain_max"] == max(s["qoe_gain_max"] for s in read["settings"])
    assert read["rate_gain"] == read["settings"][0]["rate_gain"]


def test_under_overload_the_first_come_are_not_all_that_counts(result: dict[str, object]) -> None:
    curves: list[Curve] = result["curves"]  # type: ignore[assignment]
    at = {(c["scheduler"], c["load"]): c for c in curves if c["readers"] == "text"}
    assert at["fcfs", 0.3]["qoe_mean"] > 0.99
    assert at["fcfs", 3.0]["qoe_mean"] < at["andes", 3.0]["qoe_mean"]
    assert at["andes", 3.0]["ttft_p50_s"] < at["fcfs", 3.0]["ttft_p50_s"]


def test_fewer_readers_stand_still_than_where_anybody_may(result: dict[str, object]) -> None:
    curves: list[Curve] = result["curves"]  # type: ignore[assignment]
    at = {(c["scheduler"], c["load"]): c for c in curves if c["readers"] == "text"}
    assert at["andes", 3.0]["stalled_10s"] <= 0.15 + 1 / 150
    assert at["andes", 3.0]["tds_p10"] > at["andes@1", 3.0]["tds_p10"]
    assert all(c["stalled_10s"] == 0 for c in curves if c["load"] == 0.3)


def test_the_same_seeds_give_the_same_result() -> None:
    lengths = Requests(np.array([30, 50]), np.array([20, 40]))
    one, two = (simulate_qoe(lengths, loads=(2.0,), n_requests=40, machine=SMALL) for _ in range(2))
    assert one == two


def test_the_command_simulates_the_loads_and_the_seed_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    def curves(seed: str) -> list[Curve]:
        given = ["--requests", "20", "--loads", "3,0.5", "--seed", seed]
        assert main(["--simulate", "--json", *given]) == 0
        found: list[Curve] = json.loads(capsys.readouterr().out)["curves"]
        return found

    one = curves("1")
    assert [c["load"] for c in one if c["scheduler"] == "andes" and c["readers"] == "voice"] == [0.5, 3.0]
    assert one == curves("1") != curves("2")


def test_the_summary_tells_every_setting_and_scheduler(result: dict[str, object]) -> None:
    text = report.summary(result)
    for part in ("Figure 10", "Figure 15c", "Table 4", "load 1.1", "stood still", *SCHEDULERS, "by content"):
        assert part in text
    assert "Figure 12" not in text  # no Gamma arrivals were simulated
    assert report.summary({"curves": []}) == "nothing was simulated"


def test_the_markdown_has_a_block_for_each_table(result: dict[str, object]) -> None:
    text = report.markdown(result)
    assert text.count("```text\n") == 7  # gains, two of each setting, two of Table 4
    assert text.count("```") == 14


def test_a_figure_is_drawn_for_each_setting(result: dict[str, object], tmp_path: Path) -> None:
    paths = report.draw_serving(result, tmp_path / "new")
    assert [p.name for p in paths] == ["fig10-qoe-rate.png", "fig15c-voice.png"]
    assert all(imread(p).std() > 0.05 for p in paths)


def test_without_matplotlib_the_error_says_what_to_install(
    result: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="plots"):
        report.draw_serving(result, tmp_path)
    assert report.summary(result)
