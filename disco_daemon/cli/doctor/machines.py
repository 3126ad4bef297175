"""Checks of what computes one model together: hosts; two machines, by link, versions, clocks, certificates, port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...config.schema import Config
from ...link.relay.join import MeasuredLink
from .finding import Finding, ok, warn, wrong

if TYPE_CHECKING:
    from ...link.trust.pairing import PairedPartner

MAX_AHEAD_S = (
    120.0  # between the two clocks; less matters to no certificate, which is valid for a day before it is made
)
SOON_DAYS = 30  # before a certificate ends
SLOW_RTT_S = 0.1  # a round trip above gives fewer than ten verdicts a second
SLOW_BYTES_PER_S = 1e6  # a prompt of 1,000 tokens of a small model takes 2 s
_LISTED = {"partner": "partner list", "home": "fleet members"}  # the verb that lists machines there
AGAIN = "pair the two machines again: `disco partner pair` there, then `disco split join CODE`"


def checks(config: Config, daemon: Mapping[str, Any] | None, unasked: str) -> Iterator[Finding]:
    """Yield what is wrong and right with a fleet, a split device, and with the machines that this one computes for."""
    if config.fleet.enabled:
        found = (((daemon or {}).get("endpoints") or {}).get("device") or {}).get("fleet")
        yield fleet(found)
        if found and found.get("confined") is not None:
            yield hosts_confinement(found["confined"])
    if config.split.enabled:
        yield from _edge(config, daemon, unasked)
    if config.partner.enabled:
        yield from _partner(config, daemon)


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


# --- this machine has the lower layers ------------------------------------------------------------------------------


def _edge(config: Config, daemon: Mapping[str, Any] | None, unasked: str) -> Iterator[Finding]:
    from ...errors import DiscoError
    from ...link.trust.certificates import valid_until
    from ...machines.split.edge_device import membership
    from ...machines.split.joined_model import JoinedFolder

    try:
        joined, paired = JoinedFolder().find(), membership().partner()
    except DiscoError as e:
        yield wrong("partner", str(e), AGAIN)
        return
    if joined is None or paired is None or joined.cut != config.split.cut:
        yield wrong("partner", f"the layers up to {config.split.cut} of its model are not here", AGAIN)
        return
    yield certificate("certificate", valid_until(paired.identity), time.time())
    if daemon is not None and (split := daemon.get("split")):
        yield link(split)
    yield from way_to(paired, "partner", MAX_AHEAD_S, unasked)


def way_to(paired: PairedPartner, name: str, most_s: float, unasked: str) -> Iterator[Finding]:
    """Ask another machine, the `name` of its finding, over its port, and check version, link and clock there."""
    import asyncio

    from ...errors import DiscoError
    from ...link.relay.join import measure_link

    if unasked:
        yield ok(name, f"{paired.name} was not asked: {unasked}")
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
            f"wait until it is loaded; `disco {_LISTED[finding]}` there says more",
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


def certificate(name: str, until: float, now: float, again: str = AGAIN) -> Finding:
    """Check until when a certificate is valid; both are Unix times, s. `again` says how to get another one."""
    shown = f"valid until {datetime.fromtimestamp(until, UTC):%Y-%m-%d}"
    if until <= now:
        return wrong(name, f"it was {shown}", again)
    if until - now < SOON_DAYS * 86400:
        return warn(name, shown, again)
    return ok(name, shown)


# --- this machine has the upper layers ------------------------------------------------------------------------------


def _partner(config: Config, daemon: Mapping[str, Any] | None) -> Iterator[Finding]:
    def served_by(document: Mapping[str, Any]) -> Iterator[Finding]:
        yield served(document, config.peer.port)

    yield from of_members(config, daemon, "peer", "partner", served_by)


def of_members(
    config: Config,
    daemon: Mapping[str, Any] | None,
    folder: str,
    path: str,
    look: Callable[[Mapping[str, Any]], Iterator[Finding]],
) -> Iterator[Finding]:
    """Check the authority in `folder` of the data, and by `look` what a daemon that runs says of its machines."""
    from ...client import once as client
    from ...config.layers import data_path
    from ...errors import DiscoError
    from ...link.trust.certificates import valid_until
    from ...link.trust.pairing import Issuer

    issuer = Issuer(data_path() / folder / "issuer")
    try:
        if issuer.exists:
            yield certificate("certificates", valid_until(issuer.identity()), time.time())
        if daemon is not None:
            root, key = client.daemon_at(None, config)
            yield from look(client.get(root, f"/disco/v1/{path}", key))
    except DiscoError as e:
        yield wrong("peer port", str(e), "`disco status` says more")


def served(document: Mapping[str, Any], port: int, pair: str = "partner pair") -> Finding:
    """Check whether other machines reach this one: one that is connected has. `pair` is the verb that lets one join."""
    name, members = "peer port", document["members"]
    linked = [member["name"] for member in members if member["connected"]]
    if document["error"]:
        return wrong(name, document["error"], "`disco config set peer.port N` with another one, or free it")
    if not document["listening"]:
        return ok(name, "nothing listens: no machine is paired", f"`disco {pair}` prints a code for one")
    if linked:
        return ok(name, f"{document['listening']}, reached by {', '.join(linked)}")
    who = ", ".join(member["name"] for member in members) or "nobody yet"
    mend = f"does a firewall let port {port} through? `disco doctor` on the other machine tries it"
    return warn(name, f"{document['listening']}, no machine is connected (paired: {who})", mend)
