"""An answer, played on a virtual clock with two model endpoints whose every continuation is known.

Whatever is moved, lost, late or cancelled, and whenever: what the reader gets is an answer that the endpoints could
have given, each from exactly the text before it. When both are the same model, it is the unbroken answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disco_daemon.answer import (
    Answer,
    Arrived,
    AskAgain,
    Begin,
    Broke,
    Complete,
    Due,
    Effect,
    Ended,
    Event,
    Feed,
    Followed,
    Move,
    Rest,
    Start,
    State,
    Tick,
)
from disco_daemon.answer.limits import SPARE_SHARE, SPARE_TOKENS
from disco_daemon.delivery.buffer import TokenBuffer
from disco_daemon.delivery.seam import Seam
from disco_daemon.errors import EndpointError
from disco_daemon.types import BOTH, Continuation, Delivery, Finish, Plan, Side, Token
from tests.fixtures.answer import OVER, Watch

DEVICE, SERVER = Side.DEVICE, Side.SERVER
MAX_FAULTS = 3
MIN_OWN = 60  # characters of an answer where the models differ
WORDS = (
    " one",
    " two",
    " the",
    ", and",
    ".",
    "\n\n",
    " naïve",
    "語",
    "👩",
    "\u200d",
    "💻",
    "🏽",
    "🇩",
    "🇪",
    "\r",
    "नि",
    "",
)
Pieces = Sequence[str]
pauses = st.sampled_from([0.0, 0.05, 0.5])


@dataclass(frozen=True)
class Model:
    """Says what `side` says after `text`: the rest of one answer for all, or what depends on both."""

    answer: tuple[str, ...] | None

    def rest(self, side: Side, text: str) -> tuple[Pieces, int]:
        """The pieces that follow `text`, and the number of the first one; -1 where that is the end of a cut one."""
        if self.answer is None:
            return list(self._own(side, text)), -1
        at = 0
        for i, piece in enumerate(self.answer):
            if at == len(text):
                return self.answer[i:], i
            if at + len(piece) > len(text):
                return [piece[len(text) - at :], *self.answer[i + 1 :]], -1
            at += len(piece)
        assert at == len(text)
        return (), len(self.answer)

    @staticmethod
    def _own(side: Side, text: str) -> Pieces:
        pieces = []
        for _ in range(40):
            draw = crc32(f"{side}:{text}".encode())
            if len(text) > MIN_OWN and draw % 16 == 0:
                break
            # Each side has its own words now and then, so that they agree for a while, and part.
            words = WORDS if draw % 5 else (f" {side}{draw % 7}",)
            pieces.append(words[(crc32(text.encode()) if draw % 5 else draw) % len(words)])
            text += pieces[-1]
        return pieces


@dataclass
class Run:
    """One start of one endpoint: what it was given, what it will say, and what it has said."""

    side: Side
    given: str
    limit: int | None
    stop: str
    knows_ids: bool
    repeats: str = ""  # what it says before it goes on
    heeds: bool = True  # its limit
    begun: Pieces = ()  # what the client has begun, where it says all that again
    anew: bool = False
    room: int | None = None  # pieces that it has a context for, those given included
    pieces: list[str] = field(default_factory=list)
    first: int = -1
    n_said: int = 0
    said: str = ""
    finished: str | None = None

    def go(self, model: Model) -> None:
        """Begin to speak."""
        if self.repeats and self.repeats.endswith(self.given) and self.anew:
            self.pieces, self.first = [*self.begun, *model.rest(self.side, "")[0]], -1
            return
        rest, self.first = model.rest(self.side, self.given)
        if self.repeats:
            rest, self.first = [self.repeats, *rest], -1
        self.pieces = list(rest)

    def speak(self, n: int) -> Token | Finish:
        """The next token, of up to `n` pieces, or the end."""
        if self.finished is not None or self.n_said == len(self.pieces):
            return Finish(self.finished or "stop")
        if self.heeds and self.limit is not None and self.n_said >= self.limit:
            return Finish("length")
        if self.room is not None:
            n = min(n, self.room - self.n_said)
        if n <= 0:
            return Finish("length", full=True)
        pieces = self.pieces[self.n_said : self.n_said + n]
        ids = self._ids(len(pieces))
        self.n_said += len(pieces)
        text = "".join(pieces)
        if self.stop and (at := (self.said + text).find(self.stop)) >= 0:
            self.finished = "stop"
            text, ids = text[: max(0, at - len(self.said))], ()
            if not text:
                return Finish("stop")
        self.said += text
        return Token(text, len(pieces), ids=ids)

    def _ids(self, n: int) -> tuple[int, ...]:
        """All ids since the last piece that had them; none within a character."""
        if not self.knows_ids or self.first < 0 or not self.pieces[self.n_said + n - 1]:
            return ()
        begin = self.n_said
        while begin > 0 and not self.pieces[begin - 1]:
            begin -= 1
        return tuple(range(self.first + begin, self.first + self.n_said + n))

    @property
    def text(self) -> str:
        """The answer as this run sees it."""
        return self.given + self.said[len(self.repeats) :]


def supported(text: str, runs: Sequence[Run]) -> int:
    """How far `text` is a chain of what the runs said, each after exactly the text before it."""
    at, before = 0, -1
    while at > before:
        before = at
        for run in runs:
            if len(run.given) <= at and text.startswith(run.given):
                n_common = next((i for i, (a, b) in enumerate(zip(text, run.text, strict=False)) if a != b), None)
                at = max(at, min(len(text), len(run.text)) if n_common is None else n_common)
    return at


def whole_answer(seed: int, n: int) -> tuple[str, ...]:
    """`n` pieces. No two places of it are alike: so a text that begins again can be told from one that goes on."""
    pieces = Random(seed).choices(WORDS, k=n)
    return tuple(f"{piece}{i:02}" if piece.strip() and piece.isascii() else piece for i, piece in enumerate(pieces))


def begun_by_client(n: int) -> tuple[str, ...]:
    """`n` pieces that no side says by chance: said again as a whole, they are taken for a repetition."""
    return tuple(f"¶{piece}" for piece in whole_answer(7, n))


def no_overlap(side: Side, text: str) -> str | None:
    del side, text
    return None


def last_words(side: Side, text: str) -> str | None:
    return text[-7:] if side is SERVER and text[-7:].strip() else None


class Played(RuleBasedStateMachine):
    """Hypothesis is the world: it decides who speaks, follows, fails and waits, and when."""

    same: bool
    watch: Watch

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.current: dict[Side, Run] = {}
        self.given_tokens: dict[Side, int] = {}
        self.n_faults = 0
        self.sound = False  # what has failed already need not be played to its end

    # --- the world ---------------------------------------------------------------------------------------------------

    @initialize(
        pieces=st.none() | st.builds(whole_answer, st.integers(0, 1 << 16), st.sampled_from([60, 45, 30, 5])),
        delays=st.sampled_from([(0.0, math.inf), (math.inf, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 0.3)]),
        delivery=st.sampled_from(Delivery),
        reserve=st.integers(0, 4),
        follows=st.booleans(),
        server=st.sampled_from([Continuation.EXACT, Continuation.GUARDED, Continuation.UNTRIED]),
        manner=st.sampled_from(["exact", "restarts", "overlap"]),
        server_ids=st.booleans(),
        max_tokens=st.sampled_from([None, None, 4, 12, 25, 40]),
        stop_at=st.none() | st.none() | st.integers(0, 120),
        n_first=st.integers(0, 8),
        heeds=st.booleans(),
        room=st.sampled_from([None, None, None, 10, 20]),
        n_begun=st.sampled_from([0, 0, 0, 1, 6]),
    )
    def begin(
        self,
        pieces: tuple[str, ...] | None,
        delays: tuple[float, float],
        delivery: Delivery,
        reserve: int,
        follows: bool,
        server: Continuation,
        manner: str,
        server_ids: bool,
        max_tokens: int | None,
        stop_at: int | None,
        n_first: int,
        heeds: bool,
        room: int | None,
        n_begun: int,
    ) -> None:
        self.room = room
        self.n_begun = n_begun
        self.before = "".join(begun_by_client(n_begun))
        self.model, self.same = Model(pieces), pieces is not None
        self.whole = "".join(pieces or ())
        self.manner = manner if self.same else "exact"
        self.server_ids = server_ids
        self.max_tokens, self.heeds = max_tokens, heeds
        self.stop = self.whole[stop_at : stop_at + 4] if stop_at is not None else ""
        if self.manner == "restarts" and server is Continuation.EXACT:
            server = Continuation.GUARDED
        overlap: Callable[[Side, str], str | None] = last_words if self.manner == "overlap" else no_overlap
        answer = Answer(
            Plan(*delays),
            BOTH,
            max_tokens,
            (self.stop,) if self.stop else (),
            {DEVICE: Continuation.EXACT, SERVER: server},
            frozenset({DEVICE}) if follows else frozenset(),
            before=self.before,
            overlap=overlap,
            buffer=TokenBuffer(delivery, 5.0),
        )
        answer.buffer.reserve = reserve
        self.overlap = overlap
        self.watch = Watch(answer)
        self.on(Begin())
        self.a_side_speaks(min(self.watch.running), 1, n_first, 0.05)

    @property
    def over(self) -> bool:
        return self.watch.answer.state in OVER

    def on(self, event: Event, after_s: float = 0.0) -> None:
        """One event; the conductor's part is played."""
        self.sound = False
        for effect in self.watch.on(event, after_s):
            self.carry_out(effect)
        self.sound = True

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Start():
                self.start(effect)
            case Feed(side=side, text=text, ids=ids, go=go):
                run, n = self.current[side], self.watch.answer.n_generated
                run.given += text
                assert ids in ((), tuple(range(self.given_tokens[side], n)))
                self.given_tokens[side] = n
                if go:
                    run.go(self.model)
            case _:
                pass

    def start(self, effect: Start) -> None:
        side, text, n = effect.side, effect.answer_so_far, effect.n_tokens
        assert effect.ids in ((), tuple(range(n)))
        # As the conductor has it: who may repeat the answer first gets the whole limit.
        exact = self.watch.answer.continuation[side] is Continuation.EXACT
        limit = self.max_tokens if self.max_tokens is None or not exact else max(1, self.max_tokens - n)
        run = Run(side, text, limit, self.stop, self.same and (side is DEVICE or self.server_ids))
        run.heeds = self.heeds or side is DEVICE
        if side is DEVICE and self.room is not None:
            run.room = max(0, self.room - n)
        if side is SERVER and (text or self.before):
            if self.manner == "restarts" and (len(self.before + text) >= Seam.MIN_RESTART or not text):
                run.repeats, run.anew = self.before + text, True
                run.begun = begun_by_client(self.n_begun)
            elif self.manner == "overlap":
                run.repeats = self.overlap(side, text) or ""
        if not effect.held:
            run.go(self.model)
        self.runs.append(run)
        self.current[side] = run
        self.given_tokens[side] = n

    def speaks(self, side: Side) -> bool:
        return side in self.watch.running and side not in self.watch.held

    def speak(self, side: Side, n: int, after_s: float) -> None:
        run = self.current[side]
        said = run.speak(n if self.max_tokens is None or not run.heeds else 1)
        self.on(Arrived(side, said) if isinstance(said, Token) else Ended(side, said), after_s)

    # --- what may happen ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(side=st.sampled_from(Side), n=st.integers(1, 3), times=st.integers(1, 3), after_s=pauses)
    def a_side_speaks(self, side: Side, n: int, times: int, after_s: float) -> None:
        for _ in range(times):
            if self.speaks(side):
                self.speak(side, n, after_s)

    @precondition(lambda self: self.watch.answer.state is State.RELAYING)
    @rule(times=st.integers(0, 8), after_s=pauses, reason=st.sampled_from(["cost", "stall"]))
    def the_answer_is_to_move(self, times: int, after_s: float, reason: str) -> None:
        answer = self.watch.answer
        assert answer.source is not None
        self.a_side_speaks(answer.source, 1, times, after_s)
        if reason == "stall" or answer.movable:
            self.on(Move(answer.source.other, reason))

    @precondition(lambda self: self.watch.answer.state is State.HANDOFF)
    @rule(newer=st.booleans(), n=st.integers(1, 3), after_s=pauses)
    def one_of_two_speaks(self, newer: bool, n: int, after_s: float) -> None:
        source = self.watch.answer.source
        assert source is not None
        side = source.other if newer else source
        if self.speaks(side):
            self.speak(side, n, after_s)

    @precondition(lambda self: self.watch.answer.movable)
    @rule(before=st.integers(0, 8), between=st.integers(0, 4))
    def the_answer_moves_and_its_source_rests(self, before: int, between: int) -> None:
        source = self.watch.answer.source
        assert source is not None
        if source is SERVER and self.manner != "exact":
            return  # the conductor stops none that does not go on exactly
        self.the_answer_is_to_move(before, 0.05, "cost")
        self.a_side_speaks(source, 1, between, 0.05)
        if self.watch.answer.state is State.HANDOFF:
            self.on(Rest())

    @precondition(lambda self: self.watch.rests is not None)
    @rule()
    def the_stock_runs_low(self) -> None:
        self.on(AskAgain())

    @precondition(lambda self: self.watch.held)
    @rule()
    def a_follower_has_caught_up(self) -> None:
        self.on(Followed(*self.watch.held))

    @precondition(lambda self: self.watch.pending)
    @rule()
    def a_start_is_due(self) -> None:
        self.on(Due(min(self.watch.pending)), 0.1)

    @precondition(lambda self: self.n_faults < MAX_FAULTS)
    @rule(side=st.sampled_from(Side), engine=st.booleans(), early=st.integers(0, 9))
    def a_side_breaks(self, side: Side, engine: bool, early: int) -> None:
        if (self.watch.answer.text or early == 9) and side in self.watch.running:
            self.n_faults += 1
            reason = "engine_gone" if engine and side is DEVICE else "stalled"
            self.on(Broke(side, EndpointError(side, reason, "broken")))

    @rule(side=st.sampled_from(Side), text=st.sampled_from(["", " stale"]))
    def a_stopped_side_is_not_heard(self, side: Side, text: str) -> None:
        if side not in self.watch.running:
            assert self.watch.on(Arrived(side, Token(text))) == []
            assert self.watch.on(Ended(side, Finish("stop"))) == []

    @rule()
    def a_release_is_due(self) -> None:
        due = self.watch.answer.buffer.due_at
        if due is not None:
            self.on(Tick(), max(0.0, due - self.watch.now))

    @rule(after_s=st.sampled_from([0.0, 0.2, 1.0, 5.0]))
    def time_passes(self, after_s: float) -> None:
        self.on(Tick(), after_s)

    @rule(
        pace_tps=st.sampled_from([1.0, 5.0, 50.0]), delivery=st.none() | st.sampled_from(Delivery), n=st.integers(0, 6)
    )
    def it_is_delivered_otherwise(self, pace_tps: float, delivery: Delivery | None, n: int) -> None:
        buffer = self.watch.answer.buffer
        buffer.reserve = n
        buffer.set_pace(pace_tps, self.watch.now)
        if delivery is not None:
            buffer.set_delivery(delivery, self.watch.now)
        self.on(Tick())

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_answer_is_one_that_the_endpoints_could_have_given(self) -> None:
        if not self.sound:
            return
        text = self.watch.answer.text
        assert supported(text, self.runs) == len(text), (text, [(run.side, run.given, run.said) for run in self.runs])
        if self.max_tokens is not None:
            assert self.watch.answer.n_generated <= self.max_tokens + self.most_beyond(self.max_tokens)
        if self.same:
            assert self.whole.startswith(text)
            assert not self.stop or self.stop not in text
            self.no_handoff_was_dropped_without_need()

    def most_beyond(self, max_tokens: int) -> float:
        """How many pieces may be shown beyond the limit: a server's own end counts, but behind a seam we count."""
        if self.heeds or self.watch.answer.handoffs:
            return 0
        return max(SPARE_TOKENS, SPARE_SHARE * max_tokens)

    def no_handoff_was_dropped_without_need(self) -> None:
        """The same model never says anything else; a limit, a stop string or a full context cuts a repetition short."""
        why = {move.dropped for move in self.watch.answer.moves}
        assert not why & {"mismatch", "delta", "refused"}
        if self.max_tokens is None and not self.stop:
            assert not why & {"restart", "overlap", *(() if self.room is not None else ("short",))}

    def teardown(self) -> None:
        """Everybody speaks, follows and waits until the answer is over."""
        if not self.sound:
            return
        for _ in range(2000):
            if self.over:
                break
            if self.watch.pending:
                self.a_start_is_due()
            if self.watch.held:
                self.a_follower_has_caught_up()
            for side in Side:
                if self.speaks(side):
                    self.speak(side, 1, 0.01)
            self.the_answer_is_one_that_the_endpoints_could_have_given()
        assert self.over, "an answer ends"
        self.check_the_end()

    def check_the_end(self) -> None:
        watch = self.watch
        assert watch.shown == watch.answer.text
        assert watch.n_shown == sum(watch.answer.tokens.values()) == len(watch.answer.buffer.arrivals)
        (end,) = watch.ends
        if isinstance(end, Complete) and self.same:
            self.check_that_it_is_whole(end.reason)

    def check_that_it_is_whole(self, reason: str) -> None:
        stop = self.whole.find(self.stop) if self.stop else -1
        if reason == "length":
            assert self.max_tokens is not None
            # What is said twice counts for the endpoint's own limit.
            missing = self.max_tokens - self.watch.n_shown
            assert missing <= self.watch.answer.handoffs or self.manner != "exact"
        elif stop < 0:
            assert self.watch.shown == self.whole
        else:
            assert stop <= len(self.watch.shown) < stop + len(self.stop)


TestPlayed = Played.TestCase
TestPlayed.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
