"""The file of the keys with names, beside config.toml: readable by its owner alone, whole or not there.

The daemon that uses it and the verbs that are run without one write it by the same functions, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config.layers import changing, write_private
from ..errors import ConfigError
from ..plain import which
from ..system.smallfile import read_text
from .named_key import NAME, KeyTerms, NamedKey, new_key, terms_of

MOST_KEYS = 64  # a family, a team, its agents; each has sums on disk that stay open, and a label of metrics
MAX_FILE = 4 * 1024 * 1024  # bytes; 64 keys with 100 patterns of 200 characters have 1.3 million
Keys = tuple[NamedKey, ...]


class _Content(msgspec.Struct, frozen=True):
    """What is in the file; `version` is raised when an older program would misread it."""

    keys: Keys
    version: int = 1


class KeyFile:
    """The keys that belong to the config.toml at `config`."""

    def __init__(self, config: Path) -> None:
        self.path = config.with_name("keys.json")

    def read(self) -> Keys:
        """Return the keys; none where there is no file. Raises ConfigError. Blocks on disk."""
        if not self.path.exists():
            return ()
        text = read_text(self.path, "the keys with names: ", max_bytes=MAX_FILE, hidden=0o077)
        try:
            content = msgspec.json.decode(text, type=_Content)
        except msgspec.MsgspecError as e:
            msg = (
                f"{self.path} is damaged ({e}): no key is taken up from it. Restore it, or remove it and add the keys "
                "anew; until then a running daemon lets in those that it has, and `disco keys revoke NAME` ends one"
            )
            raise ConfigError(msg) from e
        if content.version > 1:
            raise ConfigError(f"{self.path} is of a newer disco, which this one cannot read: update disco")
        # Names are parts of files' names, also if somebody has written this file by hand.
        if wrong := next((key.name for key in content.keys if not NAME.fullmatch(key.name)), None):
            raise ConfigError(f"{self.path} has a key called {wrong!r}, which is no name for one")
        return content.keys

    def add(self, name: str, terms: KeyTerms, now: float) -> tuple[Keys, str]:
        """Add a key; return all, and the text of the new one. Raises ConfigError, and then nothing has changed."""
        made, text = new_key(name, terms, now)

        def added(keys: Keys) -> Keys:
            if any(key.name == name for key in keys):
                msg = (
                    f"there is a key called {name!r} already: `disco keys change {name}` gives it other limits, "
                    f"`disco keys revoke {name}` makes room for a new one"
                )
                raise ConfigError(msg)
            if len(keys) >= MOST_KEYS:
                raise ConfigError(f"there are {MOST_KEYS} keys already: `disco keys revoke NAME` ends one")
            return (*keys, made)

        return self._change(added), text

    def change(self, name: str, given: Mapping[str, Any]) -> Keys:
        """Give a key the terms that are given; return all keys. Raises ConfigError, and then nothing has changed."""

        def changed(keys: Keys) -> Keys:
            old = _find(keys, name)
            new = msgspec.structs.replace(old, terms=terms_of(given, old.terms))
            return tuple(new if key is old else key for key in keys)

        return self._change(changed)

    def revoke(self, name: str) -> Keys:
        """Forget a key; return those that are left. Raises ConfigError where there is none of that name."""

        def left(keys: Keys) -> Keys:
            old = _find(keys, name)
            return tuple(key for key in keys if key is not old)

        return self._change(left)

    def _change(self, change: Callable[[Keys], Keys]) -> Keys:
        try:
            with changing(self.path):
                keys = change(self.read())
                write_private(self.path, msgspec.json.encode(_Content(keys)).decode())
        except OSError as e:
            raise ConfigError(f"{self.path} cannot be written: {e.strerror or e}") from e
        return keys


def _find(keys: Keys, name: str) -> NamedKey:
    found = next((key for key in keys if key.name == name), None)
    if found is None:
        raise ConfigError(f"there is no key called {name!r}: {which(name, [key.name for key in keys])}")
    return found
