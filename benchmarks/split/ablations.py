"""CE-CoLLM's ablations (its Table 4) of exact answers: what each part of the split is worth, by taking it away.

`proposed` has rows in half precision (bf16), drafts by the exit, and a partner that keeps what it has computed, to
which rows go up as they are made. Each other row lacks one of these: rows are float32; there is no exit, so that a
question is asked for each token; or the partner keeps nothing, nothing goes up before a question, and each question has
the rows of the whole context again (`split_naive`, with the same exit's drafts). The paper's are of answers at theta
0.8, in which the exit decides; in ours the partner does, as in `exact`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from disco_daemon.bench.command import progress
from disco_daemon.machines.split.trained_exits import KeptExits

from .daemons import JoinedMachines, TwoMachines, joined_machines
from .naive import NaiveWay, measure_naive
from .run import EXACT, AskedPrompt, Way, ask_ways, by_data, way_rows
from .tables import Deployed, cell

PROPOSED, NO_HALF, NO_EXIT, NO_MANAGER = (
    "proposed", "without half precision", "without early exit", "without content manager and parallel upload",
)  # fmt: skip
HALF, WHOLE = "bf16", "f32"


async def measure_ablations(
    pair: JoinedMachines, asked: Sequence[AskedPrompt], n: int, n_layers: int, link: tuple[float, float], *,
    look_up: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Have the first `n` prompts of each kind answered as proposed, and without each part; return rows as of Table 4.

    Each way has a machine of its own, so that nothing is cached from another. Prompts are asked of all in turn, but for
    the last way, which has the machine to itself. Without an exit there is no row without it. Raises BenchError.
    """
    few = [one for ones in by_data(asked).values() for one in ones[:n]]
    if not few:
        return []
    codecs = {PROPOSED: HALF, NO_HALF: WHOLE} | ({NO_EXIT: HALF} if pair.head else {})
    async with AsyncExitStack() as stack:
        ways = dict[str, TwoMachines]()
        for name, codec in codecs.items():
            hosts = pair
            if name == NO_EXIT:  # a partner that has none to give along
                plain = joined_machines(pair.model, pair.cut, *link, raw=pair.raw)
                hosts = await stack.enter_async_context(plain)
            edge = hosts.edge(codec, look_up=look_up, name=name.replace(" ", "-"))
            ways[name] = await stack.enter_async_context(edge)
        for machines in ways.values():  # once all are there: the partner forgets what lies idle while another one joins
            await machines.split("Hi", 2)
        for one in few:
            for name, machines in ways.items():
                progress(f"{name}: {await ask_ways(machines, one, [Way(EXACT)], name)}")
    await _ask_forgetful(pair, few, n_layers, link)
    codecs[NO_MANAGER] = HALF
    return ablation_rows({name: way_rows(few, Way(EXACT), name, pair.cut, codec) for name, codec in codecs.items()})


async def _ask_forgetful(
    pair: JoinedMachines, few: Sequence[AskedPrompt], n_layers: int, link: tuple[float, float]
) -> None:
    """Have all prompts answered by a partner that keeps nothing. Raises BenchError."""
    progress(NO_MANAGER)
    kept = KeptExits(pair.model, pair.folder / "partner" / "disco" / "exits").best(pair.cut)
    prompts, way = [(one.prompt.text, one.limit) for one in few], NaiveWay(HALF, pair.raw, kept)
    answers = await measure_naive(pair.model, pair.cut, n_layers, prompts, pair.folder, link, way)
    for one, answer in zip(few, answers, strict=True):
        one.answers[f"{NO_MANAGER} {EXACT}"] = answer


def ablation_rows(found: Mapping[str, Sequence[Deployed]]) -> list[dict[str, Any]]:
    """Return the rows by kind of data, each with its name, and its time in shares of that of the proposed way."""
    proposed = {row.data: row.total_s for row in found.get(PROPOSED, ())}
    rows = [(name, row) for name, ones in found.items() for row in ones]
    return [
        asdict(row) | {"name": name, "relative": _share(row.total_s, proposed[data])}
        for data in proposed
        for name, row in rows
        if row.data == data
    ]


def _share(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


_COLUMNS = (
    ("data", "data", -9, ""), ("ablation", "name", -44, ""), ("total s", "total_s", 9, ".2f"),
    ("edge s", "edge_s", 8, ".2f"), ("partner s", "partner_s", 10, ".2f"), ("link s", "comm_s", 8, ".2f"),
    ("relative", "relative", 9, ".0%"), ("asked", "request_rate", 7, ".2f"), ("MB up", "mb_up", 9, ".3f"),
    ("equal", "equal", 7, ".2f"),
)  # fmt: skip


def ablation_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows as the lines of a table; none without rows."""
    if not rows:
        return []
    head = "".join(cell(title, width, "") for title, _, width, _ in _COLUMNS).rstrip()
    return [head, *("".join(cell(row[key], width, kind) for _, key, width, kind in _COLUMNS).rstrip() for row in rows)]
