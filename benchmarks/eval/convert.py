"""Makes the recorded traces of this checkout, benchmarks/eval/recorded, of the folder with all that were collected.

python -m benchmarks.eval.convert DIR [--into FOLDER]

Of each file whose licence lets others pass it on, the columns that the evaluation reads are kept, in order. The lengths
are drawn, since those that the tables of docs/lab/evaluation.md were made with may not be sold: log-normal, with the
quartiles of short instructions and their answers.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from disco_daemon.bench.command import progress
from disco_daemon.errors import ConfigError

from ..command import run_script

RECORDED = Path(__file__).parent / "recorded"
KEPT = {"ttft_llmperf.csv": "ttft_s", "ttft_llmdrift.csv": "latency_s", "ttft_thefastest.csv": "ttft_s"}
SEED, N_LENGTHS = 1, 1000
# Median, sigma of the logarithm, least and most; tokens.
PROMPTS, ANSWERS = (14.5, 0.54, 4, 147), (100.0, 1.3, 1, 500)


def convert(folder: Path, into: Path) -> None:
    """Write the set into a folder. Raises ConfigError where a file or a column is missing."""
    (into / "common").mkdir(parents=True, exist_ok=True)
    for name, column in KEPT.items():
        try:
            with (folder / name).open(newline="", encoding="utf-8") as file:
                rows = [(row["trace"], row[column]) for row in csv.DictReader(file)]
        except (OSError, KeyError) as e:
            msg = f"{folder / name} cannot be read, or has no column `trace` or `{column}`: {e!r}"
            raise ConfigError(msg) from e
        _write(into / name, ("trace", column), rows)
    random = np.random.default_rng(SEED)
    drawn = [
        np.clip(np.rint(median * random.lognormal(0.0, sigma, N_LENGTHS)), least, most).astype(int).tolist()
        for median, sigma, least, most in (PROMPTS, ANSWERS)
    ]
    _write(into / "common/lengths.csv", ("prompt_tokens", "output_tokens"), list(zip(*drawn, strict=True)))


def _write(path: Path, head: tuple[str, str], rows: list[tuple[object, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *rows])


def main(argv: list[str] | None = None) -> int:
    """Convert, and say what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with the collected files")
    parser.add_argument("--into", type=Path, default=RECORDED, help="(default: this checkout's set)")
    args = parser.parse_args(argv)
    convert(args.folder, args.into)
    progress(f"wrote {len(KEPT)} files of traces and one of lengths into {args.into}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
