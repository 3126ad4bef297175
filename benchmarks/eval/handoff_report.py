"""The report of What handoffs save, beside the published figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disco_daemon.simulate.figures import align, label, panels, require_plots, save
from disco_daemon.types import Side

from ..formatting import mean, number, unique
from .evaluate import Cell
from .handoff import VARIANTS, savings
from .published import DELAYED, MOST_SAVED, SERVICES
from .report import traces_to_draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "handoff": ("#D55E00", "D", "-"),
    "kept": ("#0072B2", "o", "--"),
    "paused": ("#009E73", "s", "-"),
    "paper": ("#999999", "^", ":"),
}
NOTE = (
    "saved: 1 - cost with / cost without handoffs at the same place, mean, most and least over them; moved: share of\n"
    "the requests; delayed: tokens too late for the reader, per handoff; P99 and gap: the largest; published: most of\n"
    "Fig. 7, at the paper's own prices (`--published-prices`); all of it is simulated, and `paper` nobody can have"
)

Saving = tuple[Cell, float]


def handoff_summary(cells: Sequence[Cell]) -> str:
    """The tables as plain text: by policy and variant, and by service and device."""
    pairs = savings(cells)
    parts = [_variants(side, own) for side in Side if (own := _of(pairs, side))]
    return "\n\n".join([*parts, *_services(pairs)]) or "nothing was evaluated"


def _variants(side: Side, pairs: Sequence[Saving]) -> str:
    head = ("policy", "handoff", "saved %", "most %", "least %", "published %", "moved %", "delayed", "P99", "gap s")
    rows = []
    for policy in unique(c.policy for c, _ in pairs):
        for variant in VARIANTS:
            own = [(c, s) for c, s in pairs if (c.policy, c.handoff) == (policy, variant)]
            shares = [100 * s for _, s in own]
            rows.append([
                policy, variant, *(number(x, 1) for x in (mean(shares), max(shares), min(shares))),
                f"<= {MOST_SAVED[side]}", number(100 * mean(c.handoffs for c, _ in own), 1),
                number(mean(c.delayed_mean for c, _ in own), 2), number(max(c.delayed_p99 for c, _ in own), 1),
                number(max(c.largest_gap_s for c, _ in own), 3),
            ])  # fmt: skip
    counts = [(len({getattr(c, field) for c, _ in pairs}), field) for field in ("trace", "device", "budget")]
    shape = " x ".join(f"{n} {field}{'s' if n > 1 else ''}" for n, field in counts)
    return f"cost saved by handoffs, {side.value}-constrained: {shape}\n{align(head, rows, n_left=2)}\n{NOTE}"


def _services(pairs: Sequence[Saving]) -> list[str]:
    """Saving by service and device, and delayed tokens beside the paper's; none where no service is there."""
    saved, delayed = [], []
    for service, trace in SERVICES.items():
        for side in Side:
            of_service = [(c, s) for c, s in _of(pairs, side) if (c.trace, c.policy) == (trace, _last(pairs))]
            for device in unique(c.device for c, _ in of_service):
                own = [(c, s) for c, s in of_service if c.device == device]
                saved.append([service, side.value, device, *(_mean_and_most(own, v) for v in VARIANTS)])
            if of_service:
                mean_of, p99, gap_s = DELAYED[service, side.value]
                own_delays = [_delayed(of_service, variant) for variant in VARIANTS]
                delayed.append([service, side.value, *own_delays, f"{mean_of:.2f} / {p99:.2f}", f"{gap_s:.3f}"])
    if not saved:
        return []
    table = align(("service", "constrained", "device", *VARIANTS), saved, n_left=3)
    late = align(("service", "constrained", *VARIANTS, "Table 3", "its TBT P99 s"), delayed, n_left=2)
    return [
        f"cost saved by handoffs of {_last(pairs)}, %: mean over the budgets / most\n{table}",
        f"tokens delayed by a handoff of {_last(pairs)}: mean / P99, and as published\n{late}",
    ]


def _delayed(pairs: Sequence[Saving], variant: str) -> str:
    own = [c for c, _ in pairs if c.handoff == variant and c.handoffs > 0]
    worst = max((c.delayed_p99 for c in own), default=math.nan)
    return f"{number(mean(c.delayed_mean for c in own), 2)} / {number(worst, 2)}"


def _mean_and_most(pairs: Sequence[Saving], variant: str) -> str:
    shares = [100 * s for c, s in pairs if c.handoff == variant]
    return f"{number(mean(shares), 1)} / {number(max(shares), 1)}"


def _of(pairs: Sequence[Saving], side: Side) -> list[Saving]:
    return [(c, s) for c, s in pairs if c.constraint == side.value]


def _last(pairs: Sequence[Saving]) -> str:
    return unique(c.policy for c, _ in pairs)[-1]


def draw_handoff(cells: Sequence[Cell], folder: Path) -> Path:
    """Write fig7-handoff.png: what each variant saves against the budget, mean over the devices; return its path.

    The policy is the last one. Raises ConfigError where matplotlib is not installed.
    """
    require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    return save(_figure(cells), folder / "fig7-handoff.png")


def _figure(cells: Sequence[Cell]) -> Figure:
    pairs, services = savings(cells), traces_to_draw(cells)
    sides = [side for side in Side if _of(pairs, side)]
    figure, axes = panels(len(sides), len(services))
    for row, side in zip(axes, sides, strict=True):
        for panel, trace in zip(row, services.values(), strict=True):
            own = [(c, s) for c, s in _of(pairs, side) if (c.trace, c.policy) == (trace, _last(pairs))]
            panel.set(xlim=(0, 1), ylim=(-5, 100))
            panel.axhline(MOST_SAVED[side], color="#000000", lw=0.8, ls=(0, (4, 4)), label="published, up to")
            for variant, (color, marker, line) in STYLES.items():
                points = _by_budget(own, variant)
                panel.plot(
                    *zip(*points, strict=True), color=color, marker=marker, ls=line, ms=3.5, lw=1.2, label=variant
                )
    label(figure, axes, list(services), [f"{side.value}-constrained" for side in sides])
    figure.supxlabel("budget b: share of all prompt tokens that the constrained side may process", fontsize=10)
    figure.supylabel("cost saved by handoffs, %", fontsize=10)
    return figure


def _by_budget(pairs: Sequence[Saving], variant: str) -> list[tuple[float, float]]:
    budgets = sorted({c.budget for c, _ in pairs})
    return [(b, 100 * mean(s for c, s in pairs if (c.budget, c.handoff) == (b, variant))) for b in budgets]
