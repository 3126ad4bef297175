"""The messages between a daemon and its relay: what the relay is to do, and what happens on the links. Pure.

They go by a control socket (`system.control_socket`); with some of them comes a file descriptor.
The daemon has the key of the certificate authority, the names of the members and the code: the relay asks it, and
decides nothing of its own.
"""

from __future__ import annotations

import msgspec

from ...system.frames import FrameFormat
from ..protocol import Build, Hello, Welcome
from .handshake import AskCuts, AskPair, AskSegments, OfferHost, PairGranted, TellLoad, TheCuts, TheRay, TheSegments

FRAMES = FrameFormat(1 << 20)  # bytes of a message: certificates, and a thousand names


class ControlMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages between a daemon and its relay."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine shows to others, as PEM text, and `ca`, the certificate that signs all theirs."""

    certificate: str
    key: str
    ca: str

    def __repr__(self) -> str:
        """Hide the key: a log or a traceback may show this."""
        return "Identity(…)"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A host name or an IP address, and a TCP port; 0 = any free one, to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that may connect: its name, its certificate's serial number (hex), and the salt of its cells."""

    name: str
    serial: str
    salt: int = 0


# --- daemon -> relay ----------------------------------------------------------------------------------------------


class ServeMembers(ControlMessage, frozen=True, kw_only=True):
    """Be the partner: listen for the members at `listen`. `welcome` is what they get; None until a model is there.

    Without a member and a live `code`, of which this is the SHA-256 of the secret, nothing listens. A member that is
    missing from the next such message has been revoked: all its connections are closed at once.
    """

    identity: Identity
    listen: Address
    members: tuple[Member, ...]
    code: bytes = b""
    welcome: Welcome | None = None
    ray: TheRay | None = None
    only_llama: str = ""  # hosts of a fleet with another build of llama.cpp are refused; "" = with none


class JoinPartner(ControlMessage, frozen=True, kw_only=True):
    """Be the edge: connect to the partner of this name at the first of its addresses that answers, again and again."""

    identity: Identity
    name: str
    addresses: tuple[Address, ...]
    hello: Hello


class LendHosts(ControlMessage, frozen=True, kw_only=True):
    """Be a machine of a fleet: offer home a host at the first of its addresses that answers, again and again."""

    identity: Identity
    name: str
    addresses: tuple[Address, ...]
    offer: OfferHost


class TellHome(ControlMessage, frozen=True, kw_only=True):
    """Say to home how this machine is, as long as it lends hosts."""

    load: TellLoad


class StopRole(ControlMessage, frozen=True, kw_only=True):
    """Be neither: nothing listens, and no link stays."""


class EngineSocket(ControlMessage, frozen=True, kw_only=True):
    """The socket to an engine that has just started comes with this message; or the engine has gone (not `there`)."""

    there: bool


class OfferFile(ControlMessage, frozen=True, kw_only=True):
    """Members may fetch the file that comes with this message, open for reading: the layers `first` to `cut`."""

    cut: int
    n_bytes: int
    sha256: str
    first: int = 0
    member: str = ""  # whose they are, if not anybody's


class RefuseFile(ControlMessage, frozen=True, kw_only=True):
    """There is no such file, and why."""

    cut: int
    message: str
    first: int = 0
    member: str = ""


class MemberAnswer(ControlMessage, frozen=True, kw_only=True):
    """The answer to the MemberAsks of this number: what was asked for, or why it is refused."""

    n: int
    given: PairGranted | TheCuts | TheSegments | None = None
    reason: str = ""
    message: str = ""


# --- relay -> daemon ----------------------------------------------------------------------------------------------


class RelayReady(ControlMessage, frozen=True, kw_only=True):
    """The relay has started; `confined` are the measures in force."""

    confined: tuple[str, ...] = ()


class Listening(ControlMessage, frozen=True, kw_only=True):
    """The relay listens at this port; 0 = it does not (any more), and why, if that is an error."""

    port: int
    error: str = ""


class LinkUp(ControlMessage, frozen=True, kw_only=True):
    """Both connections to a machine stand. `build` is the other side's; an edge gets its partner's `welcome`, too."""

    peer: int
    name: str
    build: Build
    address: str
    welcome: Welcome | None = None


class LinkDown(ControlMessage, frozen=True, kw_only=True):
    """The link to a machine has ended, or an edge's attempt has failed.

    `reason` is one of `refusals.REASONS`, or closed, silent, engine_gone, unreachable, replaced or stopped. `final`:
    the other side refuses, and will do so until something is changed.
    """

    name: str
    reason: str
    message: str
    final: bool = False


class LinkStats(ControlMessage, frozen=True, kw_only=True):
    """What a link has carried so far, sent once a second while it carries something. Round trips are between relays."""

    name: str
    rtt_ms: float | None
    rtt_p99_ms: float | None
    n_bytes_sent: int
    n_bytes_received: int
    n_rows: int


class RefusalCounts(ControlMessage, frozen=True, kw_only=True):
    """How many connections were refused so far, by reason; sent once a second at most."""

    counts: dict[str, int]


class TwoAddresses(ControlMessage, frozen=True, kw_only=True):
    """A member is connected from two addresses at a time, `before` first: it has moved, or somebody has its key."""

    name: str
    before: str
    address: str


class MemberAsks(ControlMessage, frozen=True, kw_only=True):
    """A machine at `address` that has the secret of a code wants a certificate, or a member wants to know something.

    That is where the model may be cut, or which layers of a fleet are its own.
    """

    n: int
    name: str
    asked: AskPair | AskCuts | AskSegments
    address: str = ""


class FileAsked(ControlMessage, frozen=True, kw_only=True):
    """A member wants the model's layers from `first` up to `cut`: OfferFile or RefuseFile is the answer."""

    name: str
    cut: int
    first: int = 0


class MemberLeaves(ControlMessage, frozen=True, kw_only=True):
    """A member has said that it leaves: its certificate is of no use to it any more."""

    name: str


class HostOffered(ControlMessage, frozen=True, kw_only=True):
    """A member offers a host: its socket comes with this message. The host lives until that is closed, or HostEnded."""

    name: str
    life: int
    address: str
    offer: OfferHost


class MachineTold(ControlMessage, frozen=True, kw_only=True):
    """A member has said how its machine is."""

    name: str
    load: TellLoad


class HostEnded(ControlMessage, frozen=True, kw_only=True):
    """The connection to a host that was offered has ended, and why; `n_bytes` came by it.

    `given_up`: it was the engine here that has closed its end, and not the other machine.
    """

    name: str
    life: int
    message: str
    n_bytes: int = 0
    given_up: bool = False


class HomeReached(ControlMessage, frozen=True, kw_only=True):
    """Home has accepted a host: the socket for its process comes with this message. `life` ends with HomeEnded."""

    life: int


class HomeEnded(ControlMessage, frozen=True, kw_only=True):
    """The connection of a host to its home has ended, and why."""

    life: int
    message: str


ToRelay = (
    ServeMembers | JoinPartner | LendHosts | TellHome | StopRole | EngineSocket | OfferFile | RefuseFile | MemberAnswer
)
Asked = MemberAsks | FileAsked | MemberLeaves
OfHosts = HostOffered | HostEnded | HomeReached | HomeEnded | MachineTold
RelayEvent = RelayReady | Listening | LinkUp | LinkDown | LinkStats | RefusalCounts | TwoAddresses | Asked | OfHosts

to_relay: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
relay_event: msgspec.msgpack.Decoder[RelayEvent] = msgspec.msgpack.Decoder(RelayEvent)
