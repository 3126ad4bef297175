"""A switch that is on or off, readable without colour."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget


class Toggle(Widget, can_focus=True):
    """A switch with its words. Posts `Turned` when the user turns it, not when the program does (`show`)."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "turn", "On or off", show=False)]
    value: reactive[bool] = reactive(False)

    class Turned(Message):
        """The user has turned the switch."""

        def __init__(self, toggle: Toggle, value: bool) -> None:
            super().__init__()
            self.toggle, self.value = toggle, value

        @property
        def control(self) -> Toggle:
            """The switch, for `@on` with a selector."""
            return self.toggle

    def __init__(self, words: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._words = words

    def show(self, value: bool) -> None:
        """Show on or off without posting a message."""
        self.value = value

    def action_turn(self) -> None:
        self.value = not self.value
        self.post_message(self.Turned(self, self.value))

    def on_click(self) -> None:
        self.action_turn()

    def render(self) -> Content:
        """Draw a box, crossed if it is on, and the words beside it."""
        return Content(f"[{'x' if self.value else ' '}] {self._words}")
