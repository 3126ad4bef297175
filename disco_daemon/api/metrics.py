"""What Prometheus sees: counters and histograms over finished answers, in a registry of their own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..types import Attempt, Handoff, Outcome, Reading, Side

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MAX_WORDS = 32  # values of one label; a server chooses its finish reasons, and each one is a time series for ever

_TTFT_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)
_GAP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.21, 0.23, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 15.0)  # 1/4.8 s and 20 ms
_QOE = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_HANDOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


class Metrics:
    """All metrics of one daemon. Called from the event loop's thread only; labels are bounded."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._seen: dict[str, set[str]] = {}
        self._in_flight = Gauge("disco_answers_in_flight", "Answers being made now.", registry=registry)
        self._answers = Counter("disco_answers", "Finished answers.", ("winner", "finish", "error"), registry=registry)
        self._ttft = self._by_winner("disco_ttft_seconds", "Time to the reader's first token.", _TTFT_S)
        self._gap = self._by_winner("disco_largest_gap_seconds", "Longest wait between two tokens.", _GAP_S)
        self._tbt = self._by_winner("disco_tbt_p99_seconds", "P99 of an answer's times between tokens.", _GAP_S)
        self._qoe = self._by_winner("disco_qoe_ratio", "Quality of experience, Andes' Eq. 1.", _QOE)
        self._stalled = Counter("disco_stalled_tokens", "Tokens the reader had to wait for.", registry=registry)
        self._tokens = Counter(
            "disco_tokens",
            "Tokens by side: delivered to readers; prompt and completion as processed, losers too.",
            ("side", "kind"),
            registry=registry,
        )
        self._handoffs = Counter(
            "disco_handoffs", "Moves of running answers.", ("direction", "reason", "result"), registry=registry
        )
        self._handoff_s = Histogram(
            "disco_handoff_seconds",
            "From the decision to the target's first joined token.",
            ("direction",),
            buckets=_HANDOFF_S,
            registry=registry,
        )
        self._cost = Counter("disco_cost_usd", "Cost of all attempts, $.", registry=registry)
        self._bill = Counter("disco_server_usd", "What servers bill for all attempts, $.", registry=registry)
        self._energy = Counter("disco_energy_joules", "Energy this machine spent on answers, J.", registry=registry)

    def observe(self, outcome: Outcome) -> None:
        """Count one finished answer, however it ended."""
        winner = "none" if outcome.winner is None else outcome.winner.value
        finish, error = self._word("finish", outcome.finish_reason), self._word("error", outcome.error)
        self._answers.labels(winner, finish, error).inc()
        if outcome.ttft_s is not None:
            self._ttft.labels(winner).observe(outcome.ttft_s)
        if outcome.reading is not None:
            self._read(outcome.reading, winner)
        for move in outcome.moves:
            self._moved(move)
        self._processed(outcome.tokens, outcome.attempts)
        self._cost.inc(outcome.cost_usd)
        self._bill.inc(outcome.server_usd)
        self._energy.inc(outcome.energy_j)

    def render(self, in_flight: int) -> bytes:
        """Everything in Prometheus' text format; `in_flight` answers are running."""
        self._in_flight.set(in_flight)
        return generate_latest(self._registry)

    def _by_winner(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, told, ("winner",), buckets=buckets, registry=self._registry)

    def _read(self, reading: Reading, winner: str) -> None:
        self._qoe.labels(winner).observe(reading.qoe)
        self._gap.labels(winner).observe(reading.largest_gap_s)
        self._tbt.labels(winner).observe(reading.tbt_p99_s)
        self._stalled.inc(reading.stalled)

    def _moved(self, move: Handoff) -> None:
        direction = f"to_{move.target.value}"
        result = "done" if move.dropped is None else self._word("result", move.dropped)
        self._handoffs.labels(direction, self._word("reason", move.reason), result).inc()
        if move.dropped is None:
            self._handoff_s.labels(direction).observe(move.took_s)

    def _processed(self, delivered: Mapping[Side, int], attempts: tuple[Attempt, ...]) -> None:
        for side, n_tokens in delivered.items():
            self._tokens.labels(side.value, "delivered").inc(n_tokens)
        for attempt in attempts:
            self._tokens.labels(attempt.side.value, "prompt").inc(attempt.usage.prompt_tokens)
            self._tokens.labels(attempt.side.value, "completion").inc(attempt.usage.completion_tokens)

    def _word(self, label: str, value: str | None) -> str:
        """The value of a label, `other` for all after the first MAX_WORDS."""
        if value is None:
            return "none"
        seen = self._seen.setdefault(label, set())
        if value not in seen:
            if len(seen) >= MAX_WORDS:
                return "other"
            seen.add(value)
        return value
