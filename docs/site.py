"""Lay out the pages for zensical, which makes the site of them: `make docs`.

build/pages gets README.md, docs/ and every file of the checkout that these link to, at the same places: so the links
are those that a forge follows. build/zensical.toml is zensical.toml with the pages as its menu, so that a new page
needs no line of its own. Lists are the one difference: zensical's parser wants four spaces where a forge takes two.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
FRONT = "README.md"
KINDS = {
    "start": "Start",
    "howto": "How to",
    "reference": "Reference",
    "explain": "Why",
    "lab": "Measured",
    "contribute": "Contribute",
}
ITEM = re.compile(r"(?:[-*+]|\d+\.) ")
FENCE = re.compile(r" *(```|~~~)")


def linked(front: Path, pages: list[Path]) -> set[Path]:
    """The pages and, from page to page, all that they link to in the checkout."""
    found, left = set[Path](), [front, *pages]
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".md":
            targets = re.findall(r"\]\((?!\w+:)([^)#\s]+)", path.read_text("utf-8"))
            left += [(path.parent / target).resolve() for target in targets]
    return found


def widened(text: str) -> str:
    """A page whose lists are indented by four spaces a level, and begin behind an empty line."""
    lines: list[str] = []
    in_list, fence, shift = False, "", 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        mark = FENCE.match(line)
        if fence:
            lines.append(" " * shift + line if line else line)
            fence = "" if mark and mark[1] == fence else fence
            continue
        if ITEM.match(line):
            if not in_list and lines and lines[-1]:
                lines.append("")
            in_list = True
        elif line and not indent and not (lines and lines[-1]):
            in_list = False
        shift = 4 * -(-indent // 3) - indent if in_list and indent else 0
        lines.append(" " * shift + line if line else line)
        fence = mark[1] if mark else ""
    return "\n".join(lines) + "\n"


def menu(pages: list[Path]) -> str:
    """The pages as zensical's `nav`: the front page, then one entry a folder."""
    entries = [json.dumps(FRONT)]
    for folder, title in KINDS.items():
        names = [page.relative_to(ROOT).as_posix() for page in pages if page.parent.name == folder]
        entries.append(f"{{ {json.dumps(title)} = {json.dumps(names)} }}")
    return "nav = [\n" + "".join(f"  {entry},\n" for entry in entries) + "]\n"


def main() -> None:
    """Write build/pages and build/zensical.toml."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    for path in linked(ROOT / FRONT, pages):
        target = BUILD / "pages" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(widened(path.read_text("utf-8")), "utf-8")
        else:
            shutil.copyfile(path, target)
    settings = (ROOT / "zensical.toml").read_text("utf-8")
    (BUILD / "zensical.toml").write_text(settings.replace("[project]\n", "[project]\n" + menu(pages), 1), "utf-8")


if __name__ == "__main__":
    main()
