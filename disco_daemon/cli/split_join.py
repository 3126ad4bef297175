"""What joins a partner and leaves it: `disco machines join` and `leave` for a machine that splits a model."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from .terminal import direct, progress

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..link.trust.pairing import PairedPartner
    from ..link.trust.pairing_code import PairingCode

OPTIONS = ("cut", "draft")  # of `join`, that say nothing to a machine that lends hosts


def add_options(join: argparse.ArgumentParser) -> None:
    """Add what says how a model is split."""
    split = join.add_argument_group("to split a model")
    split.add_argument(
        "--cut", type=int, metavar="K", help="number of layers on this machine (default: as `disco split plan` would)"
    )
    split.add_argument(
        "--draft",
        nargs="?",
        const="",
        metavar="FILE",
        help="fetch no layers: a small model of the same vocabulary drafts here, and the partner has the whole model "
        "(default: the configured device model)",
    )


def join(args: argparse.Namespace, code: PairingCode) -> int:
    """Join, write the settings, and reload a running daemon."""
    import asyncio

    from ..config.layers import config_path, load, set_values
    from ..errors import ConfigError
    from ..machines.split.drafter import choose_draft
    from ..machines.split.joining import join as join_partner
    from ..models.progress import ProgressBar

    config, wanted = load(), args.cut
    if args.draft is not None:
        if args.cut is not None:
            raise ConfigError("--cut and --draft do not go together: a small model drafts for one that is not cut")
        wanted = choose_draft(config, args.draft)
    bar = ProgressBar(direct(sys.stderr))
    try:
        found = asyncio.run(join_partner(config, code, args.name, wanted, bar, progress))
    finally:
        bar.end()
    joined, address = found.joined, str(found.address)
    settings = {
        "enabled": True,
        "partner": address,
        "cut": joined.cut,
        "draft_model": str(wanted) if args.draft else "",
    }
    set_values(config_path(), {f"split.{key}": value for key, value in settings.items()})
    running = _reload(args)
    if args.json:
        from msgspec import to_builtins

        print(json.dumps({**to_builtins(joined), "address": address, "running": running, "why": found.why}))
        return 0
    if joined.cut:
        print(
            f"This machine has layers 0 to {joined.cut} of {joined.n_layers} of {joined.model} "
            f"({joined.n_bytes / 1e6:.0f} MB); {joined.partner} at {address} has the rest."
        )
        print(f"Why there: {found.why}.")
    else:
        print(f"{joined.model} is whole at {joined.partner} ({address}): {found.why}.")
    print("The running daemon answers with both from now on." if running else "Start the daemon: `disco up`.")
    return 0


def has_joined(config: Config) -> bool:
    """Whether something is left of joining, also of a join that broke."""
    from ..machines.split.joined_model import JoinedFolder

    return config.split.enabled or bool(config.split.partner) or JoinedFolder().folder.exists()


def named() -> str:
    """Return what is removed, in words."""
    from ..machines.split.joined_model import JoinedFolder

    found, name = JoinedFolder().find(), "what is left of joining"
    if found is not None:
        name = f"the layers up to {found.cut} of {found.model}" if found.cut else f"the vocabulary of {found.model}"
    return f"{name}, the certificate for the partner, and the [split] settings"


def end_use(args: argparse.Namespace, _: PairedPartner | None) -> dict[str, Any]:
    """Write the settings of a whole device, and reload a running daemon; return whether there is one."""
    from ..config.layers import config_path, set_values

    settings = {"enabled": False, "partner": "", "cut": None, "draft_model": ""}
    set_values(config_path(), {f"split.{key}": value for key, value in settings.items()})
    return {"running": _reload(args)}


def remove() -> int:
    """Remove the layers; return their bytes."""
    from ..machines.split.joined_model import JoinedFolder

    return JoinedFolder().remove()


def _reload(args: argparse.Namespace) -> bool:
    """Reload a running daemon; return whether there is one. Raises DaemonError if it refuses the settings."""
    from ..client import once as client
    from ..config.layers import load

    config: Config = load()
    root, key = client.daemon_at(args.url, config)
    try:
        client.reload(root, key)
    except client.DaemonError as e:
        if e.code == client.NOT_RUNNING:
            return False
        raise
    return True
