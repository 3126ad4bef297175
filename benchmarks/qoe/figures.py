"""Figures of one point of `benchmarks.qoe` from the answers of its readers, and what andes gains over all points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.streamed import StreamedAnswer
from disco_daemon.delivery.qoe import qoe

from .simulation import HIGH_QOE, rate_at, stalls
from .steady import longest_stall_s

ANDES, FCFS, PEER = "andes", "fcfs", "llama-server"
PAPER = "andes-paper"  # the paper's rule, under which any begun answer may stand still
PACE_TPS, EXPECTED_TTFT_S = 4.8, 1.0  # of every reader: text, as in the paper

Curve = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of a request that was `due` (s of `time.perf_counter`); `failed` says why nothing or not all did."""

    due: float
    heard: StreamedAnswer
    failed: str | None = None

    @property
    def qoe(self) -> float:
        """The reader's, in [0, 1]; 0 if it failed."""
        return 0.0 if self.failed else qoe(token_times(self.heard) - self.due, EXPECTED_TTFT_S, PACE_TPS)

    @property
    def stall_s(self) -> float:
        """The longest time that its reader stood still, s."""
        return longest_stall_s(token_times(self.heard), PACE_TPS)

    @property
    def speed_tps(self) -> float | None:
        """How fast it came behind the first token, token/s; None for fewer than two."""
        times = token_times(self.heard)
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    @property
    def n_tokens(self) -> int:
        """Tokens of a whole answer, as the server counts them; of one that broke off the pieces that came."""
        return len(self.heard.times) if self.failed else self.heard.n_tokens


def token_times(heard: StreamedAnswer) -> NDArray[np.float64]:
    """Return the arrival of each token of a whole answer, s; pieces with several tokens have equal shares of them."""
    n = max(1, heard.n_tokens)
    return np.array(heard.times)[np.arange(n) * len(heard.times) // n]


def rate_between(heard: Sequence[StreamedAnswer], begin: float, end: float) -> float:
    """Answers/s in (begin, end], s; one that was under way before or after counts by the share of its tokens."""
    return sum(h.n_between(begin, end) / h.n_tokens for h in heard if h.n_tokens) / (end - begin)


def measure(served: Sequence[Served]) -> Curve:
    """Return the figures of a server at one load. Raises BenchError if no answer came at all.

    "throughput_tps" is from the first request to the end of the last answer; "arriving_tps" up to the last request, so
    without the end, when only few answers still run (0 of a single request). TTFTs, speeds and stalls are of
    the answers that did not fail; such have a QoE of 0 in "qoe_mean", and none in "qoe_whole".
    """
    whole = [s for s in served if s.failed is None]
    reasons = Counter(s.failed for s in served if s.failed)
    if not whole:
        msg = f"all {len(served)} answers failed: {reasons.most_common(1)[0][0]}"
        raise BenchError(msg)
    qoes, ttfts = np.array([s.qoe for s in served]), np.array([s.heard.first - s.due for s in whole])
    begin, last = min(s.due for s in served), max(s.due for s in served)
    arriving = sum(s.heard.n_between(begin, last) for s in whole)
    speeds = [speed for s in whole if (speed := s.speed_tps) is not None] or [float("nan")]
    return {
        "qoe_mean": float(qoes.mean()),
        "qoe_whole": float(np.mean([s.qoe for s in whole])),
        **{f"tds_p{q}": float(np.percentile(speeds, q)) for q in (10, 50, 90)},
        **stalls(np.array([s.stall_s for s in whole])),
        "qoe_p10": float(np.percentile(qoes, 10)),
        "ttft_p50_s": float(np.percentile(ttfts, 50)),
        "ttft_p90_s": float(np.percentile(ttfts, 90)),
        "throughput_tps": sum(s.n_tokens for s in served) / (max(s.heard.ended for s in whole) - begin),
        "arriving_tps": arriving / (last - begin) if last > begin else 0.0,
        "n": len(served),
        "failed": len(served) - len(whole),
        "why": [f"{why[:200]} ({n})" for why, n in reasons.most_common(3)],
        "ended_early": sum(s.heard.finish != "length" for s in whole),
        "prompt_tokens_mean": float(np.mean([s.heard.prompt["prompt_tokens"] for s in whole])),
        "answer_tokens_mean": float(np.mean([s.n_tokens for s in whole])),
        "sent_late_s": max(s.heard.sent - s.due for s in served),  # the client's own fault, in the QoE of all alike
    }


# --- over all points --------------------------------------------------------------------------------------------------


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return what andes gains; None where a server was not measured.

    Gains in QoE, losses of throughput, preemptions and lag are the largest of all points (the lag: of andes at loads
    from 1 on); rates are those of the first kind of arrivals. "by_arrivals" has what `against` finds for each.
    """
    kinds = dict.fromkeys(c["arrivals"] for c in curves)
    parts = {kind: [c for c in curves if c["arrivals"] == kind] for kind in kinds}
    found = {kind: {base: against(part, base) for base in (FCFS, PEER)} for kind, part in parts.items()}
    fcfs, peer = ([gain[base] for gain in found.values()] for base in (FCFS, PEER))
    ours = [c for c in curves if c["scheduler"] == ANDES]
    return {
        "qoe_gain_max": _largest(g["qoe_gain_max"] for g in fcfs),
        "qoe_gain_max_peer": _largest(g["qoe_gain_max"] for g in peer),
        "rate_gain": fcfs[0]["rate_gain"],
        "rate_gain_peer": peer[0]["rate_gain"],
        "throughput_loss": _largest(g["throughput_loss"] for g in fcfs),
        "arriving_loss": _largest(g["arriving_loss"] for g in fcfs),
        "preemptions_per_request": _largest(c["preemptions_per_request"] for c in ours),
        "loop_lag_ms_p99": _largest(c["loop_lag_ms_p99"] for c in ours if c["load"] >= 1),
        "stalled_of_paper": _stalled_of_paper(curves),
        "failed": sum(c["failed"] for c in curves),
        "by_arrivals": found,
    }


def _stalled_of_paper(curves: Sequence[Curve]) -> float | None:
    """Return how many stood still for over 10 s, as a share of those with the paper's rule: the largest of all points.

    None where either was not measured, or nobody stood still with the paper's.
    """
    ours, paper = (
        {(c["arrivals"], c["load"]): c["stalled_10s"] for c in curves if c["scheduler"] == name}
        for name in (ANDES, PAPER)
    )
    return _largest(ours[point] / stalled for point, stalled in paper.items() if point in ours and stalled > 0)


def against(curves: Sequence[Curve], base: str) -> dict[str, Any]:
    """Andes against another server, of curves with one kind of arrivals; None for all if either was not measured.

    qoe_gain_max: the largest ratio of mean QoEs at a load. rate_gain: of the rates up to which the mean QoE is at least
    HIGH_QOE, between points in a straight line; `rate_gain_is_bound` where one of the two curves does not cross it, so
    that its first or last rate stands for it. Losses: the largest share of token/s lost at a load, at least 0.
    """
    ours, theirs = (sorted((c for c in curves if c["scheduler"] == s), key=lambda c: c["load"]) for s in (ANDES, base))
    if not ours or not theirs:
        names = ("qoe_gain_max", "rate_gain", "rate_gain_is_bound", "throughput_loss", "arriving_loss")
        return dict.fromkeys(names)
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "qoe_gain_max": max(a["qoe_mean"] / b["qoe_mean"] for a, b in pairs),
        "rate_gain": rate_at(ours, HIGH_QOE) / rate_at(theirs, HIGH_QOE),
        "rate_gain_is_bound": not (_crosses(ours) and _crosses(theirs)),
        "throughput_loss": _loss(pairs, "throughput_tps"),
        "arriving_loss": _loss(pairs, "arriving_tps"),
    }


def _loss(pairs: Sequence[tuple[Curve, Curve]], key: str) -> float:
    """The largest share by which the first of a pair is below the second; 0 if it never is."""
    return float(max([1 - a[key] / b[key] for a, b in pairs if b[key] > 0] + [0.0]))


def _crosses(curve: Sequence[Curve]) -> bool:
    """Whether a mean QoE of HIGH_QOE lies between two of its points."""
    return bool(curve[0]["qoe_mean"] >= HIGH_QOE > min(c["qoe_mean"] for c in curve))


def _largest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


# --- for people ------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    """Every point, then what andes gains."""
    head = (
        "arrivals", "load", "req/s", "server", "QoE", "p10", "TTFT p50", "p90", "token/s", "failed", "TDS p10",
        ">10 s %", "stall p99",
    )  # fmt: skip
    lines = ["{:<9}{:>5}{:>7}  {:<13}{:>6}{:>7}{:>10}{:>8}{:>9}{:>8}{:>9}{:>9}{:>10}".format(*head)]
    for c in figures["curves"]:
        point = f"{c['arrivals']:<9}{c['load']:>5g}{c['rate_rps']:>7.2f}  {c['scheduler']:<13}"
        times = f"{c['ttft_p50_s']:>10.2f}{c['ttft_p90_s']:>8.2f}{c['throughput_tps']:>9.1f}{c['failed']:>8}"
        stood = f"{c['tds_p10']:>9.2f}{100 * c['stalled_10s']:>9.1f}{c['stall_p99_s']:>10.1f}"
        lines.append(f"{point}{c['qoe_mean']:>6.3f}{c['qoe_p10']:>7.3f}{times}{stood}")
    rows = (
        ("mean QoE, largest gain over fcfs", "qoe_gain_max", "x"),
        ("mean QoE, largest gain over llama-server", "qoe_gain_max_peer", "x"),
        (f"rate at a mean QoE of {HIGH_QOE:g}, over fcfs", "rate_gain", "x"),
        (f"rate at a mean QoE of {HIGH_QOE:g}, over llama-server", "rate_gain_peer", "x"),
        ("share of throughput lost to fcfs", "throughput_loss", ""),
        ("stalled over 10 s, of those by the paper's rule", "stalled_of_paper", "x"),
        ("preemptions a request", "preemptions_per_request", ""),
        ("lag of the daemon's loop, p99", "loop_lag_ms_p99", "ms"),
    )
    lines += [f"{label:<46}{_as_text(figures[key]):>10} {unit}".rstrip() for label, key, unit in rows]
    if any(gain["rate_gain_is_bound"] for gain in next(iter(figures["by_arrivals"].values())).values()):
        lines.append(f"A rate is the first or last measured where the mean QoE does not cross {HIGH_QOE:g}.")
    host, peer = figures["host"], figures["peer"]
    beside = f"; {peer['name']} {peer['version']}" if peer else ""
    lines.append(f"{figures['model']}, {figures['threads']} threads, {figures['n_cells']} KV cells{beside}")
    lines.append(f"capacity {figures['capacity_rps']:.2f} requests/s, Python {host['python']}, {host['cpus']} CPUs")
    return "\n".join(lines)


def _as_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
