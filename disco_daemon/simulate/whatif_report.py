"""The report of `disco eval --history`: a table with the setting in force marked, and the Pareto pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..money.prices import J_PER_WH
from ..plain import count_of
from ..types import Side
from .figures import align, label, panels, require_plots, save
from .whatif import WhatIf, WhatIfPoint, WhatIfSetting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 64, 12  # of a picture in the terminal, characters
LETTERS = {Side.DEVICE.value: "d", Side.SERVER.value: "s"}  # by the scarcer side
NOW, SEVERAL = "@", "+"
STYLES = {Side.DEVICE.value: ("#0072B2", "o"), Side.SERVER.value: ("#E69F00", "^")}
COSTS = (("server_usd", "usd", "server's bill, $"), ("device_wh", "wh", "energy of this machine, Wh"))
SIZE = (5.2, 3.4)  # of a figure, inches
GUESSED = 0.5  # share of drawn server TTFTs from which a reader should know


@dataclass(frozen=True, slots=True)
class Findings:
    """Cells of one history by policy, rate and budget; `now` is the setting in force, `policy` its policy."""

    model: WhatIf
    cells: tuple[WhatIfPoint, ...]
    now: WhatIfSetting
    policy: str

    def in_force(self, cell: WhatIfPoint) -> bool:
        """Whether the cell is of the setting in force."""
        return (cell.policy, cell.usd_per_kwh, cell.budget) == (self.policy, self.now.usd_per_kwh, self.now.budget)


def pareto(cells: Sequence[WhatIfPoint]) -> list[bool]:
    """Return a mask of the cells that no other one beats, by being as good in all three figures and better in one."""
    points = np.array([[c.mean_ttft_s, c.server_usd, c.device_wh] for c in cells])
    no_worse = np.all(points[:, None] <= points, axis=2)
    better = np.any(points[:, None] < points, axis=2)
    beaten = np.any(no_worse & better, axis=0)
    return [not b for b in beaten]


def as_json(findings: Findings) -> dict[str, Any]:
    """Return all findings as plain JSON: TTFTs in s, sums over all requests in $ and Wh."""
    model, known = findings.model, findings.model.recorded
    marks = pareto(findings.cells)
    return {
        "requests": known.n,
        "left_out": known.n_left_out,
        "days": known.days,
        "server_ttfts_drawn": known.n_drawn,
        "device": asdict(known.phone),
        "threshold_usd_per_kwh": model.threshold_usd_per_kwh if np.isfinite(model.threshold_usd_per_kwh) else None,
        "in_force": asdict(findings.now) | {"policy": findings.policy},
        "recorded": recorded_outcome(model),
        "notes": notes(model),
        "cells": [
            asdict(cell) | {"cost_usd": cell.cost_usd, "in_force": findings.in_force(cell), "pareto": best}
            for cell, best in zip(findings.cells, marks, strict=True)
        ],
    }


def recorded_outcome(model: WhatIf) -> dict[str, float]:
    """Return the recorded outcome of the same requests; the server's tokens at today's prices."""
    facts, prices = model.recorded.facts, model.terms.prices
    prompt, answer, n_asked = facts.bill
    return {
        "mean_ttft_s": float(facts.ttft_s.mean()),
        "p99_ttft_s": float(np.quantile(facts.ttft_s, 0.99)),
        "server_usd": (prompt * prices.server_input_usd_per_mtok + answer * prices.server_output_usd_per_mtok) / 1e6,
        "device_wh": float(facts.energy_j.sum()) / J_PER_WH,
        "server_asked": n_asked / model.recorded.n,
    }


def notes(model: WhatIf) -> list[str]:
    """List what a reader of the figures should know."""
    known, found = model.recorded, []
    if model.terms.scarcer is not None:
        found.append(f"policy.scarcer = {model.terms.scarcer.value}: the exchange rate does not change who is scarce")
    if known.n_drawn > GUESSED * known.n:
        share = 100 * known.n_drawn / known.n
        found.append(f"the server's TTFT was not seen in {share:.0f} % of the requests: drawn from those that were")
    if not known.n_device_samples:
        found.append("the device was never seen to answer: its speed is a guess")
    if model.terms.prices.device_watts == 0:
        found.append("the device's power is not on record and device.watts is not set: its energy counts as nothing")
    if not model.terms.stops_billing:
        found.append("closing a stream is not known to end the server's bill: whoever is asked bills the whole answer")
    if known.n_left_out:
        left = count_of(known.n_left_out, "request")
        found.append(f"left out: {left} without an answer, or where the server failed")
    return found


# --- text ---------------------------------------------------------------------------------------------------------


def summary(findings: Findings) -> str:
    """The table and the pictures as plain text."""
    model, known = findings.model, findings.model.recorded
    head = (
        f"{count_of(known.n, 'request')} of {_span(known.days)} under other settings; $ and Wh are sums over all\n"
        f"the device is the scarcer side above {model.threshold_usd_per_kwh:.4g} $/kWh"
    )
    pictures = [picture(findings, field, title) for field, _, title in COSTS]
    return "\n\n".join([head, _table(findings), *pictures, *(["\n".join(notes(model))] if notes(model) else [])])


def _span(days: float) -> str:
    """Return a time in the unit that has digits."""
    if days >= 2:
        return f"{days:.0f} days"
    hours = 24 * days
    return f"{hours:.0f} hours" if hours >= 2 else count_of(max(1, round(60 * hours)), "minute")


def _table(findings: Findings) -> str:
    """One row per setting; rates that make no difference share one."""
    head = ("policy", "$/kWh", "b", "scarcer", "mean s", "P99 s", "$", "Wh", "used %", "device %", "moved %", "")
    best = dict(zip(findings.cells, pareto(findings.cells), strict=True))
    was = recorded_outcome(findings.model)
    rows = [["as it was", "", "", "", *_figures(was["mean_ttft_s"], was["p99_ttft_s"]), f"{was['server_usd']:.4f}"]]
    rows[0] += [f"{was['device_wh']:.2f}", "", "", "", ""]
    for group in _groups(findings.cells):
        rates = _rates(group)
        for cells in zip(*group, strict=True):
            mark = "*" if best[cells[0]] else ""
            if any(findings.in_force(c) for c in cells):
                mark += " <- now"
            rows.append(_row(cells[0], rates, mark))
    note = (
        "used: prompt tokens that the scarcer side started on; device: it was first; moved: went on on the device;\n"
        "*: no other setting is as good in mean TTFT, $ and Wh and better in one of them; the daemon also keeps to b\n"
        "over any 200 requests, which holds it back where prompts are uneven: docs/explain/whatif.md"
    )
    return f"{align(head, rows)}\n{note}"


def _figures(*seconds: float) -> list[str]:
    return [f"{s:.3f}" for s in seconds]


def _row(cell: WhatIfPoint, rates: str, mark: str) -> list[str]:
    shares = (f"{100 * share:.1f}" for share in (cell.used, cell.device_won, cell.moved))
    return [
        cell.policy, rates, f"{cell.budget:g}", cell.constrained, *_figures(cell.mean_ttft_s, cell.p99_ttft_s),
        f"{cell.server_usd:.4f}", f"{cell.device_wh:.2f}", *shares, mark,
    ]  # fmt: skip


def _groups(cells: Sequence[WhatIfPoint]) -> list[list[list[WhatIfPoint]]]:
    """The cells of each policy and rate, neighbouring rates together that come to the same at every budget."""
    by_rate = [list(own) for _, own in groupby(cells, key=lambda c: (c.policy, c.usd_per_kwh))]
    return [list(same) for _, same in groupby(by_rate, key=_but_for_the_rate)]


def _but_for_the_rate(cells: Sequence[WhatIfPoint]) -> list[WhatIfPoint]:
    return [replace(cell, usd_per_kwh=0.0) for cell in cells]


def _rates(group: Sequence[Sequence[WhatIfPoint]]) -> str:
    first, last = group[0][0].usd_per_kwh, group[-1][0].usd_per_kwh
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"


def picture(findings: Findings, field: str, title: str) -> str:
    """Mean TTFT (upwards) against a cost (to the right): s, d = which side is scarce, + = both, @ = now."""
    across = np.array([getattr(c, field) for c in findings.cells])
    upward = np.array([c.mean_ttft_s for c in findings.cells])
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    columns, rows = _places(across, WIDTH), HEIGHT - 1 - _places(upward, HEIGHT)
    cells = sorted(zip(findings.cells, columns, rows, strict=True), key=lambda place: findings.in_force(place[0]))
    for cell, column, row in cells:
        letter = LETTERS[cell.constrained]
        taken = grid[row][column]
        grid[row][column] = letter if taken in (" ", letter) else SEVERAL
        if findings.in_force(cell):
            grid[row][column] = NOW
    names = {0: f"{upward.max():.3f}", HEIGHT - 1: f"{upward.min():.3f}"}
    width = max(len(name) for name in names.values())
    lines = [f"{names.get(i, ''):>{width}} |{''.join(line)}".rstrip() for i, line in enumerate(grid)]
    low, high = f"{across.min():.4g}", f"{across.max():.4g}"
    axis = " " * (width + 2) + low + high.rjust(WIDTH - len(low))
    caption = f"mean TTFT, s, against the {title}; scarce: s = server, d = device; @ = now"
    return "\n".join([caption, *lines, " " * (width + 1) + "+" + "-" * WIDTH, axis])


def _places(values: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    """Return the place of each value on `n` characters."""
    span = float(np.ptp(values)) or 1.0
    places: NDArray[np.intp] = np.rint((values - values.min()) / span * (n - 1)).astype(np.intp)
    return places


# --- figure -------------------------------------------------------------------------------------------------------


def draw(findings: Findings, folder: Path) -> list[Path]:
    """Write whatif-usd.png and whatif-wh.png: mean TTFT against the bill and the energy; return their paths.

    Raises ConfigError where matplotlib is not installed.
    """
    require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    return [save(_figure(findings, field, title), folder / f"whatif-{unit}.png") for field, unit, title in COSTS]


def _figure(findings: Findings, field: str, title: str) -> Figure:
    figure, axes = panels(1, 1, SIZE)
    _lines(axes[0][0], findings, field)
    axes[0][0].set_xlabel(title, fontsize=8)
    label(figure, axes, [""], ["mean TTFT, s"])
    return figure


def _lines(panel: Axes, findings: Findings, field: str) -> None:
    """One line along the budgets for each rate that makes a difference."""
    seen: set[str] = set()
    for group in _groups(findings.cells):
        cells = group[0]
        side = cells[0].constrained
        color, marker = STYLES[side]
        name = "" if side in seen else f"{side}-constrained"
        seen.add(side)
        points = [(getattr(c, field), c.mean_ttft_s) for c in cells]
        panel.plot(*zip(*points, strict=True), color=color, marker=marker, ms=3.5, lw=1.0, label=name or None)
    now = [c for c in findings.cells if findings.in_force(c)]
    places = [(getattr(c, field), c.mean_ttft_s) for c in now]
    panel.plot(*zip(*places, strict=True), color="#D55E00", marker="*", ms=11, ls="", label="now")
