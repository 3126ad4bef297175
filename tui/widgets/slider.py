"""A slider: a value on a scale, moved by keys or mouse."""

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
    """One value on a scale. Posts `Changed` when the user moves it, not when the program does (`show`)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Less", show=False),
        Binding("right", "move(1)", "More", show=False),
        Binding("pagedown", f"move(-{PAGE})", "Much less", show=False),
        Binding("pageup", f"move({PAGE})", "Much more", show=False),
        Binding("home", "move(-100000)", "Least", show=False),
        Binding("end", "move(100000)", "Most", show=False),
    ]
    value: reactive[float] = reactive(0.0)

    class Changed(Message):
        """The user moved it."""

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
        """Stand at a value without telling anybody; one beyond the scale stands at its end."""
        self.value = value

    def action_move(self, by: int) -> None:
        """So many steps further."""
        self._choose(self.scale.moved(self.value, by))

    def _choose(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self.post_message(self.Changed(self, value))

    # --- mouse -------------------------------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Go there, and follow until the button is let go."""
        self._dragging = True
        self.capture_mouse()
        self._go(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow."""
        if self._dragging:
            self._go(event.x)

    def on_mouse_up(self) -> None:
        """Stay."""
        self._dragging = False
        self.release_mouse()

    def _go(self, x: int) -> None:
        self._choose(self.scale.at(x / max(1, self.size.width - 1)))

    def render(self) -> Content:
        """The track with the knob, and the names of the marks below it."""
        return Content("\n".join(drawn(self.scale, self.value, self.size.width, plain=self._plain)))


def drawn(scale: Scale, value: float, width: int, *, plain: bool) -> list[str]:
    """Two lines of `width` characters: the track, and below it ends and marks by name as far as there is room."""
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
    """Write where nothing stands yet, with a space on both sides; else not at all."""
    end = at + len(text)
    if at >= 0 and end <= len(row) and all(c == " " for c in row[max(0, at - 1) : end + 1]):
        row[at:end] = text
