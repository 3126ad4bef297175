"""The open conversation: its messages, the answers under way, and what the store is told of it. No widget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from disco_daemon.client.stream import Link

from ..data.store import Conversation, Store
from ..draw.entry import Entry
from ..draw.message_cache import Shelf
from ..widgets.prompt import REMEMBERED
from ..widgets.sidebar import UNTITLED
from .answer_stream import Message, hear, messages_of

DEFAULT_MODEL = "disco"
READ_AT_ONCE = 100  # messages


@dataclass(slots=True)
class Answering:
    """An answer that is being heard."""

    entry: Entry
    task: asyncio.Task[None]


@dataclass(slots=True)
class Attached:
    """A file's text, to be sent with the next question."""

    name: str
    text: str


@dataclass(slots=True)
class Talks:
    """All conversations: the open one (None: a new one, which has no row until something is asked), and who answers.

    However long it is, memory holds the words of its latest and of its shown messages only; the others rest on `shelf`.
    `changed(entry)` is called when an answer has new words, `ended(entry)` when it is over. Each waits for
    `ready()` before it is asked for.
    """

    link: Link
    store: Store
    changed: Callable[[Entry], None]
    ended: Callable[[Entry], None]
    ready: Callable[[], Awaitable[None]]
    current: Conversation | None = None
    entries: list[Entry] = field(default_factory=list)
    system: str = ""
    model: str = DEFAULT_MODEL
    attached: list[Attached] = field(default_factory=list)
    _answering: dict[int, Answering] = field(default_factory=dict)
    shelf: Shelf = field(init=False)

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.store)

    # --- which one --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new, empty one; it keeps the model."""
        self.current, self.entries, self.system, self.attached = None, [], "", []

    def open(self, conversation: int) -> None:
        """One of the store's; an answer that is being heard is the same one."""
        self.current = next((c for c in self.store.list() if c.id == conversation), None)
        if self.current is None:
            return
        running = self._answering.get(conversation)
        live = {} if running is None else {running.entry.turn: running.entry}
        self.shelf.clear()
        self.entries = [
            live.get(head.id) or Entry.resting(head.id, head.role, head.finish, head.size, self.shelf)
            for head in self.store.heads(conversation)
        ]
        self.system, self.model, self.attached = self.current.system, self.current.model, []

    @property
    def title(self) -> str:
        """What to call it."""
        return UNTITLED if self.current is None else " ".join(self.current.title.split()) or UNTITLED

    @property
    def asked(self) -> list[str]:
        """The latest questions of the open one, oldest first. Raises StoreError."""
        return [] if self.current is None else self.store.asked(self.current.id, REMEMBERED)

    @property
    def running(self) -> Answering | None:
        """The answer of the open one, while it is heard."""
        return None if self.current is None else self._answering.get(self.current.id)

    @property
    def answering(self) -> bool:
        """Whether any answer is being heard, in whatever conversation."""
        return bool(self._answering)

    def rename(self, title: str) -> None:
        """Another title."""
        self.store.rename(self._stored().id, title)
        self._reread()

    def set_system(self, system: str) -> None:
        """Another system prompt, from the next question on."""
        self.system = system
        if self.current is not None:
            self.store.set_system(self.current.id, system)

    def set_model(self, model: str) -> None:
        """Another model or route, from the next question on."""
        self.model = model
        if self.current is not None:
            self.store.set_model(self.current.id, model)

    def delete(self) -> int | None:
        """Delete the open one; its number, with which the store can bring it back."""
        gone = self.current
        self.stop()
        self.begin()
        if gone is None:
            return None
        self.store.delete(gone.id)
        return gone.id

    def _stored(self) -> Conversation:
        if self.current is None:
            self.current = self.store.new(system=self.system, model=self.model)
        return self.current

    def _reread(self) -> None:
        self.current = next((c for c in self.store.list() if c.id == self._stored().id), self.current)

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> tuple[Entry, Entry]:
        """A question; both its entry and the answer's, which begins to be heard."""
        files = "".join(f"{file.text}\n\n" for file in self.attached)
        self.attached = []
        question = Entry(0, "user", files + text, finish="stop")
        question.turn = self.store.add(self._stored().id, "user", question.text, self._last_turn())
        self._put_away(question)
        self.entries.append(question)
        self._reread()  # its first question is its title
        return question, self._answer()

    def again(self, answer: Entry) -> Entry | None:
        """Drop an answer and what follows, and have it answered once more."""
        if answer not in self.entries or answer.role != "assistant":
            return None
        self._cut(answer)
        return self._answer() if self.entries else None

    def edit(self, question: Entry, text: str) -> tuple[Entry, Entry]:
        """Ask something else in place of a question; it and what follows are dropped."""
        self._cut(question)
        return self.ask(text)

    def go_on(self, answer: Entry) -> bool:
        """Have the last answer go on where it ended; False if it is not the last, or has not a word."""
        if not self.entries or answer is not self.entries[-1] or answer.role != "assistant" or not answer.text:
            return False
        self._hear(answer, self._messages())
        return True

    def stop(self) -> bool:
        """Stop the answer of the open conversation; False if there is none."""
        running = self.running
        return running is not None and running.task.cancel()

    def uncut(self) -> bool:
        """Change what was dropped last for what came in its place; False if nothing was."""
        if self.current is None or self.running is not None or not self.store.uncut(self.current.id):
            return False
        self.open(self.current.id)
        return True

    async def close(self) -> None:
        """Stop all answers, and wait until each is written; nobody looks any more."""
        self.changed = self.ended = lambda entry: None
        tasks = [answering.task for answering in self._answering.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _last_turn(self) -> int | None:
        return self.entries[-1].turn if self.entries else None

    def _cut(self, entry: Entry) -> None:
        self.store.cut(self._stored().id, entry.turn)
        del self.entries[self.entries.index(entry) :]

    def _put_away(self, entry: Entry) -> None:
        """The store has its words: the entry need not."""
        self.shelf.put(entry.turn, entry.words)
        entry.rest(self.shelf)

    def _messages(self) -> Iterator[Message]:
        """What there is now, read from the store as it is asked for, and not all of it at once."""
        return messages_of(self._said(list(self.entries)), self.system)

    def _said(self, entries: list[Entry]) -> Iterator[tuple[str, str]]:
        for first in range(0, len(entries), READ_AT_ONCE):
            some = entries[first : first + READ_AT_ONCE]
            texts = self.store.texts([entry.turn for entry in some if not entry.awake])
            for entry in some:
                yield entry.role, entry.text if entry.awake else texts.get(entry.turn, "")

    def _answer(self) -> Entry:
        answer = Entry(0, "assistant", live=True)
        messages = self._messages()
        answer.turn = self.store.add(self._stored().id, "assistant", "", self._last_turn())
        self.entries.append(answer)
        self._hear(answer, messages)
        return answer

    def _hear(self, answer: Entry, messages: Iterator[Message]) -> None:
        conversation = self._stored().id
        answer.live = True

        def over(task: asyncio.Task[None]) -> None:
            self._answering.pop(conversation, None)
            answer.live = False
            if not task.cancelled() and (error := task.exception()) is not None:
                answer.end("error", {"error": str(error)})  # it is not in the store: its words stay here
            else:
                if answer.finish is None:  # cancelled before it had begun
                    answer.finish = "cancelled"
                self._put_away(answer)
            self.ended(answer)

        hearing = hear(
            self.link, self.store, answer, messages,
            model=self.model, touched=lambda: self.changed(answer), ready=self.ready,
        )  # fmt: skip
        task = asyncio.create_task(hearing, name=f"answer {answer.turn}")
        self._answering[conversation] = Answering(answer, task)
        task.add_done_callback(over)


def save(wanted: Path, text: str) -> Path:
    """Write a new file, with a number behind its name where there is one already; where it is. Raises OSError."""
    wanted = wanted.expanduser()
    for path in chain([wanted], (wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in count(2))):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise AssertionError  # there are always more numbers
