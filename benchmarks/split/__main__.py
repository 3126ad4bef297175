"""One model over two machines, beside the whole model at the partner: `python -m benchmarks.split`.

Edge and partner are real daemons on this machine, with one thread each; what they say to each other passes a proxy
with the delay and the rate of a network. The deployments are those of CE-CoLLM's Table 2: `cloud`, the whole model at
the partner, asked through the same network; `naive`, which sends the rows of the whole context for each token in
float32, really run for a few answers, its bytes counted for all; `confident`, in which the edge's exit decides tokens
that it is sure of; `alone`, in which it decides all; and `exact`, the split whose partner judges drafts, once for
each cut, and at the first one by each codec. With `--draft-model FILE` there is also `draft`, in which that small
model of the same vocabulary drafts at the edge, and only token ids travel, and `alone` once more (cut 0): its own
answers. What the edge's exit is too weak for is left out. Drafts are the exit's alone, unless `--look-up` is given.
The exit is one that is kept, or a small one that is trained for this run.

Every prompt is asked of the deployments in turn, greedily. An answer is asked for up to where the whole model first
repeats 16 of its tokens, since a circle is easy to guess. Busy seconds are processor time of the engines, bytes are
those on the wire, both ways, with TLS. What is not measured is null.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import Figures, at_least, print_figures, progress, run_measurement
from disco_daemon.config.layers import data_path
from disco_daemon.link.protocol import IDS
from disco_daemon.machines.split.cut_plan import describe_cuts
from disco_daemon.machines.split.hosted_range import exit_facts
from disco_daemon.machines.split.trained_exits import KeptExits
from disco_daemon.models.default import fetch_default_model
from disco_daemon.models.gguf import Header
from disco_daemon.models.segment_files import read_head
from disco_daemon.models.segments import NotCuttableError
from disco_daemon.models.segments import n_layers as n_layers_of

from ..command import positive, run_script
from .ablations import ablation_table, measure_ablations
from .asked import asked_table
from .daemons import JoinedMachines, TwoMachines, joined_machines, kept_exits
from .edges import measure_edges
from .faults import N_PROMPT, measure_link_cuts, measure_ttft
from .forecast import CheckedCut, check_plan, plan_document, plan_lines
from .loop_lag import measure_loop_lag
from .naive import NaiveWay, measure_naive
from .peer_link import bench_link
from .proxy import precise_loop
from .run import (  # fmt: skip
    ALONE,
    DRAFT,
    EXACT,
    LOSSY,
    AskedPrompt,
    Way,
    ask_all,
    ask_cloud,
    ask_ways,
    by_data,
    cloud_rows,
    codec_rows,
    naive_rows,
    share_rows,
    way_rows,
)
from .tables import Deployed, document, table
from .text import PACKAGED, SplitPrompt, choose, is_base_model, read_prompts

CODECS = ("f32", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured: prompts of each kind of data, tokens of an answer, cuts of the link, long prompts, uploads.

    `naive_answers` of each kind are written by the naive split, and `codec_answers` by each other codec. Exits are
    trained on `exit_tokens` where none is kept. Up to `edges` machines write `edge_answers` each. `calls` cross the
    link for what relays add. `ablations` answers of each kind are written without each part of the split. A long prompt
    has `long_tokens`, an upload twice as many, about.
    """

    answers: int
    tokens: int
    link_cuts: int
    long: int
    uploads: int
    naive_answers: int
    codec_answers: int
    exit_tokens: int
    edges: int
    edge_answers: int
    calls: int
    ablations: int
    long_tokens: int = N_PROMPT


QUICK = Amounts(4, 64, 4, 2, 2, 1, 2, 2000, 5, 2, 300, 1)
FULL = Amounts(100, 128, 200, 5, 5, 5, 100, 40000, 5, 10, 3000, 10)


@dataclass(frozen=True, slots=True)
class SplitSetup:
    """What is measured, and how much; at the first of `cuts` also what is not `exact` by `codec`."""

    model: Path
    prompts: Sequence[SplitPrompt]
    cuts: Sequence[int]
    rtt_ms: float
    mbit_s: float
    codec: str
    exits: Path
    look_up: bool
    n: Amounts
    draft: Path | None = None
    raw: bool = False

    @property
    def link(self) -> tuple[float, float]:
        """Round trip of the network, s, and its rate, Mbit/s."""
        return self.rtt_ms / 1e3, self.mbit_s


async def bench_split(setup: SplitSetup) -> Figures:
    """Run it all. Raises BenchError."""
    head, header = read_head(setup.model)
    try:
        describe_cuts(head, header, {})
    except NotCuttableError as e:
        msg = f"{setup.model.name} cannot be cut: {e}"
        raise BenchError(msg) from e
    setup = replace(setup, raw=setup.raw or is_base_model(header))
    n_layer = n_layers_of(header)
    cuts = setup.cuts or [round(0.8 * n_layer), n_layer // 2]
    figures: dict[str, Any] = document(
        setup.model.name, n_layer, cuts[0], None, {"rtt_ms": setup.rtt_ms, "mbit_s": setup.mbit_s}, []
    )
    with tempfile.TemporaryDirectory(prefix="disco-split-") as name:
        folder, asked, checked = Path(name), list[AskedPrompt](), list[CheckedCut]()
        exits = await kept_exits(setup.model, cuts, setup.exits, setup.n.exit_tokens, folder)
        planned = describe_cuts(
            head,
            header,
            exit_facts(KeptExits(setup.model, exits)),
        )
        try:
            for cut in cuts:
                progress(f"cut at {cut} of {n_layer} layers")
                async with joined_machines(setup.model, cut, *setup.link, exits, raw=setup.raw) as pair:
                    is_first = cut == cuts[0]
                    found = await (measure_first if is_first else measure_other)(pair, setup, asked, header)
                for key, value in found.items():
                    figures[key] = [*figures[key], *value] if isinstance(value, list) else value
                checked += check_plan(asked, planned, cut, where(cut, setup.codec), setup.link)
            figures["plan"] = plan_document(checked)
            if setup.draft is not None:
                drafted = await measure_draft(setup, setup.draft, asked)
                rows = [*figures["deployments"], *drafted]
                figures["deployments"] = sorted(
                    rows, key=lambda row: bool(row["name"] == EXACT)
                )  # the half cut is last
        except (TimeoutError, aiohttp.ClientError) as error:
            msg = f"the measurement broke off: {error!r}"
            raise BenchError(msg) from error
    if setup.n.calls:
        figures["added_ms_p50"] = (await bench_link(setup.n.calls))["added_ms"]
    return figures | {
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    }


async def measure_first(
    pair: JoinedMachines, setup: SplitSetup, asked: list[AskedPrompt], header: Header
) -> dict[str, Any]:
    """Ask all deployments, at the first cut; `asked` gets all prompts. Return parts of the document."""
    n_embd = header.number(f"{header.architecture}.embedding_length") or 0
    way, cut = Way(EXACT), pair.cut
    async with pair.edge(setup.codec, look_up=setup.look_up) as machines:
        await warm_up(machines)
        for number, prompt in enumerate(setup.prompts):
            asked.append(one := await ask_cloud(machines, prompt, setup.n.tokens))
            said = await ask_ways(machines, one, [way], where(cut, setup.codec))
            progress(f"{number + 1} of {len(setup.prompts)}: {said}")
        found = await measure_faults(machines, setup)
    name, rows = where(cut, setup.codec), list[Deployed]()
    for lossy in LOSSY if pair.head else ():
        async with pair.edge(setup.codec, look_up=setup.look_up, name=lossy.machine) as machines:
            await ask_all(machines, asked, [lossy], name)
        rows += way_rows(asked, lossy, name, cut, setup.codec)
    rows += way_rows(asked, way, name, cut, setup.codec)
    codecs = codec_rows(asked, where(cut, setup.codec), cut, setup.codec, n_embd)
    few = [one for ones in by_data(asked).values() for one in ones[: setup.n.codec_answers]]
    for codec in CODECS if few else ():
        if codec != setup.codec:
            async with pair.edge(codec, look_up=setup.look_up) as machines:
                await ask_all(machines, few, [way], where(cut, codec))
            codecs += codec_rows(few, where(cut, codec), cut, codec, n_embd)
    naive = await ask_naive(pair, setup, asked, header)
    if setup.n.edges:
        prompts = [(one.prompt.text, one.limit) for one in asked[: setup.n.edge_answers]]
        found["edges"] = await measure_edges(pair, prompts, setup.link, setup.n.edges)
    found["ablations"] = await measure_ablations(
        pair, asked, setup.n.ablations, n_layers_of(header), setup.link, look_up=setup.look_up
    )
    shares = share_rows(asked, where(cut, setup.codec), cut, header)
    deployments = [*cloud_rows(asked), *naive, *rows]
    return found | {"head": pair.head or None, "deployments": listed(deployments), "codecs": codecs, "shares": shares}


async def measure_other(
    pair: JoinedMachines, setup: SplitSetup, asked: list[AskedPrompt], header: Header
) -> dict[str, Any]:
    """Ask for exact answers at another cut."""
    name = where(pair.cut, setup.codec)
    async with pair.edge(setup.codec, look_up=setup.look_up) as machines:
        await machines.split("Hi", 2)
        await ask_all(machines, asked, [Way(EXACT)], name)
    rows = way_rows(asked, Way(EXACT), name, pair.cut, setup.codec)
    return {"deployments": listed(rows), "shares": share_rows(asked, name, pair.cut, header)}


async def measure_draft(setup: SplitSetup, draft: Path, asked: list[AskedPrompt]) -> list[dict[str, Any]]:
    """Ask edges at which a small model drafts for the whole one, and answers alone; return their rows."""
    progress(f"{draft.name} drafts")
    name, rows = where(0, IDS), list[Deployed]()
    async with joined_machines(setup.model, 0, *setup.link, draft=draft, raw=setup.raw) as pair:
        for way in (Way(DRAFT), Way(ALONE)):
            async with pair.edge("auto", look_up=setup.look_up, name=way.machine) as machines:
                await machines.split("Hi", 2, way.mode)
                await ask_all(machines, asked, [way], name)
            rows += way_rows(asked, way, name, 0, IDS)
    return listed(rows)


async def ask_naive(
    pair: JoinedMachines, setup: SplitSetup, asked: Sequence[AskedPrompt], header: Header
) -> list[Deployed]:
    """Have the naive split write a few of the answers; return its rows."""
    few = [one for ones in by_data(asked).values() for one in ones[: setup.n.naive_answers]]
    if few:
        prompts = [(one.prompt.text, one.limit) for one in few]
        way = NaiveWay(raw=setup.raw)
        answers = await measure_naive(pair.model, pair.cut, n_layers_of(header), prompts, pair.folder, setup.link, way)
        for one, answer in zip(few, answers, strict=True):
            one.answers["naive"] = answer
            progress(f"naive: {answer.took_s:.1f} s, {answer.bytes_up / 1e6:.1f} MB up")
    return naive_rows(asked, header.number(f"{header.architecture}.embedding_length") or 0, pair.cut)


def where(cut: int, codec: str) -> str:
    """Name a cut and a codec, by which answers are kept apart."""
    return f"cut {cut} {codec}"


def listed(rows: Sequence[Deployed]) -> list[dict[str, Any]]:
    """Return rows as the document has them."""
    return [asdict(row) for row in rows]


async def warm_up(machines: TwoMachines) -> None:
    """Have both load and map what they do at their first request."""
    await machines.cloud("Hi", 2)
    await machines.split("Hi", 2)


async def measure_faults(machines: TwoMachines, setup: SplitSetup) -> dict[str, Any]:
    """Return what the document says of long prompts and of cuts of the link."""
    found: dict[str, Any] = {}
    texts = [prompt.text for prompt in read_prompts()]  # our own are long enough
    if setup.n.long:
        found["ttft"] = await measure_ttft(machines, texts, setup.mbit_s, setup.n.long, setup.n.long_tokens)
    if setup.n.uploads:
        found["loop_lag_p99_ms"] = await measure_loop_lag(
            machines, texts, setup.n.uploads, setup.n.long_tokens / N_PROMPT
        )
    if setup.n.link_cuts:
        found["cuts"] = await measure_link_cuts(machines, setup.prompts, setup.n.link_cuts, setup.n.tokens)
    return found


def report(figures: Figures) -> str:
    """Return the tables, and what they leave out."""
    lines = [table(figures)]
    lines += [
        f"{row['data']}, rows as {row['codec']}: {row['mb_up']:.3f} MB up, naive's are {row['naive_times']:.0f} times "
        f"as many; {row['agreement']:.1%} of {row['compared']} tokens agree ({row['differences']} first differences; "
        f"95 %: {row['agreement_95'][0]:.1%} to {row['agreement_95'][1]:.1%})"
        for row in figures["codecs"]
    ]
    lines += [
        f"{row['data']}, cut {row['cut']}: partner computes {row['flop_share']:.2f} of the whole model's FLOP"
        for row in figures["shares"]
    ]
    if ttft := figures["ttft"]:
        lines.append("first token of a long prompt: " + ", ".join(f"{key[:-2]} {ttft[key]:.2f} s" for key in ttft))
    if lag := figures["loop_lag_p99_ms"]:
        late = ", ".join(f"{name} {late_ms:.2f} ms" for name, late_ms in lag.items())
        lines.append(f"event loops while long prompts go up, P99 of their lateness: {late}")
    lines += [
        f"{row['n']} edges: {row['cloud_s']:.1f} s whole, {row['exact_s']:.1f} s exact"
        + ("" if row["confident_s"] is None else f", {row['confident_s']:.1f} s confident")
        for row in figures["edges"]
    ]
    lines += plan_lines(figures["plan"])
    lines += ablation_table(figures["ablations"])
    lines.append("naive: times are of a few answers, scaled by the rows that it sends for all of them.")
    lines.append(asked_table(figures))
    host = figures["host"]
    lines.append(f"Python {host['python']}, {host['cpus']} CPUs, {host['platform']}")
    return "\n".join(lines)


AMOUNTS = {
    "answers": ("of each kind of data", 1),
    "tokens": ("of an answer at most", 2),
    "link-cuts": ("cuts in the middle of answers", 0),
    "long": ("long prompts", 0),
    "long-tokens": ("of a long prompt, about", 16),
    "uploads": ("prompts of twice as many tokens, while which the event loops are watched", 0),
    "naive-answers": ("answers of each kind by the naive split", 0),
    "codec-answers": ("answers of each kind by each other codec", 0),
    "exit-tokens": ("to train an exit on where none is kept; 0: no exit", 0),
    "edges": ("at one partner at most", 0),
    "edge-answers": ("of each of them", 1),
    "calls": ("round trips over the relays alone", 0),
    "ablations": ("answers of each kind without each part of the split", 0),
}


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
    parser.add_argument("--codec", choices=CODECS, default="f32", help="(default: %(default)s)")
    parser.add_argument("--exits", type=Path, help="folder of kept exits (default: this user's)")
    parser.add_argument("--draft-model", type=Path, metavar="FILE", help="small model for `draft` (default: none)")
    parser.add_argument("--look-up", action="store_true", help="draft by look-up in the text as well")
    for name, (text, least) in AMOUNTS.items():
        default = getattr(QUICK, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=at_least(least), metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--raw", action="store_true", help="prompts go on as text, without a chat template (as where there is none)"
    )
    parser.add_argument("--full", action="store_true", help="many of all: the acceptance")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    names = [name.replace("-", "_") for name in AMOUNTS]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    n = replace(FULL if args.full else QUICK, **given)
    setup = SplitSetup(
        args.model or fetch_default_model(progress), choose(read_prompts(args.prompts), n.answers), args.cut or (),
        args.rtt_ms, args.mbit_s, args.codec, args.exits or data_path() / "exits", args.look_up, n, args.draft_model,
        args.raw,
    )  # fmt: skip
    return print_figures(run_measurement(bench_split(setup), precise_loop), report, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
