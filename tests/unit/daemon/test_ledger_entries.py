"""The traces of a cost without an answer: an embedding's or a probe's row, its sums, and its metrics, to the column."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disco_daemon.api.control.metrics import Metrics
from disco_daemon.conductor import Privacy
from disco_daemon.conductor.traces import Traces
from disco_daemon.config.schema import Config, DeviceSettings, ServerSettings
from disco_daemon.daemon import assembly
from disco_daemon.daemon.assembly import Assembly, Shared
from disco_daemon.daemon.endpoints import make_endpoints
from disco_daemon.daemon.runtime import Runtime
from disco_daemon.daemon.tasks import prober
from disco_daemon.daemon.tasks.loop_monitor import LoopMonitor
from disco_daemon.endpoints.base import Endpoint
from disco_daemon.errors import RequestError
from disco_daemon.machines.split.partner_service import Partner
from disco_daemon.store import History
from disco_daemon.types import Embedding, Given, Side, TextTask, Usage
from tests.fixtures.clock import StoppedClock

WAIT_S = 30.0
BEGAN = 1_700_000_000.5
DAY = datetime.fromtimestamp(BEGAN).date().isoformat()  # noqa: DTZ006 - the day here, as a user sees it
SERVER = ServerSettings("http://127.0.0.1:9/v1", "large", input_usd_per_mtok=1.0, output_usd_per_mtok=4.0)
SETTINGS = Config(server=SERVER, device=DeviceSettings(enabled=False, watts=10.0, usd_per_kwh=3.6))


class Embedder:
    """A device that takes a second of the clock, and half a second of computing, for each text but a bad one."""

    side, model = Side.DEVICE, "tiny"
    adapters = continuation = can_hold = resumption = known_since = capabilities = (
        False  # an endpoint is known by the names of all that it can do
    )
    refuses = overlap_of = may_serve = readiness = count = generate = status = str

    def __init__(self, clock: StoppedClock) -> None:
        self.clock = clock

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        del task
        (given,) = texts
        self.clock.at += 1.0
        if given == "bad":
            raise RequestError("no such text", code="too_bad")
        usage.prompt_tokens += len(given)
        usage.busy_s += 0.5
        return Embedding((b"",), len(given))

    async def start(self) -> None: ...
    async def close(self) -> None: ...


@dataclass
class Books:
    """A daemon's parts without its doors, and what they have written down."""

    runtime: Runtime
    shared: Shared

    async def embed(self, *texts: str, n: int | None = None) -> None:
        """Ask for the embeddings, and leave after `n` of them."""
        async with aclosing(self.runtime.conductor.embed(texts, TextTask(), "disco", "e-1")) as found:
            async for _ in found:
                n = None if n is None else n - 1
                if n == 0:
                    break

    def rows(self, table: str) -> list[dict[str, Any]]:
        self.shared.history.flush(WAIT_S)
        with closing(sqlite3.connect(self.shared.history.path)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]

    def counted(self) -> dict[str, float]:
        """Every sample of /metrics that is not 0, but for the process's own and the moments of creation."""
        body, _ = self.shared.metrics.render()
        samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
        return {
            " ".join([s.name, *(f"{name}={value}" for name, value in sorted(s.labels.items()))]): s.value
            for s in samples
            if s.value and not s.name.startswith(("process_", "python_")) and not s.name.endswith("_created")
        }


@pytest.fixture
async def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Books]:
    monkeypatch.setattr("disco_daemon.conductor.embedding.AT_A_TIME", 1)
    clock, metrics = StoppedClock(), Metrics()
    clock.at = BEGAN

    def endpoints(*made_of: Any, **more: Any) -> dict[Side, Any]:
        return {**make_endpoints(*made_of, **more), Side.DEVICE: Embedder(clock)}

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(assembly, "make_endpoints", endpoints)
    with History(tmp_path / "history.sqlite") as history:
        shared = Shared(clock, history, metrics, LoopMonitor(clock), Privacy(), Traces(), tmp_path / "servers")
        runtime = Runtime(Assembly(shared), SETTINGS, tmp_path / "config.toml", Partner(clock, tmp_path / "peer"))
        await runtime.keeper.start()
        learned = runtime.parts.planner.knowledge.to_json()
        yield Books(runtime, shared)
        assert runtime.parts.planner.knowledge.to_json() == learned, "there is nothing to learn from a cost"
        await runtime.keeper.end()


def request(**changes: Any) -> dict[str, Any]:
    """The row of an embedding of two texts, 7 tokens together, but for `changes`."""
    return {
        "id": 1,
        "request_id": "e-1",
        "created": BEGAN,
        "model": "disco",
        "policy": "embedding",
        "plan_device_s": 0.0,
        "plan_server_s": None,
        "prompt_tokens": 7,
        "winner": "device",
        "finish_reason": "embedding",
        "error": None,
        "ttft_s": None,
        "duration_s": 2.0,
        "handoffs": 0,
        "stopped": None,
        "device_tokens": 0,
        "server_tokens": 0,
        "cost_usd": pytest.approx(1e-5),
        "energy_j": 10.0,
        "prompt": None,
        "answer": None,
        "qoe": None,
        "ttlt_s": None,
        "largest_gap_s": None,
        "stalled": None,
        "tbt_p50_s": None,
        "tbt_p99_s": None,
        "delivery": "reserve",
        "moves": "[]",
        "server_usd": 0.0,
        "day": DAY,
        "key": "",
        "used_prompt_tokens": None,
        "rule": "",
        "kind": "",
        "followed": None,
        "private": 0,
        "teaches_of": None,
        "server": None,
    } | changes


def sample(**changes: Any) -> dict[str, Any]:
    """The row of the device's work on them, but for `changes`."""
    return {
        "id": 1,
        "request": 1,
        "created": BEGAN,
        "side": "device",
        "model": "tiny",
        "started_s": 0.0,
        "ttft_s": 2.0,
        "censored": 1,
        "prompt_tokens": 7,
        "processed_tokens": 7,
        "completion_tokens": 0,
        "busy_s": 1.0,
        "error": None,
        "load_s": 0.0,
        "n_busy": 0,
        "continued": 0,
        "disturbed": 1,
        "bill_usd": 0.0,
        "energy_j": 10.0,
        "unseen_tokens": 0,
        "server": None,
    } | changes


def counted(answer: str, attempt: str, side: str, **values: float) -> dict[str, float]:
    found = {
        f"disco_answers_total {answer}": 1.0,
        f"disco_attempts_total endpoint={side} error={attempt}": 1.0,
        f"disco_attempts_censored_total endpoint={side}": 1.0,
    } | values
    return {name: pytest.approx(value) for name, value in found.items()}  # type: ignore[misc]


async def test_an_embedding_is_booked_as_a_whole_request_of_the_device(books: Books) -> None:
    await books.embed("four", "abc")
    assert books.rows("requests") == [request()]
    assert books.rows("ttft_samples") == [sample()]
    assert books.shared.history.days(9) == [{"day": DAY, "requests": 1, "server_usd": 0.0, "energy_j": 10.0}]
    assert books.shared.history.totals()["requests"] == 1
    assert books.runtime.parts.spending.caps.spent(BEGAN).wh_today == pytest.approx(10.0 / 3600)
    assert books.counted() == counted(
        "endpoint=device error=none finish=embedding", "none", "device",
        **{"disco_tokens_total endpoint=device kind=prompt": 7.0, "disco_cost_usd_total": 1e-5,
           "disco_energy_joules_total": 10.0},
    )  # fmt: skip


async def test_an_embedding_that_fails_is_booked_with_what_was_done_till_then(books: Books) -> None:
    with pytest.raises(RequestError, match="no such text"):
        await books.embed("four", "bad", "abc")
    changes = {"prompt_tokens": 4, "energy_j": 5.0, "error": "too_bad"}
    cost = pytest.approx(5e-6)
    assert books.rows("requests") == [request(winner=None, finish_reason=None, cost_usd=cost, **changes)]
    assert books.rows("ttft_samples") == [sample(processed_tokens=4, busy_s=0.5, **changes)]
    assert books.shared.history.days(9) == [{"day": DAY, "requests": 1, "server_usd": 0.0, "energy_j": 5.0}]
    assert books.shared.history.totals()["errors"] == 1
    assert books.counted() == counted(
        "endpoint=none error=too_bad finish=none", "too_bad", "device",
        **{"disco_tokens_total endpoint=device kind=prompt": 4.0, "disco_cost_usd_total": 5e-6,
           "disco_energy_joules_total": 5.0},
    )  # fmt: skip


async def test_an_embedding_whose_client_leaves_is_booked_as_cancelled(books: Books) -> None:
    await books.embed("four", "abc", n=1)
    changes = {"prompt_tokens": 4, "energy_j": 5.0}
    cost = pytest.approx(5e-6)
    assert books.rows("requests") == [request(finish_reason="cancelled", duration_s=1.0, cost_usd=cost, **changes)]
    assert books.rows("ttft_samples") == [sample(processed_tokens=4, busy_s=0.5, ttft_s=1.0, **changes)]
    assert books.counted() == counted(
        "endpoint=device error=none finish=cancelled", "none", "device",
        **{"disco_tokens_total endpoint=device kind=prompt": 4.0, "disco_cost_usd_total": 5e-6,
           "disco_energy_joules_total": 5.0},
    )  # fmt: skip


async def probed(books: Books, monkeypatch: pytest.MonkeyPatch, usage: Usage) -> None:
    """Let the prober ask the server, which uses that much."""

    async def probe(server: Endpoint, clock: StoppedClock, *, spent: Usage) -> None:
        spent.prompt_tokens, spent.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        clock.at += 3.0

    monkeypatch.setattr(prober, "probe", probe)
    found = books.runtime.parts.prober
    assert isinstance(found, prober.Prober)
    await asyncio.wait_for(found._probe(), WAIT_S)


async def test_a_probe_is_booked_as_a_request_of_its_own_at_the_server(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    await probed(books, monkeypatch, Usage(100, 50))
    assert books.rows("requests") == [
        request(
            request_id="probe", created=BEGAN + 3.0, model="large", policy="probe",
            plan_device_s=None, plan_server_s=0.0, prompt_tokens=100, winner=None, finish_reason="probe",
            duration_s=0.0, cost_usd=3e-4, server_usd=3e-4, energy_j=0.0, server="server",
        )
    ]  # fmt: skip
    assert books.rows("ttft_samples") == [
        sample(
            created=BEGAN + 3.0, side="server", model="large", ttft_s=0.0, prompt_tokens=100, processed_tokens=100,
            completion_tokens=50, busy_s=0.0, bill_usd=3e-4, energy_j=0.0, server="server",
        )
    ]  # fmt: skip
    assert books.shared.history.days(9) == [{"day": DAY, "requests": 1, "server_usd": 3e-4, "energy_j": 0.0}]
    assert books.runtime.parts.spending.caps.spent(BEGAN).usd_today == pytest.approx(3e-4)
    assert books.counted() == counted(
        "endpoint=none error=none finish=probe", "none", "server",
        **{"disco_tokens_total endpoint=server kind=prompt": 100.0,
           "disco_tokens_total endpoint=server kind=completion": 50.0, "disco_cost_usd_total": 3e-4,
           "disco_server_usd_total": 3e-4},
    )  # fmt: skip


async def test_a_probe_that_cost_nothing_leaves_nothing(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    await probed(books, monkeypatch, Usage())
    assert books.rows("requests") == books.rows("ttft_samples") == books.shared.history.days(9) == []
    assert books.counted() == {}
