"""What a keeper is told, once, and what it says of Ray. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

INSTALL = "./install.sh --fleet where disco was installed from, or pip install 'disco-daemon[fleet]' in its environment"


class KeeperJob(msgspec.Struct, frozen=True, kw_only=True):
    """Be Ray's head, at `address` (HOST:PORT), or a node of it that lends a host; or `watch` a cluster that is there.

    `own` is this machine's address; "" = as Ray finds out. The token is in the file `token_path`; "" = the user's own
    one. `lend` is the command that a node's host is kept alive by; it ends with its stdin.
    """

    role: Literal["head", "node", "watch"]
    address: str
    own: str = ""
    token_path: str = ""
    lend: tuple[str, ...] = ()
    n_threads: int = 1


class RayHost(msgspec.Struct, frozen=True, kw_only=True):
    """A node that lends a host: where it is, the process that Ray keeps alive there, and how many it had before."""

    node: str
    address: str
    pid: int | None = None
    restarts: int = 0


class KeeperState(msgspec.Struct, frozen=True, kw_only=True):
    """How Ray is: it starts, is up, or `lost`, and why; a head says which nodes lend hosts."""

    state: Literal["starting", "up", "lost"]
    why: str = ""
    version: str = ""
    hosts: tuple[RayHost, ...] = ()
