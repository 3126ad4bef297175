"""What the split benchmark asks, and how it compares what it hears. Pure, but for reading a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disco_daemon.bench.child import BenchError

PACKAGED = Path(__file__).with_name("split_prompts.jsonl")
N_REPEATED = 16  # tokens in a row that come a second time: a small model goes round in a circle from there on
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """A prompt, and the kind of data it belongs to: its results are listed apart."""

    data: str
    text: str


def read_prompts(path: Path = PACKAGED) -> list[SplitPrompt]:
    """Read JSON lines with `prompt`, and `data` if there are several kinds. Raises BenchError."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                row = json.loads(line)
                found.append(SplitPrompt(str(row.get("data", path.stem)), str(row["prompt"])))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
        msg = f"{path} is no file of JSON lines with a prompt each: {e!r} behind {len(found)} prompts"
        raise BenchError(msg) from e
    if not found:
        msg = f"{path} has no prompt"
        raise BenchError(msg)
    return found


def choose(prompts: Sequence[SplitPrompt], n: int) -> list[SplitPrompt]:
    """Return up to `n` prompts of each kind of data, the first ones."""
    kinds = dict.fromkeys(prompt.data for prompt in prompts)
    return [prompt for kind in kinds for prompt in [p for p in prompts if p.data == kind][:n]]


def rouge_l(candidate: str, reference: str) -> float:
    """Return ROUGE-L (Lin 2004), 0 to 1: F1 of the longest common subsequence of words, as the rouge-score package."""
    ours, theirs = (_WORD.findall(text.lower()) for text in (candidate, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    lengths = [0] * (len(theirs) + 1)
    for word in ours:
        diagonal = 0
        for at, other in enumerate(theirs, 1):
            above = lengths[at]
            lengths[at] = diagonal + 1 if word == other else max(above, lengths[at - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(ours) + len(theirs))


def n_until_repeated(tokens: Sequence[object], n: int = N_REPEATED) -> int:
    """Return how many tokens come before a run of `n` that was there before; all of them if there is none."""
    seen = set()
    for at in range(len(tokens) - n + 1):
        run = tuple(tokens[at : at + n])
        if run in seen:
            return at
        seen.add(run)
    return len(tokens)


def naive_bytes(n_prompt: int, n_tokens: int, n_embd: int) -> int:
    """Return what a naive split sends: for each token the rows of the whole context, in float32 (CE-CoLLM, Table 2)."""
    return 4 * n_embd * sum(n_prompt + at for at in range(n_tokens))
