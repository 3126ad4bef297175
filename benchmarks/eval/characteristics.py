"""The paper's tables about its data, on recorded traces: does a prompt's length or the recent past foretell a TTFT?

    python -m benchmarks.eval.characteristics --traces DIR [--json]

Table 1 is Pearson's coefficient between prompt length and TTFT. Table 5 is the error of predictions, each made before
its TTFT is seen: by a moving average of the last ten, by exponential smoothing, and by what the daemon has, a ridge
regression on three exponential means of log TTFT that is trusted where it foretells out of sample. (The paper's random
forest and XGBoost did about as well.) The traces are those nearest to the paper's services, not its own recordings.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import print_figures
from disco_daemon.errors import ConfigError
from disco_daemon.estimation.server_ttft import ServerTtft
from disco_daemon.simulate.figures import align

from ..command import run_script
from ..formatting import number
from .published import PEARSON, PREDICTORS, SERVICES

N_AVERAGED = 10  # TTFTs of the moving average
SMOOTHING = 0.3  # weight of the newest TTFT
N_SKIPPED = 20  # first TTFTs, of which nobody predicts anything yet
COLUMNS = ("trace", "in_tok", "ttft_est_s")
PUBLISHED_ORDER = ("Command", "DeepSeek~", "GPT", "LLaMA")  # of the columns of Table 5


def read(folder: Path) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return prompt lengths, tokens, and TTFTs, s, of each trace whose file has both. Raises ConfigError."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if set(COLUMNS) <= set(rows.fieldnames or ()):
                for row in rows:
                    pair = float(row["in_tok"]), max(1e-3, float(row["ttft_est_s"]))
                    found.setdefault(row["trace"], []).append(pair)
    if not found:
        msg = f"no CSV file in {folder} has the columns {', '.join(COLUMNS)}"
        raise ConfigError(msg)
    return {name: (np.array([n for n, _ in rows]), np.array([s for _, s in rows])) for name, rows in found.items()}


def pearson(tokens: FloatArray, ttft_s: FloatArray) -> float:
    """Return the coefficient; NaN where either never varies."""
    if float(np.ptp(tokens)) == 0 or float(np.ptp(ttft_s)) == 0:
        return math.nan
    return float(np.corrcoef(tokens, ttft_s)[0, 1])


def predictions(ttft_s: FloatArray) -> dict[str, FloatArray]:
    """Return what each way says of each TTFT before it is seen, s."""
    estimator, smoothed = ServerTtft(), float(ttft_s[0])
    said: dict[str, list[float]] = {"moving average": [], "exponential smoothing": [], "ours": []}
    for i, seen in enumerate(ttft_s.tolist()):
        said["moving average"].append(float(ttft_s[max(0, i - N_AVERAGED) : i].mean()) if i else seen)
        said["exponential smoothing"].append(smoothed)
        score = float(estimator.predictor().score(estimator.levels))
        said["ours"].append(float(estimator.curve().quantile(0.5)) * math.exp(score))
        smoothed += SMOOTHING * (seen - smoothed)
        estimator.add(seen, censored=False)
    return {name: np.array(values) for name, values in said.items()}


def errors(ttft_s: FloatArray) -> dict[str, tuple[float, float]]:
    """Return the mean error of each way, % of the TTFT and s, without the first N_SKIPPED."""
    seen = ttft_s[N_SKIPPED:]
    found = {}
    for name, said in predictions(ttft_s).items():
        off = np.abs(said[N_SKIPPED:] - seen)
        found[name] = (float(100 * (off / seen).mean()), float(off.mean()))
    return found


def characteristics(folder: Path) -> dict[str, Any]:
    """Return both tables: of each of the paper's services, and Pearson's coefficient of each trace."""
    traces = read(folder)
    services = {service: traces[name] for service, name in SERVICES.items() if name in traces}
    return {
        "pearson": {service: pearson(*rows) for service, rows in services.items()},
        "pearson_of_traces": {name: pearson(*rows) for name, rows in traces.items()},
        "errors": {service: errors(rows[1]) for service, rows in services.items()},
    }


def tables(figures: dict[str, Any]) -> str:
    """Return both tables beside the paper's."""
    published = {name.rstrip("~"): value for name, value in PEARSON.items()}
    rows = [
        [service, number(found, 4), number(published[service.rstrip("~")], 4)]
        for service, found in figures["pearson"].items()
    ]
    of_traces = [abs(x) for x in figures["pearson_of_traces"].values() if not math.isnan(x)]
    median = (
        f"median of |coefficient| over {len(of_traces)} traces: {np.median(of_traces):.3f}, most {max(of_traces):.3f}"
    )
    first = align(("prompt length and TTFT", "here", "Table 1"), rows)
    return f"{first}\n{median}\n\n{_errors_table(figures['errors'])}"


def _errors_table(found: dict[str, dict[str, tuple[float, float]]]) -> str:
    services = [service for service in PUBLISHED_ORDER if service in found]
    rows = [[f"{name}, here", *(_pair(found[s][name]) for s in services)] for name in next(iter(found.values()), {})]
    for name, pairs in PREDICTORS.items():
        known = dict(zip(PUBLISHED_ORDER, pairs, strict=True))
        rows.append([f"{name}, Table 5", *(_pair(known[s]) for s in services)])
    return align(("error of predicted TTFTs, % and s", *services), rows)


def _pair(found: Sequence[float]) -> str:
    return f"{found[0]:.1f} {found[1]:.3f}"


def main(argv: list[str] | None = None) -> int:
    """Read the traces and print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.characteristics", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help="folder with CSV files")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    return print_figures(characteristics(args.traces), tables, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
