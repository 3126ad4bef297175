"""How many tokens a server's chunks have: by its own word where it gives one, else by their text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.delivery.cut import first, words
from disco_daemon.endpoints.bill import Bill
from disco_daemon.endpoints.counting import tokens_in, tokens_of_delta
from disco_daemon.endpoints.stream import Reader
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


@pytest.mark.parametrize("text", ONE)
def test_what_may_be_one_token_is_never_taken_for_two(text: str) -> None:
    assert tokens_in(text) == 1


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("Once upon a time, there lived an old clockmaker who mended time.", 14),
        ("foo(bar, baz)[0].append(x)", 10),
        ("今天天气很好\uff0c我们去公园散步吧。", 7),
        ("https://example.com/a/very/long/path", 8),
        ("Donaudampfschifffahrtsgesellschaftskapitän", 3),
    ],
)
def test_of_longer_text_the_pieces_are_counted_that_no_token_spans(text: str, n: int) -> None:
    assert tokens_in(text) == n


@given(st.text(max_size=60))
def test_no_text_has_more_tokens_than_bytes(text: str) -> None:
    assert 1 <= tokens_in(text) <= max(1, len(text.encode("utf-8", "replace")))


def test_thoughts_and_arguments_count() -> None:
    assert tokens_of_delta({"reasoning_content": "Let me see what that is"}) == 6
    call = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"place": "Paris"}'}}
    assert tokens_of_delta({"tool_calls": [call]}) == 6
    assert tokens_of_delta({"audio": {"id": "a"}}) == 1
    assert tokens_of_delta({"tool_calls": "no list"}) == 1


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
    assert [reader.token(chunk("one two three")).n_tokens for _ in range(3)] == [3, 3, 3]  # type: ignore[union-attr]
    assert reader.n_tokens == 9


def test_usage_that_comes_with_each_chunk_is_exact() -> None:
    reader = Reader()
    given_out = [reader.token(chunk("unbelievable"), 3), reader.token(chunk(" thing"), 4), reader.token(chunk("!"), 4)]
    assert [token.n_tokens for token in given_out if token] == [3, 1, 1]


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
    assert first(token, 3) == Token("one two three ", 3)
    assert first(token, 4) is token
    assert first(token, 0) is None


def test_one_long_word_is_cut_between_characters() -> None:
    assert first(Token("abcdef", 3), 1) == Token("ab", 1)
    assert first(Token("👩\u200d💻", 3), 1) is None


@given(st.text(max_size=40), st.integers(1, 12), st.integers(0, 12))
def test_nothing_is_lost_or_made_up_by_a_cut(text: str, n_tokens: int, n: int) -> None:
    token = Token(text, n_tokens, ids=tuple(range(n_tokens)))
    pieces = words(token)
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.n_tokens for piece in pieces) == n_tokens
    assert sum((piece.ids for piece in pieces), ()) == token.ids
    kept = first(token, n)
    if kept is not None:
        assert text.startswith(kept.text)
        assert kept.n_tokens <= max(1, n)
