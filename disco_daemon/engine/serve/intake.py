"""Between the socket and the main thread: a thread that makes tokens, grammars and counts, one request at a time.

So neither a long prompt nor a strange schema keeps the running answers waiting, and the thread that reads the socket
hears at once that a request is cancelled: it is dropped here, or the decode in flight is stopped.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .. import wire
from ..kv.cells import Cells
from ..llama.adapters import prefix_key
from ..llama.embedder import Embeddings
from ..llama.model import AbortFlag, Llama
from ..llama.refusals import PromptError, PromptTooLong
from ..llama.template import TemplateError
from .batch import Batcher
from .prepare import prepare

BEAT_S = 1.0  # between signs of life while a long prompt is looked at

Command = Callable[[], None]
Request = wire.Count | wire.Generate | wire.Embed
Order = wire.HoldAnswer | wire.AppendText | wire.SetPace | wire.ToFleet


@dataclass(slots=True, kw_only=True)
class TextIntake:
    """The messages that wait to be prepared, in the order in which they came, and whose requests have been cancelled.

    This one is of a model that makes vectors of texts. `put` and `cancel` are for the thread that reads the socket,
    `run` is a thread of its own. `hand_on` gives a command to the main thread.
    """

    embeddings: Embeddings
    send: Callable[[wire.Message], None]
    hand_on: Callable[[Command], None]
    abort: AbortFlag
    _messages: queue.SimpleQueue[Request | Order] = field(default_factory=queue.SimpleQueue)
    _waiting: dict[str, Request] = field(default_factory=dict)  # not handed on, nor answered
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _alive_at: float = 0.0  # when Alive was last sent, s

    def put(self, message: Request | Order) -> None:
        """Queue a message to be prepared."""
        if isinstance(message, Request):
            with self._lock:
                self._waiting[message.id] = message
        self._messages.put(message)

    def cancel(self, request_id: str) -> None:
        """Drop a request that waits here; if the main thread has it, stop its decode, and let that thread end it."""
        with self._lock:
            waiting = self._waiting.pop(request_id, None)
        match waiting:
            case wire.Generate():
                self.send(wire.Done(id=request_id, reason="cancelled", n_prompt=0, n_completion=0, busy_s=0.0))
            case wire.Embed():
                self.send(wire.Embedded(id=request_id, vectors=(), n_tokens=0, busy_s=0.0))
            case None:
                self._drop(request_id)

    def run(self) -> None:
        """Prepare one message after the other, for ever."""
        while True:
            message = self._messages.get()
            if not isinstance(message, Request):
                self.hand_on(self._order(message))
            elif message.id in self._waiting:
                self._finish(message, self._outcome(message))

    def beat(self) -> None:
        """Send, once a second, that a long prompt is being read: the supervisor kills a silent engine."""
        now = time.monotonic()
        if now - self._alive_at > BEAT_S:
            self._alive_at = now
            self.send(wire.Alive())

    def _finish(self, message: Request, outcome: Command | wire.Message) -> bool:
        """Send what has come of a request, or hand it on (then return True); neither if it was cancelled meanwhile."""
        with self._lock:
            if self._waiting.pop(message.id, None) is None:
                return False
            if isinstance(outcome, wire.Message):
                self.send(outcome)
                return False
            self.hand_on(outcome)
            return True

    def _outcome(self, message: Request) -> Command | wire.Message:
        """Return the main thread's part of a request, or the last answer to it; whatever it causes, others go on."""
        try:
            if isinstance(message, wire.Embed):
                return partial(self.embeddings.add, self.embeddings.tokenized(message))
            return self._prepared(message)
        except (TemplateError, PromptError) as e:
            return wire.refusal(message.id, e)
        except Exception as e:
            os.write(2, f"a request fails: {type(e).__name__}\n".encode())
            text = f"the engine cannot read it: {type(e).__name__}"
            return wire.Failed(id=message.id, reason="engine_error", message=text, your_fault=False)

    def _prepared(self, message: wire.Count | wire.Generate) -> Command | wire.Message:
        """Return what becomes of a question to a model that answers; this one is none. Raises PromptError."""
        del message
        raise PromptError("The device's model makes vectors of texts, or rates them, and answers nothing.")

    def _order(self, message: Order) -> Command:
        """Return the main thread's part of an order; there is no answer that it could be for."""
        del message
        return lambda: None

    def _drop(self, request_id: str) -> None:
        """Drop a request that the main thread has, and stop its decode: a long text may take seconds."""
        self.hand_on(partial(self.embeddings.cancel, request_id))
        if self._may_abort(request_id):
            self.abort.set()

    def _may_abort(self, request_id: str) -> bool:
        """Whether the decode in flight may be ended for a request that leaves: not if it is another one's."""
        return self.embeddings.is_first(request_id)


@dataclass(slots=True, kw_only=True)
class Intake(TextIntake):
    """As that of a model that makes vectors, of one that answers."""

    batcher: Batcher
    cells: Cells

    def _finish(self, message: Request, outcome: Command | wire.Message) -> bool:
        is_handed_on = TextIntake._finish(self, message, outcome)
        if is_handed_on and isinstance(message, wire.Generate) and self.batcher.single_prompt:
            self.abort.set()  # a decode that is so large takes too long for an answer that has just come
        return is_handed_on

    def _prepared(self, message: wire.Count | wire.Generate) -> Command | wire.Message:
        llama = self.batcher.llama
        if isinstance(message, wire.Count):
            return self._count(message, llama)
        return partial(self.batcher.queue, prepare(llama, message))

    def _drop(self, request_id: str) -> None:
        self.hand_on(partial(self.batcher.cancel, request_id))
        TextIntake._drop(self, request_id)

    def _may_abort(self, request_id: str) -> bool:
        return self.batcher.admission.may_abort(request_id)

    def _order(self, message: Order) -> Command:
        batcher = self.batcher
        match message:
            case wire.HoldAnswer(id=request_id):
                return partial(batcher.hold, request_id)
            case wire.AppendText():
                return partial(batcher.append, message)
            case wire.SetPace(id=request_id, pace_tps=pace_tps):
                return partial(batcher.pace, request_id, pace_tps)
            case wire.MoveLayers() | wire.BreakOffMove() | wire.LimitAnswers():
                return partial(batcher.remote.obey, message)

    def _count(self, message: wire.Count, llama: Llama) -> wire.Counted:
        vocabulary = llama.vocabulary
        try:
            prompt = vocabulary.prompt_tokens(message)
            begun = vocabulary.answer_tokens(message.answer, message.answer_ids)
        except PromptTooLong as e:
            if message.ids:
                raise
            return wire.Counted(id=message.id, n_tokens=e.n_tokens)  # an estimate: a server's price depends on it
        if not message.ids:
            prompt = [*prompt, *begun]
            n_cached = self.cells.count_cached(prefix_key(prompt, llama.salt(message.adapter)))
            return wire.Counted(id=message.id, n_tokens=len(prompt), n_cached=n_cached)
        ids = (*prompt, *begun)
        text = vocabulary.prompt_text(message)
        return wire.Counted(id=message.id, n_tokens=len(prompt), ids=ids, text=text + message.answer if text else "")
