"""The one-time code that one machine prints and the other one is given, as one word, and their names. Pure.

Its bytes are the version, the role, the port, the addresses, a secret, the SHA-256 of the authority's certificate, and
four bytes of a checksum over all of it. Version 1 has no role. They are written in base32, without the digits that look
like letters, so case, blanks and dashes do not matter, and a typing error is found before anything is sent.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass

from ...errors import ConfigError
from ..relay.orders import Address
from .roles import Role

WITHOUT_ROLE, VERSION = 1, 2
ROLES = (Role.SPLIT, Role.FLEET)  # by their numbers in a code
N_SECRET = 16  # bytes: nobody guesses 128 bits within ten minutes
N_FINGERPRINT = 32  # bytes of a SHA-256
N_CHECKSUM = 4  # bytes: one typing error in four thousand million is not found
ADDRESSES_MAX = 4  # in a code; a laptop has one by cable, one by radio, one of a VPN
MAX_HOST = 253  # bytes of a host name, as in DNS
SAFE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")  # a label of DNS, and a file's name anywhere
_LOOKALIKES = str.maketrans("018", "OIB", "- \t\r\n")
_ALPHABET = re.compile(r"[A-Z2-7]+")


class PairingError(ConfigError):
    """Two machines cannot be paired, or not work together any more.

    `reason` is one of `refusals.REASONS`, or mistyped, unreachable, fingerprint, certificate or unpaired.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PairingCode:
    """Where a machine can be reached (all addresses have one port), the secret, and the authority's fingerprint.

    `role` is what the machine that joins is to be; None in a code of an older disco, which does not say it.
    """

    addresses: tuple[Address, ...]
    secret: bytes
    fingerprint: bytes
    role: Role | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX or len({a.port for a in self.addresses}) != 1:
            raise ValueError(f"a code has 1 to {ADDRESSES_MAX} addresses with one port")
        if len(self.secret) != N_SECRET or len(self.fingerprint) != N_FINGERPRINT:
            raise ValueError(f"a code has a secret of {N_SECRET} bytes and a fingerprint of {N_FINGERPRINT}")

    def __repr__(self) -> str:
        """Hide the secret: a log or a traceback may show this."""
        return f"PairingCode({', '.join(map(str, self.addresses))})"


def format_code(code: PairingCode) -> str:
    """Return a code as one word of about a hundred letters and digits."""
    head = (WITHOUT_ROLE,) if code.role is None else (VERSION, ROLES.index(code.role))
    parts = [bytes(head), struct.pack(">HB", code.addresses[0].port, len(code.addresses))]
    parts += [_pack_host(address.host) for address in code.addresses]
    data = b"".join((*parts, code.secret, code.fingerprint))
    return base64.b32encode(data + _checksum(data)).decode("ascii").rstrip("=")


def parse_code(text: str) -> PairingCode:
    """Return the code that a user has typed or pasted. Raises PairingError (mistyped)."""
    word = text.upper().translate(_LOOKALIKES)
    if not _ALPHABET.fullmatch(word) or len(word) > 2048:
        raise _mistyped()
    try:
        data = base64.b32decode(word + "=" * (-len(word) % 8))
    except ValueError as e:
        raise _mistyped() from e
    body, checksum = data[:-N_CHECKSUM], data[-N_CHECKSUM:]
    if not body or _checksum(body) != checksum or base64.b32encode(data).decode("ascii").rstrip("=") != word:
        raise _mistyped()
    if body[0] not in (WITHOUT_ROLE, VERSION):
        msg = f"the code is of version {body[0]}, this disco knows version {VERSION}: upgrade the older one of the two"
        raise PairingError("protocol", msg)
    try:
        role, at = (ROLES[body[1]], 2) if body[0] == VERSION else (None, 1)
        port, n_addresses = struct.unpack_from(">HB", body, at)
        at, addresses = at + 3, []
        for _ in range(n_addresses):
            host, at = _unpack_host(body, at)
            addresses.append(Address(host=host, port=port))
        secret, fingerprint = body[at : at + N_SECRET], body[at + N_SECRET :]
        return PairingCode(tuple(addresses), secret, fingerprint, role)
    except (ValueError, struct.error, IndexError) as e:
        raise _mistyped() from e


def _mistyped() -> PairingError:
    return PairingError("mistyped", "the code has a typing error, or a part of it is missing: copy the whole line")


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:N_CHECKSUM]


def _pack_host(host: str) -> bytes:
    """Return an IP address as its 4 or 16 bytes, a name as text, each behind its length; a name has a zero before."""
    try:
        packed = ipaddress.ip_address(host).packed
        return bytes([len(packed)]) + packed
    except ValueError:
        pass
    name = host.encode("idna") if not host.isascii() else host.encode("ascii")
    if not 1 <= len(name) <= MAX_HOST:
        raise ValueError(f"{host!r} is no host name")
    return b"\x00" + bytes([len(name)]) + name


def _unpack_host(data: bytes, at: int) -> tuple[str, int]:
    n_bytes, at = data[at], at + 1
    if n_bytes in (4, 16):
        return str(ipaddress.ip_address(data[at : at + n_bytes])), at + n_bytes
    if n_bytes:
        raise ValueError
    n_bytes, at = data[at], at + 1
    return data[at : at + n_bytes].decode("ascii"), at + n_bytes


def check_name(name: str) -> str:
    """Return a machine's name if it is one: a word of small letters, digits and dashes. Raises PairingError."""
    if not SAFE_NAME.fullmatch(name):
        msg = f"{name[:60]!r} is no name for a machine: up to 40 small letters, digits and dashes (--name)"
        raise PairingError("bad_name", msg)
    return name


def safe_name(hostname: str) -> str:
    """Return a name for a machine, made of its host name."""
    name = re.sub(r"[^a-z0-9]+", "-", hostname.partition(".")[0].lower())[:40].strip("-")
    return name or "machine"
