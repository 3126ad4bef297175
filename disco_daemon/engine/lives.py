"""The lives of an engine's process: which of them were of use, and how long to wait before the next one.

A model file may end the process at each request, by an assert of llama.cpp for example. What counts is then an answer:
that the model loads again and again says nothing for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from ..system.process import RestartPause
from . import wire

MAX_LOADS = 5  # lives in a row that ended while they loaded: a model that crashes llama.cpp will do so again
MAX_RELOADS = 20  # of one that has been in memory before: then it may pass, such as memory being short
CRASHED = 3  # lives in a row that ended at a request and gave no answer: the model is at fault, not chance
IDLE_S = 180.0  # a life that was ready for longer, and ended with nothing to do, is none of them
LEFT_ALONE_S = 10.0  # behind CRASHED of them; each further one doubles it
LEFT_ALONE_MOST_S = 600.0  # the longest: another file may have come in its place, or another llama.cpp
# How llama.cpp's own code ends a process. On some processors it is the weights' special layout that does (AMX:
# ggml-org/llama.cpp#20824): the next life keeps them as they are in the file.
CRASHES = frozenset(-number for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT))


@dataclass(slots=True)
class EngineLives:
    """What the lives so far came to; times are by one clock, in s.

    `n_unloaded` lives in a row ended before they were ready, and `n_crashed` soon or with a request, without an answer.
    """

    born_at: float = 0.0
    ready_at: float | None = None
    has_answered: bool = False
    n_unloaded: int = 0
    n_crashed: int = 0
    is_crash: bool = False  # whether it was llama.cpp that ended the last of them
    pause_s: float = 0.0  # before the next life
    down_until: float = 0.0  # when the next one begins, of a model that is left alone
    _pause: RestartPause = field(default_factory=RestartPause)

    def begin(self, now: float) -> None:
        """Begin a life."""
        self.born_at, self.ready_at, self.has_answered = now, None, False

    def unload(self) -> None:
        """Take it that the life ends as it should."""
        self._pause = RestartPause()

    def hear(self, reply: wire.Reply) -> None:
        """Take a reply: the end of an answer says that the model works, a request that was cancelled does not."""
        if isinstance(reply, wire.Embedded) or (isinstance(reply, wire.Done) and reply.reason != "cancelled"):
            self.has_answered, self.n_crashed = True, 0

    def end(self, now: float, code: int, n_in_flight: int) -> None:
        """Take the end of a life, by the exit code of its process, with so many requests in flight."""
        worked_s = now - self.ready_at if self.ready_at is not None else 0.0
        self.n_unloaded = 0 if self.ready_at is not None else self.n_unloaded + 1
        if self.ready_at is not None and not self.has_answered and (n_in_flight or worked_s < IDLE_S):
            self.n_crashed += 1
            self.is_crash = code in CRASHES
        start_s = now - worked_s - self.born_at
        self.pause_s = self._pause.after(start_s, 0.0 if self.n_crashed else worked_s)
        if self.crashes:
            longer_s = LEFT_ALONE_S * 2.0 ** min(30, self.n_crashed - CRASHED)
            self.pause_s = min(LEFT_ALONE_MOST_S, longer_s)
            self.down_until = now + self.pause_s

    def is_given_up(self, *, has_loaded: bool) -> bool:
        """Whether to load it once more is of no use; `has_loaded`: it has been in memory."""
        return self.n_unloaded >= (MAX_RELOADS if has_loaded else MAX_LOADS)

    @property
    def crashes(self) -> bool:
        """Whether requests crash it, as far as is known."""
        return self.n_crashed >= CRASHED

    def given_up(self, model: str, how: str) -> str:
        """Return what to tell of a model that cannot be loaded, the last time as `how` says."""
        return (
            f"the model {model} could not be loaded {self.n_unloaded} times, and is given up: {how}. "
            "Choose another one with `disco models use`, or fetch it again; `disco config reload` tries it once more"
        )

    def verdict(self, how: str) -> str:
        """Return what to tell of a model that ends the engine, the last time as `how` says."""
        what = "this model's file crashes the engine" if self.is_crash else "this model ends the engine"
        return (
            f"{what}: {how}, {self.n_crashed} times in a row before it gave an answer. It is left alone for "
            f"{self.pause_s:.0f} s. Choose another one with `disco models use`, or fetch it again; "
            "`disco config reload` tries it at once"
        )
