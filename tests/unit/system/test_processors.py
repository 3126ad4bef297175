"""Which processors are worth computing on: by trees of `/sys` that others recorded, and by odd ones."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.llama import numa
from disco_daemon.system.control_groups import n_processors
from disco_daemon.system.processors import (
    Core,
    best_cores,
    cores,
    has_avx2,
    n_cores,
    n_nodes,
    node_for,
    shared_cache_bytes,
)

# As recorded for lscpu's tests (util-linux, tests/ts/lscpu/dumps): a phone with Cortex-X3, A715, A710 and A510; and two
# EPYC 7451, a node of memory for each of their eight dies (the masks are lists here, as kernels have them, too).
PHONE = dict(enumerate((280, 280, 280, 855, 855, 855, 855, 1024)))
EPYC_NODES = {node: f"{6 * node}-{6 * node + 5},{6 * node + 48}-{6 * node + 53}" for node in range(8)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def phone(tmp_path: Path) -> Path:
    system = tmp_path / "system"
    for cpu, speed in PHONE.items():
        write(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", str(cpu))
        write(system / "cpu" / f"cpu{cpu}" / "cpu_capacity", str(speed))
        write(system / "cpu" / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq", "2016000" if speed == 280 else "2803200")
    return system


@pytest.fixture
def epyc(tmp_path: Path) -> Path:
    system = tmp_path / "system"
    for cpu in range(96):
        write(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 48},{cpu % 48 + 48}")
        write(system / "cpu" / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq", "2300000")
    for node, cpus in EPYC_NODES.items():
        write(system / "node" / f"node{node}" / "cpulist", cpus)
    write(system / "node" / "possible", "0-7")
    return system


def test_of_a_phone_the_slowest_cores_are_left_out(phone: Path) -> None:
    found = cores(phone, range(8))
    assert [core.speed for core in found] == list(PHONE.values())
    assert [core.cpus for core in best_cores(found)] == [(7,), (3,), (4,), (5,), (6,)]
    assert [core.cpus for core in best_cores(cores(phone, range(3)))] == [(0,), (1,), (2,)], "the mask leaves no others"
    assert n_nodes(found) == 1
    assert node_for(2, found) is None


def test_of_a_server_each_core_counts_once_and_threads_stay_on_a_node_that_has_cores_for_them(epyc: Path) -> None:
    found = cores(epyc, range(96))
    assert len(found) == len(best_cores(found)) == 48
    assert n_nodes(found) == 8
    assert node_for(6, found) == [*range(6), *range(48, 54)]
    assert node_for(7, found) is None
    some = cores(epyc, [*range(4), *range(12, 18)])
    assert node_for(5, some) == list(range(12, 18)), "the first node has four cores that may be used"


def test_intels_efficient_cores_are_left_out_beside_others(tmp_path: Path) -> None:
    # An i7-1260P has processors 0 to 7, two for each of four cores, and eight efficient cores.
    system = tmp_path / "system"
    for cpu in range(16):
        siblings = f"{cpu & ~1}-{cpu | 1}" if cpu < 8 else str(cpu)
        write(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings)
        write(system / "cpu" / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq", "4700000" if cpu < 8 else "3400000")
    write(tmp_path / "cpu_core" / "cpus", "0-7")
    write(tmp_path / "cpu_atom" / "cpus", "8-15")
    assert [core.cpus for core in best_cores(cores(system, range(16)))] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert len(best_cores(cores(system, range(8, 16)))) == 8, "there are no others that may be used"


def test_cores_that_boost_a_little_differently_all_count(tmp_path: Path) -> None:
    for cpu, speed in enumerate((231, 226, 221, 216, 211, 206, 201, 196)):
        write(tmp_path / "cpu" / f"cpu{cpu}" / "acpi_cppc" / "highest_perf", str(speed))
    assert len(best_cores(cores(tmp_path, range(8)))) == 8


def test_what_cannot_be_read_is_one_node_of_equal_cores(tmp_path: Path) -> None:
    assert cores(tmp_path / "none", range(3)) == [Core((cpu,), 0, 1.0) for cpu in range(3)]
    write(tmp_path / "cpu" / "cpu0" / "cpu_capacity", "1024")  # of one alone
    write(tmp_path / "cpu" / "cpu1" / "topology" / "thread_siblings_list", "1-,4")
    assert cores(tmp_path, range(3)) == [Core((cpu,), 0, 1.0) for cpu in range(3)]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=16))
def test_no_other_number_of_the_fastest_cores_is_done_sooner(speeds: list[float]) -> None:
    found = [Core((cpu,), 0, speed) for cpu, speed in enumerate(speeds)]
    best = best_cores(found)
    ordered = sorted(speeds, reverse=True)
    assert [core.speed for core in best] == ordered[: len(best)]
    assert len(best) * best[-1].speed == max((n + 1) * speed for n, speed in enumerate(ordered))


def test_this_machine_has_some_cores_worth_computing_on() -> None:
    assert 1 <= n_cores() <= n_processors()


def test_an_engine_stays_on_a_node_or_lets_llama_cpp_spread_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    two = [Core((cpu,), cpu // 4, 1.0) for cpu in range(8)]
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: done.append(cpus), raising=False)
    monkeypatch.setattr("llama_cpp.llama_numa_init", done.append)
    monkeypatch.setattr(numa, "cores", lambda: two)
    numa.use_nodes(4)
    numa.use_nodes(5)
    monkeypatch.setattr(numa, "cores", lambda: two[:4])
    numa.use_nodes(4)
    assert done == [[0, 1, 2, 3], llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE]


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse4_2 fma avx f16c avx2 bmi2\nbugs\t\t: spectre_v1", True),
        ("flags\t\t: fpu sse4_2 avx f16c avx2", False),
        ("Features\t: fp asimd evtstrm aes", False),
        ("", False),
    ],
)
def test_a_processor_says_whether_it_has_avx2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has: bool
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "cpuinfo").write_text(text)
    assert has_avx2(tmp_path / "cpuinfo") is has


def test_the_caches_that_cores_share_are_added_up_once_each(tmp_path: Path) -> None:
    for cpu in range(8):
        place = tmp_path / "cpu" / f"cpu{cpu}" / "cache" / "index3"
        place.mkdir(parents=True)
        (place / "size").write_text("32768K\n")
        (place / "shared_cpu_list").write_text(f"{cpu // 4 * 4}-{cpu // 4 * 4 + 3}\n")
    assert shared_cache_bytes(tmp_path) == 2 * 32 << 20
    (tmp_path / "cpu" / "cpu0" / "cache" / "index3" / "size").write_text("much")
    assert shared_cache_bytes(tmp_path / "nowhere") == 0
