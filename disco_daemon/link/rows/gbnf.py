"""Which grammars from another machine llama.cpp's own parser is given: it trusts what it reads. Pure.

One that is nested deeply, repeats a word from 5 to 2 times, or names a token that there is not, ends the process or
holds it for ever, and with it the answers of everybody else. An edge sends what disco itself writes: names, texts,
classes of characters, alternatives, groups and repetitions.
"""

from __future__ import annotations

import re

from ..protocol import BadFrameError

MAX_GRAMMAR = 1 << 19  # characters: twice what a schema is turned into, as the calls of all tools together have at most
MAX_NESTED = 2200  # groups within each other: up to 2,000 of an array are as many; llama.cpp ends at some 10,000
MAX_TIMES = 2000  # that something is repeated; llama.cpp takes no more

_ESCAPE = r"\\(?:[nrt\"\\\[\]\-^]|x[0-9A-Fa-f]{2}|u(?!D[89A-Fa-f])[0-9A-Fa-f]{4}|U00(?:0[0-9A-Fa-f]|10)[0-9A-Fa-f]{4})"
_SIGN = re.compile(
    rf'(?P<text>"(?:{_ESCAPE}|[^"\\\x00\n])*")'
    rf"|(?P<set>\[\^?(?:{_ESCAPE}|[^\]\\\x00\n])*\])"
    r"|(?P<times>\{(?P<least>[0-9]{1,4})(?:(?P<range>,)(?P<most>[0-9]{1,4})?)?\})"
    r"|(?P<open>\()|(?P<close>\))"
    r"|::=|[A-Za-z][A-Za-z0-9-]*|[0-9][A-Za-z0-9-]*|[|*+?.]|[ \t\r\n]+|\#[^\x00\n]*",
    re.DOTALL,
)


def check_grammar(text: str) -> None:
    """Check that llama.cpp can be given a grammar. Raises BadFrameError."""
    if len(text) > MAX_GRAMMAR:
        raise BadFrameError(f"a grammar of {len(text)} characters, where {MAX_GRAMMAR} are allowed")
    at = depth = 0
    while at < len(text):
        found = _SIGN.match(text, at)
        if found is None:
            raise BadFrameError(f"a grammar with {text[at : at + 10]!r} at character {at}, which is none of its signs")
        at = found.end()
        depth += (found["open"] is not None) - (found["close"] is not None)
        if not 0 <= depth <= MAX_NESTED:
            raise BadFrameError(f"a grammar whose groups are not closed, or nested more than {MAX_NESTED} deep")
        if found["times"] is not None:
            _check_times(int(found["least"]), found["range"] is not None, found["most"])
    if depth:
        raise BadFrameError("a grammar with a group that does not end")


def _check_times(least: int, is_range: bool, most: str | None) -> None:
    last = least if not is_range or most is None else int(most)
    if not least <= last <= MAX_TIMES:
        raise BadFrameError(f"a grammar that repeats something from {least} to {last} times")
