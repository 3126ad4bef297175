"""What the split is to show, beside what the benchmark has found. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST, LEAST = "<=", ">="
_COMPARE: dict[str, Callable[[float, float], bool]] = {MOST: operator.le, LEAST: operator.ge}
BYTES_AGAINST_NAIVE = {"f32": 40.0, "bf16": 80.0, "int8": 117.0}
AGREEMENT = 0.96  # a token, of rounded rows
REQUESTS, REQUESTS_HALF = 0.45, 0.65  # a token, with the cut at 80 % of the layers, and at half
WASTED = 0.6  # drafts a token
PARTNER_SHARE = 0.30  # of the whole model's processor time, at 80 %
ROUGE_CONFIDENT, ROUGE_ALONE = 0.95, 0.35
GAP_S, BACK_S = 1.5, 1.0
ADDED_MS = 1.0
LOOP_LAG_MS = 5.0  # P99
GROWTH = 0.5  # of the cloud's
PLAN_ERROR = 0.15  # of the time for a token; the median over cuts and kinds of data


@dataclass(frozen=True, slots=True)
class AskedFigure:
    """One figure, and the bound that it is to keep."""

    what: str
    found: float
    sense: str
    bound: float

    @property
    def is_met(self) -> bool:
        return _COMPARE[self.sense](self.found, self.bound)


def asked_figures(figures: Mapping[str, Any]) -> list[AskedFigure]:
    """Return all figures of a document for which something is asked, in order."""
    return [*_of_deployments(figures), *_of_codecs(figures), *_of_the_rest(figures)]


def _of_deployments(figures: Mapping[str, Any]) -> Iterator[AskedFigure]:
    cloud = {row["data"]: row for row in figures["deployments"] if row["name"] == "cloud"}
    for row in figures["deployments"]:
        data, name = row["data"], row["name"]
        if name == "exact":
            where = f"{data}, exact, cut {row['cut']}"
            is_half = row["cut"] <= 0.6 * figures["n_layer"]
            yield AskedFigure(f"{where}: equal answers", row["equal"], LEAST, 1.0)
            if figures["head"] and row["request_rate"] is not None:
                bound = REQUESTS_HALF if is_half else REQUESTS
                yield AskedFigure(f"{where}: requests a token", row["request_rate"], MOST, bound)
                yield AskedFigure(f"{where}: wasted drafts a token", row["wasted_drafts"], MOST, WASTED)
            if not is_half and row["partner_s"] and cloud[data]["partner_s"]:
                share = row["partner_s"] / cloud[data]["partner_s"]
                yield AskedFigure(f"{where}: partner's compute", share, MOST, PARTNER_SHARE)
        elif name == "confident" and row["theta"] == 0.9:
            yield AskedFigure(f"{data}, confident 0.9: ROUGE-L", row["rouge_l"], LEAST, ROUGE_CONFIDENT)
        elif name == "draft":
            yield AskedFigure(f"{data}, draft: equal answers", row["equal"], LEAST, 1.0)
        elif name == "alone" and row["cut"]:  # at cut 0 it is a small model's own answer, of which nothing is asked
            yield AskedFigure(f"{data}, alone: ROUGE-L", row["rouge_l"], LEAST, ROUGE_ALONE)


def _of_codecs(figures: Mapping[str, Any]) -> Iterator[AskedFigure]:
    for row in figures["codecs"]:
        where = f"{row['data']}, {row['codec']}, cut {row['cut']}"
        bound = BYTES_AGAINST_NAIVE[row["codec"]]
        yield AskedFigure(f"{where}: naive sends so many times more", row["naive_times"], LEAST, bound)
        if row["codec"] != "f32":
            yield AskedFigure(f"{where}: agreement a token", row["agreement"], LEAST, AGREEMENT)


def _of_the_rest(figures: Mapping[str, Any]) -> Iterator[AskedFigure]:
    if cuts := figures["cuts"]:
        for key in ("lost", "changed", "doubled"):
            yield AskedFigure(f"{cuts['n']} cuts: characters {key}", cuts[key], MOST, 0)
        yield AskedFigure(f"{cuts['n']} cuts: worst gap, s", cuts["worst_gap_s"], MOST, GAP_S)
        if cuts["back_s"] is not None:
            yield AskedFigure(f"{cuts['n']} cuts: exact again after, s", cuts["back_s"], MOST, BACK_S)
    if (added := figures["added_ms_p50"]) is not None:
        yield AskedFigure("added by the relays, P50, ms", added, MOST, ADDED_MS)
    if plan := figures["plan"]:
        yield AskedFigure("plan's time a token, median error", plan["error_p50"], MOST, PLAN_ERROR)
    for name, late_ms in (figures["loop_lag_p99_ms"] or {}).items():
        yield AskedFigure(f"{name}'s event loop while prompts go up, P99, ms", late_ms, MOST, LOOP_LAG_MS)
    edges = {row["n"]: row for row in figures["edges"]}
    if {1, 5} <= edges.keys():
        cloud = edges[5]["cloud_s"] - edges[1]["cloud_s"]
        bound = GROWTH * cloud
        yield AskedFigure(
            "1 to 5 edges: exact takes longer by, s", edges[5]["exact_s"] - edges[1]["exact_s"], MOST, bound
        )
    for n, row in edges.items():
        if n >= 3:
            yield AskedFigure(f"{n} edges: exact, s", row["exact_s"], MOST, row["cloud_s"])


def asked_table(figures: Mapping[str, Any]) -> str:
    """Return the figures beside what is asked; what is not met has a mark."""
    found = asked_figures(figures)
    width = max((len(one.what) for one in found), default=0)
    lines = [f"{'found':>{width + 11}}  asked"]
    for one in found:
        mark = "" if one.is_met else "  NOT MET"
        lines.append(f"{one.what:<{width}} {one.found:>10.3f}  {one.sense} {one.bound:g}{mark}")
    return "\n".join(lines)
