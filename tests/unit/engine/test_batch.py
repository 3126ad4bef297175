from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.kv.checkpoints import Checkpoints
from disco_daemon.engine.llama.grammar_sampler import MAX_LIST_S, MAX_MEAN_S, MAX_TOKEN_S, GrammarMeter
from disco_daemon.engine.llama.memory import N_BATCH
from disco_daemon.engine.llama.refusals import PromptError
from disco_daemon.engine.llama.rows import ABORTED, NO_KV_SLOT
from disco_daemon.engine.llama.text import TextStream
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import MAX_WAITING, Batcher
from disco_daemon.engine.serve.row_grouping import RowGrouping
from disco_daemon.engine.serve.sequence import Sequence as Sequence_
from disco_daemon.scheduler.andes import Andes
from disco_daemon.scheduler.baselines import Fcfs, RoundRobin
from disco_daemon.scheduler.jobs import TokenScheduler
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.scheduler.prompt_rows import RICH_S
from disco_daemon.types import Drawing, Likelihood

PIECES = (b"", b"a", b"b", b" ", b"\xe2", b"\x82\xac", b"ST", b"OP", b"x")  # token 0 ends an answer
N_CTX = 40
N_SEQS = 8
Y, PQ = 122, 210  # the tokens of "y", and of "pq" where it is tokenized in one go
EXTENSIONS = {Y: [Y, 201, 202]}
PIECES_OF = dict(enumerate(PIECES)) | {Y: b"y", 201: b"ya", 202: b"y\xe2\x82\xac"}


def oracle(tokens: Sequence[int]) -> int:
    """The next token after `tokens`: a model with perfect taste and one opinion."""
    return zlib.crc32(bytes(tokens)) % len(PIECES)


def tokens_of(text: str) -> list[int]:
    return [PQ if c == "pq" else 1 + ord(c) % 200 for c in re.findall("pq|.", text)]


@dataclass
class FakeSampler:
    closed: bool = False
    meter: GrammarMeter | None = None

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Cell:
    """A cell of the KV cache; sequences that share it have the very same one."""

    token: int
    place: int


class Saved(bytes):
    """The tokens of cells, and those that a state has read; none without a state."""

    read = b""


class FakeVocabulary:
    """Letters are tokens."""

    def check_drawing(self, drawing: Drawing) -> None:
        assert drawing == Drawing()

    def rearranges(self, request: wire.Generate) -> bool:
        return False

    def prompt_tokens(self, request: wire.Generate) -> list[int]:
        return tokens_of("".join(m["content"] for m in request.messages))

    piece = staticmethod(PIECES_OF.__getitem__)
    ends = staticmethod((0).__eq__)

    def shown_piece(self, request: wire.Generate, token: int) -> bytes:
        return self.piece(token)

    def answer_tokens(self, text: str, ids: Sequence[int] = ()) -> list[int]:
        return self.check_ids(ids) if ids else tokens_of(text)

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        if any(token > 255 for token in ids):
            raise PromptError("no such token")
        return list(ids)

    def extensions(self, token: int) -> list[int]:
        return EXTENSIONS.get(token, [])

    def stream(self, request: wire.Generate, prompt: Sequence[int], answer: str) -> TextStream:
        return TextStream(request.stop)

    def thought_limit(self, request: wire.Generate, prompt: Sequence[int]) -> None:
        assert request.thought_budget is None

    def close_thought(self, prompt: list[int], text: str) -> list[int]:
        return prompt


@dataclass
class FakeLlama:
    """A KV cache of `n_cells` that checks every position, and breaks as `faults` say: (return value, rows done).

    As of the real one, cells that were forgotten are free only after `clear`, and attention goes by their order. If it
    is not `divisible`, a sequence has a state, which has `read` some tokens and goes on only behind just those; it is
    not cut, and a decode that breaks off leaves all states `spoilt`.
    """

    n_ctx: int = N_CTX
    n_cells: int = N_CTX
    bytes_per_token: int = 1
    skip_s: float = 1e-10
    exact: bool = True
    divisible: bool = True
    resumes: bool = True
    windowed: bool = False
    adapters: tuple[str, ...] = ()
    faults: list[tuple[int, int]] = field(default_factory=list)
    cells: dict[int, list[Cell]] = field(default_factory=lambda: {slot: [] for slot in range(N_SEQS)})
    n_placed: int = 0
    read: dict[int, bytes] = field(default_factory=dict)
    spoilt: set[int] = field(default_factory=set)
    logits: dict[int, list[int]] = field(default_factory=dict)
    samplers: list[FakeSampler] = field(default_factory=list)
    vocabulary: FakeVocabulary = field(default_factory=FakeVocabulary)

    @property
    def retracts(self) -> bool:
        return self.divisible

    @property
    def n_retractable(self) -> int:
        return 512 if self.divisible else 0

    def can_cut(self, seq: int, n: int) -> bool:
        return self.divisible

    @property
    def n_used(self) -> int:
        return len({cell.place for cells in self.cells.values() for cell in cells})

    def tokens(self, slot: int) -> list[int]:
        return [cell.token for cell in self.cells[slot]]

    def place(self, tokens: Iterable[int]) -> list[Cell]:
        cells = [Cell(token, place) for place, token in enumerate(tokens, self.n_placed)]
        self.n_placed += len(cells)
        return cells

    def share(self, source: int, seq: int, n: int) -> None:
        assert not self.cells[seq]
        assert n <= len(self.cells[source])
        self.cells[seq] = self.cells[source][:n]
        self.set_state(seq, self.read.get(source, b""))

    def save(self, seq: int) -> bytes:
        assert seq not in self.spoilt
        saved = Saved(self.tokens(seq))
        saved.read = self.read.get(seq, b"")
        return saved

    def restore(self, seq: int, data: bytes) -> bool:
        assert not self.cells[seq]
        assert self.n_placed + len(data) <= self.n_cells
        self.cells[seq] = self.place(data)
        return self.set_state(seq, data.read if isinstance(data, Saved) else b"")

    def state(self, seq: int) -> bytes:
        assert seq not in self.spoilt
        return self.read[seq]

    def set_state(self, seq: int, state: bytes) -> bool:
        self.drop_state(seq)
        if state:
            self.read[seq] = state
        return True

    def drop_state(self, seq: int) -> None:
        self.read.pop(seq, None)
        self.spoilt.discard(seq)

    def part(self, seq: int, start: int, end: int) -> bytes:
        return self.save(seq)[start:end]

    def put(self, data: bytes, owners: Iterable[int], start: int, end: int) -> None:
        assert len(data) == end - start
        cells = self.place(data)
        for seq in owners:
            assert len(self.cells[seq]) == start
            self.cells[seq] += cells

    def compact(self, spans: Iterable[tuple[int, int, Collection[int]]]) -> int:
        kept = [(start, end, owners, self.part(min(owners), start, end)) for start, end, owners in spans]
        states = dict(self.read)
        self.clear()
        for start, end, owners, data in kept:
            self.put(data, owners, start, end)
            self.read |= {seq: states[seq] for seq in owners if seq in states}
        return sum(len(data) for *_, data in kept)

    def clear(self) -> None:
        self.n_placed = 0
        self.read.clear()
        for cells in self.cells.values():
            cells.clear()

    def salt(self, adapter: str) -> int:
        assert not adapter
        return 0

    def grammar(self, request: wire.Generate) -> str:
        if request.response_format == {}:
            raise PromptError("no grammar")
        return ""

    def sampler(
        self, request: wire.Generate, answer: Sequence[int], grammar: str, prompt: Sequence[int]
    ) -> FakeSampler:
        self.samplers.append(FakeSampler())
        return self.samplers[-1]

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> int:
        assert 0 < len(rows) <= N_BATCH
        self.logits = {}
        if self.n_placed + len(rows) > self.n_cells:
            return NO_KV_SLOT
        rc, n_done = self.faults.pop() if self.faults else (0, 0)
        before = self.n_placed, {slot: len(cells) for slot, cells in self.cells.items()}
        for i, (token, position, slot, wanted) in enumerate(rows[: len(rows) if rc == 0 else n_done]):
            assert position == len(self.cells[slot]), "a row goes right behind what its sequence has"
            assert slot not in self.spoilt, "its state is half that of a decode which was broken off"
            if not self.divisible:
                assert self.read.get(slot, b"") == bytes(self.tokens(slot)), "a state goes on behind what it has read"
                self.read[slot] = bytes([*self.tokens(slot), token])
            self.cells[slot] += self.place([token])
            if wanted and rc == 0:
                self.logits[i] = self.tokens(slot)
                places = [cell.place for cell in self.cells[slot]]
                assert places == sorted(places), "attention would add up in another order"
        if rc != 0:  # llama.cpp takes such rows back itself
            self.n_placed = before[0]
            for slot, n in before[1].items():
                del self.cells[slot][n:]
            if not self.divisible and rc != NO_KV_SLOT:
                self.spoilt = set(self.read)
        return rc

    def sample(self, sampler: FakeSampler, row: int, among: Sequence[int]) -> int:
        assert not sampler.closed
        drawn = oracle(self.logits[row])
        return among[drawn % len(among)] if among else drawn

    def likelihood(self, row: int, token: int, n_top: int, among: Sequence[int], n_known: int) -> Likelihood:
        """What is told of a token names its row: the tokens before it are its log-probability."""
        before = self.logits[row]
        assert token == (among[oracle(before) % len(among)] if among else oracle(before)), (
            "of the row it was drawn from"
        )
        return Likelihood(PIECES_OF[token][n_known:], -float(len(before)), ((b"", 0.0),) * n_top)

    def forget(self, slot: int) -> None:
        self.cells[slot].clear()
        self.drop_state(slot)

    def truncate(self, slot: int, n: int, otherwise: Callable[[], object]) -> None:
        if n >= len(self.read.get(slot, b"")):
            del self.cells[slot][n:]
        else:
            self.forget(slot)
            otherwise()


@dataclass
class Given:
    """What a request was given last, and what the model makes of it."""

    request: wire.Generate
    answer: str
    exact: bool
    n_first: int = 0
    since: int = 0  # messages sent before this are of an answer that was thrown away
    reworked: bool = False

    def expected(self) -> tuple[str, str, int, int]:
        """Text, finish reason, tokens drawn and tokens prefilled of an undisturbed answer."""
        request, given = self.request, tokens_of(self.answer)
        before = tokens_of(request.messages[0]["content"]) + given
        limit = None if request.max_tokens is None else request.max_tokens - (len(given) - self.n_first)
        if len(before) >= N_CTX or (limit is not None and limit <= 0):
            return "", wire.FULL if len(before) >= N_CTX else "length", 0, len(before)
        answer: list[int] = []
        data = b""
        if given and not self.exact and (among := EXTENSIONS.get(given[-1])):
            token = among[oracle(before[:-1]) % len(among)]
            if token != given[-1]:
                answer, before, data = [token], before[:-1], PIECES_OF[token][1:]
        while True:
            text = data.decode("utf-8", "replace")
            if hits := [text.find(s) for s in request.stop if s in text]:
                return text[: min(hits)], "stop", len(answer), len(before)
            text = text[: len(text) - data.endswith(b"\xe2")]  # half a character is no text
            if len(before) + len(answer) >= N_CTX or len(answer) == limit:
                return text, "length" if len(answer) == limit else wire.FULL, len(answer), len(before)
            token = oracle(before + answer)
            if token == 0:
                return text, "stop", len(answer), len(before)
            answer.append(token)
            data += PIECES[token]


class Apart(RowGrouping):
    """Rows go one by one every second time: nothing may depend on it."""

    def apart(self, n: int) -> bool:
        self._n_asked += 1
        return n > 1 and self._n_asked % 2 == 0


class Bench:
    """A batcher over a fake model, with all that it sent."""

    def __init__(
        self,
        scheduler: str = "fcfs",
        *,
        n_ctx: int = N_CTX,
        n_cells: int | None = None,
        tick_s: float = 1.0,
        divisible: bool = True,
    ) -> None:
        self.llama = FakeLlama(n_ctx, n_cells or n_ctx, divisible=divisible)
        self.sent: list[wire.Message] = []
        ticks = iter(range(10**9))
        clock = lambda: tick_s * next(ticks)  # noqa: E731
        latency = IterationLatency((0.01, 0.001, 0.001, 0.0))
        chosen = {"andes": Andes(latency), "fcfs": Fcfs(), "round-robin": RoundRobin()}[scheduler]
        self.cells = Cells(cast(Any, self.llama), N_SEQS, self.llama.n_cells, clock)
        self.cells.checkpoints = Checkpoints(10 * N_CTX, every=6, last=2)  # texts are short here
        self.admission = Admission(self.cells, cast(TokenScheduler, chosen), latency)
        self.batcher = Batcher(cast(Any, self.llama), cast(Any, self.sent.append), self.admission, clock)
        self.given: dict[str, Given] = {}
        self.shortened: set[str] = set()

    def add(self, prompt: str = "hello", **more: Any) -> str:
        if more.pop("exact", False):
            more["answer_ids"] = tuple(tokens_of(more.get("answer_so_far", "")))
        request = wire.Generate(id=f"r{len(self.given)}", messages=[{"role": "user", "content": prompt}], **more)
        n_first = len(tokens_of(request.answer_so_far))
        self.given[request.id] = Given(request, request.answer_so_far, bool(request.answer_ids), n_first)
        self.batcher.add(request)
        return request.id

    def find(self, id_: str) -> Sequence_ | None:
        return self.admission.sequences.get(id_)

    def append(self, id_: str, text: str, *, go: bool, known: bool = False) -> None:
        s = self.find(id_)
        if s is not None and s.is_held:
            given = self.given[id_]
            splits = (given.answer[-1:], text[:1]) == ("p", "q")
            known = known and not splits  # the oracle reads the answer as one text
            given.reworked |= splits
            given.answer += text
            given.exact = (known and bool(text)) or (given.exact and not text)
            given.since = len(self.sent)
            self.batcher.append(wire.AppendText(id=id_, text=text, go=go, ids=tuple(tokens_of(text)) if known else ()))
        elif s is None:
            n_sent = len(self.sent)
            self.batcher.append(wire.AppendText(id=id_, text=text, go=go))
            assert len(self.sent) == n_sent, "it has ended by itself"

    def hold(self, id_: str) -> None:
        s = self.find(id_)
        if s is not None:
            self.given[id_].reworked |= not s.is_held
            self.given[id_].since = len(self.sent)
        self.batcher.hold(id_)

    def step(self, fault: tuple[int, int] | None = None) -> bool:
        self.llama.faults = [fault] if fault else []
        n_sent = len(self.sent)
        busy = self.batcher.step()
        if fault and fault[0] == NO_KV_SLOT and not self.llama.faults:
            self.shortened |= {m.id for m in self.sent[n_sent:] if isinstance(m, wire.Done)}
        self.check()
        return busy

    def check(self) -> None:
        running = self.admission.resident
        owned = {s.slot: s.tokens[: s.n_past] for s in running}
        assert len(owned) == len(running) == self.cells.n_taken <= N_SEQS
        assert {slot: self.llama.tokens(slot) for slot in owned} == owned
        assert self.llama.read.keys() <= owned.keys(), "what is cached has no state in the context"
        assert self.llama.n_used == self.cells.n_used <= self.llama.n_cells
        assert self.llama.n_placed == self.cells.n_used + self.cells.n_garbage
        saved = [s.saved for s in self.admission.without_cells if s.saved is not None]
        assert self.cells.saved_bytes == sum(len(s.data) for s in saved)

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        pytest.fail("the batcher never comes to rest")

    def of(self, kind: type[Any]) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]

    def done(self, id_: str) -> wire.Done:
        (found,) = [m for m in self.of(wire.Done) if m.id == id_]
        return cast(wire.Done, found)

    def text(self, id_: str) -> str:
        since = self.given[id_].since
        return "".join(p.text for p in self.sent[since:] if isinstance(p, wire.TextPiece) and p.id == id_)

    def check_ids(self, id_: str) -> None:
        """Wherever pieces have ids, the text up to there is exactly theirs."""
        text, data = "", b""
        for p in self.sent[self.given[id_].since :]:
            if isinstance(p, wire.TextPiece) and p.id == id_:
                text += p.text
                data += b"".join(PIECES_OF[t] for t in p.ids)
                assert not p.ids or data.decode() == text

    def check_likelihoods(self, id_: str) -> None:
        """Each token that the text shown has a part of is told, in its place, with the text in which it begins."""
        n_top, text, data, places, n_last = self.given[id_].request.top_logprobs, "", b"", [], 0
        for p in self.sent[self.given[id_].since :]:
            if isinstance(p, wire.TextPiece) and p.id == id_:
                text += p.text
                data += b"".join(token.piece for token in p.likelihoods)
                places += [token.logprob for token in p.likelihoods]
                n_last = len(p.likelihoods[-1].piece) if p.likelihoods else n_last
                assert all(len(token.top) == n_top for token in p.likelihoods)
                if n_top is not None and "\N{REPLACEMENT CHARACTER}" not in text:
                    shown = text.encode()
                    assert data.startswith(shown)
                    assert len(data) - n_last < len(shown)
        assert places == sorted(set(places), reverse=True)
        assert n_top is not None or not places

    def check_answer(self, id_: str) -> None:
        given, done, text = self.given[id_], self.done(id_), self.text(id_)
        whole, reason, n, n_prompt = given.expected()
        self.check_ids(id_)
        self.check_likelihoods(id_)
        assert sum(p.n_tokens for p in self.of(wire.TextPiece) if p.id == id_) <= done.n_completion
        if done.reason == "cancelled" or id_ in self.shortened:
            assert whole.startswith(text) or id_ in self.shortened  # the end of a shortened answer shows what was held
            assert done.n_completion <= n or given.reworked
            return
        assert (text, done.reason) == (whole, reason)
        assert done.n_completion >= n if given.reworked else done.n_completion == n
        if n:
            n_there = done.n_prompt + done.n_cached
            assert n_there >= n_prompt if given.reworked else n_there == n_prompt

    def check_rest(self) -> None:
        self.check()
        assert not (*self.admission.resident, *self.admission.without_cells)
        assert all(s.closed for s in self.llama.samplers)
        done, counters = self.of(wire.Done), self.batcher.counters
        assert counters.completion_tokens == sum(d.n_completion for d in done)
        assert counters.prompt_tokens == sum(d.n_prompt for d in done)
        assert self.of(wire.Failed) or counters.busy_s == pytest.approx(sum(d.busy_s for d in done))


prompts = st.text("abc", min_size=1, max_size=N_CTX - 2)
adds = st.fixed_dictionaries(
    {"prompt": prompts},
    optional={
        "answer_so_far": st.text("xy", max_size=12),
        "exact": st.booleans(),
        "hold": st.booleans(),
        "max_tokens": st.integers(1, 12),
        "top_logprobs": st.integers(0, 2),
        "stop": st.lists(st.sampled_from(["STOP", "a", "€", "xb", "b "]), max_size=2).map(tuple),
    },
)
whom = st.integers(0, 12)
faults = st.sampled_from([None, None, None, None, (ABORTED, 0), (ABORTED, 3), (ABORTED, 99), (NO_KV_SLOT, 0)])
steps = st.tuples(st.just("step"), faults)
ops: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("add"), adds),
    steps,
    steps,
    st.tuples(st.just("cancel"), whom),
    st.tuples(st.just("append"), whom, st.text("pqy", max_size=8), st.booleans(), st.booleans()),
    st.tuples(st.just("hold"), whom),
    st.tuples(st.just("pace"), whom, st.sampled_from([None, 2.0, 50.0])),
)


@settings(max_examples=400)
@given(
    st.lists(ops, max_size=40),
    st.sampled_from(["fcfs", "andes", "round-robin"]),
    st.sampled_from([N_CTX, 2 * N_CTX]),
    st.sampled_from([1, 10**9]),  # what has that many bytes a token is computed again rather than swapped
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_each_answer_is_what_the_model_says(
    script: list[tuple[Any, ...]], scheduler: str, n_cells: int, bytes_per_token: int, apart: bool, divisible: bool
) -> None:
    bench = Bench(scheduler, n_cells=n_cells, tick_s=0.05, divisible=divisible)
    bench.llama.bytes_per_token = bytes_per_token
    bench.batcher.grouping = Apart() if apart else RowGrouping()
    play(bench, script)


def play(bench: Bench, script: list[tuple[Any, ...]]) -> None:
    """Do what the script says, let all answers end, and check them."""
    for op in script:
        match op:
            case "add", dict() as more:
                bench.add(**more)
            case "step", fault:
                bench.step(fault)
            case "cancel", int() as n:
                bench.batcher.cancel(f"r{n}")
            case "append", int() as n, str() as text, bool() as go, bool() as known:
                bench.append(f"r{n}", text, go=go, known=known)
            case "hold", int() as n:
                bench.hold(f"r{n}")
            case "pace", int() as n, pace_tps:
                bench.batcher.pace(f"r{n}", pace_tps)
        bench.check()
    for s in (*bench.admission.resident, *bench.admission.without_cells):
        if s.is_held:
            bench.append(s.request.id, "", go=True)
    bench.drain()
    for id_ in bench.given:
        bench.check_answer(id_)
    bench.check_rest()


def test_rows_that_go_one_by_one_are_one_iteration() -> None:
    bench = Bench()
    bench.batcher.grouping = Apart()
    ids = [bench.add(prompt, max_tokens=8) for prompt in ("a", "b", "c")]
    bench.drain()
    for id_ in ids:
        bench.check_answer(id_)
    bench.check_rest()
    assert bench.batcher.counters.iterations <= 1 + max(bench.done(id_).n_completion for id_ in ids)


def test_a_held_answer_waits_with_its_prompt_computed_until_it_may_go() -> None:
    bench = Bench()
    id_ = bench.add("abc", hold=True)
    bench.drain()
    (held,) = bench.admission.resident
    assert held.n_past == 2, "all but the last token, whose logits are wanted later"
    bench.append(id_, "de", go=False)
    bench.append(id_, "f", go=True)
    bench.drain()
    bench.check_answer(id_)
    bench.append(id_, "too late", go=True)
    bench.check_rest()


def idle(bench: Bench, id_: str) -> list[tuple[int, int]]:
    return [(p.n_past, p.n_orders) for p in bench.of(wire.PrefillProgress) if p.id == id_ and p.idle]


def test_a_held_answer_gives_way_and_is_computed_again_later() -> None:
    bench = Bench()
    held = bench.add("a" * (N_CTX - 5), hold=True)
    bench.drain()
    answer = bench.add("b" * 10, max_tokens=3)
    while not bench.of(wire.Done):
        assert bench.step()
        assert [s.request.id for s in bench.admission.resident] in ([answer], [])
    bench.check_answer(answer)
    bench.drain()
    assert idle(bench, held) == [(N_CTX - 6, 0), (N_CTX - 6, 0)], "it says again that it has caught up"
    bench.append(held, "", go=True)
    bench.drain()
    bench.check_answer(held)
    bench.check_rest()


def test_of_held_answers_the_one_held_longest_gives_up_its_slot() -> None:
    bench = Bench()
    held = [bench.add("a", hold=True) for _ in range(N_SEQS)]
    bench.drain()
    bench.add("b", max_tokens=2)
    bench.step()
    assert [s.request.id for s in bench.admission.without_cells] == held[:1]


def test_a_held_answer_without_room_says_so_once_and_the_engine_rests() -> None:
    bench = Bench()
    ids = [bench.add("ab", hold=True) for _ in range(N_SEQS + 1)]
    bench.drain()
    assert bench.step() is False
    assert [idle(bench, id_) for id_ in ids] == [[(1, 0)]] * N_SEQS + [[(0, 0)]]
    bench.batcher.cancel(ids[0])
    bench.drain()
    assert idle(bench, ids[-1]) == [(0, 0), (1, 0)]


def test_every_order_is_acknowledged() -> None:
    bench = Bench()
    id_ = bench.add("hello", max_tokens=9)
    while not bench.of(wire.TextPiece):
        assert bench.step()
    bench.hold(id_)
    bench.drain()
    bench.append(id_, "x", go=False)
    bench.drain()
    bench.hold(id_)
    bench.append(id_, "", go=False)
    bench.drain()
    assert idle(bench, id_) == [(4, 1), (5, 2), (5, 4)]


def test_what_is_appended_counts_against_the_limit() -> None:
    bench = Bench()
    id_ = bench.add("abc", hold=True, max_tokens=3, answer_so_far="xx")
    bench.append(id_, "ppp", go=True)
    assert bench.done(id_) == wire.Done(id=id_, reason="length", n_prompt=0, n_completion=0, busy_s=0.0)
    bench.check_rest()


def test_a_longest_common_prefix_stays_computed_when_text_is_tokenized_anew() -> None:
    bench = Bench()
    id_ = bench.add("abc", hold=True)
    bench.append(id_, "xpp", go=False)
    bench.drain()
    bench.append(id_, "qx", go=False)
    (s,) = bench.admission.resident or bench.admission.without_cells
    assert s.given.tokens == tokens_of("xppqx")
    assert s.n_past == 5, "abc, x and the first p"


def test_ids_of_no_vocabulary_fail_the_held_answer_only() -> None:
    bench = Bench()
    id_, other = bench.add("abc", hold=True), bench.add("a", max_tokens=1)
    bench.batcher.append(wire.AppendText(id=id_, text="x", go=False, ids=(999,)))
    assert [f.id for f in bench.of(wire.Failed)] == [id_]
    bench.drain()
    bench.check_answer(other)


def test_appending_to_an_answer_that_is_not_held_ends_it() -> None:
    bench = Bench()
    id_ = bench.add("abc")
    bench.batcher.append(wire.AppendText(id=id_, text="x", go=True))
    assert [(f.id, f.reason) for f in bench.of(wire.Failed)] == [(id_, "not_held")]
    bench.check_rest()


def test_what_was_aborted_is_computed_again_and_a_cancelled_prompt_is_billed_for_what_was_done() -> None:
    bench = Bench()
    id_ = bench.add("abcdef", max_tokens=1)
    bench.step((ABORTED, 3))
    assert bench.sent == []
    bench.batcher.cancel(id_)
    assert bench.done(id_) == wire.Done(id=id_, reason="cancelled", n_prompt=0, n_completion=0, busy_s=1.0)
    bench.check_rest()


def test_progress_tells_how_far_a_long_prompt_is() -> None:
    bench, n = Bench(n_ctx=1000), wire.PREFILL_CHUNK
    bench.add("a" * (2 * n + 1), max_tokens=1)
    bench.drain()
    assert [(p.n_past, p.n_prompt) for p in bench.of(wire.PrefillProgress)] == [(n, 2 * n + 1), (2 * n, 2 * n + 1)]


def test_a_full_queue_refuses_and_drops_nothing() -> None:
    bench = Bench()
    for _ in range(MAX_WAITING):
        bench.add("a", max_tokens=1)
    refused = bench.add("a")
    (failed,) = bench.of(wire.Failed)
    assert (failed.id, failed.reason, failed.your_fault) == (refused, "overloaded", False)
    bench.drain()
    assert len(bench.of(wire.Done)) == MAX_WAITING
    bench.check_rest()


def test_a_prompt_that_does_not_fit_is_the_requests_fault() -> None:
    bench = Bench()
    bench.add("a" * N_CTX)
    (failed,) = bench.of(wire.Failed)
    assert (failed.reason, failed.your_fault) == ("context_length_exceeded", True)
    assert f"{N_CTX} tokens" in failed.message


def test_an_answer_so_far_that_fills_the_context_is_told_apart_from_one_at_its_length() -> None:
    bench = Bench()
    assert bench.done(bench.add("abc", answer_so_far="x" * N_CTX)).reason == wire.FULL
    held = bench.add("abc", hold=True)
    bench.append(held, "x" * N_CTX, go=False)
    assert bench.done(held).reason == wire.FULL
    bench.check_rest()


def test_a_broken_decode_fails_the_answers_in_it_and_frees_their_slots() -> None:
    bench = Bench()
    ids = [bench.add("abc"), bench.add("def")]
    bench.step((-3, 2))
    assert [(f.id, f.reason) for f in bench.of(wire.Failed)] == [(id_, "engine_error") for id_ in ids]
    bench.check_rest()


def test_a_prompt_that_is_alone_is_read_in_large_chunks_unless_every_bit_counts() -> None:
    for exact, chunk in ((True, wire.PREFILL_CHUNK), (False, wire.SINGLE_PROMPT_CHUNK)):
        bench = Bench(n_ctx=2000)
        bench.llama.exact = exact
        bench.add("a" * 1200, max_tokens=1)
        bench.step()
        assert [p.n_past for p in bench.of(wire.PrefillProgress)] == [chunk]
        assert bench.batcher.single_prompt is not exact
        bench.add("b", max_tokens=1)
        bench.step()
        assert not bench.batcher.single_prompt


def test_a_large_chunk_and_the_answers_beside_it_are_no_more_rows_than_a_decode_takes() -> None:
    bench = Bench(n_ctx=4000)
    bench.llama.exact = False
    bench.admission.latency = IterationLatency((0.5, 0.1, 1e-4, 0.0))  # slow answers leave much time to a prompt
    ids = [bench.add(prompt, max_tokens=30) for prompt in ("zz", "yes")]
    for _ in range(3):
        bench.step()
    assert all((s := bench.find(id_)) is not None and s.draw.n_drawn for id_ in ids)
    long = bench.add("a" * 1200, max_tokens=1)
    bench.step()
    assert [p.n_past for p in bench.of(wire.PrefillProgress) if p.id == long] == [N_BATCH - len(ids)]


def test_who_reads_faster_from_now_on_has_in_hand_what_was_there() -> None:
    bench = Bench(tick_s=0.01)
    id_ = bench.add("zz", pace_tps=2.0, max_tokens=30)
    for _ in range(8):
        bench.step()
    (s,) = bench.admission.resident
    now = bench.batcher.clock()
    in_hand = 2.0 * s.timeline.stock_s(now)
    assert in_hand > 2
    bench.batcher.pace(id_, 10.0)
    assert s.timeline.pace_tps == 10.0
    assert s.timeline.stock_s(now) * 10.0 == pytest.approx(in_hand, abs=1.0)
    bench.drain()
    bench.check_answer(id_)


class Chosen:
    """Lets those run whose names are in `who`."""

    def __init__(self, *who: str) -> None:
        self.who = set(who)

    def choose(self, jobs: Sequence[Any], capacity: Any, now: float) -> list[Any]:
        del capacity, now
        return [job for job in jobs if job.key in self.who]


def test_an_answer_that_has_begun_says_when_it_waits_for_others_and_when_it_goes_on() -> None:
    bench = Bench(n_cells=200)
    bench.admission.scheduler = scheduler = cast(Any, Chosen("r0", "r1", "r2"))
    for text in ("ghi", "foo"):  # about twenty tokens each
        bench.add(text)
    for _ in range(4):
        bench.step()
    scheduler.who = {"r0"}
    bench.add("qwe")
    for _ in range(3):
        bench.step()
    assert bench.of(wire.PauseChange) == [wire.PauseChange(id="r1", paused=True)], (
        "r2 has not begun: it waits for its first token"
    )
    scheduler.who = {"r0", "r1", "r2"}
    bench.step()
    assert bench.of(wire.PauseChange)[1:] == [wire.PauseChange(id="r1", paused=False)]
    bench.drain()
    assert len(bench.of(wire.PauseChange)) == 2


def test_an_answer_whose_grammar_takes_too_long_ends_alone() -> None:
    bench = Bench()
    bench.batcher.add(wire.Generate(id="slow", messages=[{"role": "user", "content": "ab"}], max_tokens=9))
    bench.batcher.add(wire.Generate(id="other", messages=[{"role": "user", "content": "ba"}], max_tokens=9))
    slow = bench.llama.samplers[0].meter = GrammarMeter(50_000, "root ::= a")
    bench.batcher.step()
    slow.add(MAX_TOKEN_S * 1.1)
    while bench.batcher.step():
        pass
    (failed,) = [m for m in bench.sent if isinstance(m, wire.Failed)]
    assert (failed.id, failed.param, failed.your_fault) == ("slow", "response_format", True)
    assert [m.id for m in bench.sent if isinstance(m, wire.Done)] == ["other"]
    assert all(sampler.closed for sampler in bench.llama.samplers)


def test_what_a_grammar_may_cost_grows_with_the_answer_and_the_vocabulary() -> None:
    def n_until_over(token_s: float, n_vocab: int = 50_000, words: str = "a") -> int:
        meter = GrammarMeter(n_vocab, f"a ::= b\nroot ::= {words}")
        for n in range(1, 1000):
            meter.add(token_s)
            if meter.over:
                return n
        return 1000

    assert n_until_over(MAX_MEAN_S) == 1000
    assert n_until_over(MAX_TOKEN_S * 1.01) == 1
    assert n_until_over(MAX_TOKEN_S * 1.01, 250_000) == 1000
    assert n_until_over(MAX_TOKEN_S * 4, words="a | " * 1000) > 10
    assert n_until_over(MAX_LIST_S * 1.01, 250_000, words="a | " * 1000) == 1
    nested = " | ".join(['"[" root "]"'] * 4)
    assert n_until_over(MAX_TOKEN_S * 1.01, words=f'{nested} | "x"\nenum ::= {"a | " * 1000}') == 1
    assert 5 < n_until_over(MAX_TOKEN_S * 0.9) < 30


def n_drawn(prompt: str) -> int:
    """Count the tokens of an answer without a limit, up to 20."""
    tokens = tokens_of(prompt)
    for n in range(20):
        if not (token := oracle(tokens)):
            return n
        tokens.append(token)
    return 20


def test_an_answer_rests_while_a_prompt_is_read_if_its_reader_has_seconds_of_text_and_only_then() -> None:
    bench = Bench(n_ctx=2000, tick_s=0.001)
    one, two = [prompt for prompt in map("z{:02d}".format, range(100)) if n_drawn(prompt) == 20][:2]
    reader, _ = bench.add(one, pace_tps=2.0, max_tokens=20), bench.add(two, max_tokens=20)
    for _ in range(12):
        bench.step()
    s, other = bench.admission.resident
    assert s.timeline.stock_s(bench.batcher.clock()) > RICH_S + 1
    bench.add("a" * 600, max_tokens=1)
    before = len(s.tokens), len(other.tokens)
    bench.step()
    assert (len(s.tokens), len(other.tokens)) == (before[0], before[1] + 1)
    bench.batcher.pace(reader, 50.0)  # who reads so fast has no second in hand any more
    bench.step()
    assert len(s.tokens) == before[0] + 1
    bench.drain()
    assert [d.reason for d in bench.of(wire.Done)] == ["length"] * 3
