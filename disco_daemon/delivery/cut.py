"""Cutting and joining tokens without losing any of their text or count. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import structs

from ..types import Token
from .counting import beginning
from .graphemes import settled

_WORD = re.compile(r"\S+\s*|\s+")


def merged(tokens: Sequence[Token]) -> Token:
    """One token with the text, count and ids of several plain ones (at least one)."""
    if len(tokens) == 1:
        return tokens[0]
    return Token(
        "".join(token.text for token in tokens),
        sum(token.n_tokens for token in tokens),
        ids=tuple(i for token in tokens for i in token.ids),
    )


def split(tokens: Sequence[Token], at: int) -> tuple[list[Token], list[Token]]:
    """The first `at` characters, and the rest. Count and ids of a token cut in two stay with its last character.

    A token without text at the border belongs to the first part.
    """
    before: list[Token] = []
    for i, token in enumerate(tokens):
        if len(token.text) > at:
            rest = [Token(token.text[at:], token.n_tokens, token.delta, token.logprobs, token.ids), *tokens[i + 1 :]]
            return ([*before, Token(token.text[:at], 0)] if at else before), rest
        before.append(token)
        at -= len(token.text)
    return before, []


def words(token: Token) -> list[Token]:
    """Cut a token into pieces that end between words, each with its share of the count; ids stay with the last one.

    What is more than text, or no more than one token or word, stays whole.
    """
    if token.n_tokens < 2 or token.delta is not None or token.logprobs is not None:
        return [token]
    texts = _WORD.findall(token.text)
    n_pieces = min(len(texts), token.n_tokens)
    if n_pieces < 2:
        return [token]
    pieces, n_words, n_counted = [], 0, 0
    for i in range(1, n_pieces + 1):
        to_word, to_token = i * len(texts) // n_pieces, i * token.n_tokens // n_pieces
        ids = token.ids if i == n_pieces else ()
        pieces.append(Token("".join(texts[n_words:to_word]), to_token - n_counted, ids=ids))
        n_words, n_counted = to_word, to_token
    return pieces


def divided(token: Token, n: int, before: str = "") -> tuple[Token | None, Token]:
    """Return the part of a token that counts `n`, None if it is empty, and the rest of it.

    It is cut where the next token begins, if its text is what was counted (`counting`) with the text `before` it: one
    that came in other pieces is cut at the same place. Else between words, or else characters.
    """
    if token.delta is not None or token.logprobs is not None:  # half of a call is worth nothing
        if n <= 0:
            return None, token
        return structs.replace(token, n_tokens=n, ids=()), Token("", token.n_tokens - n)
    text = _beginning(token, max(0, n), before)
    rest = Token(token.text[len(text) :], token.n_tokens - n)
    return (Token(text, n) if text else None), rest


def _beginning(token: Token, n: int, before: str) -> str:
    if not token.ids and (text := beginning(token.text, token.n_tokens, n, before)) != token.text:
        return text
    kept, n_kept = "", 0
    for piece in words(token):
        if n_kept + piece.n_tokens > n:
            break
        kept, n_kept = kept + piece.text, n_kept + piece.n_tokens
    if kept or not n:
        return kept
    at = settled(token.text[: max(1, len(token.text) * n // token.n_tokens)])
    return token.text[:at]
