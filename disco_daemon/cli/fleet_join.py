"""What lends another machine hosts, and ends that: `disco machines join` and `leave` for a machine of a fleet."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from .terminal import agrees, progress

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..link.trust.pairing import PairedPartner
    from ..link.trust.pairing_code import PairingCode
    from ..machines.fleet.lend_terms import TermsFolder
    from ..machines.owner import OwnerTerms

QUESTION = (
    "Whoever has made this code may have their disco compute here, with their model, by {threads} threads{memory}. "
    "Do you want that?"
)
LEAST_GIB = 0.5  # of memory for a host: llama.cpp and the interpreter take a part of it before any layer does
# Of `join`, that say nothing to a machine that splits a model.
OPTIONS = ("cpus", "memory", "only_idle", "only_mains", "without_ray", "until_eof", "as_agreed")


def add_options(join: argparse.ArgumentParser) -> None:
    """Add what says how much is lent, and when."""
    fleet = join.add_argument_group("to lend hosts")
    fleet.add_argument(
        "--cpus", type=int, metavar="N", help="threads that it may use (default: all processors but one)"
    )
    fleet.add_argument("--memory", type=float, metavar="GIB", help="memory that it may use, GiB (default: 0, all)")
    yes_or_no = argparse.BooleanOptionalAction
    fleet.add_argument("--only-idle", action=yes_or_no, help="only while nobody works at this machine")
    fleet.add_argument("--only-mains", action=yes_or_no, help="never on battery")
    fleet.add_argument("--without-ray", action="store_true", help="let nobody start it again if it ends")
    fleet.add_argument(
        "--until-eof", action="store_true", help="end when standard input ends, as with its parent process"
    )
    fleet.add_argument("--as-agreed", action="store_true", help="by what was allowed last, for what starts it again")


# --- at home --------------------------------------------------------------------------------------------------------


def about_ray(found: dict[str, Any]) -> str:
    """Return what the owner of a home is to know of its Ray, whose state this is."""
    if found["state"] in ("missing", "off"):
        return str(found["why"])
    return (
        "Rows and files go by TLS. What Ray says is not encrypted, and its ports are open to all who reach them: "
        "in a network that others share, `disco config set fleet.ray off` (docs/explain/fleet.md)."
    )


def line(one: dict[str, Any]) -> str:
    """Return how a machine of the fleet is, in words."""
    how = "lends a host" if one["lent"] else "connected, no host is used" if one["connected"] else "not connected"
    if one["left_alone"]:
        how = "left alone for a while: its hosts ended soon, twice"
    layers = " and ".join(f"{first}-{last}" for first, last in one["layers"])
    return f"{one['name']}  {how}, joined on {one['since']}" + (f"; layers {layers} are its own" if layers else "")


# --- joining --------------------------------------------------------------------------------------------------------


def join(args: argparse.Namespace, code: PairingCode | None) -> int:
    """Join with a code, and lend hosts until Ctrl-C; exit code 1 where home refuses, or the user does."""
    import asyncio

    from ..errors import ConfigError
    from ..link.trust.roles import Role
    from ..machines.trust_store import membership

    kept = membership(Role.FLEET)
    if code is not None:
        terms = _terms(args, None)
        memory = f", {args.memory:g} GiB of memory" if args.memory else ""
        if not args.yes and not agrees(QUESTION.format(threads=terms.n_threads, memory=memory)):
            print("disco: nothing was joined; --yes joins without a question", file=sys.stderr)
            return 1
        home = _pair(code, args.name)
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
        raise ConfigError(
            "this machine has joined no fleet: run `disco machines pair` on the other one, and give its code"
        )
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


def _pair(code: PairingCode, name: str) -> PairedPartner:
    """Get a certificate of home. Raises PairingError."""
    import asyncio
    import socket

    from ..link.relay.join import pair
    from ..link.trust.pairing_code import safe_name

    home, _ = asyncio.run(pair(code, name or safe_name(socket.gethostname())))
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


# --- leaving --------------------------------------------------------------------------------------------------------


def has_joined(_: Config) -> bool:
    """Whether something is left of joining."""
    from ..machines.fleet.lending import lent_folder

    return lent_folder().exists()


def named() -> str:
    """Return what is removed, in words."""
    return "the layers of the fleet, and the certificate for its home"


def end_use(_: argparse.Namespace, home: PairedPartner | None) -> dict[str, Any]:
    """Return whose fleet it was: home itself ends what it has here."""
    return {"home": home.name if home is not None else None}


def remove() -> int:
    """Remove the layers; return their bytes."""
    import shutil

    from ..machines.fleet.lending import lent_folder

    n_bytes = sum(path.stat().st_blocks * 512 for path in lent_folder().glob("*/*.gguf"))
    shutil.rmtree(lent_folder(), ignore_errors=True)
    return n_bytes
