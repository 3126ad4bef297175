"""Whether forced calls of tools, and answers by a JSON schema, are as their schemas say.

    python -m benchmarks.engine.tools [--answers 200] [--first 0] [--only calls|answers] [--cost] [--json]

A daemon with the embedded model, which knows no tools, is asked by the unmodified `openai` client to call each of
twenty tools in turn, by a name or by `required`, with another seed each time, in one piece and streamed; then as often
for an answer by the schema of each tool's arguments (`response_format`). Only form is judged: what such a model calls
is of no use. An answer that its limit cuts off is none. `--cost` measures something else: the processor time of drawing
a token, in this process, by these schemas and calls and, behind the same text, without a grammar.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import tomlkit
from openai import AsyncOpenAI

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.engine.llama.model import AbortFlag, Llama, load_model
from disco_daemon.engine.wire import Generate, Load
from disco_daemon.models.default import fetch_default_model
from disco_daemon.system.program import verb
from disco_daemon.types import ToolUse

from ..command import run_script
from .tool_schemas import TOOLS, problems

MAX_TOKENS = 1500  # of a call: a small model may go round within what a schema leaves open
TASKS = ("Please do what is needed for the trip to Lisbon.", "Fix the bug in parser.py.", "Tidy up the kitchen list.")
MAX_MEASURED = 60  # tokens of an answer whose draws are timed
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
        return _misfit(self.arguments, tool)

    @property
    def said(self) -> tuple[str, str]:
        """What is the same, in one piece and streamed."""
        return self.name, self.arguments


@dataclass(frozen=True, slots=True)
class Written:
    """What a client got for an answer by a schema: its text, and why it ended."""

    text: str
    finish_reason: str

    def fault(self, tool: dict[str, Any]) -> str | None:
        """Return why it is not as the schema of a tool's arguments says; None if it is."""
        if self.finish_reason != "stop":
            return f"it ends by {self.finish_reason}: {self.text[-60:]!r}"
        return _misfit(self.text, tool)

    @property
    def said(self) -> str:
        """What is the same, in one piece and streamed."""
        return self.text


def _misfit(text: str, tool: dict[str, Any]) -> str | None:
    """Return why a text is no JSON by the schema of a tool's arguments; None if it is."""
    schema = tool["function"]["parameters"]
    try:
        value = json.loads(text)
    except ValueError as e:
        return f"no JSON: {e}: {text[-60:]!r}"
    return next(problems(value, schema, schema), None)


def _asked(number: int) -> dict[str, Any]:
    """Return what all requests of a number ask for."""
    return {
        "model": "disco/device",
        "messages": [{"role": "user", "content": TASKS[number % len(TASKS)]}],
        "temperature": 0.8,
        "seed": number,
        "max_tokens": MAX_TOKENS,
    }


async def write(client: AsyncOpenAI, number: int, *, stream: bool) -> Written:
    """Ask for an answer by the schema of one tool's arguments; it is one of the number alone."""
    function = TOOLS[number % len(TOOLS)]["function"]
    form = {"name": function["name"], "schema": function["parameters"], "strict": True}
    asked = _asked(number) | {"response_format": {"type": "json_schema", "json_schema": form}}
    made: Any = await client.chat.completions.create(**asked, stream=stream)
    if not stream:
        choice = made.choices[0]
        return Written(choice.message.content or "", choice.finish_reason)
    text, reason = "", ""
    async for chunk in made:
        for choice in chunk.choices:
            text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
    return Written(text, reason)


async def ask(client: AsyncOpenAI, number: int, *, stream: bool) -> Call:
    """Ask for the call of one tool, by its name for even numbers; the answer is one of the number alone."""
    tool = TOOLS[number % len(TOOLS)]
    named = {"type": "function", "function": {"name": tool["function"]["name"]}}
    asked = _asked(number) | {
        "tools": [tool],
        "tool_choice": "required" if number % 2 else named,
        "parallel_tool_calls": False,
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


KINDS: dict[str, Callable[..., Awaitable[Call | Written]]] = {"calls": ask, "answers": write}


async def measure(n_each: int, first: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Ask for `n_each` of each kind from number `first` on, each whole and streamed; return how many are right."""
    figures = {}
    with tempfile.TemporaryDirectory(prefix="disco-tools-") as folder:
        async with _device(Path(folder)) as client:
            for kind in kinds:
                figures[kind] = await _count(kind, client, n_each, first)
    return figures


async def _count(kind: str, client: AsyncOpenAI, n_each: int, first: int) -> dict[str, Any]:
    """Return how many of one kind are as their schema says, and how many are alike in one piece and streamed."""
    faults: list[str] = []
    counts = {"whole": 0, "streamed": 0, "alike": 0}
    for number in range(first, first + (n_each + 1) // 2):
        tool = TOOLS[number % len(TOOLS)]
        both = {}
        for how in itertools.islice(("whole", "streamed"), n_each - 2 * (number - first)):
            both[how] = found = await KINDS[kind](client, number, stream=how == "streamed")
            fault = found.fault(tool)
            counts[how] += fault is None
            faults += [f"{number} {tool['function']['name']}, {how}: {fault}"] if fault else []
        counts["alike"] += len({found.said for found in both.values()}) == 1
        if number % 10 == 9:
            progress(f"{2 * (number - first + 1)} {kind}, {len(faults)} at fault")
    right = counts["whole"] + counts["streamed"]
    return {"asked": n_each, "right": right, "pairs": (n_each + 1) // 2, **counts, "faults": faults}


DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "drawn": {}, "top_p": {"top_p": 0.9}, "top_p of 1": {"top_p": 1.0},
}  # fmt: skip


def cost(n_tools: int) -> dict[str, dict[str, list[float]]]:
    """Return the median and 99th percentile of drawing a token, ms, by kind and way: with a grammar, then without."""
    path, figures = str(fetch_default_model(progress)), dict[str, dict[str, list[float]]]()
    llama = load_model(Load(model_path=path, n_ctx=2048, n_threads=1, n_gpu_layers=0), AbortFlag())
    for kind, (how, more) in itertools.product(("an answer by a schema", "a forced call"), DRAWN.items()):
        took: list[list[float]] = [[], []]
        for number, tool in enumerate(TOOLS[:n_tools]):
            form: dict[str, Any] = {
                "response_format": {"type": "json_object", "schema": tool["function"]["parameters"]}
            }
            if kind == "a forced call":
                form = {"tools": ToolUse(tools=(tool,), allowed=(tool["function"]["name"],), forced=True)}
            messages = [{"role": "user", "content": TASKS[number % len(TASKS)]}]
            _draw_both(llama, Generate(id="cost", messages=messages, seed=number, **form, **more), took)
        figures.setdefault(kind, {})[how] = [
            round(1000 * float(np.percentile(found, q)), 3) for found in took for q in (50, 99)
        ]
    llama.close()
    return figures


def _draw_both(llama: Llama, request: Generate, took: list[list[float]]) -> None:
    """Draw an answer by its grammar, each token also without one, and add what each took, s."""
    free = msgspec.structs.replace(request, response_format=None, tools=None)
    tokens = prompt = llama.vocabulary.prompt_tokens(request)
    samplers = llama.sampler(request, (), llama.grammar(request), prompt), llama.sampler(free, (), "", prompt)
    llama.clear()
    n_past = 0
    while n_past < len(prompt) + MAX_MEASURED and not llama.vocabulary.ends(tokens[-1]):
        llama.decode([(token, n_past + i, 0, i == len(tokens) - 1) for i, token in enumerate(tokens)])
        n_past, row = n_past + len(tokens), len(tokens) - 1
        for sampler, found in zip(samplers[::-1], took[::-1], strict=True):
            began = time.thread_time()
            tokens = [llama.sample(sampler, row)]
            found.append(time.thread_time() - began)
    for sampler in samplers:
        sampler.close()


def costs(figures: dict[str, dict[str, list[float]]]) -> str:
    """Return the figures as text."""
    return "\n".join(
        f"{kind}, {how}: {held} ms a token (p99 {held_most}), without a grammar {free} ({free_most})"
        for kind, found in figures.items()
        for how, (held, held_most, free, free_most) in found.items()
    )


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = []
    for kind, found in figures.items():
        what = {"calls": "forced calls", "answers": "answers by a schema"}[kind]
        said = (
            f"{found['right']} of {found['asked']} {what} are as their schema says: {found['whole']} in one piece, "
            f"{found['streamed']} streamed; {found['alike']} of {found['pairs']} pairs are alike"
        )
        lines += [said, *found["faults"]]
    return "\n".join(lines)


def main() -> int:
    """Measure by the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=at_least(1), default=200, help="how many of each (default: %(default)s)")
    parser.add_argument("--first", type=at_least(0), default=0, help="the number of the first one, which is its seed")
    parser.add_argument("--only", choices=KINDS, help="only calls, or only answers by a schema")
    parser.add_argument("--cost", action="store_true", help="only the processor time of drawing a token")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    if args.cost:
        return print_figures(cost(len(TOOLS)), costs, as_json=args.json)
    return print_figures(
        run_measurement(measure(args.answers, args.first, [args.only] if args.only else list(KINDS))),
        table,
        as_json=args.json,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
