"""Lets an exit write answers alone, and compares them with the whole model's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...exits.head import ExitHead, Floats
from ...exits.prompts import PromptPart, prompts
from ...exits.quality import length_until_repeat, rouge_l
from ..llama.rows import Row
from ..llama.teacher import Teacher
from .exit_rows import LONGEST_PROMPT, RowCollector

N_ANSWERS = 12  # at most
ANSWER_SHARE = 100  # tokens to judge from, for each of them
LONGEST = 96  # tokens


@dataclass(frozen=True, slots=True)
class AloneFigures:
    """Of answers that an exit wrote alone: the whole model's perplexity, and ROUGE-L to its own answers (means)."""

    perplexity: float
    rouge_l: float


def write_alone(
    teacher: Teacher, rows: RowCollector, head: ExitHead, output: Floats, patterns: str, n_judged: int
) -> AloneFigures:
    """Write greedy answers to prompts that are kept to judge, alone and with the whole model. Raises ModelError.

    More of them where more tokens, `n_judged`, were to judge from.
    """
    texts = itertools.islice(prompts(patterns, PromptPart.JUDGE), min(N_ANSWERS, max(1, n_judged // ANSWER_SHARE)))
    asked = [rows.prompt_ids(text)[:LONGEST_PROMPT] for text in texts]
    own, alone = _write(teacher, asked, None, output), _write(teacher, asked, head, output)
    shares = [rouge_l(_words(teacher, a), _words(teacher, b)) for a, b in zip(alone, own, strict=True)]
    nats = sum(_nats(teacher, prompt, answer) for prompt, answer in zip(asked, alone, strict=True) if answer)
    return AloneFigures(float(np.exp(nats / max(1, sum(map(len, alone))))), float(np.mean(shares)))


def _write(teacher: Teacher, asked: Sequence[Sequence[int]], head: ExitHead | None, output: Floats) -> list[list[int]]:
    """Return greedy answers, by the exit's head or by the whole model, each up to where it goes in circles."""
    answers: list[list[int]] = [[] for _ in asked]
    for seq in range(len(asked)):
        teacher.free(seq)

    def compute(rows: Sequence[Row]) -> Floats:
        if head is None:
            return teacher.run(rows)[2]
        hidden = teacher.lower.run(rows)
        return head.logits(hidden[[i for i, row in enumerate(rows) if row[3]]], output)

    firsts = [compute([(id_, i, seq, i == len(ids) - 1) for i, id_ in enumerate(ids)]) for seq, ids in enumerate(asked)]
    latest = {seq: int(logits[0].argmax()) for seq, logits in enumerate(firsts)}
    while True:
        latest = {seq: token for seq, token in latest.items() if not teacher.vocabulary.ends(token)}
        for seq, token in latest.items():
            answers[seq].append(token)
        latest = {seq: token for seq, token in latest.items() if len(answers[seq]) < LONGEST}
        if not latest:
            return [answer[: length_until_repeat(answer)] for answer in answers]
        batch = [(token, len(asked[seq]) + len(answers[seq]) - 1, seq, True) for seq, token in latest.items()]
        latest = dict(zip(latest, map(int, compute(batch).argmax(1)), strict=True))


def _nats(teacher: Teacher, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return by how many nats an answer surprises the whole model."""
    teacher.free(0)
    ids = [*prompt, *answer]
    asked = [(id_, i, 0, len(prompt) - 1 <= i < len(ids) - 1) for i, id_ in enumerate(ids)]
    logits = teacher.run(asked)[2]
    logits -= logits.max(1, keepdims=True)
    told = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(answer)), list(answer)]
    return float(told.sum())


def _words(teacher: Teacher, tokens: Sequence[int]) -> list[str]:
    return b"".join(teacher.vocabulary.piece(token) for token in tokens).decode("utf-8", "replace").split()
