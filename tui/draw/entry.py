"""One message of a conversation as it is drawn: its words by side, and below an answer how it came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.style import Style
from rich.text import Text

from disco_daemon.client.amounts import dollars, figure
from disco_daemon.client.compaction import TOO_LONG
from disco_daemon.client.side_health import fallback_words

from ..data.readers import tokens_in
from . import markdown
from .theme import AHEAD, DEVICE, SERVER, TextTheme, fit, mark_sides

GUTTER = 2  # cells before each line
THOUGHT_LINES = 3  # of a thought that goes on, the latest ones
MAX_THOUGHT = 32_768  # characters of an answer's thought that are kept, the latest ones; the store has none
ENDS = {
    "length": "cut at the length limit: Ctrl+G goes on",
    "repetition": "stopped: it was repeating itself; Ctrl+R tries again (delivery.stop_repetition = false lets it)",
    "cancelled": "stopped: Ctrl+G goes on, Ctrl+R tries again",
    "error": "failed: Ctrl+R tries again",
    TOO_LONG: "too long: Alt+C puts a summary in place of what was said before, and asks again",
    None: "interrupted: Ctrl+G goes on, Ctrl+R tries again",
}
SUMMARY = "summary"  # the role of a message that stands for all before the last question
SHORTENED = "summary: it goes out for all before the last question; Ctrl+Z undoes that"
UNUSABLE = "this summary is not used: Alt+C tries again, Ctrl+Z takes it away"
Json = Mapping[str, Any]


@dataclass(slots=True)
class Words:
    """The large part of a message. `sides` is as in `StoredTurn`; `disco` is the object of an answer's last chunk."""

    text: str = ""
    sides: list[tuple[int, str]] = field(default_factory=list)
    disco: Json | None = None


@dataclass(slots=True)
class Block:
    """A part of a growing answer that will not change: its place in the text, who wrote before it, and its lines."""

    start: int
    end: int
    side: str
    lines: list[Text]
    faded: list[Text] | None = None  # the same lines before the reader gets there


LoadWords = Callable[[int], Words]  # the words of a turn, by its number; for a lost one, the reason


class Entry:
    """A message; while `live` it grows. `turn` is its number in the store.

    A loaded entry has its words itself; an unloaded one asks for them each time they are needed.
    """

    __slots__ = (
        "_blocks",
        "_drawn_for",
        "_load",
        "_own",
        "_size",
        "asked_at",
        "asked_of",
        "finish",
        "grown_from",
        "is_unfolded",
        "live",
        "n_tokens",
        "read",
        "role",
        "thought",
        "turn",
        "waited_s",
    )  # fmt: skip

    def __init__(
        self, turn: int, role: str, words: Words | str = "", *, finish: str | None = None, live: bool = False
    ) -> None:
        self.turn, self.role, self.finish, self.live, self.thought = turn, role, finish, live, ""
        self._own: Words | None = Words(words) if isinstance(words, str) else words
        self._load: LoadWords | None = None
        self._size = (0, 0)  # characters and line ends, if it is unloaded
        self.grown_from = self.n_tokens = 0  # the characters before it grew here, and about how many tokens came then
        self.asked_at = self.waited_s = 0.0  # while no word has come: s, of a monotonic clock and since then
        self.asked_of: list[tuple[str, str, bool]] = []  # side, what it does or why not, whether it does
        self.is_unfolded = False  # whether all of its thought is drawn
        self.read: int | None = None  # characters that a reader at their pace has read; None: all is drawn alike
        self._blocks: list[Block] = []  # of the growing answer, all but the last one, drawn for `_drawn_for`
        self._drawn_for: tuple[int, TextTheme] | None = None

    @classmethod
    def unloaded(cls, turn: int, role: str, finish: str | None, size: tuple[int, int], load: LoadWords) -> Entry:
        """Make an unloaded entry; `size` is its characters and line ends."""
        entry = cls(turn, role, finish=finish)
        entry._own, entry._load, entry._size = None, load, size
        return entry

    def unload(self, load: LoadWords) -> None:
        """Let go of the words; `load` returns them from now on."""
        self._size, self._own, self._load = self.size, None, load

    def load(self) -> None:
        """Take the words back, to add to them."""
        self._own = self.words
        self.grown_from, self.n_tokens = len(self._own.text), 0

    @property
    def is_loaded(self) -> bool:
        """Whether the entry has its words itself."""
        return self._own is not None

    @property
    def words(self) -> Words:
        """The words, read if the entry is unloaded."""
        if self._own is not None:
            return self._own
        return Words() if self._load is None else self._load(self.turn)

    @property
    def size(self) -> tuple[int, int]:
        """The number of its characters and of its line ends, without reading the words."""
        return self._size if self._own is None else (len(self._own.text), self._own.text.count("\n"))

    @property
    def text(self) -> str:
        """The text."""
        return self.words.text

    @property
    def is_usable_summary(self) -> bool:
        """Whether it is a summary that a model has brought to its end."""
        return self.role == SUMMARY and not self.live and self.finish in ("stop", "length") and self.size[0] > 0

    @property
    def sides(self) -> list[tuple[int, str]]:
        """Which side wrote what, as in `StoredTurn`."""
        return self.words.sides

    @property
    def disco(self) -> Json | None:
        """The `disco` object of an answer."""
        return self.words.disco

    def end(self, finish: str | None, disco: Json | None) -> None:
        """Set how the answer ended; None and None if it goes on."""
        self.finish, self.words.disco = finish, disco

    def grow(self, text: str, side: str | None) -> None:
        """Add a piece of an answer."""
        words = self.words
        if side and text and (not words.sides or words.sides[-1][1] != side):
            words.sides.append((len(words.text), side))
        words.text += text
        if text:
            self.n_tokens += tokens_in(text)

    def think(self, thought: str) -> None:
        """Add a piece of the thought before the answer."""
        if thought:
            self.thought = (self.thought + thought)[-MAX_THOUGHT:]

    def draw(self, width: int, theme: TextTheme) -> list[Text]:
        """Return the lines of the message and an empty one, each of at most `width` cells with its gutter."""
        width -= 0 if theme.plain else GUTTER
        body = self._body(width, theme)
        if self.role == SUMMARY and self.is_usable_summary:
            body = [*markdown.wrap(Text(SHORTENED, theme.dim), width), Text(), *body]
        if self.role != "user":
            below = self._below(width, theme)
            body = [*self._draw_reasoning(width, theme), *body, *[Text()] * bool(body and below), *below]
        if theme.plain:
            sign, style = self._sign(theme)
            return [Text(f"{sign}:", style), *body, Text()]
        return [*(body or [Text()]), Text()]

    def gutter(self, row: int, theme: TextTheme) -> Text:
        """Return what stands before a line: the speaker's sign before the first one, else spaces."""
        if theme.plain:
            return Text()
        sign, style = self._sign(theme)
        return Text(sign if row == 0 else " " * GUTTER, style)

    def _sign(self, theme: TextTheme) -> tuple[str, Style]:
        side = self.sides[0][1] if self.sides else ""
        if theme.plain:
            who = "You" if self.role == "user" else f"disco {theme.mark(side)}" if side else "disco"
            return who, theme.strong
        if self.role == "user":
            return "❯ ", theme.you  # noqa: RUF001
        return (f"{theme.mark(side)} " if side else "● ", theme.tints.get(side, theme.dim))

    def _body(self, width: int, theme: TextTheme) -> list[Text]:
        """Draw the words. While an answer grows or is read, only the blocks where that happens are drawn again."""
        if self.role == "user":
            return markdown.wrap(Text(fit(self.text).rstrip()), width)
        if not self.live and self.read is None:
            self._blocks, self._drawn_for = [], None  # what was drawn while it grew is large and not needed
            return markdown.Painter(width, theme).paint(mark_sides(self.text, self.sides))
        if self._drawn_for != (width, theme):
            self._drawn_for, self._blocks = (width, theme), []
        words = self.words
        done, side = (self._blocks[-1].end, self._side_at(words, self._blocks[-1].end)) if self._blocks else (0, "")
        if cut := markdown.last_block(words.text[done:]):
            settled = Block(done, done + cut, side, [])
            settled.lines = self._paint(words, settled, width, theme, None)
            self._blocks.append(settled)
            done, side = settled.end, self._side_at(words, settled.end)
        lines: list[Text] = []
        for block in self._blocks:
            shown = self._shade(words, block, width, theme)
            lines += [*([Text()] if lines and shown else []), *shown]
        tail = self._paint(words, Block(done, len(words.text), side, []), width, theme, self.read)
        return [*lines, *([Text()] if lines and tail else []), *tail]

    def _shade(self, words: Words, block: Block, width: int, theme: TextTheme) -> list[Text]:
        """Return the lines of a settled block as far as the reader is: all words as they are, all faded, or some."""
        if self.read is None or self.read >= block.end:
            block.faded = None
            return block.lines
        if self.read > block.start:
            return self._paint(words, block, width, theme, self.read)
        if block.faded is None:
            block.faded = [line.copy() for line in block.lines]
            for line in block.faded:
                line.stylize(theme.dim)
        return block.faded

    def _paint(self, words: Words, part: Block, width: int, theme: TextTheme, read: int | None) -> list[Text]:
        """Draw a part of the text with its marks; what is beyond `read` is faded."""
        marks = [(at - part.start, side) for at, side in words.sides if part.start <= at < part.end]
        if read is not None and read < part.end:
            marks = sorted([*marks, (max(0, read - part.start), AHEAD)], key=lambda mark: mark[0])
        text = mark_sides(words.text[part.start : part.end], marks)
        return markdown.Painter(width, theme, part.side).paint(text)

    @staticmethod
    def _side_at(words: Words, place: int) -> str:
        """Return who wrote before a place of the text."""
        return next((side for at, side in reversed(words.sides) if at < place), "")

    def _draw_reasoning(self, width: int, theme: TextTheme) -> list[Text]:
        """Draw the latest lines of a thought; behind it one line that stands for it, or all of it if it is unfolded."""
        if not self.thought:
            return []
        if self.live and not self.size[0]:
            return self._thought_lines(width, theme)[-THOUGHT_LINES:]
        sign = "" if theme.plain else "▾ " if self.is_unfolded else "▸ "
        said = f"{sign}thought, about {figure(tokens_in(self.thought))} tokens"
        head = Text(said if self.is_unfolded else f"{said}: Alt+T shows it", theme.dim)
        return [*markdown.wrap(head, width), *(self._thought_lines(width, theme) if self.is_unfolded else []), Text()]

    def _thought_lines(self, width: int, theme: TextTheme) -> list[Text]:
        return markdown.wrap(Text(fit(self.thought).strip(), theme.dim), width)

    def _below(self, width: int, theme: TextTheme) -> list[Text]:
        """Draw how the answer came about, and whether it is incomplete."""
        if self.live:
            return [] if self.text or self.thought else [self._wait(theme)]
        record = self.disco or {}
        lines = markdown.wrap(Text(summary(record, theme), theme.dim), width) if record.get("tokens") else []
        if words := fallback_words(record):
            lines += markdown.wrap(Text(fit(words), theme.dim), width)
        if record.get("error"):
            lines += markdown.wrap(Text(fit(str(record["error"])), theme.error), width)
        if self.role == SUMMARY:
            lines += [] if self.is_usable_summary else markdown.wrap(Text(UNUSABLE, theme.dim), width)
        elif self.finish != "stop":
            told = record.get("stopped") or record.get("code")
            end = str(told) if told else self.finish
            lines += markdown.wrap(Text(ENDS.get(end, fit(str(end))), theme.dim), width)
        return lines

    def _wait(self, theme: TextTheme) -> Text:
        """Draw what each side does until the first word comes, and for how long; nothing moves for a screen reader."""
        after = "" if theme.plain else f" {self.waited_s:.1f} s"
        parts = []
        for side, does, is_well in self.asked_of:
            sign = Text(theme.mark(side), theme.tints.get(side, theme.dim))
            parts.append(sign.append(f" {fit(does)}{after * is_well}", theme.dim))
        return Text(", " if theme.plain else "   ").join(parts) if parts else Text(f"…{after}", theme.dim)

    @property
    def code(self) -> list[str]:
        """The code blocks of the message."""
        return markdown.code_blocks(fit(self.text))


def summary(record: Json, theme: TextTheme) -> str:
    """Sum up an answer's `disco` object in one line: TTFT, tokens, the partner's part, handoffs, $, J, QoE."""
    parts = [_ttft(record), *_tokens(record, theme), *_split(record)]
    moved = int(record.get("handoffs") or 0)
    parts.append(f"{moved} handoff{'s' if moved > 1 else ''}" if moved else "")
    parts.append(dollars(float(record.get("server_usd") or 0)))
    parts.append(f"{figure(float(record.get('energy_j') or 0))} J")
    qoe = record.get("qoe")
    parts.append("" if qoe is None else f"QoE {qoe:.2f}")
    return (", " if theme.plain else " · ").join(part for part in parts if part)


def _ttft(record: Json) -> str:
    """Say the time to the first token, s, and that of each side alone where it is known."""
    ttft = record.get("ttft_s")
    if ttft is None:
        return ""
    ends = record.get("endpoints") or {}
    alone = [
        f"{side} {'> ' if ends[side].get('censored') else ''}{ends[side]['ttft_s']:.2f}"
        for side in (DEVICE, SERVER)
        if side in ends and not ends[side].get("error")
    ]
    return f"TTFT {ttft:.2f} s" + (f" (alone: {', '.join(alone)})" if len(alone) > 1 else "")


def _tokens(record: Json, theme: TextTheme) -> list[str]:
    """Say how many tokens each side wrote."""
    counts = record.get("tokens") or {}
    return [f"{theme.mark(side)} {n} tok" for side, n in counts.items() if n]


def _split(record: Json) -> list[str]:
    """Say what a round trip to the partner gave, and what is not the whole model's; nothing for a whole device."""
    split = record.get("split")
    if not split:
        return []
    trips, quality, alone = int(split["round_trips"]), split["quality"], split.get("alone_from")
    said = [f"{(split['accepted'] + trips) / trips:.1f} tok a round trip"] if trips else []
    if alone is not None:
        said.append(f"alone from token {alone}")
    elif quality != "whole":
        said.append(str(quality))
    return said
