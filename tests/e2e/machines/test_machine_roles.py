"""A certificate for one role is of no use in the other one: real relays, and both roles' authorities of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from disco_daemon.link.relay.handshake import (
    AskCuts,
    AskRay,
    AskSegments,
    First,
    FirstReply,
    LeavePartner,
    MemberLeft,
    TheCuts,
    TheRay,
    TheSegments,
)
from disco_daemon.link.relay.join import ask_machine
from disco_daemon.link.relay.orders import (
    Address,
    Identity,
    JoinPartner,
    LinkDown,
    Listening,
    RefusalCounts,
    RelayReady,
    ServeMembers,
)
from disco_daemon.link.trust.certificates import new_request
from disco_daemon.link.trust.pairing import Issuer, PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError
from disco_daemon.link.trust.roles import Role
from disco_daemon.machines.trust_store import authority
from tests.fixtures.peers import HELLO, HOST, WELCOME, machine

QUESTIONS: list[tuple[First, type[FirstReply]]] = [
    (AskCuts(), TheCuts), (AskSegments(), TheSegments), (AskRay(), TheRay), (LeavePartner(), MemberLeft),
]  # fmt: skip


def member_of(issuer: Issuer, name: str) -> Identity:
    code = issuer.new_code([Address(host=HOST, port=1)], "" if issuer.exists else "desk")
    key, csr = new_request(name)
    return Identity(certificate=issuer.grant(code.secret, csr, name), key=key, ca=issuer.identity().ca)


@pytest.mark.parametrize("role", Role)
async def test_a_certificate_for_one_role_is_refused_in_the_other_one(
    role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    [another] = (one for one in Role if one is not role)
    there = authority(role)
    own, foreign = member_of(there, "laptop"), member_of(authority(another), "laptop")
    async with machine() as desk, machine() as edge:
        desk.relay.serve(
            ServeMembers(
                identity=there.identity(), listen=Address(host=HOST, port=0), members=there.members(), code=b"",
                welcome=WELCOME,
            )
        )  # fmt: skip
        port = (await desk.wait(Listening)).port
        at = (Address(host=HOST, port=port),)
        # The other side is believed, as if both were of one authority: it is the one that refuses.
        shown = replace(foreign, ca=own.ca)
        for message, kind in QUESTIONS:
            with pytest.raises(PairingError) as caught:
                await ask_machine(
                    PairedPartner(name="desk", own_name="laptop", addresses=at, identity=shown), message, kind
                )
            assert caught.value.reason == "certificate"
        await edge.engine()
        edge.relay.join(JoinPartner(identity=shown, name="desk", addresses=at, hello=HELLO))
        assert (await edge.wait(LinkDown)).reason == "certificate"
        assert not [event for event in desk.events if not isinstance(event, RelayReady | Listening | RefusalCounts)]
