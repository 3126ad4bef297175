"""Whether forced calls of tools are calls: JSON, and as the tools' schemas say.

    python -m benchmarks.tools [--answers 200] [--first 0] [--json]

A daemon with the embedded model, which knows no tools, is asked by the unmodified `openai` client to call each of
twenty tools in turn, by a name or by `required`, with another seed each time, in one piece and streamed. Only form is
judged: what such a model calls is of no use. An answer that its limit cuts off is none.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit
from openai import AsyncOpenAI

from benchmarks.tool_schemas import TOOLS, problems
from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement, run_script
from disco_daemon.models.default import fetch_default_model
from disco_daemon.program import verb

MAX_TOKENS = 1500  # of a call: a small model may go round within what a schema leaves open
TASKS = ("Please do what is needed for the trip to Lisbon.", "Fix the bug in parser.py.", "Tidy up the kitchen list.")
READY_S = 60.0  # until the model is in memory


@dataclass(frozen=True, slots=True)
class Call:
    """What a client got: the name of the first call, its arguments as text, how many calls, and why it ended."""

    name: str
    arguments: str
    n_calls: int
    finish_reason: str
    has_id: bool

    def fault(self, tool: dict[str, Any]) -> str | None:
        """Return why it is no call of a tool; None if it is one."""
        function = tool["function"]
        if (self.name, self.n_calls, self.has_id) != (function["name"], 1, True):
            return f"{self.n_calls} calls, the first one of {self.name!r}"
        if self.finish_reason != "tool_calls":
            return f"it ends by {self.finish_reason}: {self.arguments[-60:]!r}"
        try:
            arguments = json.loads(self.arguments)
        except ValueError as e:
            return f"no JSON: {e}: {self.arguments[-60:]!r}"
        return next(problems(arguments, function["parameters"], function["parameters"]), None)


async def ask(client: AsyncOpenAI, number: int, *, stream: bool) -> Call:
    """Ask for the call of one tool, by its name for even numbers; the answer is one of the number alone."""
    tool = TOOLS[number % len(TOOLS)]
    named = {"type": "function", "function": {"name": tool["function"]["name"]}}
    asked: dict[str, Any] = {
        "model": "disco/device",
        "messages": [{"role": "user", "content": TASKS[number % len(TASKS)]}],
        "tools": [tool],
        "tool_choice": "required" if number % 2 else named,
        "parallel_tool_calls": False,
        "temperature": 0.8,
        "seed": number,
        "max_tokens": MAX_TOKENS,
    }
    made: Any = await client.chat.completions.create(**asked, stream=stream)
    if not stream:
        choice = made.choices[0]
        calls = choice.message.tool_calls or []
        first = calls[0] if calls else None
        return Call(
            first.function.name if first else "", first.function.arguments if first else "", len(calls),
            choice.finish_reason, bool(first and first.id.startswith("call_")),
        )  # fmt: skip
    names, ids, arguments, reason = [], [], "", ""
    async for chunk in made:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                names += [piece.function.name] if piece.function.name else []
                ids += [piece.id] if piece.id else []
                arguments += piece.function.arguments or ""
    begun = len(ids) == 1 and ids[0].startswith("call_")
    return Call(names[0] if names else "", arguments, len(names), reason, begun)


@asynccontextmanager
async def _device(folder: Path) -> AsyncIterator[AsyncOpenAI]:
    """Start a daemon with the embedded model alone."""
    config = folder / "config.toml"
    config.write_text(tomlkit.dumps({"device": {"autotune": False, "n_ctx": 4096, "rounding": "exact"}}))
    argv = [
        *verb("up", "--port", "0", "--json", "--until-eof", "--config", str(config)),
        *("--history", str(folder / "history.sqlite"), "--threads", "1", "--model", str(fetch_default_model(progress))),
    ]
    async with (
        child(argv, folder, "daemon") as url,
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client,
        aiohttp.ClientSession() as session,
    ):
        until = time.monotonic() + READY_S
        while True:
            async with session.get(f"{url.removesuffix('/v1')}/disco/v1/state") as response:
                if (await response.json())["endpoints"]["device"]["state"] == "ready":
                    break
            if time.monotonic() > until:
                raise BenchError("the model was not in memory in time")
            await asyncio.sleep(0.05)
        yield client


async def measure(n_answers: int, first: int = 0) -> dict[str, Any]:
    """Ask for calls from number `first` on, each in one piece and streamed; return how many are as they should be."""
    faults: list[str] = []
    counts = {"whole": 0, "streamed": 0, "alike": 0}
    with tempfile.TemporaryDirectory(prefix="disco-tools-") as folder:
        async with _device(Path(folder)) as client:
            for number in range(first, first + (n_answers + 1) // 2):
                tool = TOOLS[number % len(TOOLS)]
                both = {}
                for kind in itertools.islice(("whole", "streamed"), n_answers - 2 * (number - first)):
                    both[kind] = found = await ask(client, number, stream=kind == "streamed")
                    fault = found.fault(tool)
                    counts[kind] += fault is None
                    faults += [f"{number} {tool['function']['name']}, {kind}: {fault}"] if fault else []
                counts["alike"] += len({(call.name, call.arguments) for call in both.values()}) == 1
                if number % 10 == 9:
                    progress(f"{2 * (number - first + 1)} answers, {len(faults)} at fault")
    return {
        "answers": n_answers, "calls": counts["whole"] + counts["streamed"], "pairs": (n_answers + 1) // 2, **counts,
        "faults": faults,
    }  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    said = (
        f"{figures['calls']} of {figures['answers']} forced answers are calls by their tool's schema: "
        f"{figures['whole']} in one piece, {figures['streamed']} streamed; {figures['alike']} of {figures['pairs']} "
        "pairs are alike"
    )
    return "\n".join([said, *figures["faults"]])


def main() -> int:
    """Measure by the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=at_least(1), default=200, help="how many calls (default: %(default)s)")
    parser.add_argument("--first", type=at_least(0), default=0, help="the number of the first one, which is its seed")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    return print_figures(run_measurement(measure(args.answers, args.first)), table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
