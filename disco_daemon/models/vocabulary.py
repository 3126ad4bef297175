"""What a model's file says of its vocabulary: whether two models mean the same by token ids, and a file of that alone.

Pure.
"""

from __future__ import annotations

import hashlib
import struct

from .gguf import Header

# Keys (behind `tokenizer.ggml.`) that say how text becomes ids, what ids mean, and with which of them a text ends.
_MARKED = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "precompiled_charsmap", "bos_token_id", "eos_token_id",
    "eot_token_id", "eom_token_id", "eog_token_ids", "add_bos_token", "add_eos_token", "add_sep_token",
    "add_space_prefix", "remove_extra_whitespaces",
)  # fmt: skip


def vocabulary_mark(head: bytes, header: Header) -> str:
    """Return a SHA-256 (hex) over a model's tokens, their kinds and the special ones; equal where ids are the same.

    `head` are the first bytes of the file, with the whole header. Models whose vocabularies are padded to different
    lengths differ. Empty if the file has no vocabulary.
    """
    if "tokenizer.ggml.tokens" not in header.spans:
        return ""
    digest = hashlib.sha256()
    for name in _MARKED:
        start, end = header.spans.get(f"tokenizer.ggml.{name}", (0, 0))
        digest.update(struct.pack("<Q", end - start) + head[start:end])
    return digest.hexdigest()


def vocabulary_file(head: bytes, header: Header) -> bytes:
    """Return a GGUF file with all that a model's header says, chat template included, and without any weights."""
    keys = [head[start:end] for start, end in header.spans.values()]
    packed = b"".join([b"GGUF", struct.pack("<IQQ", 3, 0, len(keys)), *keys])
    return packed + bytes(-len(packed) % header.alignment)
