"""One answer in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...scheduler.jobs import Job
from ...scheduler.timeline import Timeline
from .. import wire
from ..kv.cells import Saved
from ..llama.adapters import keyed
from ..llama.sampler import Sampler
from ..llama.text import TextStream
from ..speculation.prompt_lookup import MODEL_PRIOR, Chance, Lookup


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the engine. `tokens` are prompt and answer; the first `n_past` of them are in the KV cache.

    Given were `prompt`, and of the answer the text `answer` with the tokens `given`; `exact` says that its end is the
    end of a token. `n_first` of these tokens were there at the start; `n_prompt` tokens are prefilled, not drawn, and
    those below `n_counted` are in `n_prefilled`. While the last token is being healed, `dropped` are its bytes, and
    `candidates` may stand in its place. `n_drawn` tokens were drawn since the last order, `n_completion` in all.

    `slot` is its sequence in the KV cache, -1 without one; `chosen` says that the scheduler lets it run; the daemon was
    told whether it is `paused`. One that was
    swapped out has `saved`. Its adapter's `salt` is in the first token's `key`.
    """

    request: wire.Generate
    prompt: list[int]
    answer: str
    given: list[int]
    exact: bool
    held: bool
    held_at: float
    n_first: int
    timeline: Timeline
    waiting_since: float | None
    grammar: str = ""
    salt: int = 0
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    text: TextStream = field(default_factory=TextStream)
    sampler: Sampler | None = None
    dropped: bytes = b""
    candidates: list[int] = field(default_factory=list)
    slot: int = -1
    saved: Saved | None = None
    chosen: bool = False
    n_preempted: int = 0
    n_past: int = 0
    n_counted: int = 0
    n_prefilled: int = 0
    n_cached: int = 0
    n_drawn: int = 0
    n_completion: int = 0
    n_unsent: int = 0
    unsent_ids: list[int] = field(default_factory=list)
    has_ids: bool = True
    n_orders: int = 0
    told: bool = False
    paused: bool = False
    busy_s: float = 0.0
    lookup: Lookup | None = None
    drafting: Chance = field(default_factory=lambda: Chance(MODEL_PRIOR))

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return self.n_past < len(self.tokens) - 1

    @property
    def full(self) -> bool:
        """Whether the answer has all the tokens that were asked for, appended ones included."""
        limit = self.request.max_tokens
        return limit is not None and self.n_drawn + len(self.given) - self.n_first >= limit

    def key(self, start: int = 0, end: int | None = None) -> list[int]:
        """Its tokens from `start` to `end` as the prefix index knows them: they are of use under its adapter only."""
        return keyed(self.tokens[start:end], 0 if start else self.salt)

    def job(self, swap_s: float) -> Job:
        """What the scheduler sees of it; `swap_s` is how long it takes to bring back what was swapped out, s."""
        n_there = self.saved.n_past if self.saved is not None else self.n_past
        return Job(
            key=self.request.id,
            timeline=self.timeline,
            n_context=len(self.tokens),
            n_missing=max(0, len(self.tokens) - 1 - n_there),
            resume_s=swap_s,
            resident=self.slot >= 0,
            n_preempted=self.n_preempted,
            waiting_since=self.waiting_since,
            hurried=self.request.pace_tps is None,
        )
