"""Makes text of strangers fit to be shown: of servers, model files, file names, other programs. Pure.

`plain` and `one_line` remove control codes, and ends of lines that would forge a line of a log; `masked` removes every
piece of a key; `writable_text` only makes a text one that can be written at all. `reason_of` and `in_words` say in
words of ours what a library says in its own.
"""

from __future__ import annotations

import base64
import errno
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

MARK = "\ufffd"  # stands for what must not be shown
STARS = "***"
ANY = "*"  # in a pattern of names: any characters, or none
MAX_LINE = 200  # characters of a stranger's line; the rest is a page of HTML
PIECE = 6  # characters of a key in a row that are never shown; servers that mask one show four
N_NEAR = 3  # names that may have been meant
FEW = 12  # names that are all shown; of more, only those that are alike
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


def is_like(name: str, pattern: str) -> bool:
    """Whether a name is one of a pattern's; a look along the name, however the two are made."""
    first, *inner, last = pattern.split(ANY)
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in inner:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def which(said: str, known: Iterable[str], more: str = "") -> str:
    """Return which of the known names may be meant: the nearest, and all where they are few; else `more` is said."""
    names = list(known)
    near = did_you_mean(said, names)
    if not names:
        return more or "there are none"
    rest = f"{'It' if near else 'it'} is one of {', '.join(names)}" if len(names) <= FEW else more
    return (near + rest).strip() or f"choose one, such as {', '.join(names[:N_NEAR])}"


def count_of(n: float, one: str, many: str = "") -> str:
    """Return a number with its noun, such as "1 sample" and "3 samples"; `many` where an s does not do."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# --- errors of libraries, in words ------------------------------------------------------------------------------------

_ERRORS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.ECONNRESET: "the connection was cut",
    errno.EPIPE: "the connection was cut",
    errno.ETIMEDOUT: "no answer in time",
    errno.EHOSTUNREACH: "this network has no way there",
    errno.ENETUNREACH: "this network has no way there",
    errno.EADDRINUSE: "another program has that port",
    errno.ENOENT: "there is no such file",
    errno.EACCES: "permission denied",
    errno.ENOSPC: "the disk is full",
}
_MAX_CAUSES = 8  # errors behind an error that are looked at


def reason_of(error: BaseException | str) -> str:
    """Return why the outside failed, as a clause without a library's words: no numbers of errors, no class names.

    What a message of ours says stays as it is. Connections are looked through to the error of the system behind them.
    """
    if isinstance(error, str):
        return re.sub(r"^\[Errno -?\d+\] ", "", error)
    seen: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if seen is None:
            break
        if isinstance(seen, OSError) and (words := _words_of(seen)):
            return words
        inner = getattr(seen, "os_error", None) or getattr(seen, "reason", None)  # aiohttp's, and urllib's
        seen = inner if isinstance(inner, BaseException) else seen.__cause__ or seen.__context__
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return reason_of(str(error)) or type(error).__name__


def _words_of(error: OSError) -> str:
    """Return what the system says, in words; empty if the error says nothing itself."""
    if type(error).__name__ in ("gaierror", "ClientConnectorDNSError") or (error.errno or 0) < 0:
        return "its name cannot be looked up: is it spelled right, and is there a network?"
    if said := getattr(error, "verify_message", ""):
        return f"its certificate is not trusted: {said}"
    if error.errno in _ERRORS and hasattr(error, "filename"):
        return _ERRORS[error.errno]
    text = error.strerror if error.errno and isinstance(error.strerror, str) else ""
    return "" if text.startswith("[") else text[:1].lower() + text[1:]


_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "null": "null",
    "object": "an object", "array": "a list",
}  # fmt: skip
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # the form of names of servers, models and adapters in the settings
_BOUNDS = {"<=": "of at most", ">=": "of at least", "<": "below", ">": "above"}
_UNITS = {"str": "characters", "array": "entries", "object": "entries"}


def pointed_to(problem: str) -> str:
    """Return where msgspec's message points to, `… - at `$.messages[0].role``, as `messages[0].role`; "" if nowhere."""
    if at := re.search(r"`\$\.([^`]+)`", problem):
        return at[1].replace("[...]", "")
    missing = re.search(r"missing required field `([^`]+)`", problem)
    return missing[1] if missing else ""


def in_words(problem: str, kind: Any, got: str = "") -> str:
    """Return msgspec's message on a value that is no `kind` as a predicate: "must be a whole number, not 'x'".

    `got` is the value where it was typed as a text.
    """
    said, _, _ = problem.partition(" - at `")
    allowed = _allowed_at(kind, problem)
    instead = f", not {got}" if got else ""
    if found := re.match(r"Invalid enum value (.*)", said):
        near = did_you_mean(found[1].strip("'"), map(str, allowed))
        known = f"one of {', '.join(map(str, allowed))}" if allowed else "another word"
        return f"must be {known}, not {got or found[1]}{'; ' + near.strip() if near else ''}"
    if found := re.match(r"Expected `([^`]+)`(?:, got `(\w+)`)?$", said):
        return f"must be {_kinds(found[1])}{instead or (f', not {_kinds(found[2])}' if found[2] else '')}"
    if found := re.match(r"Expected `(\w+)` (<=|>=|<|>) (\S+)$", said):
        bound = found[3].removesuffix(".0")
        return f"must be {_kinds(found[1])} {_BOUNDS[found[2]]} {bound}{instead}"
    if found := re.match(r"Expected `(\w+)` of length (<=|>=|<|>) (\d+)$", said):
        return f"must be {_kinds(found[1])} {_BOUNDS[found[2]]} {found[3]} {_UNITS.get(found[1], 'entries')}{instead}"
    if re.match(r"Expected `str` matching regex", said):
        if _NAME in said:
            taken = re.search(r"\(\?!\(\?:([a-z|]+)\)\$\)", said)
            but = f", and not {taken[1].replace('|', ', ')}" if taken else ""
            return f"must be a name of 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first{but}{instead}"
        return f"does not have the form that it must have{instead and f': {got}'}"
    if found := re.match(r"Object missing required field `(.*)`", said):
        return "is missing" if pointed_to(problem) == found[1] else f"lacks '{found[1]}'"
    if found := re.match(r"Object contains unknown field `(.*)`", said):
        near = did_you_mean(found[1], map(str, allowed))
        return f"has no '{found[1]}'{': ' + near.strip() if near else ''}"
    return f"is wrong: {said}"


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name.strip(), name.strip()) for name in names.split("|"))


def _allowed_at(kind: Any, problem: str) -> list[object]:
    """Return the words that are allowed where msgspec's message points to, the names of fields for an unknown one."""
    if not re.match("Invalid enum value|Object contains unknown field", problem):
        return []
    from msgspec import inspect

    pointer = re.search(r"`\$([^`]*)`", problem)
    level: list[Any] = [inspect.type_info(kind)]
    for name, _ in re.findall(r"\.(\w+)|(\[[^\]]*\])", pointer[1] if pointer else ""):
        level = [inner for one in _flat(level) for inner in _inside(one, name)]
    if "`key` in" in problem:
        level = [one.key_type for one in _flat(level) if isinstance(one, inspect.DictType)]
    if "unknown field" in problem:
        return [f.encode_name for one in _flat(level) if isinstance(one, inspect.StructType) for f in one.fields]
    words: list[object] = []
    for one in _flat(level):
        if isinstance(one, inspect.LiteralType):
            words += one.values
        elif isinstance(one, inspect.EnumType):
            words += [member.value for member in one.cls]
    return [*words, *["a whole number" for one in _flat(level) if words and isinstance(one, inspect.IntType)]]


def _flat(level: Iterable[Any]) -> Iterator[Any]:
    """Yield types, those inside unions and wrappers in place of these."""
    for one in level:
        if inner := getattr(one, "types", None):
            yield from _flat(inner)
        elif type(one).__name__ == "Metadata":
            yield from _flat([one.type])
        else:
            yield one


def _inside(kind: Any, name: str) -> Iterator[Any]:
    """Yield the types of a field, or without a name of the items of a list or a table."""
    if not name:
        yield from (getattr(kind, part) for part in ("item_type", "value_type") if hasattr(kind, part))
    for field in getattr(kind, "fields", ()):
        if field.encode_name == name:
            yield field.type
