"""A key with a name: what it may, and how it is told from others. Pure but for the drawing of a new one.

A key is `disco-ID-SECRET`. The id finds it among others; the secret has 256 bits, and is kept as a hash alone, a
fast one that is keyed with a salt. Slow ones (scrypt, argon2) make guesses dear where there are few to make, as of
passwords that people choose. Of 2^256 secrets nobody tries a share that counts, however fast, and a slow hash would
delay each request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..plain import ANY, in_words, is_like
from ..types import Caller

N_SECRET = 32  # bytes, 43 characters of base64
N_SALT = 16  # bytes; more than there will ever be keys to tell apart
MOST_USD = 1e9  # of a cap; beyond that it is none
MOST_PER_MINUTE = 6_000  # requests, 100 a second: more than a daemon that has 512 under way can give
MOST_MODELS = 100  # patterns of one key, each looked through at a request
MOST_PATTERN = 200  # characters of one; the longest names of models have some 100
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,30}[a-z0-9])?", re.ASCII)  # a column, a label and a part of a file's name
_FORM = re.compile(r"disco-([0-9a-f]{12})-([A-Za-z0-9_-]{43})", re.ASCII)

Usd = Annotated[float, Meta(ge=0, le=MOST_USD)]
Pattern = Annotated[str, Meta(min_length=1, max_length=MOST_PATTERN)]


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may: None is no limit. `models` are names and patterns with `*` that it may ask for; none is all.

    What a `private` one asks stays on this machine.
    """

    usd_per_day: Usd | None = None
    usd_per_month: Usd | None = None
    requests_per_minute: Annotated[int, Meta(ge=1, le=MOST_PER_MINUTE)] | None = None
    models: Annotated[tuple[Pattern, ...], Meta(max_length=MOST_MODELS)] = ()
    private: bool = False

    @property
    def is_capped(self) -> bool:
        """Whether it may spend so much and no more."""
        return self.usd_per_day is not None or self.usd_per_month is not None

    def allow(self, *names: str) -> bool:
        """Whether a model may be asked for that has one of these names."""
        return not self.models or any(_fits(name, pattern) for name in names for pattern in self.models)


class NamedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept: `digest` is of its secret, `created` is Unix time, s."""

    name: str
    key_id: str
    salt: bytes
    digest: bytes
    created: float
    terms: KeyTerms = KeyTerms()

    @property
    def caller(self) -> Caller:
        """Whoever asks with it, as the rest of the daemon knows them."""
        return Caller(self.name, self.key_id)

    def is_shown_by(self, secret: str) -> bool:
        """Whether a secret is this key's; how long this takes tells nothing of it."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)

    def document(self) -> dict[str, Any]:
        """Return what may be told of it, as JSON."""
        return {"name": self.name, "created": self.created, **msgspec.to_builtins(self.terms)}


def new_key(name: str, terms: KeyTerms, now: float) -> tuple[NamedKey, str]:
    """Return a new key as it is kept, and its text, which nobody has after this. Raises ConfigError for the name."""
    if not NAME.fullmatch(name):
        msg = f"{name!r} is no name for a key: take 1 to 32 of a-z, 0-9, '.', '_' and '-', such as 'anna' or 'ci-bot'"
        raise ConfigError(msg)
    key_id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(N_SECRET), secrets.token_bytes(N_SALT)
    kept = NamedKey(name=name, key_id=key_id, salt=salt, digest=_digest(salt, secret), created=now, terms=terms)
    return kept, f"disco-{key_id}-{secret}"


def terms_of(given: Mapping[str, Any], before: KeyTerms | None = None) -> KeyTerms:
    """Return the terms `before` with those that are given in their place. Raises ConfigError for one that is none."""
    try:
        return msgspec.convert({**msgspec.to_builtins(before or KeyTerms()), **given}, KeyTerms)
    except msgspec.ValidationError as e:
        raise ConfigError(f"the key's terms: it {in_words(str(e), KeyTerms)}") from e


def parts_of(shown: str) -> tuple[str, str] | None:
    """Return id and secret of a text in the form of a key with a name; None for any other text."""
    found = _FORM.fullmatch(shown)
    return None if found is None else (found[1], found[2])


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or (ANY in pattern and is_like(name, pattern))


def _digest(salt: bytes, secret: str) -> bytes:
    return hmac.digest(salt, secret.encode("ascii"), hashlib.sha256)
