"""`disco eval`: play recorded traces against the policies, without a model or a network."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..simulate.evaluate import Cell, Setup
    from ..simulate.player import Phone

ONLINE_POLICIES = "paper,paper-paced,optimal"
DEFAULT_POLICIES = "stochastic,stochastic-concurrent,paper,paper-paced,optimal,clairvoyant,best-p99"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "eval",
        help="simulate the policies on recorded traces",
        description="Fit each policy on the first half of each trace and test it on the second, or learn online.",
    )
    parser.add_argument("--traces", required=True, metavar="DIR", help="folder with CSV files; see docs/evaluation.md")
    parser.add_argument(
        "--select", default="*", help="traces, as comma-separated patterns of FILE/TRACE, e.g. 'bfcl/*'"
    )
    parser.add_argument("--devices", default="", help="NAME:PREFILL_TPS:DECODE_TPS,… (default: the paper's phones)")
    parser.add_argument("--start", type=float, default=0.0, metavar="S", help="constant c of the device's TTFT, s")
    parser.add_argument("--constraint", choices=("device", "server", "both"), default="both")
    parser.add_argument(
        "--policies", help=f"comma-separated (default: {DEFAULT_POLICIES}; with --online: {ONLINE_POLICIES})"
    )
    parser.add_argument("--budgets", default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9")
    parser.add_argument("--alpha", type=float, default=0.05, help="tail share of the paper's policy")
    parser.add_argument("--kappa", type=float, default=0.058, help="weight of the CVaR in optimal")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=2000, help="requests of each seed")
    parser.add_argument("--window", action="store_true", help="keep b + 2 points over any 200 requests, as the daemon")
    parser.add_argument("--online", action="store_true", help="learn while it goes, from censored samples")
    parser.add_argument("--json", action="store_true", help="print all cells as one JSON document")
    parser.add_argument("--plots", metavar="DIR", help="draw the paper's figures from these numbers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate with a progress bar; the result goes to stdout."""
    from pathlib import Path

    from ..simulate import report
    from ..simulate.evaluate import as_json, evaluate
    from ..simulate.online import evaluate_online
    from ..simulate.traces import read_requests, read_traces

    setup = _setup(args)
    folder = Path(args.traces)
    traces, requests = read_traces(folder, args.select.split(",")), read_requests(folder)
    if args.plots:
        report.require_plots()
    how = evaluate_online if args.online else evaluate
    cells = list(_with_progress(len(traces) * setup.n_groups, lambda tick: how(traces, requests, setup, tick)))
    if args.plots:
        for path in report.draw(cells, Path(args.plots)):
            print(f"drew {path}", file=sys.stderr)
    print(json.dumps({"cells": [as_json(c) for c in cells]}) if args.json else report.summary(cells))
    return 0


def _setup(args: argparse.Namespace) -> Setup:
    from ..errors import ConfigError
    from ..simulate.evaluate import PHONES, Setup
    from ..types import Side

    sides = tuple(Side) if args.constraint == "both" else (Side(args.constraint),)
    try:
        budgets = tuple(float(b) for b in args.budgets.split(","))
        phones = tuple(_phone(text) for text in args.devices.split(",")) if args.devices else PHONES
    except ValueError as e:
        msg = f"--budgets takes numbers, --devices NAME:PREFILL_TPS:DECODE_TPS: {e}"
        raise ConfigError(msg) from e
    return Setup(
        policies=tuple((args.policies or (ONLINE_POLICIES if args.online else DEFAULT_POLICIES)).split(",")),
        phones=tuple(_started(p, args.start) for p in phones),
        constraints=sides,
        budgets=budgets,
        alpha=args.alpha,
        kappa=args.kappa,
        n_seeds=args.seeds,
        n_requests=args.requests,
        windowed=args.window,
    )


def _phone(text: str) -> Phone:
    from ..simulate.player import Phone

    name, prefill, decode = text.split(":")
    return Phone(name, float(prefill), float(decode))


def _started(phone: Phone, start_s: float) -> Phone:
    from dataclasses import replace

    return replace(phone, start_s=start_s)


def _with_progress(total: int, work: Any) -> Iterable[Cell]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("evaluating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield from work(lambda: progress.advance(task))
