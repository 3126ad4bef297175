"""What a model's file says of its vocabulary: whether two models mean the same by token ids, and a file of that alone.

Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from .gguf import Header

# Keys (behind `tokenizer.ggml.`) that say how text becomes ids, what ids mean, and with which of them a text ends. The
# first have an entry for each token.
_OF_TOKENS = ("tokens", "token_type", "scores")
_OF_ALL = (
    "model", "pre", "merges", "precompiled_charsmap", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id",
    "eog_token_ids", "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
)  # fmt: skip
_UNUSED = 5  # the kind of tokens by which converters pad a vocabulary to the size of the model's embedding
_ENTRY = struct.Struct("<i")
_LENGTH = struct.Struct("<Q")
_LIST = struct.Struct("<IIQ")  # that it is an array, the type of its values, and how many there are


def vocabulary_mark(head: bytes, header: Header) -> str:
    """Return a SHA-256 (hex) over a model's tokens, their kinds and the special ones; equal where ids are the same.

    `head` are the first bytes of the file, with the whole header. Unused tokens at the end do not count: of one family,
    larger models have more of them. Empty if the file has no vocabulary, or one that cannot be.
    """
    if "tokenizer.ggml.tokens" not in header.spans:
        return ""
    digest = hashlib.sha256()
    try:
        n = _n_used(head, header)
        parts = [_entries(head, header, name, n) for name in _OF_TOKENS]
    except struct.error:
        return ""
    for part in (*parts, *(_span(head, header, name) for name in _OF_ALL)):
        digest.update(_LENGTH.pack(len(part)) + part)
    return digest.hexdigest()


def has_tokens(head: bytes, header: Header, texts: Iterable[str]) -> bool:
    """Whether each of these texts is a token of the vocabulary; `head` as above."""
    span = _span(head, header, "tokens")
    words = (text.encode() for text in texts)
    return all(_LENGTH.pack(len(word)) + word in span for word in words)


def _span(head: bytes, header: Header, name: str) -> bytes:
    """Return a key with its value as they are in the file; empty if it is missing."""
    start, end = header.spans.get(f"tokenizer.ggml.{name}", (0, 0))
    return head[start:end]


def _values(head: bytes, header: Header, name: str) -> tuple[int, bytes]:
    """Return how many values an array has, and their bytes. Raises struct.error."""
    span = _span(head, header, name)
    if not span:
        return 0, b""
    at = _LENGTH.size + _LENGTH.unpack_from(span)[0]
    _, _, n = _LIST.unpack_from(span, at)
    return n, span[at + _LIST.size :]


def _n_used(head: bytes, header: Header) -> int:
    """Return how many tokens there are without those at the end that are unused. Raises struct.error."""
    n, _ = _values(head, header, "tokens")
    n_kinds, kinds = _values(head, header, "token_type")
    while n and n == n_kinds and _ENTRY.unpack_from(kinds, (n - 1) * _ENTRY.size)[0] == _UNUSED:
        n, n_kinds = n - 1, n_kinds - 1
    return n


def _entries(head: bytes, header: Header, name: str, n: int) -> bytes:
    """Return the bytes of an array's first `n` values. Raises struct.error."""
    _, data = _values(head, header, name)
    if name != "tokens":
        return data[: n * _ENTRY.size]
    at = 0
    for _ in range(n):
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return data[:at]


def vocabulary_file(head: bytes, header: Header) -> bytes:
    """Return a GGUF file with all that a model's header says, chat template included, and without any weights."""
    keys = [head[start:end] for start, end in header.spans.values()]
    packed = b"".join([b"GGUF", struct.pack("<IQQ", 3, 0, len(keys)), *keys])
    return packed + bytes(-len(packed) % header.alignment)
