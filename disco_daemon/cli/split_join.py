"""`disco split join|leave|status`: have a partner compute the upper layers of a model, end that, and see how it is."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import direct, progress

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..link.trust.pairing import PairedPartner


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions."""
    join = actions.add_parser(
        "join",
        help="join a partner with its code",
        description="Join a partner with the code that `disco partner pair` has printed there: get a certificate, "
        "fetch the lower layers of its model, and have the running daemon answer with both. The partner can turn what "
        "it is sent into the text of your conversations: join a machine that is yours, or that you trust as a server.",
    )
    join.add_argument("code", help="what `disco partner pair` has printed on the other machine")
    join.add_argument(
        "--cut", type=int, metavar="K", help="number of layers on this machine (default: as `disco split plan` would)"
    )
    join.add_argument(
        "--draft",
        nargs="?",
        const="",
        metavar="FILE",
        help="fetch no layers: a small model of the same vocabulary drafts here, and the partner has the whole model "
        "(default: the configured device model)",
    )
    join.add_argument("--name", default="", help="what the partner calls this machine (default: its host name)")
    leave = actions.add_parser(
        "leave",
        help="leave the partner: the device is whole again",
        description="Remove the lower layers, the certificate and the settings of a partner from this machine. There, "
        "this one is forgotten if it can be told so, and by `disco partner revoke` else.",
    )
    leave.add_argument("--yes", action="store_true", help="do not ask")
    status = actions.add_parser("status", help="show the link to the partner")
    for action, run in ((join, _join), (leave, _leave), (status, _status)):
        action.add_argument("--url", help="daemon to ask (default from the configuration)")
        action.add_argument("--json", action="store_true", help="print one JSON document")
        action.set_defaults(run=run)


def _join(args: argparse.Namespace) -> int:
    """Join, write the settings, and reload a running daemon."""
    import asyncio

    from ..config.layers import config_path, load, set_values
    from ..errors import ConfigError
    from ..machines.split.drafter import choose_draft
    from ..machines.split.joining import join
    from ..models.progress import ProgressBar

    config, wanted = load(), args.cut
    if args.draft is not None:
        if args.cut is not None:
            raise ConfigError("--cut and --draft do not go together: a small model drafts for one that is not cut")
        wanted = choose_draft(config, args.draft)
    bar = ProgressBar(direct(sys.stderr))
    try:
        found = asyncio.run(join(config, args.code, args.name, wanted, bar, progress))
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


def _leave(args: argparse.Namespace) -> int:
    """Remove what joining has made, and tell the partner; exit code 1 if the user does not want it."""
    from ..config.layers import config_path, load, set_values
    from ..machines.split.edge_device import membership
    from ..machines.split.joined_model import JoinedFolder

    folder = JoinedFolder()
    found = folder.find()
    name = "what is left of joining"
    if found is not None:
        name = f"the layers up to {found.cut} of {found.model}" if found.cut else f"the vocabulary of {found.model}"
    if not args.yes and not _agrees(f"Remove {name}, the certificate for the partner, and the [split] settings?"):
        print("disco: nothing was removed; --yes removes it without a question", file=sys.stderr)
        return 1
    config = load()  # settings that are wrong are not written to
    settings = {"enabled": False, "partner": "", "cut": None, "draft_model": ""}
    set_values(config_path(), {f"split.{key}": value for key, value in settings.items()})
    running = _reload(args)
    partner = membership().partner()
    untold = _say_goodbye(partner, private=config.policy.private) if partner is not None else ""
    n_bytes = folder.remove()
    membership().forget()
    if args.json:
        print(json.dumps({"removed_bytes": n_bytes, "running": running, "told": partner is not None and not untold}))
        return 0
    print(f"The device is whole again; {n_bytes / 1e6:.0f} MB of layers and the certificate were removed.")
    if partner is not None and untold:
        print(f"{partner.name} does not know yet ({untold}): `disco partner revoke {partner.own_name}` there.")
    return 0


def _say_goodbye(partner: PairedPartner, *, private: bool) -> str:
    """Tell the partner that this machine leaves; return why it could not be told, empty if it was."""
    import asyncio

    from ..link.relay.join import leave
    from ..link.trust.pairing_code import PairingError

    if private:
        return "policy.private is on: nothing leaves this machine"
    try:
        asyncio.run(leave(partner))
    except PairingError as e:
        return str(e)
    return ""


def _agrees(question: str) -> bool:
    """Ask at a terminal; without one nobody agrees."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _status(args: argparse.Namespace) -> int:
    """Show the link; exit code 1 while it is down."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    found = client.get(root, "/disco/v1/state", key).get("split")
    if args.json:
        print(json.dumps(found or {"state": "off"}))
    else:
        for line in lines_of(found):
            print(line)
    return 0 if found is None or found["state"] == "up" else 1


def lines_of(split: dict[str, Any] | None) -> list[str]:
    """Return the link in words, for `disco status` too."""
    if split is None:
        return ["The device is whole: no partner computes a part of its model."]
    rtt = "" if split["rtt_ms"] is None else f", round trip {split['rtt_ms']:.1f} ms"
    given = split.get("tokens_per_round_trip")
    rtt += "" if given is None else f", {given:.1f} tokens each"
    bits = {True: ", the whole model's very bits", False: ", another build there: answers may differ", None: ""}
    where, what = f"layers 0 to {split['cut']} here, the rest at {split['partner']}", f"rows as {split['codec']}"
    if not split["cut"]:
        where, what = (
            f"{Path(split['draft_model']).stem} drafts here, the whole model is at {split['partner']}",
            "token ids",
        )
    line = f"split        {split['state']}: {where}; {split['mode']}, {what}{rtt}{bits[split['same_bits']]}"
    return [line] + ([f"             {split['error']}"] if split.get("error") else [])


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
