"""Log-probabilities of tokens: how a client asks for them, and the two shapes in which it gets them. Pure.

They are of the model's own distribution: the natural logarithm of the softmax of its logits, before anything that
decides how tokens are drawn, as llama-server tells them too.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

import msgspec

from .fields import Json

MAX_TOP = 20  # likeliest tokens told beside each one, as OpenAI
LEAST = -9999.0  # OpenAI's word for a token that is all but impossible: JSON has no infinity


class Likelihood(msgspec.Struct, frozen=True, array_like=True):
    """A drawn token by its bytes, with its log-probability, and the likeliest tokens in its place, best first."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


def top_logprobs(parameters: Json) -> int | None:
    """Return how many of the likeliest tokens a client wants told beside each token; None: no log-probabilities.

    `logprobs` is true in chats, where `top_logprobs` has the number, and that number itself in raw completions.
    """
    wanted, n_top = parameters.get("logprobs"), parameters.get("top_logprobs") or 0
    if wanted is None or wanted is False:
        return None
    return int(n_top) if wanted is True else max(int(wanted), int(n_top))


def chat_logprobs(tokens: Iterable[Likelihood]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    return {
        "content": [
            _entry(token.piece, token.logprob) | {"top_logprobs": [_entry(piece, p) for piece, p in token.top]}
            for token in tokens
        ]
    }


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _shown(piece), "logprob": max(logprob, LEAST), "bytes": list(piece)}


def _shown(piece: bytes) -> str:
    """Return a token as text; bytes that are a part of a character are spelled out, as OpenAI does."""
    return piece.decode("utf-8", "backslashreplace")


class TextLogprobs:
    """The `logprobs` of the choices of one raw completion, chunk after chunk: each token knows where it begins."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._n_chars = 0

    def of(self, chat: Json) -> dict[str, Any]:
        """Return what a chat has in `logprobs` in the shape of raw completions. The drawn token is in `top`, too."""
        entries = list(chat["content"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in (*entry["top_logprobs"], entry)} for entry in entries
            ],
            "text_offset": [self._pass(bytes(entry["bytes"])) for entry in entries],
        }

    def _pass(self, piece: bytes) -> int:
        at = self._n_chars
        self._n_chars += len(self._utf8.decode(piece))
        return at
