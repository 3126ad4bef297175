"""A machine that lends hosts as a node of home's Ray, which starts what lends them again if it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from ...config.layers import data_path, write_private
from ...fleet_keeper.keeper_messages import KeeperJob, KeeperState
from ...link.relay.connector import REPLY_S
from ...link.relay.handshake import AskRay, TheRay
from ...link.relay.join import ask_machine
from ...link.trust.pairing import PairedPartner
from ...link.trust.pairing_code import PairingError
from ...system.program import verb
from ..owner import OwnerTerms
from .lending import ENDS_IT
from .ray_keeper import MISSING, RayKeeper, has_ray, lend_command

NODE_TOKEN = "node-token"  # noqa: S105 - a file's name
STARTS_S = 90.0  # that home's Ray may take to start: 10 s on a quiet machine
ASK_S = 1.0  # between two questions whether it has
ASK_AGAIN_S = 10.0  # between two questions whether home's Ray is still the same: one whose token is another has left
SHORT_S = 30.0  # a node that lived no longer has failed
MAX_SHORT = 3  # such lives in a row, after which this machine lends by itself


async def lend_by_ray(home: PairedPartner, terms: OwnerTerms, say: Callable[[str], None]) -> None:
    """Be a node of home's Ray as long as there is one; return at once where there is none, here or there.

    A Ray that begins anew, with another token, is joined again.
    """
    if not has_ray():
        say(MISSING)
        return
    loop, n_short = asyncio.get_running_loop(), 0
    while n_short < MAX_SHORT:
        ray = await _ray_of(home, say)
        if ray is None or not ray.address:
            say(f"{home.name} has no Ray: nobody starts what lends hosts again, if it ends")
            return
        began = loop.time()
        await _be_node(home, ray, terms, say)
        n_short = n_short + 1 if loop.time() - began < SHORT_S else 0


async def _be_node(home: PairedPartner, ray: TheRay, terms: OwnerTerms, say: Callable[[str], None]) -> None:
    """Be a node of this Ray until it has gone, or home has another one."""
    ended = asyncio.Event()

    def hear(state: KeeperState) -> None:
        say(f"Ray's node: {state.state}{f' ({state.why})' if state.why else ''}")
        if state.state == "lost":
            ended.set()

    keeper = RayKeeper(_job(ray, terms), hear)
    try:
        while not ended.is_set() and not await _is_another(home, ray):
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    await ended.wait()
    finally:
        await keeper.close()
        (data_path() / "fleet" / NODE_TOKEN).unlink(missing_ok=True)


async def ask_ray(home: PairedPartner) -> TheRay:
    """Return where home's Ray is, if it has one. Raises PairingError."""
    return await ask_machine(home, AskRay(), TheRay, REPLY_S)


async def _is_another(home: PairedPartner, ray: TheRay) -> bool:
    """Whether home has another Ray than this one by now, or this machine is no member any more.

    Where home has none at present, the node ends by itself, unless its head comes back.
    """
    try:
        there = await ask_ray(home)
        return bool(there.address) and there != ray
    except PairingError as e:
        return e.reason in ENDS_IT


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
        write_private(folder / NODE_TOKEN, ray.token)
        path = str(folder / NODE_TOKEN)
    words = verb("machines", "join", "--yes", "--until-eof", "--as-agreed")  # so also after the owner has allowed less
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
