"""How long the sentences of the pages are: `python docs/sentences.py [--quiet] [PAGE …]`; `make check` runs it.

A page that one reads once has a median of at most 17 words and 36 at the ninetieth percentile. Sentences in paragraphs,
items of lists and cells of tables count alike; headings, code, pictures and what is made of code do not, nor does what
has fewer than four words: a figure or a name in a cell makes no page easier to read.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEDIAN, P90 = 17, 36  # words
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FEWEST = 4  # words of what is a sentence
UNREAD = ("lab/",)  # tables of figures, one newest on top: they are looked up
# Pages that wait to be written anew. The list may only get shorter: a page that has got better leaves it.
WAITING = ()


def pages() -> dict[str, Path]:
    """The pages by their names in docs/."""
    found = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix().removeprefix("docs/"): path for path in found}


def parts(text: str) -> Iterator[str]:
    """The paragraphs, items and cells of a page, each on one line, without code, headings and what is made of code."""
    text = re.sub(r"<!-- generated: ([\w-]+) -->.*?<!-- end: \1 -->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=\||#|>)", text):
        line = " ".join(block.split())
        if not line or line.startswith("#") or re.fullmatch(r"[|:\- ]+", line):
            continue
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        else:
            yield re.sub(r"^(?:[-*+]|\d+\.|>)\s+", "", line)


def lengths(text: str) -> list[int]:
    """The words of each sentence of a page. A word of code, a link or a picture's caption counts as its words do."""
    found = []
    for part in parts(text):
        plain = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", part)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"`[^`]*`", "code", plain)
        for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9])", plain):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) >= FEWEST:
                found.append(len(words))
    return found


def measured(text: str) -> tuple[int, float, int]:
    """The number of sentences of a page, their median and their ninetieth percentile, in words."""
    found = sorted(lengths(text))
    return (
        (len(found), statistics.median(found), found[min(len(found) - 1, int(0.9 * len(found)))])
        if found
        else (0, 0, 0)
    )


def main(names: list[str]) -> int:
    """Print the figures, and return 1 if a page is too long-winded or waits no more."""
    said = []
    quiet = "--quiet" in names
    names = [name for name in names if name != "--quiet"]
    if not quiet:
        print(f"{'page':34} {'sentences':>9} {'median':>6} {'p90':>5}")
    for name, path in pages().items():
        if names and name not in names:
            continue
        n, median, p90 = measured(path.read_text("utf-8"))
        if not quiet:
            print(f"{name:34} {n:9} {median:6g} {p90:5}")
        good = median <= MEDIAN and p90 <= P90
        if not good and name not in WAITING and not name.startswith(UNREAD):
            said.append(f"{name}: shorter sentences, please: median {MEDIAN}, ninetieth percentile {P90} words at most")
        if good and name in WAITING:
            said.append(f"{name} reads well now: take it off the list of those that wait")
    print(*said, sep="\n", end="\n" if said else "")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
