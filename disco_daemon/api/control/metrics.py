"""The metrics for Prometheus: counters and histograms of events, and at each scrape the present state (`health`).

docs/reference/metrics.md names each of them, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from ...arrays import FloatArray
from ...types import Attempt, HandoffRecord, LedgerEntry, Outcome, Reading, Side
from .health import HealthSnapshot, Present

Metric = TypeVar("Metric", Counter, Histogram)

MAX_WORDS = 32  # values of one label; a server chooses its finish reasons, and each one is a time series for ever
OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"  # of OpenMetrics, once


_TTFT_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)
# A decode step takes 5 to 50 ms; a reader's pace of 4.8 token/s is 0.208 s, which a reader notices 20 ms late.
_TBT_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.21, 0.23, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 15.0)
_QOE = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_HANDOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)  # nothing may block the loop for 5 ms


class Metrics:
    """All metrics of one daemon, for its event loop's thread. `health` returns its state; labels are bounded."""

    def __init__(self, health: Callable[[], HealthSnapshot] | None = None) -> None:
        self._registry, self._by_key = CollectorRegistry(), CollectorRegistry()
        self._seen: dict[str, set[str]] = {}
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self._of_answers()
        self._of_endpoints()
        self._of_two_machines()
        self._of_money()
        self._of_keys()
        self._of_the_daemon()
        if health is not None:
            self._registry.register(Present(health))

    def _of_answers(self) -> None:
        self._answers = self._counter("disco_answers", "Finished answers.", "endpoint", "finish", "error")
        self._ttft = self._histogram("disco_ttft_seconds", "From the request to the reader's first token.", _TTFT_S)
        self._tbt = Gaps("disco_tbt_seconds", "Between two tokens as the reader gets them.", _TBT_S)
        self._registry.register(self._tbt)
        self._gap = self._histogram("disco_largest_gap_seconds", "Longest wait within an answer.", _TBT_S)
        self._qoe = self._histogram("disco_qoe_ratio", "Quality of experience of an answer, Andes' Eq. 1.", _QOE)
        self._stalled = self._counter("disco_stalled_tokens", "Tokens that the reader had to wait for.")
        self._handoffs = self._counter(
            "disco_handoffs", "Moves of running answers, done or dropped.", "direction", "reason", "result"
        )
        self._handoff_s = self._histogram(
            "disco_handoff_seconds", "From the decision to the target's first token.", _HANDOFF_S, "direction"
        )

    def _of_endpoints(self) -> None:
        self._tokens = self._counter(
            "disco_tokens", "Delivered to readers; prompt and completion as processed, losers too.", "endpoint", "kind"
        )
        self._attempts = self._counter("disco_attempts", "Starts of an endpoint.", "endpoint", "error")
        self._censored = self._counter(
            "disco_attempts_censored", "Starts that ended before a first token was seen.", "endpoint"
        )
        self._hedges = self._counter(
            "disco_hedges", "Second requests to a silent server: won, lost to another one, or failed.", "result"
        )
        self._server_attempts = self._counter(
            "disco_server_attempts", "Starts at one of several servers, by its name.", "server", "error"
        )
        self._bill_of = self._counter("disco_server_bill_usd", "What one of several servers bills, $.", "server")
        self._attempt_ttft = self._histogram(
            "disco_attempt_ttft_seconds", "From an endpoint's start to its first token.", _TTFT_S
        )

    def _of_two_machines(self) -> None:
        self._split = {
            "round_trips": self._counter("disco_split_round_trips", "Verdicts that the partner was asked for."),
            "drafted": self._counter("disco_split_drafted", "Guessed tokens that the partner has judged."),
            "accepted": self._counter("disco_split_accepted", "Guessed tokens that were right."),
            "n_rows": self._counter("disco_split_rows", "Rows that the partner has computed."),
        }
        self._split_bytes = self._counter("disco_split_bytes", "Bytes of rows and verdicts.", "direction")

    def _of_money(self) -> None:
        self._cost = self._counter("disco_cost_usd", "The servers' bill and the worth of our energy, $.")
        self._bill = self._counter("disco_server_usd", "What servers bill, $.")
        self._energy = self._counter("disco_energy_joules", "Energy that this machine spent on answers, J.")

    def _of_keys(self) -> None:
        """Make the metrics by key, which name who has one: not everybody may see them."""

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(name, told, labels, registry=self._by_key)

        self._key_requests = counter("disco_key_requests", "Requests of keys with names.", "key")
        self._key_tokens = counter("disco_key_tokens", "Tokens as these clients were told them.", "key", "kind")
        self._key_bill = counter("disco_key_server_usd", "What servers bill for these requests, $.", "key")
        self._key_energy = counter("disco_key_energy_joules", "Energy of this machine for them, J.", "key")

    def _of_the_daemon(self) -> None:
        self._lag = self._histogram("disco_loop_lag_seconds", "Lateness of the event loop, every 20 ms.", _LAG_S, "")
        self._requests = self._counter("disco_http_requests", "HTTP requests answered.", "handler", "code")
        ProcessCollector(registry=self._registry)  # process_*, where there is a /proc

    def observe(self, outcome: Outcome) -> None:
        """Count one finished answer, however it ended."""
        winner = self._observe_end(outcome.winner, outcome.finish_reason, outcome.error)
        if outcome.ttft_s is not None:
            self._of(self._ttft, winner).observe(outcome.ttft_s)
        if outcome.reading is not None:
            self._read(outcome.reading, winner)
        for side, gaps in gaps_by_maker(outcome):
            self._tbt.observe(side.value, gaps)
        for move in outcome.moves:
            self._observe_move(move)
        for side, n_tokens in outcome.tokens.items():
            self._of(self._tokens, side.value, "delivered").inc(n_tokens)
        for attempt in outcome.attempts:
            self._observe_attempt(attempt)
        self._spend(outcome.cost_usd, outcome.server_usd, outcome.energy_j)
        if outcome.key:
            self._observe_key(outcome.key, outcome.billed, outcome.server_usd, outcome.energy_j)

    def book(self, entry: LedgerEntry) -> None:
        """Count a cost without an answer: under its kind, as an attempt, and by its amounts."""
        self._observe_end(entry.served, entry.finish_reason, entry.attempt.error)
        self._observe_attempt(entry.attempt)
        self._spend(entry.cost_usd, entry.attempt.bill_usd, entry.attempt.energy_j)
        if entry.key:
            n_prompt = entry.attempt.usage.prompt_tokens
            self._observe_key(entry.key, (n_prompt, 0), entry.attempt.bill_usd, entry.attempt.energy_j)

    def observe_lag(self, late_s: float) -> None:
        """Observe the lateness of the event loop, s."""
        self._lag.observe(late_s)

    def count_request(self, handler: str, code: int) -> None:
        """Count an answered HTTP request; `handler` is its route's path, of which there are few."""
        self._of(self._requests, handler, str(code)).inc()

    def render(self, accept: str = "", *, by_key: bool = True) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics where it is accepted, else Prometheus' text.

        Those that name keys are left out without `by_key`.
        """
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in accept else "")
        parts = [encode(registry) for registry in (self._registry, self._by_key)[: 1 + by_key]]
        return b"".join([*(part.removesuffix(_END) for part in parts[:-1]), parts[-1]]), content_type

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(name, told, labels, registry=self._registry)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...], label: str = "endpoint") -> Histogram:
        labels = (label,) if label else ()
        return Histogram(name, told, labels, buckets=buckets, registry=self._registry)

    def _observe_end(self, side: Side | None, finish: str | None, error: str | None) -> str:
        """Count one end, and return the label of its side."""
        endpoint = "none" if side is None else side.value
        self._of(self._answers, endpoint, self._word("finish", finish), self._word("error", error)).inc()
        return endpoint

    def _spend(self, cost_usd: float, bill_usd: float, energy_j: float) -> None:
        self._cost.inc(cost_usd)
        self._bill.inc(bill_usd)
        self._energy.inc(energy_j)

    def _observe_key(self, name: str, n_tokens: tuple[int, int], bill_usd: float, energy_j: float) -> None:
        """Count what a key has used, prompt and answer; those beyond MAX_WORDS are counted as one."""
        key = self._word("key", name)
        self._of(self._key_requests, key).inc()
        for kind, n in zip(("prompt", "completion"), n_tokens, strict=True):
            self._of(self._key_tokens, key, kind).inc(n)
        self._of(self._key_bill, key).inc(bill_usd)
        self._of(self._key_energy, key).inc(energy_j)

    def _read(self, reading: Reading, winner: str) -> None:
        self._of(self._qoe, winner).observe(reading.qoe)
        self._of(self._gap, winner).observe(reading.largest_gap_s)
        self._stalled.inc(reading.stalled)

    def _observe_move(self, move: HandoffRecord) -> None:
        direction = f"to_{move.target.value}"
        result = "done" if move.dropped is None else self._word("result", move.dropped)
        self._of(self._handoffs, direction, self._word("reason", move.reason), result).inc()
        if move.dropped is None:
            self._of(self._handoff_s, direction).observe(move.took_s)

    def _observe_attempt(self, attempt: Attempt) -> None:
        side = attempt.side.value
        self._of(self._tokens, side, "prompt").inc(attempt.usage.prompt_tokens)
        self._of(self._tokens, side, "completion").inc(attempt.usage.completion_tokens)
        self._of(self._attempts, side, self._word("attempt", attempt.error)).inc()
        if attempt.server is not None:  # of which the settings name 33 at most
            self._of(self._server_attempts, attempt.server, self._word("attempt", attempt.error)).inc()
            self._of(self._bill_of, attempt.server).inc(attempt.bill_usd)
        if attempt.hedge is not None:
            self._of(self._hedges, attempt.hedge).inc()
        if attempt.censored:
            self._of(self._censored, side).inc()
        else:
            self._of(self._attempt_ttft, side).observe(attempt.ttft_s)

        if (split := attempt.usage.split) is not None:
            for name, counter in self._split.items():
                counter.inc(split[name])
            for direction, n_bytes in split["bytes"].items():
                self._of(self._split_bytes, direction).inc(n_bytes)

    def _of(self, metric: Metric, *labels: str) -> Metric:
        """Return the child of a metric for values of its labels, which the library checks anew each time."""
        child: Metric | None = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def _word(self, label: str, value: str | None) -> str:
        """Return the value of a label; `other` for all after the first MAX_WORDS."""
        if value is None:
            return "none"
        seen = self._seen.setdefault(label, set())
        if value not in seen:
            if len(seen) >= MAX_WORDS:
                return "other"
            seen.add(value)
        return value


def gaps_by_maker(outcome: Outcome) -> Iterator[tuple[Side, FloatArray]]:
    """Yield the times between an answer's tokens as shown, s, each with the side that made the later token."""
    gaps = np.diff(np.asarray(outcome.arrivals_s, np.float64))
    maker, begin = outcome.winner, 0
    for move in outcome.moves:
        if maker is not None and move.dropped is None:
            end = max(begin, min(move.at - 1, len(gaps)))  # the gap before token i is the one of number i - 1
            yield maker, gaps[begin:end]
            maker, begin = move.target, end
    if maker is not None:
        yield maker, gaps[begin:]


class Gaps(Collector):
    """A histogram by endpoint that takes an array at a time: an answer has thousands of gaps, and the loop waits."""

    def __init__(self, name: str, told: str, bounds: Sequence[float]) -> None:
        self._name, self._told = name, told
        self._bounds = np.array(bounds)
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, endpoint: str, gaps: FloatArray) -> None:
        """Count some values, s."""
        if not len(gaps):
            return
        n = len(self._bounds) + 1
        counts = self._counts.setdefault(endpoint, np.zeros(n, np.int64))
        counts += np.bincount(np.searchsorted(self._bounds, gaps), minlength=n)
        self._sums[endpoint] = self._sums.get(endpoint, 0.0) + float(gaps.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector`."""
        family = HistogramMetricFamily(self._name, self._told, labels=["endpoint"])
        names = [*map(str, self._bounds.tolist()), "+Inf"]
        for endpoint, counts in self._counts.items():
            running = counts.cumsum().tolist()
            family.add_metric([endpoint], list(zip(names, running, strict=True)), self._sums[endpoint])
        yield family

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Return the name alone, for the registry's check that it is not taken."""
        yield HistogramMetricFamily(self._name, self._told, labels=["endpoint"])
