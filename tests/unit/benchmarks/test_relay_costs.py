"""The table of what a request through the relay costs: each look at the stack belongs to one step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.relay import costs
from benchmarks.relay.costs import REST, STEPS, costs_of, measure, step_of, table
from disco_daemon.bench.child import BenchError

ROOT = Path(costs.__file__).parents[2]
LOOP = ("/lib/asyncio/events.py:_run", "/lib/asyncio/base_events.py:_run_once", "/x/disco_daemon/cli/up.py:run")
FILES = r"/(api|conductor|dispatch|endpoints|delivery)/\(?([\w|]+)\)?\\.py"  # in a step's expression
PARSE, SSE, RECORD = STEPS[0].name, STEPS[-3].name, STEPS[-2].name


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        (("/x/disco_daemon/api/bodies.py:convert", "/x/disco_daemon/api/app.py:_chat"), PARSE),
        # A socket's write is of the step that writes, money and estimates are of whoever asks.
        (
            ("/lib/asyncio/selector_events.py:write", "/x/disco_daemon/api/sse.py:_write", "/x/aiohttp/web_app.py:_h"),
            SSE,
        ),
        (("/x/disco_daemon/money/caps.py:_roll", "/x/disco_daemon/conductor/record.py:settle"), RECORD),
        (("/x/disco_daemon/estimation/survival.py:at", "/x/disco_daemon/dispatch/planner.py:settle"), RECORD),
        (("/x/disco_daemon/estimation/survival.py:at", "/x/disco_daemon/dispatch/planner.py:_preview"), "plan"),
        (("/x/aiohttp/connector.py:connect", "/x/disco_daemon/endpoints/server_client.py:_send"), "connection"),
        ((), STEPS[-1].name),
    ],
)
def test_a_look_is_of_the_innermost_function_that_a_step_knows(stack: tuple[str, ...], name: str) -> None:
    assert step_of((*stack, *LOOP)) == name


def test_what_no_step_knows_is_told_and_the_sum_is_what_was_taken() -> None:
    assert step_of(("/x/threading.py:run",)) == REST
    shares = costs_of([(("/x/threading.py:run",), 1), (("/x/disco_daemon/api/sse.py:_write",), 3)], 100.0)
    assert (shares[REST], shares[SSE]) == (25.0, 75.0)
    assert sum(shares.values()) == 100.0
    with pytest.raises(BenchError, match="never met"):
        costs_of([], 100.0)


def test_each_step_has_files_of_this_code() -> None:
    """A file that is moved or renamed would leave its step unseen."""
    own = [f"/{path.relative_to(ROOT)}:" for path in (ROOT / "disco_daemon").rglob("*.py")]
    for step in STEPS:
        for folder, names in re.findall(
            r"/(api|conductor|dispatch|endpoints|delivery)/\(?([\w|]+)\)?\\.py", step.functions
        ):
            for name in names.split("|"):
                assert any(one.endswith(f"/{folder}/{name}.py:") for one in own), (step.name, folder, name)


async def test_a_daemon_is_measured_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "WARMUP", 5)
    monkeypatch.setattr(costs, "ROUNDS", 1)
    figures = await measure({"this": ROOT}, 100)
    found = figures["costs"]["this"]
    for kind in ("request", "token"):
        assert found[kind]["n_looks"] > 0
        assert sum(found[kind]["steps"].values()) == pytest.approx(found[kind]["cpu_us"], rel=0.01)
        assert found[kind]["steps"][REST] < 0.1 * found[kind]["cpu_us"]
    rows = table(figures).splitlines()
    assert [row.split("  ")[0] for row in rows[1 : 1 + len(STEPS)]] == [step.name for step in STEPS]
