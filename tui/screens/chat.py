"""The chat: conversations on the left, the open one beside them, below it where one writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from ..data.banner import Banner
from ..data.store import StoreError
from ..draw.entry import Entry
from ..draw.theme import fit
from ..widgets.prompt import Prompt
from ..widgets.sidebar import Sidebar
from ..widgets.transcript import Transcript
from . import dialog_actions
from .conversation import Talks

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel
    from textual.widget import Widget

    from ..app import DiscoApp


class ChatScreen(Screen[None]):
    """Keys and what they do to `talks`; the widgets show it."""

    AUTO_FOCUS = "#prompt"
    # Textual declares it without ClassVar.
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "escape", "Stop", show=False),
        Binding("ctrl+n", "new", "New", priority=True),
        Binding("ctrl+b", "list", "List", show=False, priority=True),
        Binding("ctrl+f", "search", "Search", show=False, priority=True),
        Binding("ctrl+r", "again", "Again", show=False, priority=True),
        Binding("ctrl+y", "copy", "Copy", priority=True),
        Binding("ctrl+t", "timeline", "Timeline", priority=True),
        Binding("f6", "rename", "Rename", show=False, priority=True),
        Binding("f7", "system", "System prompt", show=False, priority=True),
        Binding("f8", "model", "Model", priority=True),
        Binding("f9", "start", "Start the daemon", show=False, priority=True),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),
        Binding("ctrl+z", "undo", "Undo", show=False, priority=True),
        Binding("ctrl+e", "export", "Export", show=False, priority=True),
        Binding("ctrl+up", "edit", "Edit", show=False, priority=True),
        Binding("ctrl+g", "go_on", "Continue", show=False, priority=True),
        Binding("ctrl+o", "attach", "Attach", show=False, priority=True),
        Binding("alt+up", "select(-1)", "Message before", show=False, priority=True),
        Binding("alt+down", "select(1)", "Message after", show=False, priority=True),
        Binding("pageup", "page(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Down", show=False, priority=True),
    ]

    app: DiscoApp

    def __init__(self) -> None:
        super().__init__()
        self._editing: Entry | None = None
        self._deleted: list[int] = []

    @property
    def talks(self) -> Talks:
        """The conversations."""
        return self.app.talks

    def compose(self) -> ComposeResult:
        """All of it."""
        with Horizontal(id="middle"):
            yield Sidebar(id="sidebar")
            with Vertical(id="main"):
                yield Static(id="banner", markup=False)
                yield Transcript(lambda: self.app.look, id="transcript")
                yield Static(id="line", markup=False)
                yield Prompt(id="prompt")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin with what there is."""
        self.set_class(self.app.plain, "-plain")
        for widget in (self.query_one(Sidebar), self.query_one(Prompt)):
            widget.set_class(self.app.plain, "-plain")
        self.show_conversation()

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Say something for a few seconds; its brackets are no markup."""
        self.notify(fit(text), severity=severity, markup=False)

    def _focus(self, widget: Widget) -> None:
        """Let keys go there from now on; what was typed ahead, too, which Textual's `focus` alone is too late for."""
        self.set_focus(widget)
        widget.focus()

    @contextmanager
    def told(self) -> Iterator[None]:
        """What the disk refuses is said, and changes nothing else."""
        try:
            yield
        except StoreError as e:
            self.say(str(e), severity="error")

    # --- showing ----------------------------------------------------------------------------------------------------

    def show_conversation(self) -> None:
        """The open conversation, from its end."""
        self._editing = None
        self.query_one(Transcript).show(list(self.talks.entries))
        with self.told():
            self.query_one(Prompt).remember(self.talks.asked)
        self.show_list()
        self.show_line()

    def show_list(self) -> None:
        """The conversations that fit the search."""
        bar, current = self.query_one(Sidebar), self.talks.current
        with self.told():
            bar.show(self.app.store.list(bar.search), None if current is None else current.id)

    def show_line(self) -> None:
        """The line above the input: title, model, what is attached, what the signs mean."""
        talks, look = self.talks, self.app.look
        parts = [fit(talks.title), fit(talks.model)]
        if talks.attached:
            parts.append("attached: " + ", ".join(fit(file.name) for file in talks.attached))
        if talks.system:
            parts.append("system prompt")
        if self._editing is not None:
            parts.append("editing: Enter asks again from here, Escape gives up")
        elif talks.running is not None:
            parts.append("answering: Escape stops")
        line = Text((", " if look.plain else " · ").join([*parts, look.legend]), no_wrap=True, overflow="ellipsis")
        self.query_one("#line", Static).update(line)

    def show_banner(self, banner: Banner | None) -> None:
        """What is wrong, or nothing."""
        place = self.query_one("#banner", Static)
        place.set_class(banner is not None, "-shown")
        place.update("" if banner is None else f"! {banner.text}")

    def changed(self, entry: Entry) -> None:
        """An answer has new words."""
        if (transcript := self.query_one_optional(Transcript)) is not None:  # None when the window is being closed
            transcript.touch(entry)

    def ended(self, entry: Entry) -> None:
        """An answer is over."""
        if (transcript := self.query_one_optional(Transcript)) is not None:
            transcript.settle(entry)
            self.show_list()
            self.show_line()

    def refresh_look(self) -> None:
        """Other colours."""
        self.query_one(Transcript).refresh_look()
        self.show_line()

    # --- asking -----------------------------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        """A question, or one in place of another."""
        if self.talks.running is not None:
            self.say("An answer is running: Escape stops it.")
            return
        with self.told():
            editing, self._editing = self._editing, None
            if editing is not None and editing in self.talks.entries:
                self.talks.edit(editing, event.text)
                self._reshow()
            else:
                for entry in self.talks.ask(event.text):
                    self.query_one(Transcript).add(entry)
            self.query_one(Prompt).sent(event.text)
        self.show_list()
        self.show_line()

    def _reshow(self) -> None:
        """The same conversation, shorter or with another end."""
        self.query_one(Transcript).show(list(self.talks.entries))
        self.show_line()

    def _chosen(self, role: str) -> Entry | None:
        """The selected message if it is of that role, else the last such one."""
        selected = self.query_one(Transcript).selected
        if selected is not None and selected.role == role:
            return selected
        return next((e for e in reversed(self.talks.entries) if e.role == role), None)

    def action_escape(self) -> None:
        """Stop the answer, or give up editing or searching."""
        bar = self.query_one(Sidebar)
        if self._editing is not None:
            self._editing = None
            self.query_one(Prompt).clear_text()
        elif not self.talks.stop() and bar.search:
            bar.clear_search()
        self.app.wave_away()
        self._focus(self.query_one(Prompt))
        self.show_line()

    def action_again(self) -> None:
        """Have an answer made once more."""
        answer = self._chosen("assistant")
        if self.talks.running is not None:
            self.say("An answer is running: Escape stops it.")
        elif answer is None:
            self.say("There is no answer yet.")
        else:
            with self.told():
                self.talks.again(answer)
                self._reshow()

    def action_go_on(self) -> None:
        """Have the last answer go on."""
        last = self.talks.entries[-1] if self.talks.entries else None
        if self.talks.running is not None or last is None or not self.talks.go_on(last):
            self.say("There is no answer that could go on.")
        else:
            self.changed(last)
            self.show_line()

    def action_edit(self) -> None:
        """Take a question back into the input; once more takes the one before it."""
        if self.talks.running is not None:
            self.say("An answer is running: Escape stops it.")
            return
        asked = [e for e in self.talks.entries if e.role == "user"]
        if self._editing in asked:
            asked = asked[: asked.index(self._editing)] or asked[:1]
        question = asked[-1] if self._editing is not None and asked else self._chosen("user")
        if question is None:
            self.say("There is no question yet.")
            return
        self._editing = question
        self.query_one(Prompt).put(question.text)
        self._focus(self.query_one(Prompt))
        self.show_line()

    @work(group="dialog")
    async def action_attach(self) -> None:
        """A text file for the next question."""
        await dialog_actions.attach(self)

    # --- conversations ----------------------------------------------------------------------------------------------

    def action_new(self) -> None:
        """A new conversation."""
        self.talks.begin()
        self.show_conversation()
        self._focus(self.query_one(Prompt))

    def action_list(self) -> None:
        """Show or hide the list."""
        narrow = self.has_class("-narrow")
        self.toggle_class("-list" if narrow else "-nolist")

    def action_search(self) -> None:
        """Look for words."""
        self.add_class("-list")
        self.remove_class("-nolist")
        self._focus(self.query_one(Sidebar).search_field)

    def on_sidebar_searched(self, event: Sidebar.Searched) -> None:
        """Other words."""
        del event
        self.show_list()

    def on_sidebar_opened(self, event: Sidebar.Opened) -> None:
        """Open a conversation."""
        self.remove_class("-list")
        with self.told():
            self.talks.open(event.conversation)
            self.show_conversation()
        self._focus(self.query_one(Prompt))

    @work(group="dialog")
    async def action_rename(self) -> None:
        """Another title."""
        await dialog_actions.rename(self)

    @work(group="dialog")
    async def action_system(self) -> None:
        """The system prompt of this conversation."""
        await dialog_actions.system(self)

    @work(group="dialog")
    async def action_model(self) -> None:
        """Model or route."""
        await dialog_actions.model(self)

    def action_delete(self) -> None:
        """Delete the open conversation."""
        gone = None
        with self.told():
            gone = self.talks.delete()
        if gone is not None:
            self._deleted.append(gone)
            self.say("Deleted. Ctrl+Z brings it back, until you quit.")
        self.show_conversation()

    def action_undo(self) -> None:
        """Bring back what was deleted or dropped; while somebody writes, take that back."""
        if self.query_one(Prompt).text:
            self.query_one(Prompt).action_undo()
        elif self._deleted:
            conversation = self._deleted.pop()
            with self.told():
                self.app.store.undelete(conversation)
                self.talks.open(conversation)
                self.show_conversation()
        else:
            with self.told():
                if self.talks.uncut():
                    self.show_conversation()
                else:
                    self.say("There is nothing to undo.")

    @work(group="dialog")
    async def action_export(self) -> None:
        """Write the conversation into a file."""
        await dialog_actions.export(self)

    # --- the rest ---------------------------------------------------------------------------------------------------

    @work(group="dialog")
    async def action_copy(self) -> None:
        """Copy an answer, or one of its code blocks."""
        await dialog_actions.copy(self, self._chosen("assistant"))

    def action_timeline(self) -> None:
        """How the selected answer came about."""
        answer = self._chosen("assistant")
        if answer is None or not (answer.disco or {}).get("endpoints"):
            self.say("Nothing is known of this answer.")
        else:
            self.app.show_timeline(answer.disco or {})

    def action_select(self, step: int) -> None:
        """Select the message before or after."""
        self.query_one(Transcript).select(step)

    def action_page(self, step: int) -> None:
        """Scroll the conversation, wherever the cursor is."""
        self.query_one(Transcript).action_page(step)

    def action_start(self) -> None:
        """Start a daemon, if none runs."""
        self.app.start_daemon()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The search field keeps its own keys."""
        del parameters
        editing = isinstance(self.focused, Input)
        return not (editing and action == "undo")


KEYS: list[tuple[str, str]] = [
    ("Enter, Ctrl+J", "send; begin a new line (Shift+Enter, too, where the terminal can tell)"),
    ("Up, Down", "what you asked before, from the first and last line of the input"),
    ("Escape", "stop the answer; give up editing; leave the search"),
    ("Ctrl+R, Ctrl+G", "have the answer made again; have it go on"),
    ("Ctrl+Up", "edit a question and ask from there again; once more: the question before"),
    ("Ctrl+O", "attach a text file to the next question"),
    ("Ctrl+N, Ctrl+B, Ctrl+F", "new conversation; show or hide the list; search"),
    ("F6, Ctrl+D, Ctrl+Z", "rename; delete; undo that"),
    ("Ctrl+E", "export as Markdown or JSON"),
    ("F7, F8", "system prompt of this conversation; model or route"),
    ("Alt+Up, Alt+Down", "select a message, for Ctrl+Y, Ctrl+R, Ctrl+T and Ctrl+Up"),
    ("Ctrl+Y, Ctrl+T", "copy the answer or a code block; its timeline"),
    ("PageUp, PageDown", "scroll"),
    ("F2, F3, F4, F5", "chat; control panel; dashboard; setup"),
    ("Ctrl+L, Ctrl+P", "light or dark; all commands and themes"),
    ("F9", "start a daemon, if none runs"),
    ("Ctrl+Q", "quit"),
]
