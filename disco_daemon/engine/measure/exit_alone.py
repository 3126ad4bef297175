"""Lets an exit write answers alone, and compares them with the whole model's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...exits.calibrate import Calibration, signals
from ...exits.head import ExitHead, Floats
from ...exits.prompts import PromptPart, prompts
from ...exits.quality import length_until_repeat, rouge_l
from ..llama.rows import Row
from ..llama.teacher import Teacher
from .exit_rows import LONGEST_PROMPT, RowCollector

N_ANSWERS = 12  # at most
ANSWER_SHARE = 100  # tokens to judge from, for each of them
LONGEST = 96  # tokens
THETA = 0.9  # as sure as an exit must be in the answers where it may decide


Choice = Callable[[Floats, Floats], NDArray[np.int64]]  # of tokens, by what an exit gets and the whole model's logits


@dataclass(frozen=True, slots=True)
class AloneFigures:
    """Of answers that an exit wrote alone: the whole model's perplexity, and ROUGE-L to its own answers (means).

    `rouge_l_confident` is that of answers whose tokens are the exit's where it was sure by THETA, else the whole
    model's.
    """

    perplexity: float
    rouge_l: float
    rouge_l_confident: float


def write_alone(
    teacher: Teacher,
    rows: RowCollector,
    head: ExitHead,
    calibration: Calibration,
    output: Floats,
    patterns: str,
    n_judged: int,
) -> AloneFigures:
    """Write greedy answers to prompts that are kept to judge: alone, where it is sure, and with the whole model.

    More of them where more tokens, `n_judged`, were to judge from. Raises ModelError.
    """
    texts = itertools.islice(prompts(patterns, PromptPart.JUDGE), min(N_ANSWERS, max(1, n_judged // ANSWER_SHARE)))
    asked = [rows.prompt_ids(text)[:LONGEST_PROMPT] for text in texts]

    def sure(hidden: Floats, logits: Floats) -> NDArray[np.int64]:
        own = head.logits(hidden, output)
        leaves = calibration.confidence(signals(own)) >= THETA
        tokens: NDArray[np.int64] = np.where(leaves, own.argmax(1), logits.argmax(1))
        return tokens

    whole = _write(teacher, asked, lambda _, logits: logits.argmax(1))
    alone = _write(teacher, asked, lambda hidden, _: head.logits(hidden, output).argmax(1))
    confident = _write(teacher, asked, sure)
    nats = sum(_nats(teacher, prompt, answer) for prompt, answer in zip(asked, alone, strict=True) if answer)
    perplexity = float(np.exp(nats / max(1, sum(map(len, alone)))))
    return AloneFigures(perplexity, _likeness(teacher, alone, whole), _likeness(teacher, confident, whole))


def _likeness(teacher: Teacher, found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    shares = [rouge_l(_text(teacher, a), _text(teacher, b)) for a, b in zip(found, wanted, strict=True)]
    return float(np.mean(shares))


def _write(teacher: Teacher, asked: Sequence[Sequence[int]], choose: Choice) -> list[list[int]]:
    """Return answers of chosen tokens, each up to where it goes in circles."""
    answers: list[list[int]] = [[] for _ in asked]
    for seq in range(len(asked)):
        teacher.free(seq)

    def compute(rows: Sequence[Row]) -> list[int]:
        hidden, _, logits = teacher.run(rows)
        return [int(token) for token in choose(hidden, logits)]

    firsts = [compute([(id_, i, seq, i == len(ids) - 1) for i, id_ in enumerate(ids)]) for seq, ids in enumerate(asked)]
    latest = {seq: tokens[0] for seq, tokens in enumerate(firsts)}
    while True:
        latest = {seq: token for seq, token in latest.items() if not teacher.vocabulary.ends(token)}
        for seq, token in latest.items():
            answers[seq].append(token)
        latest = {seq: token for seq, token in latest.items() if len(answers[seq]) < LONGEST}
        if not latest:
            return [answer[: length_until_repeat(answer)] for answer in answers]
        batch = [(token, len(asked[seq]) + len(answers[seq]) - 1, seq, True) for seq, token in latest.items()]
        latest = dict(zip(latest, compute(batch), strict=True))


def _nats(teacher: Teacher, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return by how many nats an answer surprises the whole model."""
    teacher.free(0)
    ids = [*prompt, *answer]
    asked = [(id_, i, 0, len(prompt) - 1 <= i < len(ids) - 1) for i, id_ in enumerate(ids)]
    logits = teacher.run(asked)[2]
    logits -= logits.max(1, keepdims=True)
    told = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(answer)), list(answer)]
    return float(told.sum())


def _text(teacher: Teacher, tokens: Sequence[int]) -> str:
    return b"".join(teacher.vocabulary.piece(token) for token in tokens).decode("utf-8", "replace")
