"""The styles of words in one theme, and the marks that say the same without colour. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.style import Style

from disco_daemon.plain import MARK, plain

DEVICE, SERVER = "device", "server"
ALONE = "alone"  # the lower layers of a model on this machine, while the partner that has the others is gone
AHEAD = "ahead"  # words that a reader at their pace has not reached, whoever wrote them
# Characters for private use that are put into a text before it is parsed: "from here on, this side", or "not read yet".
MARKS = {DEVICE: "\uf8d0", SERVER: "\uf8d1", ALONE: "\uf8d2", AHEAD: "\uf8d3"}
SIDE_OF = {mark: side for side, mark in MARKS.items()}
_LETTER = re.compile(r"\w")
_MARKS = re.compile(f"[{''.join(SIDE_OF)}]")


@dataclass(frozen=True, slots=True)
class TextTheme:
    """Styles and glyphs. `plain` is for screen readers and bare terminals: words instead of glyphs, no frames."""

    dark: bool = True
    plain: bool = False
    dim: Style = field(default_factory=lambda: Style(dim=True))
    strong: Style = field(default_factory=lambda: Style(bold=True))
    you: Style = field(default_factory=lambda: Style(bold=True))
    code: Style = field(default_factory=Style)
    error: Style = field(default_factory=lambda: Style(bold=True))
    tints: Mapping[str, Style] = field(default_factory=dict)

    def mark(self, side: str) -> str:
        """Return the sign of a side, readable without colour."""
        if self.plain:
            return f"[{side}]"
        return {DEVICE: "◆", SERVER: "◇", ALONE: "◈"}.get(side, "?")

    @property
    def code_theme(self) -> str:
        """The name of the Pygments style for code."""
        return "github-dark" if self.dark else "xcode"

    @property
    def legend(self) -> str:
        """The meaning of the signs, in one short line."""
        if self.plain:
            return "[device] this machine, [server] remote"
        return f"{self.mark(DEVICE)} this machine  {self.mark(SERVER)} server"

    @property
    def whole_legend(self) -> str:
        """The meaning of all signs."""
        if self.plain:
            return f"{self.legend}, [alone] this machine without the partner that has the model's upper layers"
        return f"{self.legend}  {self.mark(ALONE)} this machine without its partner"


def text_theme_of(variables: Mapping[str, str], *, dark: bool, plain: bool) -> TextTheme:
    """Make the styles that go with a theme; `variables` are Textual's colours by name."""

    def colour(name: str, otherwise: str) -> str:
        found = variables.get(name, "")
        return found[:7] if re.fullmatch(r"#[0-9A-Fa-f]{6,8}", found) else otherwise

    device, server, alone = ("#9ece6a", "#7dcfff", "#ff9e64") if dark else ("#386a1d", "#1a5fa8", "#9a4a00")
    return TextTheme(
        dark=dark,
        plain=plain,
        dim=Style(color="#8a90a6" if dark else "#5c6370"),
        strong=Style(bold=True),
        you=Style(color=colour("accent", "#bb9af7" if dark else "#6a3fb5"), bold=True),
        code=Style(color="#e0af68" if dark else "#8f5e15"),
        error=Style(color=colour("error", "#f7768e" if dark else "#b3261e"), bold=True),
        tints={DEVICE: Style(color=device), SERVER: Style(color=server), ALONE: Style(color=alone, italic=True)},
    )


def fit(text: str) -> str:
    """Return `text` safe for a terminal: line ends and tabs stay, other control characters show as such."""
    return _MARKS.sub(MARK, plain(text)).expandtabs(4)


def mark_sides(text: str, sides: Sequence[tuple[int, str]]) -> str:
    """Return `text`, made safe, with a mark where another side begins.

    A mark goes before the next letter or digit, so that it never splits Markdown's own signs; if none is left, there is
    nothing to tint, and no mark.
    """
    whole, pieces, at, done = fit(text), [], 0, 0
    for start, side in sides:
        found = _LETTER.search(text, max(start, at))
        if found is None:
            break
        at = found.start()
        place = len(fit(text[:at]))  # cut after it is made safe: the width of a tab depends on what is before it
        pieces += [whole[done:place], MARKS.get(side, "")]
        done = place
    return "".join([*pieces, whole[done:]])


def strip_marks(text: str) -> str:
    """Return `text` without marks."""
    return _MARKS.sub("", text)
