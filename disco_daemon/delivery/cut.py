"""Cutting and joining tokens without losing any of their text or count. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Token


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
