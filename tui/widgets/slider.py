"""A slider: a value on a scale, moved by keys or by mouse."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from ..data.scale import Scale

PAGE = 10  # steps


class Slider(Widget, can_focus=True):
    """One value on a scale. Posts `Slid` when the user moves it, not when the program does (`show`)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Less", show=False),
        Binding("right", "move(1)", "More", show=False),
        Binding("pagedown", f"move(-{PAGE})", "Much less", show=False),
        Binding("pageup", f"move({PAGE})", "Much more", show=False),
        Binding("home", "move(-100000)", "Least", show=False),
        Binding("end", "move(100000)", "Most", show=False),
    ]
    value: reactive[float] = reactive(0.0)

    class Slid(Message):
        """The user has moved the slider."""

        def __init__(self, slider: Slider, value: float) -> None:
            super().__init__()
            self.slider, self.value = slider, value

        @property
        def control(self) -> Slider:
            """The slider, for `@on` with a selector."""
            return self.slider

    def __init__(self, scale: Scale, value: float, *, plain: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self.scale = scale
        self._plain = plain
        self._dragging = False
        self.set_reactive(Slider.value, value)

    def show(self, value: float) -> None:
        """Show a value without posting a message; one beyond the scale shows at its end."""
        self.value = value

    def action_move(self, by: int) -> None:
        """Move by a number of steps."""
        self._choose(self.scale.step(self.value, by))

    def _choose(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self.post_message(self.Slid(self, value))

    # --- mouse -------------------------------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Move to the pointer, and follow it until the button is released."""
        self._dragging = True
        self.capture_mouse()
        self._go(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragging:
            self._go(event.x)

    def on_mouse_up(self) -> None:
        self._dragging = False
        self.release_mouse()

    def _go(self, x: int) -> None:
        self._choose(self.scale.at(x / max(1, self.size.width - 1)))

    def render(self) -> Content:
        """Draw the track with its knob, and below it the names of the marks."""
        return Content("\n".join(draw_track(self.scale, self.value, self.size.width, plain=self._plain)))


def draw_track(scale: Scale, value: float, width: int, *, plain: bool) -> list[str]:
    """Return two lines of `width` characters: the track, and its ends and marks by name as far as they fit."""
    line, tick, knob = ("-", "+", "O") if plain else ("─", "┬", "●")
    track, names = [line] * width, [" "] * width
    _write(names, 0, f"{scale.low:g}")
    high = f"{scale.high:g}"
    _write(names, width - len(high), high)
    for mark, name in scale.marks:
        at = _column(scale, mark, width)
        track[at] = tick
        _write(names, at - len(name) // 2, name)
    track[_column(scale, value, width)] = knob
    return ["".join(track), "".join(names).rstrip()]


def _column(scale: Scale, value: float, width: int) -> int:
    return round(scale.share(value) * (width - 1))


def _write(row: list[str], at: int, text: str) -> None:
    """Write `text` if the place is free, with a space on both sides; else leave it out."""
    end = at + len(text)
    if at >= 0 and end <= len(row) and all(c == " " for c in row[max(0, at - 1) : end + 1]):
        row[at:end] = text
