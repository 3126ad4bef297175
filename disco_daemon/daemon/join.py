"""Joining a partner from this machine: a certificate, the layers below the cut, and what they belong to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ..config.schema import Config
from ..errors import ConfigError
from ..models.progress import Report
from ..models.segment_files import read_head
from ..peer.control import Address
from ..peer.join import fetch, pair
from ..peer.messages import Build
from ..peer.pairing import PairedPartner, check_authority, safe_name
from ..peer.pairing_code import PairingCode, PairingError, parse_code
from .edge import membership
from .joined import JoinedFolder, JoinedModel
from .split import checksum


class FetchRate:
    """Measures how many bytes a second come, from the first ones on; 0 until more than those are there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self.bytes_per_s = 0.0

    def add(self, done: int) -> None:
        """So many bytes are there now."""
        now = self._clock()
        n, at = self._first = self._first or (done, now)
        if now > at and done > n:
            self.bytes_per_s = (done - n) / (now - at)


async def join(
    config: Config, text: str, name: str, cut: int | None, report: Report, say: Callable[[str], None]
) -> tuple[JoinedModel, Address]:
    """Join the machine that printed the code `text`; return what is here now, and where the partner was reached.

    `cut` layers are fetched, half of them without it. What has failed after the pairing goes on with the same code.
    Raises ConfigError.
    """
    if config.partner.enabled:
        msg = (
            "partner.enabled and split.enabled do not go together: a machine has the lower layers of one model, or the "
            "upper ones; `disco config set partner.enabled false` first"
        )
        raise ConfigError(msg)
    code = parse_code(text)
    if cut is not None and cut < 1:
        msg = (
            f"--cut {cut}: this machine needs one layer at least; `disco split plan` compares the cuts from 1 to n - 1"
        )
        raise ConfigError(msg)
    folder = JoinedFolder()
    paired, build = await _pair(folder, code, name or safe_name(socket.gethostname()))
    layers = _cut(build, cut)
    say(f"paired with {paired.name}; fetching layers 0 to {layers} of {build.n_layers}")
    path = folder.segment(layers)
    rate = FetchRate()

    def hear(done: int, whole: int) -> None:
        rate.add(done)
        report(path.name, done, whole)

    await fetch(paired, layers, path, hear)
    _, header = read_head(path)
    model = header.text("general.name") or f"model {build.model[:12]}"
    joined = JoinedModel(
        model, build.model, build.n_layers, layers, path.stat().st_size, checksum(path), paired.name,
        rate.bytes_per_s,
    )  # fmt: skip
    folder.save(joined)
    return joined, paired.addresses[0]


async def _pair(folder: JoinedFolder, code: PairingCode, name: str) -> tuple[PairedPartner, Build]:
    """Return the partner of a code, and its model: as it is known since a join that did not get further, or by pairing.

    Raises ConfigError.
    """
    kept, build = membership(), folder.pending()
    before = kept.partner()
    if before is not None and build is not None and before.own_name == name and _is_of(before, code):
        return before, build
    paired, found = await pair(code, name)
    kept.save(paired)
    if found is None:
        msg = f"{paired.name} does not say which model it has: look there with `disco partner list`"
        raise ConfigError(msg)
    folder.begin(found)
    return paired, found


def _is_of(partner: PairedPartner, code: PairingCode) -> bool:
    """Whether a code was printed by a machine that this one is paired with."""
    try:
        return check_authority(partner.identity.ca, code.fingerprint) == partner.name
    except PairingError:
        return False


def _cut(build: Build, wanted: int | None) -> int:
    """Return the number of layers for this machine. Raises ConfigError."""
    cut = build.n_layers // 2 if wanted is None else wanted
    if not 0 < cut < build.n_layers:
        msg = f"--cut {cut}: the model has {build.n_layers} layers, so from 1 to {build.n_layers - 1} may be here"
        raise ConfigError(msg)
    return cut
