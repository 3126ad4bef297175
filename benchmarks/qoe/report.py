"""The report of `benchmarks.qoe --simulate`: Andes' Figures 10, 15b, 15c and Table 4 by content, from our numbers.

By content: the same quantities over the same axes from our own simulation. None of the paper's points is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_daemon.errors import ConfigError
from disco_daemon.simulate.figures import align, panels, require_plots, save

from ..formatting import number, unique

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Mapping[str, Any]

# Which figure of the paper (arXiv 2404.16283 v1) a setting reproduces.
FIGURES = {
    ("text", "poisson"): ("fig10-qoe-rate.png", "Figure 10: QoE against rate, text readers, Poisson arrivals"),
    ("text", "gamma"): ("fig15b-burstiness.png", "Figure 15b: QoE against rate, text readers, Gamma arrivals (CV 3)"),
    ("voice", "poisson"): ("fig15c-voice.png", "Figure 15c: QoE against rate, voice at 3.3 token/s, Poisson arrivals"),
}
STYLES = {
    "fcfs": ("#999999", "s", "--"),
    "round-robin": ("#E69F00", "^", ":"),
    "andes": ("#0072B2", "o", "-"),
    "andes@1": ("#56B4E9", "v", "--"),
}
TABLE4_LOAD = 1.16  # of the capacity: the 3.3 requests/s at which Table 4 is taken
TABLE4 = (("QoE", "qoe_{}", 2), ("TTFT, s", "ttft_{}_s", 2), ("TDS, token/s", "tds_{}", 2))
QUANTILES = (10, 50, 90)
# Table 4 as printed, of vLLM (FCFS) and Andes.
PUBLISHED4 = {
    "QoE": {"vLLM": (0.05, 0.39, 1.00), "Andes": (0.77, 1.00, 1.00)},
    "TTFT, s": {"vLLM": (0.33, 56.73, 144.95), "Andes": (0.35, 0.47, 0.66)},
    "TDS, token/s": {"vLLM": (6.05, 6.45, 7.84), "Andes": (5.32, 5.44, 7.02)},
}
NOTE = (
    "load: rate over what the engine serves with its KV cache always full; throughput while requests arrive;\n"
    "after Andes' figures by content, simulated; text readers at 3.8 to 5.1 token/s, expected TTFT 1 s"
)


def summary(result: Mapping[str, Any]) -> str:
    """The tables as plain text: what is gained, QoE by rate in each setting, and the percentiles of Table 4."""
    curves = result["curves"]
    if not curves:
        return "nothing was simulated"
    settings = unique_settings(curves)
    of = [(s, _of(curves, s)) for s in settings]
    parts = [_gains(result), *(part for s, own in of for part in (_rates(own, s), _stalls(own, s)))]
    parts += [_table4(curves, s) for s in settings]
    return "\n\n".join([*parts, NOTE])


def markdown(result: Mapping[str, Any]) -> str:
    """The same as Markdown, each table a code block under its title."""
    blocks = summary(result).split("\n\n")
    return "\n\n".join(_block(*b.partition("\n")) for b in blocks) + "\n"


def _block(title: str, _: str, body: str) -> str:
    return f"{title}\n\n```text\n{body}\n```" if body and not title.startswith("load:") else f"{title}\n{body}".strip()


def unique_settings(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Readers and arrivals in the order of their first point."""
    return list(dict.fromkeys((c["readers"], c["arrivals"]) for c in curves))


def _of(curves: Sequence[Curve], setting: tuple[str, str]) -> list[Curve]:
    return [c for c in curves if (c["readers"], c["arrivals"]) == setting]


def _gains(result: Mapping[str, Any]) -> str:
    head = ("readers, arrivals", "QoE gain", "rate gain", "throughput loss %", "preemptions/request")
    rows = [
        [
            f"{s['readers']}, {s['arrivals']}", number(s["qoe_gain_max"], 2), number(s["rate_gain"], 2),
            number(100 * s["throughput_loss"], 1), number(s["preemptions_per_request"], 2),
        ]
        for s in result["settings"]
    ]  # fmt: skip
    title = (
        f"andes ({result['objective']}) against fcfs: largest ratio of mean QoE, ratio of rates at QoE >= "
        f"{result['high_qoe']}; {result['n_requests']} requests, prompts of {result['mean_prompt']:.0f} and answers of "
        f"{result['mean_output']:.0f} tokens, load 1 = {result['capacity_rps']:.2f} requests/s"
    )
    return f"{title}\n{align(head, rows)}"


def _rates(curves: Sequence[Curve], setting: tuple[str, str]) -> str:
    """QoE by load, one column per scheduler, and what it costs."""
    names = unique(c["scheduler"] for c in curves)
    head = ("load", "rate/s", *(f"QoE {n}" for n in names), *(f"token/s {n}" for n in names), f"preempted {names[-1]}")
    rows = []
    for load in dict.fromkeys(c["load"] for c in curves):
        row = {c["scheduler"]: c for c in curves if c["load"] == load}
        rows.append([
            number(load, 2), number(row[names[0]]["rate_rps"], 2), *(number(row[n]["qoe_mean"], 3) for n in names),
            *(number(row[n]["throughput_tps"], 0) for n in names), number(row[names[-1]]["preemptions_per_request"], 2),
        ])  # fmt: skip
    title = FIGURES.get(setting, ("", f"QoE against rate, {setting[0]} readers, {setting[1]} arrivals"))[1]
    return f"{title} (by content)\n{align(head, rows)}"


def _stalls(curves: Sequence[Curve], setting: tuple[str, str]) -> str:
    """What the QoE does not tell: who stood still for how long, and how fast the slowest tenth got its text."""
    names = unique(c["scheduler"] for c in curves)
    head = (
        "load", *(f"> 10 s % {n}" for n in names), *(f"P99 s {n}" for n in names), *(f"TDS P10 {n}" for n in names),
        *(f"QoE P10 {n}" for n in names), *(f"worst tenth {n}" for n in names),
    )  # fmt: skip
    rows = []
    for load in dict.fromkeys(c["load"] for c in curves):
        row = {c["scheduler"]: c for c in curves if c["load"] == load}
        rows.append([
            number(load, 2), *(number(100 * row[n]["stalled_10s"], 1) for n in names),
            *(number(row[n]["stall_p99_s"], 0) for n in names), *(number(row[n]["tds_p10"], 2) for n in names),
            *(number(row[n]["qoe_p10"], 3) for n in names), *(number(row[n]["qoe_worst_tenth"], 3) for n in names),
        ])  # fmt: skip
    title = (
        f"readers who stood still, {setting[0]}, {setting[1]}: share with a stall over 10 s, P99 of the longest stall, "
        "and the QoE that nine of ten exceed and its mean over the worst tenth"
    )
    return f"{title}\n{align(head, rows)}"


def table4_load(curves: Sequence[Curve]) -> float:
    """The load nearest to TABLE4_LOAD."""
    return float(min((c["load"] for c in curves), key=lambda load: abs(load - TABLE4_LOAD)))


def _table4(curves: Sequence[Curve], setting: tuple[str, str]) -> str:
    own = _of(curves, setting)
    load = table4_load(own)
    at = [c for c in own if c["load"] == load]
    rows = [
        [label, c["scheduler"], *(number(c[field.format(f"p{q}")], digits) for q in QUANTILES)]
        for label, field, digits in TABLE4
        for c in at
    ]
    for label, columns in PUBLISHED4.items() if setting == ("text", "poisson") else ():
        rows += [[label, f"{who}, published", *(number(x, 2) for x in three)] for who, three in columns.items()]
    title = f"Table 4 (by content): percentiles at load {load:g}, {setting[0]} readers, {setting[1]} arrivals"
    return f"{title}\n{align(('', 'scheduler', *(f'P{q}' for q in QUANTILES)), rows, n_left=2)}"


def draw_serving(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write one PNG file per setting that a figure of the paper shows; return their paths.

    Raises ConfigError where matplotlib is not installed or nothing was simulated.
    """
    require_plots()
    curves = result["curves"]
    drawn = [s for s in unique_settings(curves) if s in FIGURES]
    if not drawn:
        raise ConfigError("nothing was simulated that a figure shows")
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(_of(curves, s), result["high_qoe"], *FIGURES[s], folder) for s in drawn]


def _draw(curves: Sequence[Curve], high_qoe: float, name: str, title: str, folder: Path) -> Path:
    """Mean QoE and median TTFT against the rate, side by side."""
    figure, axes = panels(1, 2, (3.6, 2.8))
    left, right = axes[0]
    left.axhline(high_qoe, color="#000000", lw=0.8, ls=(0, (4, 4)))
    left.set(ylim=(0, 1.02), xlabel="requests/s", ylabel="mean QoE")
    right.set(yscale="log", xlabel="requests/s", ylabel="median TTFT, s")
    _lines(left, curves, "qoe_mean")
    _lines(right, curves, "ttft_p50_s")
    figure.suptitle(f"{title} (simulated)", fontsize=9)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return save(figure, folder / name)


def _lines(panel: Axes, curves: Sequence[Curve], field: str) -> None:
    for name in unique(c["scheduler"] for c in curves):
        points = [(c["rate_rps"], c[field]) for c in curves if c["scheduler"] == name]
        color, marker, line = STYLES.get(name, ("#009E73", "x", ":"))
        panel.plot(*zip(*points, strict=True), color=color, marker=marker, ls=line, ms=3.5, lw=1.2, label=name)
