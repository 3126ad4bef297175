"""One model over two machines, beside the whole model at the partner: `python -m benchmarks.split`.

Edge and partner are real daemons on this machine, with one thread each; what they say to each other passes a proxy with
the delay and the rate of a network. The deployments are those of CE-CoLLM's Table 2 as far as they exist: `cloud`, the
whole model at the partner, asked through the same network; `exact`, the split whose partner judges drafts, once for
each cut; and `naive`, whose bytes are counted and not sent (the rows of the whole context for each token, in float32).

Every prompt is asked of the deployments in turn, greedily. An answer is asked for up to where the whole model first
repeats 16 of its tokens, since a circle is easy to guess. Busy seconds are processor time of the engines, bytes are
those on the wire, both ways, with TLS. What is not measured is null.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import Figures, at_least, positive, print_figures, progress, run_measurement, run_script
from disco_daemon.models.default import fetch_default_model
from disco_daemon.models.segment_files import read_head

from .split_daemons import TwoMachines, two_machines
from .split_faults import measure_link_cuts, measure_ttft
from .split_tables import Deployed, SplitAnswer, document, summarize, table
from .split_text import PACKAGED, SplitPrompt, choose, n_until_repeated, naive_bytes, read_prompts

# Prompts of each kind of data, tokens of an answer, cuts of the link, long prompts.
QUICK, FULL = (4, 64, 4, 2), (100, 128, 200, 5)


@dataclass(frozen=True, slots=True)
class SplitSetup:
    """What is measured: answers of `n_tokens` at most, and at the first of `cuts` also what `measure_faults` does."""

    model: Path
    prompts: Sequence[SplitPrompt]
    cuts: Sequence[int]
    rtt_ms: float
    mbit_s: float
    codec: str
    n_tokens: int
    n_link_cuts: int
    n_long: int


async def measure_cut(
    machines: TwoMachines, prompts: Sequence[SplitPrompt], max_tokens: int
) -> dict[str, list[tuple[SplitAnswer, SplitAnswer, int]]]:
    """Ask all prompts of both deployments; for each kind of data the answers and the tokens of each prompt."""
    found: dict[str, list[tuple[SplitAnswer, SplitAnswer, int]]] = {}
    await machines.cloud("Hi", 2)  # what is loaded and mapped at the first request
    await machines.exact("Hi", 2)
    for number, prompt in enumerate(prompts):
        heard, cloud = await machines.cloud(prompt.text, max_tokens)
        limit, n = max_tokens, n_until_repeated(heard.pieces)
        if n < len(heard.pieces):  # it goes round in a circle: both are asked up to there
            limit = max(1, n)
            heard, cloud = await machines.cloud(prompt.text, limit)
        exact = await machines.exact(prompt.text, limit)
        found.setdefault(prompt.data, []).append((cloud, exact, int(heard.usage["prompt_tokens"])))
        same = "the same" if exact.text == cloud.text else "another answer"
        progress(f"{number + 1} of {len(prompts)}: {cloud.took_s:.1f} s whole, {exact.took_s:.1f} s split, {same}")
    return found


async def bench_split(setup: SplitSetup) -> Figures:
    """Run it all. Raises BenchError."""
    _, header = read_head(setup.model)
    n_layer = header.number(f"{header.architecture}.block_count") or 0
    n_embd = header.number(f"{header.architecture}.embedding_length") or 0
    cuts = setup.cuts or [round(0.8 * n_layer), n_layer // 2]
    rows: list[Deployed] = []
    faults: dict[str, Any] = {}
    for cut in cuts:
        progress(f"cut at {cut} of {n_layer} layers")
        is_first = cut == cuts[0]
        try:
            async with two_machines(setup.model, cut, setup.rtt_ms / 1e3, setup.mbit_s, setup.codec) as machines:
                found = await measure_cut(machines, setup.prompts, setup.n_tokens)
                if is_first:
                    faults = await measure_faults(machines, setup)
        except (TimeoutError, aiohttp.ClientError) as error:
            msg = f"the measurement broke off: {error!r}"
            raise BenchError(msg) from error
        for data, answers in found.items():
            rows += rows_of(data, answers, n_embd, cut, setup.codec, with_cloud=is_first)
    link = {"rtt_ms": setup.rtt_ms, "mbit_s": setup.mbit_s}
    host = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    return document(setup.model.name, n_layer, cuts[0], None, link, rows) | faults | {"host": host}


async def measure_faults(machines: TwoMachines, setup: SplitSetup) -> dict[str, Any]:
    """Return what the document says of long prompts and of cuts of the link."""
    found: dict[str, Any] = {}
    if setup.n_long:
        texts = [prompt.text for prompt in read_prompts()]  # our own are long enough
        found["ttft"] = await measure_ttft(machines, texts, setup.mbit_s, setup.n_long)
    if setup.n_link_cuts:
        found["cuts"] = await measure_link_cuts(machines, setup.prompts, setup.n_link_cuts, setup.n_tokens)
    return found


def rows_of(
    data: str,
    answers: Sequence[tuple[SplitAnswer, SplitAnswer, int]],
    n_embd: int,
    cut: int,
    codec: str,
    *,
    with_cloud: bool,
) -> list[Deployed]:
    """Sum up one kind of data at one cut; cloud and naive do not depend on the cut."""
    whole = [cloud.text for cloud, _, _ in answers]
    rows = []
    if with_cloud:
        rows = [summarize(data, "cloud", [cloud for cloud, _, _ in answers], whole)]
        rows.append(naive_row(data, answers, n_embd, cut))
    return [*rows, summarize(data, "exact", [exact for _, exact, _ in answers], whole, cut=cut, codec=codec)]


def naive_row(data: str, answers: Sequence[tuple[SplitAnswer, SplitAnswer, int]], n_embd: int, cut: int) -> Deployed:
    """Return what a naive split would send for the same answers, which would be equal: counted, not run."""
    row = summarize(data, "naive", [cloud for cloud, _, _ in answers], [cloud.text for cloud, _, _ in answers])
    sent = sum(naive_bytes(n_prompt, cloud.n_tokens, n_embd) for cloud, _, n_prompt in answers)
    return replace(
        row, cut=cut, codec="f32", mb_up=sent / 1e6, mb_down=4 * row.tokens / 1e6,
        total_s=None, edge_s=None, partner_s=None, comm_s=None,
    )  # fmt: skip


def report(figures: Figures) -> str:
    """Return the table, and what it leaves out."""
    lines = [table(figures)]
    if ttft := figures["ttft"]:
        lines.append("first token of a long prompt: " + ", ".join(f"{key[:-2]} {ttft[key]:.2f} s" for key in ttft))
    if cuts := figures["cuts"]:
        back = "-" if cuts["back_s"] is None else f"{cuts['back_s']:.2f} s"
        wrong = ", ".join(f"{cuts[key]} {key}" for key in ("lost", "changed", "doubled"))
        lines.append(f"{cuts['n']} cuts: characters {wrong}; worst gap {cuts['worst_gap_s']:.2f} s, back after {back}")
    lines.append("naive: counted, not run. Not measured yet: confident, alone and draft, and more edges than one.")
    host = figures["host"]
    lines.append(f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Ask all deployments; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: the embedded model)")
    parser.add_argument("--prompts", type=Path, default=PACKAGED, help="JSON lines with `prompt` (default: our own)")
    parser.add_argument("--cut", type=at_least(1), action="append", help="layers at the edge (default: 80 %%, half)")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip of the network (default: %(default)s)")
    parser.add_argument("--mbit-s", type=positive, default=100.0, help="its rate, each way (default: %(default)s)")
    parser.add_argument("--codec", choices=("f32", "bf16", "int8"), default="f32", help="(default: %(default)s)")
    parser.add_argument("--answers", type=at_least(1), help=f"of each kind of data (default: {QUICK[0]})")
    parser.add_argument("--tokens", type=at_least(2), help=f"of an answer at most (default: {QUICK[1]})")
    parser.add_argument("--link-cuts", type=at_least(0), help=f"cuts in the middle of answers (default: {QUICK[2]})")
    parser.add_argument("--long", type=at_least(0), help=f"prompts of 1,024 tokens (default: {QUICK[3]})")
    parser.add_argument("--full", action="store_true", help="many of all: {} answers, {} tokens, {} cuts".format(*FULL))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    given = (args.answers, args.tokens, args.link_cuts, args.long)
    n_answers, n_tokens, n_link_cuts, n_long = (
        default if value is None else value for value, default in zip(given, FULL if args.full else QUICK, strict=True)
    )
    prompts = choose(read_prompts(args.prompts), n_answers)
    model = args.model or fetch_default_model(progress)
    setup = SplitSetup(
        model, prompts, args.cut or (), args.rtt_ms, args.mbit_s, args.codec, n_tokens, n_link_cuts, n_long
    )  # fmt: skip
    work = bench_split(setup)
    return print_figures(run_measurement(work), report, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
