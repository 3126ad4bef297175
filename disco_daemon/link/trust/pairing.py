"""Which machines know each other: an issuer signs the certificates of its members, and may revoke them by name.

The machine that prints a code is the issuer: on its first code it makes a certificate authority of its own. It signs a
certificate for itself and one for each machine that has a code. Keys are EC P-256 and never leave the machine that made
them; what is known lies in one private folder, whose files are whole or not there. Nothing is kept in memory, so every
program that looks sees the same; one at a time may change something.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ...plain import which
from ..relay.handshake import AskPair, PairGranted
from ..relay.orders import Address, Identity, Member, MemberAnswer, MemberAsks
from .pairing_code import N_SECRET, PairingCode, PairingError, check_name, safe_name
from .private_folder import PrivateFolder
from .roles import Role

CODE_S = 600.0  # that a code is valid
N_SALT = 62  # bits of a member's salt
MEMBERS_MAX = 100  # machines of one issuer

IDENTITY, MEMBERS, CODE, AUTHORITY_KEY = "identity.json", "members.json", "code.json", "authority.key"
PARTNER = "partner.json"


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A member as it is kept: when it came and when its certificate ends are Unix times, s."""

    name: str
    serial: str
    salt: int
    joined_at: float
    valid_until: float


class CodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The latest code: the SHA-256 of its secret only, and the Unix time of its end, s."""

    digest: bytes
    ends_at: float
    used: bool = False


class Issuer:
    """The authority that lies in `folder`, if it was ever made, for one role; `wall` is the Unix time, s."""

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time, *, role: Role = Role.SPLIT) -> None:
        self._folder, self._role, self._wall = PrivateFolder(folder), role, wall

    @property
    def exists(self) -> bool:
        """Whether a code was ever made here."""
        return (self._folder.path / IDENTITY).exists()

    @property
    def name(self) -> str:
        """The name of this machine, as it stands in its certificate. Raises PairingError."""
        from .certificates import certificate_name

        return certificate_name(self.identity().certificate)

    def identity(self) -> Identity:
        """Return what this machine shows to its members. Raises PairingError if there is none."""
        identity = self._folder.read(IDENTITY, Identity)
        if identity is None:
            raise PairingError("unpaired", "no machine was paired yet: run `disco machines pair`")
        return identity

    # --- members --------------------------------------------------------------------------------------------------

    def records(self) -> list[MemberRecord]:
        """Return the members, by name. Raises PairingError."""
        return sorted(self._folder.read(MEMBERS, list[MemberRecord]) or [], key=lambda record: record.name)

    def members(self) -> tuple[Member, ...]:
        """Return the members as the relay gets them. Raises PairingError."""
        return tuple(Member(name=r.name, serial=r.serial, salt=r.salt) for r in self.records())

    def revoke(self, name: str) -> None:
        """Forget a member for ever: its certificate is of no use from now on. Raises PairingError."""
        with self._folder.locked():
            records = self.records()
            left = [record for record in records if record.name != name]
            if len(left) == len(records):
                known = which(name, (record.name for record in records))
                raise PairingError("bad_name", f"no paired machine is called {name!r}: {known}")
            self._folder.write(MEMBERS, left)

    # --- codes ----------------------------------------------------------------------------------------------------

    def new_code(self, addresses: Sequence[Address], name: str = "") -> PairingCode:
        """Make a code for one machine, in place of the one before; the first one makes the authority.

        `name` is what this machine is then called; else its host name. Raises PairingError.
        """
        from .certificates import fingerprint_of, new_authority

        with self._folder.locked():
            if not self.exists:
                called = check_name(name) if name else safe_name(socket.gethostname())
                key, identity = new_authority(called, self._wall())
                self._folder.write_bytes(AUTHORITY_KEY, key.encode())
                self._folder.write(IDENTITY, identity)  # last: it says that the authority is there
            secret = secrets.token_bytes(N_SECRET)
            record = CodeRecord(digest=hashlib.sha256(secret).digest(), ends_at=self._wall() + CODE_S)
            self._folder.write(CODE, record)
        return PairingCode(tuple(addresses), secret, fingerprint_of(self.identity().ca), self._role)

    def code_ends_at(self) -> float | None:
        """Return the Unix time at which the live code ends, s; None if there is none. Raises PairingError."""
        record = self._folder.read(CODE, CodeRecord)
        return record.ends_at if record and not record.used and self._is_live(record) else None

    def live_code(self) -> bytes:
        """Return the SHA-256 of the live code's secret; b"" if there is none. Raises PairingError."""
        record = self._folder.read(CODE, CodeRecord)
        return record.digest if record and not record.used and self._is_live(record) else b""

    def grant(self, secret: bytes, csr: str, name: str) -> str:
        """Return a certificate (PEM) for the machine that has the code's secret; the code is used up.

        Raises PairingError: no_code, wrong_code, used_code, expired_code, bad_name or bad_request. A name or a request
        that is wrong leaves the code as it is.
        """
        from .certificates import sign

        with self._folder.locked():
            record = self._folder.read(CODE, CodeRecord)
            if record is None:
                raise PairingError("no_code", "no code was made: run `disco machines pair` on the other machine")
            if not hmac.compare_digest(hashlib.sha256(secret).digest(), record.digest):
                raise PairingError("wrong_code", "the code is not the latest one: run `disco machines pair` again")
            if record.used:
                raise PairingError("used_code", "the code was used already: run `disco machines pair` again")
            if not self._is_live(record):
                msg = (
                    f"the code has expired, it is valid for {CODE_S / 60:.0f} minutes: run `disco machines pair` again"
                )
                raise PairingError("expired_code", msg)
            records = self.records()
            self._check_free(name, records)
            key = (self._folder.read_bytes(AUTHORITY_KEY) or b"").decode("ascii", "replace")
            signed = sign(csr, name, self.identity().ca, key, self._wall())
            new = MemberRecord(
                name=name, serial=signed.serial, salt=secrets.randbits(N_SALT) | 1,
                joined_at=self._wall(), valid_until=signed.valid_until,
            )  # fmt: skip
            self._folder.write(CODE, msgspec.structs.replace(record, used=True))  # first: never two for one code
            self._folder.write(MEMBERS, [*records, new])
        return signed.pem

    def _is_live(self, record: CodeRecord) -> bool:
        return 0.0 < record.ends_at - self._wall() <= CODE_S  # a clock that was set back makes no code live longer

    def _check_free(self, name: str, records: list[MemberRecord]) -> None:
        check_name(name)
        if name == self.name:
            raise PairingError("bad_name", f"{name!r} is the other machine's own name: choose another one (--name)")
        if any(record.name == name for record in records):
            msg = f"{name!r} is paired already: choose another name (--name), or revoke that one first"
            raise PairingError("bad_name", msg)
        if len(records) >= MEMBERS_MAX:
            raise PairingError("crowded", f"{MEMBERS_MAX} machines are paired: revoke one first")


def answer_pair(issuer: Issuer, asked: MemberAsks) -> MemberAnswer:
    """Return a daemon's answer to a machine that wants a certificate. Takes milliseconds, with two writes to a disk.

    The daemon tells its relay of the new member before it sends the answer: the member may come at once.
    """
    wanted = asked.asked
    assert isinstance(wanted, AskPair)
    try:
        return MemberAnswer(
            n=asked.n, given=PairGranted(certificate=issuer.grant(wanted.secret, wanted.csr, wanted.name))
        )
    except PairingError as e:
        return MemberAnswer(n=asked.n, reason=e.reason, message=str(e))


class PairedPartner(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a member was paired with: its name, where it was reached, and what this one shows to it."""

    name: str
    own_name: str
    addresses: tuple[Address, ...]
    identity: Identity


class Membership:
    """What a member keeps of the machine that it was paired with, in `folder`; one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = PrivateFolder(folder)

    def partner(self) -> PairedPartner | None:
        """Return the partner; None if there is none. Raises PairingError if the file is damaged."""
        return self._folder.read(PARTNER, PairedPartner)

    def save(self, partner: PairedPartner) -> None:
        """Keep a partner, in place of the one before. Raises PairingError."""
        with self._folder.locked():
            self._folder.write(PARTNER, partner)

    def forget(self) -> None:
        """Remove key, certificate and partner. Raises PairingError."""
        with self._folder.locked():
            self._folder.remove(PARTNER)
