"""`disco fleet new|members|revoke` at home, and `disco fleet join|leave` on a machine that lends it hosts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from . import members
from .terminal import make_console, progress

if TYPE_CHECKING:
    from ..link.trust.pairing import PairedPartner
    from ..machines.fleet.lend_terms import TermsFolder
    from ..machines.owner import OwnerTerms

QUESTION = (
    "Whoever has made this code may have their disco compute here, with their model, by {threads} threads{memory}. "
    "Do you want that?"
)
LEAST_GIB = 0.5  # of memory for a host: llama.cpp and the interpreter take a part of it before any layer does


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions."""
    new = actions.add_parser(
        "new",
        help="make a one-time code for another machine",
        description="Print a code with which one other machine may join this one's fleet, once and within ten minutes, "
        "and the command for it. Inner layers of the model are then computed there; that machine can turn the rows "
        "that it is sent into their text, so private requests are refused while it may compute.",
    )
    new.add_argument("--address", default="", metavar="HOST", help="what the other machine calls this one")
    listed = actions.add_parser("members", help="list the machines that have joined")
    revoke = actions.add_parser("revoke", help="refuse a machine from now on")
    revoke.add_argument("name", help="of the machine, as `disco fleet members` shows it")
    members.add_actions((new, _new), (listed, _members), (revoke, _revoke))
    join = actions.add_parser(
        "join",
        help="lend another machine of yours a part of this one, until Ctrl-C",
        description="Compute layers of another machine's model here, with the code that `disco fleet new` has printed "
        "there; without one, as joined before. Joining lets its owner's disco compute on this machine. Ctrl-C ends it: "
        "answers go on without this machine. While it runs, the same in another terminal with --cpus, --memory, "
        "--only-idle or --only-mains, and without a code, changes those alone: what is beyond them leaves this machine "
        "while answers go on.",
    )
    join.add_argument("code", nargs="?", default="", help="what `disco fleet new` has printed on the other machine")
    join.add_argument("--cpus", type=int, metavar="N", help="threads that it may use (default: all processors but one)")
    join.add_argument("--memory", type=float, metavar="GIB", help="memory that it may use, GiB (default: 0, all)")
    yes_or_no = argparse.BooleanOptionalAction
    join.add_argument("--only-idle", action=yes_or_no, help="only while nobody works at this machine")
    join.add_argument("--only-mains", action=yes_or_no, help="never on battery")
    join.add_argument("--name", default="", help="what home calls this machine (default: its host name)")
    join.add_argument("--without-ray", action="store_true", help="let nobody start it again if it ends")
    join.add_argument(
        "--until-eof", action="store_true", help="end when standard input ends, as with its parent process"
    )
    join.add_argument("--as-agreed", action="store_true", help="by what was allowed last, for what starts it again")
    join.add_argument("--yes", action="store_true", help="do not ask")
    join.set_defaults(run=_join)
    leave = actions.add_parser(
        "leave",
        help="leave the fleet that this machine has joined",
        description="Remove the certificate for the other machine and its layers from this one. There, this machine is "
        "forgotten if it can be told so, and by `disco fleet revoke` else.",
    )
    leave.set_defaults(run=_leave)
    for action in (new, listed, revoke, join, leave):
        action.add_argument("--json", action="store_true", help="print one JSON document")


# --- at home --------------------------------------------------------------------------------------------------------


def _new(args: argparse.Namespace) -> int:
    """Print the code, how long it lives and what to type on the other machine."""
    found = members.ask(args, "POST", "fleet/new", {"address": args.address})
    on = "This machine is the home of a fleet from now on (fleet.enabled = true)."
    if not members.print_code(args, found, on, "disco fleet join"):
        return 0
    console = make_console(highlight=False, soft_wrap=True)
    if found["ray"]["state"] in ("missing", "off"):
        console.print(found["ray"]["why"])
    else:
        console.print(
            "Rows and files go by TLS. What Ray says is not encrypted, and its ports are open to all who reach them: "
            "in a network that others share, `disco config set fleet.ray off` (docs/explain/fleet.md)."
        )
    return 0


def _members(args: argparse.Namespace) -> int:
    """Print the machines that have joined."""
    found = members.ask(args, "GET", "fleet/members")
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"fleet: {found['state']}" + (f" at {found['listening']}" if found["listening"] else ""))
    if found["error"]:
        print(f"       {found['error']}")
    for one in found["members"]:
        print(_line(one))
    if not found["members"]:
        print("No machine has joined; `disco fleet new` prints a code for one.")
    return 0


def _line(one: dict[str, Any]) -> str:
    how = "lends a host" if one["lent"] else "connected, no host is used" if one["connected"] else "not connected"
    if one["left_alone"]:
        how = "left alone for a while: its hosts ended soon, twice"
    layers = " and ".join(f"{first}-{last}" for first, last in one["layers"])
    return f"{one['name']}  {how}, joined on {one['since']}" + (f"; layers {layers} are its own" if layers else "")


def _revoke(args: argparse.Namespace) -> int:
    """Refuse a machine from now on."""
    return members.revoke(args, "fleet/revoke")


# --- on the other machine -------------------------------------------------------------------------------------------


def _join(args: argparse.Namespace) -> int:
    """Join with a code, and lend hosts until Ctrl-C; exit code 1 where home refuses, or the user does."""
    import asyncio

    from ..errors import ConfigError
    from ..machines.fleet.lending import home_membership

    kept = home_membership()
    if args.code:
        terms = _terms(args, None)
        memory = f", {args.memory:g} GiB of memory" if args.memory else ""
        if not args.yes and not _agrees(QUESTION.format(threads=terms.n_threads, memory=memory)):
            print("disco: nothing was joined; --yes joins without a question", file=sys.stderr)
            return 1
        home = _pair(args)
        kept.save(home)
    elif (known := kept.partner()) is not None:
        home = known
        folder = _terms_folder(home)
        before = folder.in_force()
        terms = _terms(args, before if args.as_agreed or folder.is_lending() else None)
        if before is not None and _allows(args) and not args.as_agreed and folder.agree(terms):
            _print_terms(args, home, terms)
            return 0
    else:
        raise ConfigError("this machine has joined no fleet: run `disco fleet new` on the other one, and give its code")
    if args.json:
        print(json.dumps(_joined(home)), flush=True)
    else:
        print(f"{home.own_name} has joined the fleet of {home.name} ({home.addresses[0]}); Ctrl-C ends it.", flush=True)
    if args.until_eof:
        from ..system.program import end_with_stdin

        end_with_stdin()
    why = asyncio.run(
        _lend(home, terms, is_node=not args.without_ray, by_ray=not args.without_ray and not args.until_eof)
    )
    if why:
        print(f"disco: {why}", file=sys.stderr)
    return 1 if why else 0


def _joined(home: PairedPartner) -> dict[str, Any]:
    return {"home": home.name, "name": home.own_name, "address": str(home.addresses[0])}


def _print_terms(args: argparse.Namespace, home: PairedPartner, terms: OwnerTerms) -> None:
    """Say that what lends this machine's hosts goes by other terms now."""
    if args.json:
        said = {
            "n_threads": terms.n_threads, "memory_bytes": terms.memory_bytes, "only_idle": terms.only_idle,
            "only_mains": terms.only_mains,
        }  # fmt: skip
        print(json.dumps(_joined(home) | {"terms": said}))
        return
    print(f"The fleet of {home.name} may have of this machine from now on: {terms}.")


def _allows(args: argparse.Namespace) -> bool:
    """Whether the words say what the fleet may have."""
    return any(value is not None for value in (args.cpus, args.memory, args.only_idle, args.only_mains))


def _terms_folder(home: PairedPartner) -> TermsFolder:
    from ..machines.fleet.lend_terms import TermsFolder
    from ..machines.fleet.lending import lent_folder

    return TermsFolder(lent_folder() / home.name)


def _terms(args: argparse.Namespace, before: OwnerTerms | None) -> OwnerTerms:
    """Return what the owner allows: what the words leave open is as `before`. Raises ConfigError."""
    from ..errors import ConfigError
    from ..machines.owner import OwnerTerms
    from ..system.processors import n_cores

    if args.cpus is not None and args.cpus < 1:
        msg = f"--cpus {args.cpus}: a host needs one thread at least"
        raise ConfigError(msg)
    if args.memory and args.memory < LEAST_GIB:
        msg = f"--memory {args.memory:g}: a host needs {LEAST_GIB:g} GiB at least"
        raise ConfigError(msg)
    terms = before or OwnerTerms(max(1, n_cores() - 1))
    return OwnerTerms(
        terms.n_threads if args.cpus is None else args.cpus,
        terms.memory_bytes if args.memory is None else int(args.memory * 2**30),
        terms.only_idle if args.only_idle is None else args.only_idle,
        terms.only_mains if args.only_mains is None else args.only_mains,
    )


def _pair(args: argparse.Namespace) -> PairedPartner:
    """Get a certificate of home. Raises PairingError."""
    import asyncio
    import socket

    from ..link.relay.join import pair
    from ..link.trust.pairing_code import parse_code, safe_name

    home, _ = asyncio.run(pair(parse_code(args.code), args.name or safe_name(socket.gethostname())))
    return home


async def _lend(home: PairedPartner, terms: OwnerTerms, *, by_ray: bool, is_node: bool) -> str:
    """Lend hosts until a signal comes; return why home refuses, "" behind a signal.

    `by_ray`: as a node of Ray that is started first; `is_node`: this machine is one, perhaps started by that.
    """
    import asyncio
    import signal

    from ..machines.fleet.lending import FleetLending, lent_folder
    from ..machines.fleet.ray_keeper import ray_version
    from ..machines.fleet.ray_node import lend_by_ray

    async def lend() -> str:
        agreed = terms
        if by_ray:
            kept = _terms_folder(home)
            await asyncio.to_thread(kept.keep, terms)  # what Ray starts goes by it
            await lend_by_ray(home, terms, progress)
            agreed = await asyncio.to_thread(lambda: kept.in_force() or terms)
        ray = ray_version() if is_node else ""
        return await FleetLending(home, lent_folder() / home.name, agreed, progress, ray).run()

    lending = asyncio.ensure_future(lend())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lending.cancel)
    try:
        return await lending
    except asyncio.CancelledError:
        return ""


def _leave(args: argparse.Namespace) -> int:
    """Tell home, and remove what joining has made."""
    import asyncio
    import shutil

    from ..link.relay.join import leave
    from ..link.trust.pairing_code import PairingError
    from ..machines.fleet.lending import home_membership, lent_folder

    kept, untold = home_membership(), ""
    home = kept.partner()
    if home is not None:
        try:
            asyncio.run(leave(home))
        except PairingError as e:
            untold = str(e)
    kept.forget()
    shutil.rmtree(lent_folder(), ignore_errors=True)
    if args.json:
        print(json.dumps({"home": home.name if home else None, "told": home is not None and not untold}))
    elif home is None:
        print("This machine has joined no fleet.")
    else:
        print(f"This machine has left the fleet of {home.name}; its layers and the certificate were removed.")
        if untold:
            print(f"{home.name} does not know yet ({untold}): `disco fleet revoke {home.own_name}` there.")
    return 0


def _agrees(question: str) -> bool:
    """Ask at a terminal; without one nobody agrees."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
