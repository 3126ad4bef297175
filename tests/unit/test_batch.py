from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.batch import MAX_WAITING, Batcher
from disco_daemon.engine.llama import ABORTED, N_SEQ_MAX, NO_KV_SLOT

PIECES = (b"", b"a", b"b", b" ", b"\xe2", b"\x82\xac", b"ST", b"OP", b"x")  # token 0 ends an answer
N_CTX = 40


def oracle(tokens: Sequence[int]) -> int:
    """The next token after `tokens`: a model with perfect taste and one opinion."""
    return zlib.crc32(bytes(tokens)) % len(PIECES)


def tokens_of(text: str) -> list[int]:
    return [1 + ord(c) % 200 for c in text]


@dataclass
class FakeSampler:
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeLlama:
    """A KV cache of `n_ctx` cells that checks every position, and breaks as `faults` say: (return value, rows done)."""

    n_ctx: int = N_CTX
    faults: list[tuple[int, int]] = field(default_factory=list)
    cells: dict[int, list[int]] = field(default_factory=lambda: {slot: [] for slot in range(N_SEQ_MAX)})
    logits: dict[int, list[int]] = field(default_factory=dict)
    samplers: list[FakeSampler] = field(default_factory=list)

    def prompt_tokens(self, request: wire.Generate) -> list[int]:
        return tokens_of("".join(m["content"] for m in request.messages))

    tokenize = staticmethod(tokens_of)
    piece = staticmethod(PIECES.__getitem__)
    ends = staticmethod((0).__eq__)

    def sampler(self, request: wire.Generate) -> FakeSampler:
        self.samplers.append(FakeSampler())
        return self.samplers[-1]

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> int:
        assert rows
        self.logits = {}
        if sum(map(len, self.cells.values())) + len(rows) > self.n_ctx:
            return NO_KV_SLOT
        rc, n_done = self.faults.pop() if self.faults else (0, 0)
        for i, (token, position, slot, wanted) in enumerate(rows[: len(rows) if rc == 0 else n_done]):
            assert position == len(self.cells[slot]), "a row goes right behind what its sequence has"
            self.cells[slot].append(token)
            if wanted and rc == 0:
                self.logits[i] = list(self.cells[slot])
        return rc

    def sample(self, sampler: FakeSampler, row: int) -> int:
        assert not sampler.closed
        return oracle(self.logits[row])

    def forget(self, slot: int, from_pos: int = 0) -> None:
        del self.cells[slot][from_pos:]


def expected(request: wire.Generate, appended: str = "") -> tuple[str, str, int]:
    """Text, finish reason and number of tokens of an undisturbed answer."""
    tokens = tokens_of(request.messages[0]["content"] + request.answer_so_far + appended)
    answer: list[int] = []
    text, reason = "", "length"
    while len(tokens) + len(answer) < N_CTX and len(answer) != request.max_tokens:
        token = oracle(tokens + answer)
        if token == 0:
            reason = "stop"
            break
        answer.append(token)
        text = b"".join(PIECES[t] for t in answer).decode("utf-8", "replace")
        if hits := [text.find(s) for s in request.stop if s in text]:
            return text[: min(hits)], "stop", len(answer)
    half = bool(answer) and PIECES[answer[-1]] == b"\xe2"  # half a character is no text
    return text[: len(text) - half], reason, len(answer)


class Bench:
    """A batcher over a fake model, with all that it sent."""

    def __init__(self) -> None:
        self.llama = FakeLlama()
        self.sent: list[wire.Message] = []
        ticks = iter(range(10**9))
        self.batcher = Batcher(cast(Any, self.llama), cast(Any, self.sent.append), clock=lambda: float(next(ticks)))
        self.requests: dict[str, wire.Generate] = {}
        self.appended: dict[str, str] = {}
        self.shortened: set[str] = set()

    def add(self, prompt: str = "hello", **more: Any) -> str:
        request = wire.Generate(f"r{len(self.requests)}", [{"role": "user", "content": prompt}], **more)
        self.requests[request.id] = request
        self.batcher.add(request)
        return request.id

    def append(self, id_: str, text: str, *, go: bool) -> None:
        held = [s for s in (*self.batcher.running, *self.batcher.waiting) if s.request.id == id_ and s.held]
        self.batcher.append(wire.Append(id_, text, go))
        self.appended[id_] = self.appended.get(id_, "") + (text if held else "")
        if not held:
            assert self.sent.pop() == wire.Failed(id_, "not_held", "append to an answer that is not held", False)

    def step(self, fault: tuple[int, int] | None = None) -> bool:
        self.llama.faults = [fault] if fault else []
        n_sent = len(self.sent)
        busy = self.batcher.step()
        if fault and fault[0] == NO_KV_SLOT and not self.llama.faults:
            self.shortened |= {m.id for m in self.sent[n_sent:] if isinstance(m, wire.Done)}
        self.check()
        return busy

    def check(self) -> None:
        running = self.batcher.running
        owned = {s.slot: s.tokens[: s.n_past] for s in running}
        assert len(owned) == len(running) <= N_SEQ_MAX
        assert self.llama.cells == {slot: owned.get(slot, []) for slot in range(N_SEQ_MAX)}

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
        return "".join(p.text for p in self.of(wire.Piece) if p.id == id_)

    def check_answer(self, id_: str) -> None:
        request, done, text = self.requests[id_], self.done(id_), self.text(id_)
        whole, reason, n = expected(request, self.appended.get(id_, ""))
        assert sum(p.n_tokens for p in self.of(wire.Piece) if p.id == id_) <= done.n_completion
        if done.reason == "cancelled" or id_ in self.shortened:
            assert whole.startswith(text) or id_ in self.shortened  # the end of a shortened answer shows what was held
            assert done.n_completion <= n
            return
        assert (text, done.reason, done.n_completion) == (whole, reason, n)
        prompt = tokens_of(request.messages[0]["content"] + request.answer_so_far + self.appended.get(id_, ""))
        assert done.n_prompt == len(prompt) or len(prompt) >= N_CTX

    def check_rest(self) -> None:
        self.check()
        assert not (*self.batcher.running, *self.batcher.waiting)
        assert all(s.closed for s in self.llama.samplers)
        done, totals = self.of(wire.Done), self.batcher.totals
        assert totals.completion_tokens == sum(d.n_completion for d in done)
        assert totals.prompt_tokens == sum(d.n_prompt for d in done)
        assert self.of(wire.Failed) or totals.busy_s == pytest.approx(sum(d.busy_s for d in done))


prompts = st.text("abc", min_size=1, max_size=N_CTX - 2)
adds = st.fixed_dictionaries(
    {"prompt": prompts},
    optional={
        "answer_so_far": st.text("xy", max_size=12),
        "hold": st.booleans(),
        "max_tokens": st.integers(1, 12),
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
    st.tuples(st.just("append"), whom, st.text("pq", max_size=8), st.booleans()),
)


@settings(max_examples=400)
@given(st.lists(ops, max_size=40))
def test_whatever_happens_each_answer_is_what_the_model_says(script: list[tuple[Any, ...]]) -> None:
    bench = Bench()
    for op in script:
        match op:
            case "add", dict() as more:
                bench.add(**more)
            case "step", fault:
                bench.step(fault)
            case "cancel", int() as n:
                bench.batcher.cancel(f"r{n}")
            case "append", int() as n, str() as text, bool() as go:
                bench.append(f"r{n}", text, go=go)
        bench.check()
    for s in (*bench.batcher.running, *bench.batcher.waiting):
        if s.held:
            bench.append(s.request.id, "", go=True)
    bench.drain()
    for id_ in bench.requests:
        bench.check_answer(id_)
    bench.check_rest()


def test_a_held_answer_waits_with_its_prompt_computed_until_it_may_go() -> None:
    bench = Bench()
    id_ = bench.add("abc", hold=True)
    bench.drain()
    (held,) = bench.batcher.running
    assert held.n_past == 2, "all but the last token, whose logits are wanted later"
    bench.append(id_, "de", go=False)
    bench.append(id_, "f", go=True)
    bench.drain()
    bench.check_answer(id_)
    bench.append(id_, "too late", go=True)
    bench.check_rest()


def test_an_engine_that_can_compute_nothing_rests() -> None:
    bench = Bench()
    held = bench.add("a" * (N_CTX - 5), hold=True)
    bench.drain()
    waiting = bench.add("b" * 10)
    assert bench.step() is False
    bench.batcher.cancel(held)
    bench.drain()
    bench.check_answer(waiting)


def test_what_was_aborted_is_computed_again_and_a_cancelled_prompt_is_billed_for_what_was_done() -> None:
    bench = Bench()
    id_ = bench.add("abcdef", max_tokens=1)
    bench.step((ABORTED, 3))
    assert bench.sent == []
    bench.batcher.cancel(id_)
    assert bench.done(id_) == wire.Done(id_, "cancelled", 0, 0, 1.0)
    bench.check_rest()


def test_progress_tells_how_far_a_long_prompt_is() -> None:
    bench, n = Bench(), wire.PREFILL_CHUNK
    bench.llama.n_ctx = 1000
    bench.add("a" * (2 * n + 1), max_tokens=1)
    bench.drain()
    assert [(p.n_past, p.n_prompt) for p in bench.of(wire.Progress)] == [(n, 2 * n + 1), (2 * n, 2 * n + 1)]


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


def test_an_answer_so_far_that_fills_the_context_is_at_its_length() -> None:
    bench = Bench()
    assert bench.done(bench.add("abc", answer_so_far="x" * N_CTX)).reason == "length"
    held = bench.add("abc", hold=True)
    bench.append(held, "x" * N_CTX, go=False)
    assert bench.done(held).reason == "length"
    bench.check_rest()


def test_a_broken_decode_fails_the_answers_in_it_and_frees_their_slots() -> None:
    bench = Bench()
    ids = [bench.add("abc"), bench.add("def")]
    bench.step((-3, 2))
    assert [(f.id, f.reason) for f in bench.of(wire.Failed)] == [(id_, "engine_error") for id_ in ids]
    bench.check_rest()
