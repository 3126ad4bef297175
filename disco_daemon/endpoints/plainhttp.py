"""A guard for keys over plain http: connections are made to private addresses only.

What a name stands for is known when somebody connects, and may be another address the next time; so it is looked at
there, in the resolver whose addresses are the ones that are connected to.
"""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from ..system.net import is_private_address


class NotPrivateError(OSError):
    """A name that is to be reached by plain http stands for public addresses only."""


class PrivateResolver(AbstractResolver):
    """Looks names up, and keeps the private addresses. Made in the loop that uses it."""

    def __init__(self) -> None:
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The private addresses of a name. Raises OSError, NotPrivateError where it has others only."""
        found = await self._resolver.resolve(host, port, family)
        private = [address for address in found if is_private_address(address["host"])]
        if not private:
            raise NotPrivateError(f"{host} is no private address")
        return private

    async def close(self) -> None:
        """Release what the look-ups hold."""
        await self._resolver.close()
