"""The user's own requests as arrays to replay, and what they tell of the two sides. Times in s, lengths in tokens.

A request that the server did not answer, because the device won or nobody asked it, has no TTFT of the server. It is
given one: a draw from the product-limit curve of all that was seen, beyond the time after which it was closed. Each
request keeps its draw under all settings (common random numbers), so that two settings differ by what they do, not by
luck. The device's TTFT is a line through its samples, as the daemon learns it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import BoolArray, FloatArray
from ..dispatch.mover import DECODE_TPS
from ..errors import ConfigError
from ..estimation.knowledge import LEAST_S, SILENT, Knowledge
from ..estimation.lengths import LengthDistribution, OutputLengths
from ..estimation.server_ttft import LEVELS, Predictor, ServerTtft
from ..estimation.survival import Survival, complete, heavy_tail, kaplan_meier
from ..estimation.ttft_context import Contexts, estimate_contexts
from ..types import Attempt, Delivery, Outcome, Side

MIN_REQUESTS = 20  # of fewer, the slowest decide everything
MIN_SEEN = 10  # TTFTs of the server: a curve needs some
FITTED_ON = 2000  # newest TTFTs of the server that the policy is fitted to; more take longer, and say the same
LEARNED_FROM = 1000  # newest requests that teach the device's speed and the answers' lengths; both forget sooner
MIN_ANSWER = 8  # tokens of an answer that says how fast the device writes
MIN_SPEEDS = 3  # and so many such answers


@dataclass(frozen=True, slots=True)
class Phone:
    """A device: speeds in token/s, `start_s` = c of T_d(l) = l / prefill + c."""

    name: str
    prefill_tps: float
    decode_tps: float
    start_s: float = 0.0

    def ttft_s(self, lengths: FloatArray) -> FloatArray:
        """T_d(l), s."""
        return lengths / self.prefill_tps + self.start_s


@dataclass(frozen=True, slots=True, eq=False)
class Recent:
    """The slowness of the server at the end of the fit: `levels` [3], and `cap`, log s, on what one stall counts."""

    predictor: Predictor
    levels: FloatArray
    cap: float

    def after(self, levels: FloatArray, ttft_s: FloatArray) -> FloatArray:
        """The levels [..., seeds, 3] after one more TTFT [seeds]."""
        moved: FloatArray = LEVELS * levels + (1 - LEVELS) * np.minimum(np.log(ttft_s), self.cap)[:, None]
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """The recorded outcome, to compare a prediction with: the requests' TTFTs, s, and their energy, J; both [n].

    `bill` [3] are the server's prompt and answer tokens, and the requests it was asked for. The device computed for
    `busy_s` in all, s.
    """

    ttft_s: FloatArray
    energy_j: FloatArray
    bill: tuple[int, int, int]
    busy_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Requests to replay, oldest first; arrays are [n].

    `fresh` are the prompt's tokens that the device has to read, `output` the answer's. `server_s` is the server's TTFT,
    recorded or drawn; `score` how slow it was lately (`Contexts`); `draw` in [0, 1) splits a length between two rungs.
    `bound` [2, n] marks requests that only the device, or only the server, may serve, `race` [n] those that both begin
    at once whatever the policy plans, and `paced` [n] those whose answers were shown at the reader's pace. `curve` is
    the server's TTFT, and `contexts` the same given the recent ones. `n_drawn` TTFTs were made up; `n_left_out` rows
    are not replayed. `server` is the one that was asked last, SERVER/MODEL; it has the name `server` where it is alone.
    """

    prompt: FloatArray
    fresh: FloatArray
    output: FloatArray
    server_s: FloatArray
    score: FloatArray
    draw: FloatArray
    bound: BoolArray
    race: BoolArray
    paced: BoolArray
    lengths: LengthDistribution
    curve: Survival
    contexts: Contexts
    phone: Phone
    answers: OutputLengths
    facts: Facts
    days: float
    n_drawn: int
    n_left_out: int
    n_device_samples: int
    server: str

    @property
    def n(self) -> int:
        """Requests."""
        return len(self.prompt)

    def only(self, mask: BoolArray) -> Recorded:
        """Return some of the requests [n]; what was learned and the facts stay those of all."""
        names = ("prompt", "fresh", "output", "server_s", "score", "draw", "race", "paced")
        chosen = {name: getattr(self, name)[mask] for name in names}
        return replace(self, **chosen, bound=self.bound[:, mask])

    @property
    def watts(self) -> float:
        """The power that computing was booked with, W; 0 where nothing was."""
        facts = self.facts
        return float(facts.energy_j.sum()) / facts.busy_s if facts.busy_s > 0 else 0.0

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seed: int = 0) -> Recorded:
        """Take what can be replayed of `outcomes`, oldest first.

        Left out is what no answer came of, embeddings, and requests whose server failed: by which setting they would
        have fared better is not known. Raises ConfigError where too little is left.
        """
        models = {side: _latest_model(outcomes, side) for side in Side}
        requests = replayable(outcomes)
        _require(len(requests), len(outcomes))
        waited, seen = _server_times([_server_attempt(o, models[Side.SERVER]) for o in requests])
        rng = np.random.default_rng(seed)
        server_s = fill_in(waited, seen, rng.random(len(requests)), curve_of(waited, seen))
        estimator = _estimator(waited, seen)
        predictor = estimator.predictor()
        knowledge = knowledge_of(requests)
        k, c = knowledge.device.k, knowledge.device.c
        prompt = np.array([o.prompt_tokens for o in requests])
        return cls(
            prompt=prompt.astype(np.float64),
            fresh=_fresh(requests, models[Side.DEVICE]),
            output=np.array([sum(o.tokens.values()) for o in requests], np.float64),
            server_s=server_s,
            score=_scores(Recent(predictor, np.full(3, math.log(server_s[0])), _cap(waited, seen)), server_s),
            draw=rng.random(len(requests)),
            bound=np.array([[_is_bound_to(o, side, models[side]) for o in requests] for side in Side]),
            race=np.zeros(len(requests), np.bool_),
            paced=np.array([o.delivery is Delivery.PACED for o in requests]),
            lengths=LengthDistribution.of(prompt),
            curve=estimator.curve(),
            contexts=estimate_contexts(*estimator.samples()),
            phone=Phone("this machine", 1 / k, _decode_tps(requests, k), c),
            answers=knowledge.outputs,
            facts=_facts(requests),
            days=(requests[-1].created - requests[0].created) / 86_400,
            n_drawn=int((~seen).sum()),
            n_left_out=len(outcomes) - len(requests),
            n_device_samples=knowledge.device.n,
            server=next((key_of(a) for o in reversed(outcomes) for a in o.attempts if a.side is Side.SERVER), ""),
        )


def replayable(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the requests that can be replayed: those that were answered, and whose server did not fail."""
    model = _latest_model(outcomes, Side.SERVER)
    pairs = [(o, _server_attempt(o, model)) for o in outcomes if is_answered(o)]
    return [o for o, a in pairs if a is None or not has_failed(a)]


def _require(n: int, n_rows: int) -> None:
    if n < MIN_REQUESTS:
        msg = (
            f"the history holds {n_rows} requests, {n} of which can be replayed: at least {MIN_REQUESTS} are needed to "
            f"say anything. Use the daemon for a while (`disco up`), or give another file (--path) or more --days"
        )
        raise ConfigError(msg)


# --- which rows, and whose ----------------------------------------------------------------------------------------


def is_answered(outcome: Outcome) -> bool:
    """Whether an answer came of it that can be replayed."""
    return outcome.ttft_s is not None and outcome.winner is not None and outcome.prompt_tokens > 0


def _latest_model(outcomes: Sequence[Outcome], side: Side) -> str | None:
    """The model asked last on that side: what was recorded of another one says nothing about this one."""
    models = (a.model for o in reversed(outcomes) for a in o.attempts if a.side is side)
    return next(models, None)


def key_of(attempt: Attempt) -> str:
    """Return which server and model an attempt was made at, as SERVER/MODEL."""
    return f"{attempt.server or attempt.side.value}/{attempt.model}"


def _server_attempt(outcome: Outcome, model: str | None) -> Attempt | None:
    """Return the server's attempt at the whole prompt, if it was asked and the time is one of its own."""
    for a in outcome.attempts:
        own = a.side is Side.SERVER and a.model == model and not a.continued and not a.disturbed
        if own and a.ttft_s > LEAST_S:
            return a
    return None


def has_failed(attempt: Attempt) -> bool:
    """Whether the server failed otherwise than by its silence, so that its time says nothing."""
    return attempt.censored and attempt.error is not None and attempt.error not in SILENT


def _is_bound_to(outcome: Outcome, side: Side, model: str | None) -> bool:
    """Whether the client's model name allowed that side only. A route given otherwise is not on record."""
    name = f"disco/{side.value}"
    return outcome.model == name or outcome.model.startswith(f"{name}:") or outcome.model == model


# --- the server ---------------------------------------------------------------------------------------------------


def _server_times(attempts: Sequence[Attempt | None]) -> tuple[FloatArray, BoolArray]:
    """Return how long each request waited for the server, s (0: not asked), and whether it saw the first token.

    Raises ConfigError where it was hardly ever seen.
    """
    waited = np.array([0.0 if a is None else a.ttft_s for a in attempts])
    seen = np.array([a is not None and not a.censored for a in attempts])
    if seen.sum() < MIN_SEEN:
        msg = (
            f"the history holds {seen.sum()} first tokens of the server, and {MIN_SEEN} are needed to say what another "
            "setting would have done: configure a server, or let it be asked more often (policy.budget)"
        )
        raise ConfigError(msg)
    return waited, seen


def curve_of(waited: FloatArray, seen: BoolArray) -> Survival:
    """Return the product-limit curve of what was seen of a server; where nothing was asked of it, `waited` is 0."""
    asked = waited > 0
    own = kaplan_meier(waited[asked], seen[asked])
    return complete(own, heavy_tail(float(own.quantile(0.5))))


def fill_in(waited: FloatArray, seen: BoolArray, draws: FloatArray, curve: Survival) -> FloatArray:
    """Return the server's TTFT of every request: as seen, or else drawn from the curve beyond the time waited."""
    drawn = curve.quantile(1.0 - curve.at(waited) * (1.0 - draws))
    times: FloatArray = np.where(seen, waited, np.maximum(drawn, waited))
    return times


def _estimator(waited: FloatArray, seen: BoolArray) -> ServerTtft:
    """The daemon's estimator, its window as long as what it is fed: the past as a whole, not its last hour."""
    asked = np.flatnonzero(waited > 0)[-FITTED_ON:]
    estimator = ServerTtft(window=len(asked), watchful=False)
    for time, was_seen in zip(waited[asked].tolist(), seen[asked].tolist(), strict=True):
        estimator.add(time, censored=not was_seen)
    return estimator


def _cap(waited: FloatArray, seen: BoolArray) -> float:
    """Log s on what one stall counts, as in the offline evaluation."""
    return math.log(float(np.quantile(waited[seen], 0.95))) + 0.1


def _scores(recent: Recent, server_s: FloatArray) -> FloatArray:
    """Return the slowness of the server before each request, as if each had shown its first token in the end."""
    levels = np.empty((len(server_s), 3))
    now = recent.levels[None]
    for i in range(len(server_s)):
        levels[i] = now[0]
        now = recent.after(now, server_s[i : i + 1])
    scores: FloatArray = recent.predictor.score(levels)
    return scores


# --- the device ---------------------------------------------------------------------------------------------------


def knowledge_of(requests: Sequence[Outcome]) -> Knowledge:
    """Return what the daemon would have learned of the newest of these requests."""
    knowledge = Knowledge()
    for outcome in requests[-LEARNED_FROM:]:
        knowledge.learn(outcome)
    return knowledge


def _fresh(requests: Sequence[Outcome], model: str | None) -> FloatArray:
    """Tokens of each prompt that the device has to read: as it did, or else the usual share of them."""
    prompt = np.array([o.prompt_tokens for o in requests], np.float64)
    read = np.array([_tokens_read(o, model) for o in requests], np.float64)
    known = read > 0
    share = min(1.0, read[known].sum() / prompt[known].sum()) if known.any() else 1.0
    fresh: FloatArray = np.clip(np.where(known, read, share * prompt), 1.0, prompt)
    return fresh


def _tokens_read(outcome: Outcome, model: str | None) -> int:
    for a in outcome.attempts:
        if a.side is Side.DEVICE and a.model == model and not (a.censored or a.continued or a.disturbed):
            return a.usage.prompt_tokens
    return 0


def _decode_tps(requests: Sequence[Outcome], k: float) -> float:
    """Return the device's decode speed, token/s: the median over its answers, less the time that reading takes."""
    usages = [a.usage for o in requests[-LEARNED_FROM:] for a in o.attempts if a.side is Side.DEVICE]
    pairs = [(u.completion_tokens, u.busy_s - k * u.prompt_tokens) for u in usages]
    speeds = [tokens / took_s for tokens, took_s in pairs if tokens >= MIN_ANSWER and took_s > 0]
    return float(np.median(speeds)) if len(speeds) >= MIN_SPEEDS else DECODE_TPS[Side.DEVICE]


def _facts(requests: Sequence[Outcome]) -> Facts:
    asked = [a.usage for o in requests for a in o.attempts if a.side is Side.SERVER]
    n_asked = Counter(any(a.side is Side.SERVER for a in o.attempts) for o in requests)[True]
    return Facts(
        np.array([o.ttft_s for o in requests], np.float64),
        np.array([o.energy_j for o in requests]),
        (sum(u.prompt_tokens for u in asked), sum(u.completion_tokens for u in asked), n_asked),
        sum(a.usage.busy_s for o in requests for a in o.attempts),
    )
