"""A machine at the other end of a link that says what cannot be: early, twice, never, for others, beyond all bounds.

Both batchers are the product's, over a model and a KV cache of the tests. What is said is what a sound machine says, of
which some is dropped, doubled, put off or altered: so it goes as deep as a protocol lets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.drafting import EdgeDrafting
from disco_daemon.engine.serve.edge import SplitEdge
from disco_daemon.engine.serve.partner import SplitPartner
from disco_daemon.link.protocol import (
    ERA,
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BeginDrawing,
    CloseAnswer,
    Credit,
    CutAnswer,
    DraftVerdict,
    DrawRules,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    PeerFrame,
    PeerJoined,
    PeerLeft,
    Refused,
    SendRows,
)
from disco_daemon.link.rows.codec import encode_rows
from disco_daemon.link.rows.content import ContentManager, credits_for
from disco_daemon.link.trust.refusals import MAX_TOLD, OF_ANSWERS
from disco_daemon.scheduler.baselines import Fcfs
from disco_daemon.scheduler.latency import IterationLatency
from tests.unit.engine.test_batch import N_SEQS, PIECES, FakeLlama, FakeSampler, FakeVocabulary, oracle
from tests.unit.link.test_peer_grammar import DOUBLING

N_VOCAB, N_CTX, N_EMBD, MAX_ANSWERS = len(PIECES), 40, 4, 2
SOUND, ILL = 1, 2  # numbers of links
Said = tuple[PeerFrame, bytes]
ODD: dict[str, tuple[Any, ...]] = {
    "id": ("a", "b", "1", "2", "", "x" * 64, "x" * 65, "\x1b[2J"),
    "turn": (0, 1, 2, ERA - 1, ERA, ERA + 1, 2 * ERA, -1, 2**63 - 1),
    **dict.fromkeys(("pos", "start", "n", "n_past"), (-1, 0, 1, 2, 3, 4, 5, N_CTX - 1, N_CTX, N_CTX + 1, 2**62)),
    "end": (-1, 0, 3, 4, 5, 6, 7, 36, 37, N_CTX, 2**62),
    **dict.fromkeys(
        ("tokens", "left", "answer", "candidates"),
        (
            (), (1,), (2, 3), (1, 2, 3, 4), (N_VOCAB,), (1, -1), (2**31 - 1,), (2**31, 2), (2**40,), (1,) * (N_CTX + 1),
            (1 + N_VOCAB, 2, 3, 4, 5), (0, 1), (3,) * 33,
        ),
    ),
    "codec": ("f32", "bf16", "int8", "ids", "zip", ""),
    "drafts": (True, False),
    "private": (True, False),
    **dict.fromkeys(("n_rows", "n_judged", "rows"), (-1, 0, 1, 5, 1000, 2**62)),
    "busy_s": (-1.0, 0.0, 1e300, float("nan"), float("inf")),
    "reason": ("overloaded", "private", "partner_gone", "\x1b[31m", "x" * 10_000),
    "message": ("", "\x1b]0;x\x07\nno", "x" * 1_000_000),
    "your_fault": (True, False),
    "sampling": (
        DrawRules(grammar="root ::= ("), DrawRules(prompt=(2**40,)), DrawRules(prompt=(1,) * (N_CTX + 1)),
        DrawRules(seed=-1),
    ),
}  # fmt: skip


def altered(said: Said, pick: int) -> Said:
    """With one field, or the bytes behind it, as no sound machine has them."""
    message, payload = said
    ways: list[Callable[[], Said]] = [
        lambda name=name, odd=odd: (msgspec.structs.replace(message, **{name: odd}), payload)  # type: ignore[misc]
        for name in message.__struct_fields__
        for odd in ODD.get(name, ())
    ]
    if payload:
        numbers = np.frombuffer(payload, np.float32)
        for odd in (np.nan, np.inf, -np.inf, 3e38):
            ways.append(lambda odd=odd: (message, (numbers * 0 + np.float32(odd)).astype(np.float32).tobytes()))  # type: ignore[misc]
        ways += [lambda cut=cut: (message, cut) for cut in (payload[:-1], payload * 2, payload[:4], b"")]  # type: ignore[misc]
    return ways[pick % len(ways)]()


class Spoiler:
    """Drops, doubles, puts off and alters what is said, as it is told to."""

    def __init__(self, orders: list[tuple[str, int]]) -> None:
        self._orders = list(reversed(orders))
        self._late: list[Said] = []

    def of(self, said: Said) -> list[Said]:
        what, pick = self._orders.pop() if self._orders else ("as it is", 0)
        match what:
            case "drop":
                return []
            case "double":
                return [said, said]
            case "late":
                self._late.append(said)
                return []
            case "alter":
                return [altered(said, pick)]
            case "both":
                return [altered(said, pick), said]
            case "catch up":
                late, self._late = [said, *self._late], []
                return late
        return [said]


KINDS = ["as it is", "as it is", "drop", "double", "late", "alter", "both", "catch up"]
orders = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 199)), max_size=25)


class Vocabulary(FakeVocabulary):
    n_tokens = N_VOCAB


@dataclass
class FollowingSampler(FakeSampler):
    def follow(self, tokens: tuple[int, ...]) -> None:
        assert all(0 <= token < N_VOCAB for token in tokens), "llama.cpp would read beyond its tables"


@dataclass
class HalfLlama(FakeLlama):
    """The lower layers, or the upper ones, to which rows come."""

    vocabulary: FakeVocabulary = field(default_factory=Vocabulary)
    hidden_out: Any = None
    n_embd: int = N_EMBD

    def bound_texts(self, n_ctx: int) -> None:
        assert n_ctx >= self.n_ctx

    def sampler(self, request: Any, answer: Any, grammar: str, prompt: Any, limit: Any = None) -> FakeSampler:
        assert limit is None or limit.n_tokens >= 0
        sampler = FollowingSampler()
        for tokens in (answer, prompt):
            sampler.follow(tokens)
            assert len(tokens) <= N_CTX
        return sampler

    def decode(self, rows: list[tuple[int, int, int, bool]], hidden: Any = None) -> int:
        if hidden is None:
            self.hidden_out = np.ones((len(rows), N_EMBD), np.float32)
        else:
            assert hidden.shape == (len(rows), N_EMBD)
            assert np.isfinite(hidden).all()
        return FakeLlama.decode(self, rows)


def admission_over(llama: FakeLlama, clock: Callable[[], float]) -> Admission:
    cells = Cells(cast(Any, llama), N_SEQS, llama.n_cells, clock)
    return Admission(cells, cast(Any, Fcfs()), IterationLatency((0.01, 0.001, 0.001, 0.0)))


def clock_of() -> Callable[[], float]:
    ticks = iter(range(10**9))
    return lambda: 0.001 * next(ticks)


# --- an ill edge at a partner ---------------------------------------------------------------------------------------


class Partner:
    """A partner's batcher, and all that it says to each of its machines."""

    def __init__(self) -> None:
        self.llama = HalfLlama(N_CTX, 4 * N_CTX)
        self.said: dict[int, list[PeerFrame]] = {SOUND: [], ILL: []}
        clock = clock_of()
        contents = ContentManager(N_EMBD, N_VOCAB, N_CTX, MAX_ANSWERS, credits_for(MAX_ANSWERS))
        self.remote = SplitPartner(
            contents=contents, send_frame=lambda peer, message, payload=b"": self.said[peer].append(message)
        )
        admission = admission_over(self.llama, clock)
        self.batcher = Batcher(cast(Any, self.llama), lambda _: None, admission, clock, remote=self.remote)
        for peer in (SOUND, ILL):
            self.remote.receive(peer, PeerJoined(name=str(peer), salt=peer), b"")

    def run(self) -> None:
        for _ in range(50):
            if not self.batcher.step():
                return
        raise AssertionError("it never comes to an end")

    def heard(self, peer: int) -> list[PeerFrame]:
        heard, self.said[peer] = self.said[peer], []
        return heard


def rows(tokens: tuple[int, ...], pos: int, turn: int, *, drafts: bool) -> Said:
    message = SendRows(id="a", turn=turn, pos=pos, tokens=tokens, drafts=drafts)
    return message, encode_rows("f32", np.ones((len(tokens), N_EMBD), np.float32))


def sound_answer(partner: Partner, n_rounds: int, between: Callable[[], None]) -> None:
    """A sound edge's answer with a wrong draft in each question: it is what the whole model says."""

    def say(*said: Said) -> list[PeerFrame]:
        for message, payload in said:
            partner.remote.receive(SOUND, message, payload)
            between()
        partner.run()
        return [message for message in partner.heard(SOUND) if not isinstance(message, Credit)]

    text = [1, 2, 3, 4]
    [opened] = say((OpenAnswer(id="a", tokens=tuple(text), private=True), b""))
    assert opened == AnswerOpened(id="a", n_past=0), "of another machine's text it has nothing"
    say(rows((1, 2, 3), 0, 0, drafts=False), (BeginDrawing(id="a", sampling=DrawRules()), b""))
    for turn in range(n_rounds):
        drafts = (text[-1], oracle(text), (oracle([*text, oracle(text)]) + 1) % N_VOCAB)
        start = len(text) - 1
        asked = JudgeDrafts(id="a", turn=turn, start=start, end=start + 3)
        [verdict] = say(rows(drafts, start, turn, drafts=True), (asked, b""))
        assert isinstance(verdict, DraftVerdict)
        for token in verdict.tokens:
            assert token == oracle(text)
            text.append(token)
        if text[-1] == 0:
            break
    [closed] = say((CloseAnswer(id="a"), b""))
    assert isinstance(closed, AnswerClosed)


def script(text: tuple[int, ...]) -> list[Said]:
    """What a sound edge would say."""
    n = len(text)
    return [
        (OpenAnswer(id="a", tokens=text), b""),
        rows(text[:-1], 0, 0, drafts=False),
        (BeginDrawing(id="a", sampling=DrawRules(), answer=text[-1:]), b""),
        rows((text[-1], 2, 3), n - 1, 0, drafts=True),
        (JudgeDrafts(id="a", turn=0, start=n - 1, end=n + 2), b""),
        rows((5, 6), n - 3, ERA, drafts=False),
        (CutAnswer(id="a", turn=ERA, n=n - 3), b""),
        (BeginDrawing(id="a", sampling=DrawRules()), b""),
        rows((7,), n - 1, ERA, drafts=True),
        (JudgeDrafts(id="a", turn=ERA, start=n - 1, end=n, left=(1,)), b""),
        (OpenAnswer(id="b", tokens=text[:2]), b""),
        (CloseAnswer(id="a"), b""),
    ]


@settings(max_examples=60, deadline=None)
@given(orders, st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (8, 7, 6, 5)]))
def test_whatever_an_edge_says_another_machines_answers_are_what_they_would_be(
    orders: list[tuple[str, int]], text: tuple[int, ...]
) -> None:
    partner, spoiler, left = Partner(), Spoiler(orders), script(text)

    def ill() -> None:
        for said in spoiler.of(left.pop(0)) if left else ():
            partner.remote.receive(ILL, *said)
        contents = partner.remote.contents
        assert contents.n_held <= 2 * contents.credits
        assert sum(content.key[0] == ILL for content in contents.contents) <= MAX_ANSWERS

    sound_answer(partner, 3, ill)
    while left:
        ill()
        partner.run()
    partner.remote.receive(ILL, PeerLeft(reason="gone"), b"")
    assert not partner.remote.contents.contents
    assert not partner.batcher.admission.sequences
    assert not partner.remote.contents.n_held


@pytest.mark.parametrize("first", [1 + N_VOCAB, 1 - N_VOCAB, 2**31 - 1, 2**31, 2**40, -(2**31) - 1])
def test_an_opening_with_ids_beyond_the_vocabulary_touches_no_cells(first: int) -> None:
    """Machines' texts are told apart by ids beyond the vocabulary: such a one would be another machine's."""
    partner = Partner()
    sound_answer(partner, 2, lambda: None)
    before = {seq: list(cells) for seq, cells in partner.llama.cells.items()}
    n_reused = partner.batcher.admission.cells.n_reused
    for peer, name in ((ILL, "a"), (SOUND, "b")):
        partner.remote.receive(peer, OpenAnswer(id=name, tokens=(first, 2, 3, 4)), b"")
        [failed] = partner.heard(peer)
        assert isinstance(failed, AnswerFailed)
        assert failed.reason == "bad_rows"
    assert partner.llama.cells == before
    assert partner.batcher.admission.cells.n_reused == n_reused


@pytest.mark.parametrize(
    "begun",
    [
        BeginDrawing(id="a", sampling=DrawRules(), answer=(1,) * (N_CTX + 1)),
        BeginDrawing(id="a", sampling=DrawRules(prompt=(N_VOCAB,))),
        BeginDrawing(id="a", sampling=DrawRules(prompt=(1,) * (N_CTX + 1))),
    ],
    ids=["an answer beyond the context", "a prompt beyond the vocabulary", "a prompt beyond the context"],
)
def test_drawing_that_begins_behind_what_is_no_text_ends_its_answer(begun: BeginDrawing) -> None:
    partner = Partner()
    partner.remote.receive(ILL, OpenAnswer(id="a", tokens=(1, 2)), b"")
    partner.remote.receive(ILL, begun, b"")
    assert [type(message) for message in partner.heard(ILL)] == [AnswerOpened, AnswerFailed]


@pytest.mark.parametrize("note", ["", " # readings: 1"])
def test_an_answer_by_a_grammar_whose_readings_multiply_ends_before_anything_follows_it(note: str) -> None:
    partner = Partner()
    partner.remote.receive(ILL, OpenAnswer(id="a", tokens=(1, 2)), b"")
    rules = DrawRules(grammar=DOUBLING + note)
    partner.remote.receive(ILL, BeginDrawing(id="a", sampling=rules, answer=(1,) * 30), b"")
    _, failed = partner.heard(ILL)
    assert isinstance(failed, AnswerFailed)
    assert (failed.reason, failed.your_fault) == ("bad_grammar", True)
    sound_answer(partner, 2, lambda: None)


# --- an ill partner at an edge --------------------------------------------------------------------------------------


@dataclass
class PartnerOfWords:
    """A partner that knows what the whole model says, and nothing of layers; what it says goes through `spoiler`."""

    spoiler: Spoiler
    out: list[Said] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    asked: dict[str, JudgeDrafts] = field(default_factory=dict)

    def say(self, message: PeerFrame) -> None:
        self.out += self.spoiler.of((message, b""))

    def hear(self, message: PeerFrame) -> None:
        match message:
            case OpenAnswer(id=name, tokens=tokens):
                self.texts[name], self.turns[name] = list(tokens), 0
                self.say(AnswerOpened(id=name, n_past=0))
            case SendRows(id=name, turn=turn, pos=pos, tokens=tokens):
                self.say(Credit(rows=len(tokens)))
                if name in self.texts and turn == self.turns[name]:
                    self.texts[name][pos:] = tokens
            case CutAnswer(id=name, turn=turn) if name in self.texts:
                self.turns[name] = turn
                self.asked.pop(name, None)
            case JudgeDrafts(id=name):
                self.asked[name] = message
            case _:
                pass
        for name, asked in list(self.asked.items()):
            if len(self.texts.get(name, ())) >= asked.end and asked.turn == self.turns[name]:
                self.judge(name, self.asked.pop(name))

    def judge(self, name: str, asked: JudgeDrafts) -> None:
        text, drawn = self.texts[name], list[int]()
        for at in range(asked.start, asked.end):
            drawn.append(oracle(text[: at + 1]))
            if text[at + 1 : at + 2] != drawn[-1:]:
                break
        self.turns[name] += 1
        if self.turns[name] % 3 == 2:
            self.say(NeedRows(id=name, turn=self.turns[name], pos=asked.start))
            return
        self.say(DraftVerdict(id=name, turn=self.turns[name], start=asked.start, tokens=tuple(drawn)))


class Edge:
    """An edge's batcher with a partner of words, which may be replaced."""

    def __init__(self, spoiler: Spoiler) -> None:
        self.llama, self.sent, clock = HalfLlama(N_CTX, 4 * N_CTX), list[Any](), clock_of()
        self.partner, self.peer, self.refused = PartnerOfWords(spoiler), 1, list[Refused]()
        self.remote = SplitEdge(drafting=EdgeDrafting(cast(Any, self.llama)), send_frame=self._note)
        admission = admission_over(self.llama, clock)
        self.batcher = Batcher(cast(Any, self.llama), cast(Any, self.sent.append), admission, clock, remote=self.remote)
        self.remote.absence.patience_s = 1e6
        self.join()

    def join(self) -> None:
        self.remote.receive(self.peer, PeerJoined(name="p", credits=512, n_ctx=N_CTX), b"")

    def _note(self, peer: int, message: PeerFrame, payload: bytes = b"") -> None:
        assert peer == self.peer
        assert bool(payload) == isinstance(message, SendRows)
        if isinstance(message, Refused):
            self.refused.append(message)
        else:
            self.partner.hear(message)

    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            moved = self.batcher.step()
            out, self.partner.out = self.partner.out, []
            for message, payload in out:
                self.remote.receive(self.peer, message, payload)
            credits = self.remote.credits
            assert credits is None or 0 <= credits.left <= credits.total
            if not moved and not out:
                return

    def ends(self) -> dict[str, wire.Done | wire.Failed]:
        return {message.id: message for message in self.sent if isinstance(message, wire.Done | wire.Failed)}


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(1, 12))
def test_whatever_a_partner_says_answers_go_on_over_the_next_link(orders: list[tuple[str, int]], n: int) -> None:
    edge = Edge(Spoiler(orders))
    for at, text in enumerate(("abc", "hello")):
        said = [{"role": "user", "content": text}]
        edge.batcher.add(wire.Generate(id=f"g{at}", messages=said, max_tokens=n))
    edge.run(300)
    if edge.remote.is_up:
        edge.remote.receive(edge.peer, PeerLeft(reason="gone"), b"")
    edge.partner, edge.peer = PartnerOfWords(Spoiler([])), 2
    edge.join()
    edge.run(300)
    ends = edge.ends()
    assert set(ends) == {"g0", "g1"}
    for end in ends.values():
        if isinstance(end, wire.Failed):
            assert end.reason in OF_ANSWERS
            assert len(end.message) < MAX_TOLD + 100
            assert "\x1b" not in end.message
        else:
            assert end.n_completion <= n
    assert not edge.batcher.admission.sequences
    assert all(len(refused.message) < 2000 for refused in edge.refused)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12))
def test_a_sound_partner_is_refused_nothing(n: int) -> None:
    """Else the properties above would hold for an edge that takes nothing."""
    edge = Edge(Spoiler([]))
    edge.batcher.add(wire.Generate(id="g", messages=[{"role": "user", "content": "hello"}], max_tokens=n))
    edge.run(300)
    assert not edge.refused
    assert isinstance(edge.ends()["g"], wire.Done)


@pytest.mark.parametrize("reason", ["private", "partner_gone", "no_exit", "\x1b[31m", "", "x" * 10_000])
def test_why_a_partner_ends_an_answer_is_one_of_few_reasons_and_plain(reason: str) -> None:
    edge = Edge(Spoiler([("drop", 0)]))
    edge.batcher.add(wire.Generate(id="g", messages=[{"role": "user", "content": "hello"}], max_tokens=2))
    failed = AnswerFailed(id="1", reason=reason, message="\x1b]0;x\x07no\u202e" + "x" * 10_000)
    edge.remote.receive(edge.peer, failed, b"")
    end = edge.ends()["g"]
    assert isinstance(end, wire.Failed)
    assert end.reason == "engine_error"
    assert len(end.message) < MAX_TOLD + 100
    assert not set(end.message) & set("\x1b\x07\u202e")
