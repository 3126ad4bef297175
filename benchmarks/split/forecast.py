"""What `disco split plan` says of a token, beside what exact answers took. Pure.

The plan is fed as `disco split plan` and the join feed it: the whole model's times for a token and for a row of a
prompt, the link's round trip and rate, and of the exit the bytes and how often it agreed with the whole model on text
kept apart. The times are measured here, by the answers of `cloud` to the same prompts; they count for both machines,
which have a thread of the same processor each. Nothing of a split answer goes in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from disco_daemon.link.relay.handshake import TheCuts
from disco_daemon.machines.split.cut_plan import LinkSpeed, PlanInput, PlannedCut, plan_cuts

from .run import EXACT, AskedPrompt, by_data
from .tables import SplitAnswer

BYTES_A_MBIT = 1e6 / 8
LONG_PROMPT = 200  # tokens; the template's, which are cached, are a tenth of them


@dataclass(frozen=True, slots=True)
class CheckedCut:
    """A cut, what is planned and what was measured of it, medians over answers. The names are the JSON document's.

    `whole_token_s` and `whole_row_s` are what the plan was fed (the second None: not measured), and `chance` how often
    it counts with a right guess. `error` is the plan's, relative to what was measured; above 0 it promised too slow an
    answer.
    """

    data: str
    cut: int
    rtt_ms: float
    mbit_s: float
    answers: int
    whole_token_s: float
    whole_row_s: float | None
    chance: float
    planned_token_s: float
    measured_token_s: float
    planned_tokens_per_round_trip: float
    measured_tokens_per_round_trip: float | None
    error: float


def check_plan(
    asked: Sequence[AskedPrompt], cuts: TheCuts, cut: int, where: str, link: tuple[float, float]
) -> list[CheckedCut]:
    """Return a row for each kind of data of which exact answers are kept as of `where`; `link` as of `SplitSetup`.

    `cuts` has the chances of the exits. Kinds whose answers have one token only are left out.
    """
    found, row_s = list[CheckedCut](), prompt_row_s(asked, link[0])
    for data, ones in by_data(asked).items():
        answers = [(one.cloud, one.answers[key]) for one in ones if (key := f"{where} {EXACT}") in one.answers]
        whole_s, split_s = (_token_s([pair[side] for pair in answers]) for side in (0, 1))
        if whole_s is None or split_s is None:
            continue
        planned = plan_one(cuts, cut, (whole_s, row_s or 0.0), link)
        found.append(
            CheckedCut(
                data, cut, 1e3 * link[0], link[1], len(answers), whole_s, row_s, chance_at(cuts, cut),
                planned.token_s, split_s, planned.tokens_per_round_trip, _per_trip([split for _, split in answers]),
                planned.token_s / split_s - 1,
            )
        )  # fmt: skip
    return found


def prompt_row_s(asked: Sequence[AskedPrompt], rtt_s: float) -> float | None:
    """Return what the whole model takes for a row of a prompt, s: the median over prompts that are long enough.

    None if there is none: of a short one too much is the template's, which is cached.
    """
    took = [
        (one.cloud.first_s - rtt_s) / one.n_prompt
        for one in asked
        if one.cloud.first_s is not None and one.n_prompt >= LONG_PROMPT
    ]
    return max(0.0, median(took)) if took else None


def plan_one(cuts: TheCuts, cut: int, whole_s: tuple[float, float], link: tuple[float, float]) -> PlannedCut:
    """Return the plan of one cut for two machines as fast as each other, with memory enough.

    `whole_s` is what the whole model takes for a token and for a row of a prompt, s; 0 = not measured.
    """
    speed = LinkSpeed(link[0], link[1] * BYTES_A_MBIT)
    given = PlanInput(whole_s[0], whole_s[0], speed, math.inf, math.inf, n_cells=0, partner_row_s=whole_s[1])
    plan = plan_cuts(cuts, given)
    return next(one for one in plan.cuts if one.layer == cut)


def chance_at(cuts: TheCuts, cut: int) -> float:
    """Return how often the exit behind a cut is right, as the plan counts with; 0 without one."""
    return next(one.chance for one in cuts.cuts if one.layer == cut)


def plan_document(rows: Sequence[CheckedCut]) -> dict[str, Any] | None:
    """Return the part of the document; None if nothing was measured. `error_p50` is the median of the errors' sizes."""
    if not rows:
        return None
    return {"error_p50": median(abs(row.error) for row in rows), "rows": [asdict(row) for row in rows]}


def plan_lines(found: dict[str, Any] | None) -> list[str]:
    """Return what is printed of the plan."""
    if found is None:
        return []
    return [
        f"{row['data']}, cut {row['cut']}: planned {1e3 * row['planned_token_s']:.1f} ms a token and "
        f"{row['planned_tokens_per_round_trip']:.2f} a round trip, measured {1e3 * row['measured_token_s']:.1f} ms"
        + ("" if (trip := row["measured_tokens_per_round_trip"]) is None else f" and {trip:.2f}")
        + f" ({row['error']:+.1%}); the whole model took {1e3 * row['whole_token_s']:.1f} ms"
        for row in found["rows"]
    ]


def _token_s(answers: Sequence[SplitAnswer]) -> float | None:
    known = [answer.token_s for answer in answers if answer.token_s is not None]
    return median(known) if known else None


def _per_trip(answers: Sequence[SplitAnswer]) -> float | None:
    trips = [answer.round_trips for answer in answers if answer.round_trips]
    return sum(answer.n_tokens for answer in answers) / sum(trips) if len(trips) == len(answers) else None
