"""Our changes of llama.cpp's kernels, asked through ggml as llama.cpp asks them, and the check that asks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.engine.checked_operations import CheckedGraph
from benchmarks.engine.kernel_products import Products
from benchmarks.engine.kernels import Check, of_lengths, table_of_lengths
from disco_daemon.engine import wire
from disco_daemon.engine.llama.ggml import F32, Ggml
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.rounding import TILED
from disco_daemon.engine.measure.machine_speed import NAMES, MachineBench
from tests.fixtures.tiny_models import MODELS, tiny_model

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0  # it takes 3 s on an idle machine
N_CASES = 600  # of a build before the mend twenty are wrong


def test_products_and_attention_are_right_for_any_shape_and_number_of_threads() -> None:
    """In a process of its own: ggml ends the one in which it finds a fault."""
    command = [sys.executable, "-m", "benchmarks.engine.kernels", "--check", "--json", "--cases", str(N_CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = msgspec.json.decode(done.stdout)
    assert (found["shown"], found["wrong"], done.returncode) == ([], 0, 0)
    assert found["cases"] == N_CASES
    assert found["threads"] == [1, 2, 4, 8]
    assert set(found["operations"]) == {"mul_mat", "mul_mat_id", "flash_attn_ext"}


def test_a_row_has_the_same_bits_alone_and_among_others_whatever_the_type_of_weights() -> None:
    """As an engine computes exact answers: without kernels that round by how many rows there are (`TILED`)."""
    command = [sys.executable, "-c", "import tests.e2e.engine.test_kernels as it; print(it.differing())"]
    environment = os.environ | {TILED: "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def differing() -> list[str]:
    """The types of weights with which a row has other bits among others than alone, each with the shape."""
    products, k, n_together, found = Products(Ggml.installed(), 1), 512, (2, 3, 8, 13), []
    given = np.random.default_rng(0).normal(0, 1, (13, k)).astype(np.float32)
    for kind in products.kinds:
        of = products.weights(kind)
        for m, n_threads in itertools.product((64, 20, 7), (1, 2)):
            graph = CheckedGraph(products.ggml, 32)
            for rows in [*(given[:n].copy() for n in n_together), *(row[None].copy() for row in given)]:
                weights, _ = of.tensor(graph, (k, m, 1, 1), (k, k * m, k * m), 0)
                node = graph.tensor(F32, (k, len(rows), 1, 1), (4, 4 * k, rows.nbytes, rows.nbytes), rows)
                nothing = np.zeros((1, 1, len(rows), m))
                graph.add("a product", graph.call("ggml_mul_mat", weights, node), nothing, nothing)
            results = [one[0, 0] for one in graph.results(n_threads)]
            alone = np.concatenate(results[len(n_together) :])
            found += [
                f"{of.packing.name}: {m} by {n} rows, {n_threads} threads"
                for n, together in zip(n_together, results, strict=False)
                if together.tobytes() != alone[:n].tobytes()
            ]
            graph.close()
    return found


def scaled(made: CheckedGraph, ne: tuple[int, int, int], n_factors: int, random: np.random.Generator) -> None:
    """Add the product of rows, number by number, with rows of `n_factors` numbers, which are repeated."""
    k, m, slices = ne
    rows, factors = (random.normal(0, 1, (1, slices, m, n)).astype(np.float32) for n in (k, n_factors))
    nodes = [
        made.tensor(F32, (n, m, slices, 1), (4, 4 * n, 4 * n * m, 4 * n * m * slices), each)
        for n, each in ((k, rows), (n_factors, factors))
    ]
    expected = (rows * np.tile(factors, k // n_factors)).astype(float)
    made.add(f"{n_factors} of {k}", made.call("ggml_mul", *nodes), expected, np.zeros(expected.shape))


def test_numbers_are_multiplied_with_one_for_a_row_or_a_part_of_it_to_the_bit() -> None:
    made, random = CheckedGraph(Ggml.installed(), 32), np.random.default_rng(4)
    for ne in ((1, 1, 1), (7, 3, 1), (64, 1, 2), (96, 5, 3)):
        for n_factors in {1, ne[0], ne[0] // 2 if ne[0] % 2 == 0 else 1}:
            scaled(made, ne, n_factors, random)
    for n_threads in (1, 2, 4):
        assert made.compute(n_threads) == []
    made.close()


def test_one_number_for_a_row_takes_no_longer_than_a_row_of_them() -> None:
    """What experts come to is so multiplied; number by number it took many times as long. By processor time."""
    least = {}
    for n_factors in (1, 1024):
        made = CheckedGraph(Ggml.installed(), 8)
        scaled(made, (1024, 256, 1), n_factors, np.random.default_rng(4))
        times = []
        for _ in range(20):
            began = time.thread_time()
            made.run(1)
            times.append(time.thread_time() - began)
        least[n_factors] = min(times)
        made.close()
    assert least[1] < 2 * least[1024], least


def test_lengths_with_which_a_packing_falls_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(bench: MachineBench, number: int, lengths: Sequence[int], n: int) -> list[float]:
        return [7e9 if (NAMES[number], n, length) == ("Q6_K", 1, 9728) else 21e9 for length in lengths]

    monkeypatch.setattr(MachineBench, "bytes_per_s", rates)
    found = of_lengths(MachineBench(1, free_bytes=0), (2048, 4096, 9728))
    assert found["gb_per_s"]["Q6_K, 1 row"] == [21, 21, 7]
    assert found["falls"] == ["Q6_K, 1 row of 9728"]
    assert table_of_lengths(found).endswith("falls: Q6_K, 1 row of 9728")


@pytest.fixture
def graph() -> CheckedGraph:
    """One product of ones, 6 weights by 3 rows in 2 slices, with a gap behind each row of the result."""
    made = CheckedGraph(Ggml.installed(), 8)
    ones = np.ones(1000, np.float32)
    weights = made.tensor(F32, (8, 6, 1, 1), (4, 32, 192, 192), ones)
    rows = made.tensor(F32, (8, 3, 2, 1), (4, 32, 96, 192), ones)
    expected = np.full((1, 2, 3, 6), 8.0)
    made.add("ones", made.call("ggml_mul_mat", weights, rows), expected, expected * 1e-5, (2, 0, 0))
    return made


def test_the_check_finds_what_is_never_written_what_is_wrong_and_what_is_written_beside(graph: CheckedGraph) -> None:
    assert graph.compute(2) == []
    [one] = graph.operations

    def fault(at: tuple[int, ...] | None, value: float, beside: int | None = None) -> str:
        one.poison()
        one.numbers[...] = one.expected
        if at is not None:
            one.numbers[at] = value
        if beside is not None:
            one.memory[beside] = 0.0
        return one.fault()

    assert fault(None, 0.0) == ""
    assert fault((0, 1, 2, 5), np.nan) == "1 of 36 numbers never written"
    assert fault((0, 0, 0, 0), 8.001).startswith("1 of 36 numbers wrong")
    assert fault((0, 0, 0, 0), np.inf).startswith("1 of 36 numbers wrong")
    assert fault(None, 0.0, 6) == "something is written beside the result"  # the gap behind the first row
    assert fault(None, 0.0, -1) == "something is written beside the result"
    graph.close()


def test_a_wrong_expectation_is_told_for_each_number_of_threads() -> None:
    check = Check(Ggml.installed(), 5)
    graph = check.graph(0, 3)
    graph.operations[1].expected += 1.0
    for n in (1, 3):
        assert [name for name, _ in graph.compute(n)] == [graph.operations[1].name]
    graph.close()


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_any_kind_gives_the_same_bits_by_any_number_of_threads(kind: str, tmp_path: Path) -> None:
    """With several answers at a time, which some models multiply in slices of one operation."""
    path = tiny_model(tmp_path / f"{kind}.gguf", kind)
    load = wire.Load(model_path=str(path), n_ctx=64, n_threads=1, n_gpu_layers=0, n_cells=512, exact=True)
    llama = Llama(load, AbortFlag(), warm=False)
    found = []
    for n_threads in (1, 2, 3, 4):
        llama.n_threads = llama.n_threads_batch = n_threads
        llama.clear()
        for at in (0, 1, 2):
            assert llama.decode([(100 + 31 * seq + 7 * at, at, seq, True) for seq in range(4)]) == 0
        found.append(np.stack([llama.logits(seq).copy() for seq in range(4)]))
    llama.close()
    assert np.isfinite(found[0]).all()
    for others in found[1:]:
        assert np.array_equal(others, found[0])
