"""The certificates of paired machines: an authority, those that it signs, and how one is looked at.

All that comes and goes is text (PEM) and bytes. Only what pairs or looks at certificates loads this: the library takes
8 MB of memory and a thirtieth of a daemon's start, and most daemons know no other machine.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..relay.orders import Identity
from .pairing_code import PairingError, check_name
from .tls import tls_name

AUTHORITY_DAYS = 20 * 365  # of an authority: as long as a machine may live; who has left is revoked, not awaited
MEMBER_DAYS = 5 * 365  # of a certificate; afterwards the two machines are paired again
BACKDATED_DAYS = 1  # certificates are valid from then on: a clock may be wrong by an hour, or by its time zone
MAX_CSR = 1 << 14  # characters of a request for a certificate; one has 500

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate that an authority gave: its text, its number in hexadecimal, and its end, Unix time, s."""

    pem: str
    serial: str
    valid_until: float


def new_authority(name: str, now: float) -> tuple[str, Identity]:
    """Make an authority, and a certificate by it for this machine, at Unix time `now`, s.

    Returns the authority's key, which signs for others, and what this machine shows to its members.
    """
    key, own_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _usage(signs_certificates=True)
    builder = _builder(subject, subject, key.public_key(), AUTHORITY_DAYS, now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    authority = builder.sign(key, hashes.SHA256())
    own = _leaf(own_key.public_key(), name, authority, now).sign(key, hashes.SHA256())
    return _key_pem(key), Identity(certificate=_pem(own), key=_key_pem(own_key), ca=_pem(authority))


def sign(csr: str, name: str, ca: str, authority_key: str, now: float) -> Signed:
    """Sign a request for a certificate, of which the key alone counts, at Unix time `now`, s.

    Raises PairingError: bad_request, or no_file for a key of the authority that is damaged.
    """
    authority = x509.load_pem_x509_certificate(ca.encode())
    builder = _leaf(_public_key_of(csr), name, authority, now)
    certificate = builder.sign(load_key(authority_key), hashes.SHA256())
    until = certificate.not_valid_after_utc.timestamp()
    return Signed(_pem(certificate), f"{certificate.serial_number:x}", until)


def fingerprint_of(ca: str) -> bytes:
    """Return the SHA-256 of a certificate (PEM)."""
    return x509.load_pem_x509_certificate(ca.encode()).fingerprint(hashes.SHA256())


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


def _leaf(
    public: ec.EllipticCurvePublicKey, name: str, authority: x509.Certificate, now: float
) -> x509.CertificateBuilder:
    """Return a machine's certificate, unsigned: it may listen and connect, and its name is the one that counts."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, authority.subject, public, MEMBER_DAYS, now)
    signer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name(name))]), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int, now: float
) -> x509.CertificateBuilder:
    today = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - timedelta(days=BACKDATED_DAYS))
        .not_valid_after(today + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: Key) -> str:
    plain, form = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, plain).decode("ascii")
