"""The conversations: the open one with its messages, and the answers that are streaming. No widget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

from textual.message import Message

from disco_daemon.client.compaction import INSTRUCTION, SUMMARY_TOKENS, TOO_LONG, filled, route_of_summary, used_tokens
from disco_daemon.client.side_health import waiting_for
from disco_daemon.client.stream import Link

from ..data.store import Conversation, Store
from ..draw.entry import SUMMARY, Entry
from ..draw.message_cache import MessageCache
from ..widgets.prompt import REMEMBERED
from ..widgets.sidebar import UNTITLED
from .answer_stream import ApiMessage, in_place_of, messages_of, stream_answer

DEFAULT_MODEL = "disco"
READ_AT_ONCE = 100  # messages


class AnswerGrew(Message, bubble=False):
    """An answer has new words."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry

    def can_replace(self, message: Message) -> bool:
        """Whether `message`, which still waits, says nothing that this one does not."""
        return isinstance(message, AnswerGrew) and message.entry is self.entry


class AnswerEnded(Message, bubble=False):
    """An answer is over, and written."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry


@dataclass(slots=True)
class RunningAnswer:
    """An answer that is streaming."""

    entry: Entry
    task: asyncio.Task[None]
    model: str  # that was asked for


@dataclass(slots=True)
class Attachment:
    """The text of a file, which goes out with the next question."""

    name: str
    text: str


@dataclass(slots=True)
class Conversations:
    """All conversations. `current` is the open one; None is a new one, which has no row before its first question.

    However long the open one is, memory holds the words of its latest and of its shown messages only; `cache` reads the
    others. `post` takes AnswerGrew and AnswerEnded. Each question waits for `ready()` before it is sent.
    """

    link: Link
    store: Store
    post: Callable[[Message], object]
    ready: Callable[[], Awaitable[None]]
    current: Conversation | None = None
    entries: list[Entry] = field(default_factory=list)
    system: str = ""
    model: str = DEFAULT_MODEL
    state: Mapping[str, Any] | None = None  # of the daemon, as it was last seen
    attached: list[Attachment] = field(default_factory=list)
    _answering: dict[int, RunningAnswer] = field(default_factory=dict)
    cache: MessageCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = MessageCache(self.store)

    # --- which one --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a new, empty conversation, for which the daemon decides again who answers."""
        self.current, self.entries, self.system, self.attached = None, [], "", []
        self.model = DEFAULT_MODEL

    def open(self, conversation: int) -> None:
        """Open a conversation of the store; an answer that is streaming stays the same entry."""
        self.current = next((c for c in self.store.list() if c.id == conversation), None)
        if self.current is None:
            return
        running = self._answering.get(conversation)
        live = {} if running is None else {running.entry.turn: running.entry}
        self.cache.clear()
        self.entries = [
            live.get(head.id) or Entry.unloaded(head.id, head.role, head.finish, head.size, self.cache)
            for head in self.store.heads(conversation)
        ]
        self.system, self.model, self.attached = self.current.system, self.current.model, []

    def reopen(self) -> bool:
        """Open the latest conversation if its last answer was interrupted; return whether it was. Raises StoreError."""
        latest = next(iter(self.store.list()), None)
        heads = [] if latest is None else self.store.heads(latest.id)
        if latest is None or not heads or heads[-1].finish is not None or heads[-1].role == SUMMARY:
            return False
        self.open(latest.id)
        return True

    @property
    def title(self) -> str:
        """The title of the open conversation, in one line."""
        return UNTITLED if self.current is None else " ".join(self.current.title.split()) or UNTITLED

    @property
    def questions(self) -> list[str]:
        """The latest questions of the open conversation, oldest first. Raises StoreError."""
        return [] if self.current is None else self.store.questions(self.current.id, REMEMBERED)

    @property
    def running(self) -> RunningAnswer | None:
        """The answer that is streaming into the open conversation, if any."""
        return None if self.current is None else self._answering.get(self.current.id)

    @property
    def alone(self) -> bool:
        """Whether the daemon is known to have no server, so that nobody else can have written a word."""
        return self.state is not None and "server" not in (self.state.get("endpoints") or {})

    @property
    def filled(self) -> tuple[int, int] | None:
        """Tokens and context where the open conversation fills most of it, or was too long for it: 0 is not known."""
        last = next((e for e in reversed(self.entries) if e.role == "assistant" or e.is_usable_summary), None)
        if last is None or last.live or last.role == SUMMARY or not self._before_last_question():
            return None
        record = last.disco or {}
        if record.get("code") == TOO_LONG:
            return (0, 0)
        return filled(self.state, self.model, used_tokens(record))

    @property
    def answering(self) -> bool:
        """Whether an answer is streaming into any conversation."""
        return bool(self._answering)

    def rename(self, title: str) -> None:
        """Give the open conversation another title."""
        self.store.rename(self._stored_conversation().id, title)
        self._reread()

    def set_system(self, system: str) -> None:
        """Use another system prompt from the next question on."""
        self.system = system
        if self.current is not None:
            self.store.set_system(self.current.id, system)

    def set_model(self, model: str) -> None:
        """Use another model or route from the next question on."""
        self.model = model
        if self.current is not None:
            self.store.set_model(self.current.id, model)

    def delete(self) -> int | None:
        """Delete the open conversation; return its number, by which the store can bring it back."""
        gone = self.current
        self.stop()
        self.begin()
        if gone is None:
            return None
        self.store.delete(gone.id)
        return gone.id

    def _stored_conversation(self) -> Conversation:
        if self.current is None:
            self.current = self.store.new(system=self.system, model=self.model)
        return self.current

    def _reread(self) -> None:
        self.current = next((c for c in self.store.list() if c.id == self._stored_conversation().id), self.current)

    # --- asking -----------------------------------------------------------------------------------------------------

    def ask(self, text: str, wish: Mapping[str, Any] | None = None) -> tuple[Entry, Entry]:
        """Ask a question; return its entry and that of the answer, which begins to stream."""
        files = "".join(f"{file.text}\n\n" for file in self.attached)
        self.attached = []
        question = Entry(0, "user", files + text, finish="stop")
        question.turn = self.store.add(self._stored_conversation().id, "user", question.text, self._last_turn())
        self._put_away(question)
        self.entries.append(question)
        self._reread()  # its first question is its title
        return question, self._answer(wish)

    def again(self, answer: Entry, *, by_server: bool = False) -> Entry | None:
        """Drop an answer and what follows, and ask for another one; a summary that alone follows stays.

        The server is to make it, if it may, where that is wanted.
        """
        if answer not in self.entries or answer.role != "assistant":
            return None
        wish = in_place_of(self.state, answer, "redo_of" if by_server else "regenerates")
        behind = self.entries[self.entries.index(answer) + 1 :]
        summary = behind[0].text if len(behind) == 1 and behind[0].is_usable_summary else ""
        self._cut(answer)
        if summary:
            kept = Entry(0, SUMMARY, summary, finish="stop")
            kept.turn = self.store.add(self._stored_conversation().id, SUMMARY, summary, self._last_turn())
            self.store.finish(kept.turn, "stop", None)
            self._put_away(kept)
            self.entries.append(kept)
        model = DEFAULT_MODEL if by_server and self.model.startswith(f"{DEFAULT_MODEL}/") else ""
        return self._answer(wish, model) if self.entries else None

    def edit(self, question: Entry, text: str) -> tuple[Entry, Entry]:
        """Drop a question and what follows, and ask another one in its place."""
        answer = next((e for e in self.entries[self.entries.index(question) :] if e.role == "assistant"), None)
        self._cut(question)
        return self.ask(text, in_place_of(self.state, answer, "edits"))

    def go_on(self, answer: Entry) -> bool:
        """Continue the last answer where it ended; return False if it is not the last, or has no words."""
        if not self.entries or answer is not self.entries[-1] or answer.role != "assistant" or not answer.text:
            return False
        self._stream(answer, self._messages())
        return True

    def compact(self) -> Entry | None:
        """Have all before the last question summarised; return the summary's entry. None if there is nothing before it.

        A question that has no answer with words can be `answered` behind it, and is if its summary is there already.
        """
        entries = self.entries
        if self.is_open:
            return self._answer()
        before = self._before_last_question()
        if not before:
            return None
        while self._is_unusable(entries[-1]):
            self.store.remove(entries.pop().turn)
        summary, sent = self._sent(before)
        said = chain(self._texts(sent), [("user", INSTRUCTION)])
        messages = messages_of(said, self.system, "" if summary is None else summary.text)
        counts = (used_tokens(entry.disco) for entry in reversed(sent) if entry.role == "assistant")
        used = next((n_tokens for n_tokens in counts if n_tokens), 0)
        found = Entry(0, SUMMARY, live=True)
        found.turn = self.store.add(self._stored_conversation().id, SUMMARY, "", self._last_turn())
        entries.append(found)
        self._stream(found, messages, route_of_summary(self.state, self.model, used), SUMMARY_TOKENS)
        return found

    def answered(self, summary: Entry) -> Entry | None:
        """Answer the question before a summary that has just come, where it has no answer; return that one's entry."""
        return self._answer() if self.entries[-1:] == [summary] and self.is_open else None

    @property
    def is_open(self) -> bool:
        """Whether a summary stands at the end, and the question before it has no answer with words."""
        if not self.entries or not self.entries[-1].is_usable_summary:
            return False
        last = next((e for e in reversed(self.entries) if e.role == "user" or (e.role != SUMMARY and e.size[0])), None)
        return last is not None and last.role == "user"

    def _before_last_question(self) -> list[Entry]:
        """Return the entries that a summary can stand for: none where one does already, behind the last question."""
        asked = _last_question(self.entries)
        is_done = any(entry.is_usable_summary for entry in self.entries[asked:])
        return [] if is_done else self.entries[:asked]

    def stop(self) -> bool:
        """Stop the answer of the open conversation; return False if none is streaming."""
        running = self.running
        return running is not None and running.task.cancel()

    def uncut(self) -> bool:
        """Take away the summary behind the last question, or swap what was dropped last with what came in its place.

        Returns False if nothing was dropped.
        """
        if self.current is None or self.running is not None:
            return False
        asked = _last_question(self.entries)
        if summaries := [entry for entry in self.entries[asked:] if entry.role == SUMMARY]:
            self.store.remove(summaries[-1].turn)
        elif not self.store.uncut(self.current.id):
            return False
        self.open(self.current.id)
        return True

    async def close(self) -> None:
        """Stop all answers, and wait until each is written. Posts nothing any more."""
        self.post = lambda message: None
        tasks = [answering.task for answering in self._answering.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, state: Mapping[str, Any] | None) -> None:
        """Take the daemon's state of now. Answers without a word say by it whom they wait for."""
        self.state = state
        for running in list(self._answering.values()) if state is not None else []:
            answer, waits = running.entry, waiting_for(state, running.model)
            if not answer.text and waits != answer.asked_of:
                answer.asked_of = waits
                self.post(AnswerGrew(answer))

    def _last_turn(self) -> int | None:
        return next((entry.turn for entry in reversed(self.entries) if entry.role != SUMMARY), None)

    def _cut(self, entry: Entry) -> None:
        self.store.cut(self._stored_conversation().id, entry.turn)
        del self.entries[self.entries.index(entry) :]

    def _put_away(self, entry: Entry) -> None:
        """Move the words of an entry into the cache: the store has them."""
        self.cache.put(entry.turn, entry.words)
        entry.unload(self.cache)

    def _messages(self) -> Iterator[ApiMessage]:
        """Yield the messages for the daemon; words are read from the store in portions, as they are needed."""
        summary, entries = self._sent(self.entries)
        return messages_of(self._texts(entries), self.system, "" if summary is None else summary.text)

    @staticmethod
    def _sent(entries: list[Entry]) -> tuple[Entry | None, list[Entry]]:
        """Return the last summary, and the messages that go out behind it: from the question before it on."""
        at = next((i for i in reversed(range(len(entries))) if entries[i].is_usable_summary), None)
        asked = _last_question(entries[: at or 0])
        return None if at is None else entries[at], [e for e in entries[asked:] if e.role != SUMMARY]

    @staticmethod
    def _is_unusable(entry: Entry) -> bool:
        return entry.role == SUMMARY and not entry.is_usable_summary

    def _texts(self, entries: list[Entry]) -> Iterator[tuple[str, str]]:
        for first in range(0, len(entries), READ_AT_ONCE):
            some = entries[first : first + READ_AT_ONCE]
            texts = self.store.texts([entry.turn for entry in some if not entry.is_loaded])
            for entry in some:
                yield entry.role, entry.text if entry.is_loaded else texts.get(entry.turn, "")

    def _answer(self, wish: Mapping[str, Any] | None = None, model: str = "") -> Entry:
        answer = Entry(0, "assistant", live=True)
        messages = self._messages()
        answer.turn = self.store.add(self._stored_conversation().id, "assistant", "", self._last_turn())
        self.entries.append(answer)
        self._stream(answer, messages, model, wish=wish)
        return answer

    def _stream(
        self, answer: Entry, messages: Iterator[ApiMessage], model: str = "", max_tokens: int | None = None,
        wish: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Begin to stream an answer, by the conversation's model if no other one is named."""
        conversation, model = self._stored_conversation().id, model or self.model
        answer.live = True
        answer.asked_at, answer.asked_of = monotonic(), waiting_for(self.state, model)

        def over(task: asyncio.Task[None]) -> None:
            self._answering.pop(conversation, None)
            answer.live = False
            if not task.cancelled() and (error := task.exception()) is not None:
                answer.end("error", {"error": str(error)})  # the store does not have it: its words stay in memory
            else:
                if answer.finish is None:  # cancelled before it had begun
                    answer.finish = "cancelled"
                self._put_away(answer)
            self.post(AnswerEnded(answer))

        streaming = stream_answer(
            self.link, self.store, answer, messages,
            model=model, touched=lambda: self.post(AnswerGrew(answer)), ready=self.ready, max_tokens=max_tokens,
            wish=wish,
        )  # fmt: skip
        task = asyncio.create_task(streaming, name=f"answer {answer.turn}")
        self._answering[conversation] = RunningAnswer(answer, task, model)
        task.add_done_callback(over)


def _last_question(entries: list[Entry]) -> int:
    """Return where the last question stands; 0 where there is none."""
    return next((i for i in reversed(range(len(entries))) if entries[i].role == "user"), 0)
