"""The actions of the chat that ask in a dialog first: for a name, a file or a choice."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from disco_daemon.client.once import DaemonError

from ..data.attach import MAX_BYTES, AttachError, as_attachment
from ..data.export import save, to_json, to_markdown
from ..draw.entry import Entry
from ..draw.theme import fit
from .conversations import Attachment, Conversations
from .dialogs import ChoiceDialog, LineDialog, TextDialog

if TYPE_CHECKING:
    from textual.app import App
    from textual.notifications import SeverityLevel

MODELS = {
    "disco": "disco (decides for each answer)",
    "disco/device": "disco/device (never leaves this machine)",
}


class Chat(Protocol):
    """The part of the chat screen that these actions use."""

    conversations: Conversations

    @property
    def app(self) -> App[object]:
        """The application, which shows the dialogs."""
        ...

    def say(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a note."""
        ...

    def errors_shown(self) -> AbstractContextManager[None]:
        """Show a StoreError of the body as a note."""
        ...

    def show_list(self) -> None:
        """List the conversations anew."""
        ...

    def show_line(self) -> None:
        """Show the line above the prompt anew."""
        ...


async def attach(chat: Chat) -> None:
    """Attach a text file to the next question."""
    path = await chat.app.push_screen_wait(LineDialog(f"Attach a text file (up to {MAX_BYTES // 1024} KiB)"))
    if not path:
        return
    try:
        text = await asyncio.to_thread(as_attachment, Path(path), MAX_BYTES)
    except AttachError as e:
        chat.say(str(e), severity="warning")
        return
    chat.conversations.attached.append(Attachment(Path(path).name, text))
    chat.show_line()


async def rename(chat: Chat) -> None:
    """Give the open conversation another title."""
    present = "" if chat.conversations.current is None else chat.conversations.title
    title = await chat.app.push_screen_wait(LineDialog("Title", present))
    if title:
        with chat.errors_shown():
            chat.conversations.rename(title)
        chat.show_list()
        chat.show_line()


async def system(chat: Chat) -> None:
    """Change the system prompt of the open conversation."""
    text = await chat.app.push_screen_wait(TextDialog("System prompt of this conversation", chat.conversations.system))
    if text is not None:
        with chat.errors_shown():
            chat.conversations.set_system(text)
        chat.show_line()


async def model(chat: Chat) -> None:
    """Choose the model or route of the open conversation."""
    try:
        names = await chat.conversations.link.models()
    except DaemonError as e:
        chat.say(str(e), severity="warning")
        return
    choices = [(name, fit(MODELS.get(name, name))) for name in names]
    chosen = await chat.app.push_screen_wait(ChoiceDialog("Model or route", choices, chat.conversations.model))
    if chosen:
        with chat.errors_shown():
            chat.conversations.set_model(chosen)
        chat.show_line()


async def export(chat: Chat) -> None:
    """Write the open conversation into a file."""
    current = chat.conversations.current
    if current is None:
        chat.say("There is nothing to export yet.")
        return
    kinds = [("md", "Markdown"), ("json", "JSON, with how each answer came about")]
    kind = await chat.app.push_screen_wait(ChoiceDialog("Export as", kinds))
    if kind is None:
        return
    usual = "".join(c if c.isalnum() else "-" for c in chat.conversations.title).strip("-")[:40] or "conversation"
    name = await chat.app.push_screen_wait(LineDialog("Write to", str(Path.cwd() / f"{usual}.{kind}")))
    if not name:
        return
    write = to_markdown if kind == "md" else to_json
    with chat.errors_shown():
        text = write(current, chat.conversations.store.turns(current.id))
        try:
            chat.say(f"Written to {await asyncio.to_thread(save, Path(name), text)}")
        except OSError as e:
            chat.say(f"Not written: {e.strerror or e}", severity="warning")


async def copy(chat: Chat, answer: Entry | None) -> None:
    """Copy an answer, or one of its code blocks."""
    if answer is None:
        chat.say("There is no answer yet.")
        return
    code = answer.code
    chosen: str | None = "all"
    if code:
        choices = [("all", "The whole answer")]
        choices += [
            (str(i), f"Code: {block.strip().splitlines()[0][:50]}") for i, block in enumerate(code) if block.strip()
        ]
        chosen = await chat.app.push_screen_wait(ChoiceDialog("Copy", choices))
    if chosen is not None:
        chat.app.copy_to_clipboard(answer.text if chosen == "all" else code[int(chosen)])
        chat.say("Copied.")
