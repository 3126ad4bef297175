"""The schema of everything that crosses the link between two machines. Pure.

A frame (`system.frames`) has a msgpack-encoded message, and as its tag the number of the peer. Over the network that
number is 0; between a relay and its engine it says which of the connected machines a frame comes from, or goes to. Only
`SendRows` has bytes behind its message. Every message is a tagged struct, so an unknown or malformed one is an error at
the door and never a surprise inside.

The *edge* has the lower layers of a model, and with them the text; the *partner* has the rest and draws the tokens.
For one answer both count `turn`: what was sent before the sender knew of the newest one is of no use any more, and is
dropped. The partner raises it by one, with each `DraftVerdict` and each `NeedRows`; the edge raises it to the next
multiple of ERA, with each `CutAnswer`, so what both say at the same time never has the same number. Rows of one turn
come in the order of their positions, without a gap and without a repeat; anything else is refused. Rows go over one
connection and all else over another one: rows behind a cut may come before it, and drafts before they are judged.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..system.frames import BadFrameError as BadFrameError  # of messages that cannot be, too
from ..system.frames import FrameFormat
from ..types import AS_USUAL, Drawing
from ..types.thought_marks import ThoughtLimit

PROTOCOL = 5
MAX_HEADER = 1 << 20  # bytes of a message: the ids of a prompt of 100,000 tokens
MAX_PAYLOAD = 16 << 20  # bytes of rows in one frame: 512 rows of 8,192 numbers of 4 bytes
FRAMES = FrameFormat(MAX_HEADER, MAX_PAYLOAD)
ERA = 1 << 24  # turns that the partner may begin between two cuts: more than a text has tokens
MAX_TURN = 1 << 62  # a number that everybody can hold, and add to
N_ID = 64  # characters of an answer's id at most

FAST = " fast rounding"
# What a machine says of itself is shown to the owner of another one, written to its logs, and reckoned with there: so
# texts are short and plain, and numbers no larger than any machine's.
N_VERSION = 64  # characters of a version, a fingerprint or a mark
N_BUILD = 500  # characters of what says by which llama.cpp a machine computes
MAX_COUNT = 1 << 24  # of layers, numbers of a row, tokens of a vocabulary or of a context
MAX_WATTS = 1e5  # that a machine draws: a hundred times what one does
MAX_SECONDS = 1e9  # that a machine was busy
MAX_FACTOR = 1e3  # of a temperature or a penalty: servers take 2
Version = Annotated[str, Meta(max_length=N_VERSION, pattern=r"^[ -~]*\Z")]
LlamaBuild = Annotated[str, Meta(max_length=N_BUILD, pattern=r"^[ -~]*\Z")]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
AnswerId = Annotated[str, Meta(max_length=N_ID)]
Turn = Annotated[int, Meta(ge=0, le=MAX_TURN)]
Tokens = tuple[Count, ...]  # as many as a frame has room for; what fits into a text is checked there

CODECS = ("f32", "bf16", "int8")  # how numbers of rows are sent; see link.rows.codec
IDS = "ids"  # of rows without numbers: the partner has all layers, and the token ids are all it needs


class PeerMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages between machines."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether two machines can work together, and whether they compute the same bits.

    `model` is the fingerprint of the whole model, of `n_layers` layers, with rows of `n_embd` numbers and `n_vocab`
    tokens; `vocabulary` marks those (an edge that sends ids: its small model's). `llama` is the version of llama.cpp
    with the processor's instruction sets, and with FAST behind it if the settings have it round as is fastest; `disco`
    is our own version.
    """

    disco: Version
    llama: LlamaBuild
    model: Version
    n_layers: Count
    n_embd: Count
    n_vocab: Count
    protocol: Count = PROTOCOL
    vocabulary: Version = ""

    def same_bits(self, llama: str) -> bool:
        """Whether a machine whose `llama` is this computes the same bits, however rows are batched."""
        return self.llama == llama and not llama.endswith(FAST)


class DrawRules(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, as in the request; `grammar` in GBNF that every answer of it holds to, or empty.

    The `min_tokens` of its `drawing` count from the answer's beginning, and so do the tokens of a thought that has a
    limit. Where repetitions of the `prompt` count, it is there.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=MAX_FACTOR)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Meta(ge=-MAX_FACTOR, le=MAX_FACTOR)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-MAX_FACTOR, le=MAX_FACTOR)] | None = None
    grammar: str = ""
    drawing: Drawing = AS_USUAL
    prompt: Tokens = ()
    thought: ThoughtLimit | None = None


# --- the two relays, and each with its engine ---------------------------------------------------------------------


class Hello(PeerMessage, frozen=True, kw_only=True):
    """The edge's first message: it has the layers up to `cut`, and may send rows by these codecs.

    At cut 0 it has none of them, only a small model that drafts, and sends token ids (IDS). Its relay draws `link`, by
    which the connection for rows finds this one.
    """

    build: Build
    cut: Count
    codecs: tuple[Version, ...] = ("f32",)
    link: Version = ""


class Welcome(PeerMessage, frozen=True, kw_only=True):
    """The partner's answer to Hello: it has the layers from `cut` on.

    A text may have `n_ctx` tokens, `max_answers` may be open at a time, and `credits` rows may be on their way at once.
    `exit` marks the exit that comes with the layers below the cut; it is empty if there is none. While it computes, the
    partner's machine draws `watts` more than idle, as `watts_from` says: measured or assumed; 0 if it does not know.
    """

    build: Build
    cut: Count
    n_ctx: Count
    max_answers: Count
    credits: Count
    exit: Version = ""
    watts: Annotated[float, Meta(ge=0.0, le=MAX_WATTS)] = 0.0
    watts_from: LlamaBuild = ""


class Refused(PeerMessage, frozen=True, kw_only=True):
    """The link is not served, and asking again without a change is of no use; it is closed behind this message."""

    reason: str
    message: str


class PeerJoined(PeerMessage, frozen=True, kw_only=True):
    """From a relay to its engine: the link to a machine is up. `name` is that in its certificate, `salt` is its own.

    A partner says how many rows may be on their way to it, `credits`, and how many tokens a text may have, `n_ctx`.
    """

    name: str
    salt: int = 0
    credits: int = 0
    n_ctx: int = 0


class PeerLeft(PeerMessage, frozen=True, kw_only=True):
    """From a relay to its engine: the link to a machine is down, for this reason."""

    reason: str


class Ping(PeerMessage, frozen=True, kw_only=True):
    """A sign of life between relays, on both connections; answered by Pong with the same number."""

    n: int


class Pong(PeerMessage, frozen=True, kw_only=True):
    """The answer to a Ping."""

    n: int


# --- edge -> partner: one answer ----------------------------------------------------------------------------------


class OpenAnswer(PeerMessage, frozen=True, kw_only=True):
    """Begin an answer whose text so far has these token ids; answered by AnswerOpened or AnswerFailed.

    The ids say which rows the partner has already, and judge drafts: the partner never makes text of them.
    Nothing of a `private` text is kept for another one.
    """

    id: AnswerId
    tokens: Tokens
    private: bool = False


class SendRows(PeerMessage, frozen=True, kw_only=True):
    """Hidden rows of the positions from `pos` on, whose tokens these are; the bytes behind it have them by `codec`.

    `drafts`: their logits are wanted, and they wait for the JudgeDrafts; others are computed as they come.
    """

    id: AnswerId
    turn: Turn
    pos: Count
    tokens: Tokens
    codec: Version = "f32"
    drafts: bool = False


class BeginDrawing(PeerMessage, frozen=True, kw_only=True):
    """Draw tokens from now on as `sampling` says, behind the token ids `answer`; until then only prompts are computed.

    The first token may be one of `candidates` only, if there are any (the last given token is healed).
    """

    id: AnswerId
    sampling: DrawRules
    answer: Tokens = ()
    candidates: Tokens = ()


class JudgeDrafts(PeerMessage, frozen=True, kw_only=True):
    """Draw behind each row from `start` to `end` (exclusive) as long as the next row's token is the one drawn.

    The tokens `left` were drawn by the edge itself since the last verdict, or since drawing began.
    """

    id: AnswerId
    turn: Turn
    start: Count
    end: Count
    left: Tokens = ()


class CutAnswer(PeerMessage, frozen=True, kw_only=True):
    """Forget all beyond the first `n` tokens; `turn` is the new one, the next multiple of ERA.

    Drawing ends until the next BeginDrawing. The answer goes on with other rows, or waits.
    """

    id: AnswerId
    turn: Turn
    n: Count


class CloseAnswer(PeerMessage, frozen=True, kw_only=True):
    """End an answer; answered by AnswerClosed. What was computed may be kept for the next turn of the conversation."""

    id: AnswerId


# --- partner -> edge: one answer ----------------------------------------------------------------------------------


class AnswerOpened(PeerMessage, frozen=True, kw_only=True):
    """The first `n_past` tokens need no rows: they are computed. Rows are expected from there on."""

    id: AnswerId
    n_past: Count


class DraftVerdict(PeerMessage, frozen=True, kw_only=True):
    """The tokens drawn behind the rows from `start` on: the drafts that were right, and one more.

    `turn` is the new one: both sides keep the rows up to start + len(tokens), and no row beyond it. Since the last
    verdict the partner computed `n_rows` rows of the answer, in `busy_s`, s. Of them `n_judged` have logits: fewer than
    were to be judged where those behind a wrong draft were left out.
    """

    id: AnswerId
    turn: Turn
    start: Count
    tokens: Tokens
    n_judged: Count = 0
    n_rows: Count = 0
    busy_s: Seconds = 0.0


class NeedRows(PeerMessage, frozen=True, kw_only=True):
    """The rows from `pos` on are not there any more, or never came: send them again, in this `turn`, which is new.

    Drafts of the last turn have to be judged again.
    """

    id: AnswerId
    turn: Turn
    pos: Count


class Credit(PeerMessage, frozen=True, kw_only=True):
    """So many more rows may be on their way: as many have been computed, or dropped."""

    rows: Count


class AnswerFailed(PeerMessage, frozen=True, kw_only=True):
    """An answer cannot go on, and is closed. `reason` is overloaded, context, bad_rows, bad_grammar or engine_error."""

    id: AnswerId
    reason: Version
    message: str
    your_fault: bool = False


class AnswerClosed(PeerMessage, frozen=True, kw_only=True):
    """An answer has ended: so many of its rows were computed (`n_rows`, drafts included), in `busy_s`, s."""

    id: AnswerId
    n_rows: Turn
    busy_s: Seconds


ToPartner = Hello | OpenAnswer | SendRows | BeginDrawing | JudgeDrafts | CutAnswer | CloseAnswer
ToEdge = Welcome | Refused | AnswerOpened | DraftVerdict | NeedRows | Credit | AnswerFailed | AnswerClosed
PeerFrame = ToPartner | ToEdge | PeerJoined | PeerLeft | Ping | Pong

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerFrame] = msgspec.msgpack.Decoder(PeerFrame)


def frame(message: PeerFrame, payload: bytes | memoryview = b"", peer: int = 0) -> bytes:
    """Return a message as a frame, with raw bytes behind it. Raises BadFrameError if it is too large."""
    return FRAMES.pack(_encoder.encode(message), payload, peer)


def next_era(turn: int) -> int:
    """Return the turn that a CutAnswer begins."""
    return (turn // ERA + 1) * ERA


def decode(body: bytes | memoryview) -> PeerFrame:
    """Return the message of a frame's body. Raises BadFrameError."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise BadFrameError(f"no message of this protocol: {e}") from e
