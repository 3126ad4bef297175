"""What the chat does by way of a dialog: it asks for a name, a file or a choice, and then does what was chosen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from disco_daemon.client.once import DaemonError

from ..data.attach import MAX_BYTES, AttachError, attached
from ..data.export import to_json, to_markdown
from ..draw.entry import Entry
from ..draw.theme import fit
from .conversation import Attached, save
from .dialogs import Ask, AskLong, Pick

if TYPE_CHECKING:
    from .chat import ChatScreen

MODELS = {
    "disco": "disco (decides for each answer)",
    "disco/device": "disco/device (never leaves this machine)",
}


async def attach(chat: ChatScreen) -> None:
    """A text file for the next question."""
    path = await chat.app.push_screen_wait(Ask(f"Attach a text file (up to {MAX_BYTES // 1024} KiB)"))
    if not path:
        return
    try:
        text = await asyncio.to_thread(attached, Path(path), MAX_BYTES)
    except AttachError as e:
        chat.say(str(e), severity="warning")
        return
    chat.talks.attached.append(Attached(Path(path).name, text))
    chat.show_line()


async def rename(chat: ChatScreen) -> None:
    """Another title."""
    present = "" if chat.talks.current is None else chat.talks.title
    title = await chat.app.push_screen_wait(Ask("Title", present))
    if title:
        with chat.told():
            chat.talks.rename(title)
        chat.show_list()
        chat.show_line()


async def system(chat: ChatScreen) -> None:
    """The system prompt of this conversation."""
    text = await chat.app.push_screen_wait(AskLong("System prompt of this conversation", chat.talks.system))
    if text is not None:
        with chat.told():
            chat.talks.set_system(text)
        chat.show_line()


async def model(chat: ChatScreen) -> None:
    """Model or route."""
    try:
        names = await chat.app.link.models()
    except DaemonError as e:
        chat.say(str(e), severity="warning")
        return
    choices = [(name, fit(MODELS.get(name, name))) for name in names]
    chosen = await chat.app.push_screen_wait(Pick("Model or route", choices, chat.talks.model))
    if chosen:
        with chat.told():
            chat.talks.set_model(chosen)
        chat.show_line()


async def export(chat: ChatScreen) -> None:
    """Write the conversation into a file."""
    current = chat.talks.current
    if current is None:
        chat.say("There is nothing to export yet.")
        return
    kinds = [("md", "Markdown"), ("json", "JSON, with how each answer came about")]
    kind = await chat.app.push_screen_wait(Pick("Export as", kinds))
    if kind is None:
        return
    usual = "".join(c if c.isalnum() else "-" for c in chat.talks.title).strip("-")[:40] or "conversation"
    name = await chat.app.push_screen_wait(Ask("Write to", str(Path.cwd() / f"{usual}.{kind}")))
    if not name:
        return
    write = to_markdown if kind == "md" else to_json
    with chat.told():
        text = write(current, chat.app.store.turns(current.id))
        try:
            chat.say(f"Written to {await asyncio.to_thread(save, Path(name), text)}")
        except OSError as e:
            chat.say(f"Not written: {e.strerror or e}", severity="warning")


async def copy(chat: ChatScreen, answer: Entry | None) -> None:
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
        chosen = await chat.app.push_screen_wait(Pick("Copy", choices))
    if chosen is not None:
        chat.app.copy_to_clipboard(answer.text if chosen == "all" else code[int(chosen)])
        chat.say("Copied.")
