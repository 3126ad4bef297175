"""Edits of config.toml that leave what was written by hand where it stands, comments too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def put(table: Any, key: str, value: Any) -> None:
    """Set a value of a table; a new one stands before the comments behind it.

    To tomlkit these are part of the table, also an entry of a list that is commented out: once that is used again, what
    stands behind it is its own.
    """
    from tomlkit.items import Table

    if key in table or not isinstance(table, Table):
        table[key] = value
        return
    body, behind = table.value.body, []
    while body and body[-1][0] is None:
        behind.append(body.pop())
    table[key] = value
    body.extend(reversed(behind))


def without_entry(document: TOMLDocument, table: str, name: str) -> TOMLDocument:
    """Return settings without the entry of `[[table]]` that is called so; comments before and behind it stay.

    To tomlkit what stands behind an entry is part of it, such as an entry that was commented out by hand.
    """
    import tomlkit

    entries: Any = document.get(table, [])
    at = next((i for i, entry in enumerate(entries) if entry.get("name") == name), None)
    if at is None:
        return document
    lines = tomlkit.dumps(document).splitlines(keepends=True)
    del entries[at]
    if not entries:
        document.pop(table, None)
    heads = [i for i, line in enumerate(lines) if re.match(rf"\s*\[\[\s*{table}\s*\]\]", line)]
    if at >= len(heads):  # it is written as an array
        return document
    inner = re.compile(rf"\s*\[\s*{table}\s*\.|\s*[^\s\[]|\s*$")
    end = next((i for i in range(heads[at] + 1, len(lines)) if not inner.match(lines[i])), len(lines))
    while not lines[end - 1].partition("#")[0].strip():
        end -= 1
    try:
        found = tomlkit.parse("".join([*lines[: heads[at]], *lines[end:]]))
    except tomlkit.exceptions.ParseError:  # a text over several lines looks like a head
        return document
    return found if found.unwrap() == document.unwrap() else document
