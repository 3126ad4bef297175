"""Checks of a fleet of several machines: versions and clocks of those that have joined, Ray, and ports both ways.

At home the machines' own words are judged, which come with each host that they offer. A machine that has joined asks
home over the very ports that it needs.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...config.schema import Config
from ...fleet_keeper.keeper_messages import INSTALL
from ...system.net import is_loopback
from .finding import Finding, ok, warn, wrong
from .machines import certificate, of_members, served, way_to

if TYPE_CHECKING:
    from ...link.trust.pairing import PairedPartner

MAX_AHEAD_S = 60.0  # between two clocks of a fleet: no work depends on them, but logs and certificates do
AGAIN = "join again: `disco fleet new` at home, then `disco fleet join CODE` here"
RAY_OFF = "off, as fleet.ray says: nobody starts again what lends hosts"

Machines = Iterable[Mapping[str, Any]]


def checks(config: Config, daemon: Mapping[str, Any] | None, unasked: str) -> Iterator[Finding]:
    """Yield what is wrong and right with a fleet's machines, at home and on a machine that has joined."""
    if config.fleet.enabled:

        def home_by(document: Mapping[str, Any]) -> Iterator[Finding]:
            return home(document, config.peer.port)

        yield from of_members(config, daemon, "fleet", "fleet/members", home_by)
    yield from _joined(unasked)


# --- at home --------------------------------------------------------------------------------------------------------


def home(document: Mapping[str, Any], port: int) -> Iterator[Finding]:
    """Yield the findings on the machines that have joined, from the daemon's document of them."""
    members = document["members"]
    yield served(document, port, "fleet new")
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
        mend = "the machine says why where `disco fleet join` runs; with device.rounding = fast home takes it"
        return warn(name, f"{llama}; a machine with another one was refused ({n} times)", mend)
    return ok(name, f"the same on all machines: disco {__version__}, llama.cpp {llama}")


def member_clocks(members: Machines) -> Finding:
    """Check how far the machines' clocks are from this one, as they were with their latest offers."""
    name, ahead = "clocks", {one["name"]: one["ahead_s"] for one in members if one["ahead_s"] is not None}
    far = [
        f"{machine}'s is {abs(s):.0f} s {'ahead of' if s > 0 else 'behind'} this one"
        for machine, s in ahead.items()
        if abs(s) > MAX_AHEAD_S
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


# --- on a machine that has joined -----------------------------------------------------------------------------------


def _joined(unasked: str) -> Iterator[Finding]:
    """Check the way to the home that this machine has joined, if it has."""
    import time

    from ...errors import DiscoError
    from ...link.trust.certificates import valid_until
    from ...machines.fleet.lending import home_membership

    try:
        paired = home_membership().partner()
    except DiscoError as e:
        yield wrong("home", str(e), AGAIN)
        return
    if paired is None:
        return
    yield certificate("certificate of a host", valid_until(paired.identity), time.time(), AGAIN)
    asked = list(way_to(paired, "home", MAX_AHEAD_S, unasked))
    yield from asked
    if not unasked and asked[0].level != "wrong":
        yield ray_of_home(paired)


def ray_of_home(paired: PairedPartner) -> Finding:
    """Check that this machine can be a node of its home's Ray: whether there is one, here too, and its port is open."""
    import asyncio

    from ...errors import DiscoError
    from ...link.relay.join import ask_ray
    from ...machines.fleet.ray_keeper import ray_version
    from .server import reach

    name = "Ray of home"
    try:
        there = asyncio.run(ask_ray(paired))
    except DiscoError as e:
        return warn(name, str(e), "`disco doctor` there says more")
    if not there.address:
        return ok(name, "it starts" if there.starting else f"{paired.name} has none")
    if not (own := ray_version()):
        return warn(name, f"at {there.address}, and none is installed here", INSTALL)
    host, _, port = there.address.rpartition(":")
    via = f"Ray {own} and Python {platform.python_version()} here; {there.address} there"
    return reach(
        name, host.strip("[]"), int(port), via, "let a firewall between both pass Ray's ports (docs/explain/fleet.md)"
    )
