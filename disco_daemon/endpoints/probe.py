"""The probe finds out how a server continues an answer that it did not begin.

A server gives an unbroken answer, is then asked for its second half in each way that might work, and what it says is
held against what it said. No server announces this, some ignore what they are asked without a word, and a wrong guess
doubles or loses text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ..clock import Clock
from ..continuations import CHAT_METHODS, METHODS
from ..errors import EndpointError
from ..types import GenerationRequest, Sampling, Token, Usage
from .continuation import Profile, Verdict
from .server import Server

log = logging.getLogger("disco.probe")

PROBE_TIMEOUT_S = 120.0  # for everything; a probe that takes longer is tried again later
CHARS_PER_TOKEN = 4  # English text, for what a server may have read without a word
N_WHOLE = 24  # tokens of the unbroken answer
N_REST = 10  # tokens asked for; fewer than the first half has, so that an answer begun again cannot get past the cut
MIN_AGREED = 16  # characters; fewer may agree by chance
MIN_BEFORE = 24  # characters before the cut: below, an answer begun again could not be distinguished from chance

# Plain prose is what most answers are; lists and numbers would agree by chance.
PROMPTS = (
    "Write a short story about a fox who finds a lantern.",
    "Describe a walk through a quiet town in autumn.",
    "Explain in a few plain sentences where rain comes from.",
)
# Says nothing about a method: the server could not be asked at all. A time-out is not among them, since the server has
# just answered in full: what hangs is the method.
_NOT_ASKED = frozenset({"unreachable", "rate_limited", "unauthorized", "forbidden", "no_credit", "dropped"})
_REFUSED = frozenset({"refused", "not_found"})
# How a method is judged when its prompts disagree and no verdict has the majority.
_MIXED = Verdict("differs", "not the same way for every prompt")


class NoVerdict(Exception):
    """The server could not be asked, or said too little to judge by."""


async def probe(server: Server, clock: Clock, *, thorough: bool = False, spent: Usage | None = None) -> Profile | None:
    """Ask `server` in each way, best first; None when it could not be asked, and the probe has to be tried again.

    Stops at the first exact method that needs no tokenizer of ours, unless `thorough`. Raises nothing but
    CancelledError; costs about 200 tokens of answers, which are added to `spent` as they come, and is bounded in time.
    """
    inquiry = _Inquiry(server, spent or Usage())
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            verdicts = await inquiry.verdicts(thorough=thorough)
    except (TimeoutError, NoVerdict) as e:
        log.info("the server's way to continue an answer is not known yet: %s", str(e) or "time is over")
        return None
    profile = _profile(server.name, clock.wall(), verdicts, inquiry.tokens)
    log.info("the server continues answers by %s (else %s)", profile.method, profile.fallback)
    return profile


def _profile(name: str, now: float, verdicts: dict[str, Verdict], tokens: int) -> Profile:
    def best(methods: Sequence[str]) -> str:
        """Exact before echoing, then in the order of METHODS."""
        results = {m: verdicts[m].result for m in methods if m in verdicts}
        return next((m for wanted in ("exact", "echoes") for m, r in results.items() if r == wanted), "none")

    vocab = "token_ids" in verdicts and verdicts["token_ids"].result == "exact"
    return Profile(name, now, best(METHODS), best(CHAT_METHODS), vocab, tokens, verdicts)


@dataclass(frozen=True, slots=True)
class Cut:
    """An unbroken answer, cut in two."""

    request: GenerationRequest
    before: str
    rest: str


@dataclass(slots=True)
class _Inquiry:
    """All questions of one probe. `spent` is what they cost, prompts and answers."""

    server: Server
    spent: Usage
    cuts: list[Cut] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.spent.prompt_tokens + self.spent.cached_tokens + self.spent.completion_tokens

    async def verdicts(self, *, thorough: bool) -> dict[str, Verdict]:
        found: dict[str, Verdict] = {}
        for method in self.server.methods:
            found[method] = await self._verdict(method)
            if method in CHAT_METHODS and found[method].result == "exact" and not thorough:
                break
        return found

    async def _verdict(self, method: str) -> Verdict:
        """Two prompts that agree are enough; a server that refuses a method, or fails at it, is asked once."""
        seen: list[Verdict] = []
        for i in range(len(PROMPTS)):
            verdict = await self._try(method, await self._cut(i))
            if verdict.result in ("untried", "refused", "failed"):
                return verdict
            seen.append(verdict)
            result, n = Counter(v.result for v in seen).most_common(1)[0]
            if n > len(PROMPTS) // 2:
                return next(v for v in seen if v.result == result)
        return _MIXED

    async def _cut(self, i: int) -> Cut:
        """The unbroken answer to prompt `i`, asked for once."""
        while len(self.cuts) <= i:
            self.cuts.append(await self._whole(PROMPTS[len(self.cuts)]))
        return self.cuts[i]

    async def _whole(self, prompt: str) -> Cut:
        sampling = Sampling(max_tokens=N_WHOLE, temperature=0.0)
        request = GenerationRequest("probe", ({"role": "user", "content": prompt},), sampling)
        try:
            pieces = await self._answer(request, None)
        except EndpointError as e:
            raise NoVerdict(str(e)) from e
        before = cut(pieces)
        if before is None:
            raise NoVerdict("the server's answer is too short to judge by")
        return Cut(request, before, "".join(pieces)[len(before) :])

    async def _try(self, method: str, cut: Cut) -> Verdict:
        sampling = replace(cut.request.sampling, max_tokens=N_REST)
        request = replace(cut.request, answer_so_far=cut.before, sampling=sampling)
        try:
            pieces = await self._answer(request, method)
        except EndpointError as e:
            return _verdict_on(e)
        return judge(cut.before, cut.rest, "".join(pieces))

    async def _answer(self, request: GenerationRequest, method: str | None) -> list[str]:
        """The texts of one answer. Raises EndpointError."""
        try:
            return await self._asked(request, method)
        except EndpointError as e:
            if e.reason != "dropped":
                raise
        self.spent.prompt_tokens += request.n_chars // CHARS_PER_TOKEN  # it may have been read
        return await self._asked(request, method)

    async def _asked(self, request: GenerationRequest, method: str | None) -> list[str]:
        usage = Usage()
        try:
            async with aclosing(self.server.ask(request, usage, method)) as events:
                return [event.text async for event in events if isinstance(event, Token) and event.text]
        finally:
            self.spent.prompt_tokens += usage.prompt_tokens
            self.spent.cached_tokens += usage.cached_tokens
            self.spent.completion_tokens += usage.completion_tokens


def _verdict_on(e: EndpointError) -> Verdict:
    """Return the verdict on the method that an error implies. Raises NoVerdict when it is about the server."""
    if e.reason == "no_continuation":
        return Verdict("untried", str(e))
    if e.reason in _REFUSED:
        return Verdict("refused", str(e))
    if e.reason in _NOT_ASKED:
        raise NoVerdict(str(e)) from e
    return Verdict("failed", str(e))


def cut(pieces: Sequence[str]) -> str | None:
    """The first part of an answer, up to near its middle; None when it is too short to be judged by.

    It ends where a chunk ends, as tokens do, and before a space where there is one: a server that is sent text must
    not have to guess how a word goes on. An answer of few large chunks is cut before a space.
    """
    whole = "".join(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    many = len(pieces) > N_REST + 2
    first = max(MIN_BEFORE, ends[N_REST] if many else len(whole) // 2)
    inside = range(first, len(whole) - MIN_AGREED + 1)
    words = [i for i in inside if whole[i] == " " and not whole[i - 1].isspace()]
    usable = [i for i in words if i in ends] or [i for i in inside if many and i in ends] or words
    return whole[: min(usable, key=lambda i: abs(i - len(whole) / 2))] if usable else None


def judge(before: str, rest: str, said: str) -> Verdict:
    """Judge the text `said` of a server that was asked to go on after `before`, and whose own rest was `rest`."""
    agreed = common(said, rest)
    if agreed >= min(MIN_AGREED, len(rest)) or (agreed == len(said) > 0 and agreed >= MIN_AGREED // 2):
        return Verdict("exact")
    again = said.lstrip()
    repeated = common(again, before)
    if repeated == len(before) and common(again[repeated:], rest) >= min(len(again) - repeated, MIN_AGREED // 2) > 0:
        return Verdict("echoes", "it repeats the answer so far, then goes on")
    if repeated >= MIN_AGREED:
        return Verdict("restarts", "it begins the answer again")
    if said and common(again, rest.lstrip()) >= MIN_AGREED:
        return Verdict("differs", "it goes on, but loses or adds the space at the seam")
    return Verdict("differs", "it says nothing" if not said else "it says something else")


def common(a: str, b: str) -> int:
    """Length of the common beginning, characters."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)
