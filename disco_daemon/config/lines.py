"""Where in config.toml a setting stands, for messages about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_RULE = re.compile(r"\s*\[\[\s*rules\s*\]\]")
_OTHER_TABLE = re.compile(r"\s*\[(?!\s*rules\.)(?!\[\s*rules\.)")


def line_of(path: Path, problem: str) -> str:
    """Return the line of the setting in msgspec's message as ", line N"; empty if it names none."""
    pointer = re.search(r"at `\$\.(\w+)(?:\.(\w+))?", problem)
    unknown = re.search(r"unknown field `(\w+)`", problem)
    section = pointer[1] if pointer else ""
    name = unknown[1] if unknown else pointer[2] or "" if pointer else ""
    with suppress(OSError, UnicodeDecodeError):
        return _find_line(path.read_text("utf-8").splitlines(), section, name)
    return ""


def _find_line(lines: Sequence[str], section: str, name: str) -> str:
    """Return the line of a setting of that section, or of any if that is empty."""
    within = ""
    for number, line in enumerate(lines, 1):
        if header := re.match(r"\s*\[\s*([\w-]+)", line):
            within = header[1]
            if within == name and not section:
                return f", line {number}"
        elif name and within == (section or within) and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]", line):
            return f", line {number}"
    return ""


def line_of_rule(path: Path, index: int, key: str) -> str:
    """Return the line of a rule's key, or of the rule, as ", line N"; empty where the file has no such table."""
    with suppress(OSError, UnicodeDecodeError):
        lines = path.read_text("utf-8").splitlines()
        begins = [number for number, line in enumerate(lines, 1) if _RULE.match(line)]
        if index < len(begins):
            first = begins[index]
            for number, line in enumerate(lines[first:], first + 1):
                if _RULE.match(line) or _OTHER_TABLE.match(line):
                    break
                if key and re.match(rf"\s*(?:\[\s*rules\.)?[\"']?{re.escape(key)}\b", line):
                    return f", line {number}"
            return f", line {first}"
    return ""
