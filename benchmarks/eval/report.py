"""The report of an evaluation: tables as plain text, and figures after the paper's, drawn from our own numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_daemon.simulate.figures import align, label, panels, require_plots, save
from disco_daemon.types import Side

from ..formatting import mean, number, unique
from .bootstrap import interval
from .evaluate import LIMITS, MIN_TESTED, POLICIES, Cell
from .published import REDUCTIONS, REFIT_MS, SERVICES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = ("optimal", "optimal-hedged")
PEERS = ("paper-tuned", "paper", "paper-paced", "paper-eq1")  # the first is the one to be measured by
WORSE = 0.02  # a cell this much worse than before is counted
N_EXTREMES = 3  # traces shown at either end


# --- tables -------------------------------------------------------------------------------------------------------


def summary(cells: Sequence[Cell]) -> str:
    """The tables of docs/lab/evaluation.md as plain text; a table whose policies were not evaluated is left out."""
    parts = [part for side in Side for part in _constraint(side, [c for c in cells if c.constraint == side.value])]
    return "\n\n".join([*parts, *_against_stochastic(cells)]) or "nothing was evaluated"


def _constraint(side: Side, cells: Sequence[Cell]) -> list[str]:
    if not cells:
        return []
    counts = [(len({getattr(c, field) for c in cells}), field) for field in ("trace", "device", "budget")]
    shape = " x ".join(f"{n} {field}{'s' if n > 1 else ''}" for n, field in counts)
    title = f"{side.value}-constrained: {shape}; times are geometric means over them"
    return [f"{title}\n{_policies(cells)}", *_changes(cells), *_limits(cells)]


def _policies(cells: Sequence[Cell]) -> str:
    """One row per policy."""
    head = (
        "policy",
        "mean s",
        "P50 s",
        "P95 s",
        "P99 s",
        "CVaR s",
        "off budget",
        "$/1000",
        "QoE",
        "QoE strict",
        "twice %",
    )
    rows = [[name, *_figures(list(_places(cells, name).values()))] for name in _names(cells)]
    note = (
        f"P99, CVaR: of traces with {MIN_TESTED} tested rows or more; off budget: realised ratio - b in points, where "
        "it is largest; $/1000: cost of 1000 requests; twice: prompt tokens that the server was sent again"
    )
    return f"{align(head, rows)}\n{note}"


def _figures(cells: Sequence[Cell]) -> list[str]:
    times = [_geometric_mean(getattr(c, f"{f}_ttft_s") for c in cells) for f in ("mean", "p50", "p95")]
    times += [_geometric_mean(getattr(c, f"{f}_ttft_s") for c in known_tails(cells)) for f in ("p99", "cvar")]
    off = max((c.realised_ratio - c.budget for c in cells), key=lambda x: -1.0 if math.isnan(x) else abs(x))
    return [
        *(number(t, 3) for t in times),
        number(100 * off, 1, "+"),
        number(1000 * mean(c.cost_usd for c in cells), 4),
        number(mean(c.qoe for c in cells), 4),
        number(mean(c.qoe_strict for c in cells), 4),
        number(100 * mean(c.asked_twice for c in cells), 1),
    ]


def _changes(cells: Sequence[Cell]) -> list[str]:
    """Tabulate the change from the paper's policies to `optimal`, with intervals, and where it matters most."""
    bases = [(own, base) for own in OURS for base in PEERS if _pairs(cells, own, base)]
    if not bases:
        return []
    head = ("ours", "against", "of the", "change %", "95 % over traces", "median trace %", "traces", "worse cells %")
    rows = [[own, *row] for own, base in bases for row in _change_rows(_pairs(cells, own, base), base)]
    note = (
        f"change: geometric mean; worse: share of the cells where it is more than {100 * WORSE:.0f} % higher; "
        f"P99 and CVaR: of traces with {MIN_TESTED} tested rows or more"
    )
    extremes = (part for own, base in bases if own == OURS[0] for part in _extremes(cells, base))
    return ["\n".join([align(head, rows, n_left=3), note]), *extremes]


def _change_rows(pairs: Sequence[tuple[Cell, Cell]], base: str) -> Iterable[list[str]]:
    for title, field in (("mean", "mean_ttft_s"), ("P99", "p99_ttft_s"), ("CVaR", "cvar_ttft_s")):
        own = pairs if field == "mean_ttft_s" else [pair for pair in pairs if pair[0].n_tested >= MIN_TESTED]
        if not own:
            continue
        of_traces = sorted(mean(math.log(x) for x in _ratios(group, field)) for group in _by_trace(own).values())
        low, high = (number(_percent(end), 1, "+") for end in interval(of_traces))
        worse = mean(x > 1 + WORSE for x in _ratios(own, field))
        yield [
            base, title, number(_percent(mean(of_traces)), 1, "+"), f"[{low}, {high}]",
            number(_percent(statistics.median(of_traces)), 1, "+"), str(len(of_traces)), number(100 * worse, 1),
        ]  # fmt: skip


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _by_trace(pairs: Iterable[tuple[Cell, Cell]]) -> dict[str, list[tuple[Cell, Cell]]]:
    found: dict[str, list[tuple[Cell, Cell]]] = {}
    for pair in pairs:
        found.setdefault(pair[0].trace, []).append(pair)
    return found


def _extremes(cells: Sequence[Cell], base: str) -> Iterable[str]:
    """The traces with the best and the worst change of the P99."""
    found = _by_trace(_pairs(known_tails(cells), "optimal", base)).items()
    changes = sorted((100 * (_geometric_mean(_ratios(p, "p99_ttft_s")) - 1), name) for name, p in found)
    rows = [[name, number(change, 1, "+")] for change, name in changes]
    if len(rows) > 2 * N_EXTREMES:
        rows = [*rows[:N_EXTREMES], ["…", ""], *rows[-N_EXTREMES:]]
    if rows:
        yield align([f"optimal against {base}, by trace", "P99 %"], rows)


def _limits(cells: Sequence[Cell]) -> list[str]:
    """Tabulate the distance of each policy from the bounds that no policy can beat."""
    if not any(_places(cells, limit) for limit in LIMITS):
        return []
    head = ("against the limits", "mean / clairvoyant", "share of gain %", "P99 / best-p99")
    rows = [
        [
            name,
            number(_geometric_mean(_ratios(_pairs(cells, name, "clairvoyant"), "mean_ttft_s")), 3),
            number(100 * _share_of_gain(cells, name), 0),
            number(_geometric_mean(_ratios(_pairs(known_tails(cells), name, "best-p99"), "p99_ttft_s")), 3),
        ]
        for name in _names(cells)
        if name not in LIMITS
    ]
    return [align(head, rows) + "\nshare of gain: (paper - policy) / (paper - clairvoyant), of the mean s above"]


def _share_of_gain(cells: Sequence[Cell], name: str) -> float:
    """Return the gain of `name` over `paper` as a share of a clairvoyant's gain; NaN where that is nothing."""
    own, paper, best = (
        _geometric_mean(c.mean_ttft_s for c in _places(cells, policy).values())
        for policy in (name, "paper", "clairvoyant")
    )
    return (paper - own) / (paper - best) if paper > best else math.nan


def _against_stochastic(cells: Sequence[Cell]) -> list[str]:
    """The paper's table: services x constraints x devices, `paper` against both readings of the baseline."""
    figures = ("P99 excl. %", "P99 conc. %", "published %", "mean excl. %", "mean conc. %")
    bases = ("stochastic", "stochastic-concurrent")
    rows = []
    for service, side, device, group in _service_groups(cells):
        p99, means = ([_reduction(group, base, f"{f}_ttft_s") for base in bases] for f in ("p99", "mean"))
        published = REDUCTIONS.get((service, side, device), math.nan)
        rows.append([service, side, device, *(number(x, 1) for x in p99), number(published, 2)])
        rows[-1] += [number(x, 1) for x in means]
    if not rows:
        return []
    title = "reduction by paper against stochastic: exclusive and concurrent baseline, mean over the budgets"
    note = "published: Table 2, whose baseline routes each request to one side (exclusive), on recordings of its own"
    return ["\n".join([title, align(("service", "constrained", "device", *figures), rows, n_left=3), note])]


def _service_groups(cells: Sequence[Cell]) -> Iterable[tuple[str, str, str, list[Cell]]]:
    for service, trace in SERVICES.items():
        own = [c for c in cells if c.trace == trace]
        for side in (Side.SERVER.value, Side.DEVICE.value):
            for device in unique(c.device for c in own):
                group = [c for c in own if (c.constraint, c.device) == (side, device)]
                if any(_pairs(group, "paper", base) for base in ("stochastic", "stochastic-concurrent")):
                    yield service, side, device, group


def _reduction(cells: Sequence[Cell], base: str, field: str) -> float:
    """Mean over the budgets of the reduction at each of them, %."""
    return 100 * mean(1 - ratio for ratio in _ratios(_pairs(cells, "paper", base), field))


# --- the numbers in them ------------------------------------------------------------------------------------------


def known_tails(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells of traces of which enough rows are tested for a P99."""
    return [cell for cell in cells if cell.n_tested >= MIN_TESTED]


def _names(cells: Iterable[Cell]) -> list[str]:
    return unique(c.policy for c in cells)


def _places(cells: Iterable[Cell], policy: str) -> dict[tuple[str, str, str, float], Cell]:
    """The cells of a policy by what they are compared by."""
    return {(c.trace, c.device, c.constraint, c.budget): c for c in cells if c.policy == policy}


def _pairs(cells: Sequence[Cell], policy: str, base: str) -> list[tuple[Cell, Cell]]:
    """The cells of two policies at the same places."""
    bases = _places(cells, base)
    return [(cell, bases[place]) for place, cell in _places(cells, policy).items() if place in bases]


def _ratios(pairs: Iterable[tuple[Cell, Cell]], field: str) -> list[float]:
    return [getattr(cell, field) / getattr(base, field) for cell, base in pairs]


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(mean(math.log(v) for v in values))


# --- figures ------------------------------------------------------------------------------------------------------

# Colours of Okabe and Ito, which the colour-blind can distinguish; line style and marker distinguish them in print.
OWN_STYLES = {
    "all-device": ("#999999", "", ":"),
    "all-server": ("#999999", "", "--"),
    "stochastic": ("#999999", "s", "-"),
    "stochastic-concurrent": ("#E69F00", "^", "-"),
    "paper": ("#0072B2", "o", "-"),
    "paper-paced": ("#56B4E9", "v", "--"),
    "paper-tuned": ("#56B4E9", "<", "-"),
    "paper-eq1": ("#0072B2", ">", ":"),
    "optimal": ("#D55E00", "D", "-"),
    "optimal-unconditioned": ("#CC79A7", "P", "--"),
    "optimal-hedged": ("#D55E00", "d", ":"),
    "clairvoyant": ("#000000", "", ":"),
}
MARKERS = "X*pdhH8<>"  # of policies without a style of their own
STYLES = OWN_STYLES | {
    name: ("#009E73", marker, "-")
    for name, marker in zip((name for name in POLICIES if name not in OWN_STYLES), MARKERS, strict=False)
}


def draw(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write the figures that `cells` have the constraint for as PNG files into `folder`; return their paths.

    Raises ConfigError where matplotlib is not installed.
    """
    require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for side, name in ((Side.DEVICE, "fig6-mean-device.png"), (Side.SERVER, "fig6-mean-server.png")):
        if own := [c for c in cells if c.constraint == side.value]:
            drawn.append(save(_mean_figure(own, side), folder / name))
    if any(c.policy not in LIMITS for c in cells):
        drawn.append(save(_cost_figure(cells), folder / "fig7-cost.png"))
    return drawn


def draw_overhead(figures: Mapping[str, Any], folder: Path) -> Path:
    """Write fig9-overhead.png: refit time by number of samples, beside the published times; return its path.

    `figures` is what `benchmarks.eval.policy --json` prints: {"paper_device_ms": {"1000": ms, …}, "paper_server_ms": …,
    "optimal_ms": …, "peer_device_ms": …}, "peer" being fits from raw samples; what is missing is not drawn. Raises
    ConfigError where matplotlib is not installed.
    """
    require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = panels(1, 1, (6.2, 4.2))
    panel = axes[0][0]
    for side, color, marker in (("device", "#0072B2", "o"), ("server", "#E69F00", "^")):
        _refit_line(panel, figures.get(f"paper_{side}_ms"), f"paper, {side}-constrained, here", color, marker, "-")
        peer = f"paper, {side}-constrained, here, from raw samples"
        _refit_line(panel, figures.get(f"peer_{side}_ms"), peer, color, marker, "--")
        published = REFIT_MS[side]
        _refit_line(panel, published, f"paper, {side}-constrained, published (M1)", color, marker, ":")
    _refit_line(panel, figures.get("optimal_ms"), "optimal, here", "#D55E00", "D", "-")
    panel.set(xscale="log", yscale="log", xlabel="samples in the fit", ylabel="time of one refit, ms")
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return save(figure, folder / "fig9-overhead.png")


def _refit_line(
    panel: Axes, times_ms: Mapping[Any, float] | None, label: str, color: str, marker: str, line: str
) -> None:
    if times_ms:
        points = sorted((int(n), ms) for n, ms in times_ms.items())
        face = color if line == "-" else "white"
        panel.plot(*zip(*points, strict=True), color=color, marker=marker, ls=line, mfc=face, label=label)


def _mean_figure(cells: Sequence[Cell], side: Side) -> Figure:
    """Mean TTFT against the budget: services side by side, devices one above the other."""
    services, devices = traces_to_draw(cells), unique(c.device for c in cells)
    figure, axes = panels(len(devices), len(services))
    for row, device in zip(axes, devices, strict=True):
        for panel, trace in zip(row, services.values(), strict=True):
            _lines(panel, [c for c in cells if (c.trace, c.device) == (trace, device)], "mean_ttft_s", 1.0)
    label(figure, axes, list(services), devices)
    _axis_labels(figure, side.value, "mean TTFT, s")
    return figure


def _cost_figure(cells: Sequence[Cell]) -> Figure:
    """Cost against the budget, mean over the devices: services side by side, constraints one above the other."""
    services, sides = traces_to_draw(cells), unique(c.constraint for c in cells)
    figure, axes = panels(len(sides), len(services))
    for row, side in zip(axes, sides, strict=True):
        for panel, trace in zip(row, services.values(), strict=True):
            own = [c for c in cells if (c.trace, c.constraint) == (trace, side) and c.policy not in LIMITS]
            _lines(panel, own, "cost_usd", 1000.0)
    label(figure, axes, list(services), [f"{side}-constrained" for side in sides])
    _axis_labels(figure, "constrained side", "cost per 1000 requests, $")
    return figure


def traces_to_draw(cells: Sequence[Cell]) -> dict[str, str]:
    """The traces to draw by their titles: the paper's services, or else the first four there are."""
    traces = unique(c.trace for c in cells)
    if set(SERVICES.values()) <= set(traces):
        return {f"{service}\n{trace}": trace for service, trace in SERVICES.items()}
    return {trace: trace for trace in traces[: len(SERVICES)]}


def _lines(panel: Axes, cells: Sequence[Cell], field: str, scale: float) -> None:
    """One line per policy, the mean over cells of the same budget."""
    panel.set_xlim(0, 1)
    for name in _names(cells):
        by_budget: dict[float, list[float]] = {}
        for cell in _places(cells, name).values():
            by_budget.setdefault(cell.budget, []).append(scale * getattr(cell, field))
        points = sorted((b, mean(values)) for b, values in by_budget.items())
        if not any(math.isnan(value) for _, value in points):
            color, marker, line = STYLES[name]
            panel.plot(*zip(*points, strict=True), color=color, marker=marker, ls=line, ms=3.5, lw=1.2, label=name)


def _axis_labels(figure: Figure, who: str, what: str) -> None:
    figure.supxlabel(f"budget b: share of all prompt tokens that the {who} may process", fontsize=10)
    figure.supylabel(what, fontsize=10)
