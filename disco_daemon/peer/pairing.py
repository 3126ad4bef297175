"""Which machines know each other: an issuer signs the certificates of its members, and may revoke them by name.

The machine that prints a code is the issuer: on its first code it makes a certificate authority of its own. It signs a
certificate for itself and one for each machine that has a code. Keys are EC P-256 and never leave the machine that made
them; what is known lies in one private folder, whose files are whole or not there. Nothing is kept in memory, so every
program that looks sees the same; one at a time may change something.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .control import Address, Identity, Member, PairAnswer, PairAsked
from .pairing_code import N_SECRET, PairingCode, PairingError
from .private_folder import PrivateFolder
from .tls import tls_name

CODE_S = 600.0  # that a code is valid
AUTHORITY_DAYS = 20 * 365  # of an authority: as long as a machine may live; who has left is revoked, not awaited
MEMBER_DAYS = 5 * 365  # of a certificate; afterwards the two machines are paired again
BACKDATED_DAYS = 1  # certificates are valid from then on: a clock may be wrong by an hour, or by its time zone
N_SALT = 62  # bits of a member's salt
MAX_CSR = 1 << 14  # characters of a request for a certificate; one has 500
MEMBERS_MAX = 100  # machines of one issuer
SAFE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")  # a label of DNS, and a file's name anywhere

IDENTITY, MEMBERS, CODE, AUTHORITY_KEY = "identity.json", "members.json", "code.json", "authority.key"
PARTNER = "partner.json"

Key = ec.EllipticCurvePrivateKey


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
    """The authority that lies in `folder`, if it was ever made; `wall` is the Unix time, s."""

    def __init__(self, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._folder, self._wall = PrivateFolder(folder), wall

    @property
    def exists(self) -> bool:
        """Whether a code was ever made here."""
        return (self._folder.path / IDENTITY).exists()

    @property
    def name(self) -> str:
        """The name of this machine, as it stands in its certificate. Raises PairingError."""
        return certificate_name(self.identity().certificate)

    def identity(self) -> Identity:
        """Return what this machine shows to its members. Raises PairingError if there is none."""
        identity = self._folder.read(IDENTITY, Identity)
        if identity is None:
            raise PairingError("unpaired", "no machine was paired yet: run `disco partner pair`")
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
                known = ", ".join(record.name for record in records) or "none"
                raise PairingError("bad_name", f"no paired machine is called {name!r}; there are: {known}")
            self._folder.write(MEMBERS, left)

    # --- codes ----------------------------------------------------------------------------------------------------

    def new_code(self, addresses: Sequence[Address], name: str = "") -> PairingCode:
        """Make a code for one machine, in place of the one before; the first one makes the authority.

        `name` is what this machine is then called; else its host name. Raises PairingError.
        """
        with self._folder.locked():
            if not self.exists:
                self._make_authority(check_name(name) if name else safe_name(socket.gethostname()))
            authority = x509.load_pem_x509_certificate(self.identity().ca.encode())
            secret = secrets.token_bytes(N_SECRET)
            record = CodeRecord(digest=hashlib.sha256(secret).digest(), ends_at=self._wall() + CODE_S)
            self._folder.write(CODE, record)
        return PairingCode(tuple(addresses), secret, authority.fingerprint(hashes.SHA256()))

    def code_ends_at(self) -> float | None:
        """Return the Unix time at which the live code ends, s; None if there is none. Raises PairingError."""
        record = self._folder.read(CODE, CodeRecord)
        return record.ends_at if record and not record.used and self._is_live(record) else None

    def close_code(self) -> None:
        """Let the code be of no use any more."""
        with self._folder.locked():
            self._folder.remove(CODE)

    def grant(self, secret: bytes, csr: str, name: str) -> str:
        """Return a certificate (PEM) for the machine that has the code's secret; the code is used up.

        Raises PairingError: no_code, wrong_code, used_code, expired_code, bad_name or bad_request. A name or a request
        that is wrong leaves the code as it is.
        """
        with self._folder.locked():
            record = self._folder.read(CODE, CodeRecord)
            if record is None:
                raise PairingError("no_code", "no code was made: run `disco partner pair` on the other machine")
            if not hmac.compare_digest(hashlib.sha256(secret).digest(), record.digest):
                raise PairingError("wrong_code", "the code is not the latest one: run `disco partner pair` again")
            if record.used:
                raise PairingError("used_code", "the code was used already: run `disco partner pair` again")
            if not self._is_live(record):
                msg = f"the code has expired, it is valid for {CODE_S / 60:.0f} minutes: run `disco partner pair` again"
                raise PairingError("expired_code", msg)
            records = self.records()
            self._check_free(name, records)
            certificate = self._sign(_public_key_of(csr), name)
            new = MemberRecord(
                name=name, serial=f"{certificate.serial_number:x}", salt=secrets.randbits(N_SALT) | 1,
                joined_at=self._wall(), valid_until=certificate.not_valid_after_utc.timestamp(),
            )  # fmt: skip
            self._folder.write(CODE, msgspec.structs.replace(record, used=True))  # first: never two for one code
            self._folder.write(MEMBERS, [*records, new])
        return _pem(certificate)

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

    # --- certificates ---------------------------------------------------------------------------------------------

    def _make_authority(self, name: str) -> None:
        key, own_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = _usage(signs_certificates=True)
        builder = self._builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        authority = builder.sign(key, hashes.SHA256())
        own = _sign(self._leaf(own_key.public_key(), name, authority), key)
        self._folder.write_bytes(AUTHORITY_KEY, _key_pem(key).encode())
        identity = Identity(certificate=_pem(own), key=_key_pem(own_key), ca=_pem(authority))
        self._folder.write(IDENTITY, identity)  # last: it says that the authority is there

    def _sign(self, public: ec.EllipticCurvePublicKey, name: str) -> x509.Certificate:
        key = load_key((self._folder.read_bytes(AUTHORITY_KEY) or b"").decode("ascii", "replace"))
        authority = x509.load_pem_x509_certificate(self.identity().ca.encode())
        return _sign(self._leaf(public, name, authority), key)

    def _leaf(
        self, public: ec.EllipticCurvePublicKey, name: str, authority: x509.Certificate
    ) -> x509.CertificateBuilder:
        """Return a machine's certificate, unsigned: it may listen and connect, and its name is the one that counts."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, authority.subject, public, MEMBER_DAYS)
        signer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name(name))]), critical=False)
        return builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False
        )

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.fromtimestamp(self._wall(), UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=BACKDATED_DAYS))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )


def answer_pair(issuer: Issuer, asked: PairAsked) -> PairAnswer:
    """Return a daemon's answer to a machine that wants a certificate. Takes milliseconds, with two writes to a disk.

    The daemon tells its relay of the new member before it sends the answer: the member may come at once.
    """
    try:
        return PairAnswer(n=asked.n, certificate=issuer.grant(asked.secret, asked.csr, asked.name))
    except PairingError as e:
        return PairAnswer(n=asked.n, reason=e.reason, message=str(e))


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


# --- keys and certificates ----------------------------------------------------------------------------------------


def new_request(name: str) -> tuple[str, str]:
    """Make a key, and a request for a certificate of that name; return both as PEM. Raises PairingError (bad_name)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.PEM).decode("ascii")


def load_key(text: str) -> Key:
    """Return a private key. Raises PairingError for what is none of ours."""
    try:
        key = serialization.load_pem_private_key(text.encode(), None)
    except ValueError as e:
        raise PairingError("no_file", "the key is damaged: pair the two machines again") from e
    if not isinstance(key, Key):
        raise PairingError("no_file", "the key is of another kind: pair the two machines again")
    return key


def check_authority(ca: str, fingerprint: bytes) -> str:
    """Return the name of the machine whose authority this is. Raises PairingError (fingerprint) if it is another."""
    try:
        authority = x509.load_pem_x509_certificate(ca.encode())
    except ValueError as e:
        raise PairingError("fingerprint", "the other machine sent what is no certificate") from e
    if not hmac.compare_digest(authority.fingerprint(hashes.SHA256()), fingerprint):
        msg = "the machine at this address is not the one that printed the code: its certificate is another one"
        raise PairingError("fingerprint", msg)
    return certificate_name(ca)


def check_certificate(identity: Identity, name: str, now: float) -> None:
    """Check that a certificate is for this key and name, by this authority, and valid at Unix time `now`, s.

    Raises PairingError (certificate), which says whether a clock may be wrong.
    """
    certificate = x509.load_pem_x509_certificate(identity.certificate.encode())
    authority = x509.load_pem_x509_certificate(identity.ca.encode())
    try:
        certificate.verify_directly_issued_by(authority)
        ours = certificate.public_key() == load_key(identity.key).public_key()
    except (ValueError, TypeError, InvalidSignature):
        ours = False
    if not ours or certificate_name(identity.certificate) != name:
        raise PairingError("certificate", "the certificate that came is not for this machine: pair again")
    check_times(identity, now)


def valid_until(identity: Identity) -> float:
    """Return when the first of a machine's two certificates ends, Unix time, s."""
    texts = (identity.certificate, identity.ca)
    return min(x509.load_pem_x509_certificate(text.encode()).not_valid_after_utc.timestamp() for text in texts)


def check_times(identity: Identity, now: float) -> None:
    """Check that a machine's certificates are valid at Unix time `now`, s. Raises PairingError (certificate)."""
    for text in (identity.certificate, identity.ca):
        certificate = x509.load_pem_x509_certificate(text.encode())
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > ends.timestamp():
            msg = f"the certificate has expired on {ends:%Y-%m-%d}: pair the two machines again, or set the clock"
            raise PairingError("certificate", msg)
        if now < begins.timestamp():
            msg = f"the certificate is valid from {begins:%Y-%m-%d} on: set the clock of this machine"
            raise PairingError("certificate", msg)


def certificate_name(text: str) -> str:
    """Return the name in a certificate (PEM). Raises PairingError if it is none that we give."""
    found = x509.load_pem_x509_certificate(text.encode()).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return check_name(str(found[0].value) if len(found) == 1 else "")


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


def _public_key_of(csr: str) -> ec.EllipticCurvePublicKey:
    """Return the key of a request for a certificate, all else of which is ignored. Raises PairingError."""
    try:
        request = x509.load_pem_x509_csr(csr[:MAX_CSR].encode())
        key, signed = request.public_key(), request.is_signature_valid
    except ValueError as e:
        raise PairingError("bad_request", "this is no request for a certificate, or it is damaged") from e
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PairingError("bad_request", "the request for a certificate is not signed by a key of P-256")
    return key


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _sign(builder: x509.CertificateBuilder, key: Key) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: Key) -> str:
    plain, form = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, plain).decode("ascii")
