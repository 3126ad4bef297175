"""What may be the first message on a connection, which says what it is for, and the answers. Pure.

`Hello` begins the connection for calls, `BindRows` the one for rows. Both belong to one link, whose name the edge
draws. A machine without a certificate may send `AskAuthority` and `AskPair` only, while a code is live. All frames are
those of `messages`.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from ...system.frames import FrameFormat
from ..protocol import FRAMES, BadFrameError, Build, Count, Hello, PeerMessage, Refused, Version, Welcome

MAX_FIRST = 1 << 16  # bytes of a first message: a request for a certificate has 1 KB
FIRST_FRAMES = FrameFormat(MAX_FIRST)
MEASURED_MAX = 16  # times that one connection may measure the way
MEASURED_BYTES = 4 << 20  # that are sent one way to measure it: 0.3 s at 100 Mbit/s
N_REASON = 200  # characters of why a machine's owner lends nothing
MAX_CPUS = 1 << 16  # processors of a machine, or of a process: more is no number that home may reckon with
MAX_MEMORY = 1 << 50  # bytes of a machine's memory, or of a file
MAX_TIME = 1e11  # Unix time, s: the year 5138
MAX_SECONDS = 1e6  # that something takes on a machine: twelve days
MAX_SEGMENTS = 256  # files of a machine's layers: more than a model has layers
MAX_FILES = 4096  # of segments that are on a machine
N_SECRET = 64  # bytes of a code's secret, at most
N_NAME = 255  # characters of a segment's file, a machine or a host

Processors = Annotated[float, Meta(ge=0.0, le=MAX_CPUS)]
MemoryBytes = Annotated[int, Meta(ge=0, le=MAX_MEMORY)]
Bytes = Annotated[float, Meta(ge=0.0, le=MAX_MEMORY)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
UnixTime = Annotated[float, Meta(ge=0.0, le=MAX_TIME)]
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
RayAddress = Annotated[str, Meta(pattern=r"^([A-Za-z0-9\[:][A-Za-z0-9.:%_\[\]-]{0,250}:[0-9]{1,5})?\Z")]


class BindRows(PeerMessage, frozen=True, kw_only=True):
    """The connection for the rows of the link of this name, which a Hello has begun; answered by RowsBound."""

    link: Version


class RowsBound(PeerMessage, frozen=True, kw_only=True):
    """The link stands: both connections have found each other."""


class AskAuthority(PeerMessage, frozen=True, kw_only=True):
    """A machine that has a code wants to see the authority's certificate, to compare its fingerprint."""


class TheAuthority(PeerMessage, frozen=True, kw_only=True):
    """The authority's certificate (PEM)."""

    certificate: str


class AskPair(PeerMessage, frozen=True, kw_only=True):
    """A machine that wants to be called `name` has the secret of a code, and a request for a certificate (PEM)."""

    secret: Annotated[bytes, Meta(max_length=N_SECRET)]
    csr: str
    name: Annotated[str, Meta(max_length=N_NAME)]


class PairGranted(PeerMessage, frozen=True, kw_only=True):
    """The certificate (PEM). `build` and `n_ctx` tell of the model that is served, if one is in memory."""

    certificate: str
    build: Build | None = None
    n_ctx: Count = 0


class AskFile(PeerMessage, frozen=True, kw_only=True):
    """A member wants the model's layers `first` to `cut` as a file, from byte `offset` on if it has this SHA-256.

    Up to 0 there are none: the file has the model's header only, with its vocabulary. A machine of a fleet may have the
    inner layers that are its own.
    """

    cut: Count
    offset: MemoryBytes = 0
    sha256: Sha256 = ""
    first: Count = 0


class FileFollows(PeerMessage, frozen=True, kw_only=True):
    """The file has `n_bytes` bytes and this SHA-256 (hex); those from `offset` on follow, raw, up to its end."""

    n_bytes: MemoryBytes
    sha256: Sha256
    offset: MemoryBytes


class LeavePartner(PeerMessage, frozen=True, kw_only=True):
    """A member leaves, and its certificate is to be revoked; answered by MemberLeft."""


class MemberLeft(PeerMessage, frozen=True, kw_only=True):
    """The member is none any more."""


class AskCuts(PeerMessage, frozen=True, kw_only=True):
    """A member wants to know where the model may be cut, to choose; answered by TheCuts."""


class CutFacts(msgspec.Struct, frozen=True, array_like=True):
    """A cut behind `layer` layers: the bytes of both ranges, and what share of the weights the lower one has.

    The head counts as the upper one's. `chance` is that of a guess of the exit there to be right, and `exit_share` what
    its weights are of the model's; both are 0 without an exit.
    """

    layer: Count
    edge_bytes: MemoryBytes
    partner_bytes: MemoryBytes
    edge_share: Share
    chance: Share = 0.0
    exit_share: Share = 0.0


class TheCuts(PeerMessage, frozen=True, kw_only=True):
    """All cuts of a model whose tokens take `cell_bytes` in one layer's KV cache; `whole_bytes` are its weights.

    The partner has `free_bytes` of memory, in which a KV cache of `n_cells` tokens is to fit, or of `kv_bytes` if it is
    set, and takes `token_s` for a token of the whole model, `row_s` for a row of a prompt; 0 = not measured. `hosted`:
    it has the layers from there on already, for others; 0 = none.
    """

    cuts: Annotated[tuple[CutFacts, ...], Meta(max_length=MAX_SEGMENTS)]
    cell_bytes: MemoryBytes
    row_bytes: MemoryBytes
    whole_bytes: MemoryBytes
    free_bytes: Bytes = 0.0
    n_cells: Count = 0
    kv_bytes: Bytes = 0.0
    token_s: Seconds = 0.0
    hosted: Count = 0
    row_s: Seconds = 0.0


class MeasureLink(PeerMessage, frozen=True, kw_only=True):
    """A member measures the way: `n_up` bytes follow, and LinkMeasured comes back, with `n_down` bytes behind it.

    It may be sent again and again by one connection, MEASURED_MAX times.
    """

    n_up: int = 0
    n_down: int = 0


class LinkMeasured(PeerMessage, frozen=True, kw_only=True):
    """What was sent has come; it is `now` there, Unix time, s. `build` is what computes there, if a model is loaded."""

    now: UnixTime
    build: Build | None = None


class AskRay(PeerMessage, frozen=True, kw_only=True):
    """A member of a fleet wants to be a node of home's Ray; answered by TheRay."""


class TheRay(PeerMessage, frozen=True, kw_only=True):
    """Where Ray's head is, HOST:PORT, and the token for it; an empty address: home has none (`starting`: not yet)."""

    address: RayAddress = ""
    token: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,128}\Z")] = ""
    starting: bool = False

    def __repr__(self) -> str:
        """Hide the token: a log or a traceback may show this."""
        return f"TheRay({self.address!r}, starting={self.starting})"


class AskSegments(PeerMessage, frozen=True, kw_only=True):
    """A member of a fleet wants to know which layers are its own; answered by TheSegments."""


class SegmentFact(msgspec.Struct, frozen=True, array_like=True):
    """A file of the layers from `first` up to `last`: `name` is its base name, by which home asks for it."""

    first: Count
    last: Count
    name: Annotated[str, Meta(max_length=N_NAME)]


class TheSegments(PeerMessage, frozen=True, kw_only=True):
    """The layers of a member of a fleet, of the model that `build` is; none as long as others have all of them."""

    build: Build
    segments: Annotated[tuple[SegmentFact, ...], Meta(max_length=MAX_SEGMENTS)] = ()


class OfferHost(PeerMessage, frozen=True, kw_only=True):
    """A member of a fleet offers a host's process for one life; answered by HostAccepted, behind which home has it.

    From then on the connection carries what a host of home's own machine says by a socket pair (`engine.hosts`).
    `build` is home's model and the member's llama.cpp, `has` are the names of the segments' files that are there. The
    member allows so much memory, bytes (0 = what it has), and so many threads. It has this Python, is a node of Ray in
    this version ("" = of none), and it is `now` there, Unix time, s (0 = it does not say).
    """

    build: Build
    has: Annotated[tuple[Annotated[str, Meta(max_length=N_NAME)], ...], Meta(max_length=MAX_FILES)] = ()
    memory_bytes: MemoryBytes = 0
    n_threads: Annotated[int, Meta(ge=0, le=MAX_CPUS)] = 0
    python: Version = ""
    ray: Version = ""
    now: UnixTime = 0.0


class TellLoad(PeerMessage, frozen=True, kw_only=True):
    """A member of a fleet says how its machine is; it goes on to do so by the same connection, and is not answered.

    It has `n_cpus` processors, of which others than its hosts took `others_share`; its hosts got `cpu_got` of them and
    would have taken `cpu_wanted`, and have `rss_bytes` of its memory. `leaving` says why its owner wants no layers
    there any more; "" as long as they may stay.
    """

    n_cpus: Annotated[int, Meta(ge=1, le=MAX_CPUS)]
    others_share: Share
    memory_bytes: MemoryBytes
    memory_free_bytes: MemoryBytes
    cpu_got: Processors = 0.0
    cpu_wanted: Processors = 0.0
    rss_bytes: MemoryBytes = 0
    leaving: Annotated[str, Meta(max_length=N_REASON, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")] = ""


class HostAccepted(PeerMessage, frozen=True, kw_only=True):
    """Home takes the host when it needs one; until then nothing comes."""


# By a member that wants no link.
Asked = AskFile | AskCuts | MeasureLink | LeavePartner | AskSegments | OfferHost | AskRay | TellLoad
First = Hello | BindRows | AskAuthority | AskPair | Asked
FirstReply = (
    Welcome
    | Refused
    | RowsBound
    | TheAuthority
    | PairGranted
    | FileFollows
    | TheCuts
    | LinkMeasured
    | MemberLeft
    | TheSegments
    | TheRay
    | HostAccepted
)

SEGMENT_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,240}\.gguf")  # never a way to another folder

_encoder = msgspec.msgpack.Encoder()
_first: msgspec.msgpack.Decoder[First] = msgspec.msgpack.Decoder(First)
_reply: msgspec.msgpack.Decoder[FirstReply] = msgspec.msgpack.Decoder(FirstReply)


def is_segment_name(name: str) -> bool:
    """Whether this may be the base name of a segment's file."""
    return SEGMENT_NAME.fullmatch(name) is not None


def first_frame(message: First | FirstReply) -> bytes:
    """Return a message as a frame. Raises BadFrameError if it is too large."""
    return FRAMES.pack(_encoder.encode(message))


def decode_first(body: bytes) -> First:
    """Return the first message of a connection. Raises BadFrameError."""
    try:
        return _first.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise BadFrameError(f"no first message of this protocol: {e}") from e


def decode_reply(body: bytes) -> FirstReply:
    """Return the answer to a first message. Raises BadFrameError."""
    try:
        return _reply.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise BadFrameError(f"no answer of this protocol: {e}") from e
