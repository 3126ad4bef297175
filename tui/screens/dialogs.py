"""The dialogs: for a line, for a text, for a choice of a list, and the help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, TextArea
from textual.widgets.option_list import Option

from ..draw.theme import fit
from ..widgets.words import PlainLabel, PlainStatic


class LineDialog(ModalScreen[str | None]):
    """Asks for one line; dismissed with None if it is cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", priority=True)]

    def __init__(self, title: str, value: str = "", hint: str = "Enter accepts, Escape cancels") -> None:
        super().__init__()
        self._title, self._value, self._hint = title, value, hint

    def compose(self) -> ComposeResult:
        with Vertical():
            yield PlainLabel(Text(fit(self._title)))
            yield Input(self._value, compact=True)
            yield PlainLabel(Text(self._hint, "dim"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class TextDialog(ModalScreen[str | None]):
    """Asks for several lines; dismissed with None if it is cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel", priority=True),
        Binding("ctrl+s", "accept", "Accept", priority=True),
    ]

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self._title, self._value = title, value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield PlainLabel(Text(fit(self._title)))
            yield TextArea(self._value, compact=True)
            yield PlainLabel(Text("Ctrl+S accepts, Escape cancels", "dim"))

    def action_accept(self) -> None:
        self.dismiss(self.query_one(TextArea).text.strip())


class ChoiceDialog(ModalScreen[str | None]):
    """Asks for one of the choices, pairs of (key, shown text); dismissed with the key, or None if it is cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", priority=True)]

    def __init__(self, title: str, choices: Sequence[tuple[str, str]], chosen: str = "") -> None:
        super().__init__()
        self._title, self._choices, self._chosen = title, choices, chosen

    def compose(self) -> ComposeResult:
        with Vertical():
            yield PlainLabel(Text(fit(self._title)))
            yield OptionList(*(Option(Text(fit(shown)), id=f"c{i}") for i, (_, shown) in enumerate(self._choices)))
            yield PlainLabel(Text("Enter chooses, Escape cancels", "dim"))

    def on_mount(self) -> None:
        keys = [key for key, _ in self._choices]
        self.query_one(OptionList).highlighted = keys.index(self._chosen) if self._chosen in keys else 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index][0])


class HelpDialog(ModalScreen[None]):
    """A table of all keys and what each does."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,enter,q", "dismiss(None)", "Close", priority=True)]

    def __init__(self, keys: Sequence[tuple[str, str]], legend: str) -> None:
        super().__init__()
        self._keys, self._legend = keys, legend

    def compose(self) -> ComposeResult:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for key, does in self._keys:
            table.add_row(Text(key, "bold"), Text(does))
        with VerticalScroll():
            yield PlainStatic(Text("Keys (Escape closes)", "bold"))
            yield PlainStatic(table)
            yield PlainStatic(Text(f"Who wrote each word: {self._legend}"))
