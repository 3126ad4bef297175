"""A sampler draws as the fields of a request say: each has its effect on logits that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama import grammar_sampler
from disco_daemon.engine.llama.grammar import grammar_of
from disco_daemon.engine.llama.grammar_sampler import GrammarSampler
from disco_daemon.engine.llama.hidden import FloatRows
from disco_daemon.engine.llama.refusals import DrawingError, FormatError
from disco_daemon.engine.llama.sampler import Sampler
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.types import Drawing

N = 32  # tokens
END = 31
FALLING = [10.0 - 0.5 * i for i in range(N)]  # token 0 is the likeliest one


def sampler(
    drawing: Drawing,
    *,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    vocab: Any = None,
    n_vocab: int = N,
    grammar: str = "",
    initials: Any = None,
    **more: Any,
) -> Sampler:
    request = wire.Generate(id="r", messages=[], drawing=drawing, **more)
    return Sampler(
        request, n_vocab, answer, vocab=vocab, grammar=grammar, prompt=prompt, ends=(END,), window=512,
        initials=initials,
    )  # fmt: skip


def drawn(sampler: Sampler, logits: Sequence[float] = FALLING) -> int:
    """Draw one token, as `Llama.sample` does from a row."""
    sampler.begin_draw()
    return sampler.draw(np.array(logits, np.float32))


def many(drawing: Drawing, n: int = 300, logits: Sequence[float] = FALLING, **more: Any) -> Counter[int]:
    """Count tokens drawn one by one, each behind nothing."""
    found: Counter[int] = Counter()
    for seed in range(n):
        with closing(sampler(drawing, seed=seed, **({"temperature": 1.0} | more))) as one:
            found[drawn(one, logits)] += 1
    return found


# --- what is cut off ----------------------------------------------------------------------------------------------


def test_of_the_likeliest_one_alone_every_draw_is_the_greedy_one() -> None:
    assert many(Drawing(top_k=1), 50) == {0: 50}


@pytest.mark.parametrize("k", [2, 3])
def test_so_many_of_the_likeliest_ones_are_drawn_and_no_others(k: int) -> None:
    assert many(Drawing(top_k=k, min_p=0.0)).keys() == set(range(k))


@pytest.mark.parametrize("k", [0, -1])
def test_a_top_k_of_zero_or_less_cuts_nothing(k: int) -> None:
    assert many(Drawing(top_k=k, min_p=0.0)) == many(Drawing(min_p=0.0))


def test_what_is_less_likely_than_a_share_of_the_likeliest_is_cut_off() -> None:
    assert max(many(Drawing(min_p=0.5))) == 1  # e^-0.5 = 0.61, e^-1 = 0.37
    assert max(many(Drawing(min_p=0.3))) == 2
    assert max(many(Drawing(min_p=0.0))) > 7, "nothing is cut"
    assert max(many(Drawing())) == 5, "0.05 as usual: e^-2.5 = 0.08"
    assert max(many(Drawing(min_p=0.3), top_p=1.0)) == 2, "also beside top_p"


def test_typical_sampling_leaves_out_what_says_too_little() -> None:
    sure = [5.0, *([3.0] * 20), *([0.0] * (N - 21))]
    assert 0 in many(Drawing(min_p=0.0), logits=sure)
    assert 0 not in many(Drawing(min_p=0.0, typical_p=0.5), logits=sure)
    assert many(Drawing(typical_p=1.0), 50, sure) == many(Drawing(), 50, sure)


def test_what_cannot_be_drawn_does_not_confuse_typical_sampling() -> None:
    impossible = [*FALLING[:3], *([-1e9] * (N - 3))]
    assert many(Drawing(typical_p=0.9, min_p=0.0), logits=impossible).keys() <= {0, 1, 2}


def test_the_likeliest_choices_are_left_out_by_chance() -> None:
    flat = [5.0, 4.9, 4.8, *([-9.0] * (N - 3))]
    assert many(Drawing(xtc_probability=1.0, xtc_threshold=0.1), logits=flat).keys() == {2}
    assert many(Drawing(xtc_probability=1.0, xtc_threshold=0.1), logits=flat, temperature=0).keys() == {2}
    sometimes = many(Drawing(xtc_probability=0.5, xtc_threshold=0.1), logits=flat, temperature=0)
    assert sometimes.keys() == {0, 2}
    assert 90 < sometimes[0] < 210
    assert many(Drawing(xtc_probability=1.0, xtc_threshold=0.6), 50, flat) == many(Drawing(), 50, flat)


# --- what is added to logits --------------------------------------------------------------------------------------


def test_a_bias_forces_or_bans_a_token() -> None:
    assert many(Drawing(logit_bias=((9, 100.0),)), 50) == {9: 50}
    assert many(Drawing(logit_bias=((9, 100.0),)), 5, temperature=0) == {9: 5}
    assert many(Drawing(logit_bias=((0, -100.0),)), 5, temperature=0) == {1: 5}
    assert many(Drawing(logit_bias=((N, 100.0), (N + 7, 100.0))), 5, temperature=0) == {0: 5}, "no such tokens"


def test_a_text_that_may_not_end_does_not() -> None:
    ending = [*FALLING[:END], 99.0]
    assert many(Drawing(), 5, ending, temperature=0) == {END: 5}
    assert many(Drawing(ignore_eos=True), 5, ending, temperature=0) == {0: 5}
    assert many(Drawing(ignore_eos=True, logit_bias=((END, 100.0),)), 5, ending, temperature=0) == {0: 5}


def test_a_text_ends_once_it_has_its_least_tokens() -> None:
    ending = [*FALLING[:END], 99.0]
    with closing(sampler(Drawing(min_tokens=3, stop_token_ids=(0,)), temperature=0)) as one:
        assert [drawn(one, ending) for _ in range(4)] == [1, 1, 1, END]
    with closing(sampler(Drawing(min_tokens=3), temperature=0, answer=(5, 6))) as one:
        assert [drawn(one, ending) for _ in range(2)] == [0, END], "it goes on behind two"


def test_if_all_is_banned_something_is_drawn_all_the_same() -> None:
    everything = tuple(range(N))
    with closing(sampler(Drawing(min_tokens=3, stop_token_ids=everything), temperature=1.0, seed=1)) as one:
        assert drawn(one) in everything


def test_a_repeated_token_is_less_likely_also_if_only_the_prompt_has_it() -> None:
    heavy = Drawing(repeat_penalty=2.0, repeat_last_n=-1)
    with closing(sampler(heavy, temperature=0)) as one:
        assert [drawn(one) for _ in range(3)] == [0, 1, 2]
    with closing(sampler(heavy, temperature=0, prompt=(0, 1))) as one:
        assert drawn(one) == 2
    with closing(sampler(heavy, temperature=0, answer=(0, 1))) as one:
        assert drawn(one) == 2
    with closing(sampler(Drawing(repeat_penalty=2.0, repeat_last_n=1), temperature=0, prompt=(0, 1))) as one:
        assert drawn(one) == 0, "it looks back on one token"
    with closing(sampler(Drawing(repeat_penalty=2.0, repeat_last_n=0), temperature=0, prompt=(0, 1))) as one:
        assert drawn(one) == 0


def test_the_other_penalties_look_back_as_far() -> None:
    close = [10.0, 9.9, *([0.0] * (N - 2))]
    with closing(sampler(Drawing(), temperature=0, frequency_penalty=1.0, answer=(0, 5))) as one:
        assert drawn(one, close) == 1
    with closing(sampler(Drawing(repeat_last_n=1), temperature=0, frequency_penalty=1.0, answer=(0, 5))) as one:
        assert drawn(one, close) == 0


def test_what_would_go_on_with_a_repetition_is_less_likely(vocabulary: Vocabulary) -> None:
    n, vocab = vocabulary.n_tokens, vocabulary.handle
    words = vocabulary.tokenize("red lamp green chair red lamp green")
    follows = words[-4]
    logits = [0.0] * n
    logits[follows], other = 5.0, words[0]
    logits[other] = 4.0

    def next_token(drawing: Drawing) -> int:
        with closing(sampler(drawing, temperature=0, prompt=words, vocab=vocab, n_vocab=n)) as one:
            return drawn(one, logits)

    assert next_token(Drawing()) == follows
    assert next_token(Drawing(dry_multiplier=2.0)) == other
    assert next_token(Drawing(dry_multiplier=0.6, dry_base=1.0, dry_allowed_length=1)) == follows
    assert next_token(Drawing(dry_multiplier=0.6, dry_base=4.0, dry_allowed_length=1)) == other
    assert next_token(Drawing(dry_multiplier=2.0, dry_allowed_length=9)) == follows
    assert next_token(Drawing(dry_multiplier=2.0, dry_penalty_last_n=2)) == follows
    assert next_token(Drawing(dry_multiplier=2.0, dry_sequence_breakers=(" green",))) == follows


# --- mirostat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_aims_at_its_surprise_whatever_else_cuts_off(version: Any) -> None:
    def spread(tau: float, **more: Any) -> int:
        drawing = Drawing(mirostat=version, mirostat_tau=tau, mirostat_eta=0.5, **more)
        with closing(sampler(drawing, temperature=1.0, seed=3)) as one:
            return len({drawn(one) for _ in range(200)})

    assert spread(0.3) < spread(5.0)
    assert spread(5.0, top_k=1) == spread(5.0) > 1


def test_mirostat_learns_as_fast_as_it_is_told() -> None:
    def told(eta: float) -> list[int]:
        with closing(sampler(Drawing(mirostat=2, mirostat_tau=1.0, mirostat_eta=eta), temperature=1.0, seed=3)) as one:
            return [drawn(one) for _ in range(100)]

    assert told(0.0) != told(0.9)
    assert told(0.9) == told(0.9), "its seed is the client's"


# --- continuing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drawing",
    [
        Drawing(top_k=5),
        Drawing(typical_p=0.8),
        Drawing(xtc_probability=0.5),
        Drawing(repeat_penalty=1.3, repeat_last_n=64),
        Drawing(logit_bias=((3, 2.0),), min_tokens=4),
    ],
)
def test_an_answer_that_goes_on_draws_what_the_unbroken_one_would_have(drawing: Drawing) -> None:
    with closing(sampler(drawing, temperature=1.0, seed=11, prompt=(4, 5))) as one:
        whole = [drawn(one) for _ in range(12)]
    for n in range(12):
        with closing(sampler(drawing, temperature=1.0, seed=11, prompt=(4, 5), answer=whole[:n])) as one:
            assert [drawn(one) for _ in range(12 - n)] == whole[n:]


def test_nothing_but_the_largest_logit_is_a_short_cut_only_where_nothing_is_asked_for() -> None:
    cases = {Drawing(): True, Drawing(top_k=3): True, Drawing(logit_bias=((1, 1.0),)): False}
    cases |= {Drawing(min_tokens=2): False, Drawing(xtc_probability=0.5): False, Drawing(typical_p=0.5): False}
    cases |= {Drawing(repeat_penalty=1.1): False, Drawing(mirostat=2): True}
    for drawing, short in cases.items():
        with closing(sampler(drawing, temperature=0)) as one:
            assert one.greedy is short


# --- ids and forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drawing", "param"),
    [
        (Drawing(stop_token_ids=(10**6,)), "stop_token_ids"),
        (Drawing(logit_bias=((1, 1.0), (10**6, 1.0))), "logit_bias"),
    ],
)
def test_ids_of_another_vocabulary_are_the_requests_fault(vocabulary: Vocabulary, drawing: Drawing, param: str) -> None:
    with pytest.raises(DrawingError, match="1000000") as caught:
        vocabulary.check_drawing(drawing)
    assert caught.value.param == param


def test_the_tokens_that_end_a_text_are_those_of_the_model(vocabulary: Vocabulary) -> None:
    assert 0 < len(vocabulary.end_tokens) < 20
    assert all(map(vocabulary.ends, vocabulary.end_tokens))


@pytest.mark.parametrize("texts", [["yes", "no"], ['a "quoted" one', "back\\slash\nand more"], ["ä→😀", "\x7f\t"]])
def test_a_choice_is_one_of_its_texts(vocabulary: Vocabulary, texts: list[str]) -> None:
    grammar = grammar_of({"type": "choice", "choice": texts})
    n, vocab = vocabulary.n_tokens, vocabulary.handle
    drawing = Drawing(dry_multiplier=100.0, repeat_penalty=2.0)
    for seed in range(6):
        found: list[int] = []
        with closing(sampler(drawing, vocab=vocab, n_vocab=n, grammar=grammar, temperature=1.5, seed=seed)) as one:
            while not found or not vocabulary.ends(found[-1]):
                found.append(drawn(one, [0.0] * n))
        assert b"".join(map(vocabulary.piece, found)).decode() in texts


# --- few tokens are tried by a grammar, and the draw is the same ---------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer"}},
    "required": ["name", "kind", "n"],
}
_FULL = '{"name": "Ada", "kind": "red", "n": 4'
BEGUN = tuple(_FULL[: _FULL.index(end) + len(end)] for end in ("{", ': "', "a", '"Ada", ', 'd": "', "4"))


class Masks:
    """llama.cpp's grammar sampler, tried with the whole vocabulary, as where a chain begins with it."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, begun: Sequence[int]) -> None:
        self._sampler = GrammarSampler(vocabulary.handle, grammar, vocabulary.n_tokens, FormatError)
        for token in begun:
            self._sampler.accept(token)
        self.allowed = self._sampler.allowed(np.arange(vocabulary.n_tokens))
        self._sampler.close()

    def over(self, logits: FloatRows) -> FloatRows:
        masked = logits.copy()
        masked[~self.allowed] = -np.inf
        return masked


def rows_like_a_models(n: int, seed: int) -> FloatRows:
    """Logits of which some stand out, as a model has them; which ones is chance, so a grammar refuses most of these."""
    chance = np.random.default_rng(seed)
    rows = chance.normal(0, 2.5, n).astype(np.float32)
    rows[chance.integers(0, n, 20)] += 12
    return rows


@pytest.mark.parametrize(
    ("drawing", "more"),
    [
        (Drawing(), {"temperature": 0}),
        (Drawing(), {}),
        (Drawing(min_p=0.3), {"frequency_penalty": 0.5}),
        (Drawing(top_k=40), {"top_p": 0.9}),
        (Drawing(top_k=3, min_p=0.0), {}),
        (Drawing(), {"top_p": 0.95}),
        (Drawing(min_p=0.02), {"top_p": 0.6}),
        (Drawing(xtc_probability=0.5, xtc_threshold=0.2, min_p=0.1), {}),
        (Drawing(xtc_probability=0.5, xtc_threshold=0.2), {"temperature": 0}),
        (Drawing(xtc_probability=0.5), {"top_p": 1.0}),
        (Drawing(typical_p=0.5), {}),
        (Drawing(mirostat=2), {}),
        (Drawing(repeat_penalty=1.3, repeat_last_n=64, dry_multiplier=2.0), {}),
        (Drawing(logit_bias=((5, 4.0), (6, -9.0))), {"temperature": 0}),
    ],
)
def test_the_draw_is_the_one_from_all_allowed_tokens(
    vocabulary: Vocabulary, drawing: Drawing, more: dict[str, Any]
) -> None:
    grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}})
    n, vocab = vocabulary.n_tokens, vocabulary.handle
    more = {"temperature": 1.1, "seed": 5, "vocab": vocab, "n_vocab": n, "initials": vocabulary.initials} | more
    for text in ("", *BEGUN):
        begun = vocabulary.tokenize(text)
        masks = Masks(vocabulary, grammar, begun)
        for seed in range(3):
            logits = rows_like_a_models(n, seed)
            if seed:  # a model that knows what may come
                logits[np.flatnonzero(masks.allowed)[: 3 * seed]] += 12
            with (
                closing(sampler(drawing, answer=begun, grammar=grammar, **more)) as held,
                closing(sampler(drawing, answer=begun, **more)) as free,
            ):
                held.begin_draw()
                free.begin_draw()
                assert held.draw(logits) == free.draw(masks.over(logits)), (text, seed)


def test_by_chance_alone_each_allowed_token_is_drawn_as_often_as_its_share_says(vocabulary: Vocabulary) -> None:
    texts = ["red", "green", "blue"]
    grammar = grammar_of({"type": "choice", "choice": texts})
    firsts = [vocabulary.tokenize(text)[0] for text in texts]
    logits = rows_like_a_models(vocabulary.n_tokens, 3)
    logits[firsts] = (1.0, 0.0, -1.0)  # far below much of what the grammar refuses
    among = [*firsts, *np.flatnonzero(~Masks(vocabulary, grammar, ()).allowed)[:300].tolist(), int(logits.argmax())]
    found: Counter[int] = Counter()
    for seed in range(600):
        more = {"vocab": vocabulary.handle, "n_vocab": vocabulary.n_tokens, "grammar": grammar}
        with closing(sampler(Drawing(), seed=seed, temperature=1.0, top_p=1.0, **more)) as one:
            one.begin_draw()
            found[one.draw(logits, among)] += 1
    shares = np.exp([1.0, 0.0, -1.0]) / np.exp([1.0, 0.0, -1.0]).sum()
    assert found.keys() == set(firsts)
    for token, share in zip(firsts, shares, strict=True):
        assert found[token] / 600 == pytest.approx(share, abs=4 * (share * (1 - share) / 600) ** 0.5)


def test_a_token_whose_first_character_may_not_come_may_not_come_itself(vocabulary: Vocabulary) -> None:
    grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}})
    cut = vocabulary.tokenize(BEGUN[1] + "😀")[:-1]  # in the middle of a character
    for begun in ([], *map(vocabulary.tokenize, BEGUN), cut):
        allowed = Masks(vocabulary, grammar, begun).allowed
        known = vocabulary.initials >= 0
        assert known.mean() > 0.8
        assert not (allowed[known] & ~allowed[vocabulary.initials[known]]).any()


@pytest.mark.parametrize(
    ("drawing", "more"), [(Drawing(), {"temperature": 0}), (Drawing(), {}), (Drawing(), {"top_p": 0.9})]
)
def test_a_grammar_is_asked_about_few_tokens(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, drawing: Drawing, more: dict[str, Any]
) -> None:
    asked: list[int] = []
    ask = GrammarSampler.allowed

    def counted(self: GrammarSampler, tokens: Any) -> Any:
        asked.append(len(tokens))
        return ask(self, tokens)

    monkeypatch.setattr(GrammarSampler, "allowed", counted)
    grammar = grammar_of({"type": "json_object"})
    logits = np.full(vocabulary.n_tokens, -20.0)
    logits[vocabulary.tokenize("{")[0]] = 0.0
    with closing(
        sampler(Drawing(), vocab=vocabulary.handle, n_vocab=vocabulary.n_tokens, grammar=grammar, **more)
    ) as one:
        assert drawn(one, list(logits)) == vocabulary.tokenize("{")[0]
    assert sum(asked) == 1


@pytest.mark.parametrize("seen", [True, False])
def test_where_readings_multiply_all_tokens_are_tried_so_that_it_shows_in_time(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Each `[` leaves twice as many readings: they are counted before an answer begins, or seen by what one takes."""
    asked: list[int] = []
    ask = GrammarSampler.allowed

    def counted(self: GrammarSampler, tokens: Any) -> Any:
        asked.append(len(tokens))
        return ask(self, tokens)

    monkeypatch.setattr(GrammarSampler, "allowed", counted)
    if not seen:
        monkeypatch.setattr(grammar_sampler, "readings", lambda grammar: 1)
    grammar = 'root ::= s\ns ::= "[" s "a" | "[" s "b" | "[" s "c" | "[" s "d" | "["'
    logits = np.zeros(vocabulary.n_tokens, np.float32)
    logits[vocabulary.tokenize("[")[0]] = 50.0
    with closing(
        sampler(Drawing(), vocab=vocabulary.handle, n_vocab=vocabulary.n_tokens, grammar=grammar, temperature=0)
    ) as one:
        for _ in range(8):
            one.begin_draw()
            one.draw(logits)
            if asked[-1] == vocabulary.n_tokens:
                break
    assert asked[-1] == vocabulary.n_tokens
    assert (len(asked) == 1) == seen


def test_an_answer_of_which_no_token_can_follow_ends_with_its_reason_and_no_process(vocabulary: Vocabulary) -> None:
    grammar, vocab = 'root ::= "a"', {"vocab": vocabulary.handle, "n_vocab": vocabulary.n_tokens}
    with closing(sampler(Drawing(), grammar=grammar, **vocab)) as one:
        one.begin_draw()
        assert one.draw(np.zeros(vocabulary.n_tokens, np.float32), vocabulary.tokenize("b")) in vocabulary.tokenize("b")
        assert one.meter is not None
        assert one.meter.over
        assert "No token" in str(one.meter.error())


@pytest.mark.parametrize("broken", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("more", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_p": 1.0}])
def test_of_a_broken_models_logits_an_allowed_token_is_drawn(
    vocabulary: Vocabulary, broken: float, more: dict[str, Any]
) -> None:
    grammar, vocab = 'root ::= "a"', {"vocab": vocabulary.handle, "n_vocab": vocabulary.n_tokens}
    with closing(sampler(Drawing(), grammar=grammar, **vocab, **more)) as one:
        assert vocabulary.piece(drawn(one, [broken] * vocabulary.n_tokens)) == b"a"


def test_a_choice_that_no_grammar_can_hold_is_refused() -> None:
    with pytest.raises(GrammarError, match="NUL"):
        grammar_of({"type": "choice", "choice": ["a\0b"]})


def test_an_answer_that_takes_too_long_to_follow_is_refused_and_a_long_usual_one_is_not(vocabulary: Vocabulary) -> None:
    """Each token of the first leaves four times as many readings: without a bound 25 of them take a year."""
    one, vocab = vocabulary.tokenize("x"), {"vocab": vocabulary.handle, "n_vocab": vocabulary.n_tokens}
    multiplying = 'root ::= s\ns ::= "x" s "a" | "x" s "b" | "x"'
    with pytest.raises(FormatError, match="takes too long"):
        sampler(Drawing(), answer=one * 40, grammar=multiplying, **vocab)
    begun = sampler(Drawing(), answer=one * 2, grammar=multiplying, **vocab)
    with closing(begun), pytest.raises(FormatError, match="takes too long"):
        begun.follow(one * 40)
    usual = vocabulary.tokenize('{"a": [' + ", ".join(['{"b": "quick brown fox", "c": [true, 12]}'] * 300) + "]}")
    with closing(sampler(Drawing(), answer=usual, grammar=grammar_of({"type": "json_object"}), **vocab)) as told:
        assert told.meter is not None
        assert not told.meter.over
