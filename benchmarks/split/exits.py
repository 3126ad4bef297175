"""How sure exits are, and how sure they may be, on kinds of text that they were not trained on.

`python -m benchmarks.split.exits` lets the whole model answer prompts of two kinds, greedily, while the exit says of
each token what it would have said: agreement and calibration error, as trained. Then the exit decides tokens itself:
all of which it is as sure as each theta, and all there are (`alone`); the table says how many of those that left differ
from what the whole model says at that place, and how near the answers are to the whole model's (ROUGE-L). Last,
verdicts on one kind are replayed after verdicts on the other: how fast it is known again how sure the exit may be.

Both ranges are computed in this process by llama.cpp, the exit in its range's file as at an edge. The prompts are those
that trainings keep to judge with, or those of a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import Figures, at_least, print_figures, progress
from disco_daemon.config.layers import data_path
from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.teacher import LowerRange, UpperRange
from disco_daemon.engine.wire import Load
from disco_daemon.exits.prompts import PromptPart, prompts
from disco_daemon.exits.quality import rouge_l
from disco_daemon.machines.split.check import ranges_of, segment_files
from disco_daemon.machines.split.trained_exits import KeptExit, KeptExits
from disco_daemon.models.default import fetch_default_model
from disco_daemon.system.control_groups import n_processors

from ..command import run_script
from .exit_answers import N_BESIDE, RangesInStep, WrittenAnswer, judged
from .exit_figures import (
    ASKED_ERROR,
    MOST,
    SLACK,
    JudgedTokens,
    error_of,
    errors_after_change,
    share_that_differs,
)  # fmt: skip
from .text import SplitPrompt, choose, read_prompts

THETAS = (0.8, 0.9, 0.95)
ALONE = 0.0
LONGEST_PROMPT = 768  # tokens
REPORT = 400  # characters: a prompt of ours that is longer has a text in it


@dataclass(frozen=True, slots=True)
class ExitSetup:
    """What is measured: the whole model answers all `prompts`; of each kind the exit decides `lossy` of them."""

    prompts: Sequence[SplitPrompt]
    lossy: int
    tokens: int
    n_threads: int


def own_prompts() -> list[SplitPrompt]:
    """Return the prompts that trainings keep to judge with, as questions and texts."""
    patterns = (files("disco_daemon.profiles") / "exit_prompts.toml").read_text("utf-8")
    return [
        SplitPrompt("texts" if len(text) > REPORT else "questions", text)
        for text in prompts(patterns, PromptPart.JUDGE)
    ]


def measure_exit(model: Path, exits: KeptExits, kept: KeptExit, setup: ExitSetup) -> Figures:
    """Return the figures of one exit. Raises ConfigError, ModelError."""
    cut = kept.figures.cut
    progress(f"{model.name}, behind {cut} layers, {kept.figures.head}")
    ranges = ranges_of(model, [cut])
    upper = segment_files().write(model, ranges)[-1]
    lower = exits.segment(kept, ranges[-1].of)
    loads = (
        Load(
            model_path=str(path), n_ctx=N_BESIDE * (LONGEST_PROMPT + setup.tokens), n_threads=setup.n_threads,
            n_threads_batch=setup.n_threads, exact=True, n_gpu_layers=0,
        )
        for path in (lower, upper)
    )  # fmt: skip
    both = RangesInStep(LowerRange(next(loads), ranges[0]), UpperRange(next(loads), ranges[1]))
    try:
        return {"model": model.name, "cut": cut, "head": kept.figures.head} | _measure(both, kept, setup)
    finally:
        both.close()


def _measure(both: RangesInStep, kept: KeptExit, setup: ExitSetup) -> dict[str, Any]:
    base = kept.calibration()
    kinds = dict.fromkeys(prompt.data for prompt in setup.prompts)
    told, rows, lossy = dict[str, JudgedTokens](), list[dict[str, Any]](), list[dict[str, Any]]()
    for kind in kinds:
        texts = [prompt.text for prompt in setup.prompts if prompt.data == kind]
        asked = [both.prompt_ids(text)[:LONGEST_PROMPT] for text in texts]
        whole = both.write(asked, [setup.tokens] * len(asked), base.confidence, None)
        told[kind] = tokens = judged(whole)
        rows.append(
            {
                "data": kind, "answers": len(whole), "tokens": len(tokens.agrees),
                "agreement": float(tokens.agrees.mean()), "ece": error_of(base, tokens),
            }
        )  # fmt: skip
        progress(f"{kind}: {len(whole)} answers, {len(tokens.agrees)} tokens")
        limits = [max(1, len(answer.tokens)) for answer in whole[: setup.lossy]]
        for theta in (*THETAS, ALONE):
            answers = both.write(asked[: setup.lossy], limits, base.confidence, theta)
            lossy.append(_lossy_row(both, kind, theta, answers, whole))
            progress(f"{kind}: theta {theta:g}")
    changes = [
        {"from": first, "to": then, "errors": errors_after_change(base, told[first], told[then])}
        for first in kinds
        for then in kinds
        if first != then
    ]
    return {"kinds": rows, "lossy": lossy, "changes": changes}


def _lossy_row(
    both: RangesInStep, kind: str, theta: float, answers: Sequence[WrittenAnswer], whole: Sequence[WrittenAnswer]
) -> dict[str, Any]:
    tokens = judged(answers)
    pairs = zip(answers, whole, strict=False)
    return {
        "data": kind, "theta": theta, "answers": len(answers), "tokens": len(tokens.left),
        "left": float(tokens.left.mean()), "differ": share_that_differs(tokens),
        "rouge_l": float(np.mean([rouge_l(both.text(own), both.text(other)) for own, other in pairs])),
    }  # fmt: skip


def report(figures: Figures) -> str:
    """Return the tables."""
    lines = []
    for one in figures["exits"]:
        lines.append(f"{one['model']}, behind {one['cut']} layers, {one['head']}")
        lines += [
            f"  {row['data']}: agrees on {row['agreement']:.1%} of {row['tokens']} tokens of {row['answers']} answers, "
            f"calibration error {row['ece']:.3f} (asked: {ASKED_ERROR})"
            for row in one["kinds"]
        ]
        for row in one["lossy"]:
            if row["theta"] == ALONE:
                lines.append(
                    f"  {row['data']}, alone: ROUGE-L {row['rouge_l']:.2f}, {row['differ']:.1%} of {row['tokens']} "
                    "tokens differ from what the whole model says there"
                )
                continue
            differ = "nothing differs" if row["differ"] is None else f"{row['differ']:.1%} of them differ"
            lines.append(
                f"  {row['data']}, theta {row['theta']:g}: {row['left']:.1%} of {row['tokens']} tokens left, {differ} "
                f"(asked: {1 - row['theta'] + SLACK:.1%} at most), ROUGE-L {row['rouge_l']:.2f}"
            )
        lines += [
            f"  {change['from']}, then {change['to']}: calibration error "
            + ", ".join(f"{error:.3f} after {n}" for n, error in change["errors"])
            + f" verdicts (asked: {ASKED_ERROR} within {MOST})"
            for change in one["changes"]
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure the kept exits; progress goes to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split.exits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="GGUF file (default: the embedded model)")
    parser.add_argument("--exits", type=Path, help="folder of kept exits (default: this user's)")
    parser.add_argument("--cut", type=at_least(1), action="append", help="layers below the exit (default: all kept)")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` and `data` (default: our own)")
    parser.add_argument("--answers", type=at_least(1), default=48, help="of each kind (default: %(default)s)")
    parser.add_argument("--lossy", type=at_least(1), default=16, help="of each kind by each theta (%(default)s)")
    parser.add_argument("--tokens", type=at_least(2), default=128, help="of an answer at most (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=n_processors(), help="(default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    quiet()
    model = args.model or fetch_default_model(progress)
    asked = choose(own_prompts() if args.prompts is None else read_prompts(args.prompts), args.answers)
    setup = ExitSetup(asked, args.lossy, args.tokens, args.threads)
    exits = KeptExits(model, args.exits or data_path() / "exits")
    chosen = {one.figures.cut: one for one in reversed(exits.all()) if args.cut is None or one.figures.cut in args.cut}
    if not chosen:
        msg = f"there is no exit of {model.name} in {exits.folder}: `disco exits train` makes one"
        raise BenchError(msg)
    found = [measure_exit(model, exits, one, setup) for _, one in sorted(chosen.items())]
    return print_figures({"exits": found}, report, as_json=args.json)


if __name__ == "__main__":
    sys.exit(run_script(main))
