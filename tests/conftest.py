"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Threads of an engine wait for each other without turning round and round: on a machine whose processors are all busy
# that takes six times as long. It is read when llama.cpp is loaded, here and in processes that tests start.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# No test of ours asserts how long something takes; on a busy machine one example may take seconds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

WHOLE_MACHINE = ("tests/e2e/", "tests/faults/")  # they start processes that compute, and look at the clock
# These ask what comes out, not when: they run in the other worker, or the first one would take twice as long.
BESIDE = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "bad_requests", "bench_split", "confinement", "context", "continuations", "doctor", "doors", "embeddings",
        "engine_exact", "every_route", "exit_segment", "exits", "fleet_again", "fleet_answers", "fleet_host", "imports",
        "install", "keys", "launcher", "layer_states", "lora", "money", "private", "private_marks", "peer_link",
        "peer_pairing", "peer_strangers", "profile", "pull", "reloads", "same_texts", "segment_model", "service_live",
        "setup", "soak", "speculate", "spill", "split_ahead", "split_check", "split", "split_draft", "split_engines",
        "split_modes", "split_whole", "structured", "thinking", "tiny_models", "tools", "trace", "tui_terminal", "tune",
        "whatif",
    )
)  # fmt: skip
# Each has a simulation as its fixture, which takes longer than its tests.
SIMULATED = tuple(
    f"tests/unit/test_{name}.py" for name in ("chats", "report", "simulate", "simulate_handoff", "simulate_scheduler")
)


def pytest_configure() -> None:
    """Let the worker whose tests look at the clock go first: it gets the largest scope, and that is `machine`."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        os.nice(5)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[str]:
    """Where the daemons of the tests have their Unix sockets, and nobody else's: a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="disco-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
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
        if nodeid.startswith((*BESIDE, *SIMULATED)):
            return nodeid.partition("::")[0]  # a model is loaded once, or a simulation run
        return "machine" if nodeid.startswith(WHOLE_MACHINE) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneAtATime:
    """The hook of xdist."""
    return OneAtATime(config, log)
