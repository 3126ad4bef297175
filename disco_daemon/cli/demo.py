"""`disco demo`: the main job, with no key and no network; both sides are real."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from .terminal import make_console, progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("demo", help="see device and server race, no key needed", description=__doc__)
    parser.add_argument("--live", action="store_true", help="race OPENAI_BASE_URL (with OPENAI_API_KEY): costs money")
    parser.add_argument("--live-model", default="gpt-4o-mini", help="model to ask there (default gpt-4o-mini)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Race a dozen prompts and print the table."""
    import asyncio

    from ..bench.demo import Live, run_demo
    from ..errors import ConfigError

    live = None
    if args.live:
        key = os.environ.get("OPENAI_API_KEY", "")
        if not key and not os.environ.get("OPENAI_BASE_URL"):
            raise ConfigError("--live needs OPENAI_API_KEY (and OPENAI_BASE_URL for another server than OpenAI's)")
        live = Live(os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"), args.live_model, key)
    result = asyncio.run(run_demo(live=live, say=progress, show=_show if not args.json else _ignore))
    if args.json:
        print(json.dumps(result))
    else:
        _table(result)
    return 0


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    del text


def _table(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Who answered, and when the first token came (ms)", title_justify="left", box=None)
    for column in (
        "prompt tokens",
        "started",
        "won",
        "answer",
        "device alone",
        "server alone",
        "tokens d/s",
        "cost µ$",
    ):
        table.add_column(column, justify="right")
    for row in result["requests"]:
        ms = [f"{row[key] * 1e3:.0f}" for key in ("ttft_s", "device_ttft_s", "server_ttft_s")]
        style = "green" if row["winner"] == "device" else "cyan"
        started = " ".join(
            f"{side[0]}+{row['plan'][f'{side}_s'] * 1e3:.0f}"
            for side in ("device", "server")
            if row["plan"][f"{side}_s"] is not None
        )
        tokens = f"{row['tokens']['device']}/{row['tokens']['server']}"
        table.add_row(
            str(row["prompt_tokens"]),
            started,
            f"[{style}]{row['winner']}[/]",
            *ms,
            tokens,
            f"{row['cost_usd'] * 1e6:.1f}",
        )
    console = make_console()
    console.print(table)
    s = result["summary"]
    console.print(
        f"\nMean time to first token: disco {s['mean_ttft_s'] * 1e3:.0f} ms, device alone "
        f"{s['mean_device_ttft_s'] * 1e3:.0f} ms, server alone {s['mean_server_ttft_s'] * 1e3:.0f} ms. "
        f"Device won {s['wins']['device']}, server {s['wins']['server']}; no loser made more than "
        f"{s['max_loser_tokens']} tokens.\nNext: `disco up`, then point any OpenAI client at http://127.0.0.1:4747/v1.",
        highlight=False,
    )
