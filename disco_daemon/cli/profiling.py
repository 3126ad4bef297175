"""`disco profile`: measure this machine with its model, and the server, and keep the figures."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import make_console, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..config.schema import Config
    from ..endpoints.device import Device
    from ..endpoints.server import Server
    from ..profiling.saved import DeviceFigures, Measured, ServerFigures

BUSY = 0.2  # of the processor: if others take more of it, their work is measured, too


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine with its model, and the server",
        description="Measure how fast the device's model loads, reads and writes and what energy that takes, fit the "
        "time to first token against the prompt's length, and see how fast the server answers: a few short streams, "
        "which cost a few tokens. The result is kept for the daemon. Best while the machine has nothing else to do.",
    )
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 7, 5 streams instead of 20")
    parser.add_argument("--check", type=_count, default=0, metavar="N", help="then compare N more answers with the fit")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw TTFT against prompt length")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure, keep and show the figures."""
    import asyncio

    from msgspec import to_builtins

    from ..config.layers import load
    from ..machines.device_settings import profiles
    from ..profiling import picture, saved
    from ..simulate.figures import require_plots

    if args.plot is not None:
        require_plots()
    config = load()
    device, server = _endpoints(config)
    if (url := _daemon_beside(config)) is not None:
        progress(f"a daemon runs at {url}: what it computes meanwhile slows this down; best stop it first")
    measured = asyncio.run(_measure(config, device, server, args))
    path = saved.save(profiles(), measured)
    if args.plot is not None:
        progress(f"drew {picture.draw(measured.device, args.plot)}")
    if args.json:
        document = {"device": to_builtins(measured.device), "server": None, "profile": str(path)}
        print(json.dumps(document | ({"server": to_builtins(measured.server)} if measured.server else {})))
    else:
        _show(measured, path)
    return 0


def _endpoints(config: Config) -> tuple[Device, Server | None]:
    """Make the endpoints as the daemon does, with an engine that ignores conversations on disk. Raises ConfigError."""
    from msgspec.structs import replace as replace_fields

    from ..clock import SystemClock
    from ..config.layers import require_complete
    from ..daemon.endpoints import make_endpoints
    from ..endpoints.device import Device
    from ..endpoints.server import Server
    from ..errors import ConfigError
    from ..machines.managed_device import Making
    from ..types import Side

    require_complete(config)
    if config.device.base_url or not config.device.enabled:
        raise ConfigError("there is no engine to measure: device.base_url is set, or device.enabled is false")
    endpoints = make_endpoints(config, Making(SystemClock()))
    device, server = endpoints[Side.DEVICE], endpoints.get(Side.SERVER)
    assert isinstance(device, Device)
    device.engine.config = replace_fields(device.engine.config, disk=None)
    if not isinstance(server, Server) or config.policy.private:  # no measurement leaves this machine, either
        server = None
    return device, server


def _daemon_beside(config: Config) -> str | None:
    """Return the address of a daemon on the configured port; None if there is none."""
    from ..client import once as client

    root, key = client.daemon_at(None, config)
    try:
        client.get(root, "/disco/v1/state", key)
    except (client.DaemonError, ValueError):
        return None
    return root


async def _measure(config: Config, device: Device, server: Server | None, args: argparse.Namespace) -> Measured:
    """Measure with a progress bar. The engine stays up until the server was asked, whose tokens it may count."""
    from datetime import UTC, datetime

    from ..bench.demo import PASSAGE
    from ..clock import SystemClock
    from ..machines.device_settings import key_for, knobs_for
    from ..power.sensors import of_this_machine
    from ..profiling.device import FULL, QUICK, Steps, measure
    from ..profiling.saved import Measured
    from ..profiling.server_probe import N_FULL, N_QUICK, measure_server

    clock, path = SystemClock(), Path(device.engine.config.model_path)
    knobs, key = knobs_for(config, path), key_for(config, path)
    n = N_QUICK if args.quick else N_FULL
    with _progress() as tell:
        steps = Steps(tell)
        try:
            figures = await measure(
                device,
                lambda on_gpu: of_this_machine(config.device.watts, knobs.n_threads, on_gpu=on_gpu),
                clock,
                QUICK if args.quick else FULL,
                steps,
                text=PASSAGE,
                n_check=args.check,
            )
            seen = (
                await measure_server(server, clock, steps, n=n, may_probe=config.server.probe)
                if server is not None
                else None
            )
        finally:
            await device.close()
    return Measured(key, knobs, datetime.now(UTC).date().isoformat(), figures, seen)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr during a measurement; yield the function that moves it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking at the machine", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


# --- for people ------------------------------------------------------------------------------------------------------


def _show(measured: Measured, path: Path) -> None:

    from ..profiling import picture

    console = make_console(highlight=False)
    for line in [*_device_lines(measured.device), "", picture.terminal(measured.device), ""]:
        console.print(line, markup=False, soft_wrap=True)
    for line in [*_warnings(measured.device), *_server_lines(measured.server)]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"kept in {path} for the daemon", markup=False, soft_wrap=True)


def _device_lines(device: DeviceFigures) -> list[str]:
    from ..profiling import picture
    from ..profiling.saved import TYPICAL

    fit, energy = device.ttft_fit, device.energy
    how = "measured" if energy.windows else "assumed, not measured"
    first = f"; the first time {device.first_load_s:.2f} s"
    c, k = _between(fit.c_interval, 1e3, 1), _between(fit.k_interval, 1e3, 4)
    read, written = energy.prefill_interval, energy.decode_interval
    lines = [
        f"model    {device.model}, {device.n_ctx} tokens of context",
        f"loads    in {device.load_s:.2f} s{_between(device.load_interval, 1, 2)}{first}",
        f"reads    {device.prefill_tps:.0f} token/s{_between(device.prefill_interval, 1, 0)}, a prompt of {TYPICAL}",
        f"writes   {device.decode_tps:.1f} token/s{_between(device.decode_interval, 1, 1)}",
        f"TTFT     {picture.formula(device)}; R² {fit.r2:.4f} ({fit.n} prompts, {fit.n_outliers} outliers)",
        f"         c{c} and k{k} in ms; median error {100 * fit.relative_error:.1f} %",
        f"energy   {energy.prefill_j_per_token:.3g} J to read a token{_between(read, 1, 4)}",
        f"         {energy.decode_j_per_token:.3g} J to write one{_between(written, 1, 3)}",
        f"         {how}: {energy.source}, within {100 * energy.relative_error:.0f} %",
    ]
    if (check := device.check) is not None:
        lines.append(
            f"check    {check.n} more answers: predictions off by {100 * check.median_relative_error:.1f} % (median), "
            f"{100 * check.p90_relative_error:.1f} % (P90)"
        )
    return lines


def _between(interval: tuple[float, float] | None, factor: float, digits: int) -> str:
    """Return a 95 % interval in words, "" of a single sample."""
    return "" if interval is None else f" ({factor * interval[0]:.{digits}f} to {factor * interval[1]:.{digits}f})"


def _warnings(device: DeviceFigures) -> list[str]:
    from ..profiling.device import DRIFT

    lines = []
    if device.drift > DRIFT:
        lines.append(
            f"slowed   the same prompts took {100 * device.drift:.0f} % longer at the end: heat, or others at work"
        )
    elif device.throttled:
        lines.append("slowed   the sensors say that heat slows the processor down")
    if device.n_warm:
        lines.append(f"warm     {device.n_warm} prompts were in a cache in part, and were not counted")
    if device.busy_share > BUSY:
        lines.append(f"busy     others took {100 * device.busy_share:.0f} % of the processor: alone it is faster")
    return lines


def _server_lines(server: ServerFigures | None) -> list[str]:
    if server is None:
        return []
    lines = [f"server   {server.base_url}, {server.model}"]
    if server.rtt_s is not None:
        lines.append(f"         round trip {1e3 * server.rtt_s:.1f} ms")
    if server.ttft_p50_s is not None and server.ttft_p90_s is not None and server.ttft_mean_s is not None:
        lines.append(
            f"         TTFT {server.ttft_p50_s:.3f} s (median), {server.ttft_p90_s:.3f} s (P90), mean "
            f"{server.ttft_mean_s:.3f}{_between(server.ttft_interval, 1, 3)}, {server.n} streams"
        )
    how = " (probed)" if server.probed else ""
    lines.append(f"         continues answers by: {server.continuation}{how}; this cost {server.tokens} tokens")
    if server.n_failed or server.error:
        lines.append(f"         {server.n_failed} failed: {server.error}")
    return lines
