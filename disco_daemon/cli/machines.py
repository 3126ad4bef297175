"""`disco machines`: pair this machine with others of yours, to split a model with them or to lend each other hosts.

A code says what the machine that joins is to be, so nobody has to say it twice. The verbs of former releases are here
by their words alone: OLD says which of these actions each of them is.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..link.trust.roles import Role
from ..plain import which
from . import fleet_join, split_join
from .terminal import agrees, make_console

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..link.trust.pairing import PairedPartner
    from ..link.trust.pairing_code import PairingCode

# Verbs of former releases, for one more, and what they are now.
OLD: dict[tuple[str, ...], tuple[str, ...]] = {
    ("partner", "pair"): ("pair", "--as", "split"),
    ("partner", "list"): ("list", "--as", "split"),
    ("partner", "revoke"): ("revoke", "--as", "split"),
    ("split", "join"): ("join", "--as", "split"),
    ("split", "leave"): ("leave", "--as", "split"),
    ("fleet", "new"): ("pair", "--as", "fleet"),
    ("fleet", "members"): ("list", "--as", "fleet"),
    ("fleet", "revoke"): ("revoke", "--as", "fleet"),
    ("fleet", "join"): ("join", "--as", "fleet"),
    ("fleet", "leave"): ("leave", "--as", "fleet", "--yes"),
}
# Of each role, below /disco/v1: its document, a code, and to revoke.
ROUTES = {
    Role.SPLIT: ("partner", "partner/pair", "partner/revoke"),
    Role.FLEET: ("fleet/members", "fleet/new", "fleet/revoke"),
}
TURNED_ON = {
    Role.SPLIT: "This machine is a partner from now on (partner.enabled = true).",
    Role.FLEET: "This machine is the home of a fleet from now on (fleet.enabled = true).",
}
DOES = {Role.SPLIT: "splits a model with the other one", Role.FLEET: "lends the other one hosts"}  # which has joined
PARTS = {Role.SPLIT: split_join, Role.FLEET: fleet_join}  # what joining and leaving are, by role


def words_today(words: Sequence[str]) -> list[str]:
    """Return the words of a command, a verb of a former release as what it is today; it is said on stderr."""
    found = OLD.get(tuple(words[:2]))
    if found is None or {"-h", "--help"} & {*words}:
        return ["machines", found[0], "--help"] if found else [*words]
    print(f"disco: `disco {' '.join(words[:2])}` is `disco machines {found[0]}` now", file=sys.stderr)
    return ["machines", *found, *words[2:]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "machines",
        help="pair this machine with others of yours",
        description="Pair machines of yours. One that joins either splits a model with this one (split: it computes "
        "the lower layers and this one the rest), or lends this one hosts, which compute inner layers (fleet). Each "
        "machine can turn the rows that it is sent into their text: pair only those that are yours.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    pair = actions.add_parser(
        "pair",
        help="make a one-time code for another machine",
        description="Print a code with which one other machine may join, once and within ten minutes, and the command "
        "for it. Whoever has the code can join. The code says whether that machine splits a model with this one, or "
        "lends it hosts: what this machine is set to already, or --as.",
    )
    pair.add_argument("--address", default="", metavar="HOST", help="what the other machine calls this one")
    join = actions.add_parser(
        "join",
        help="join another machine with its code",
        description="Join the machine that has printed a code with `disco machines pair`. By a code to split a model, "
        "this machine gets the lower layers, and its running daemon answers with both. By a code of a fleet, it lends "
        "hosts until Ctrl-C, and asks before; without a code it does so as joined before. While it lends, the same in "
        "another terminal with --cpus, --memory, --only-idle or --only-mains changes those alone: what is beyond them "
        "leaves this machine while answers go on.",
    )
    join.add_argument("code", nargs="?", default="", help="what `disco machines pair` has printed on the other machine")
    join.add_argument("--name", default="", help="what the other machine calls this one (default: its host name)")
    split_join.add_options(join)
    fleet_join.add_options(join)
    listed = actions.add_parser("list", help="list the machines that have joined, and those that this one has joined")
    revoke = actions.add_parser("revoke", help="refuse a machine from now on")
    revoke.add_argument("name", help="of the machine, as `disco machines list` shows it")
    leave = actions.add_parser(
        "leave",
        help="leave the machine that this one has joined",
        description="Remove the certificate for the other machine, its layers and the settings of the split from this "
        "one. There, this machine is forgotten if it can be told so, and by `disco machines revoke` else.",
    )
    for action in (join, leave):
        action.add_argument("--yes", action="store_true", help="do not ask")
    for action, run in ((pair, _pair), (join, _join), (listed, _list), (revoke, _revoke), (leave, _leave)):
        action.add_argument("--as", dest="role", choices=[*map(str, Role)], help="split a model, or be of a fleet")
        action.add_argument("--url", help="daemon to ask (default from the configuration)")
        action.add_argument("--json", action="store_true", help="print one JSON document")
        action.set_defaults(run=run)


def _ask(args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the daemon, by a route below /disco/v1. Raises DaemonError."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    path = f"/disco/v1/{path}"
    return client.get(root, path, key) if method == "GET" else client.post(root, path, body or {}, key)


def _documents(args: argparse.Namespace) -> dict[Role, dict[str, Any]]:
    """Return which machines have joined, by role: of all, or of the one that is wanted. Raises DaemonError."""
    return {role: _ask(args, "GET", ROUTES[role][0]) for role in ([Role(args.role)] if args.role else Role)}


# --- on the machine that others join --------------------------------------------------------------------------------


def _pair(args: argparse.Namespace) -> int:
    """Print the code, how long it lives and what to type on the other machine."""
    from ..errors import ConfigError

    roles = [Role(args.role)] if args.role else [role for role, one in _documents(args).items() if one["enabled"]]
    if len(roles) != 1:
        raise ConfigError(
            "say what the other machine is to do: `disco machines pair --as split`, and it splits this machine's "
            "model with it; `disco machines pair --as fleet`, and it lends this machine hosts"
        )
    [role] = roles
    found = _ask(args, "POST", ROUTES[role][1], {"address": args.address})
    if args.json:
        print(json.dumps(found | {"role": role}))
        return 0
    console = make_console(highlight=False, soft_wrap=True)
    if found["turned_on"]:
        console.print(TURNED_ON[role])
    print(found["code"])
    console.print(f"The code is good for one machine, for {found['expires_s'] / 60:.0f} minutes. There, type:")
    print(f"disco machines join {found['code']}")
    if role is Role.FLEET:
        console.print(fleet_join.about_ray(found["ray"]))
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print the machines that have joined this one, and those that it has joined."""
    from ..client.once import NOT_RUNNING, DaemonError

    documents: dict[Role, dict[str, Any]] = {}
    try:
        documents = _documents(args)
    except DaemonError as e:
        if args.role or args.url or e.code != NOT_RUNNING:
            raise
    if args.role:
        [(role, document)] = documents.items()
        print(json.dumps(document) if args.json else "\n".join(_lines(role, document)))
        return 0
    joined = _joined()
    if args.json:
        others = [_joined_document(role, one) for role, one in joined.items()]
        print(json.dumps({role: documents.get(role) for role in Role} | {"joined": others}))
        return 0
    shown = {role: one for role, one in documents.items() if one["enabled"] or one["members"] or one["error"]}
    lines = [line for role, one in shown.items() for line in _lines(role, one)]
    if not documents:
        lines.append("No daemon runs here, so this machine serves no other one.")
    elif not shown and not joined:
        lines.append("No machine has joined; `disco machines pair` prints a code for one.")
    for role, one in joined.items():
        lines.append(f"joined: {one.name} at {one.addresses[0]}, as {one.own_name}; this machine {DOES[role]}")
    print("\n".join(lines))
    return 0


def _lines(role: Role, found: dict[str, Any]) -> list[str]:
    """Return which machines have joined in a role, in words."""
    at = f" at {found['listening']}" if found["listening"] else ""
    if role is Role.SPLIT:
        cut = found["cut"]
        layers = "" if cut is None else f", layers from {cut} on" if cut else ", the whole model"
        lines = [f"partner: {found['state']}{at}{layers}"]
    else:
        lines = [f"fleet: {found['state']}{at}"]
    if found["error"]:
        lines.append(f"{'':{lines[0].index(':') + 2}}{found['error']}")
    for one in found["members"]:
        how = "connected" if one["connected"] else "not connected"
        lines.append(fleet_join.line(one) if role is Role.FLEET else f"{one['name']}  {how}, joined on {one['since']}")
    if not found["members"]:
        lines.append(f"No machine has joined; `disco machines pair --as {role}` prints a code for one.")
    return lines


def _revoke(args: argparse.Namespace) -> int:
    """Refuse a machine from now on, in each role in which it has joined."""
    from ..errors import ConfigError

    roles = [Role(args.role)] if args.role else []
    if not roles:
        named = {role: [one["name"] for one in document["members"]] for role, document in _documents(args).items()}
        roles = [role for role, names in named.items() if args.name in names]
        if not roles:
            known = which(args.name, sorted({name for names in named.values() for name in names}))
            msg = f"no paired machine is called {args.name!r}: {known}"
            raise ConfigError(msg)
    for role in roles:
        found = _ask(args, "POST", ROUTES[role][2], {"name": args.name})
    print(json.dumps(found) if args.json else f"{found['revoked']} is refused from now on.")
    return 0


# --- on the machine that joins --------------------------------------------------------------------------------------


def _join(args: argparse.Namespace) -> int:
    """Join in the role that the code says; without a code, lend hosts as joined before."""
    from ..link.trust.pairing_code import parse_code

    code = parse_code(args.code) if args.code else None
    role = _role_of(code, args.role)
    _refuse(args, [option for other in Role if other is not role for option in PARTS[other].OPTIONS], role)
    return split_join.join(args, code) if code is not None and role is Role.SPLIT else fleet_join.join(args, code)


def _role_of(code: PairingCode | None, wanted: str | None) -> Role:
    """Return what this machine is to be. Raises ConfigError where the code says something else, or nobody says it."""
    from ..errors import ConfigError

    if code is None:
        if wanted == Role.SPLIT:
            raise ConfigError("give the code that `disco machines pair` has printed on the other machine")
        return Role.FLEET
    if code.role is None and wanted is None:
        raise ConfigError(
            "the code is of an older disco, which does not say what this machine is to do: add --as split if "
            "`disco partner pair` has printed it, --as fleet if `disco fleet new` has"
        )
    if code.role is not None and wanted not in (None, code.role):
        msg = (
            f"the code is for a machine that {DOES[code.role]}: leave out --as {wanted}, or take a code that "
            f"`disco machines pair --as {wanted}` has printed there"
        )
        raise ConfigError(msg)
    return code.role or Role(wanted or Role.FLEET)


def _refuse(args: argparse.Namespace, options: Iterable[str], role: Role) -> None:
    """Raise ConfigError for options that say nothing to a machine of this role."""
    from ..errors import ConfigError

    if said := next((one for one in options if getattr(args, one) not in (None, False)), None):
        msg = f"--{said.replace('_', '-')} says nothing here: this machine {DOES[role]}"
        raise ConfigError(msg)


def _joined() -> dict[Role, PairedPartner]:
    """Return the machines that this one has joined, by role. Raises PairingError for damaged files."""
    from ..machines.trust_store import membership

    found = {role: membership(role).partner() for role in Role}
    return {role: other for role, other in found.items() if other is not None}


def _joined_document(role: Role, other: PairedPartner) -> dict[str, Any]:
    return {"role": role, "machine": other.name, "name": other.own_name, "address": str(other.addresses[0])}


def _leave(args: argparse.Namespace) -> int:
    """Tell the other machine, and remove what joining has made; exit code 1 if the user does not want it."""
    from ..config.layers import load
    from ..errors import ConfigError
    from ..machines.trust_store import membership

    config = load()  # settings that are wrong are not written to
    roles = [Role(args.role)] if args.role else [*_joined()] or [Role.SPLIT]  # a join that broke has left something
    if len(roles) > 1:
        raise ConfigError("this machine has joined two others: add --as split or --as fleet")
    [role] = roles
    part, other = PARTS[role], membership(role).partner()
    if other is None and not part.has_joined(config):
        print(json.dumps({"machine": None, "told": False}) if args.json else "This machine has joined no other one.")
        return 0
    if not args.yes and not agrees(f"Remove {part.named()}?"):
        print("disco: nothing was removed; --yes removes it without a question", file=sys.stderr)
        return 1
    found: dict[str, Any] = part.end_use(args, other)
    untold = _say_goodbye(other, private=config.policy.private) if other is not None else ""
    n_bytes = part.remove()
    membership(role).forget()
    name, told = (other.name if other is not None else None), other is not None and not untold
    if args.json:
        print(json.dumps({"role": role, "machine": name, "told": told, "removed_bytes": n_bytes} | found))
        return 0
    left = f"This machine has left {name}" if name else "Nothing of a split is left"
    print(f"{left}; {n_bytes / 1e6:.0f} MB of layers and the certificate were removed.")
    if other is not None and untold:
        print(f"{name} does not know yet ({untold}): `disco machines revoke {other.own_name}` there.")
    return 0


def _say_goodbye(other: PairedPartner, *, private: bool) -> str:
    """Tell the other machine that this one leaves; return why it could not be told, empty if it was."""
    import asyncio

    from ..link.relay.join import leave
    from ..link.trust.pairing_code import PairingError

    if private:
        return "policy.private is on: nothing leaves this machine"
    try:
        asyncio.run(leave(other))
    except PairingError as e:
        return "" if e.reason == "revoked" else str(e)  # who has revoked it needs not be told
    return ""
