"""Codes, certificates and names of paired machines: what is right is accepted once, all else is told apart."""

from __future__ import annotations

import random
import stat
import string
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.link.relay.handshake import AskPair, PairGranted
from disco_daemon.link.relay.orders import Address, Identity, MemberAsks
from disco_daemon.link.trust.certificates import (
    MEMBER_DAYS,
    check_authority,
    check_certificate,
    check_times,
    new_request,
)
from disco_daemon.link.trust.pairing import CODE_S, Issuer, Membership, PairedPartner, answer_pair
from disco_daemon.link.trust.pairing_code import (
    SAFE_NAME,
    PairingCode,
    PairingError,
    format_code,
    parse_code,
    safe_name,
)
from disco_daemon.link.trust.roles import Role

DAY_S = 86400.0
HERE = [Address(host="192.168.1.5", port=8766)]

hosts = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}(\.[a-z]{1,10}){0,2}", fullmatch=True),
)
codes = st.builds(
    lambda hosts, port, secret, fingerprint, role: PairingCode(
        tuple(Address(host=host, port=port) for host in hosts), secret, fingerprint, role
    ),
    st.lists(hosts, min_size=1, max_size=4),
    st.integers(0, 65535),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([None, *Role]),
)
# Printed by disco 0.1.0 before codes had a role, of address 192.168.1.5:8766.
WITHOUT_ROLE = "AERD4AIEYCUACBIAAEBAGBAFAYDQQCIKBMGA2DQPAAAQEAYEAUDAOCAJBIFQYDIOB4IBCEQTCQKRMFYYDENBWHA5DYPTQ43WG4"


class Wall:
    """Unix time that a test sets, s."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def issuer(tmp_path: Path, wall: Wall) -> Issuer:
    return Issuer(tmp_path / "peers", wall)


def joined(issuer: Issuer, name: str = "laptop") -> Identity:
    code = issuer.new_code(HERE, "desk")
    key, csr = new_request(name)
    return Identity(certificate=issuer.grant(code.secret, csr, name), key=key, ca=issuer.identity().ca)


# --- the code as text ---------------------------------------------------------------------------------------------


@given(codes)
def test_a_code_is_one_word_that_says_all_of_it(code: PairingCode) -> None:
    text = format_code(code)
    assert set(text) <= set(string.ascii_uppercase + "234567")
    assert parse_code(text) == code


@given(codes, st.randoms())
def test_case_blanks_dashes_and_lookalikes_do_not_matter(code: PairingCode, rng: random.Random) -> None:
    said = "".join(
        rng.choice((char, char.lower(), {"O": "0", "I": "1", "B": "8"}.get(char, char)))
        + rng.choice(("", "", " ", "-"))
        for char in format_code(code)
    )
    assert parse_code(f"  {said}\n") == code


@given(codes, st.data())
def test_a_typing_error_is_said_as_one(code: PairingCode, data: st.DataObject) -> None:
    text = format_code(code)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from([c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567" if c != text[at]]))
    for wrong in (text[:at] + other + text[at + 1 :], text[:at] + text[at + 1 :], text[:at] + other + text[at:]):
        with pytest.raises(PairingError, match="typing error") as caught:
            parse_code(wrong)
        assert caught.value.reason == "mistyped"


def test_a_code_of_an_older_disco_is_read_and_says_no_role() -> None:
    code = parse_code(WITHOUT_ROLE)
    assert code == PairingCode(tuple(HERE), bytes(range(16)), bytes(range(32)))
    assert code.role is None


@pytest.mark.parametrize("role", Role)
def test_a_code_has_the_role_of_its_authority(tmp_path: Path, role: Role) -> None:
    code = Issuer(tmp_path, role=role).new_code(HERE, "desk")
    assert parse_code(format_code(code)).role is role


@given(st.text(max_size=200))
def test_any_other_text_is_no_code(text: str) -> None:
    with pytest.raises(PairingError):
        parse_code(text)


def test_nothing_that_is_printed_of_a_code_or_an_identity_has_its_secret(issuer: Issuer) -> None:
    code = issuer.new_code(HERE, "desk")
    assert repr(code.secret) not in repr(code)
    assert "PRIVATE KEY" not in repr(issuer.identity())


# --- the issuer ---------------------------------------------------------------------------------------------------


def test_the_first_code_makes_an_authority_in_a_private_folder(issuer: Issuer, tmp_path: Path) -> None:
    assert not issuer.exists
    with pytest.raises(PairingError, match="disco machines pair"):
        issuer.identity()
    code = issuer.new_code(HERE, "desk")
    assert issuer.name == "desk"
    assert check_authority(issuer.identity().ca, code.fingerprint) == "desk"
    check_certificate(issuer.identity(), "desk", issuer._wall())
    folder = tmp_path / "peers"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert not [file for file in folder.iterdir() if code.secret in file.read_bytes()]
    assert issuer.new_code(HERE).fingerprint == code.fingerprint, "the next code is of the same authority"


def test_a_code_makes_one_member_whose_certificate_is_good(issuer: Issuer, wall: Wall) -> None:
    identity = joined(issuer)
    check_certificate(identity, "laptop", wall.now)
    [member] = issuer.members()
    certificate = x509.load_pem_x509_certificate(identity.certificate.encode())
    assert (member.name, int(member.serial, 16)) == ("laptop", certificate.serial_number)
    assert member.salt
    with pytest.raises(PairingError, match="not for this machine"):
        check_certificate(identity, "other", wall.now)


def test_a_code_is_good_once_for_ten_minutes_and_only_the_latest_one(issuer: Issuer, wall: Wall) -> None:
    reasons = []

    def ask(secret: bytes, name: str) -> None:
        with pytest.raises(PairingError) as caught:
            issuer.grant(secret, new_request(name)[1], name)
        reasons.append(caught.value.reason)

    ask(b"0" * 16, "a")
    old = issuer.new_code(HERE, "desk")
    code = issuer.new_code(HERE)
    ask(old.secret, "a")
    assert issuer.code_ends_at() == wall.now + CODE_S
    issuer.grant(code.secret, new_request("a")[1], "a")
    assert issuer.code_ends_at() is None
    ask(code.secret, "b")
    late = issuer.new_code(HERE)
    wall.now += CODE_S
    ask(late.secret, "b")
    wall.now -= 2 * CODE_S
    ask(late.secret, "b")
    assert reasons == ["no_code", "wrong_code", "used_code", "expired_code", "expired_code"]
    assert [member.name for member in issuer.members()] == ["a"]


def test_a_code_that_is_used_by_many_at_the_same_moment_is_good_for_one(issuer: Issuer, tmp_path: Path) -> None:
    code, n = issuer.new_code(HERE, "desk"), 12
    requests = [(new_request(f"m{i}")[1], f"m{i}") for i in range(n)]
    at_once, said = threading.Barrier(n), list[str]()

    def ask(csr: str, name: str) -> None:
        mine = Issuer(issuer._folder.path, issuer._wall)  # as another program that looks
        at_once.wait()
        try:
            mine.grant(code.secret, csr, name)
            said.append("granted")
        except PairingError as e:
            said.append(e.reason)

    threads = [threading.Thread(target=ask, args=one) for one in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == ["granted"] + ["used_code"] * (n - 1)
    assert len(issuer.members()) == 1
    assert issuer.live_code() == b""


def test_a_name_is_safe_unique_and_not_the_other_machines_own(issuer: Issuer) -> None:
    joined(issuer, "laptop")
    code = issuer.new_code(HERE)
    csr = new_request("other")[1]
    for name in ("laptop", "desk", "", "Desk", "a b", "../x", "-x", "x-", "x" * 41, "ü", "x\n", "a.b"):
        with pytest.raises(PairingError) as caught:
            issuer.grant(code.secret, csr, name)
        assert caught.value.reason == "bad_name", name
    issuer.grant(code.secret, csr, "other")  # a wrong name has not used the code up
    with pytest.raises(PairingError, match="no name for a machine"):
        new_request("No Name")


@given(st.text(max_size=80))
def test_any_host_name_becomes_a_name(hostname: str) -> None:
    assert SAFE_NAME.fullmatch(safe_name(hostname))


def test_only_a_sound_request_is_signed_and_only_its_key_is_taken(issuer: Issuer, wall: Wall) -> None:
    code = issuer.new_code(HERE, "desk")
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "desk")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    large = ec.generate_private_key(ec.SECP384R1())
    of_large = builder.sign(large, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    for csr in ("", "x" * 100_000, new_request("x")[1].replace("M", "N"), of_large):
        with pytest.raises(PairingError) as caught:
            issuer.grant(code.secret, csr, "laptop")
        assert caught.value.reason == "bad_request"
    key = ec.generate_private_key(ec.SECP256R1())
    csr = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    certificate = x509.load_pem_x509_certificate(issuer.grant(code.secret, csr, "laptop").encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.subject.rfc4514_string() == "CN=laptop"


def test_who_is_revoked_is_no_member_and_its_name_is_free_again(issuer: Issuer) -> None:
    joined(issuer, "laptop")
    [before] = issuer.members()
    with pytest.raises(PairingError, match="it is one of laptop"):
        issuer.revoke("nobody")
    issuer.revoke("laptop")
    assert issuer.members() == ()
    joined(issuer, "laptop")
    [after] = issuer.members()
    assert after.serial != before.serial
    assert after.salt != before.salt


def test_a_certificate_out_of_its_time_says_what_to_do(issuer: Issuer, wall: Wall) -> None:
    identity = joined(issuer)
    check_times(identity, wall.now)
    with pytest.raises(PairingError, match=r"expired on .*pair the two machines again"):
        check_times(identity, wall.now + (MEMBER_DAYS + 1) * DAY_S)
    with pytest.raises(PairingError, match=r"valid from .*set the clock"):
        check_times(identity, wall.now - 2 * DAY_S)
    [record] = issuer.records()
    assert record.valid_until == wall.now + MEMBER_DAYS * DAY_S
    assert record.joined_at == wall.now


def test_another_authority_than_that_of_the_code_is_found(tmp_path: Path, wall: Wall) -> None:
    ours, theirs = (Issuer(tmp_path / name, wall) for name in ("a", "b"))
    code = ours.new_code(HERE, "desk")
    theirs.new_code(HERE, "desk")
    for text in (theirs.identity().ca, "no certificate"):
        with pytest.raises(PairingError) as caught:
            check_authority(text, code.fingerprint)
        assert caught.value.reason == "fingerprint"


def test_the_daemons_answer_is_a_certificate_or_the_reason(issuer: Issuer) -> None:
    code = issuer.new_code(HERE, "desk")
    asked = AskPair(secret=b"wrong", csr=new_request("laptop")[1], name="laptop")
    answer = answer_pair(issuer, MemberAsks(n=7, name="laptop", asked=asked, address="10.0.0.1"))
    assert (answer.n, answer.reason, answer.given) == (7, "wrong_code", None)
    right = MemberAsks(n=8, name="laptop", asked=AskPair(secret=code.secret, csr=asked.csr, name="laptop"))
    granted = answer_pair(issuer, right).given
    assert isinstance(granted, PairGranted)
    assert granted.certificate.startswith("-----BEGIN CERTIFICATE")


def test_a_member_keeps_its_partner_until_it_leaves(issuer: Issuer, tmp_path: Path) -> None:
    membership = Membership(tmp_path / "joined")
    assert membership.partner() is None
    partner = PairedPartner(name="desk", own_name="laptop", addresses=tuple(HERE), identity=joined(issuer))
    membership.save(partner)
    assert membership.partner() == partner
    (tmp_path / "joined" / "partner.json").write_text("{")
    with pytest.raises(PairingError, match="damaged"):
        membership.partner()
    membership.forget()
    assert membership.partner() is None
