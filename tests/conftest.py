"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.fixtures import forked

# Threads of an engine wait for each other without turning round and round: on a machine whose processors are all busy
# that takes six times as long. It is read when llama.cpp is loaded, here and in processes that tests start.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# No test of ours asserts how long something takes; on a busy machine one example may take seconds, and making one too.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

TESTS = Path(__file__).resolve().parent
# Tests with daemons, engines and servers: a file's run in one worker, and share what they have started.
PROCESSES = ("tests/e2e/", "tests/faults/")
# These look at the clock, or at who was first: they run one after the other, in the first worker. All others ask what
# comes out, not when.
CLOCKED = tuple(
    f"tests/{name}.py"
    for name in (
        "e2e/api/test_bad_bodies", "e2e/engine/test_bench_engine", "e2e/machines/test_bench_fleet_pressure",
        "e2e/conductor/test_bench_handoff", "e2e/engine/test_bounds", "e2e/conductor/test_cancelled",
        "e2e/cli/test_cli", "e2e/api/test_completions", "e2e/api/test_counts", "e2e/engine/test_early_engine",
        "e2e/engine/test_engine", "e2e/engine/test_engine_scheduling", "e2e/machines/test_fleet_pressure",
        "e2e/conductor/test_handoff", "e2e/conductor/test_hedge", "e2e/api/test_infill", "e2e/conductor/test_insurance",
        "e2e/conductor/test_keep_alive", "e2e/daemon/test_learning", "e2e/conductor/test_link",
        "e2e/engine/test_next_turn", "e2e/conductor/test_pauses", "e2e/conductor/test_race", "e2e/engine/test_readings",
        "e2e/conductor/test_resting_sources", "e2e/api/test_signs_of_life", "e2e/api/test_slow_clients",
        "e2e/daemon/test_stopping", "e2e/api/test_streams", "faults/test_faults", "faults/test_hedge",
        "faults/test_kept_connections", "faults/test_thoughts", "faults/test_tui_store_kill",
    )
)  # fmt: skip
# Each has a simulation or a compiled library as its fixture, which takes longer than its tests; or one of its tests
# takes a minute, and is not to be begun last, when the other workers are about to have nothing left.
PREPARED = tuple(
    f"tests/unit/{name}.py"
    for name in (
        "benchmarks/test_chats", "benchmarks/test_report", "benchmarks/test_simulate",
        "benchmarks/test_simulate_handoff", "benchmarks/test_simulate_scheduler", "native/test_exact_attention",
        "native/test_products", "scheduler/test_scheduler_policy",
    )
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Let the worker whose tests look at the clock go first: it gets the largest scope, and that is `clock`.

    Each worker begins to collect elsewhere, so that a test file whose assertions pytest has to rewrite, which takes
    most of the time in a fresh checkout, is rewritten by one of them and read by the others.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if number:
        os.nice(5)
        if [Path(arg).resolve() for arg in config.args] == [TESTS]:
            files = sorted(map(str, TESTS.rglob("test_*.py")))
            begin = number * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
            config.args = files[begin:] + files[:begin]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files in one order, wherever a worker has begun: xdist wants the same list of all."""
    items.sort(key=lambda item: item.path)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[str]:
    """Where the daemons of the tests have their Unix sockets, and nobody else's: a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="disco-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        forked.begin()
        yield folder


class OneAtATime(LoadScopeScheduling):  # type: ignore[misc]
    """Tests that look at the clock run one after the other, in the first of xdist's workers; the rest beside them.

    Not by xdist's `loadgroup`: xdist 3.8 writes the group into an attribute that pytest 9.2 no longer has.
    """

    @property
    def nodes(self) -> list[WorkerController]:
        """The workers, the first one first: xdist has them in the order in which they came up."""
        return sorted(super().nodes, key=lambda node: int(node.gateway.id.removeprefix("gw")))

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(CLOCKED):
            return "clock"
        if nodeid.startswith((*PROCESSES, *PREPARED)):
            return nodeid.partition("::")[0]  # a model is loaded once, a simulation run, a library compiled
        return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneAtATime:
    """The hook of xdist."""
    return OneAtATime(config, log)
