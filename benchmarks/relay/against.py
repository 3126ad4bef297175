"""What the relay of this checkout adds to a request, against that of another one: both run at the same time.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.relay.against ../before [--n 1000] [--json]

One scripted server, and two daemons in front of it, each of its own checkout's code, by this Python and its packages.
Each round asks the server directly and through both daemons, in an order by chance; so whatever else the machine does
meets all three alike. What is compared is the median of what each daemon adds to the first token; the interval of 95 %
of the ratio is by the bootstrap over the rounds. CPU time, which other work disturbs least, stands beside.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

import disco_daemon
from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.bench.relay import PAIR_TOKENS, AskedWay, cpu_s_of, daemon_argv, door, rates, ttfts
from disco_daemon.system.program import command

from ..command import run_script

WARMUP = 50  # rounds
SAMPLES = 2000  # of the bootstrap
STREAMS, TOKENS = 50, 200  # of the throughput


async def compare(checkout: Path, n: int) -> dict[str, Any]:
    """Measure both. Raises BenchError."""
    if not (checkout / "disco_daemon").is_dir():
        msg = f"{checkout} is no checkout of disco: it has no disco_daemon/"
        raise BenchError(msg)
    here = Path(disco_daemon.__file__).parent.parent
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-bench-")))
        argv = command("disco_daemon.bench.loopback", "--port", "0", "--tokens", str(max(PAIR_TOKENS, TOKENS)))
        server_url = await stack.enter_async_context(child(argv, folder, "loopback server"))
        ways = [AskedWay("direct", await stack.enter_async_context(door("direct", server_url, daemon=False)))]
        for name, code in (("this", here), ("that", checkout)):
            own = folder / name
            env = {"PYTHONPATH": str(packages(code, own))} | {
                f"XDG_{kind}_HOME": str(own) for kind in ("CONFIG", "DATA", "CACHE")
            }
            url = await stack.enter_async_context(child(daemon_argv(server_url, own), own, "daemon", env))
            ways.append(AskedWay(name, await stack.enter_async_context(door(name, url))))
        try:
            await ttfts(ways, WARMUP, 0, progress)
            before = {way.name: await cpu_s_of(way.target) for way in ways}
            times = await ttfts(ways, n, 0, progress)
            cpu_s = {way.name: (await cpu_s_of(way.target) - before[way.name]) / n for way in ways}
            rated = await rates(ways, STREAMS, TOKENS, progress)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            msg = f"the measurement broke off: {error!r}"
            raise BenchError(msg) from error
    added = {name: [d - s for s, d in zip(times["direct"], times[name], strict=True)] for name in ("this", "that")}
    low, high = interval(added["this"], added["that"])
    return {
        "checkout": str(checkout),
        "added_ms": {name: round(statistics.median(each) * 1e3, 3) for name, each in added.items()},
        "ratio": round(statistics.median(added["this"]) / statistics.median(added["that"]), 4),
        "ratio_95": [round(low, 4), round(high, 4)],
        "cpu_ms_per_request": {name: round(cpu_s[name] * 1e3, 3) for name in added},
        "cpu_ratio": round(cpu_s["this"] / cpu_s["that"], 4),
        "cpu_us_per_token": {name: round(rated[name].cpu_s * 1e6, 2) for name in added},
        "n": n,
        "host": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
    }


def packages(checkout: Path, folder: Path) -> Path:
    """Return a folder, in a new `folder`, with a checkout's packages as they are installed: the lists of prices too."""
    found = folder / "packages"
    (found / "disco_daemon").mkdir(parents=True)
    for part in (checkout / "disco_daemon").iterdir():
        (found / "disco_daemon" / part.name).symlink_to(part)
    (found / "disco_daemon" / "profiles").symlink_to(checkout / "profiles")
    return found


def interval(this: Sequence[float], that: Sequence[float], samples: int = SAMPLES) -> tuple[float, float]:
    """Return the interval of 95 % of the ratio of two medians, by the bootstrap over pairs."""
    draw = random.Random(0).choices
    pairs = list(zip(this, that, strict=True))
    ratios = []
    for _ in range(samples):
        ours, theirs = zip(*draw(pairs, k=len(pairs)), strict=True)
        ratios.append(statistics.median(ours) / statistics.median(theirs))
    found = statistics.quantiles(ratios, n=40, method="inclusive")
    return found[0], found[-1]


def table(figures: dict[str, Any]) -> str:
    """Return the figures as rows."""
    low, high = figures["ratio_95"]
    rows = (
        ("added to the first token, ms", "added_ms", f"{figures['ratio']:.3f} ({low:.3f} to {high:.3f})"),
        ("CPU time of a request, ms", "cpu_ms_per_request", f"{figures['cpu_ratio']:.3f}"),
        ("CPU time of a token, us", "cpu_us_per_token", ""),
    )
    lines = [f"{'':<30}{'this':>10}{'that':>10}  ratio"]
    for label, key, ratio in rows:
        lines.append(f"{label:<30}{figures[key]['this']:>10.3f}{figures[key]['that']:>10.3f}  {ratio}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Measure and print; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other checkout's folder")
    parser.add_argument("--n", type=at_least(20), default=1000, help="rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    figures = run_measurement(compare(args.checkout.resolve(), args.n))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
