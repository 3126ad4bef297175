"""`disco up`: run the daemon in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config.schema import Config
    from ..endpoints.shaper import Shape


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("up", help="run the daemon in the foreground", description=__doc__)
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 = a free one (default 4747)")
    parser.add_argument("--policy", help="optimal, paper, race, all-device, all-server, delay, …")
    parser.add_argument("--model", help="GGUF file for the device")
    parser.add_argument("--threads", type=int, help="CPU threads of the device")
    parser.add_argument("--no-device", action="store_true", help="use the server only")
    parser.add_argument("--device-only", action="store_true", help="use the device only, whatever server is configured")
    parser.add_argument("--key-origin", metavar="URL", help="whose the server's API key is; it is sent nowhere else")
    parser.add_argument("--config", type=Path, help="another config.toml")
    parser.add_argument("--history", help="another history file")
    parser.add_argument("--shape-ttft", type=Path, metavar="CSV", help="replay a trace's TTFTs, for experiments")
    parser.add_argument("--shape-tps", type=float, metavar="N", help="at most N token/s an answer, for experiments")
    parser.add_argument(
        "--force-handoff", type=_span, metavar="A-B", help="move each answer once, after A to B tokens, for experiments"
    )
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", default="info", choices=levels, help="what is logged (default: %(default)s)")
    parser.add_argument("--service", action="store_true", help="started by systemd or launchd: logs are JSON lines")
    parser.add_argument("--json", action="store_true", help="print one JSON line with the URL once it listens")
    parser.add_argument(
        "--until-eof", action="store_true", help="end when standard input ends, as with its parent process"
    )
    parser.set_defaults(run=run)


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError("must be like 5-40, from 1 on")
    return span


def _shape(args: argparse.Namespace) -> Shape | None:
    from math import inf

    from ..endpoints.shaper import Shape, read_trace

    if args.shape_ttft is None and args.shape_tps is None:
        return None
    return Shape(tuple(read_trace(args.shape_ttft)) if args.shape_ttft else (), args.shape_tps or inf)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    import asyncio
    import gc
    import signal

    early: list[int] = []  # signals that come before there is a daemon, and would end this process in the middle

    def note(number: int, _: object) -> None:
        if number == signal.SIGTERM in early:
            os._exit(128 + number)  # a second one ends everything at once, as it does later
        early.append(number)

    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, note)
    gc.disable()  # all that is loaded now stays: to look for what does not is an eighth of a start
    from ..config.layers import config_path, load
    from ..daemon import logs
    from ..errors import ConfigError
    from ..system.net import is_loopback

    logs.begin(args.log_level, as_json=args.service)
    flags = {
        "api.host": args.host,
        "api.port": args.port,
        "policy.name": args.policy,
        "device.model": args.model,
        "device.n_threads": args.threads,
        "device.enabled": False if args.no_device else None,
        "server.base_url": "" if args.device_only else None,
        "server.key_origin": args.key_origin,
        "history.path": args.history,
    }
    if args.config is not None and not args.config.exists():
        msg = f"{args.config} does not exist (--config)"
        raise ConfigError(msg)
    config = load(args.config, flags=flags)
    if not is_loopback(config.api.host) and not config.api.key:
        from ..keys.key_file import KeyFile

        if not KeyFile(args.config or config_path()).read():
            msg = (
                f"refusing to listen on {config.api.host} without an API key: `disco config set api.key SECRET`, or "
                "`disco keys add NAME` for a key with a name"
            )
            raise ConfigError(msg)
    asyncio.run(_serve(args, config, args.config or config_path(), flags, early))
    return 0


async def _serve(args: argparse.Namespace, config: Config, path: Path, flags: dict[str, Any], early: list[int]) -> None:
    """Load the daemon's modules while its engine's process loads those of its own; then serve.

    `early` are the signals so far: a SIGTERM among them ends this in order, and what has begun with it.
    """
    import gc
    import signal

    from ..engine.early import early_engine
    from ..system.control_groups import n_processors

    device = config.device
    has_engine = device.enabled and not (device.base_url or config.split.enabled or config.fleet.enabled)
    # On a single processor it would only keep the daemon from starting.
    async with early_engine(wanted=has_engine and n_processors() > 1) as engine:
        with _no_certificates():
            from ..daemon.daemon import Daemon
        from ..daemon.lifecycle import announce_json, run_until_signal
        from ..service.notify import ServiceChannel

        gc.freeze()  # before the collector is back, which would walk all of it at once
        gc.enable()
        if signal.SIGTERM in early:
            return
        daemon = Daemon(
            config,
            path,
            shape=_shape(args),
            force=args.force_handoff,
            manager=ServiceChannel(),
            flags=flags,
            early=engine,
        )
        announce = announce_json if args.json else _announce
        await run_until_signal(daemon, announce, until_eof=args.until_eof, early=early)


@contextlib.contextmanager
def _no_certificates() -> Iterator[None]:
    """Let no library read the system's certificates while it is loaded, by OpenSSL's own variables.

    aiohttp reads them twice, a tenth of a start. Its contexts trust nobody then; a server gets one that is read when
    that is made (`endpoints.server_client`).
    """
    names = "SSL_CERT_FILE", "SSL_CERT_DIR"
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def _announce(url: str) -> None:
    print(f"disco listens on {url} (Ctrl-C stops it)", flush=True)
