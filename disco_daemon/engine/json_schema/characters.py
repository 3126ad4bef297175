"""Sets of characters as ranges of their code points, and how a grammar writes them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # from the first to the last, in order, without overlaps

LAST = 0x10FFFF
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}  # JSON's escapes
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


def ranges(*found: tuple[int, int]) -> Ranges:
    """Return ranges in order, those that touch as one."""
    made: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return tuple(made)


def of_text(characters: Iterable[str]) -> Ranges:
    """Return the set of these characters."""
    return ranges(*((ord(c), ord(c)) for c in characters))


def both(some: Ranges, others: Ranges) -> Ranges:
    """Return what is in both sets."""
    made = [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) <= min(b, d)]
    return ranges(*made)


def other(some: Ranges) -> Ranges:
    """Return all characters that are not in a set."""
    made, start = [], 0
    for first, last in some:
        made.append((start, first - 1))
        start = last + 1
    return both(tuple((a, b) for a, b in [*made, (start, LAST)] if a <= b), EVERY)


def literal(text: str) -> str:
    """Write a text as a literal of a grammar."""
    signs = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(signs.get(c, c) if c.isprintable() else f"\\U{ord(c):08X}" for c in text) + '"'


def in_json(some: Ranges) -> str:
    """Write one character of a set as it stands in a JSON string: as it is, or as an escape where JSON has to."""
    if only := single(some):
        return literal(json.dumps(only, ensure_ascii=False)[1:-1])
    plain = both(some, other(_ESCAPED))
    found = [plainly(plain)] if plain else []
    if short := [sign for code, sign in _SHORT.items() if _has(some, code)]:
        found.append(f'"\\\\" {plainly(of_text(short))}')
    rare = [code for code in range(0x20) if code not in _SHORT and _has(some, code)]
    if len(rare) == 0x20 - 5:
        found.append('"\\\\u00" [01] [0-9a-fA-F]')
    elif rare:
        found.append('"\\\\u00" (' + " | ".join(f'"{code:02x}"' for code in rare) + ")")
    return found[0] if len(found) == 1 and plain else f"({' | '.join(found)})"


def single(some: Ranges) -> str:
    """Return the only character of a set; empty if it has several."""
    return chr(some[0][0]) if len(some) == 1 and some[0][0] == some[0][1] else ""


def _has(some: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in some)


def plainly(some: Ranges) -> str:
    """Write one character of a set as it is."""
    if only := single(some):
        return literal(only)
    return "[" + "".join(_sign(a) + (f"-{_sign(b)}" if b > a + 1 else _sign(b) * (b > a)) for a, b in some) + "]"


def _sign(code: int) -> str:
    c = chr(code)
    if c.isascii():
        return c if c.isalnum() else f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
