"""The daemon's handle on its keeper, the process that knows Ray: started, started again, and what it says."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ...config.layers import write_private
from ...config.schema import Config
from ...fleet_keeper.keeper_messages import INSTALL, KeeperJob, KeeperState
from ...link.relay.handshake import TheRay
from ...link.trust.addresses import own_addresses
from ...system.control_socket import ControlClosedError, ControlSocket
from ...system.supervised import ChildProcess, SupervisedProcess

log = logging.getLogger("disco.fleet")

STOP_S = 8.0  # for the keeper to end Ray's processes, of which it waits 5 s for some
LAST_PORT = 65535  # of TCP
TOKEN_BYTES = 32  # of the token: nobody guesses 256 bits
PLACES = ("HOME", "DISCO_CONFIG", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")  # never a key: `ps` shows them
OFF = (
    "fleet.ray is off: nobody restarts what lends hosts. `disco config set fleet.ray auto` has Ray do so, which "
    "listens on all addresses and says its token in plain text: for a network of yours alone (docs/explain/fleet.md)"
)
MISSING = f"Ray is not installed here, so nobody restarts what lends hosts: {INSTALL}"


def has_ray() -> bool:
    """Whether the extra with Ray is installed; it is not imported for that."""
    return importlib.util.find_spec("ray") is not None


def ray_version() -> str:
    """Return the version of the Ray that is installed here, which is not imported for that; "" without one."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""


class RayToken:
    """The token of this home's Ray in `folder`, and who may have learned it: all that were members since it was made.

    It runs programs on every node, so it is made anew as soon as one of those is no member any more, however that came:
    also while no daemon ran.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._known = folder / "ray-token", folder / "ray-token-known.json"

    def file(self) -> Path:
        """Return the token's file, which is made at first. Raises OSError."""
        if not self._path.is_file():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, secrets.token_urlsafe(TOKEN_BYTES))
        return self._path

    def follow(self, serials: Collection[str]) -> bool:
        """These certificates are members' now; return whether the token was dropped, for another one. Raises OSError.

        Call it before they can ask for the token.
        """
        known = self._knowing()
        is_dropped = known is None or not known <= set(serials)
        if is_dropped:
            self._path.unlink(missing_ok=True)  # first: who has left is known until this was done
        if is_dropped or known != set(serials):
            self._known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._known, msgspec.json.encode(sorted(serials)).decode())
        return is_dropped

    def _knowing(self) -> set[str] | None:
        """Return the certificates whose machines may know the token; None if that cannot be said."""
        try:
            return set(msgspec.json.decode(self._known.read_bytes(), type=list[str]))
        except FileNotFoundError:
            return None if self._path.exists() else set()
        except (OSError, msgspec.MsgspecError):
            return None


class RayKeeper:
    """Keeps one keeper process for a `job`; `changed` is called when it says something new."""

    def __init__(self, job: KeeperJob, changed: Callable[[KeeperState], None]) -> None:
        self.job, self.state = job, KeeperState(state="starting")
        self._changed = changed
        self._supervised = SupervisedProcess(
            "keeper", lambda: ChildProcess.start("disco_daemon.fleet_keeper.keeper", n_sockets=1),
            self._converse, self._has_ended,
            patience_s=STOP_S, log=log,
        )  # fmt: skip

    @property
    def pid(self) -> int | None:
        """The process of the present life; None between two of them."""
        child = self._supervised.child
        return child.pid if child is not None else None

    async def close(self) -> None:
        """End the keeper, and with it Ray's processes of this machine; idempotent."""
        await self._supervised.close()

    async def _converse(self, child: ChildProcess) -> str:
        """Give one life of the keeper its job, and hear what it says until it ends."""
        sock = ControlSocket(child.sockets[0])
        try:
            await sock.send(self.job)
            while True:
                body, _ = await sock.receive()
                self._take(msgspec.msgpack.decode(body, type=KeeperState))
        except ControlClosedError:
            return self.state.why
        finally:
            sock.close()

    def _has_ended(self, why: str) -> None:
        if self.state.state != "lost":
            self._take(KeeperState(state="lost", why=why))

    def _take(self, state: KeeperState) -> None:
        before, self.state = self.state, state
        if state != before:
            self._changed(state)


class HomeRay:
    """Home's Ray, as the settings say; its token lies in `folder`. `changed` is called when members get another answer.

    All mutable state: the keeper while Ray is wanted and installed, and whether Ray is up.
    """

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        self._token, self._changed = RayToken(folder), changed
        self._keeper: RayKeeper | None = None
        self._is_up = self._is_wanted = False

    async def keep(self, config: Config, serials: Collection[str]) -> None:
        """Have a keeper if one is wanted, for members with these certificates; one with another job ends first.

        So does one whose token somebody knows who is no member any more: then there is another token. Raises OSError.
        """
        self._is_wanted = config.fleet.ray != "off"
        if await asyncio.to_thread(self._token.follow, serials) and self._keeper is not None:
            await self._renew(self._keeper)
        job = await asyncio.to_thread(self._job, config) if self._is_wanted and has_ray() else None
        if self._keeper is not None and self._keeper.job != job:
            await self.close()
        if job is not None and self._keeper is None:
            self._keeper = RayKeeper(job, self._hear)

    async def _renew(self, keeper: RayKeeper) -> None:
        if keeper.job.role == "watch":
            log.warning("the Ray at %s is your own: give it another token, since a member has left", keeper.job.address)
            return
        log.info("Ray begins anew, with another token: a member has left that knew it")
        await self.close()

    async def close(self) -> None:
        """End the keeper, and with it Ray's processes of this machine; idempotent."""
        keeper, self._keeper, self._is_up = self._keeper, None, False
        if keeper is not None:
            await keeper.close()

    def for_members(self) -> TheRay | None:
        """Return what members get to join Ray."""
        keeper = self._keeper
        if keeper is None:
            return None
        if not self._is_up:
            return TheRay(starting=keeper.state.state == "starting")
        path = keeper.job.token_path
        return TheRay(address=keeper.job.address, token=Path(path).read_text("ascii").strip() if path else "")

    def document(self) -> dict[str, Any]:
        """Return how Ray is, which nothing waits for: hosts compute on without it."""
        keeper = self._keeper
        if keeper is None:
            is_missing = self._is_wanted and not has_ray()
            return {"state": "missing" if is_missing else "off", "why": MISSING if is_missing else OFF, "hosts": []}
        state = keeper.state
        return {
            "state": state.state,
            "why": state.why,
            "version": state.version,
            "address": keeper.job.address,
            "keeper_pid": keeper.pid,
            "hosts": [{"address": one.address, "pid": one.pid, "restarts": one.restarts} for one in state.hosts],
        }

    def _job(self, config: Config) -> KeeperJob:
        if config.fleet.ray != "auto":
            return KeeperJob(role="watch", address=config.fleet.ray)
        host = own_addresses(config.fleet.listen)[0]
        port = config.peer.port + 1 if config.peer.port < LAST_PORT else config.peer.port - 1
        return KeeperJob(role="head", address=f"{host}:{port}", own=host, token_path=str(self._token.file()))

    def _hear(self, state: KeeperState) -> None:
        is_up = state.state == "up"
        if self._is_up != is_up:
            self._is_up = is_up
            log.info("Ray: %s %s", state.state, state.why)
            self._changed()


def lend_command(words: list[str]) -> tuple[str, ...]:
    """Return the command by which an actor lends a host, with the settings that this program has."""
    kept = {name: os.environ[name] for name in PLACES if name in os.environ}
    return ("/usr/bin/env", *(f"{name}={value}" for name, value in kept.items()), *words)
