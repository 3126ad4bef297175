"""What another machine says of itself has bounds, each field of each message: it is reckoned with, shown and logged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from disco_daemon.engine.hosts.messages import FromHost
from disco_daemon.link.protocol import BadFrameError, Hello, ToEdge, ToPartner, Welcome
from disco_daemon.link.relay.handshake import First as FirstMessage
from disco_daemon.link.relay.handshake import (
    FirstReply,
    LinkMeasured,
    OfferHost,
    SegmentFact,
    TellLoad,
    TheCuts,
    TheRay,
    TheSegments,
    decode_first,
    decode_reply,
    first_frame,
)
from disco_daemon.system.frames import HEADER
from tests.fixtures.peers import BUILD

# Texts that a frame's length bounds, and that are parsed (certificates), cut where they are shown, or dropped.
BY_THE_FRAME = {
    "AskPair.csr", "PairGranted.certificate", "TheAuthority.certificate", "Refused.reason", "Refused.message",
    "AnswerFailed.message", "DrawRules.grammar",
    # Tokens, which have to fit into a text (test_ill_peers), or are of use one by one.
    "OpenAnswer.tokens (its length)", "SendRows.tokens (its length)", "DrawRules.prompt (its length)",
    "BeginDrawing.answer (its length)", "BeginDrawing.candidates (its length)", "JudgeDrafts.left (its length)",
    "DraftVerdict.tokens (its length)",
}  # fmt: skip
# Numbers that only name what was asked for: another one ends the host (test_lent_hosts), or the connection.
NAMES = {
    "RowsComputed.segment", "RowsComputed.flight", "SegmentLoaded.segment", "SegmentRefused.segment", "CellsSaved.copy",
    "MeasureLink.n_up", "MeasureLink.n_down", "DrawRules.seed",
}  # fmt: skip


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    """The fields of a type that have no bound."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{cls.__name__}.{field.name}")
        case inspect.VarTupleType(item_type=item, max_length=most):
            if most is None and not isinstance(item, inspect.StrType | inspect.StructType):
                yield f"{where} (its length)"
            yield from unbounded(item, where)
        case inspect.UnionType(types=types):
            for one in types:
                yield from unbounded(one, where)
        case inspect.IntType(ge=least, le=most, gt=above) | inspect.FloatType(ge=least, le=most, gt=above):
            if (least is None and above is None) or most is None:
                yield where
        case inspect.StrType(max_length=most, pattern=pattern):
            if most is None and (pattern is None or "*" in pattern or "+" in pattern):
                yield where
        case inspect.BytesType(max_length=most):
            if most is None:
                yield where


MESSAGES: set[type] = {
    kind for union in (FirstMessage, FirstReply, FromHost, ToPartner, ToEdge) for kind in get_args(union)
}


@pytest.mark.parametrize("kind", sorted(MESSAGES, key=str), ids=str)
def test_each_field_of_each_message_has_a_bound(kind: type) -> None:
    assert not set(unbounded(inspect.type_info(kind), kind.__name__)) - BY_THE_FRAME - NAMES


OFFER = OfferHost(build=BUILD, has=("a.gguf",), n_threads=2)
LOAD = TellLoad(n_cpus=2, others_share=0.1, memory_bytes=1 << 30, memory_free_bytes=1 << 29)
WELCOME = Welcome(build=BUILD, cut=24, n_ctx=2048, max_answers=8, credits=4096)
CUTS = TheCuts(cuts=(), cell_bytes=1, row_bytes=1, whole_bytes=1)
LIES: list[tuple[Any, dict[str, Any]]] = [
    (OFFER, {"memory_bytes": -1}),
    (OFFER, {"memory_bytes": 1 << 62}),
    (OFFER, {"n_threads": -2}),
    (OFFER, {"n_threads": 1 << 40}),
    (OFFER, {"now": math.nan}),
    (OFFER, {"now": -math.inf}),
    (OFFER, {"now": 1e300}),
    (OFFER, {"has": ("x" * 256,)}),
    (OFFER, {"has": ("x",) * 5000}),
    (OFFER, {"python": "3\x1b[2J"}),
    (OFFER, {"ray": "2\n"}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, llama="b1\x1b[31m")}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, disco="0.1\u202e")}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, model="a" * 65)}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, n_layers=-1)}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, n_vocab=1 << 62)}),
    (OFFER, {"build": msgspec.structs.replace(BUILD, n_embd=math.nan)}),
    (LOAD, {"leaving": "gone\x07"}),
    (LOAD, {"others_share": 1.5}),
    (LOAD, {"cpu_wanted": math.inf}),
    (WELCOME, {"n_ctx": 1 << 62}),
    (WELCOME, {"credits": -1}),
    (WELCOME, {"watts": math.nan}),
    (WELCOME, {"watts": math.inf}),
    (WELCOME, {"exit": "x" * 100}),
    (Hello(build=BUILD, cut=24), {"cut": -1}),
    (Hello(build=BUILD, cut=24), {"link": "x" * 100}),
    (CUTS, {"free_bytes": math.nan}),
    (CUTS, {"token_s": -1.0}),
    (CUTS, {"whole_bytes": -5}),
    (LinkMeasured(now=1.0), {"now": math.nan}),
    (TheRay(), {"address": "-x:1"}),
    (TheRay(), {"address": "10.0.0.1:port"}),
    (TheRay(), {"address": "10.0.0.1:4749 --head"}),
    (TheRay(), {"token": "a\nb"}),
    (TheSegments(build=BUILD), {"segments": (SegmentFact(-1, 3, "a.gguf"),)}),
    (TheSegments(build=BUILD), {"segments": (SegmentFact(1, 3, "a.gguf"),) * 300}),
]


@pytest.mark.parametrize(
    ("message", "change"), LIES, ids=lambda value: repr(value)[:60] if isinstance(value, dict) else ""
)
def test_what_no_machine_has_is_no_message(message: Any, change: dict[str, Any]) -> None:
    read = decode_first if isinstance(message, get_args(FirstMessage)) else decode_reply
    assert read(first_frame(message)[HEADER.size :]) == message
    with pytest.raises(BadFrameError):
        read(first_frame(msgspec.structs.replace(message, **change))[HEADER.size :])
