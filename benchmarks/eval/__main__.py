"""Play recorded traces or drawn chats against the policies: fit on the first half, test on the second; no model needed.

`python -m benchmarks.eval` plays benchmarks/eval/recorded: docs/lab/evaluation.md has the commands and what they found.
What your own requests would have cost under other settings is a verb of its own, `disco eval --history`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from disco_daemon.bench.command import at_least
from disco_daemon.cli.terminal import make_console
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.figures import require_plots
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Side

from ..command import run_script
from . import chats, handoff_report, report, server_shifts, servers, servers_report
from .convert import RECORDED
from .evaluate import PHONES, Cell, EvaluationSetup, as_json, evaluate
from .handoff import evaluate_handoffs
from .online import evaluate_online
from .published import SERVICES
from .servers import N_DRAWS
from .traces import read_lengths, read_requests, read_traces

ONLINE_POLICIES = "paper,paper-paced,optimal"
HANDOFF_POLICIES = "paper,optimal"
OF_TRACES = (
    "online", "handoff", "select", "devices", "seeds", "window", "start", "constraint", "alpha", "kappa", "requests",
    "dearer", "server_tps", "bootstrap", "published_prices", "lengths", "blind", "servers", "draws",
)  # fmt: skip
OF_SERVERS = ("select", "servers", "draws")  # the options of traces that go with --servers, too
OF_CHATS = ("seeds", "requests")  # the options of traces that go with --chats, too
SEEDS, HANDOFF_SEEDS = 10, 2  # a handoff is simulated four times over
DEFAULT_POLICIES = (
    "stochastic,stochastic-concurrent,paper,paper-eq1,paper-paced,paper-tuned,optimal,clairvoyant,best-p99"
)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command; parsed arguments have the defaults of the checked options as `usual`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--traces", metavar="DIR", default=str(RECORDED), help="folder with CSV files (default: the recorded ones here)"
    )
    source.add_argument(
        "--chats", action="store_true", help="drawn chats of many turns: what booking fresh tokens gains"
    )
    parser.add_argument(
        "--select",
        help="traces, as comma-separated patterns of FILE/TRACE, e.g. 'bfcl/*' (default: all; with --handoff: four)",
    )
    parser.add_argument(
        "--lengths", metavar="FILE", help="CSV file with other lengths of prompts and answers (default: those in DIR)"
    )
    parser.add_argument("--devices", default="", help="NAME:PREFILL_TPS:DECODE_TPS,… (default: the paper's phones)")
    parser.add_argument("--start", type=float, default=0.0, metavar="S", help="constant c of the device's TTFT, s")
    parser.add_argument(
        "--constraint", choices=("device", "server", "both"), default="both", help="the scarcer side (default: both)"
    )
    parser.add_argument(
        "--policies",
        help=f"comma-separated (default: {DEFAULT_POLICIES}; "
        f"--online: {ONLINE_POLICIES}; --handoff: {HANDOFF_POLICIES})",
    )
    parser.add_argument(
        "--budgets",
        default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
        help="budget ratios b, comma-separated (with --chats: 0.1,0.3)",
    )
    parser.add_argument("--alpha", type=float, default=0.05, help="tail share of the paper's policy")
    parser.add_argument("--kappa", type=float, default=0.058, help="weight of the CVaR in optimal")
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS}; with --handoff: {HANDOFF_SEEDS}, with --chats: 3")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each seed (with --chats: 1200)")
    parser.add_argument("--window", action="store_true", help="keep b + 2 points over any 200 requests, as the daemon")
    parser.add_argument(
        "--bootstrap", action="store_true", help="with --json: 95 %% intervals of each cell, over its seeds"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--online", action="store_true", help="learn while it goes, from censored samples")
    kind.add_argument("--handoff", action="store_true", help="what moving running answers saves")
    kind.add_argument(
        "--servers", action="store_true", help="three servers at a time, without a device: which of them is asked"
    )
    parser.add_argument(
        "--draws", type=at_least(1), default=N_DRAWS, metavar="N", help="with --servers (default: %(default)s)"
    )
    parser.add_argument(
        "--dearer",
        type=float,
        default=2.0,
        metavar="X",
        help="with --handoff, device-constrained: the cheapest device token costs X times the dearest of the server",
    )
    parser.add_argument(
        "--published-prices",
        action="store_true",
        help="with --handoff: at the paper's own prices and for answers of up to 128 tokens, as its Figure 7",
    )
    parser.add_argument(
        "--blind",
        action="store_true",
        help="with --handoff: what is to come of an answer is expected as of all prompts together",
    )
    parser.add_argument("--server-tps", type=float, default=60.0, help="with --handoff: speed of the servers, token/s")
    parser.add_argument("--json", action="store_true", help="print all cells as one JSON document")
    parser.add_argument("--plots", metavar="DIR", help="draw the paper's figures from these numbers")
    usual = {name: parser.get_default(name) for name in (*OF_TRACES, "policies", "plots", "budgets")}
    parser.set_defaults(usual=usual)
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that would do nothing."""
    goes = OF_SERVERS if args.servers else OF_CHATS if args.chats else ()
    left = [name for name in OF_TRACES if name not in goes] if args.chats or args.servers else ["draws"]
    for name in (*left, "policies", "plots") if args.chats or args.servers else left:
        if getattr(args, name) != args.usual[name]:
            with_ = "without --servers" if args.servers else "with --servers" if name == "draws" else "with --traces"
            msg = f"--{name.replace('_', '-')} goes {with_} only: leave it out"
            raise ConfigError(msg)


def main(argv: list[str] | None = None) -> int:
    """Simulate with a progress bar; the result goes to stdout."""
    args = make_parser().parse_args(argv)
    _check(args)
    if args.chats:
        return _run_chats(args)
    if args.servers:
        return _run_servers(args)
    setup = _setup(args)
    folder = Path(args.traces)
    traces = read_traces(folder, _select(args))
    requests = read_lengths(Path(args.lengths)) if args.lengths else read_requests(folder)
    if args.plots:
        require_plots()
    how = _how(args)
    cells = list(_with_progress(len(traces) * setup.n_groups, lambda tick: how(traces, requests, setup, tick)))
    if args.plots:
        figures = Path(args.plots)
        for path in [handoff_report.draw_handoff(cells, figures)] if args.handoff else report.draw(cells, figures):
            print(f"drew {path}", file=sys.stderr)
    summary = handoff_report.handoff_summary if args.handoff else report.summary
    print(json.dumps({"cells": [as_json(c) for c in cells]}) if args.json else summary(cells))
    return 0


def _run_chats(args: argparse.Namespace) -> int:
    """Play the chats, with a progress bar; the table goes to stdout."""
    wanted = chats.BUDGETS if args.budgets == args.usual["budgets"] else _budgets(args)
    n_requests = chats.N_REQUESTS if args.requests == args.usual["requests"] else args.requests
    play = partial(chats.evaluate_chats, chats.KINDS, wanted, args.seeds or chats.N_SEEDS, n_requests)
    rows = list(_with_progress(len(chats.KINDS) * len(wanted) * len(chats.BOOKINGS), play))
    print(json.dumps({"chats": [asdict(row) for row in rows]}) if args.json else chats.summary(rows))
    return 0


def _run_servers(args: argparse.Namespace) -> int:
    """Play the draws by every rule, and the recorded regime shift, with a progress bar; the table goes to stdout."""
    traces = read_traces(Path(args.traces), _select(args))
    drawn = servers.draw_servers(traces, args.draws)

    def play(tick: Callable[[], None]) -> Iterable[Any]:
        yield from ((name, servers.play_all(drawn, rule, tick)) for name, rule in servers.RULES.items())

    by_rule = dict(_with_progress(len(drawn) * len(servers.RULES), play))
    figures = servers_report.figures_of(drawn, by_rule) | {"shift": server_shifts.of_traces(traces)}
    print(json.dumps(figures) if args.json else servers_report.table(figures))
    return 0


def _budgets(args: argparse.Namespace) -> tuple[float, ...]:
    try:
        budgets = tuple(float(b) for b in args.budgets.split(","))
    except ValueError as e:
        msg = f"--budgets takes numbers: {e}"
        raise ConfigError(msg) from e
    if not all(0 <= b <= 1 for b in budgets):
        msg = f"--budgets takes shares from 0 to 1, not {args.budgets}"
        raise ConfigError(msg)
    return budgets


def _how(args: argparse.Namespace) -> Callable[..., Iterable[Cell]]:
    if args.handoff:
        return partial(
            evaluate_handoffs,
            dearer=args.dearer,
            server_tps=args.server_tps,
            published_prices=args.published_prices,
            blind=args.blind,
        )
    return evaluate_online if args.online else evaluate


def _select(args: argparse.Namespace) -> list[str]:
    """Return the patterns asked for; else all traces, with handoffs those of the paper's services."""
    if args.select is not None:
        patterns: list[str] = args.select.split(",")
        return patterns
    return [f"*/{trace}" for trace in SERVICES.values()] if args.handoff else ["*"]


def _setup(args: argparse.Namespace) -> EvaluationSetup:
    sides = tuple(Side) if args.constraint == "both" else (Side(args.constraint),)
    try:
        budgets = tuple(float(b) for b in args.budgets.split(","))
        phones = tuple(_phone(text) for text in args.devices.split(",")) if args.devices else PHONES
    except ValueError as e:
        msg = f"--budgets takes numbers, --devices NAME:PREFILL_TPS:DECODE_TPS: {e}"
        raise ConfigError(msg) from e
    default = ONLINE_POLICIES if args.online else HANDOFF_POLICIES if args.handoff else DEFAULT_POLICIES
    return EvaluationSetup(
        policies=tuple((args.policies or default).split(",")),
        phones=tuple(_with_start(p, args.start) for p in phones),
        constraints=sides,
        budgets=budgets,
        alpha=args.alpha,
        kappa=args.kappa,
        n_seeds=args.seeds or (HANDOFF_SEEDS if args.handoff else SEEDS),
        n_requests=args.requests,
        windowed=args.window,
        bootstrap=args.bootstrap,
    )


def _phone(text: str) -> Phone:
    name, prefill, decode = text.split(":")
    return Phone(name, float(prefill), float(decode))


def _with_start(phone: Phone, start_s: float) -> Phone:
    return replace(phone, start_s=start_s)


def _with_progress(total: int, work: Any) -> Iterable[Any]:
    columns = ("evaluating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield from work(lambda: progress.advance(task))


if __name__ == "__main__":
    sys.exit(run_script(main))
