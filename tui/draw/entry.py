"""One message of a conversation as it is shown: who wrote which words, and below an answer how it came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.style import Style
from rich.text import Text

from . import markdown
from .theme import DEVICE, SERVER, Look, fit, marked

GUTTER = 2  # cells before each line
THOUGHT_LINES = 3  # of hidden reasoning, the latest ones: the answer is what counts
ENDS = {
    "length": "cut at the length limit: Ctrl+G goes on",
    "cancelled": "stopped: Ctrl+G goes on, Ctrl+R tries again",
    "error": "failed: Ctrl+R tries again",
    None: "interrupted: Ctrl+G goes on, Ctrl+R tries again",
}
Json = Mapping[str, Any]


@dataclass(slots=True)
class Words:
    """What is large of a message. `sides` as `store.Turn` has them; `disco` is the object of an answer's last chunk."""

    text: str = ""
    sides: list[tuple[int, str]] = field(default_factory=list)
    disco: Json | None = None


Shelf = Callable[[int], Words]  # the words of a turn, by its number; of one that is lost, why it is


class Entry:
    """A message; while `live` it grows. `turn` is its number in the store.

    It has its words itself, or it rests: then each look at them takes them from a shelf.
    """

    __slots__ = (
        "_done", "_drawn_for", "_lines", "_own", "_shelf", "_side", "_size", "finish", "live", "role", "thought",
        "turn",
    )  # fmt: skip

    def __init__(
        self, turn: int, role: str, words: Words | str = "", *, finish: str | None = None, live: bool = False
    ) -> None:
        self.turn, self.role, self.finish, self.live, self.thought = turn, role, finish, live, ""
        self._own: Words | None = Words(words) if isinstance(words, str) else words
        self._shelf: Shelf | None = None
        self._size = (0, 0)  # characters and line ends, of one that rests
        self._done = 0  # characters of the text in blocks that will not change any more
        self._lines: list[Text] = []  # and those drawn, for `_drawn_for`
        self._side = ""
        self._drawn_for: tuple[int, Look] | None = None

    @classmethod
    def resting(cls, turn: int, role: str, finish: str | None, size: tuple[int, int], shelf: Shelf) -> Entry:
        """One whose words are on a shelf; `size` is their characters and line ends."""
        entry = cls(turn, role, finish=finish)
        entry._own, entry._shelf, entry._size = None, shelf, size
        return entry

    def rest(self, shelf: Shelf) -> None:
        """Let go of the words: they are on the shelf now, or can be put there."""
        self._size, self._own, self._shelf = self.size, None, shelf
        self.thought = "" if self._size[0] else self.thought  # nobody is shown it any more

    def wake(self) -> None:
        """Have the words again, to change them."""
        self._own = self.words

    @property
    def awake(self) -> bool:
        """Whether it has its words itself."""
        return self._own is not None

    @property
    def words(self) -> Words:
        """What is said, from wherever it is."""
        if self._own is not None:
            return self._own
        return Words() if self._shelf is None else self._shelf(self.turn)

    @property
    def size(self) -> tuple[int, int]:
        """Its characters and line ends; of one that rests without a look at its words."""
        return self._size if self._own is None else (len(self._own.text), self._own.text.count("\n"))

    @property
    def text(self) -> str:
        """The words."""
        return self.words.text

    @property
    def sides(self) -> list[tuple[int, str]]:
        """Who wrote which of them."""
        return self.words.sides

    @property
    def disco(self) -> Json | None:
        """How the answer came about."""
        return self.words.disco

    def end(self, finish: str | None, disco: Json | None) -> None:
        """It is over, or was never begun; None and None: it goes on."""
        self.finish, self.words.disco = finish, disco

    def grow(self, text: str, side: str | None) -> None:
        """Add what was heard."""
        words = self.words
        if side and text and (not words.sides or words.sides[-1][1] != side):
            words.sides.append((len(words.text), side))
        words.text += text

    def draw(self, width: int, look: Look) -> list[Text]:
        """All of it in lines of at most `width` cells, but for the gutter; an empty one separates it from the next."""
        width -= 0 if look.plain else GUTTER
        body = self._body(width, look)
        if self.role == "assistant":
            below = self._below(width, look)
            body = [*self._thought(width, look), *body, *[Text()] * bool(body and below), *below]
        if look.plain:
            sign, style = self._sign(look)
            return [Text(f"{sign}:", style), *body, Text()]
        return [*(body or [Text()]), Text()]

    def gutter(self, row: int, look: Look) -> Text:
        """What stands before a line: on the first one who speaks."""
        if look.plain:
            return Text()
        sign, style = self._sign(look)
        return Text(sign if row == 0 else " " * GUTTER, style)

    def _sign(self, look: Look) -> tuple[str, Style]:
        side = self.sides[0][1] if self.sides else ""
        if look.plain:
            who = "You" if self.role == "user" else f"disco {look.mark(side)}" if side else "disco"
            return who, look.strong
        if self.role == "user":
            return "❯ ", look.you  # noqa: RUF001
        return (f"{look.mark(side)} " if side else "● ", look.tints.get(side, look.dim))

    def _body(self, width: int, look: Look) -> list[Text]:
        """The words. Of an answer that grows only the last block is drawn anew."""
        if self.role == "user":
            return markdown.wrap(Text(fit(self.text).rstrip()), width)
        if not self.live:
            self._lines, self._drawn_for = [], None  # drawn while it grew: of no use any more, and large
            return markdown.Painter(width, look).paint(marked(self.text, self.sides))
        if self._drawn_for != (width, look):
            self._drawn_for, self._done, self._lines, self._side = (width, look), 0, [], ""
        self._settle(width, look)
        tail = markdown.Painter(width, look, self._side).paint(self._marked(self._done, len(self.text)))
        return [*self._lines, *([Text()] if self._lines and tail else []), *tail]

    def _settle(self, width: int, look: Look) -> None:
        """Draw for good the blocks before the last one."""
        cut = self._done + markdown.last_block(self.text[self._done :])
        if cut == self._done:
            return
        lines = markdown.Painter(width, look, self._side).paint(self._marked(self._done, cut))
        if lines:
            self._lines += [Text()] * bool(self._lines) + lines
        self._done = cut
        self._side = next((side for at, side in reversed(self.sides) if at < cut), self._side)

    def _marked(self, start: int, end: int) -> str:
        """A part of the text with its marks."""
        return marked(self.text[start:end], [(at - start, side) for at, side in self.sides if start <= at < end])

    def _thought(self, width: int, look: Look) -> list[Text]:
        """The latest lines of hidden reasoning, while there is nothing else to read."""
        if not self.thought or self.text:
            return []
        return markdown.wrap(Text(fit(self.thought).strip(), look.dim), width)[-THOUGHT_LINES:]

    def _below(self, width: int, look: Look) -> list[Text]:
        """How the answer came about, or that it is not whole."""
        if self.live:
            return [Text("…", look.dim)] if not self.text else []
        told = self.disco or {}
        lines = markdown.wrap(Text(summary(told, look), look.dim), width) if told.get("tokens") else []
        if told.get("error"):
            lines += markdown.wrap(Text(fit(str(told["error"])), look.error), width)
        if self.finish != "stop":
            lines += markdown.wrap(Text(ENDS.get(self.finish, str(self.finish)), look.dim), width)
        return lines

    @property
    def code(self) -> list[str]:
        """The code blocks in it."""
        return markdown.code_blocks(fit(self.text))


def summary(told: Json, look: Look) -> str:
    """One line of an answer's `disco` object: TTFT, tokens, handoffs, $, J, QoE."""
    parts = [_ttft(told), *_tokens(told, look)]
    moved = int(told.get("handoffs") or 0)
    parts.append(f"{moved} handoff{'s' if moved > 1 else ''}" if moved else "")
    parts.append(f"${_number(told.get('server_usd'))}")
    parts.append(f"{_number(told.get('energy_j'))} J")
    qoe = told.get("qoe")
    parts.append("" if qoe is None else f"QoE {qoe:.2f}")
    return (", " if look.plain else " · ").join(part for part in parts if part)


def _ttft(told: Json) -> str:
    """The time to the first token, and what each side alone would have had, as far as that is known, s."""
    ttft = told.get("ttft_s")
    if ttft is None:
        return ""
    ends = told.get("endpoints") or {}
    alone = [
        f"{side} {'> ' if ends[side].get('censored') else ''}{ends[side]['ttft_s']:.2f}"
        for side in (DEVICE, SERVER)
        if side in ends and not ends[side].get("error")
    ]
    return f"TTFT {ttft:.2f} s" + (f" (alone: {', '.join(alone)})" if len(alone) > 1 else "")


def _tokens(told: Json, look: Look) -> list[str]:
    """The tokens that each side wrote."""
    counts = told.get("tokens") or {}
    return [f"{look.mark(side)} {n} tok" for side, n in counts.items() if n]


def _number(x: Any) -> str:
    """Three digits, no exponent: amounts here are between a millionth and some thousands."""
    value = float(x or 0)
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.6f}".rstrip("0")
