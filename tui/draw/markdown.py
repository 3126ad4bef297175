"""Draws Markdown as lines of styled text, every word tinted by the side that wrote it. Pure: no widget, no terminal.

Textual's own Markdown widget makes a widget of each paragraph and knows no position in the source: a conversation of
200 messages would be thousands of widgets, and no word could be tinted. Here a message is a list of lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Span, Text

from .theme import AHEAD, SIDE_OF, TextTheme, fit, strip_marks

# Entities stay pieces of their own (`text_special`): what they stand for was in no text that was made safe before.
_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable("text_join")
setattr(_PARSER, "normalizeLink", str)  # noqa: B010 - an address is shown as it was written
setattr(_PARSER, "normalizeLinkText", str)  # noqa: B010 - and %1B in it stays that
_CONSOLE = Console(width=80, file=StringIO(), color_system="truecolor", legacy_windows=False)
_AT_MARK = re.compile(f"([{''.join(SIDE_OF)}])")
_BULLETS = "•◦▪"
MIN_WIDTH = 8  # cells; narrower text is not readable
MAX_DEPTH = 12  # of nested quotes and lists; a model that repeats ">" must not make the parser recurse for ever
Lines = list[Text]


def wrap(text: Text, width: int) -> Lines:
    """Return `text` in lines of at most `width` cells."""
    return list(text.wrap(_CONSOLE, max(MIN_WIDTH, width), overflow="fold"))


def last_block(source: str) -> int:
    """Return where the last block of a growing document begins in `source`; what is before it will not change."""
    top = [token.map[0] for token in _PARSER.parse(source) if token.level == 0 and token.map is not None]
    if not top:
        return 0
    return sum(len(line) for line in source.splitlines(keepends=True)[: top[-1]])


class Painter:
    """Draws marked Markdown for one width and theme. `side` is the present writer; it carries over to the next text.

    From `is_ahead` on the words are faded: the reader has not reached them.
    """

    def __init__(self, width: int, theme: TextTheme, side: str = "") -> None:
        self.width = max(MIN_WIDTH, width)
        self.theme = theme
        self.side = side
        self.is_ahead = False
        self._kinds: dict[str, Callable[[SyntaxTreeNode, int], Lines]] = {
            "heading": self._heading,
            "fence": self._code,
            "code_block": self._code,
            "bullet_list": self._list,
            "ordered_list": self._list,
            "blockquote": self._quote,
            "table": self._table,
            "hr": lambda node, width: [Text("---" if self.theme.plain else "─" * width, self.theme.dim)],
            "html_block": lambda node, width: wrap(self._tint(node.content.rstrip(), Style()), width),
        }

    def paint(self, source: str) -> Lines:
        """Return the lines of a document, with an empty one between two blocks."""
        return self._blocks(SyntaxTreeNode(_PARSER.parse(source)), self.width, loose=True)

    def _blocks(self, parent: SyntaxTreeNode, width: int, *, loose: bool) -> Lines:
        lines: Lines = []
        for node in parent.children:
            if lines and loose:
                lines.append(Text())
            deep = node.level > 2 * MAX_DEPTH
            lines += (self._paragraph if deep else self._kinds.get(node.type, self._paragraph))(node, width)
        return lines

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _paragraph(self, node: SyntaxTreeNode, width: int) -> Lines:
        return wrap(self._inline(node), width)

    def _heading(self, node: SyntaxTreeNode, width: int) -> Lines:
        text = Text(f"{node.markup} " if self.theme.plain and "#" in node.markup else "")
        text.append_text(self._inline(node, self.theme.strong + Style(underline=node.tag == "h1" or None)))
        return wrap(text, width)

    def _code(self, node: SyntaxTreeNode, width: int) -> Lines:
        language = strip_marks(node.info or "").strip().split(" ")[0]
        raw = node.content.rstrip("\n")
        sign = "    " if self.theme.plain else "▏ "
        lines = [Text(sign + language, self.theme.dim)] if language else []
        for line, source in zip(self._highlight(strip_marks(raw), language), raw.split("\n"), strict=False):
            seam = self._turn(source)
            whole = Text.assemble(line, seam)
            if self.is_ahead:
                whole.stylize(self.theme.dim)
            lines += _beside(sign, self._side_style(), wrap(whole, width - len(sign)))
        return lines

    def _turn(self, source: str) -> Text:
        """Take note of the marks in a line of code; return the sign of a seam, which goes behind the line."""
        before = self.side
        self._heed(source)
        seam = before and before != self.side
        return Text(f"  {'' if self.theme.plain else '⇢'}{self.theme.mark(self.side)}" if seam else "", self.theme.dim)

    def _highlight(self, code: str, language: str) -> Lines:
        text = Text(code)
        if language and code:
            text = Syntax("", language, theme=self.theme.code_theme, background_color="default").highlight(code)
            text.no_wrap, text.style = False, ""
            text.spans = [Span(a, b, _bare(style)) for a, b, style in text.spans]
        return list(text.split("\n", allow_blank=True))

    def _list(self, node: SyntaxTreeNode, width: int) -> Lines:
        lines: Lines = []
        number = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else None
        bullet = "- " if self.theme.plain else f"{_BULLETS[node.level // 2 % len(_BULLETS)]} "
        for i, item in enumerate(node.children):
            loose = any(child.type == "paragraph" and not child.hidden for child in item.children)
            if lines and loose:
                lines.append(Text())
            sign = bullet if number is None else f"{number + i}. "
            inside = self._blocks(item, width - len(sign), loose=loose)
            lines += _beside(" " * len(sign), Style(), inside or [Text()], first=sign)
        return lines

    def _quote(self, node: SyntaxTreeNode, width: int) -> Lines:
        inside = self._blocks(node, width - 2, loose=True)
        return _beside("> " if self.theme.plain else "│ ", self.theme.dim, inside)

    def _table(self, node: SyntaxTreeNode, width: int) -> Lines:
        rows = [[self._inline(cell) for cell in row.children] for part in node.children for row in part.children]
        columns = max(map(len, rows), default=0)
        widths = [max((r[i].cell_len for r in rows if i < len(r)), default=0) for i in range(columns)]
        if sum(widths) + 2 * columns > width or self.theme.plain:
            return _as_records(rows, width)
        lines = []
        for row in rows:
            line = Text()
            for cell, cells in zip(row, widths, strict=False):
                line.append_text(cell)
                line.append(" " * (cells - cell.cell_len + 2))
            lines.append(line)
        rule = Text("  ".join("─" * cells for cells in widths), self.theme.dim)
        return [*lines[:1], rule, *lines[1:]]

    # --- words ------------------------------------------------------------------------------------------------------

    def _inline(self, node: SyntaxTreeNode, style: Style | None = None) -> Text:
        text = Text()
        for child in node.children if node.type != "inline" else [node]:
            self._words(child, style or Style(), text, 0)
            self._heed(child.content)  # also of one that stood in an address
        return text

    def _heed(self, source: str) -> None:
        """Take note of the marks in a source that is drawn in one piece."""
        for mark in _AT_MARK.findall(source):
            if SIDE_OF[mark] == AHEAD:
                self.is_ahead = True
            else:
                self.side = SIDE_OF[mark]

    def _words(self, node: SyntaxTreeNode, style: Style, into: Text, depth: int) -> None:
        """Add the words of a node and of its children to `into`."""
        own = {
            "em": Style(italic=True), "strong": self.theme.strong, "s": Style(strike=True),
            "code_inline": self.theme.code, "link": Style(underline=True),
        }.get(node.type)  # fmt: skip
        style = style if own is None else style + own
        if node.type in ("softbreak", "hardbreak"):
            into.append("\n")  # also a soft one: poems, addresses and logs mean theirs
        elif node.children and depth < MAX_DEPTH:
            for child in node.children:
                self._words(child, style, into, depth + 1)
        elif node.content:
            content = fit(node.content) if node.type == "text_special" else node.content
            into.append_text(self._tint(content, style, code=node.type == "code_inline"))
        if node.type in ("link", "image"):
            self._address(node, into)

    def _address(self, node: SyntaxTreeNode, into: Text) -> None:
        """Add the address of a link, which its name could hide."""
        href = str(node.attrs.get("href") or node.attrs.get("src") or "")
        href = fit(strip_marks(href))
        if href and not into.plain.endswith(href):
            into.append(f" ({href})", self.theme.dim)

    def _tint(self, content: str, style: Style, *, code: bool = False) -> Text:
        """Return text with its marks turned into tints; a seam gets a sign, too."""
        text = Text()
        for piece in _AT_MARK.split(content):
            if SIDE_OF.get(piece) == AHEAD:
                self.is_ahead = True
            elif piece in SIDE_OF:
                if self.side and self.side != SIDE_OF[piece]:
                    text.append(f"⇢{self.theme.mark(SIDE_OF[piece])} ".lstrip("⇢" if self.theme.plain else ""), "bold")
                self.side = SIDE_OF[piece]
            elif piece:
                own = style if code else self._side_style() + style
                text.append(piece, own + self.theme.dim if self.is_ahead else own)
        return text

    def _side_style(self) -> Style:
        return self.theme.tints.get(self.side, Style())


def _bare(style: str | Style) -> Style:
    """Return a style of the highlighter without its background: the screen has its own."""
    found = style if isinstance(style, Style) else Style.parse(style)
    return Style(color=found.color, bold=found.bold, italic=found.italic)


def _beside(sign: str, style: Style, lines: Lines, first: str | None = None) -> Lines:
    """Return `lines` with a sign before each, and perhaps another one before the first."""
    return [Text.assemble((first if first and not i else sign, style), line) for i, line in enumerate(lines)]


def _as_records(rows: list[list[Text]], width: int) -> Lines:
    """Return a table that is too wide, or to be read aloud, as lines of `heading: cell`."""
    if not rows:
        return []
    names, lines = rows[0], Lines()
    for row in rows[1:] or [names]:
        if lines:
            lines.append(Text())
        for name, cell in zip(names, row, strict=False):
            lines += wrap(Text.assemble(name, ": ", cell) if rows[1:] else cell, width)
    return lines


def code_blocks(source: str) -> list[str]:
    """Return the code blocks of a document, unchanged."""
    return [token.content.rstrip("\n") for token in _PARSER.parse(source) if token.type in ("fence", "code_block")]
