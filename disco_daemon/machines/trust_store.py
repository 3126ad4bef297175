"""The one place that says where this machine keeps whom it trusts, for both roles.

For each role there is an authority, for machines that join this one, and the membership of the machine that this one
has joined. The folders have the names of the releases in which the roles had verbs of their own, so machines that were
paired then stay paired.
"""

from __future__ import annotations

from pathlib import Path

from ..config.layers import data_path
from ..link.trust.pairing import Issuer, Membership
from ..link.trust.roles import Role

_AUTHORITIES = {Role.SPLIT: "peer/issuer", Role.FLEET: "fleet/issuer"}
_MEMBERSHIPS = {Role.SPLIT: "peer/membership", Role.FLEET: "fleet/home"}


def authority_folder(role: Role) -> Path:
    """Return the folder of the authority of a role, and of what is kept of its members."""
    return data_path() / _AUTHORITIES[role]


def authority(role: Role) -> Issuer:
    """Return the authority that signs for machines that join this one in a role."""
    return Issuer(authority_folder(role), role=role)


def membership(role: Role) -> Membership:
    """Return what this machine keeps of the one that it has joined in a role."""
    return Membership(data_path() / _MEMBERSHIPS[role])
