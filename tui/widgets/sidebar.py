"""The list of conversations, and a search over their texts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from ..data.store import Conversation
from ..draw.theme import fit

SHOWN = 500  # conversations in the list; the search finds all
TITLE_CELLS = 27  # of a title in the list, which is 30 wide with its border
UNTITLED = "New conversation"


def title_of(conversation: Conversation) -> str:
    """Return its title in one line that a terminal can show."""
    return " ".join(fit(conversation.title).split()) or UNTITLED


class Sidebar(Vertical):
    """A search field, and below it the conversations, the latest first."""

    class Searched(Message):
        """The user has changed the search."""

        def __init__(self, query: str) -> None:
            super().__init__()
            self.query = query

    class Opened(Message):
        """The user has chosen a conversation."""

        def __init__(self, conversation: int) -> None:
            super().__init__()
            self.conversation = conversation

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ids: list[int] = []

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Search (Ctrl+F)", compact=True, id="search")
        yield OptionList(id="conversations", compact=True)

    @property
    def search(self) -> str:
        """The text of the search."""
        return self.search_field.value

    @property
    def search_field(self) -> Input:
        """The input of the search."""
        return self.query_one("#search", Input)

    def clear_search(self) -> None:
        """Empty the search, which lists everything again."""
        self.search_field.value = ""

    def show(self, conversations: Sequence[Conversation], current: int | None) -> None:
        """List these, with a sign at the one whose id is `current`."""
        self._ids = [c.id for c in conversations[:SHOWN]]
        options = self.query_one("#conversations", OptionList)
        options.clear_options()
        for conversation in conversations[:SHOWN]:
            sign = "▸ " if conversation.id == current else "  "
            line = Text(sign + title_of(conversation))
            line.truncate(TITLE_CELLS, overflow="ellipsis")
            options.add_option(Option(line, id=f"v{conversation.id}"))
        if current in self._ids:
            options.highlighted = self._ids.index(current)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Searched(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Open the first conversation of the list."""
        event.stop()
        if self._ids:
            self.post_message(self.Opened(self._ids[0]))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Opened(self._ids[event.option_index]))
