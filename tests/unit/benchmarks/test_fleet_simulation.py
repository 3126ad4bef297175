"""The simulation of a fleet: times that can be reckoned by hand, and nothing lost on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from benchmarks.fleet.__main__ import asked, named_figures
from benchmarks.fleet.decisions import large_fleet
from benchmarks.fleet.figures import (
    ASKED,
    figures,
    flow_gain,
    paper_tables,
    planned_flow,
    run_all,
    run_system,
    two_instances_flow,
)
from benchmarks.fleet.fleet_constants import LLAMA_13B, LLAMA_70B, MIB, RATES_HIGH, RATES_LOW, Constants
from benchmarks.fleet.machines import Flow, Gpu, WholeModel
from benchmarks.fleet.queue import Request, deal, make_requests, serve_continuously, serve_in_batches

GPU = Gpu(LLAMA_13B, Constants())


@dataclass
class Clockwork:
    """An engine that takes a second for any iteration."""

    room_tokens: float = 1e9
    max_sequences: int = 100

    def step_s(self, n_running: int, n_rows: int, n_context: float) -> float:
        return 1.0


def test_every_constant_has_a_source() -> None:
    assert all(len(source) > 10 for source in Constants.sources().values())
    assert Constants().moved("crossing_s", 0.7) == replace(Constants(), crossing_s=0.7 * Constants().crossing_s)


def test_the_models_have_the_sizes_that_the_paper_tells() -> None:
    assert LLAMA_13B.layer_bytes / MIB == pytest.approx(605)
    assert LLAMA_13B.weight_bytes / 1e9 == pytest.approx(26.0, abs=0.1)
    assert LLAMA_70B.weight_bytes / 1e9 == pytest.approx(138, abs=0.5)
    assert paper_tables()["table_1"]["layer"]["gflop"] == pytest.approx(163.74, abs=0.02)


def test_an_answer_alone_takes_its_tokens() -> None:
    request = Request(5.0, 10, 7)
    served = serve_continuously(Clockwork(), Constants(), [request])
    assert request.ended_s == pytest.approx(12.0)
    assert served.peak_tokens == 17


def test_answers_join_a_running_batch_and_leave_it_when_they_end() -> None:
    first, second = Request(0.0, 1, 10), Request(2.5, 1, 3)
    serve_continuously(Clockwork(), Constants(), [first, second])
    assert (first.ended_s, second.ended_s) == (10.0, 6.0)  # it joins after the third iteration


def test_a_static_batch_ends_with_its_longest_answer() -> None:
    requests = [Request(0.0, 1, 2), Request(0.0, 1, 9), Request(1.0, 1, 1)]
    serve_in_batches(Clockwork(), requests, 2)
    assert [one.ended_s for one in requests] == [9.0, 9.0, 10.0]


def test_a_static_batch_that_outgrows_the_memory_comes_again_in_halves() -> None:
    requests = [Request(0.0, 10, 20) for _ in range(4)]
    served = serve_in_batches(Clockwork(room_tokens=70), requests, 4)
    assert served.n_out_of_memory == 1
    assert [one.ended_s for one in requests] == [27.0, 27.0, 47.0, 47.0]  # seven iterations were in vain


def test_nothing_is_lost_where_memory_is_short() -> None:
    requests = make_requests(20.0, 1, Constants(), horizon_s=10.0)
    served = serve_continuously(Clockwork(room_tokens=900), Constants(), requests)
    assert served.n_preempted > 0
    assert served.peak_tokens <= 900
    assert all(one.ended_s >= one.arrived_s + one.n_answer for one in requests)


def test_engines_side_by_side_get_every_request_once() -> None:
    requests = make_requests(10.0, 2, Constants())
    parts = deal(requests, 4)
    assert sorted(map(id, requests)) == sorted(id(one) for part in parts for one in part)


def test_lengths_are_alpacas() -> None:
    requests = make_requests(100.0, 3, Constants(), horizon_s=200.0)
    assert sum(one.n_prompt for one in requests) / len(requests) == pytest.approx(19.31, rel=0.03)
    assert sum(one.n_answer for one in requests) / len(requests) == pytest.approx(56, rel=0.05)  # cut at 256


def turn_flights(times: list[float], n_flights: int, n_rounds: int) -> float:
    """Play flights that go round over hosts, each host serving one at a time: the time of a round."""
    free = [0.0] * len(times)
    ready = [0.0] * n_flights
    for _ in range(n_rounds):
        for flight in range(n_flights):
            for host, time in enumerate(times):
                free[host] = ready[flight] = max(free[host], ready[flight]) + time
    return max(ready) / n_rounds


@pytest.mark.parametrize("n_flights", [1, 2, 3, 5, 8])
def test_the_round_of_flights_is_what_playing_them_gives(n_flights: int) -> None:
    constants = replace(Constants(), step_overhead_s=1e-9, crossing_s=0.0, link_bytes_per_s=1e15)
    flow = Flow(Gpu(LLAMA_13B, constants), (10.0, 20.0, 10.0), (0.0, 0.0, 0.0), 2.0, (1e10,) * 3, 1)
    one_flight = flow.step_s(8, 8, 800.0)
    times = [share * one_flight / 40 for share in (10, 20, 10)]
    closed = max(sum(times), n_flights * max(times))
    assert turn_flights(times, n_flights, 400) == pytest.approx(closed, rel=0.02)


def test_a_flow_over_one_gpu_is_the_whole_model() -> None:
    whole = WholeModel(GPU)
    flow = Flow(GPU, (40.0,), (1.0,), 0.0, (GPU.constants.usable_bytes - LLAMA_13B.weight_bytes,), 1)
    assert flow.step_s(50, 60, 4000.0) == pytest.approx(whole.step_s(50, 60, 4000.0))
    assert flow.room_tokens == pytest.approx(whole.room_tokens)


def test_the_fleet_computes_every_layer_once_a_token() -> None:
    for flow in (planned_flow(LLAMA_13B, Constants(), 50.0), two_instances_flow(Constants())):
        assert sum(flow.layers) == pytest.approx(40)
        assert sum(flow.heads) == pytest.approx(1)
        assert flow.room_tokens > 1000


def test_a_model_that_does_not_fit_has_no_figures_and_no_error() -> None:
    constants = Constants().moved("usable_bytes", 0.7)
    assert run_system(LLAMA_70B, "fleet", 3.0, 1, constants).throughput == 0
    assert run_system(LLAMA_70B, "hft", 3.0, 1, constants).throughput == 0


def test_flights_beat_scatter_and_gather_with_the_same_replicas() -> None:
    assert (flow_gain(Constants())["flow_gain"] or 0) > 1.5


def test_the_figures_have_the_names_that_other_programs_read() -> None:
    found = figures(run_all(Constants(), (1,)), Constants())
    loads = {"13b_low", "13b_high", "70b_low", "70b_high"}
    assert set(found["versus_hft"]) == set(found["versus_vllm"]) == loads
    assert {"throughput", "latency_cut"} == set(found["versus_hft"]["13b_low"])
    assert {"throughput", "memory"} <= set(found["versus_4_instances"])
    assert {"oom_ratio", "slo_rate_ratio", "flow_gain"} <= set(found)
    names = {name for name, _ in named_figures(found)}
    goals = {f"{group}.{last}".rstrip(".") for group, lasts in ASKED.items() for last in lasts}
    assert goals <= names
    assert asked("slo_rate_ratio") == 1.6
    assert asked("versus_4_instances.memory") == 0.54
    assert len(RATES_LOW) + len(RATES_HIGH) == 7


def test_the_largest_fleet_is_one_of_sixteen_hosts_and_eighty_layers() -> None:
    assert (len(large_fleet().hosts), large_fleet().model.n_layers) == (16, 80)
