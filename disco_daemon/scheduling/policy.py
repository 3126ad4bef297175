"""Who starts when. Every policy is pure and silent: it reads no clock, logs nothing and changes nothing when asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ..types import Plan


class Policy(Protocol):
    """Decides the start delays of one request."""

    @property
    def name(self) -> str:
        """The name used in the configuration and in history."""
        ...

    def plan(self, length: int) -> Plan:
        """Start delays for a prompt of `length` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same start delays for every prompt."""

    name: str
    fixed: Plan

    def plan(self, length: int) -> Plan:
        """The fixed plan, whatever the length."""
        del length
        return self.fixed


POLICIES = ("race", "all-device", "all-server", "delay")


def make_policy(name: str, delay_s: float) -> Policy:
    """The policy of that name; `delay_s` is the head start of the server in `delay`, s. Raises ValueError."""
    plans = {
        "race": Plan(0.0, 0.0),
        "all-device": Plan(0.0, math.inf),
        "all-server": Plan(math.inf, 0.0),
        "delay": Plan(delay_s, 0.0),
    }
    if name not in plans:
        msg = f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}"
        raise ValueError(msg)
    return Fixed(name, plans[name])
