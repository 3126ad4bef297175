from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.serve.sequence import Given
from disco_daemon.engine.serve.sequence import Sequence as Sequence_
from disco_daemon.engine.speculation.prompt_lookup import LEAST, LONGEST, PRIOR, Chance, PromptLookup
from disco_daemon.engine.speculation.speculate import (
    CHEAPEST,
    ENOUGH_S,
    MAX_BESIDE,
    MAX_GUESSED,
    PLAIN_EVERY,
    SIZES,
    Option,
    Speculator,
    n_expected,
)
from disco_daemon.scheduler.latency import IterationLatency, IterationLoad
from disco_daemon.scheduler.timeline import Timeline
from tests.unit.engine.test_batch import N_CTX, Bench, FakeLlama, FakeSampler, ops, oracle, play

PLAIN_S = 0.010  # an iteration of one answer


# --- prompt lookup ---------------------------------------------------------------------------------------------------


def longest_match(tokens: Sequence[int]) -> tuple[int, int]:
    """Length of the longest end that stands earlier in the text, up to LONGEST, and the newest place behind it."""
    best = (0, 0)
    for place in range(LEAST, len(tokens)):
        run = 0
        while run < min(LONGEST, place) and tokens[place - run - 1] == tokens[len(tokens) - run - 1]:
            run += 1
        if run >= LEAST:
            best = max(best, (run, place))
    return best


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 20))
def test_a_guess_is_what_followed_the_longest_match(tokens: list[int], n: int) -> None:
    lookup = PromptLookup(tokens)
    run, place = longest_match(tokens)
    guess = lookup.guess(n)
    assert bool(guess) == bool(lookup.chance) == bool(run)
    if run:
        text = [*tokens, *guess]
        assert len(guess) == n
        assert guess == text[place : place + n], "what overtakes the end of the text repeats the guess"


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_a_text_in_pieces_is_followed_as_one_token_at_a_time(tokens: list[int], cuts: list[int]) -> None:
    in_pieces, one_by_one = PromptLookup(tokens[:5]), PromptLookup(tokens[:5])
    for end in (*sorted(cuts), len(tokens)):
        in_pieces.follow(tokens[:end])
    for end in range(len(tokens) + 1):
        one_by_one.follow(tokens[:end])
    assert (in_pieces.guess(9), in_pieces.chance) == (one_by_one.guess(9), one_by_one.chance)


def test_a_guess_that_turns_out_right_is_gone_on_with_and_trusted_more() -> None:
    text = list(range(30))
    lookup = PromptLookup([*text, 0, 1])
    assert lookup.guess(3) == [2, 3, 4]
    assert lookup.chance == PRIOR[0]
    lookup.follow([*text, *range(20)])
    assert lookup.guess(3) == [20, 21, 22]
    assert lookup.chance > PRIOR[-1]


def test_guesses_that_turn_out_wrong_are_trusted_less() -> None:
    tokens = [1, 2, 3]
    lookup = PromptLookup(tokens)
    for other in range(4, 60):
        tokens += [1, 2, other]
        lookup.follow(tokens)
    lookup.follow([*tokens, 1, 2])
    assert 0 < lookup.chance < PRIOR[0] / 5


def test_behind_a_wrong_guess_nothing_is_learned() -> None:
    run, one_by_one = Chance(0.5), Chance(0.5)
    run.observe_run(2, 7)
    for right in (True, True, False):
        one_by_one.observe(right=right)
    assert run.value == one_by_one.value
    run.observe_run(3, 3)
    for _ in range(3):
        one_by_one.observe(right=True)
    assert run.value == one_by_one.value


# --- what pays -------------------------------------------------------------------------------------------------------


def test_expected_is_what_a_simulation_says() -> None:
    rng = random.Random(1)
    n = 20_000
    for chance in (0.0, 0.3, 0.9):
        total = sum(next((i for i in range(7) if rng.random() >= chance), 7) for _ in range(n))
        assert n_expected(chance, 7) == pytest.approx(total / n, abs=0.06)
    assert n_expected(1.0, 7) == 7


class Scene:
    """A speculator with answers to guess for, on a machine where a row of a guess takes `row_s`."""

    def __init__(self, row_s: float, n_cells: int = 4000) -> None:
        self.bench = Bench(n_ctx=4000, n_cells=n_cells)
        self.row_s = row_s
        self.latency = IterationLatency((0.8 * PLAIN_S, 0.2 * PLAIN_S, 0.1 * PLAIN_S, 0.0))
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        self.speculator = Speculator(cast(Any, self.bench.llama), self.latency, self.bench.cells, clock=clock)
        self.n = 0

    def answer(self, tokens: Sequence[int], **more: Any) -> Sequence_:
        request = wire.Generate(id=f"r{self.n}", messages=[], **more)
        timeline = Timeline(0.0, 1.0, more.get("pace_tps") or 100.0)
        given = Given(prompt=list(tokens), text="", tokens=[], exact=True, n_first=0)
        return Sequence_(request=request, given=given, timeline=timeline, waiting_since=None, tokens=list(tokens))

    def drafts(self, *answers: Sequence_) -> dict[Sequence_, list[int]]:
        """What is guessed in the next iteration, which is then over."""
        drafts = self.speculator.drafts(answers, self.n)
        self.n += 1
        n_rows = sum(map(len, drafts.values()))
        took_s = self.latency.predict(len(answers)) + n_rows * self.row_s
        if drafts:
            self.speculator.observe(IterationLoad(len(answers), 0, 0), map(len, drafts.values()), took_s)
        return drafts


def copying(n: int = 100) -> list[int]:
    """A text that repeats itself in its second half."""
    return [*range(n), *range(n // 2)]


def share_drafted(scene: Scene, grow: Callable[[list[int]], int], n: int = 300) -> tuple[float, float]:
    """Of `n` iterations of one answer, the share with a guess, and the tokens that one yields in the time of another.

    `grow` says which token follows a text.
    """
    s, n_drafted, n_tokens, took_s = scene.answer(copying()), 0, 0, 0.0
    while scene.n < n:
        draft = scene.drafts(s).get(s, [])
        n_drafted += bool(draft)
        took_s += PLAIN_S + len(draft) * scene.row_s
        n_before = len(s.tokens)
        for guessed in (*draft, None):
            s.tokens.append(grow(s.tokens))
            if s.tokens[-1] != guessed:
                break
        n_tokens += len(s.tokens) - n_before
        if draft:
            scene.speculator.judge(s, len(s.tokens) - n_before - 1, len(draft))
    return n_drafted / n, n_tokens / (took_s / PLAIN_S)


def test_a_copy_is_guessed_where_rows_are_cheap() -> None:
    share, gain = share_drafted(Scene(0.1 * PLAIN_S), lambda tokens: tokens[-100], n=200)
    assert share > 0.9
    assert gain > 4


def test_a_copy_is_not_guessed_where_rows_cost_as_much_as_answers() -> None:
    share, gain = share_drafted(Scene(1.2 * PLAIN_S), lambda tokens: tokens[-100], n=1000)
    assert share < 0.05
    assert gain > 0.95


def test_what_is_hardly_ever_right_is_hardly_ever_guessed() -> None:
    rng = random.Random(2)
    share, gain = share_drafted(Scene(0.2 * PLAIN_S), lambda _: rng.randrange(4), n=1000)
    assert share < 0.2
    assert gain > 0.95


def test_where_rows_have_become_cheap_a_likely_guess_is_tried_again() -> None:
    scene = Scene(1.2 * PLAIN_S)
    share_drafted(scene, lambda tokens: tokens[-100], n=200)
    scene.row_s = 0.05 * PLAIN_S
    share_drafted(scene, lambda tokens: tokens[-100], n=5000)
    at_last, _ = share_drafted(scene, lambda tokens: tokens[-100], n=5200)
    assert at_last * 5200 > 180


def test_what_promises_more_than_it_keeps_is_trusted_less_and_tried_again_later() -> None:
    scene = Scene(0.5 * PLAIN_S)
    s = scene.answer(copying())
    for i in range(50, 80):
        s.tokens.append(i)
        if draft := scene.drafts(s).get(s, []):
            scene.speculator.judge(s, 0, len(draft))  # as if nothing of it had been right, though look-ups are
    disappointed = scene.speculator.trust
    assert disappointed < 0.6
    n_later = 0
    for _ in range(2000):
        n_later += bool(draft := scene.drafts(s).get(s, []))
        if draft:
            scene.speculator.judge(s, len(draft), len(draft))
    assert n_later
    assert scene.speculator.trust > 0.8


def test_one_slow_iteration_is_not_taken_for_what_rows_cost() -> None:
    scene = Scene(0.1 * PLAIN_S)
    for _ in range(20):
        scene.drafts(scene.answer(copying()))
    before = scene.speculator.cost_s(SIZES[-1])
    scene.speculator.observe(IterationLoad(1, 0, 0), [SIZES[-1]], 1.0)
    assert scene.speculator.cost_s(SIZES[-1]) < 6 * before


def test_now_and_then_an_iteration_is_without_guesses() -> None:
    scene = Scene(0.01 * PLAIN_S)
    plain = [not scene.drafts(scene.answer(copying())) for _ in range(2 * PLAIN_EVERY)]
    assert [i for i, none in enumerate(plain) if none] == [PLAIN_EVERY - 1, 2 * PLAIN_EVERY - 1]


def test_readers_who_have_enough_in_hand_and_crowds_are_not_guessed_for() -> None:
    scene = Scene(0.0)
    reader = scene.answer(copying(), pace_tps=5.0)
    assert scene.drafts(reader)
    reader.timeline.token(0.0, int(5 * ENOUGH_S) + 1)
    assert not scene.drafts(reader)
    scene.now = 1.0
    assert scene.drafts(reader), "it has been read"
    few = [scene.answer(copying()) for _ in range(MAX_BESIDE)]
    drafts = scene.drafts(*few)
    assert 0 < sum(map(len, drafts.values())) <= MAX_GUESSED
    assert not scene.drafts(*few, scene.answer(copying()))


def test_no_more_is_guessed_than_the_answer_may_have() -> None:
    scene = Scene(0.0)
    scene.speculator.costs = {size: (CHEAPEST * size, 1) for size in SIZES}
    for limit, longest in ((1, 0), (SIZES[0], 0), (SIZES[0] + 1, SIZES[0]), (SIZES[1] + 3, SIZES[1])):
        s = scene.answer(copying(), max_tokens=limit)
        assert max(map(len, scene.drafts(s).values()), default=0) == longest
    near_the_end = scene.answer(copying(2670)[: 4000 - SIZES[0] - 1])
    assert [len(d) for d in scene.drafts(near_the_end).values()] == [SIZES[0]]


def test_with_an_adapter_nothing_is_guessed_where_every_bit_counts() -> None:
    scene = Scene(0.0)
    assert not scene.drafts(scene.answer(copying(), adapter="legal"))
    scene.bench.llama.exact = False
    assert scene.drafts(scene.answer(copying(), adapter="legal"))


def test_a_guess_takes_no_cell_that_an_answer_needs() -> None:
    scene = Scene(0.0, n_cells=160)
    taken = scene.bench.cells.take(list(range(150)))
    assert taken is not None
    drafts = scene.drafts(scene.answer(copying()))
    assert 0 < max(map(len, drafts.values())) <= 10 - 2


# --- in the batcher --------------------------------------------------------------------------------------------------


@dataclass
class Prophet:
    """A draft model that knows the answer, and says something else now and then."""

    rng: random.Random
    wrong: float
    token_s: float = 0.0

    def draft(self, key: str, tokens: Sequence[int], n: int) -> list[int]:
        text = list(tokens)
        for _ in range(self.rng.randint(0, n)):
            text.append(7 if self.rng.random() < self.wrong else oracle(text))
        return text[len(tokens) :]


class Eager(Speculator):
    """Guesses whenever it can: rows cost nothing."""

    def cost_s(self, size: int) -> float:
        return 0.0

    def observe(self, load: IterationLoad, sizes: Any, took_s: float) -> None:
        assert load.n_decode
        assert took_s > 0
        assert not load.n_prefill
        assert all(0 < n <= SIZES[-1] for n in sizes)


def eager(bench: Bench, seed: int, wrong: float) -> Eager:
    prophet = Prophet(random.Random(seed), wrong)
    latency = bench.admission.latency
    bench.batcher.speculator = Eager(cast(Any, bench.llama), latency, bench.cells, prophet, bench.batcher.clock)
    return bench.batcher.speculator


@settings(max_examples=300)
@given(
    st.lists(ops, max_size=40),
    st.sampled_from(["fcfs", "andes", "round-robin"]),
    st.sampled_from([N_CTX, 2 * N_CTX]),
    st.sampled_from([1, 10**9]),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_whatever_is_guessed_each_answer_is_what_the_model_says(
    script: list[tuple[Any, ...]], scheduler: str, n_cells: int, bytes_per_token: int, seed: int, wrong: float
) -> None:
    bench = Bench(scheduler, n_cells=n_cells, tick_s=0.05)
    bench.llama.bytes_per_token = bytes_per_token
    eager(bench, seed, wrong)
    play(bench, script)


def answer_of(seed: int, wrong: float | None) -> tuple[str, wire.Done, Bench]:
    bench = Bench(n_ctx=400)
    speculator = eager(bench, seed, wrong) if wrong is not None else None
    id_ = bench.add(f"hello {seed}", max_tokens=60)
    bench.drain()
    bench.check_rest()
    assert speculator is None or 0 <= speculator.n_accepted <= speculator.n_drafted
    return bench.text(id_), bench.done(id_), bench


def test_right_guesses_save_iterations_and_all_counts_are_the_same() -> None:
    n_saved = 0
    for seed in range(30):
        text, done, plain = answer_of(seed, None)
        for wrong in (0.0, 0.5):
            same, as_well, guessed = answer_of(seed, wrong)
            assert same == text
            assert (as_well.reason, as_well.n_prompt, as_well.n_completion) == (
                done.reason, done.n_prompt, done.n_completion
            )  # fmt: skip
            assert guessed.batcher.counters.completion_tokens == plain.batcher.counters.completion_tokens
            n_saved += plain.batcher.counters.iterations - guessed.batcher.counters.iterations
    assert n_saved > 0


def test_of_what_was_guessed_wrong_the_kv_cache_keeps_nothing_and_the_rest_is_garbage() -> None:
    bench = Bench(n_ctx=400)
    speculator = eager(bench, 3, 1.0)
    id_ = bench.add("hello", max_tokens=30)
    while not speculator.n_drafted - speculator.n_accepted:
        assert bench.step()
    s = bench.find(id_)
    assert s is not None
    assert bench.llama.tokens(s.slot) == s.tokens[: s.n_past]
    assert bench.cells.n_garbage >= speculator.n_drafted - speculator.n_accepted > 0


def test_an_end_is_an_end_even_if_it_was_guessed() -> None:
    """Behind an end there is nothing to be drawn: a grammar's sampler would abort the process."""

    class Ending(FakeLlama):
        n_sampled = 0

        def sample(self, sampler: Any, row: int, among: Sequence[int]) -> int:
            assert self.n_sampled == 0 or not among
            self.n_sampled += 1
            return 0 if self.n_sampled > 1 else 1

    scene = Scene(0.0)
    llama = Ending(n_ctx=400)
    speculator = Speculator(cast(Any, llama), scene.latency, scene.bench.cells)
    s = scene.answer([1, 2, 3])
    s.draw.sampler = cast(Any, FakeSampler())
    (s.slot, _), s.n_past = cast(tuple[int, int], scene.bench.cells.take([1, 2, 3, 1, 0, 5, 5])), 7
    speculator._options[s] = Option(SIZES[0], 1.0, 0.0, of_model=True)
    assert speculator.draw(s, [1, 0, 5, 5], 4) == [1, 0]
    assert llama.n_sampled == 2
    assert s.n_past == 4, "the row of the last token, and that of the first guess"
