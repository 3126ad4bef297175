"""The chat: a list of conversations, the open one beside it, and the prompt below.

It is longer than most files: what its keys do stands in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from ..data.banner import Banner
from ..data.found_words import words_in
from ..data.setup_draft import FETCH, fetch_choices
from ..data.store import StoreError
from ..draw.entry import Entry
from ..draw.theme import TextTheme, fit
from ..widgets.prompt import Prompt
from ..widgets.sidebar import Sidebar
from ..widgets.status_line import StatusLine
from ..widgets.transcript import Transcript
from ..widgets.words import PlainStatic
from . import dialog_actions
from .conversations import DEFAULT_MODEL, AnswerEnded, AnswerGrew, Conversations
from .timeline import TimelineScreen

if TYPE_CHECKING:
    from textual.notifications import SeverityLevel
    from textual.widget import Widget

OFFERED = "Models that suit this machine: Up, then Enter, fetches one under its licence."


class ChatScreen(Screen[None]):
    """The keys of the chat, and what each does to the conversations; the widgets show the result."""

    AUTO_FOCUS = "#prompt"
    # Textual declares it without ClassVar.
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-low"), (12, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "escape", "Stop", show=False, tooltip="Stop the answer"),
        Binding("ctrl+n", "new", "New", priority=True, tooltip="Begin a new conversation"),
        Binding("ctrl+b", "list", "List", show=False, priority=True, tooltip="Show or hide the conversations"),
        Binding("ctrl+f", "search", "Search", show=False, priority=True, tooltip="Search in all conversations"),
        Binding("ctrl+r", "again", "Again", show=False, priority=True, tooltip="Regenerate the answer"),
        Binding("alt+r", "redo", "Redo", show=False, priority=True, tooltip="Have the server answer it again"),
        Binding("ctrl+y", "copy", "Copy", show=False, priority=True, tooltip="Copy the answer, or code in it"),
        Binding("ctrl+t", "timeline", "Timeline", priority=True, tooltip="Show how the answer came about"),
        Binding(
            "alt+t", "thought", "Thought", show=False, priority=True, tooltip="Show or fold what the model thought"
        ),
        Binding("f6", "rename", "Rename", show=False, priority=True, tooltip="Rename the conversation"),
        Binding("f7", "system", "System prompt", show=False, priority=True, tooltip="Change the system prompt"),
        Binding("f8", "model", "Model", priority=True, tooltip="Choose who answers: model or route"),
        Binding("f9", "start", "Start the daemon", show=False, priority=True, tooltip="Start a daemon, if none runs"),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True, tooltip="Delete the conversation"),
        Binding("ctrl+z", "undo", "Undo", show=False, priority=True, tooltip="Undo what was deleted or replaced"),
        Binding("ctrl+e", "export", "Export", show=False, priority=True, tooltip="Export the conversation"),
        Binding("ctrl+up", "edit", "Edit", show=False, priority=True, tooltip="Edit the last question and ask again"),
        Binding("ctrl+g", "go_on", "Continue", show=False, priority=True, tooltip="Continue the answer"),
        Binding("ctrl+o", "attach", "Attach", show=False, priority=True, tooltip="Attach a text file"),
        Binding("alt+c", "compact", "Shorten", show=False, priority=True, tooltip="Have a summary replace older turns"),
        Binding("alt+up", "select(-1)", "Before", show=False, priority=True, tooltip="Select the message before"),
        Binding("alt+down", "select(1)", "After", show=False, priority=True, tooltip="Select the message after"),
        Binding("pageup", "page(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Down", show=False, priority=True),
    ]

    class DaemonWanted(Message):
        """The user asks for a daemon to be launched."""

    class AnswerOver(Message):
        """An answer has ended, and with it a side's health or the day's cost may be another."""

    class ModelWanted(Message):
        """The user has chosen the offered model of that name."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class PaceWanted(Message):
        """The chat is shown, and the reading pace may be another one."""

    class WelcomeDismissed(Message):
        """The user has read the welcome."""

    def __init__(self, conversations: Conversations, theme: Callable[[], TextTheme], *, plain: bool = False) -> None:
        super().__init__()
        self.conversations = conversations
        self._text_theme, self._plain = theme, plain
        self._editing: Entry | None = None
        self._deleted: list[int] = []

    def compose(self) -> ComposeResult:
        with Horizontal(id="middle"):
            yield Sidebar(id="sidebar")
            with Vertical(id="main"):
                yield PlainStatic(id="banner")
                yield Transcript(self._text_theme, id="transcript")
                yield OptionList(id="offers", compact=True)
                yield PlainStatic(id="line")
                yield Prompt(id="prompt")
        yield StatusLine(self._text_theme, id="status")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for widget in (self, self.query_one(Sidebar), self.query_one(Prompt)):
            widget.set_class(self._plain, "-plain")
        with self.errors_shown():
            if self.conversations.reopen():
                self.say("The last answer was interrupted. Ctrl+G continues it, Ctrl+N begins anew.")
        self.show_conversation()

    def on_screen_resume(self) -> None:
        self.post_message(self.PaceWanted())

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a note for a few seconds; its brackets are no markup."""
        self.notify(fit(text), severity=severity, markup=False)

    def _focus(self, widget: Widget) -> None:
        """Send keys to this widget, those typed ahead too: Textual's `focus` alone is too late for them."""
        self.set_focus(widget)
        widget.focus()

    @contextmanager
    def errors_shown(self) -> Iterator[None]:
        """Show a StoreError of the body as a note."""
        try:
            yield
        except StoreError as e:
            self.say(str(e), severity="error")

    # --- showing ----------------------------------------------------------------------------------------------------

    def show_conversation(self) -> None:
        """Show the open conversation, from its end."""
        self._editing = None
        self.show_offers(())
        self.query_one(Transcript).show(list(self.conversations.entries))
        with self.errors_shown():
            self.query_one(Prompt).remember(self.conversations.questions)
        self.show_list()
        self.show_line()

    def show_list(self) -> None:
        """List the conversations that match the search."""
        bar, current = self.query_one(Sidebar), self.conversations.current
        with self.errors_shown():
            bar.show(self.conversations.store.list(bar.search), None if current is None else current.id)

    def show_line(self) -> None:
        """Show above the prompt what goes on, what the next question takes along, the signs' meaning and the title.

        The title stands last, and so is cut first.
        """
        open_one, theme = self.conversations, self._text_theme()
        parts = []
        if self.query_one(Transcript).more_below:
            parts.append("more below: End" if theme.plain else "▼ more below: End")
        if self._editing is not None:
            parts.append("editing: Enter asks again from here, Escape gives up")
        elif open_one.running is not None:
            parts.append("answering: Escape stops")
        if (filled := open_one.filled) is not None and open_one.running is None:
            parts.append("Alt+C shortens it" + (": {:,} of {:,} tokens".format(*filled) if filled[1] else ""))
        if open_one.is_open and open_one.running is None:
            parts.append("Alt+C asks again")
        if open_one.model != DEFAULT_MODEL:
            parts.append(f"{fit(open_one.model)}: F8")
        if open_one.attached:
            parts.append("attached: " + ", ".join(fit(file.name) for file in open_one.attached))
        if open_one.system:
            parts.append("system prompt")
        parts += [*([] if open_one.alone else [theme.legend]), fit(open_one.title)]
        line = Text((", " if theme.plain else " · ").join(parts), no_wrap=True, overflow="ellipsis")
        self.query_one("#line", Static).update(line)

    def show_state(self, state: Mapping[str, Any] | None, trouble: str = "") -> None:
        """Show how the sides are; without a state, why there is none."""
        alone = self.conversations.alone
        self.conversations.follow(state)
        self.query_one(StatusLine).show(state, trouble)
        if alone != self.conversations.alone:
            self.show_line()

    def show_banner(self, banner: Banner | None) -> None:
        """Show what is wrong; None hides the banner."""
        place = self.query_one("#banner", Static)
        place.set_class(banner is not None, "-shown")
        place.update("" if banner is None else f"! {banner.text}")

    def show_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Show models that suit this machine, until something is asked or opened; none hides the list."""
        place = self.query_one("#offers", OptionList)
        width = self.query_one(Transcript).scrollable_content_region.width
        rows = [] if self.conversations.entries else fetch_choices(offers, width)
        if not rows and self.focused is place:
            self._focus(self.query_one(Prompt))
        place.set_class(bool(rows), "-shown")
        lines = [Option(Text(fit(line), no_wrap=True, overflow="ellipsis"), id=key) for key, line in rows]
        place.set_options([Option(Text(OFFERED, self._text_theme().dim), disabled=True), *lines])

    def on_prompt_past_start(self) -> None:
        place = self.query_one("#offers", OptionList)
        if place.display:
            self._focus(place)
            place.action_first()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.post_message(self.ModelWanted((event.option.id or "").removeprefix(FETCH)))

    def on_transcript_more_below(self) -> None:
        self.show_line()

    def on_prompt_past_end(self) -> None:
        self.query_one(Transcript).action_end(1)

    def show_pace(self, pace_tps: float) -> None:
        """Fade the words that a reader at this pace has not reached, token/s; 0 = none."""
        self.query_one(Transcript).set_pace(pace_tps)

    def on_answer_grew(self, message: AnswerGrew) -> None:
        if (transcript := self.query_one_optional(Transcript)) is not None:  # None when the window is being closed
            transcript.touch(message.entry)

    def on_answer_ended(self, message: AnswerEnded) -> None:
        if (transcript := self.query_one_optional(Transcript)) is not None:
            transcript.settle(message.entry)
            with self.errors_shown():
                if (answer := self.conversations.answered(message.entry)) is not None:
                    transcript.add(answer)
            self.show_list()
            self.show_line()
        self.post_message(self.AnswerOver())

    def refresh_theme(self) -> None:
        """Draw everything in the colours of another theme."""
        self.query_one(Transcript).refresh_theme()
        self.query_one(StatusLine).draw()
        self.show_line()

    # --- asking -----------------------------------------------------------------------------------------------------

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        """Ask the question, or put it in place of the one that is edited."""
        if self.conversations.running is not None:
            self.say("An answer is running: Escape stops it.")
            return
        with self.errors_shown():
            editing, self._editing = self._editing, None
            if editing is not None and editing in self.conversations.entries:
                self.conversations.edit(editing, event.text)
                self._reshow()
            else:
                for entry in self.conversations.ask(event.text):
                    self.query_one(Transcript).add(entry)
            self.query_one(Prompt).accept(event.text)
        self.show_offers(())
        self.show_list()
        self.show_line()

    def _reshow(self) -> None:
        """Show the open conversation after its end has changed."""
        self.query_one(Transcript).show(list(self.conversations.entries))
        self.show_line()

    def _chosen_entry(self, role: str) -> Entry | None:
        """Return the selected message if it has that role, else the last one that has."""
        selected = self.query_one(Transcript).selected
        if selected is not None and selected.role == role:
            return selected
        return next((e for e in reversed(self.conversations.entries) if e.role == role), None)

    def action_escape(self) -> None:
        """Give up editing, stop the answer or clear the search, whichever comes first."""
        bar = self.query_one(Sidebar)
        if self._editing is not None:
            self._editing = None
            self.query_one(Prompt).clear_text()
        elif not self.conversations.stop() and bar.search:
            bar.clear_search()
        self.post_message(self.WelcomeDismissed())
        self._focus(self.query_one(Prompt))
        self.show_line()

    def action_redo(self) -> None:
        """Have the server answer the question of an answer again."""
        if self.conversations.alone:
            self.say("There is no server to ask: F5 sets one up.")
        elif (self.conversations.state or {}).get("private"):
            self.say("Nothing leaves this machine now (F3), so no server is asked.")
        else:
            self.action_again(by_server=True)

    def action_again(self, *, by_server: bool = False) -> None:
        answer = self._chosen_entry("assistant")
        if self.conversations.running is not None:
            self.say("An answer is running: Escape stops it.")
        elif answer is None:
            self.say("There is no answer yet.")
        else:
            with self.errors_shown():
                self.conversations.again(answer, by_server=by_server)
                self._reshow()

    def action_compact(self) -> None:
        """Put a summary in place of all before the last question."""
        if self.conversations.running is not None:
            self.say("An answer is running: Escape stops it.")
            return
        with self.errors_shown():
            if self.conversations.compact() is None:
                self.say("There is nothing to shorten before the last question.")
            self._reshow()

    def action_go_on(self) -> None:
        last = self.conversations.entries[-1] if self.conversations.entries else None
        if self.conversations.running is not None or last is None or not self.conversations.go_on(last):
            self.say("There is no answer that could go on.")
        else:
            self.query_one(Transcript).go_on(last)
            self.show_line()

    def action_edit(self) -> None:
        """Put a question back into the prompt; pressed again, the one before it."""
        if self.conversations.running is not None:
            self.say("An answer is running: Escape stops it.")
            return
        asked = [e for e in self.conversations.entries if e.role == "user"]
        if self._editing in asked:
            asked = asked[: asked.index(self._editing)] or asked[:1]
        question = asked[-1] if self._editing is not None and asked else self._chosen_entry("user")
        if question is None:
            self.say("There is no question yet.")
            return
        self._editing = question
        self.query_one(Prompt).put(question.text)
        self._focus(self.query_one(Prompt))
        self.show_line()

    @work(group="dialog")
    async def action_attach(self) -> None:
        await dialog_actions.attach(self)

    # --- conversations ----------------------------------------------------------------------------------------------

    def action_new(self) -> None:
        self.conversations.begin()
        self.show_conversation()
        self._focus(self.query_one(Prompt))

    def action_list(self) -> None:
        narrow = self.has_class("-narrow")
        self.toggle_class("-list" if narrow else "-nolist")

    def action_search(self) -> None:
        """Move the cursor into the search field."""
        self.add_class("-list")
        self.remove_class("-nolist")
        self._focus(self.query_one(Sidebar).search_field)

    def on_sidebar_searched(self, event: Sidebar.Searched) -> None:
        if not event.query:
            self.query_one(Transcript).mark(None)
        self.show_list()

    def on_sidebar_opened(self, event: Sidebar.Opened) -> None:
        self.remove_class("-list")
        with self.errors_shown():
            self.conversations.open(event.conversation)
            self.show_conversation()
            self._show_found(event.conversation, self.query_one(Sidebar).search)
        self._focus(self.query_one(Prompt))

    def _show_found(self, conversation: int, query: str) -> None:
        """Mark the words of the search, and scroll to the first message that has them."""
        turn = self.conversations.store.found(conversation, query)
        if (entry := next((e for e in self.conversations.entries if e.turn == turn), None)) is not None:
            self.query_one(Transcript).mark(words_in(entry.text, query), entry)

    @work(group="dialog")
    async def action_rename(self) -> None:
        await dialog_actions.rename(self)

    @work(group="dialog")
    async def action_system(self) -> None:
        await dialog_actions.system(self)

    @work(group="dialog")
    async def action_model(self) -> None:
        await dialog_actions.model(self)

    def action_delete(self) -> None:
        gone = None
        with self.errors_shown():
            gone = self.conversations.delete()
        if gone is not None:
            self._deleted.append(gone)
            self.say("Deleted. Ctrl+Z brings it back, until you quit.")
        self.show_conversation()

    def action_undo(self) -> None:
        """Undo in the prompt if it has text; else bring back what was deleted or dropped."""
        if self.query_one(Prompt).text:
            self.query_one(Prompt).action_undo()
        elif self._deleted:
            conversation = self._deleted.pop()
            with self.errors_shown():
                self.conversations.store.undelete(conversation)
                self.conversations.open(conversation)
                self.show_conversation()
        else:
            with self.errors_shown():
                if self.conversations.uncut():
                    self.show_conversation()
                else:
                    self.say("There is nothing to undo.")

    @work(group="dialog")
    async def action_export(self) -> None:
        await dialog_actions.export(self)

    # --- the rest ---------------------------------------------------------------------------------------------------

    @work(group="dialog")
    async def action_copy(self) -> None:
        await dialog_actions.copy(self, self._chosen_entry("assistant"))

    def action_timeline(self) -> None:
        answer = self._chosen_entry("assistant")
        if answer is None:
            self.say("Ask something first: a timeline is one answer's.")
        elif answer.live:
            self.say("The timeline is there when the answer has ended.")
        elif not (answer.disco or {}).get("endpoints"):
            self.say("Nothing was kept of how this answer came.")
        else:
            self.app.push_screen(TimelineScreen(answer.disco))

    def action_thought(self) -> None:
        answer = self._chosen_entry("assistant")
        if answer is None or not answer.thought:
            self.say("Of this answer no thought is kept.")
        else:
            answer.is_unfolded = not answer.is_unfolded
            self.query_one(Transcript).settle(answer)

    def action_select(self, step: int) -> None:
        self.query_one(Transcript).select(step)

    def action_page(self, step: int) -> None:
        """Scroll the conversation, wherever the focus is."""
        self.query_one(Transcript).action_page(step)

    def action_start(self) -> None:
        self.post_message(self.DaemonWanted())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave Ctrl+Z to the search field."""
        del parameters
        editing = isinstance(self.focused, Input)
        return not (editing and action == "undo")


KEYS: list[tuple[str, str]] = [
    ("Enter, Ctrl+J", "send; begin a new line (Shift+Enter, too, where the terminal can tell)"),
    ("Up, Down", "what you asked before, from the first and last line of the input"),
    ("Escape", "stop the answer; give up editing; leave the search"),
    ("Ctrl+R, Alt+R, Ctrl+G", "regenerate the answer; have the server answer it; continue it"),
    ("Ctrl+Up", "edit a question and ask from there again; once more: the question before"),
    ("Ctrl+O", "attach a text file to the next question"),
    ("Alt+C", "shorten the conversation: a summary goes out for older turns; Ctrl+Z undoes it"),
    ("Ctrl+N, Ctrl+B, Ctrl+F", "new conversation; show or hide the list; search"),
    ("F6, Ctrl+D, Ctrl+Z", "rename; delete; undo that"),
    ("Ctrl+E", "export as Markdown or JSON"),
    ("F7, F8", "system prompt of this conversation; model or route"),
    ("Alt+Up, Alt+Down", "select a message, for Ctrl+Y, Ctrl+R, Ctrl+T, Alt+T and Ctrl+Up"),
    ("Ctrl+Y, Ctrl+T, Alt+T", "copy the answer or a code block; its timeline; its thought"),
    ("PageUp, PageDown, End", "scroll; to the end, and stay there while an answer grows"),
    ("Alt+P", "fade the words ahead of your reading pace (F3), or not"),
    ("F2, F3, F4, F5", "chat; control panel; dashboard; setup"),
    ("Ctrl+L, Ctrl+P", "light or dark; all commands and themes"),
    ("F9", "start a daemon, if none runs"),
    ("Ctrl+Q", "quit"),
]
