"""Makes text of strangers fit to be shown: of servers, model files, file names, other programs. Pure.

`plain` and `one_line` remove control codes, and ends of lines that would forge a line of a log; `masked` removes every
piece of a key; `writable_text` only makes a text one that can be written at all.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from urllib.parse import quote, quote_plus

MARK = "\ufffd"  # stands for what must not be shown
STARS = "***"
MAX_LINE = 200  # characters of a stranger's line; the rest is a page of HTML
PIECE = 6  # characters of a key in a row that are never shown; servers that mask one show four
N_NEAR = 3  # names that may have been meant
LEAST_KEY = 4  # characters; what is shorter is a placeholder, such as the "x" of a server of one's own

# What a terminal obeys in place of showing it, or shows as something else: control characters but for line feeds and
# tabs (ESC and its one-byte forms begin sequences), what turns the writing direction (Unicode's Bidi_Control, and the
# deprecated signs beside them), other line ends, marks of annotation, and halves of characters: those cannot be
# printed.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)

_HALF = re.compile("[\ud800-\udfff]")


def plain(text: str, instead: str = MARK) -> str:
    """Return `text` with `instead` in place of each character that a terminal would obey; line feeds and tabs stay.

    Joiners of characters (emoji, Persian, Indic) stay, too: they are printable together with their neighbours.
    """
    return _UNFIT.sub(instead, text.replace("\r\n", "\n")) if not text.isprintable() else text


def is_writable(text: str) -> bool:
    """Whether a text has no half of a character, which UTF-8 cannot write."""
    return text.isascii() or _HALF.search(text) is None


def writable_text(text: str) -> str:
    """Return a text whose halves of characters are joined where both are there, and replaced where one is missing."""
    if is_writable(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Return `text`, plain, as one line of at most `limit` characters and a mark."""
    line = " ".join(plain(text[: 16 * limit]).split())  # no page of HTML is looked at to its end
    return line if len(line) <= limit else line[:limit] + "…"


def masked(text: str, key: str) -> str:
    """Return `text` with stars for every piece of `key`, of PIECE characters or more, however it is spelled."""
    grams = _grams(key)
    if not grams:
        return text
    size = min(map(len, grams))
    shown, hidden_to = [], 0
    for at, c in enumerate(text):
        if text[at : at + size] in grams:
            if at >= hidden_to:
                shown.append(STARS)
            hidden_to = at + size
        if at >= hidden_to:
            shown.append(c)
    return "".join(shown)


def tells(text: str, key: str) -> bool:
    """Whether a text contains a piece of the key."""
    return masked(text, key) != text


@lru_cache(maxsize=16)
def _grams(key: str) -> frozenset[str]:
    """Return all secret pieces of a key, in all its spellings."""
    if len(key) < LEAST_KEY:
        return frozenset()
    size = min(PIECE, len(key))
    return frozenset(form[i : i + size] for form in _spelled(key) for i in range(len(form) - size + 1))


def _spelled(key: str) -> Iterator[str]:
    """Return the key as it is, in a URL, and in base64 at any place of a longer text."""
    yield key
    yield quote(key, safe="")
    yield quote_plus(key)
    raw = key.encode("utf-8", "replace")
    for lead in range(3):  # how many bytes stand before it in its group of three
        whole = base64.b64encode(b"\0" * lead + raw).decode().rstrip("=")
        own = whole[(0, 2, 3)[lead] : len(whole) - 1]  # without the characters that share bits with a neighbour
        yield own
        yield own.replace("+", "-").replace("/", "_")


def did_you_mean(said: str, known: Iterable[str]) -> str:
    """Return a question for the known names that are like it, with a space behind it; empty if none is."""
    near = get_close_matches(said, list(known), N_NEAR)
    return f"did you mean {', '.join(near)}? " if near else ""
