from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.command import run_script
from benchmarks.eval.__main__ import main
from benchmarks.eval.evaluate import LIMITS, POLICIES, Cell, EvaluationSetup, evaluate
from benchmarks.eval.handoff import VARIANTS, evaluate_handoffs
from benchmarks.eval.handoff_report import draw_handoff, handoff_summary
from benchmarks.eval.published import MOST_SAVED, SERVICES
from benchmarks.eval.report import STYLES, draw, draw_overhead, summary
from benchmarks.eval.traces import read_requests, read_traces
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.figures import require_plots

EVALUATED = ("stochastic", "stochastic-concurrent", "paper", "paper-paced", "paper-tuned", "optimal", *LIMITS)
CELL = Cell(
    "t", "phone", "device", "paper", 0.5, 1.0, 0.9, 1.5, 2.0, 3.0, 0.48, 1e-5, 0.99, 0.9, 0.0, 0.1, n_tested=100
)
PNG = b"\x89PNG\r\n\x1a\n"


def write_traces(folder: Path) -> None:
    rng = np.random.default_rng(7)
    rows = [f"{name},{t:.4f}" for name in ("quick", "slow") for t in rng.lognormal(name == "slow", 0.6, 200)]
    (folder / "ttft_made.csv").write_text("\n".join(["trace,ttft_s", *rows]), "utf-8")
    lengths = [f"{rng.integers(5, 60)},{rng.integers(10, 200)}" for _ in range(40)]
    (folder / "common").mkdir()
    (folder / "common" / "lengths.csv").write_text("\n".join(["prompt_tokens,output_tokens", *lengths]), "utf-8")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder)
    setup = EvaluationSetup(EVALUATED, budgets=(0.2, 0.5), n_requests=200, n_seeds=2)
    return list(evaluate(read_traces(folder), read_requests(folder), setup))


def table(text: str, first: str, number: int = 0) -> dict[str, list[str]]:
    """The rows of the `number`-th table whose head starts with `first`, by their first column."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    starts = [block[i:] for block in blocks for i, line in enumerate(block) if line.startswith(first)]
    lines = [line.split() for line in starts[number][1:] if ": " not in line]  # a note explains after a colon
    return {line[0]: line[1:] for line in lines}


def changes(text: str, number: int = 0) -> dict[tuple[str, str], list[float]]:
    """The rows of what `optimal` changes, by peer and figure: change, interval, median, traces, worse cells."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("ours ")]
    rows = [re.sub(r"[\[\],]", "", line).split() for line in blocks[number][1:] if ": " not in line]
    return {(peer, of): list(map(float, row)) for own, peer, of, *row in rows if own == "optimal"}


# --- tables -------------------------------------------------------------------------------------------------------


def test_summary_of_a_real_evaluation_has_every_table_of_both_constraints(cells: list[Cell]) -> None:
    text = summary(cells)
    for number, side in enumerate(("device", "server")):
        assert f"{side}-constrained: 2 traces x 3 devices x 2 budgets" in text
        policies = table(text, "policy ", number)
        assert list(policies) == list(EVALUATED)
        assert all(len(row) == 10 for row in policies.values())
        assert list(changes(text, number)) == [
            (peer, of) for peer in ("paper-tuned", "paper", "paper-paced") for of in ("mean", "P99", "CVaR")
        ]
        assert set(table(text, "optimal against paper, by trace", number)) == {"quick", "slow"}
        assert list(table(text, "against the limits", number)) == [p for p in EVALUATED if p not in LIMITS]
    assert "reduction by paper against stochastic" not in text  # none of the paper's services is among the traces


def test_a_row_of_the_evaluation_is_what_the_cells_say(cells: list[Cell]) -> None:
    own = [c for c in cells if (c.constraint, c.policy) == ("server", "optimal")]
    row = table(summary(cells), "policy ", 1)["optimal"]
    assert float(row[0]) == pytest.approx(np.exp(np.mean(np.log([c.mean_ttft_s for c in own]))), abs=5e-4)
    off = max((c.realised_ratio - c.budget for c in own), key=abs)
    assert float(row[5]) == pytest.approx(100 * off, abs=0.05)
    assert float(row[6]) == pytest.approx(1000 * np.mean([c.cost_usd for c in own]), abs=5e-5)


def test_lines_of_a_table_are_aligned_and_end_with_their_text(cells: list[Cell]) -> None:
    lines = next(b for b in summary(cells).split("\n\n") if b.startswith("device-constrained")).splitlines()[1:-1]
    assert len({len(line) for line in lines}) == 1
    assert all(line == line.rstrip() for line in summary(cells).splitlines())


def test_changes_count_what_is_worse_and_name_the_traces_at_both_ends() -> None:
    factors = [0.5, 0.6, 0.7, 0.9, 1.0, 1.01, 1.1, 1.5]
    papers = [replace(CELL, trace=f"t{i}") for i in range(8)]
    optimals = [
        replace(c, policy="optimal", p99_ttft_s=c.p99_ttft_s * f, mean_ttft_s=c.mean_ttft_s / 2)
        for c, f in zip(papers, factors, strict=True)
    ]
    text = summary([*papers, *optimals])
    found = changes(text)
    assert found["paper", "mean"] == [-50.0, -50.0, -50.0, -50.0, 8, 0.0]
    assert found["paper", "CVaR"] == [0.0, 0.0, 0.0, 0.0, 8, 0.0]
    change, low, high, median, n_traces, worse = found["paper", "P99"]
    assert change == pytest.approx(100 * (math.prod(factors) ** (1 / 8) - 1), abs=0.05)
    assert low < change < high < 10, "the interval is that of eight traces"
    assert (median, n_traces, worse) == (-5.1, 8, 25.0)  # 0.9 and 1.0 are in the middle; 1.01 is within the 2 %
    by_trace = table(text, "optimal against paper, by trace")
    assert [(name, row) for name, row in by_trace.items() if row] == [
        ("t0", ["-50.0"]), ("t1", ["-40.0"]), ("t2", ["-30.0"]), ("t5", ["+1.0"]), ("t6", ["+10.0"]), ("t7", ["+50.0"]),
    ]  # fmt: skip


def test_a_trace_of_a_few_rows_counts_in_no_tail() -> None:
    short = [
        replace(CELL, trace="few", policy=p, n_tested=99, p99_ttft_s=t) for p, t in (("paper", 9.0), ("optimal", 1.0))
    ]
    text = summary([*short, CELL, replace(CELL, policy="optimal")])
    assert changes(text)["paper", "mean"][4] == 2
    assert changes(text)["paper", "P99"] == [0.0, 0.0, 0.0, 0.0, 1, 0.0]
    assert table(text, "policy ")["paper"][3] == "2.000"


def test_share_of_gain_is_0_for_paper_and_100_at_the_clairvoyant() -> None:
    means = {"stochastic": 1.2, "paper": 1.0, "optimal": 0.85, "clairvoyant": 0.8}
    text = summary([replace(CELL, policy=name, mean_ttft_s=mean) for name, mean in means.items()])
    rows = table(text, "against the limits")
    assert {name: row[1] for name, row in rows.items()} == {"stochastic": "-100", "paper": "0", "optimal": "75"}
    assert [row[0] for row in rows.values()] == ["1.500", "1.250", "1.062"]
    assert {row[2] for row in rows.values()} == {"-"}  # best-p99 was not evaluated


def test_a_limit_shows_only_the_figures_it_bounds(cells: list[Cell]) -> None:
    row = table(summary(cells), "policy ")["best-p99"]
    assert [i for i, figure in enumerate(row) if figure != "-"] == [3]


def test_reduction_is_the_mean_over_budgets_beside_the_published_figure() -> None:
    trace = SERVICES["GPT"]
    base = replace(CELL, trace=trace, device="pixel7pro-bloom1.1b", constraint="server")
    rows = [
        replace(base, policy=policy, budget=budget, p99_ttft_s=p99, mean_ttft_s=mean)
        for policy, budget, p99, mean in [
            ("paper", 0.2, 1.0, 0.9), ("paper", 0.8, 1.0, 0.8),
            ("stochastic", 0.2, 2.0, 1.0), ("stochastic", 0.8, 4.0, 1.0),
            ("stochastic-concurrent", 0.2, 1.0, 0.9), ("stochastic-concurrent", 0.8, 2.0, 0.8),
        ]
    ]  # fmt: skip
    text = summary(rows)
    assert table(text, "service")["GPT"] == ["server", "pixel7pro-bloom1.1b", "62.5", "25.0", "23.85", "15.0", "0.0"]
    other = summary([replace(c, device="a-phone") for c in rows])
    assert table(other, "service")["GPT"] == ["server", "a-phone", "62.5", "25.0", "-", "15.0", "0.0"]
    alone = summary([c for c in rows if c.policy != "stochastic"])
    assert table(alone, "service")["GPT"] == ["server", "pixel7pro-bloom1.1b", "-", "25.0", "23.85", "-", "0.0"]


def test_summary_of_one_policy_is_one_table() -> None:
    assert summary([CELL]).splitlines()[0].startswith("device-constrained: 1 trace x 1 device x 1 budget;")
    assert "\n\n" not in summary([CELL])
    assert summary([]) == "nothing was evaluated"


# --- figures ------------------------------------------------------------------------------------------------------


def assert_drawn(path: Path) -> None:
    assert path.read_bytes().startswith(PNG)
    image = imread(path)
    assert min(image.shape[:2]) > 300
    grey = image[..., :3].mean(axis=2)
    assert 0.01 < (grey < 0.9).mean() < 0.5  # some ink on a white page
    assert (np.ptp(image[..., :3], axis=2) > 0.3).mean() > 1e-4  # and some of it in colour


def test_figures_are_drawn_for_both_constraints(cells: list[Cell], tmp_path: Path) -> None:
    drawn = draw(cells, tmp_path / "new" / "folder")
    assert [p.name for p in drawn] == ["fig6-mean-device.png", "fig6-mean-server.png", "fig7-cost.png"]
    for path in drawn:
        assert_drawn(path)


def test_figures_of_one_constraint_one_trace_and_one_budget(cells: list[Cell], tmp_path: Path) -> None:
    some = [c for c in cells if (c.trace, c.constraint, c.budget) == ("slow", "server", 0.2)]
    assert [p.name for p in draw(some, tmp_path)] == ["fig6-mean-server.png", "fig7-cost.png"]


def test_the_papers_services_are_drawn_when_all_four_are_there(tmp_path: Path) -> None:
    traces = ["another", *SERVICES.values()]
    several = [replace(CELL, trace=t, budget=b) for t in traces for b in (0.1, 0.9)]
    wide, narrow = draw(several, tmp_path / "all")[0], draw(several[:2], tmp_path / "one")[0]
    assert imread(wide).shape[1] > 1.5 * imread(narrow).shape[1]


def test_overhead_is_drawn_beside_the_published_times(tmp_path: Path) -> None:
    figures = {"paper_device_ms": {"1000": 0.3, "10000": 1.0}, "optimal_ms": {"1000": 9.0, "10000": 30.0}}
    path = draw_overhead(figures, tmp_path)
    assert path == tmp_path / "fig9-overhead.png"
    assert_drawn(path)


def test_every_policy_has_a_line_of_its_own() -> None:
    assert set(POLICIES) | {"clairvoyant"} == set(STYLES)
    assert len(set(STYLES.values())) == len(STYLES)


def test_pyplot_is_left_alone(cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert draw(cells[:14], tmp_path)


def test_without_matplotlib_the_error_says_what_to_install(
    cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_plots()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for attempt in (
        require_plots,
        lambda: draw(cells, tmp_path / "none"),
        lambda: draw_overhead({}, tmp_path / "none"),
    ):
        with pytest.raises(ConfigError, match=r'pip install "disco-daemon\[plots\]"'):
            attempt()
    assert not (tmp_path / "none").exists()
    assert summary(cells)  # the tables need no matplotlib


# --- handoffs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder)
    setup = EvaluationSetup(("paper", "optimal"), budgets=(0.2, 0.5), n_requests=100, n_seeds=1)
    return list(evaluate_handoffs(read_traces(folder), read_requests(folder), setup))


def test_handoffs_have_a_row_for_each_policy_and_variant_beside_the_published_figure(moved: list[Cell]) -> None:
    text = handoff_summary(moved)
    for number, (side, published) in enumerate(MOST_SAVED.items()):
        assert f"cost saved by handoffs, {side}-constrained: 2 traces x 3 devices x 2 budgets" in text
        lines = [line.split() for line in text.split("\n\n")[number].splitlines()[2:-3]]
        assert [line[:2] for line in lines] == [[p, v] for p in ("paper", "optimal") for v in VARIANTS]
        assert all(line[5:7] == ["<=", str(published)] for line in lines)
    assert "mean over the budgets / most" not in text  # none of the paper's services is among the traces


def test_a_row_of_the_handoffs_is_what_the_cells_say() -> None:
    plain = [replace(CELL, trace=SERVICES["GPT"], cost_usd=10.0), replace(CELL, trace=SERVICES["LLaMA"], cost_usd=20.0)]
    kept = [
        replace(c, handoff="kept", cost_usd=cost, handoffs=0.5, delayed_mean=2.0, delayed_p99=p99, largest_gap_s=gap)
        for c, cost, p99, gap in zip(plain, (4.0, 18.0), (7.0, 9.0), (0.3, 0.2), strict=True)
    ]
    others = [replace(c, handoff=v) for c in plain for v in VARIANTS if v != "kept"]
    text = handoff_summary([*plain, *kept, *others])
    row = next(line.split() for line in text.splitlines() if line.startswith("paper ") and "kept" in line)
    assert row == ["paper", "kept", "35.0", "60.0", "10.0", "<=", "72.7", "50.0", "2.00", "9.0", "0.300"]
    gpt = next(line for line in text.splitlines() if line.startswith("GPT"))
    assert gpt.split()[:3] == ["GPT", "device", "phone"]
    assert " ".join(gpt.split()[3:]) == "0.0 / 0.0 60.0 / 60.0 0.0 / 0.0 0.0 / 0.0"
    assert handoff_summary([]) == "nothing was evaluated"


def test_handoffs_are_drawn(moved: list[Cell], tmp_path: Path) -> None:
    path = draw_handoff(moved, tmp_path / "new")
    assert path == tmp_path / "new" / "fig7-handoff.png"
    assert_drawn(path)


def test_the_verb_prints_and_draws_handoffs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path)
    line = ["--traces", str(tmp_path), "--requests", "50", "--budgets", "0.5", "--seeds", "1", "--handoff"]
    assert main([*line, "--select", "*/quick", "--plots", str(tmp_path / "drawn")]) == 0
    assert "server-constrained: 1 trace x 3 devices x 1 budget" in capsys.readouterr().out
    assert_drawn(tmp_path / "drawn" / "fig7-handoff.png")
    assert main([*line, "--select", "*/quick", "--json", "--server-tps", "20", "--dearer", "5"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {c["handoff"] for c in cells} == {"none", *VARIANTS}
    assert max(c["handoffs"] for c in cells) > 0
    assert run_script(lambda: main(line)) == 1  # by default the paper's four services, which are not among these
    assert "gpt-4o-mini" in capsys.readouterr().err


def test_the_verb_without_it_plays_all_traces_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path)
    line = ["--traces", str(tmp_path), "--requests", "50", "--budgets", "0.5", "--policies", "paper", "--json"]
    assert main(line) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {(c["trace"], c["handoff"]) for c in cells} == {("quick", "none"), ("slow", "none")}
