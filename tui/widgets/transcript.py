"""The messages of a conversation, in one scrolling widget that draws only what is in view.

A message is laid out when it comes near the view; until then its height is a guess from its length. When a guess above
the view turns out wrong, the scroll position follows, so that the words in view stay where they are.

The view follows a growing answer until its first line is at the top. There it stays, so that the line that is being
read does not move, and what grows beyond the view is not drawn until the reader comes near it. The file
is longer than most, since drawing and scrolling share the heights of all messages.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.cache import LRUCache
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer

from ..data.found_words import folded
from ..data.readers import ReadingPlace
from ..draw.entry import Entry
from ..draw.markdown import wrap
from ..draw.theme import TextTheme

FRAME_S = 1 / 20  # at least, between two drawings of a growing answer
WAIT_S = 0.1  # between two drawings of how long no word has come
READ_S = 0.2  # between two looks where the reader is: a word, about
SHARE = 0.25  # of the time, at most, goes into drawing it: keys come first
LONGEST_FRAME_S = 0.3  # however slow the terminal
KEPT = 64  # messages whose lines are kept; others are drawn again when they scroll into view
KEPT_STRIPS = 256  # drawn lines, a few screens; the collector visits some 20 objects of each while keys wait
WELCOME = (
    "Ask something below. This machine and the server, if there is one, answer together; the sign and the colour of "
    "the words say who wrote them.\n\n"
    "F5 sets up a server or another model, F1 shows all keys, F3 what energy is worth and what may be spent, F4 what "
    "is going on."
)


class Transcript(ScrollView, can_focus=True):
    """The messages: `_entries`, their `_heights` and `_drawn` lines, and the one that is `selected`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "line(-1)", "Up", show=False),
        Binding("down", "line(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "end(0)", "First", show=False),
        Binding("end", "end(1)", "Last", show=False),
    ]

    class Selected(Message):
        """The user has selected another message."""

    class MoreBelow(Message):
        """There is more below the view now, or nothing any more; see `more_below`."""

    def __init__(self, theme: Callable[[], TextTheme], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._theme = theme
        self._entries: list[Entry] = []
        self._heights: list[int] = []
        self._starts: list[int] = [0]
        self._drawn: LRUCache[Entry, list[Text]] = LRUCache(KEPT)
        # By the id of the line and its place; the line is kept with the strip, so that no other one gets its id.
        self._strips: LRUCache[tuple[int, int, bool], tuple[Text, Strip]] = LRUCache(KEPT_STRIPS)
        self._base: Style | None = None
        self._touched: set[int] = set()
        self._timer: Timer | None = None
        self._cost_s = 0.0
        self._follow = True  # the end stays in view, as long as the line of `_anchor` does
        self._anchor: tuple[Entry, int] | None = None
        self._laid_out_for = Size(0, 0)
        self._reading: tuple[Entry, ReadingPlace] | None = None  # the answer that is read at pace
        self.pace_tps = 0.0  # of the reader; 0 = nothing is faded
        self.more_below = False
        self._moving = False
        self._drawn_for: tuple[int, TextTheme] | None = None
        self.selected: Entry | None = None
        self._marked: re.Pattern[str] | None = None
        self._sought: Entry | None = None  # the message in which the marked words were scrolled to, until it is left

    # --- what is shown ----------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[Entry]:
        """The messages, oldest first."""
        return self._entries

    def show(self, entries: list[Entry]) -> None:
        """Show these messages, scrolled to the end, or to where an answer begins that is growing."""
        if self._reading is not None:
            self._reading[0].read, self._reading = None, None
        self._touched.clear()
        self._entries, self.selected, self._follow = entries, None, True
        self._marked = self._sought = None
        self._anchor = (entries[-1], 0) if entries and entries[-1].live else None
        self._forget()
        if self._anchor is not None:
            self._wake(FRAME_S)

    def add(self, entry: Entry) -> None:
        """Add a message at the end, and scroll there."""
        self._entries.append(entry)
        self._heights.append(self._guess(entry))
        self._follow, self._anchor = True, (entry, 0) if entry.live else None
        self.settle(entry)

    def go_on(self, entry: Entry) -> None:
        """Draw an answer that grows again, which stays where its new words begin."""
        if entry in self._entries:
            index = self._entries.index(entry)
            self._drawn.discard(entry)
            self._measure(index)
            self._follow, self._anchor = True, (entry, max(0, self._heights[index] - 2))
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        """Draw an entry again within a frame, however often this is called."""
        is_read = self._reading is not None and self._reading[0] is entry
        if self.pace_tps and entry.n_tokens and not is_read and not self._theme().plain:
            self._reading = (entry, ReadingPlace(self.pace_tps, time.monotonic()))
        self._wake(self._pause_s())
        self._touched.add(id(entry))

    def settle(self, entry: Entry) -> None:
        """Draw an entry again now."""
        self._touched.add(id(entry))
        self._frame()

    def set_pace(self, pace_tps: float) -> None:
        """Fade the words ahead of a reader at this pace, token/s, from the next answer on; 0 = show all alike now."""
        self.pace_tps = pace_tps
        if self._reading is not None and not pace_tps:
            self._wake(0.0)

    def _wake(self, after_s: float) -> None:
        if self._timer is None and self.is_mounted:
            self._timer = self.set_timer(after_s, self._frame)

    def _frame(self) -> None:
        """Draw the entries that have changed."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        began = time.perf_counter()
        self._wait_on()
        self._read_on()
        if self._due():
            self._lay_out()
            self.call_after_refresh(self._note_cost, began)

    def _wait_on(self) -> None:
        """Draw the time that passes until the first word of an answer; a screen reader is not told."""
        last = self._entries[-1] if self._entries else None
        if last is not None and last.live and not (last.text or last.thought) and not self._theme().plain:
            last.waited_s = max(0.0, time.monotonic() - last.asked_at)
            self._touched.add(id(last))
            self._wake(max(WAIT_S, self._pause_s()))

    def _read_on(self) -> None:
        """Move the reader on in the answer that is read at pace, until all of it is read."""
        if self._reading is None:
            return
        entry, place = self._reading
        length, before = entry.size[0], entry.grown_from
        share = place.advance(entry.n_tokens, time.monotonic()) if self.pace_tps else 1.0
        self._touched.add(id(entry))
        self._drawn.discard(entry)
        entry.read = before + round(share * (length - before)) if share < 1 else None
        if entry.read is not None:
            self._wake(max(READ_S, self._pause_s()))
        elif not entry.live:
            self._reading = None

    def _due(self) -> list[int]:
        """Return which messages that have changed are to be drawn: none whose words in view and a page more are."""
        top = self._line_of(self._anchor) if self._follow and self._anchor is not None else 0
        near = max(self.scroll_y, top) + 2 * self.size.height
        stays = self._anchor is not None or not self._follow
        found = []
        for i in range(len(self._entries) - 1, -1, -1) if self._touched else ():
            entry = self._entries[i]
            is_beyond = stays and entry.live and entry in self._drawn and self._starts[i + 1] >= near
            if id(entry) in self._touched and not is_beyond:
                found.append(i)
        return found

    def _draw_touched(self) -> None:
        for i in self._due():
            self._touched.discard(id(self._entries[i]))
            self._drawn.discard(self._entries[i])
            self._measure(i)

    def _pause_s(self) -> float:
        return min(LONGEST_FRAME_S, max(FRAME_S, self._cost_s / SHARE))

    def _note_cost(self, began: float) -> None:
        self._cost_s = time.perf_counter() - began

    def select(self, step: int) -> None:
        """Select the message before (-1) or after (1) the selected one."""
        if not self._entries:
            return
        at = self._entries.index(self.selected) + step if self.selected in self._entries else len(self._entries) - 1
        self.selected = self._entries[min(max(at, 0), len(self._entries) - 1)] if at < len(self._entries) else None
        if self.selected is None:
            self.action_end(1)
        else:
            self._bring(self._entries.index(self.selected))
        self.refresh()
        self.post_message(self.Selected())

    def mark(self, words: re.Pattern[str] | None, entry: Entry | None = None) -> None:
        """Mark words of a search, which match `folded` texts; with an `entry`, scroll to the first of them in it."""
        self._marked = words
        self._strips.clear()
        if words is not None and entry in self._entries:
            index = self._entries.index(entry)
            rows = (row for row, line in enumerate(self._lines(index)) if words.search(folded(line.plain)))
            self._bring(index, next(rows, 0) - self.size.height // 3)
            self._sought = entry
        self.refresh()

    # --- where it is ------------------------------------------------------------------------------------------------

    def _width(self) -> int:
        return max(1, self.scrollable_content_region.width)

    def _guess(self, entry: Entry) -> int:
        characters, line_ends = entry.size
        return 2 + line_ends + characters // self._width()

    def _forget(self) -> None:
        """Forget all that was drawn, and draw again."""
        self._drawn.clear()
        self._strips.clear()
        self._heights = [self._guess(entry) for entry in self._entries]
        self._drawn_for = (self._width(), self._theme())
        self._lay_out()

    def _lines(self, index: int) -> list[Text]:
        entry = self._entries[index]
        lines = self._drawn.get(entry)
        if lines is None:
            lines = self._drawn[entry] = entry.draw(self._width(), self._theme())
        return lines

    def _measure(self, index: int) -> None:
        self._heights[index] = len(self._lines(index))

    def _place(self) -> tuple[int, int]:
        """Return the index of the message at the top of the view, and how many of its lines are above."""
        top = round(self.scroll_y)
        index = max(0, min(len(self._entries) - 1, bisect_right(self._starts, top) - 1))
        return index, top - self._starts[index]

    def _restart(self) -> None:
        self._starts = [0, *accumulate(self._heights)]

    def _lay_out(self) -> None:
        """Measure the messages in and near the view, and keep the view at the end, or at the same words."""
        if self._moving:
            return
        self._moving = True
        self._laid_out_for = self.size
        index, above = self._place() if self._entries and len(self._starts) > 1 else (0, 0)
        page = max(1, self.size.height)
        self._draw_touched()
        if self._follow:
            self._measure_up(len(self._entries) - 1, 2 * page)
        elif self._entries:
            self._measure_up(index - 1, page)
            self._measure_down(index, 2 * page + above)
        self._restart()
        self._grow()
        target = self._starts[-1] - page if self._follow else self._starts[min(index, len(self._entries))] + above
        if self._follow and self._anchor is not None:
            target = min(target, self._line_of(self._anchor))
        self.scroll_to(y=max(0, target), animate=False, force=True)
        self._moving = False
        self._note_more()
        self.refresh()

    def _line_of(self, anchor: tuple[Entry, int]) -> int:
        """Return the line of the whole at which an anchor is."""
        entry, row = anchor
        index = self._entries.index(entry) if entry in self._entries else len(self._starts)
        return self._starts[index] + row if index < len(self._starts) else self._starts[-1]

    def _note_more(self) -> None:
        """Note whether words are below the view; a message ends with an empty line."""
        more = self._starts[-1] - 1 > round(self.scroll_y) + self.size.height
        if more != self.more_below:
            self.more_below = more
            self.post_message(self.MoreBelow())

    def _measure_up(self, index: int, lines: int) -> None:
        while index >= 0 and lines > 0:
            self._measure(index)
            lines -= self._heights[index]
            index -= 1

    def _measure_down(self, index: int, lines: int) -> None:
        while index < len(self._entries) and lines > 0:
            self._measure(index)
            lines -= self._heights[index]
            index += 1

    def _bring(self, index: int, row: int = 0) -> None:
        """Scroll a message to the top of the view, or what stands some rows below its first line."""
        self._follow, self._anchor = False, None
        self._measure_up(index, max(1, self.size.height))
        self._restart()
        self._go(self._starts[index] + row)

    @property
    def max_scroll_y(self) -> int:
        """The lowest scroll position: the last line, not the end of the reserved room."""
        return max(0, self._starts[-1] - self.size.height)

    def _grow(self) -> None:
        """Tell Textual the height, rounded up while an answer grows: each change lays the whole screen out."""
        height, page = self._starts[-1], max(1, self.size.height)
        if any(entry.live for entry in self._entries[-1:]):
            height = max(-(-height // page) * page, height)
        if self.virtual_size != (size := Size(self._width(), height)):
            self.virtual_size = size

    def _go(self, y: float) -> None:
        self._grow()
        self.scroll_to(y=max(0, y), animate=False, force=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Lay out the messages that came near the view, and note whether the end is still in view."""
        super().watch_scroll_y(old_value, new_value)
        if self._moving or round(old_value) == round(new_value) or self.size != self._laid_out_for:
            return  # a resize lays all out anew
        self._draw_touched()
        self._restart()
        self._sought = None
        self._follow, self._anchor = new_value >= self._starts[-1] - self.size.height, None
        if not self._follow:
            self._lay_out()
        self._note_more()

    def on_resize(self, event: Resize) -> None:
        del event
        self.refresh_theme()

    def notify_style_update(self) -> None:
        """Drop the strips, which have the old background."""
        super().notify_style_update()
        self._base = None
        self._strips.clear()

    def refresh_theme(self) -> None:
        """Draw again if the width or the theme has changed."""
        if self._drawn_for != (self._width(), self._theme()):
            index, _ = self._place() if self._entries and len(self._starts) > 1 else (0, 0)
            follow = self._follow
            self._forget()
            if self._sought is not None:
                self.mark(self._marked, self._sought)
            elif not follow and index < len(self._entries):
                self._bring(index)
        else:
            self._lay_out()

    # --- keys -------------------------------------------------------------------------------------------------------

    def action_line(self, step: int) -> None:
        """Scroll by lines."""
        self.scroll_to(y=self.scroll_y + step, animate=False)

    def action_page(self, step: int) -> None:
        """Scroll by pages."""
        self.scroll_to(y=self.scroll_y + step * max(1, self.size.height - 1), animate=False)

    def action_end(self, which: int) -> None:
        """Scroll to the first line (0), or to the last one and follow it (1)."""
        self._follow, self._anchor = bool(which), None
        if which:
            self._lay_out()
        else:
            self.scroll_to(y=0, animate=False)

    # --- drawing ----------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """Draw one line of the view."""
        y += round(self.scroll_y)
        style, width = self._base or self.rich_style, self._width()
        self._base = style  # Textual computes it from all ancestors, too slowly for each line of a frame
        if not self._entries:
            lines = wrap(Text(WELCOME, self._theme().dim), width)
            strip = Strip(lines[y - 1].render(self.app.console)) if 0 < y <= len(lines) else Strip.blank(0)
            return strip.crop_extend(0, width, style).apply_style(style)
        if not 0 <= y < self._starts[-1]:
            return Strip.blank(width, style)
        index = bisect_right(self._starts, y) - 1
        entry, lines, row = self._entries[index], self._lines(index), y - self._starts[index]
        if row >= len(lines):
            return Strip.blank(width, style)
        key = (id(lines[row]), y, entry is self.selected)
        found = None if self.text_selection is not None else self._strips.get(key)
        if found is None:
            strip = self._strip(entry, lines[row], row, y).crop_extend(0, width, style)
            found = (lines[row], strip.apply_style(style).apply_offsets(0, y))
            if self.text_selection is None:
                self._strips[key] = found
        return found[1]

    def _strip(self, entry: Entry, content: Text, row: int, y: int) -> Strip:
        line = entry.gutter(row, self._theme())
        at = len(line)
        line.append_text(content)
        for found in () if self._marked is None else self._marked.finditer(folded(content.plain)):
            line.stylize("reverse", at + found.start(), at + found.end())
        if entry is self.selected and row == 0:
            line.stylize("reverse", 0, 1)
        chosen = self.text_selection
        if chosen is not None and (span := chosen.get_span(y)) is not None:
            end = len(line) if span[1] == -1 else span[1]
            line.stylize(self.screen.get_component_rich_style("screen--selection"), span[0], end)
        return Strip(line.render(self.app.console), line.cell_len)

    # --- selecting with the mouse -----------------------------------------------------------------------------------

    @property
    def allow_select(self) -> bool:
        """Whether the mouse can select text."""
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the text of the mouse's selection."""
        rows = [row for i in range(len(self._entries)) for row in self._rows(i, selection)]
        return selection.extract("\n".join(rows)), "\n"

    def _rows(self, index: int, selection: Selection) -> list[str]:
        """Return the lines of a message; outside the selection only their number matters."""
        first = 0 if selection.start is None else selection.start.y
        last = self._starts[-1] if selection.end is None else selection.end.y
        if self._starts[index + 1] <= first or self._starts[index] > last:
            return [""] * self._heights[index]
        entry, theme = self._entries[index], self._theme()
        return [entry.gutter(row, theme).plain + line.plain for row, line in enumerate(self._lines(index))]

    def selection_updated(self, selection: Selection | None) -> None:
        del selection
        self.refresh()
