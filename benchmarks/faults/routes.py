"""What all APIs have to keep alike: cancelled requests, the same texts, and errors for bad bodies.

    python -m benchmarks.faults.routes [--only cancels|texts|bodies] [--n N] [--json]

A daemon with the embedded model is asked by way of each API. `cancels`: how long after its client has gone the device
still has a request, in several situations, N times each. `texts`: for how many of N prompts all of them give the same
text at temperature 0, in one piece and streamed. `bodies`: how soon N bad bodies are refused on each route, by a daemon
with a server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import tomlkit

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.command import at_least, print_figures, progress, run_measurement
from disco_daemon.models.default import fetch_default_model
from disco_daemon.system.program import verb

from ..command import run_script
from . import route_bodies, route_cancels, route_texts

PARTS = {"cancels": route_cancels, "texts": route_texts, "bodies": route_bodies}
USUAL = {"cancels": 20, "texts": 100, "bodies": 200}
READY_S = 60.0  # until the model is in memory


@asynccontextmanager
async def _device(folder: Path) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Start a daemon with the embedded model alone; its address without `/v1`."""
    config = folder / "config.toml"
    config.write_text(tomlkit.dumps({"device": {"autotune": False, "n_ctx": 8192, "rounding": "exact"}}))
    argv = [
        *verb("up", "--port", "0", "--json", "--until-eof", "--config", str(config)),
        *("--history", str(folder / "history.sqlite"), "--threads", "1", "--model", str(fetch_default_model(progress))),
    ]
    async with child(argv, folder, "daemon") as url, aiohttp.ClientSession() as session:
        root, until = url.removesuffix("/v1"), time.monotonic() + READY_S
        while True:
            async with session.get(f"{root}/disco/v1/state") as response:
                if (await response.json())["endpoints"]["device"]["state"] == "ready":
                    break
            if time.monotonic() > until:
                raise BenchError("the model was not in memory in time")
            await asyncio.sleep(0.05)
        yield root, session


async def measure(parts: list[str], n: int | None) -> dict[str, Any]:
    """Return the figures of each part."""
    found: dict[str, Any] = {}
    if asking := [part for part in parts if part != "bodies"]:
        with tempfile.TemporaryDirectory(prefix="disco-routes-") as folder:
            async with _device(Path(folder)) as (root, session):
                for part in asking:
                    measured = route_cancels.measure if part == "cancels" else route_texts.measure
                    found[part] = await measured(root, session, n or USUAL[part])
    if "bodies" in parts:
        found["bodies"] = await route_bodies.measure(n or USUAL["bodies"])
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the figures as text."""
    return "\n\n".join(PARTS[part].table(found) for part, found in figures.items())


def main() -> int:
    """Measure by the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    usual = ", ".join(f"{n} {part}" for part, n in USUAL.items())
    parser.add_argument("--n", type=at_least(1), help=f"how often (default: {usual})")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    figures = run_measurement(measure([args.only] if args.only else list(PARTS), args.n))
    return print_figures(figures, table, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
