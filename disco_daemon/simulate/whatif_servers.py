"""`disco eval --history --servers`: what each server alone, and all of them by the pool's choice, would have given.

Only the servers are played: the first token of whichever answers, and what they bill. A request takes at a server what
was recorded of it there. Where that one was not asked, or was closed before its first token, it takes a draw from the
product-limit curve of all that was seen of it, and each list of servers gets the same draws. The pool begins without
knowing any of them, and sees only the times of those that it asks.

An interval is of N_RESAMPLES resamples (Efron 1979) of blocks of requests, as slow periods last, over N_DRAWS draws;
all but the first of these are from curves of resampled answers, since of few answers a curve is a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import BoolArray, FloatArray
from ..dispatch.pool import Pool
from ..errors import ConfigError
from ..estimation.knowledge import LEAST_S
from ..estimation.lengths import OutputLengths
from ..estimation.survival import Survival
from ..money.catalog import Price
from ..plain import count_of
from ..types import Attempt, Outcome, Side
from .figures import align
from .recorded import MIN_REQUESTS, MIN_SEEN, curve_of, fill_in, has_failed, is_answered, key_of, knowledge_of
from .server_player import Played, PoolRule, serve

MOST_PLAYED = 1_000  # newest requests: the pool takes a third of a millisecond for each, in each draw and list
N_DRAWS = 8
N_RESAMPLES = 1_000
BLOCK = 10  # requests in a row that are resampled together
LEAST_DAYS = 1.0  # an hour says nothing about a day: a shorter history counts as one day
TAIL = 0.99


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """One server of the settings: SERVER/MODEL, its price, and whether closing a stream ends the bill there."""

    key: str
    price: Price
    stops_billing: bool


@dataclass(frozen=True, slots=True)
class ListOutcome:
    """What one list of servers would have come to. TTFTs in s with the ends of their 95 % intervals.

    `usd_per_day` is None where a price is not known. `shares` says which server gave the first token of which share of
    the requests, and `hedged_share` of how many a second one was asked.
    """

    servers: tuple[str, ...]
    mean_ttft_s: float
    mean_ttft_95: tuple[float, float]
    p99_ttft_s: float
    p99_ttft_95: tuple[float, float]
    usd_per_day: float | None
    hedged_share: float
    shares: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """What the history has of one server: for how long each request waited for it, s, and whether it was seen.

    Both are [requests that are played]; `samples` are the same of all requests, `n_failed` those that it failed.
    """

    terms: ServerTerms
    waited: FloatArray
    seen: BoolArray
    samples: tuple[FloatArray, BoolArray]
    n_failed: int

    def times(self, rng: np.random.Generator, *, resampled: bool) -> FloatArray:
        """Return the TTFT of every request, s."""
        waited, seen = self.samples
        if resampled:
            chosen = rng.integers(len(waited), size=len(waited))
            if seen[chosen].any():
                waited, seen = waited[chosen], seen[chosen]
        curve: Survival = curve_of(waited, seen)
        return fill_in(self.waited, self.seen, rng.random(len(self.waited)), curve)


class ServersReplay:
    """The requests of a history that a server was asked for, and what is known of each of `members`.

    Raises ConfigError where no server of them, or hardly any request, is on record. `named` are the names of models
    that ask for some server: such requests were no choice, and are not played; their times count.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome],
        members: Sequence[ServerTerms],
        named: Collection[str] = (),
        hedge_share: float = 0.05,
        seed: int = 0,
    ) -> None:
        self._seed, self._hedge_share = seed, hedge_share
        asked = [o for o in outcomes if is_answered(o) and any(a.side is Side.SERVER for a in o.attempts)]
        self.requests = [o for o in asked if not _is_named(o.model, named)][-MOST_PLAYED:]
        if len(self.requests) < MIN_REQUESTS:
            msg = (
                f"the history holds {count_of(len(self.requests), 'request')} that a server was free to answer: at "
                f"least {MIN_REQUESTS} are needed. Use the daemon for a while (`disco up`), or give another "
                f"file (--path) or more --days"
            )
            raise ConfigError(msg)
        found = [self._record(one, outcomes) for one in members]
        self.records = [one for one in found if one.samples[1].sum() >= MIN_SEEN]
        self.too_few = [one for one in found if one.samples[1].sum() < MIN_SEEN]
        if not self.records:
            few = ", ".join(f"{one.terms.key} {one.samples[1].sum()}" for one in found)
            msg = (
                f"the history holds too few first tokens of these servers to play any of them, at least {MIN_SEEN} of "
                f"one are needed: {few}. Let them be asked more often, or give more --days"
            )
            raise ConfigError(msg)

    @property
    def days(self) -> float:
        """The time from the first request to the last, days."""
        return (self.requests[-1].created - self.requests[0].created) / 86_400

    def play(self) -> list[ListOutcome]:
        """Return each server alone; of several also all, and of more than two all without one of them."""
        n = len(self.records)
        lists: list[tuple[int, ...]] = [(i,) for i in range(n)]
        if n > 1:
            lists.append(tuple(range(n)))
        if n > 2:
            lists += [tuple(j for j in range(n) if j != i) for i in range(n)]
        return [self._outcome(one) for one in lists]

    def recorded(self) -> dict[str, Any]:
        """Return what the servers gave in truth; where the device was first their TTFT is drawn, as in the lists."""
        found = [_pooled(o) for o in self.requests]
        waited, seen = np.array([w for w, _ in found]), np.array([s for _, s in found])
        times = fill_in(waited, seen, np.random.default_rng(self._seed).random(len(waited)), curve_of(waited, seen))
        firsts = Counter(key_of(a) for o in self.requests if (a := _first(o)) is not None)
        total = firsts.total()
        usd = sum(a.bill_usd for o in self.requests for a in o.attempts if a.side is Side.SERVER)
        return {
            "mean_ttft_s": float(times.mean()),
            "p99_ttft_s": float(np.quantile(times, TAIL)),
            "usd_per_day": usd / max(self.days, LEAST_DAYS),
            "shares": {key: count / total for key, count in firsts.most_common()},
        }

    def members(self) -> list[dict[str, Any]]:
        """Return on how much the figures of each server rest; `played` says whether that was enough."""
        return [
            {
                "server": one.terms.key,
                "asked": int((one.samples[0] > 0).sum()),
                "first_tokens": int(one.samples[1].sum()),
                "drawn": int((~one.seen).sum()),
                "failed": one.n_failed,
                "price_known": one.terms.price.known,
                "played": one in self.records,
            }
            for one in (*self.records, *self.too_few)
        ]

    def notes(self) -> list[str]:
        """Return in sentences what is simulated, and what that rests on."""
        n = len(self.requests)
        played = f"the newest {count_of(n, 'request')} that one was asked for and free to be chosen"
        lines = [
            f"Simulated: the first token of the servers alone, for {played}.",
            "This machine's answers, failures of servers, and moves in mid-answer are not played.",
        ]
        for one in self.records:
            drawn, seen = int((~one.seen).sum()), int(one.samples[1].sum())
            failed = f"; it failed {count_of(one.n_failed, 'time')}, which is not played" if one.n_failed else ""
            lines.append(
                f"{one.terms.key}: {drawn:,} of {n:,} times are drawn from the {seen:,} first tokens on record{failed}."
            )
        for one in self.too_few:
            seen = int(one.samples[1].sum())
            lines.append(
                f"{one.terms.key} is not played: {count_of(seen, 'first token')} on record, {MIN_SEEN} are needed."
            )
        lines += [f"{one.terms.key}: nobody knows its price." for one in self.records if not one.terms.price.known]
        if len(self.records) > 1:
            lines.append("A server was mostly asked when it was thought to be fast: alone, it may be slower than this.")
        return lines

    # --- playing --------------------------------------------------------------------------------------------------

    def _record(self, terms: ServerTerms, outcomes: Sequence[Outcome]) -> _Record:
        everywhere = [_own(o, terms.key) for o in outcomes]
        here = [_own(o, terms.key) for o in self.requests]
        n_failed = sum(key_of(a) == terms.key and has_failed(a) for o in outcomes for a in o.attempts)
        samples = _waits([a for a in everywhere if a is not None])
        return _Record(terms, *_waits(here), samples, n_failed)

    @cached_property
    def _times(self) -> list[FloatArray]:
        """The TTFT of each request at each server, s, of each draw: [servers, requests]."""
        rng = np.random.default_rng(self._seed)
        return [np.stack([one.times(rng, resampled=draw > 0) for one in self.records]) for draw in range(N_DRAWS)]

    @cached_property
    def _expected_usd(self) -> list[list[float | None]]:
        """What an answer to each request is expected to cost at each server, $: by its prompt, as the daemon has it."""
        outputs: OutputLengths = knowledge_of(self.requests).outputs
        about = [round(outputs.about(o.prompt_tokens)) for o in self.requests]
        prices = [one.terms.price for one in self.records]
        return [
            [p.cost_usd(o.prompt_tokens, n) if p.known else None for p in prices]
            for o, n in zip(self.requests, about, strict=True)
        ]

    def _outcome(self, servers: tuple[int, ...]) -> ListOutcome:
        played = [self._play(servers, times) for times in self._times]
        waits = np.array([one.waits_s for one in played])
        means, tails = _resampled(waits, self._seed)
        keys = [self.records[i].terms.key for i in servers]
        answered = Counter(server for one in played for server in one.answered)
        total, known = waits.size, all(self.records[i].terms.price.known for i in servers)
        usd = sum(self._usd(servers, one) for one in played) / len(played) if known else None
        return ListOutcome(
            tuple(keys),
            float(waits.mean()), means,
            float(np.quantile(waits, TAIL, axis=1).mean()), tails,
            None if usd is None else usd / max(self.days, LEAST_DAYS),
            sum(sum(one.hedged) for one in played) / total,
            {key: answered[i] / total for i, key in enumerate(keys)},
        )  # fmt: skip

    def _play(self, servers: tuple[int, ...], times: FloatArray) -> Played:
        if len(servers) == 1:
            n, waits = len(self.requests), times[servers[0]].tolist()
            return Played(waits, [0] * n, [None] * n, [0] * n)
        expected, requests = self._expected_usd, self.requests
        pool = Pool(hedge_share=self._hedge_share)
        rule = PoolRule(
            len(servers), pool, lambda i: ([expected[i][s] for s in servers], requests[i].prompt_tokens)
        )  # fmt: skip
        played = Played()
        for i, row in enumerate(times[list(servers)].T.tolist()):
            serve(rule, row, i, played)
        return played

    def _usd(self, servers: tuple[int, ...], played: Played) -> float:
        """Return the bill, $: the prompt at each server that was asked, and what was written at the first one.

        Where closing a stream is not known to end the bill, the other one bills the whole answer, too.
        """
        usd = 0.0
        for i, outcome in enumerate(self.requests):
            written = outcome.tokens.get(Side.SERVER, 0)
            second = played.beside[i]
            for server in {played.asked[i], *([] if second is None else [second])}:
                terms = self.records[servers[server]].terms
                writes = server == played.answered[i] or not terms.stops_billing
                usd += terms.price.cost_usd(outcome.prompt_tokens, written if writes else 0)
        return usd


def summary(replay: ServersReplay, found: Sequence[ListOutcome]) -> str:
    """Return a table with a row for each list of servers, and in sentences what it rests on."""
    was = replay.recorded()
    head = ("servers", "first token by", "mean s", "95 %", "P99 s", "95 %", "$ a day", "2nd asked %")
    rows = [[
        "as it was", _shares(was["shares"]), f"{was['mean_ttft_s']:.3f}", "", f"{was['p99_ttft_s']:.3f}", "",
        f"{was['usd_per_day']:.4f}", "",
    ]]  # fmt: skip
    rows += [
        [
            _name(one, replay), _shares(one.shares) if len(one.servers) > 1 else "", f"{one.mean_ttft_s:.3f}",
            _span(one.mean_ttft_95), f"{one.p99_ttft_s:.3f}", _span(one.p99_ttft_95),
            "?" if one.usd_per_day is None else f"{one.usd_per_day:.4f}",
            f"{100 * one.hedged_share:.1f}" if len(one.servers) > 1 else "",
        ]
        for one in found
    ]  # fmt: skip
    return "\n\n".join([align(head, rows, n_left=2), "\n".join(replay.notes())])


def as_json(replay: ServersReplay, found: Sequence[ListOutcome]) -> dict[str, Any]:
    """Return it all as plain JSON: TTFTs in s, $ a day."""
    return {
        "requests": len(replay.requests),
        "days": replay.days,
        "recorded": replay.recorded(),
        "members": replay.members(),
        "lists": [asdict(one) for one in found],
        "notes": replay.notes(),
    }


def _name(one: ListOutcome, replay: ServersReplay) -> str:
    keys = [record.terms.key for record in replay.records]
    without = [key for key in keys if key not in one.servers]
    if len(one.servers) == 1:
        return f"{one.servers[0]} alone"
    return f"all without {without[0]}" if without else "all, by the pool's choice"


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{key} {100 * share:.0f} %" for key, share in shares.items())


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3f}-{ends[1]:.3f}"


# --- reading it back ----------------------------------------------------------------------------------------------


def _is_named(model: str, named: Collection[str]) -> bool:
    """Whether a request asked for a server's model by name; `disco`, `disco/server` and names of ours are free."""
    return model in named or ("/" in model and not model.startswith("disco/"))


def _is_usable(attempt: Attempt) -> bool:
    own = attempt.side is Side.SERVER and not attempt.continued and not attempt.disturbed
    return own and attempt.ttft_s > LEAST_S and not has_failed(attempt)


def _own(outcome: Outcome, key: str) -> Attempt | None:
    """Return a server's attempt at the whole prompt, if it was asked, did not fail, and the time is one of its own."""
    return next((a for a in outcome.attempts if _is_usable(a) and key_of(a) == key), None)


def _waits(attempts: Sequence[Attempt | None]) -> tuple[FloatArray, BoolArray]:
    """Return how long was waited for each, s (0: not asked), and whether the first token was seen."""
    waited = np.array([0.0 if a is None else a.ttft_s for a in attempts], np.float64)
    return waited, np.array([a is not None and not a.censored for a in attempts], np.bool_)


def _first(outcome: Outcome) -> Attempt | None:
    """Return the attempt of the server that showed its first token first, or that was waited for longest."""
    own = [a for a in outcome.attempts if _is_usable(a)]
    return min(own, key=lambda a: (a.censored, a.started_s + a.ttft_s), default=None)


def _pooled(outcome: Outcome) -> tuple[float, bool]:
    """Return for how long was waited for the servers together, s, and whether one of them showed a first token."""
    own, first = [a for a in outcome.attempts if _is_usable(a)], _first(outcome)
    if first is None:
        return 0.0, False
    return first.started_s + first.ttft_s - min(a.started_s for a in own), not first.censored


def _resampled(waits: FloatArray, seed: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the 95 % intervals of mean and P99 of waits [draws, requests], s."""
    rng, (n_draws, n) = np.random.default_rng(seed), waits.shape
    means, tails = np.empty(N_RESAMPLES), np.empty(N_RESAMPLES)
    for r in range(N_RESAMPLES):
        starts = rng.integers(n, size=-(-n // BLOCK))
        chosen = (starts[:, None] + np.arange(BLOCK)).ravel()[:n] % n
        sample = waits[rng.integers(n_draws)][chosen]
        means[r], tails[r] = sample.mean(), np.quantile(sample, TAIL)
    ends = [np.quantile(one, (0.025, 0.975)).tolist() for one in (means, tails)]
    return (ends[0][0], ends[0][1]), (ends[1][0], ends[1][1])
