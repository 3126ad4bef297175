"""What one machine may be to another one: it splits a model with it, or lends it hosts."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a machine that joins does; each role has an authority of its own, so one's certificate is none of the other.

    `split`: it computes the lower layers of a model, and the machine that it joins the upper ones. `fleet`: it lends
    hosts to the machine that it joins.
    """

    SPLIT = "split"
    FLEET = "fleet"
