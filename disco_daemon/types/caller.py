"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """A key with a name that asks; `key_id` is of this one alone, whatever keys have had that name. "" is the owner."""

    name: str = ""
    key_id: str = ""


OWNER = Caller()
