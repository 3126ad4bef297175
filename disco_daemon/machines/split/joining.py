"""Joining a partner from this machine: a certificate, the cut, the layers below it, and what they belong to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...config.schema import Config
from ...errors import ConfigError
from ...link.protocol import Build
from ...link.relay.handshake import AskCuts, TheCuts
from ...link.relay.join import MeasuredLink, ask_machine, fetch, measure_link, pair
from ...link.relay.orders import Address
from ...link.trust.certificates import check_authority
from ...link.trust.pairing import PairedPartner
from ...link.trust.pairing_code import PairingCode, PairingError, safe_name
from ...link.trust.roles import Role
from ...models.default import default_model_path
from ...models.progress import Report
from ...models.segment_files import read_head
from ...system.control_groups import memory
from ..device_settings import token_s
from ..trust_store import membership
from .check import checksum
from .cut_plan import MEMORY_BYTES_PER_S, SPARE, LinkSpeed, PlanInput, edge_needs, plan_cuts
from .drafter import require_drafter
from .joined_model import JoinedFolder, JoinedModel


@dataclass(frozen=True, slots=True)
class JoinResult:
    """What is on this machine now, where the partner was reached, and why the model is cut there."""

    joined: JoinedModel
    address: Address
    why: str


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
    config: Config,
    code: PairingCode,
    name: str,
    wanted: int | Path | None,
    report: Report,
    say: Callable[[str], None],
) -> JoinResult:
    """Join the machine that printed a code.

    As many layers are fetched as are `wanted`, or as the plan says; for a small model's file only the vocabulary, since
    that model is to draft for the whole one there. What has failed after the pairing goes on with the same code. Raises
    ConfigError.
    """
    cut = wanted if isinstance(wanted, int) else None
    if config.partner.enabled:
        msg = (
            "partner.enabled and split.enabled do not go together: a machine has the lower layers of one model, or the "
            "upper ones; `disco config set partner.enabled false` first"
        )
        raise ConfigError(msg)
    if cut is not None and cut < 1:
        msg = (
            f"--cut {cut}: this machine needs one layer at least; `disco split plan` compares the cuts from 1 to n - 1"
        )
        raise ConfigError(msg)
    folder = JoinedFolder()
    paired, build = await _pair(folder, code, name or safe_name(socket.gethostname()))
    if isinstance(wanted, Path):
        require_drafter(wanted, build.vocabulary, build.n_vocab, f"the model of {paired.name}")
        layers, why = 0, f"{wanted.name} drafts here, and the whole model there has the say"
    else:
        layers, why = await _choose(config, paired, build, cut, say)
    fetched = f"layers 0 to {layers} of {build.n_layers}" if layers else "the vocabulary"
    say(f"paired with {paired.name}; fetching {fetched}")
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
    return JoinResult(joined, paired.addresses[0], why)


async def _pair(folder: JoinedFolder, code: PairingCode, name: str) -> tuple[PairedPartner, Build]:
    """Return the partner of a code, and its model: as it is known since a join that did not get further, or by pairing.

    Raises ConfigError.
    """
    kept, build = membership(Role.SPLIT), folder.pending()
    before = kept.partner()
    if before is not None and build is not None and before.own_name == name and _is_of(before, code):
        return before, build
    paired, found = await pair(code, name)
    kept.save(paired)
    if found is None:
        raise ConfigError(f"{paired.name} does not say which model it has: look there with `disco machines list`")
    folder.begin(found)
    return paired, found


def _is_of(partner: PairedPartner, code: PairingCode) -> bool:
    """Whether a code was printed by a machine that this one is paired with."""
    try:
        return check_authority(partner.identity.ca, code.fingerprint) == partner.name
    except PairingError:
        return False


async def _choose(
    config: Config, partner: PairedPartner, build: Build, wanted: int | None, say: Callable[[str], None]
) -> tuple[int, str]:
    """Return the number of layers for this machine, and why so many. Raises ConfigError, with numbers of memory."""
    if wanted is not None and not 0 < wanted < build.n_layers:
        msg = f"--cut {wanted}: the model has {build.n_layers} layers, so from 1 to {build.n_layers - 1} may be here"
        raise ConfigError(msg)
    model, free = await ask_machine(partner, AskCuts(), TheCuts), memory()[1]
    if wanted is not None:
        require_room(model, wanted, config.device.n_cells or config.device.divided_n_ctx, free)
        return wanted, "as you have said"
    say(f"paired with {partner.name}; measuring the way there")
    given = plan_input(config, model, await measure_link(partner), free)
    plan = plan_cuts(model, given)
    if plan.chosen is None:
        raise ConfigError(plan.why)
    return plan.chosen, plan.why


def require_room(model: TheCuts, layer: int, n_cells: int, free: float) -> None:
    """Raise ConfigError, with the numbers, if the layers below a cut and their cells do not fit into `free` bytes."""
    needed = next((edge_needs(one, model, n_cells) for one in model.cuts if one.layer == layer), 0)
    if needed > free * (1 - SPARE):
        msg = (
            f"layers 0-{layer} take {needed / 1e9:.2f} GB here, with {n_cells} tokens of KV cache, and "
            f"{free / 1e9:.2f} GB are free, of which {SPARE:.0%} are left for everything else: join with a lower "
            "--cut, or free some memory"
        )
        raise ConfigError(msg)


def plan_input(config: Config, model: TheCuts, link: MeasuredLink, free: float) -> PlanInput:
    """Return what the plan rests on: what is measured here and there, and the rest by the weights' bytes."""
    there_s, here_s, assumed = model.token_s, _token_s(config, model.whole_bytes), ""
    if not here_s and not there_s:
        here_s = there_s = model.whole_bytes / MEMORY_BYTES_PER_S
        assumed = "; neither machine was measured, so both count as equal (`disco tune`)"
    elif not here_s:
        here_s, assumed = there_s, "; this machine was not measured and counts as the partner (`disco tune`)"
    elif not there_s:
        there_s, assumed = here_s, "; the partner was not measured and counts as this machine (`disco tune` there)"
    speed = LinkSpeed(link.rtt_s, link.up_bytes_per_s)
    n_cells = config.device.n_cells or 2 * config.device.divided_n_ctx
    row_s = there_s * model.row_s / model.token_s if model.token_s else 0.0
    return PlanInput(here_s, there_s, speed, free, model.free_bytes, n_cells, assumed, row_s)


def _token_s(config: Config, whole_bytes: int) -> float:
    """Return what the partner's model would take here, s, by what this machine's own one takes; 0 = not measured."""
    path = Path(config.device.model).expanduser() if config.device.model else default_model_path()
    try:
        taken = token_s(config, path) if path.is_file() else None
        return taken * whole_bytes / path.stat().st_size if taken else 0.0
    except (ConfigError, OSError):
        return 0.0
