"""By what addresses other machines may reach this one."""

from __future__ import annotations

import socket

import psutil


def own_addresses(listen: str) -> list[str]:
    """Return by what other machines may reach this one, if it listens there: its own addresses of IPv4."""
    if listen not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return [listen]
    found = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith(("127.", "169.254."))
        and not name.startswith(("docker", "br-", "veth", "virbr"))
    ]  # fmt: skip
    return found or ["127.0.0.1"]
