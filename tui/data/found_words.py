"""Where the words of a search stand in a text, found as the store finds them: without case and accents. Pure."""

from __future__ import annotations

import re
from unicodedata import combining, normalize

_WORD = re.compile(r"[^\W_]+")


def words_in(text: str, query: str) -> re.Pattern[str]:
    """Return what matches the words of a search in `folded` texts such as `text`.

    A word matches the beginning of a word. In a text that has none of them so, the whole query matches anywhere.
    """
    words = [r"[\W_]+".join(found) for word in query.split() if (found := _WORD.findall(folded(word)))]
    begun = re.compile(rf"(?<![^\W_])(?:{'|'.join(words)})")
    if words and begun.search(folded(text)):
        return begun
    return re.compile(r"\s+".join(map(re.escape, folded(query).split())) or r"(?!)")


def folded(text: str) -> str:
    """Return a text without case and accents, each character at the place that it had."""
    return text.lower() if text.isascii() else "".join(map(_folded, text))


def _folded(character: str) -> str:
    bare = [part for part in normalize("NFD", character.lower()) if not combining(part)]
    return bare[0] if len(bare) == 1 else character
