r"""A schema's regular expression, spelled so that llama.cpp's converter makes the right grammar of it. Pure.

The converter copies what it does not know: `\d` and `\.` become escapes that llama.cpp refuses, a quantifier behind an
escaped sign repeats the whole word before it, and `.` or `[^a]` take the quote that ends the JSON string. So each
escape becomes a class of characters in brackets, and what JSON itself writes as an escape becomes that.
"""

from __future__ import annotations

import re

_PART = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[(?P<no>\^?)(?P<set>(?:\\.|[^\]\\])*)\]|\((?P<look>\?:?)|[.\"]",
    re.DOTALL,
)
_IN_SET = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[\"]", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " "}  # no other white space stands in a JSON string as it is
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}  # JSON's
NOT_IN_A_STRING = r"\x22\x5C\x00-\x1F"  # what JSON writes as an escape only


class PatternError(ValueError):
    """No grammar can be made of a pattern; the message is fit for a user."""


def spell(pattern: str) -> str:
    r"""Rewrite a pattern with plain classes: `\d+\.` is `[0-9]+[\x2E]`. Raises PatternError."""
    return _PART.sub(_respell, pattern)


def _respell(part: re.Match[str]) -> str:
    text = part[0]
    if text == ".":
        return f"[^{NOT_IN_A_STRING}]"
    if text == '"':
        return _one('"')
    if part["look"] is not None:
        if part["look"] == "?:":
            return "("
        raise _meaningless("(?")
    if part["set"] is not None:
        if part["no"]:
            return f"[^{_IN_SET.sub(_in_set, part['set'])}{NOT_IN_A_STRING}]"
        return f"[{_IN_SET.sub(_in_set, part['set'])}]"
    kind = text[1]
    if kind in _CLASSES:
        return f"[{_CLASSES[kind]}]"
    if kind.lower() in _CLASSES:
        return f"[^{_CLASSES[kind.lower()]}{NOT_IN_A_STRING}]"
    return _one(_character(text))


def _in_set(part: re.Match[str]) -> str:
    """One sign of a class, as grammars spell it. Those that JSON escapes stand in no string as they are."""
    text = part[0]
    if text != '"' and text[1] in _CLASSES:
        return _CLASSES[text[1]]
    return _hex(text if text == '"' else _character(text))


def _character(escape: str) -> str:
    r"""Return the character that an escape stands for. Raises PatternError if there is none: `\b`, `\1`, `\p{L}`."""
    kind = escape[1]
    if len(escape) > 2:
        code = int.from_bytes(bytes.fromhex(escape[2:]))
        if 0xD800 <= code < 0xE000:
            raise PatternError("'pattern' has half of a character (a surrogate): write the character itself.")
        return chr(code)
    if kind in _CONTROLS:
        return _CONTROLS[kind]
    if kind.isalnum() or kind == "_":
        raise _meaningless(escape)
    return kind


def _one(sign: str) -> str:
    """Return one character of a JSON string, as JSON writes it."""
    if sign in '"\\':
        return rf"([\x5C][{_hex(sign)}])"
    if sign in _SHORT:
        return rf"([\x5C][{_SHORT[sign]}])"
    if ord(sign) < 0x20:
        raise PatternError("'pattern' names a control character, which cannot be asked for.")
    return f"[{_hex(sign)}]"


def _hex(sign: str) -> str:
    code = ord(sign)
    return f"\\x{code:02X}" if code < 0x80 else sign


def _meaningless(escape: str) -> PatternError:
    return PatternError(
        f"'pattern' has a {escape}, which no grammar can say: possible are plain characters, classes, groups, |, "
        "*, +, ?, {m,n} and \\d, \\w, \\s."
    )
