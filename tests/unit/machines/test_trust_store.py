"""Machines that were paired by former releases stay paired, each role by an authority and a membership of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_daemon.link.relay.orders import Address
from disco_daemon.link.trust.certificates import new_request
from disco_daemon.link.trust.pairing import Issuer, Membership, PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError
from disco_daemon.link.trust.roles import Role
from disco_daemon.machines.fleet.members import FleetMembers
from disco_daemon.machines.member_service import MemberService
from disco_daemon.machines.split.partner_service import Partner
from disco_daemon.machines.trust_store import authority, membership
from tests.fixtures.clock import StoppedClock

HERE = [Address(host="192.168.1.5", port=4748)]
# Below the data folder, as disco 0.1.0 made them.
AUTHORITIES = {Role.SPLIT: "peer/issuer", Role.FLEET: "fleet/issuer"}
MEMBERSHIPS = {Role.SPLIT: "peer/membership", Role.FLEET: "fleet/home"}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "disco"


def service_of(role: Role) -> MemberService:
    return Partner(StoppedClock()) if role is Role.SPLIT else FleetMembers()


@pytest.mark.parametrize("role", Role)
def test_machines_that_a_former_release_has_paired_are_still_paired(data: Path, role: Role) -> None:
    issuer = Issuer(data / AUTHORITIES[role])
    code = issuer.new_code(HERE, "desk")
    _, csr = new_request("laptop")
    identity = issuer.identity()
    issuer.grant(code.secret, csr, "laptop")
    other = PairedPartner(name="desk", own_name="laptop", addresses=tuple(HERE), identity=identity)
    Membership(data / MEMBERSHIPS[role]).save(other)
    assert authority(role).members() == issuer.members()
    assert authority(role).identity() == identity
    assert membership(role).partner() == other
    assert [one["name"] for one in service_of(role).document()["members"]] == ["laptop"]


@pytest.mark.parametrize("role", Role)
def test_no_role_has_anything_of_the_other_one(data: Path, role: Role) -> None:
    [another] = (one for one in Role if one is not role)
    code = authority(role).new_code(HERE, "desk")
    assert not authority(another).exists
    authority(another).new_code(HERE, "desk")
    assert authority(another).identity().ca != authority(role).identity().ca
    with pytest.raises(PairingError) as caught:
        authority(another).grant(code.secret, new_request("laptop")[1], "laptop")
    assert caught.value.reason == "wrong_code"
    authority(role).grant(code.secret, new_request("laptop")[1], "laptop")
    assert authority(another).members() == ()
    assert membership(another).partner() is None
