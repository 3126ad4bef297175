"""Checks of what computes one model together: hosts; two machines, by link, versions, clocks, certificates, port."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ... import __version__
from ...config.schema import Config
from ...peer.join import MeasuredLink
from .finding import Finding, ok, warn, wrong

MAX_AHEAD_S = (
    120.0  # between the two clocks; less matters to no certificate, which is valid for a day before it is made
)
SOON_DAYS = 30  # before a certificate ends
SLOW_RTT_S = 0.1  # a round trip above gives fewer than ten verdicts a second
SLOW_BYTES_PER_S = 1e6  # a prompt of 1,000 tokens of a small model takes 2 s
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
    import asyncio

    from ...daemon.edge import membership
    from ...daemon.joined import JoinedFolder
    from ...errors import DiscoError
    from ...peer.join import measure_link
    from ...peer.pairing import valid_until

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
    if unasked:
        yield ok("partner", f"{paired.name} was not asked: {unasked}")
        return
    try:
        measured = asyncio.run(measure_link(paired))
    except DiscoError as e:
        port = config.split.partner.rpartition(":")[2]
        mend = f"is disco running on {paired.name}, and does its firewall let port {port} through?"
        yield wrong("partner", f"{paired.name} at {config.split.partner}: {e}", mend)
        return
    yield partner_version(paired.name, measured)
    yield speed(measured)
    yield clocks(measured.ahead_s)


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


def partner_version(name: str, measured: MeasuredLink) -> Finding:
    """Check the partner's version of disco, and its build of llama.cpp."""
    build = measured.build
    if build is None:
        return warn(
            "partner", f"{name} has no model in memory", "wait until it is loaded; `disco partner list` there says more"
        )
    shown = f"{name}: disco {build.disco}, llama.cpp {build.llama or 'not loaded yet'}, {build.n_layers} layers"
    if build.disco != __version__:
        return warn("partner", f"{shown}; this is disco {__version__}", "install the same version on both machines")
    return ok("partner", shown)


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


def clocks(ahead_s: float) -> Finding:
    """Check how far the two clocks are apart."""
    side = "ahead of" if ahead_s > 0 else "behind"
    shown = f"the partner's is {abs(ahead_s):.1f} s {side} this one"
    if abs(ahead_s) > MAX_AHEAD_S:
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


# --- this machine has the upper layers ------------------------------------------------------------------------------


def _partner(config: Config, daemon: Mapping[str, Any] | None) -> Iterator[Finding]:
    from ...client import once as client
    from ...config.layers import data_path
    from ...errors import DiscoError
    from ...peer.pairing import Issuer, valid_until

    issuer = Issuer(data_path() / "peer" / "issuer")
    try:
        if issuer.exists:
            yield certificate("certificates", valid_until(issuer.identity()), time.time())
        if daemon is not None:
            root, key = client.daemon_at(None, config)
            yield served(client.get(root, "/disco/v1/partner", key), config.peer.port)
    except DiscoError as e:
        yield wrong("peer port", str(e), "`disco partner list` says more")


def served(document: Mapping[str, Any], port: int) -> Finding:
    """Check whether other machines reach this one: one that is connected has."""
    name, members = "peer port", document["members"]
    linked = [member["name"] for member in members if member["connected"]]
    if document["error"]:
        return wrong(name, document["error"], "`disco config set peer.port N` with another one, or free it")
    if not document["listening"]:
        return ok(name, "nothing listens: no machine is paired", "`disco partner pair` prints a code for one")
    if linked:
        return ok(name, f"{document['listening']}, reached by {', '.join(linked)}")
    who = ", ".join(member["name"] for member in members) or "nobody yet"
    mend = f"does a firewall let port {port} through? `disco doctor` on the other machine tries it"
    return warn(name, f"{document['listening']}, no machine is connected (paired: {who})", mend)
