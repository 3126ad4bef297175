"""How many tokens a server's chunks have: by its own word where it gives one, else by their text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.answer.limits import SPARE_TOKENS, Limits
from disco_daemon.delivery.counting import LONGEST_RUN, TextCount, TextCounts
from disco_daemon.delivery.cut import divided, words
from disco_daemon.endpoints.bill import Bill
from disco_daemon.endpoints.chunks import Reader
from disco_daemon.types import Token, Usage

ONE = [
    " understanding",
    "'s",
    " don't",
    "(self",
    ").",
    "\n\n",
    "        ",
    "नहीं",
    "ที่",
    "_name",
    "====",
    "東",
    "👩‍💻",
    " 1234",
    " ",
    "",
]


def tokens_in(*pieces: str) -> int:
    count = TextCount()
    return sum(map(count.add, pieces))


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut for cut in cuts if 0 < cut < len(text)})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True) if b > a]


@pytest.mark.parametrize("text", ONE)
def test_what_may_be_one_token_is_never_taken_for_two(text: str) -> None:
    assert tokens_in(text) <= 1
    assert Reader().token(chunk(text + "x"[bool(text) :])).n_tokens == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("Once upon a time, there lived an old clockmaker who mended time.", 14),
        ("foo(bar, baz)[0].append(x)", 10),
        ("今天天气很好\uff0c我们去公园散步吧。", 8),
        ("https://example.com/a/very/long/path", 8),
        ("Donaudampfschifffahrtsgesellschaftskapitän", 3),
    ],
)
def test_of_longer_text_the_pieces_are_counted_that_no_token_spans(text: str, n: int) -> None:
    assert tokens_in(text) == n


@given(st.text(max_size=60))
def test_no_text_has_more_tokens_than_bytes(text: str) -> None:
    assert 0 <= tokens_in(text) <= len(text.encode("utf-8", "replace"))


# --- however it is cut ------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=80),
    st.text("ab1 ('.\n我们\u200d👩-'\"_\u0301é", max_size=80),
    st.lists(st.sampled_from([" ", "  ", " a", "a ", " a ", "ab", " b1 "]), max_size=40).map("".join),
    st.lists(
        st.sampled_from(["Donaudampfschifffahrt", " don't", '{"path": "/home/', "今天天气", "====", " (self).x"])
    ).map("".join),
)
CUTS = st.lists(st.integers(0, 80), max_size=80)
FIELDS: list[Callable[[str], dict[str, Any]]] = [
    lambda text: {"delta": {"content": text}},
    lambda text: {"text": text},
    lambda text: {"delta": {"reasoning_content": text}},
    lambda text: {"delta": {"tool_calls": [{"index": 3, "function": {"arguments": text}}]}},
]


@given(TEXTS, CUTS, CUTS, st.sampled_from(FIELDS))
def test_one_text_has_one_count_however_it_is_cut(
    text: str, cuts: list[int], others: list[int], said: Callable[[str], dict[str, Any]]
) -> None:
    def counted(pieces: list[str]) -> int:
        reader = Reader()
        tokens = [reader.token(said(piece)) for piece in pieces]
        assert sum(token.n_tokens for token in tokens if token) == reader.n_tokens
        return reader.n_tokens

    assert counted(pieces_of(text, cuts)) == counted(pieces_of(text, others)) == counted(list(text))


@pytest.mark.parametrize("n_spaces", [LONGEST_RUN - 2, LONGEST_RUN - 1, LONGEST_RUN, 2 * LONGEST_RUN - 1])
@pytest.mark.parametrize("word", [" word", "word ", " word ", "word"])
def test_spaces_before_a_word_count_the_same_whatever_they_come_with(n_spaces: int, word: str) -> None:
    text = " " * n_spaces + word
    assert tokens_in(" " * n_spaces, word) == tokens_in(*text) == tokens_in(text)


@given(TEXTS, CUTS, st.integers(1, 12), st.booleans())
def test_one_text_has_one_end_however_it_is_cut(text: str, cuts: list[int], limit: int, keeps: bool) -> None:
    """One that ends itself is heard to its end; one that knows no limit is cut at the number."""

    def heard(pieces: list[str]) -> tuple[str, str | None]:
        reader, limits, shown, n_shown, reason = Reader(), Limits(limit, ()), "", 0, None
        for piece in pieces:
            token = reader.token(chunk(piece))
            assert token is not None
            kept, reason = limits.take(token, n_shown, shown.__str__)
            shown += "".join(part.text for part in kept)
            n_shown += sum(part.n_tokens for part in kept)
            if reason is not None:
                return shown, reason
        return shown + "".join(part.text for part in limits.rest()), None

    text = text or "x"
    if not keeps:
        text = " ".join([text] * (40 + 2 * limit))
    n = tokens_in(text)
    whole = heard([text])
    assert heard(pieces_of(text, cuts)) == heard(list(text)) == whole
    if n <= limit + SPARE_TOKENS:
        assert whole == (text, None)
    elif whole[1] == "length":
        assert text.startswith(whole[0])
        assert tokens_in(whole[0]) == limit


LOCALAI = [
    ("The quick brown fox jumps over the lazy dog, and then it sleeps. " * 3, 46),
    ("今天天气很好,我们去公园散步吧。" * 5, 60),
    ("Die Donaudampfschifffahrtsgesellschaft liegt am Ufer. " * 4, 60),
    ("def f(x):\n    return x.y[0](a, b=c)\n" * 4, 64),
    ("नमस्ते दुनिया, आप कैसे हैं? " * 6, 120),
    ("\n\n\n    \n" * 30, 40),
    ("👩‍💻 ok ❤️ " * 10, 60),
    ("====----====" * 30, 90),
    ("ha" * 100, 40),
    ("Xin chào các bạn, hôm nay trời đẹp quá! " * 3, 60),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "n_tokens"), LOCALAI)
def test_a_server_that_keeps_to_its_limit_is_heard_to_its_end(text: str, n_tokens: int, size: int) -> None:
    """By the server's own count the text is just as long as allowed."""
    reader, limits, said = Reader(), Limits(n_tokens, ()), ""
    for i in range(0, len(text), size):
        token = reader.token(chunk(text[i : i + size]))
        assert token is not None
        kept, reason = limits.take(token, reader.n_tokens - token.n_tokens)
        assert reason is None
        said += "".join(part.text for part in kept)
    assert said + "".join(part.text for part in limits.rest()) == text


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), CUTS)
def test_what_was_shown_is_the_least_that_is_booked(steps: list[int], cuts: list[int]) -> None:
    """Usage blocks that tell of their own chunk, of one choice, of nothing, or fall: no bill is below the text."""
    text = "one two three four five six seven eight nine ten "
    usage, reader = Usage(), Reader()
    bill = Bill(usage, {}, None)
    for i, piece in enumerate(pieces_of(text, cuts)):
        told: int | None = None
        if told_now := steps[i % len(steps)]:
            bill.take({"completion_tokens": told_now}, 1.0)
            told = bill.n_billed
        token = reader.token(chunk(piece), told)
        assert token is not None
        bill.count_token(token, reader.n_tokens, counted=told is not None)
    bill.take({"completion_tokens": steps[-1]}, 1.0)
    assert usage.completion_tokens >= 10
    assert usage.completion_tokens == reader.n_tokens
    assert not usage.told


@pytest.mark.parametrize(
    ("told", "n", "booked"), [(12, 1, 12), (10, 1, 10), (7, 1, 7), (6, 1, 10), (5, 1, 10), (10, 2, 10), (9, 2, 10)]
)
def test_a_server_that_counts_more_coarsely_is_believed_and_a_bill_of_a_part_is_not(
    told: int, n: int, booked: int
) -> None:
    """A vocabulary that joins words makes a third fewer tokens of a text; of several choices a bill may be of one."""
    usage, text = Usage(), "one two three four five six seven eight nine ten"
    bill = Bill(usage, {"n": n}, None)
    bill.count_token(Token(text, 10), 10)
    bill.take({"completion_tokens": told}, 1.0)
    assert (usage.completion_tokens, usage.told) == (booked, told == booked)


def test_thoughts_and_arguments_count() -> None:
    assert TextCounts().add({"reasoning_content": "Let me see what that is"}) == 6
    call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"place": "Paris"}'}}
    assert TextCounts().add({"tool_calls": [call]}) == 6
    assert TextCounts().add({"audio": {"id": "a"}}) == 0
    assert TextCounts().add({"tool_calls": "no list"}) == 0


def chunk(text: str, **more: Any) -> dict[str, Any]:
    return {"delta": {"content": text}} | more


def test_ids_and_log_probabilities_are_exact() -> None:
    reader = Reader(ids_back=True)
    assert reader.token(chunk("one two three", token_ids=[1, 2, 3, 4, 5])) == Token(
        "one two three", 5, ids=(1, 2, 3, 4, 5)
    )
    named = {"content": [{"token": t, "logprob": 0.0} for t in ("un", "known", " word")]}
    told = Reader().token(chunk("unknown word", logprobs=named))
    assert told is not None
    assert told.n_tokens == 3


def test_a_server_that_tells_no_ids_though_it_was_asked_is_counted_by_its_text() -> None:
    reader = Reader(ids_back=True)
    assert [reader.token(chunk("one two three ")).n_tokens for _ in range(3)] == [3, 3, 3]  # type: ignore[union-attr]
    assert reader.n_tokens == 9


def test_usage_that_comes_with_each_chunk_is_exact() -> None:
    reader = Reader()
    given_out = [reader.token(chunk("unbelievable"), 3), reader.token(chunk(" thing"), 4), reader.token(chunk("!"), 4)]
    assert [token.n_tokens for token in given_out if token] == [3, 1, 0]


def test_whatever_usage_says_a_chunk_has_no_more_tokens_than_bytes() -> None:
    token = Reader().token(chunk("ab"), 1 << 62)
    assert token is not None
    assert token.n_tokens == 2


def test_the_last_word_on_a_count_has_the_usage_block_after_the_text() -> None:
    usage = Usage(completion_tokens=3)
    bill = Bill(usage, {}, None)
    bill.take({"prompt_tokens": 5}, 1.0)
    assert (usage.completion_tokens, usage.told) == (3, False)
    bill.take({"completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 12}}, 1.0)
    assert (usage.completion_tokens, usage.reasoning_tokens, usage.told) == (30, 12, True)


# --- cutting ----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_cut_between_words() -> None:
    token = Token("one two three four ", 4, ids=(1, 2, 3, 4))
    assert words(token) == [Token("one "), Token("two "), Token("three "), Token("four ", ids=(1, 2, 3, 4))]
    assert divided(token, 3) == (Token("one two three ", 3), Token("four ", 1))
    assert divided(token, 0) == (None, Token("one two three four ", 4))


def test_one_long_word_is_cut_between_characters() -> None:
    assert divided(Token("abcdef", 3), 1) == (Token("ab", 1), Token("cdef", 2))
    assert divided(Token("👩\u200d💻", 3), 1)[0] is None


@given(st.text(max_size=40), st.integers(1, 12), st.integers(0, 12))
def test_nothing_is_lost_or_made_up_by_a_cut(text: str, n_tokens: int, n: int) -> None:
    token = Token(text, n_tokens, ids=tuple(range(n_tokens)))
    pieces = words(token)
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.n_tokens for piece in pieces) == n_tokens
    assert sum((piece.ids for piece in pieces), ()) == token.ids
    if n < n_tokens:
        kept, rest = divided(token, n)
        assert (kept.text if kept else "") + rest.text == text
        assert (kept.n_tokens if kept else n) + rest.n_tokens == n_tokens
