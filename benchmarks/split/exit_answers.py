"""Answers of a model with an exit, computed by both ranges in step: what the exit says beside the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from disco_daemon.engine.llama.hidden import FloatRows
from disco_daemon.engine.llama.rows import Row
from disco_daemon.engine.llama.teacher import LowerRange, UpperRange
from disco_daemon.engine.wire import Generate
from disco_daemon.exits.calibrate import Doubles, signals
from disco_daemon.exits.quality import length_until_repeat

from .exit_figures import JudgedTokens

N_BESIDE = 16  # answers that are written at a time

Confidence = Callable[[Doubles], Doubles]  # of n x 3 signals


@dataclass(slots=True)
class WrittenAnswer:
    """The tokens of an answer, and of each token: the exit's signals, whether it agrees, whether it decided."""

    tokens: list[int] = field(default_factory=list)
    found: list[Doubles] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)


class RangesInStep:
    """Both ranges of a model; the first one's file has the exit."""

    def __init__(self, lower: LowerRange, upper: UpperRange) -> None:
        self._lower, self._upper = lower, upper

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt, up to where the answer begins."""
        request = Generate(id="exit", messages=[{"role": "user", "content": text}], temperature=0.0)
        return self._lower.vocabulary.prompt_tokens(request)

    def text(self, answer: WrittenAnswer) -> str:
        """Return an answer as a reader sees it."""
        pieces = (self._lower.vocabulary.piece(token) for token in answer.tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def write(
        self, asked: Sequence[list[int]], longest: Sequence[int], confidence: Confidence, theta: float | None
    ) -> list[WrittenAnswer]:
        """Write greedy answers of up to `longest` tokens each, up to where they go in circles.

        The exit decides the tokens of which its `confidence` is `theta` or more; None: the whole model decides all.
        Raises ModelError.
        """
        found = list[WrittenAnswer]()
        for at in range(0, len(asked), N_BESIDE):
            found += self._write(asked[at : at + N_BESIDE], longest[at : at + N_BESIDE], confidence, theta)
        return found

    def _write(
        self, asked: Sequence[list[int]], longest: Sequence[int], confidence: Confidence, theta: float | None
    ) -> list[WrittenAnswer]:
        answers = [WrittenAnswer() for _ in asked]

        def take(seqs: Iterable[int], own: FloatRows, logits: FloatRows) -> list[int]:
            """Add a token to each of these answers; return those that go on."""
            found, going_on = signals(own), list[int]()
            sure = confidence(found)
            for i, seq in enumerate(seqs):
                mine, whole, answer = int(own[i].argmax()), int(logits[i].argmax()), answers[seq]
                leaves = theta is not None and bool(sure[i] >= theta)
                token = mine if leaves else whole
                answer.found.append(found[i])
                answer.agrees.append(mine == whole)
                answer.left.append(leaves)
                if self._lower.vocabulary.ends(token):
                    continue
                answer.tokens.append(token)
                if len(answer.tokens) < longest[seq] and length_until_repeat(answer.tokens) == len(answer.tokens):
                    going_on.append(seq)
            return going_on

        live = list[int]()
        for seq, ids in enumerate(asked):
            self._lower.free(seq)
            self._upper.free(seq)
            live += take([seq], *self._run([(id_, i, seq, i == len(ids) - 1) for i, id_ in enumerate(ids)]))
        while live:
            rows = [
                (answers[seq].tokens[-1], len(asked[seq]) + len(answers[seq].tokens) - 1, seq, True) for seq in live
            ]
            live = take(live, *self._run(rows))
        return [_until_repeat(answer) for answer in answers]

    def _run(self, rows: Sequence[Row]) -> tuple[FloatRows, FloatRows]:
        """Return the exit's logits and the whole model's, of the rows that want them."""
        hidden, own = self._lower.run_with_exit(rows)
        return own, self._upper.run(rows, hidden)

    def close(self) -> None:
        """Free both; nothing else may be called afterwards."""
        self._lower.close()
        self._upper.close()


def _until_repeat(answer: WrittenAnswer) -> WrittenAnswer:
    n = length_until_repeat(answer.tokens)
    if n == len(answer.tokens):
        return answer  # with its end, if it has one
    return WrittenAnswer(answer.tokens[:n], answer.found[:n], answer.agrees[:n], answer.left[:n])


def judged(answers: Sequence[WrittenAnswer]) -> JudgedTokens:
    """Return what is known of the tokens of all answers, in order."""
    lengths = [len(answer.agrees) for answer in answers]
    return JudgedTokens(
        np.array([row for answer in answers for row in answer.found], np.float64).reshape(-1, 3),
        np.array([one for answer in answers for one in answer.agrees], np.bool_),
        np.array([one for answer in answers for one in answer.left], np.bool_),
        np.repeat(np.arange(len(answers)), lengths),
    )
