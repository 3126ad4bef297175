"""Checks of the machines that this one is paired with, in both roles, and of what computes one model together.

A machine that has joined asks the other one over the very port that it needs: link, versions, clocks, certificate. On
the machine that others join, what a running daemon knows of them is judged, and the machines' own words.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...config.schema import Config
from ...fleet_keeper.keeper_messages import INSTALL
from ...link.relay.join import MeasuredLink
from ...link.trust.roles import Role
from ...system.net import is_loopback
from .finding import Finding, ok, warn, wrong

if TYPE_CHECKING:
    from ...link.trust.pairing import PairedPartner

# Between two clocks; less matters to no certificate, which is valid for a day before it is made.
MAX_AHEAD_S = 120.0
FLEET_AHEAD_S = 60.0  # between two clocks of a fleet: no work depends on them, but logs and certificates do
SOON_DAYS = 30  # before a certificate ends
SLOW_RTT_S = 0.1  # a round trip above gives fewer than ten verdicts a second
SLOW_BYTES_PER_S = 1e6  # a prompt of 1,000 tokens of a small model takes 2 s
AGAIN = "pair the two machines again: `disco machines pair` there, then `disco machines join CODE` here"
RAY_OFF = "off, as fleet.ray says: nobody starts again what lends hosts"
OTHER = {Role.SPLIT: "partner", Role.FLEET: "home"}  # the machine that this one has joined, as its finding's name

Machines = Iterable[Mapping[str, Any]]


def checks(config: Config, daemon: Mapping[str, Any] | None, unasked: str) -> Iterator[Finding]:
    """Yield what is wrong and right with a fleet, a split device, and the machines that this one is paired with."""
    if config.fleet.enabled:
        found = (((daemon or {}).get("endpoints") or {}).get("device") or {}).get("fleet")
        yield fleet(found)
        if found and found.get("confined") is not None:
            yield hosts_confinement(found["confined"])
    if config.split.enabled:
        yield from _joined(Role.SPLIT, config, daemon, unasked)
    if config.partner.enabled:
        yield from _members(Role.SPLIT, config, daemon)
    if config.fleet.enabled:
        yield from _members(Role.FLEET, config, daemon)
    yield from _joined(Role.FLEET, config, daemon, unasked)


def fleet(found: Mapping[str, Any] | None) -> Finding:
    """Check a fleet's hosts as the daemon has them; None where none runs, or with other settings."""
    if found is None:
        return ok("fleet", "no daemon runs with it; its hosts start with the engine")
    shown = f"{found['state']}: {found['layers_away']} layers at {found['hosts']} host{'s' * (found['hosts'] != 1)}"
    if found["state"] == "lost":
        return warn("fleet", shown, "the next answer starts the host again; the daemon's log says how it ended")
    if found["state"] == "failed":
        return wrong("fleet", shown, "`disco status` says why; `disco config set fleet.enabled false` does without")
    return ok("fleet", shown)


def hosts_confinement(rights: Sequence[str]) -> Finding:
    """List the rights that all hosts of a fleet have given up: they compute what the model's file says."""
    if not rights:
        return warn("hosts", "not confined", "see the engine's confinement above: hosts are confined as it is")
    return ok("hosts", f"confined: {', '.join(rights)}")


# --- this machine has joined another one --------------------------------------------------------------------------


def _joined(role: Role, config: Config, daemon: Mapping[str, Any] | None, unasked: str) -> Iterator[Finding]:
    """Check what joining has left here, and the way to the other machine."""
    from ...errors import DiscoError
    from ...link.trust.certificates import valid_until
    from ...machines.split.joined_model import JoinedFolder
    from ...machines.trust_store import membership

    name, is_split = OTHER[role], role is Role.SPLIT
    try:
        paired = membership(role).partner()
    except DiscoError as e:
        yield wrong(name, str(e), AGAIN)
        return
    if is_split and (paired is None or (joined := JoinedFolder().find()) is None or joined.cut != config.split.cut):
        yield wrong(name, f"the layers up to {config.split.cut} of its model are not here", AGAIN)
        return
    if paired is None:
        return
    yield certificate("certificate", valid_until(paired.identity), time.time())
    if is_split and daemon is not None and (split := daemon.get("split")):
        yield link(split)
    asked = list(way_to(paired, name, MAX_AHEAD_S if is_split else FLEET_AHEAD_S, unasked))
    yield from asked
    if not is_split and not unasked and asked[0].level != "wrong":
        yield ray_of_home(paired)


def way_to(paired: PairedPartner, name: str, most_s: float, unasked: str) -> Iterator[Finding]:
    """Ask another machine, the `name` of its finding, over its port, and check version, link and clock there."""
    import asyncio

    from ...errors import DiscoError
    from ...link.relay.join import measure_link

    if unasked:
        yield ok(name, f"{paired.name}: {unasked}")
        return
    try:
        measured = asyncio.run(measure_link(paired))
    except DiscoError as e:
        at = paired.addresses[0]
        mend = f"is disco running on {paired.name}, and does its firewall let port {at.port} through?"
        yield wrong(name, f"{paired.name} at {at}: {e}", mend)
        return
    yield version_there(name, paired.name, measured)
    yield speed(measured)
    yield clocks(measured.ahead_s, f"the {name}'s", most_s)


def link(split: Mapping[str, Any]) -> Finding:
    """Check the link as the daemon has it."""
    where = (
        f"cut behind layer {split['cut']}, rows as {split['codec']}" if split["cut"] else "a small model drafts here"
    )
    name, shown = "link", f"{split['state']}, {split['mode']}, {where}"
    if split["state"] == "refused":
        return wrong(name, f"{shown}: {split['error']}", AGAIN)
    if split["state"] != "up":
        return warn(
            name, f"{shown}: {split['error']}", "the daemon tries again by itself; the lines below say what is wrong"
        )
    if split["same_bits"] is False:
        mend = "the same version of disco on processors of one kind, and split.codec f32, give the whole model's bits"
        return ok(name, f"{shown}; answers may differ from the whole model's", mend)
    return ok(name, shown)


def version_there(finding: str, name: str, measured: MeasuredLink) -> Finding:
    """Check another machine's version of disco, and its build of llama.cpp."""
    build = measured.build
    if build is None:
        return warn(
            finding,
            f"{name} has no model in memory",
            "wait until it is loaded; `disco machines list` there says more",
        )
    shown = f"{name}: disco {build.disco}, llama.cpp {build.llama or 'not loaded yet'}, {build.n_layers} layers"
    if build.disco != __version__:
        return warn(finding, f"{shown}; this is disco {__version__}", "install the same version on both machines")
    return ok(finding, shown)


def speed(measured: MeasuredLink) -> Finding:
    """Check round trip and bandwidth."""
    up, down = (8e-6 * rate for rate in (measured.up_bytes_per_s, measured.down_bytes_per_s))
    shown = f"round trip {1e3 * measured.rtt_s:.1f} ms, {up:.3g} Mbit/s up, {down:.3g} down"
    if measured.rtt_s > SLOW_RTT_S:
        return warn("bandwidth", shown, "each round trip is waited for: use a cable, or a partner that is nearer")
    if measured.up_bytes_per_s < SLOW_BYTES_PER_S:
        return warn(
            "bandwidth", shown, "long prompts take long: `disco config set split.codec int8` sends a third of it"
        )
    return ok("bandwidth", shown)


def clocks(ahead_s: float, whose: str, most_s: float) -> Finding:
    """Check how far the two clocks are apart; `whose` other one it is, and by how much it may differ, s."""
    side = "ahead of" if ahead_s > 0 else "behind"
    shown = f"{whose} is {abs(ahead_s):.1f} s {side} this one"
    if abs(ahead_s) > most_s:
        return warn("two clocks", shown, "set both by the network: a certificate is only valid in its time")
    return ok("two clocks", shown)


def certificate(name: str, until: float, now: float) -> Finding:
    """Check until when a certificate is valid; both are Unix times, s."""
    shown = f"valid until {datetime.fromtimestamp(until, UTC):%Y-%m-%d}"
    if until <= now:
        return wrong(name, f"it was {shown}", AGAIN)
    if until - now < SOON_DAYS * 86400:
        return warn(name, shown, AGAIN)
    return ok(name, shown)


def ray_of_home(paired: PairedPartner) -> Finding:
    """Check that this machine can be a node of its home's Ray: whether there is one, here too, and its port is open."""
    import asyncio

    from ...errors import DiscoError
    from ...machines.fleet import ray_keeper, ray_node
    from .server import reach

    name = "Ray of home"
    try:
        there = asyncio.run(ray_node.ask_ray(paired))
    except DiscoError as e:
        return warn(name, str(e), "`disco doctor` there says more")
    if not there.address:
        return ok(name, "it starts" if there.starting else f"{paired.name} has none")
    if not (own := ray_keeper.ray_version()):
        return warn(name, f"at {there.address}, and none is installed here", INSTALL)
    host, _, port = there.address.rpartition(":")
    via = f"Ray {own} and Python {platform.python_version()} here; {there.address} there"
    return reach(
        name, host.strip("[]"), int(port), via, "let a firewall between both pass Ray's ports (docs/explain/fleet.md)"
    )


# --- others have joined this machine ------------------------------------------------------------------------------


def _members(role: Role, config: Config, daemon: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Check the authority of a role, and what a daemon that runs says of the machines that have joined in it."""
    from ...client import once as client
    from ...errors import DiscoError
    from ...link.trust.certificates import valid_until
    from ...machines.trust_store import authority
    from ..machines import ROUTES

    issuer = authority(role)
    try:
        if issuer.exists:
            yield certificate("certificates", valid_until(issuer.identity()), time.time())
        if daemon is not None:
            root, key = client.daemon_at(None, config)
            document = client.get(root, f"/disco/v1/{ROUTES[role][0]}", key)
            yield served(document, config.peer.port)
            if role is Role.FLEET:
                yield from of_fleet(document)
    except DiscoError as e:
        yield wrong("peer port", str(e), "`disco status` says more")


def served(document: Mapping[str, Any], port: int) -> Finding:
    """Check whether other machines reach this one: one that is connected has."""
    name, members = "peer port", document["members"]
    linked = [member["name"] for member in members if member["connected"]]
    if document["error"]:
        return wrong(name, document["error"], "`disco config set peer.port N` with another one, or free it")
    if not document["listening"]:
        return ok(name, "nothing listens: no machine is paired", "`disco machines pair` prints a code for one")
    if linked:
        return ok(name, f"{document['listening']}, reached by {', '.join(linked)}")
    who = ", ".join(member["name"] for member in members) or "nobody yet"
    mend = f"does a firewall let port {port} through? `disco doctor` on the other machine tries it"
    return warn(name, f"{document['listening']}, no machine is connected (paired: {who})", mend)


def of_fleet(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on the machines of a fleet, from the daemon's document of them."""
    members = document["members"]
    if not members:
        return
    known = [one for one in members if one["disco"] is not None]  # has said hello since the daemon started
    if known:
        yield builds(document["llama"] or "", known, document["refused"])
        yield member_clocks(known)
    yield from ray(document["ray"], known)


def builds(llama: str, members: Machines, refused: Mapping[str, int]) -> Finding:
    """Check that all have this disco, and this `llama` (build of llama.cpp); those `refused` for another one count."""
    name = "builds"
    if other := [f"{one['name']} has disco {one['disco']}" for one in members if one["disco"] != __version__]:
        return warn(
            name, f"{', '.join(other)}; this is disco {__version__}", "install the same version on all machines"
        )
    if other := [f"{one['name']} computes by {one['llama']}" for one in members if one["llama"] != llama]:
        mend = "answers may differ from the whole model's: install the same llama-cpp-python on processors of one kind"
        return warn(name, f"{', '.join(other)}; here by {llama}", mend)
    if n := refused.get("build", 0):
        mend = "the machine says why where `disco machines join` runs; with device.rounding = fast home takes it"
        return warn(name, f"{llama}; a machine with another one was refused ({n} times)", mend)
    return ok(name, f"the same on all machines: disco {__version__}, llama.cpp {llama}")


def member_clocks(members: Machines) -> Finding:
    """Check how far the machines' clocks are from this one, as they were with their latest offers."""
    name, ahead = "clocks", {one["name"]: one["ahead_s"] for one in members if one["ahead_s"] is not None}
    far = [
        f"{machine}'s is {abs(s):.0f} s {'ahead of' if s > 0 else 'behind'} this one"
        for machine, s in ahead.items()
        if abs(s) > FLEET_AHEAD_S
    ]
    if far:
        return warn(name, ", ".join(far), "let all machines set their time from the network")
    return ok(name, f"within {max(map(abs, ahead.values()), default=0.0):.1f} s of this one")


def ray(document: Mapping[str, Any], members: Machines, python: str = platform.python_version()) -> Iterator[Finding]:
    """Check Ray here, its version and this `python` on all machines, and that its ports are open both ways."""
    name, state = "Ray", document["state"]
    if state == "off":
        yield ok(name, RAY_OFF)
        return
    if state == "missing":
        yield warn(name, "not installed: nobody starts again what lends hosts", INSTALL)
        return
    version = document["version"]
    shown = f"{state}, Ray {version or 'of an unknown version'} at {document['address']}, Python {python}"
    if state == "lost":
        yield warn(name, f"{shown}: {document['why']}", "hosts compute on; the keeper is started again by itself")
        return
    nodes = [one for one in members if one["ray"]]
    other = [
        f"{one['name']} has Ray {one['ray']} and Python {one['python']}"
        for one in nodes
        if one["python"] != python or (version and one["ray"] != version)
    ]
    if other:
        mend = "Ray wants the same version and the same Python on all machines"
        yield warn(name, f"{shown}; {', '.join(other)}", mend)
    else:
        yield ok(name, shown)
    if state == "up":
        yield from _nodes(document, members)


def _nodes(document: Mapping[str, Any], members: Machines) -> Iterator[Finding]:
    """Check that home's Ray and each machine that lends a host reach each other: then that is a node."""
    name, nodes = "Ray's nodes", {one["address"] for one in document["hosts"]}
    away = [
        one["name"]
        for one in members
        if one["connected"] and one["address"] not in nodes and not is_loopback(one["address"])  # has another one, too
    ]
    if away:
        mend = (
            f"nobody starts again what lends their hosts: is Ray installed there, without --without-ray, and is "
            f"{document['address']} open? `disco doctor` there tries it; Ray's other ports have to be open both ways"
        )
        yield warn(name, f"{', '.join(away)}: not among them", mend)
    elif nodes:
        yield ok(name, ", ".join(sorted(nodes)))
