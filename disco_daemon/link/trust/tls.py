"""TLS between two machines: version 1.3, and each shows a certificate that their one authority signed.

That holds on loopback, too. Names are those of machines, not of hosts: an address may change, a name may not.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from typing import Any, Self

from ..relay.orders import Identity

DOMAIN = "disco.internal"  # of the names in certificates: a domain that is nobody's (ICANN 2024, "private use")
HANDSHAKE_S = 3.0  # for a stranger; between continents it takes 0.5 s
SHUTDOWN_S = 0.5  # for the other side's good-bye; a machine that has gone says none

# What OpenSSL's alerts and checks mean to a user, by a word in its message.
_MEANINGS = (
    ("CERTIFICATE_EXPIRED", "expired"),
    ("certificate has expired", "expired"),
    ("not yet valid", "not_yet_valid"),
    ("UNKNOWN_CA", "unknown"),
    ("self-signed", "unknown"),
    ("self signed", "unknown"),
    ("unable to get local issuer", "unknown"),
    ("certificate signature failure", "unknown"),
    ("Hostname mismatch", "name"),
    ("CERTIFICATE_REQUIRED", "none"),
    ("PROTOCOL_VERSION", "version"),
    ("UNSUPPORTED_PROTOCOL", "version"),
)
MESSAGES = {
    "expired": "a certificate has expired, or a clock is wrong: set both clocks, else pair the two machines again",
    "not_yet_valid": "a certificate is not valid yet: the clock of one of the two machines is wrong",
    "unknown": "the certificate is not of the machine that this one was paired with: pair them again",
    "name": "the machine at this address has another name than the one that this one was paired with",
    "none": "the other side wants a certificate: pair the two machines first",
    "version": "the other side does not speak TLS 1.3",
    "other": "the encrypted connection failed",
}


def tls_name(name: str) -> str:
    """Return the name of a machine as it stands in its certificate."""
    return f"{name}.{DOMAIN}"


def meaning(error: ssl.SSLError) -> tuple[str, str]:
    """Return what a failed handshake means: a word of MESSAGES, and a sentence for the user."""
    text = f"{error.reason or ''} {error}"
    kind = next((kind for word, kind in _MEANINGS if word in text), "other")
    detail = f" ({error.reason or error})" if kind == "other" else ""
    return kind, MESSAGES[kind] + detail


class AlertingSSLObject(ssl.SSLObject):
    """A side of TLS whose failed handshake leaves the alert for the other side in `alert` of the error.

    asyncio drops it with the connection (CPython 3.11 to 3.14), and the other side would never hear what was wrong.
    """

    _ours: ssl.MemoryBIO

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> Self:
        made: Self = super()._create(incoming, outgoing, *args, **kwargs)  # type: ignore[misc] # called by wrap_bio
        made._ours = outgoing
        return made

    def do_handshake(self) -> None:
        """Go on with the handshake. Raises ssl.SSLError."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as e:
            e.alert = self._ours.read()  # type: ignore[attr-defined]
            raise


def alert_of(error: OSError) -> bytes:
    """Return what the other side is to be sent because of a failed handshake; b"" if there is nothing to say."""
    return getattr(error, "alert", b"")


def server_context(identity: Identity) -> ssl.SSLContext:
    """Return the context of the side that listens. A stranger gets in without a certificate, only to pair.

    Raises ssl.SSLError for what is no key or certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL  # a wrong one ends the handshake; none is refused with a reason
    context.sslobject_class = AlertingSSLObject
    context.num_tickets = 0  # no session outlives its connection: who is revoked has nothing to come back with
    return _prepared(context, identity)


def client_context(identity: Identity) -> ssl.SSLContext:
    """Return the context of the side that connects. Raises ssl.SSLError for what is no key or certificate."""
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)


def stranger_context(ca: str) -> ssl.SSLContext:
    """Return the context of a machine that has no certificate yet, and knows the authority (PEM) of the other one."""
    return _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca)


def unchecked_context() -> ssl.SSLContext:
    """Return a context that takes any certificate: only to ask who is there, and never to say a secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _strict(context: ssl.SSLContext, ca: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION
    context.load_verify_locations(cadata=ca)
    return context


def _prepared(context: ssl.SSLContext, identity: Identity) -> ssl.SSLContext:
    _strict(context, identity.ca)
    with _as_file(identity.certificate) as certificate, _as_file(identity.key) as key:
        context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Give a short text a name that can be opened once, for OpenSSL reads keys from files only: the end of a pipe.

    No key is written to a disk, and a process that may open no file can still do this.
    """
    read_end, write_end = os.pipe()
    try:
        with os.fdopen(write_end, "w", encoding="ascii") as file:  # a pipe holds 16 KiB at least, a key has 300 bytes
            file.write(text)
        yield f"/dev/fd/{read_end}"
    finally:
        os.close(read_end)
