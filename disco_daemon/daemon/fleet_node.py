"""A machine that lends hosts as a node of home's Ray, which starts what lends them again if it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from ..config.layers import data_path, write_private
from ..fleet_keeper.messages import KeeperJob, KeeperState
from ..peer.first_frames import TheRay
from ..peer.join import ask_ray
from ..peer.pairing import PairedPartner
from ..peer.pairing_code import PairingError
from ..program import verb
from .fleet_ray import MISSING, RayKeeper, has_ray, lend_command
from .owner import OwnerTerms

STARTS_S = 90.0  # that home's Ray may take to start: 10 s on a quiet machine
ASK_S = 1.0  # between two questions whether it has


async def lend_by_ray(home: PairedPartner, terms: OwnerTerms, say: Callable[[str], None]) -> None:
    """Be a node of home's Ray as long as that lives; return at once where there is none, here or there."""
    if not has_ray():
        say(MISSING)
        return
    ray = await _ray_of(home, say)
    if ray is None or not ray.address:
        say(f"{home.name} has no Ray: nobody starts what lends hosts again, if it ends")
        return
    ended = asyncio.Event()

    def hear(state: KeeperState) -> None:
        say(f"Ray's node: {state.state}{f' ({state.why})' if state.why else ''}")
        if state.state == "lost":
            ended.set()

    keeper = RayKeeper(_job(ray, terms), hear)
    try:
        await ended.wait()
    finally:
        await keeper.close()


async def _ray_of(home: PairedPartner, say: Callable[[str], None]) -> TheRay | None:
    """Return where home's Ray is, once it has started; None if that cannot be found out."""
    with suppress(TimeoutError, PairingError):
        async with asyncio.timeout(STARTS_S):
            ray = await ask_ray(home)
            if ray.starting:
                say(f"waiting for the Ray of {home.name}")
            while ray.starting:
                await asyncio.sleep(ASK_S)
                ray = await ask_ray(home)
            return ray
    return None


def _job(ray: TheRay, terms: OwnerTerms) -> KeeperJob:
    path = ""
    if ray.token:
        folder = data_path() / "fleet"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / "node-token", ray.token)
        path = str(folder / "node-token")
    words = verb("fleet", "join", "--yes", "--until-eof", "--as-agreed")  # so also after the owner has allowed less
    return KeeperJob(
        role="node", address=ray.address, own=_own_address(ray.address), token_path=path,
        lend=lend_command(list(words)), n_threads=terms.n_threads,
    )  # fmt: skip


def _own_address(other: str) -> str:
    """Return this machine's address by which packets go to another one; nothing is sent."""
    host, _, port = other.rpartition(":")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))
        return str(sock.getsockname()[0])
    return ""
