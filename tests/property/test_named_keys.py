"""Keys with names, whatever their clients and their owner do at once: real conductor, caps and ring, scripted sides.

Each step is one of a client (it asks, or leaves), of the owner (a key is made, or revoked), or of the time. The server
bills by what it was asked: its own meter is held against the caps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncGenerator
from datetime import UTC
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.conductor import AnswerContext, Conductor
from disco_daemon.endpoints.base import Controls
from disco_daemon.errors import DiscoError
from disco_daemon.keys.keyring import Keyring
from disco_daemon.keys.named_key import KeyTerms, NamedKey, new_key
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.types import BOTH, Finish, GenerationRequest, Outcome, Sampling, Side, Token, Usage
from tests.fixtures.jumping import JumpingLoop
from tests.unit.conductor.test_answer_run import DEVICE, SERVER, Page, Scripted, context

NAMES = ("anna", "bert")
CAP_USD = 2e-4  # of a key; a request costs up to 1.35e-4 by what `context` has for prices
WHOLE_USD = 5e-4
MAX_TOKENS = 12
SLOW_S = 1.0  # between two tokens, so that much happens in the middle of an answer


class Billing(Scripted):
    """A server that says what it has processed, token by token."""

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Any, None]:
        self.asked.append(request)
        usage.prompt_tokens = self.n_prompt
        for _ in range(MAX_TOKENS):
            await asyncio.sleep(SLOW_S)
            usage.completion_tokens += 1
            yield Token("w ")
        yield Finish("stop")


class TimedPage(Page):
    """A reader who notes when each token comes."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def token(self, token: Token, side: Side) -> None:
        super().token(token, side)
        self.at.append(asyncio.get_running_loop().time())


class Stage:
    """One daemon's worth of what keys pass through, without HTTP."""

    def __init__(self) -> None:
        self.device = Scripted(DEVICE, [0.5 * SLOW_S, *[Token("d ")] * 3, Finish("stop")])
        self.server = Billing(SERVER, ())
        self.context: AnswerContext = context(self.device, self.server, policy="race", usd_per_day=WHOLE_USD)
        self.caps = self.context.spending.caps
        self.ring = Keyring()
        self.outcomes: list[Outcome] = []
        keeper = SimpleNamespace(context=self.context, held=lambda: contextlib.nullcontext(self.context))
        self.conductor = Conductor(
            cast(Any, keeper), lambda _, outcome: self.outcomes.append(outcome), lambda entry: None
        )
        self.texts: dict[str, str] = {}
        self.running: list[tuple[NamedKey, asyncio.Task[None], TimedPage]] = []
        self.ends: list[asyncio.Task[int]] = []
        self.gone: dict[str, float] = {}  # key ids to when they were revoked
        self.begun: defaultdict[str, int] = defaultdict(int)

    # What people do.

    def make(self, name: str) -> None:
        if name in self.texts:
            return
        key, self.texts[name] = new_key(name, KeyTerms(usd_per_day=CAP_USD), 0.0)
        self.caps.keys.setdefault(name, Caps(CapLimits(CAP_USD), UTC, self.context.clock.wall(), key=name))
        self.ring.use([*self.ring, key])

    def revoke(self, name: str) -> None:
        if self.texts.pop(name, None) is None:
            return
        for key in self.ring.use([key for key in self.ring if key.name != name]):
            self.gone[key.key_id] = self.context.clock.now()
            self.ends.append(asyncio.create_task(self.conductor.in_flight.revoke(key.caller)))

    def ask(self, name: str, sides: frozenset[Side], wait_s: float) -> None:
        key = self.ring.find(self.texts.get(name, ""))
        if key is not None:
            page = TimedPage()
            self.running.append((key, asyncio.create_task(self._asked(key, sides, wait_s, page)), page))

    async def _asked(self, key: NamedKey, sides: frozenset[Side], wait_s: float, page: TimedPage) -> None:
        """Let a body come in for a while, as the door does behind its look at the key; then answer."""
        await asyncio.sleep(wait_s)
        request = GenerationRequest(
            f"r-{len(self.running)}-{id(page)}", ({"role": "user", "content": "x"},), Sampling(MAX_TOKENS),
            allowed=sides, caller=key.caller,
        )  # fmt: skip
        with contextlib.suppress(DiscoError):
            await self.conductor.run(request, "disco", page)

    def leave(self, which: int) -> None:
        if self.running:
            self.running[which % len(self.running)][1].cancel()

    # What has to hold.

    def check(self) -> None:
        for name in NAMES:
            if (own := self.caps.keys.get(name)) is not None:
                assert own.spent(self.context.clock.wall()).usd_today <= CAP_USD + self.most_usd
        for key, _, page in self.running:
            assert all(at <= self.gone.get(key.key_id, math.inf) for at in page.at), "no revoked key is served"
        assert self.caps.spent(self.context.clock.wall()).usd_today <= WHOLE_USD + self.most_usd

    @property
    def most_usd(self) -> float:
        """The most that one request costs, by the bound that is reserved for it."""
        price = self.context.spending.price
        return price.cost_usd(math.ceil(self.server.n_prompt * 1.5), MAX_TOKENS)

    async def end(self) -> None:
        await asyncio.gather(*(task for _, task, _ in self.running), return_exceptions=True)
        await asyncio.gather(*self.ends)
        self.check()
        assert len(self.conductor.in_flight) == 0
        billed: defaultdict[str, float] = defaultdict(float)
        for outcome in self.outcomes:
            billed[outcome.key] += outcome.server_usd
        for caps in (self.caps, *self.caps.keys.values()):
            assert "0 open" in repr(caps), "nothing stays reserved"
            whole = math.fsum(billed.values()) if not caps.key else billed[caps.key]
            assert math.isclose(caps.spent(self.context.clock.wall()).usd_today, whole, abs_tol=1e-12)


ASK = st.tuples(
    st.just("ask"),
    st.sampled_from(NAMES),
    st.sampled_from([frozenset({SERVER}), BOTH]),
    st.sampled_from([0.0, 0.3, 2.0]),
)
WAIT = st.tuples(st.just("wait"), st.sampled_from([1.2, 0.1, 4.0]))
# Mostly of people who ask, in a world that goes on: else little runs when a key is revoked.
STEPS = st.lists(
    st.one_of(
        st.tuples(ASK, WAIT),
        st.tuples(ASK),
        st.tuples(WAIT),
        st.tuples(st.tuples(st.just("revoke"), st.sampled_from(NAMES)), WAIT),
        st.tuples(st.tuples(st.just("make"), st.sampled_from(NAMES)), ASK),
        st.tuples(st.tuples(st.just("leave"), st.integers(0, 9))),
    ),
    min_size=6,
    max_size=20,
).map(lambda groups: [step for group in groups for step in group])


async def _play(steps: list[tuple[Any, ...]]) -> None:
    stage = Stage()
    for name in NAMES:
        stage.make(name)
    for what, *how in steps:
        if what == "wait":
            await asyncio.sleep(how[0])
        else:
            getattr(stage, what)(*how)
        stage.check()
    await stage.end()


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_no_cap_is_passed_nothing_stays_reserved_and_no_revoked_key_is_served(steps: list[tuple[Any, ...]]) -> None:
    with asyncio.Runner(loop_factory=lambda: JumpingLoop(0.0)) as runner:
        runner.run(_play(steps))


def test_a_request_whose_key_is_revoked_while_its_body_comes_starts_no_side() -> None:
    async def play() -> Stage:
        stage = Stage()
        stage.make("anna")
        stage.ask("anna", BOTH, 2.0)
        await asyncio.sleep(1.0)
        stage.revoke("anna")
        await stage.end()
        return stage

    with asyncio.Runner(loop_factory=lambda: JumpingLoop(0.0)) as runner:
        stage = runner.run(play())
    assert (stage.server.asked, stage.device.asked, stage.outcomes) == ([], [], [])


def test_a_running_answer_gets_no_word_more_once_its_key_is_revoked_and_its_cost_is_booked() -> None:
    async def play() -> tuple[Stage, float]:
        stage = Stage()
        stage.make("anna")
        stage.ask("anna", frozenset({SERVER}), 0.0)
        await asyncio.sleep(2.5 * SLOW_S)
        stage.revoke("anna")
        await asyncio.gather(*stage.ends)
        ended_at = stage.context.clock.now()
        await stage.end()
        return stage, ended_at

    with asyncio.Runner(loop_factory=lambda: JumpingLoop(0.0)) as runner:
        stage, ended_at = runner.run(play())
    ((_, _, page),) = stage.running
    assert page.at == [SLOW_S, 2 * SLOW_S]
    assert ended_at < 3 * SLOW_S, "at once"
    (outcome,) = stage.outcomes
    assert (outcome.key, outcome.error) == ("anna", "invalid_api_key")
    assert outcome.server_usd > 0
