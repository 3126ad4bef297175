"""Grapheme clusters, what a reader sees as one character (Unicode UAX #29), at the end of a growing text. Pure.

A text that is still growing may end in a cluster which the next piece would extend: an emoji before its skin tone, a
flag's first half, a Thai consonant before its vowel sign. Where the last character is of a kind that is often extended,
the cluster is *open*. Strictly any character may get a combining mark; to wait for that after every "e" would hold all
text back by a token. So ASCII, Latin, Greek, Cyrillic, CJK and whole Hangul syllables are never open, which costs a
decomposed accent now and then that comes with the next piece.
"""

from __future__ import annotations

import regex

# Scripts whose letters take vowel signs, tone marks or points.
_SCRIPTS = (
    "Arab", "Beng", "Deva", "Gujr", "Guru", "Hebr", "Khmr", "Knda", "Laoo", "Mlym", "Mymr", "Nkoo", "Orya", "Sinh",
    "Syrc", "Taml", "Telu", "Thaa", "Thai", "Tibt", "Bali", "Java", "Sund", "Lana", "Talu", "Cham", "Limb", "Tglg",
)  # fmt: skip
_CLUSTER = regex.compile(r"\X")
_OPEN = regex.compile(
    r"(?V1)["
    r"\r"  # before a line feed
    r"\p{M}\p{Emoji_Modifier}"  # marks, variation selectors; skin tones: more may follow
    r"\u200c\u200d\U000e0020-\U000e007f"  # joiners, and the tag characters of regional flags
    r"\p{Extended_Pictographic}\p{Regional_Indicator}"
    r"\p{GCB=Prepend}\p{GCB=L}\p{GCB=V}\p{GCB=T}"  # conjoining jamo
    r"[" + "".join(rf"\p{{Script={name}}}" for name in _SCRIPTS) + r"&&\p{L}]"
    r"]"
)


def settled(text: str) -> int:
    """Return the number of characters that no further text can change: all, or those before an open cluster at the end.

    `text` begins at a cluster's border.
    """
    if text.isascii() and not text.endswith("\r"):
        return len(text)
    if _OPEN.match(text, len(text) - 1) is None:
        return len(text)
    start = len(text)
    for cluster in _CLUSTER.finditer(text):
        start = cluster.start()
    return start


def extends(cluster: str, following: str) -> bool:
    """Whether `following` (not empty) makes the one cluster `cluster` longer."""
    found = _CLUSTER.match(cluster + following[:1])
    return found is not None and found.end() > len(cluster)
