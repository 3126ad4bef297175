"""What the split benchmark found, in the words that other programs read, and as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from disco_daemon.exits.quality import rouge_l

NOT_MEASURED = "-"


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """One answer of one deployment. Times in s; `partner_s` and `edge_s` is what that engine computed.

    `first_s` is when its first piece came, None where nobody listened for it.
    Of `partner_rows`, `judged_rows` went through the output head.
    `round_trips` counts verdicts, `drafted` and `accepted` drafts; None where the deployment has none or does not say.
    """

    text: str
    n_tokens: int
    took_s: float
    edge_s: float | None = None
    partner_s: float | None = None
    round_trips: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    edge_rows: int | None = None
    partner_rows: int | None = None
    judged_rows: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    first_s: float | None = None

    @property
    def token_s(self) -> float | None:
        """Return what a token took behind the first one, s; None where that is not known."""
        if self.first_s is None or self.n_tokens < 2:
            return None
        return (self.took_s - self.first_s) / (self.n_tokens - 1)


@dataclass(frozen=True, slots=True)
class Deployed:
    """One row of the table: a deployment on one kind of data. The names are those of the JSON document.

    `request_rate` and `equal` are shares from 0 to 1, `wasted_drafts` is per token; None: not measured.
    """

    data: str
    name: str
    theta: float | None
    cut: int | None
    codec: str | None
    answers: int
    tokens: int
    total_s: float | None
    edge_s: float | None
    partner_s: float | None
    comm_s: float | None
    request_rate: float | None
    mb_up: float
    mb_down: float
    rouge_l: float
    equal: float
    tokens_per_round_trip: float | None
    wasted_drafts: float | None


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum of values, all of which are there; else None."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def summarize(
    data: str,
    name: str,
    answers: Sequence[SplitAnswer],
    references: Sequence[str],
    *,
    theta: float | None = None,
    cut: int | None = None,
    codec: str | None = None,
) -> Deployed:
    """Sum up the answers to the prompts of one kind, beside the whole model's. Raises ValueError for none of them."""
    if not answers or len(answers) != len(references):
        msg = f"{len(answers)} answers beside {len(references)} of the whole model"
        raise ValueError(msg)
    tokens = sum(answer.n_tokens for answer in answers)
    total_s = sum(answer.took_s for answer in answers)
    edge_s, partner_s = _sum([a.edge_s for a in answers]), _sum([a.partner_s for a in answers])
    trips = _sum([a.round_trips for a in answers])
    drafted, accepted = _sum([a.drafted for a in answers]), _sum([a.accepted for a in answers])
    busy = None if partner_s is None else partner_s + (edge_s or 0.0)
    return Deployed(
        data=data, name=name, theta=theta, cut=cut, codec=codec, answers=len(answers), tokens=tokens,
        total_s=total_s, edge_s=edge_s, partner_s=partner_s,
        comm_s=None if busy is None else max(0.0, total_s - busy),
        request_rate=None if trips is None or not tokens else trips / tokens,
        mb_up=sum(a.bytes_up for a in answers) / 1e6, mb_down=sum(a.bytes_down for a in answers) / 1e6,
        rouge_l=sum(rouge_l(a.text, b) for a, b in zip(answers, references, strict=True)) / len(answers),
        equal=sum(a.text == b for a, b in zip(answers, references, strict=True)) / len(answers),
        tokens_per_round_trip=tokens / trips if trips else None,
        wasted_drafts=None if drafted is None or accepted is None or not tokens else (drafted - accepted) / tokens,
    )  # fmt: skip


def document(
    model: str, n_layer: int, cut: int, head: str | None, link: Mapping[str, float], rows: Sequence[Deployed]
) -> dict[str, Any]:
    """Return the JSON document; parts that were not measured are empty."""
    return {
        "model": model,
        "n_layer": n_layer,
        "cut": cut,
        "head": head,
        "link": dict(link),
        "deployments": [asdict(row) for row in rows],
        "edges": [],
        "ttft": None,
        "cuts": None,
        "added_ms_p50": None,
        "loop_lag_p99_ms": None,
        "codecs": [],
        "shares": [],
        "plan": None,
        "ablations": [],
    }


_COLUMNS = (
    ("data", "data", -9, ""), ("deployment", "label", -14, ""), ("cut", "cut", 4, "d"), ("codec", "codec", 6, ""),
    ("total s", "total_s", 9, ".1f"), ("edge s", "edge_s", 8, ".1f"), ("partner s", "partner_s", 10, ".1f"),
    ("link s", "comm_s", 8, ".1f"), ("asked", "request_rate", 7, ".2f"), ("MB up", "mb_up", 9, ".3f"),
    ("MB down", "mb_down", 9, ".3f"), ("ROUGE-L", "rouge_l", 8, ".3f"), ("equal", "equal", 7, ".2f"),
    ("tok/trip", "tokens_per_round_trip", 9, ".2f"), ("wasted", "wasted_drafts", 7, ".2f"),
)  # fmt: skip


def table(figures: Mapping[str, Any]) -> str:
    """Return the deployments as a table, like the paper's Table 2, with what was measured under it."""
    lines = ["".join(cell(title, width, "") for title, _, width, _ in _COLUMNS).rstrip()]
    for row in figures["deployments"]:
        label = row["name"] + (f" {row['theta']:g}" if row["theta"] is not None else "")
        shown = {**row, "label": label}
        lines.append("".join(cell(shown[key], width, kind) for _, key, width, kind in _COLUMNS).rstrip())
    link = figures["link"]
    counts = {(row["answers"], row["tokens"]) for row in figures["deployments"]}
    where = f"round trip {link['rtt_ms']:g} ms, {link['mbit_s']:g} Mbit/s"
    what = "; ".join(f"{answers} answers of {tokens} tokens" for answers, tokens in sorted(counts))
    lines.append(f"{figures['model']}, {figures['n_layer']} layers; {where}; {what}")
    return "\n".join(lines)


def cell(value: object, width: int, kind: str) -> str:
    """Return a value in a column, at its left end if the width is negative."""
    text = NOT_MEASURED if value is None else format(value, kind)
    return f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"
