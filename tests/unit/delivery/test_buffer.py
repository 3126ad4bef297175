from __future__ import annotations

import itertools
import math

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disco_daemon.delivery.buffer import MAX_BUFFERED, TokenBuffer
from disco_daemon.delivery.held_tokens import MAX_CLUSTER
from disco_daemon.types import Delivery, Delta, Token

PACE = 4.8
STEP = 1 / PACE
NEVER_OPEN = frozenset("a z漢é가\n")
PIECES = [
    "a", " z", "漢", "é", "가", "\n", "", "a ก", "क्", "ष", "ि", "ก", "ำ", "👩", "👍🏽", "🏽", "\u200d", "🇩", "🇪🇩", "\r",
    "ᄀ", "ᅡ", "ᆨ", "م", "\u064e", "❤", "\ufe0f",
]  # fmt: skip

pieces = st.sampled_from(PIECES)
paces = st.floats(0.5, 100)


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def count_of(tokens: list[Token]) -> int:
    return sum(token.n_tokens for token in tokens)


def words(n: int) -> list[Token]:
    return [Token(f"w{i} ", ids=(i,)) for i in range(n)]


def play(buffer: TokenBuffer, puts: list[tuple[float, Token]], late: float = 0.0) -> list[tuple[float, Token]]:
    """All releases with their times, when each timer fires `late` s after it is due."""
    out: list[tuple[float, Token]] = []
    pending = list(puts)
    while pending or buffer.due_at is not None:
        due = math.inf if buffer.due_at is None else buffer.due_at + late
        if pending and pending[0][0] <= due:
            now, token = pending.pop(0)
            out += [(now, t) for t in buffer.put(token, now)]
        else:
            out += [(due, t) for t in buffer.release(due)]
    return out


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done in whatever order, the reader gets a prefix of what was put, and at the end all of it."""

    @initialize(delivery=st.sampled_from(Delivery), pace=paces, reserve=st.integers(0, 6))
    def begin(self, delivery: Delivery, pace: float, reserve: int) -> None:
        self.buffer = TokenBuffer(delivery, pace)
        self.buffer.reserve = reserve
        self.now = 0.0
        self.kept = self.shown = self.before_mark = ""
        self.n_kept = self.n_shown = 0
        self.ids: list[int] = []
        self.shown_ids: list[int] = []
        self.borders: list[int] = []  # where a release ended that was not forced
        self.marked = False
        self.next_id = itertools.count()

    def take(self, out: list[Token], *, forced: bool = False) -> None:
        self.shown += text_of(out)
        self.n_shown += count_of(out)
        self.shown_ids += [i for token in out for i in token.ids]
        if text_of(out) and not forced:
            self.borders.append(len(self.shown))

    @rule(wait=st.floats(0, 1))
    def time_passes(self, wait: float) -> None:
        self.now += wait

    @rule(text=pieces, n=st.sampled_from([1, 1, 1, 0, 2, 5]))
    def put(self, text: str, n: int) -> None:
        i = next(self.next_id)
        self.kept += text
        self.n_kept += n
        self.ids.append(i)
        self.take(self.buffer.put(Token(text, n, ids=(i,)), self.now))

    @rule(text=pieces)
    def put_more_than_text(self, text: str) -> None:
        token = Token(text, delta=Delta())
        self.kept += text
        self.n_kept += 1
        out = self.buffer.put(token, self.now)
        assert out[-1] is token
        self.take(out, forced=True)
        assert self.buffer.n_held == 0

    @rule()
    def release(self) -> None:
        self.take(self.buffer.release(self.now))
        assert self.buffer.due_at is None or self.buffer.due_at > self.now

    @rule()
    def mark(self) -> None:
        self.buffer.mark()
        self.before_mark, self.marked = self.kept, True

    @rule()
    def retract(self) -> None:
        taken = self.buffer.retract()
        if not self.marked:
            assert taken == []
            return
        text = text_of(taken)
        assert self.kept.endswith(text)
        self.kept = self.kept.removesuffix(text) if text else self.kept
        assert self.kept.startswith(self.before_mark)
        assert self.kept == max(self.before_mark, self.shown, key=len), "all that the reader has not got"
        ids = [i for token in taken for i in token.ids]
        assert self.ids[len(self.ids) - len(ids) :] == ids
        del self.ids[len(self.ids) - len(ids) :]
        self.n_kept -= count_of(taken)
        self.marked = False
        # What showed that the last cluster was whole may have been taken back, and something else may follow now.
        self.borders = [at for at in self.borders if at != len(self.shown)]

    @rule()
    def adopt(self) -> None:
        self.buffer.adopt()
        self.marked = False

    @rule()
    def flush(self) -> None:
        self.take(self.buffer.flush(self.now), forced=True)
        assert (self.shown, self.n_shown, self.shown_ids) == (self.kept, self.n_kept, self.ids)
        assert (self.buffer.n_held, self.buffer.due_at) == (0, None)

    @rule(pace=paces)
    def set_pace(self, pace: float) -> None:
        self.buffer.set_pace(pace, self.now)

    @rule(delivery=st.sampled_from(Delivery))
    def set_delivery(self, delivery: Delivery) -> None:
        self.buffer.set_delivery(delivery, self.now)

    @rule(n=st.integers(0, 6))
    def set_reserve(self, n: int) -> None:
        self.buffer.reserve = n

    @precondition(lambda self: self.marked)
    @invariant()
    def the_released_tail_is_known(self) -> None:
        assert self.buffer.tail_released == self.shown[len(self.before_mark) :]

    @invariant()
    def what_is_shown_is_a_prefix(self) -> None:
        assert self.kept.startswith(self.shown)
        assert self.ids[: len(self.shown_ids)] == self.shown_ids
        assert self.buffer.n_released == self.n_shown
        assert self.buffer.n_released + self.buffer.n_held == self.n_kept
        assert len(self.buffer.puts) == self.n_kept, "what was taken back is not among them"
        assert 0 <= self.buffer.n_tail <= self.buffer.n_held
        assert self.buffer.level >= 0

    @invariant()
    def clusters_are_whole(self) -> None:
        borders = {m.end() for m in regex.finditer(r"\X", self.kept)}
        for at in self.borders:
            assert not at or at in borders or self.kept[at - 1] in NEVER_OPEN, (self.kept, at)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.flush()
            assert list(self.buffer.arrivals) == sorted(self.buffer.arrivals)
            assert len(self.buffer.arrivals) == self.n_kept
            assert all(put <= shown for put, shown in zip(self.buffer.puts, self.buffer.arrivals, strict=True))
            self.shown.encode()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# --- pacing ------------------------------------------------------------------------------------------------------

gaps = st.lists(st.floats(0, 1), min_size=1, max_size=60)


def generated(gaps: list[float]) -> list[tuple[float, Token]]:
    return list(zip(itertools.accumulate(gaps), words(len(gaps)), strict=True))


@given(gaps, paces)
def test_paced_tokens_come_when_generated_or_a_step_after_the_one_before(gaps: list[float], pace: float) -> None:
    puts = generated(gaps)
    out = play(TokenBuffer(Delivery.PACED, pace), puts)
    expected: list[float] = []
    for at, _ in puts:
        expected.append(max(at, expected[-1] + 1 / pace) if expected else at)
    assert [at for at, _ in out] == pytest.approx(expected, abs=1e-9)
    assert [token for _, token in out] == [token for _, token in puts]


@given(gaps, paces, st.floats(0, 0.5))
def test_late_timers_never_add_up(gaps: list[float], pace: float, late: float) -> None:
    puts = generated(gaps)
    prompt = [at for at, _ in play(TokenBuffer(Delivery.PACED, pace), puts)]
    tardy = [at for at, _ in play(TokenBuffer(Delivery.PACED, pace), puts, late)]
    assert all(p - 1e-9 <= t <= p + late + 1e-9 for p, t in zip(prompt, tardy, strict=True))


@given(gaps, paces, st.floats(0, 0.5))
def test_no_more_is_released_than_the_pace_allows(gaps: list[float], pace: float, late: float) -> None:
    at = [t for t, _ in play(TokenBuffer(Delivery.PACED, pace), generated(gaps), late)]
    for i, t in enumerate(at):
        assert i <= (t - at[0]) * pace + 1e-6


def test_a_grid_of_a_thousand_tokens_does_not_drift() -> None:
    out = play(TokenBuffer(Delivery.PACED, PACE), [(0.0, token) for token in words(1000)], late=0.004)
    assert out[-1][0] == pytest.approx(999 / PACE + 0.004, abs=1e-9)


def test_the_grid_begins_anew_where_the_buffer_ran_empty() -> None:
    puts = [(at, token) for at, token in zip([0.0, 0.0, 10.0, 10.0], words(4), strict=True)]
    assert [at for at, _ in play(TokenBuffer(Delivery.PACED, PACE), puts)] == pytest.approx([0, STEP, 10, 10 + STEP])


def test_several_tokens_in_one_take_as_many_steps() -> None:
    puts = [(0.0, Token("one two three ", 3)), (0.0, Token("four"))]
    buffer = TokenBuffer(Delivery.PACED, PACE)
    out = play(buffer, puts)
    assert [token.text for _, token in out] == ["one ", "two ", "three ", "four"]
    assert [at for at, _ in out] == pytest.approx([i * STEP for i in range(4)])
    assert list(buffer.arrivals) == pytest.approx([i * STEP for i in range(4)])


def test_what_cannot_be_cut_between_words_takes_as_many_steps_as_it_has_tokens() -> None:
    call = Token("", 2, Delta())
    for whole in (Token("Donaudampfschiff ", 3, ids=(1, 2, 3)), Token("👍🏽 ", 3)):
        buffer = TokenBuffer(Delivery.PACED, PACE)
        assert play(buffer, [(0.0, whole), (0.0, Token("four"))]) == [(0.0, whole), (3 * STEP, Token("four"))]
    assert TokenBuffer(Delivery.PACED, PACE).put(call, 0.0) == [call]


def test_a_pace_of_4_8_tokens_a_second_holds_for_chunks_of_20() -> None:
    chunks = [Token("".join(f"w{i} " for i in range(20 * c, 20 * c + 20)), 20, ids=(c,)) for c in range(5)]
    buffer = TokenBuffer(Delivery.PACED, 4.8)
    out = play(buffer, [(0.1 * i, chunk) for i, chunk in enumerate(chunks)])
    assert "".join(token.text for _, token in out) == "".join(chunk.text for chunk in chunks)
    assert [i for _, token in out for i in token.ids] == [0, 1, 2, 3, 4]
    n = 0
    for at, token in out:
        n += token.n_tokens
        assert n <= 1 + at * 4.8 + 1e-6
    assert n == len(buffer.arrivals) == 100


def test_without_a_pace_a_chunk_stays_whole() -> None:
    chunk = Token("one two three ", 3)
    for delivery in (Delivery.OFF, Delivery.RESERVE):
        assert TokenBuffer(delivery, PACE).put(chunk, 0.0) == [chunk]


@pytest.mark.parametrize("delivery", Delivery)
def test_the_first_token_is_never_delayed(delivery: Delivery) -> None:
    buffer = TokenBuffer(delivery, 0.01)
    buffer.reserve = 50
    token = Token("Hello")
    assert buffer.put(token, 7.0) == [token]


def test_a_slower_pace_holds_from_the_next_token_on() -> None:
    buffer = TokenBuffer(Delivery.PACED, 10.0)
    for token in words(4):
        buffer.put(token, 0.0)
    assert buffer.due_at == pytest.approx(0.1)
    buffer.set_pace(2.0, 0.05)
    assert buffer.due_at == pytest.approx(0.5)


def test_a_faster_pace_does_not_catch_up_with_the_past() -> None:
    buffer = TokenBuffer(Delivery.PACED, 0.1)
    for token in words(50):
        buffer.put(token, 0.0)
    buffer.set_pace(10.0, 8.0)
    assert buffer.due_at == 8.0
    assert len(buffer.release(8.0)) == 1
    assert buffer.due_at == pytest.approx(8.1)


def test_from_off_to_paced_and_back() -> None:
    buffer = TokenBuffer(Delivery.OFF, 1.0)
    one, two, three, four = words(4)
    assert buffer.put(one, 0.0) == [one]
    buffer.set_delivery(Delivery.PACED, 0.2)
    assert buffer.put(two, 0.3) == []
    assert buffer.due_at == 1.0
    assert buffer.release(1.0) == [two]
    assert buffer.put(three, 1.1) == []
    buffer.set_delivery(Delivery.OFF, 1.2)
    assert buffer.due_at is not None
    assert buffer.due_at <= 1.2
    assert buffer.release(1.2) == [three]
    assert buffer.put(four, 1.2) == [four]


@pytest.mark.parametrize("pace", [0.0, -1.0, math.nan, math.inf])
def test_a_pace_that_is_none_is_refused(pace: float) -> None:
    with pytest.raises(ValueError, match="pace"):
        TokenBuffer(Delivery.PACED, pace)
    buffer = TokenBuffer(Delivery.PACED, 1.0)
    with pytest.raises(ValueError, match="pace"):
        buffer.set_pace(pace, 0.0)


# --- the reserve and the tail ------------------------------------------------------------------------------------


def test_off_and_an_empty_reserve_pass_everything_at_once() -> None:
    for delivery in (Delivery.OFF, Delivery.RESERVE):
        buffer = TokenBuffer(delivery, PACE)
        for token in words(20):
            assert buffer.put(token, 0.0) == [token]
        assert buffer.due_at is None


def test_off_passes_the_tail_too() -> None:
    buffer = TokenBuffer(Delivery.OFF, PACE)
    one, two, three = words(3)
    buffer.put(one, 0.0)
    buffer.mark()
    assert buffer.put(two, 0.0) == [two]
    assert buffer.put(three, 0.0) == [three]
    assert buffer.tail_released == two.text + three.text
    assert buffer.retract() == []


def test_the_reserve_is_the_newest_tokens() -> None:
    buffer = TokenBuffer(Delivery.RESERVE, PACE)
    buffer.reserve = 3
    tokens = words(10)
    assert [t for token in tokens for t in buffer.put(token, 0.0)] == tokens[:7]
    assert (buffer.n_released, buffer.n_held, buffer.due_at) == (7, 3, None)
    assert buffer.level == pytest.approx(3 * STEP)
    buffer.reserve = 1
    assert buffer.due_at == 0.0, "call now"
    assert buffer.release(0.1) == tokens[7:9]
    assert buffer.flush(0.2) == tokens[9:]


def reserve_of(n: int, n_reserve: int) -> tuple[TokenBuffer, list[Token]]:
    """A buffer in RESERVE that got `n` tokens at time 0, and those it still holds."""
    buffer = TokenBuffer(Delivery.RESERVE, PACE)
    buffer.reserve = n_reserve
    tokens = words(n)
    for token in tokens:
        buffer.put(token, 0.0)
    return buffer, tokens[n - n_reserve :]


def test_during_a_handoff_the_reserve_goes_at_pace_and_the_tail_stays() -> None:
    buffer, held = reserve_of(5, 2)
    buffer.mark()
    tail = words(4)
    for token in tail:
        assert buffer.put(token, 0.1) == []
    assert buffer.n_tail == 4
    assert [buffer.release(i * STEP + 1e-9) for i in (1, 2)] == [[held[0]], [held[1]]]
    assert buffer.tail_released == ""
    assert buffer.retract() == tail
    target = Token("target")
    buffer.reserve = 0
    assert buffer.put(target, 0.5) == [target]


def test_the_tail_goes_at_pace_when_nothing_else_is_left() -> None:
    buffer, held = reserve_of(3, 1)
    buffer.mark()
    tail = words(5)
    out = play(buffer, [(0.0, token) for token in tail[:2]])
    assert [token for _, token in out] == [*held, *tail[:2]]
    assert [at for at, _ in out] == pytest.approx([STEP, 2 * STEP, 3 * STEP])
    buffer.put(tail[2], 0.7)
    assert buffer.tail_released == text_of(tail[:2])
    assert buffer.retract() == [tail[2]]
    assert buffer.tail_released == ""


def test_an_adopted_tail_is_text_like_any_other() -> None:
    buffer, held = reserve_of(3, 2)
    buffer.mark()
    tail = words(3)
    for token in tail:
        buffer.put(token, 0.0)
    buffer.adopt()
    assert buffer.n_tail == 0
    assert buffer.release(0.01) == [*held, *tail][:3]
    assert buffer.retract() == []


def test_after_a_stall_the_reserve_is_let_go_at_pace_and_not_all_at_once() -> None:
    buffer, held = reserve_of(6, 4)
    buffer.mark()
    assert buffer.release(30.0) == held[:1]
    assert buffer.due_at == pytest.approx(30.0 + STEP)


def test_a_mark_before_the_first_token_delays_nothing() -> None:
    buffer = TokenBuffer(Delivery.RESERVE, PACE)
    buffer.mark()
    one, two = words(2)
    assert buffer.put(one, 5.0) == [one]
    assert buffer.put(two, 5.0) == []
    assert buffer.due_at == pytest.approx(5.0 + STEP)


def test_a_tool_call_flushes_what_is_before_it() -> None:
    buffer, held = reserve_of(5, 3)
    call = Token("", delta=Delta())
    assert buffer.put(call, 0.0) == [*held, call]


def test_no_more_is_held_than_the_bound_and_the_oldest_pass() -> None:
    buffer = TokenBuffer(Delivery.PACED, 0.001)
    tokens = words(MAX_BUFFERED + 10)
    out = [t for token in tokens for t in buffer.put(token, 0.0)]
    assert buffer.n_held == MAX_BUFFERED
    assert out == tokens[:10]
    assert buffer.due_at == 1000.0, "what is forced out takes no time of the grid"


# --- clusters ----------------------------------------------------------------------------------------------------


def test_a_cluster_waits_for_the_token_that_may_extend_it() -> None:
    buffer = TokenBuffer(Delivery.OFF, PACE)
    assert text_of(buffer.put(Token("ok 👍", ids=(1,)), 0.0)) == "ok "
    assert (buffer.n_released, buffer.n_held, buffer.due_at) == (0, 1, None)
    assert buffer.put(Token("🏽", ids=(2,)), 0.1) == []
    assert buffer.put(Token("!", ids=(3,)), 0.2) == [Token("👍🏽", 2, ids=(1, 2)), Token("!", ids=(3,))]
    assert list(buffer.arrivals) == [0.2, 0.2, 0.2]


def test_what_is_there_already_goes_together() -> None:
    buffer = TokenBuffer(Delivery.PACED, PACE)
    for text in ("a", "👩", "\u200d", "👧", "b"):
        buffer.put(Token(text), 0.0)
    assert buffer.release(STEP) == [Token("👩\u200d👧", 3)]
    assert buffer.due_at == pytest.approx(4 * STEP), "three tokens take three steps"


def test_the_tail_does_not_tell_how_the_text_before_it_goes_on() -> None:
    buffer = TokenBuffer(Delivery.RESERVE, PACE)
    buffer.put(Token("a"), 0.0)
    buffer.put(Token("👍"), 0.0)
    buffer.mark()
    buffer.put(Token("b"), 0.0)
    assert [text_of(buffer.retract()), buffer.n_held] == ["b", 1]
    assert text_of(buffer.put(Token("🏽"), 0.0) + buffer.put(Token("c"), 0.0)) == "👍🏽c"


def test_a_cluster_across_the_mark_can_be_taken_apart_again() -> None:
    buffer = TokenBuffer(Delivery.RESERVE, PACE)
    buffer.put(Token("👍", ids=(1,)), 0.0)
    buffer.mark()
    buffer.put(Token("🏽", ids=(2,)), 0.0)
    assert buffer.retract() == [Token("🏽", ids=(2,))]
    assert buffer.flush(0.0) == [Token("👍", ids=(1,))]


def test_marks_without_end_are_neither_held_for_ever_nor_slow() -> None:
    buffer = TokenBuffer(Delivery.OFF, PACE)
    for _ in range(500):
        buffer.put(Token("\u0e4d\u0301"), 0.0)
        assert buffer.n_held <= MAX_CLUSTER
    assert buffer.n_released > 400
