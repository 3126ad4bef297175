"""`disco partner`: compute the upper layers of this machine's model for other machines of yours."""

from __future__ import annotations

import argparse
import json

from . import members


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "partner",
        help="let another machine of yours use this one for the upper layers of a model",
        description="Choose which machines may have this one compute the upper layers of its model for them.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    pair = actions.add_parser(
        "pair",
        help="make a one-time code for another machine",
        description="Print a code with which one other machine may join, once and within ten minutes, and the command "
        "for it. Whoever has the code can join, and have the upper layers of your model computed here; this machine "
        "can turn the rows that it is sent into their text.",
    )
    pair.add_argument("--address", default="", metavar="HOST", help="what the other machine calls this one")
    listed = actions.add_parser("list", help="list the machines that have joined")
    revoke = actions.add_parser("revoke", help="refuse a machine from now on")
    revoke.add_argument("name", help="of the machine, as `disco partner list` shows it")
    members.add_actions((pair, _pair), (listed, _list), (revoke, _revoke))
    for action in (pair, listed, revoke):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def _pair(args: argparse.Namespace) -> int:
    """Print the code, how long it lives and what to type on the other machine."""
    found = members.ask(args, "POST", "partner/pair", {"address": args.address})
    on = "This machine is a partner from now on (partner.enabled = true)."
    members.print_code(args, found, on, "disco split join")
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print the machines that have joined."""
    found = members.ask(args, "GET", "partner")
    if args.json:
        print(json.dumps(found))
        return 0
    state = found["state"] + (f" at {found['listening']}" if found["listening"] else "")
    layers = "" if found["cut"] is None else f", layers from {found['cut']} on" if found["cut"] else ", the whole model"
    print(f"partner: {state}{layers}")
    if found["error"]:
        print(f"         {found['error']}")
    for one in found["members"]:
        print(f"{one['name']}  {'connected' if one['connected'] else 'not connected'}, joined on {one['since']}")
    if not found["members"]:
        print("No machine has joined; `disco partner pair` prints a code for one.")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    """Refuse a machine from now on."""
    return members.revoke(args, "partner/revoke")
