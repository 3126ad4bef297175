"""Makes the graded prompts of this checkout, benchmarks/eval/grades: numbers only, of public prompts and of our own.

python -m benchmarks.eval.graded DIR [--into FOLDER]

`DIR` is a checkout of lm-sys/RouteLLM, whose `routellm/evals` has MMLU and GSM8K with the grades of Mixtral 8x7B and
GPT-4. Every second subject of MMLU and every second question of GSM8K are for choosing what the product looks at, and
are not kept; of the others each second question is, in `graded.csv`. The embedded model answers the questions of
`benchmarks.eval.checkable` itself, greedily, on one thread; `checked.csv` has which were right, and its own
log-probabilities.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.bench.command import progress
from disco_daemon.dispatch.request_facts import RequestFacts, Surroundings
from disco_daemon.engine.llama.likelihood import log_probabilities
from disco_daemon.errors import ConfigError
from disco_daemon.models.default import default_model_path
from disco_daemon.types import GenerationRequest

from ..command import run_script
from .checkable import Task, tasks

GRADES = Path(__file__).parent / "grades"
GRADED, CHECKED = "graded.csv", "checked.csv"
GRADED_COLUMNS = ("set", "tokens", "kinds", "small", "large")
CHECKED_COLUMNS = ("set", "tokens", "kinds", "prompt_mean", "prompt_least", "first_mean", "first_least", "right")
N_EACH = 36  # questions of each kind of ours
N_FIRST = 8  # tokens of an answer whose log-probabilities are kept: what can be seen before much of it was read
MOST_ANSWER, N_CTX = 48, 1024  # tokens
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def kinds_of(text: str) -> str:
    """Return the kinds that the product tells such a question by, as the history keeps them."""
    around = Surroundings(lambda: datetime.now(UTC), lambda: None, lambda: 0.0)
    request = GenerationRequest("graded", ({"role": "user", "content": text},))
    return ",".join(RequestFacts(request, "disco", {}, around).learned_kinds)


def graded(folder: Path) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield set, prompt, and whether the small and the large model were right, of what nothing was chosen by.

    Raises ConfigError where a file is missing.
    """
    evals = folder / "routellm" / "evals"
    subjects = sorted((evals / "mmlu" / "responses").glob("mmlu_*.csv"))[1::2]
    if not subjects:
        msg = f"{evals} has no mmlu/responses: is this a checkout of RouteLLM?"
        raise ConfigError(msg)
    for path in (*subjects, evals / "gsm8k" / "gsm8k_responses.csv"):
        is_gsm8k = path.parent.name == "gsm8k"
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        for prompt, small, large, *_ in rows[1::4] if is_gsm8k else rows[1::2]:
            yield "gsm8k" if is_gsm8k else "mmlu", prompt, small == "True", large == "True"


class Answering:
    """The embedded model on one thread, which answers greedily; each token's log-probability is looked at."""

    def __init__(self) -> None:
        from llama_cpp import Llama

        self._model = Llama(
            str(default_model_path()), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
        )

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return len(self._tokens(text))

    def answer(self, task: Task) -> list[Any]:
        """Return the row of one question."""
        head, prompt, end = self._tokens(CHAT[0]), self._tokens(task.prompt), self._tokens(CHAT[1])
        ids = [*head, *prompt, *end]
        self._model.reset()
        self._model.eval(ids)
        read = [self._of(at - 1)[ids[at]] for at in range(len(head), len(head) + len(prompt))]
        answer: list[int] = []
        drawn: list[float] = []
        while len(answer) < MOST_ANSWER:
            row = self._of(len(ids) + len(answer) - 1)
            best = int(row.argmax())
            drawn.append(float(row[best]))
            if best == self._model.token_eos():
                break
            answer.append(best)
            self._model.eval([best])
        text = self._model.detokenize(answer).decode("utf-8", "replace")
        first = drawn[:N_FIRST]
        found = (np.mean(read), np.min(read), np.mean(first), np.min(first))
        rounded = [f"{value:.3f}" for value in found]
        return [task.kind, len(ids), kinds_of(task.prompt).replace(",", " "), *rounded, int(task.is_right(text))]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self._model.tokenize(text.encode(), add_bos=False, special=True)
        return found

    def _of(self, at: int) -> FloatArray:
        return log_probabilities(self._model.scores[at]).astype(np.float64)


def make(folder: Path, into: Path) -> None:
    """Write both files. Raises ConfigError where the folder lacks something."""
    device = Answering()
    rows = [
        [name, device.count(prompt), kinds_of(prompt).replace(",", " "), int(small), int(large)]
        for name, prompt, small, large in graded(folder)
    ]
    _write(into / GRADED, GRADED_COLUMNS, rows)
    progress(f"{len(rows)} graded prompts of others")
    asked = tasks(N_EACH)
    _write(into / CHECKED, CHECKED_COLUMNS, [device.answer(task) for task in asked])
    progress(f"{len(asked)} questions of our own")


def _write(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def main(argv: list[str] | None = None) -> int:
    """Make them, and say what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eval.graded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkout of lm-sys/RouteLLM")
    parser.add_argument("--into", type=Path, default=GRADES, metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args(argv)
    make(args.folder, args.into)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
