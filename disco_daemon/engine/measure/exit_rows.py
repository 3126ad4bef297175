"""Collects what an exit learns from: the model writes answers of its own, and each token's rows are kept in files.

The files of an unfinished training are found again: it goes on with the next prompt.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...exits.head import Floats, normed
from ...exits.prompts import PromptPart, prompts
from ...exits.quality import REPEAT
from ..llama.teacher import Teacher
from ..wire import Generate

N_ANSWERS = 16  # written at a time: more cost as much a token, since attention looks at all of them
LONGEST_PROMPT, LONGEST_ANSWER = 320, 160  # tokens
CELLS = (N_ANSWERS + 1) * (LONGEST_PROMPT + LONGEST_ANSWER)  # of the KV cache
HELD = N_ANSWERS  # the sequence of the latest prompt
N_EACH = 2  # answers to a prompt to train on: it is read once for both, which takes a third of the time
TEXT_TOKENS = 256  # of a user's text, read at a time
SHARD = 2000  # tokens in one file: what a training that is ended loses at most
TEMPERATURE, TOP_K = 0.8, 64  # of most answers to train on; greedy ones alone would be too much alike
GREEDY = 0.25  # of the answers to train on
SEED = 22


@dataclass(slots=True)
class ExitRows:
    """Of n tokens: hidden rows and last rows, what the whole model says next, what was drawn, and of which answer."""

    rows: Floats
    finals: Floats
    labels: NDArray[np.int64]
    tokens: NDArray[np.int64]
    answers: NDArray[np.int64]


@dataclass(slots=True)
class TaughtAnswer:
    """An answer of the model's own that is being written, with what is kept of each token."""

    greedy: bool
    prompt: int  # its number
    position: int
    next: int = 0
    tokens: list[int] = field(default_factory=list)
    runs: set[tuple[int, ...]] = field(default_factory=set)
    kept: list[tuple[Floats, Floats, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class HeldPrompt:
    """The latest prompt that was read, with what was computed of its last token; `n_left` answers may begin from it."""

    ids: list[int] = field(default_factory=list)
    number: int = 0
    n_left: int = 0
    last: tuple[Floats, Floats, Floats] | None = None


class RowCollector:
    """Writes the files of all parts into `folder`; `report` gets a line now and then."""

    def __init__(self, teacher: Teacher, folder: Path, patterns: str, report: Callable[[str], None]) -> None:
        self._teacher, self._folder, self._patterns, self._report = teacher, folder, patterns, report
        self._random = np.random.default_rng()
        self._held = HeldPrompt()

    def collect(self, part: PromptPart, n: int, texts: Sequence[str]) -> None:
        """Go on until there are `n` tokens of a part, and all of the user's `texts` for training. Raises ModelError."""
        n_done, n_prompts = self._so_far(part)
        source = enumerate(prompts(self._patterns, part))
        todo = itertools.islice(source, n_prompts, None)
        self._random = np.random.default_rng([SEED, n_prompts])
        self._held = HeldPrompt()
        if part is PromptPart.TRAIN and texts and not (self._folder / f"{part}-texts.npz").exists():
            self._read(texts)
        if n_done >= n:
            return
        began, shard = time.monotonic(), list[TaughtAnswer]()
        n_at_once = min(N_ANSWERS, 1 + (n - n_done) // LONGEST_ANSWER)
        for answer in self._answers(todo, part, n_at_once):
            shard.append(answer)
            n_new = sum(len(one.kept) for one in shard)
            if n_new >= min(SHARD, n - n_done):
                self._save(part, shard, time.monotonic() - began)
                n_done, began, shard = n_done + n_new, time.monotonic(), []
                self._report(f"collecting to {part}: {n_done} of {n} tokens")
                if n_done >= n:
                    return
        if shard:  # there are no prompts left
            self._save(part, shard, time.monotonic() - began)

    def load(self, part: PromptPart) -> ExitRows:
        """Return all that is kept of a part."""
        found = [np.load(path) for path in self._files(part)]
        if not found:
            none = np.zeros(0, np.int64)
            empty = np.zeros((0, self._teacher.lower.n_embd), np.float32)
            return ExitRows(empty, empty, none, none, none)
        rows = np.concatenate([one["rows"].astype(np.float32) * one["length"][:, None] for one in found])
        finals = np.concatenate([one["finals"] for one in found]).astype(np.float32)
        labels, tokens, answers = (
            np.concatenate([one[name] for one in found]).astype(np.int64) for name in ("labels", "tokens", "answers")
        )
        return ExitRows(rows, finals, labels, tokens, answers)

    def seconds(self) -> float:
        """Return how long all that is kept took to compute."""
        return sum(float(np.load(path)["seconds"]) for part in PromptPart for path in self._files(part))

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt, up to where the answer begins."""
        request = Generate(id="exit", messages=[{"role": "user", "content": text}], temperature=0.0)
        return self._teacher.vocabulary.prompt_tokens(request)

    def _files(self, part: PromptPart) -> list[Path]:
        return sorted(self._folder.glob(f"{part}-*.npz"))

    def _so_far(self, part: PromptPart) -> tuple[int, int]:
        """Return the number of tokens that are kept, and of prompts that are done."""
        n_tokens = n_prompts = 0
        for path in self._files(part):
            with np.load(path) as kept:
                if path.stem.endswith("texts"):
                    continue
                n_tokens += len(kept["labels"])
                n_prompts = max(n_prompts, int(kept["answers"].max()) + 1)
        return n_tokens, n_prompts

    def _answers(self, todo: Iterator[tuple[int, str]], part: PromptPart, n_at_once: int) -> Iterator[TaughtAnswer]:
        """Yield finished answers, some of which are written at a time, until there are no prompts left."""
        live: dict[int, TaughtAnswer] = {}
        while True:
            for seq in range(n_at_once):
                while seq not in live and (self._held.n_left or self._read_next(todo, part)):
                    answer = self._begin(seq, greedy=part is not PromptPart.TRAIN)
                    if answer is not None:
                        live[seq] = answer
            if not live:
                return
            hidden, finals, logits = self._teacher.run([(a.next, a.position, seq, True) for seq, a in live.items()])
            for i, (seq, answer) in enumerate(list(live.items())):
                answer.position += 1
                if self._take(answer, hidden[i], finals[i], logits[i]):
                    del live[seq]
                    yield answer

    def _read_next(self, todo: Iterator[tuple[int, str]], part: PromptPart) -> bool:
        """Read the next prompt that is not too long, but for what it has in common with the one before it."""
        for number, text in todo:
            ids, before = self.prompt_ids(text), self._held.ids
            if len(ids) > LONGEST_PROMPT:
                continue
            n_same = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, ids[:-1], before)))
            self._teacher.free(HELD, n_same)
            rows = [(id_, i, HELD, i == len(ids) - 1) for i, id_ in enumerate(ids)]
            hidden, finals, logits = self._teacher.run(rows[n_same:])
            n_answers = N_EACH if part is PromptPart.TRAIN else 1
            self._held = HeldPrompt(ids, number, n_answers, (hidden[0], finals[0], logits[0]))
            return True
        return False

    def _begin(self, seq: int, *, greedy: bool) -> TaughtAnswer | None:
        """Begin an answer to the prompt that was read; None if the model has nothing to say."""
        held = self._held
        assert held.last is not None
        held.n_left -= 1
        self._teacher.free(seq)
        self._teacher.share(HELD, seq, len(held.ids))
        # Of the answers to one prompt the first alone may be greedy: two such would be the same.
        by_chance = held.n_left == N_EACH - 1 and self._random.random() < N_EACH * GREEDY
        answer = TaughtAnswer(greedy or by_chance, held.number, len(held.ids))
        return None if self._take(answer, *held.last) else answer

    def _take(self, answer: TaughtAnswer, hidden: Floats, final: Floats, logits: Floats) -> bool:
        """Keep what was computed for the latest token, and draw the next; return whether the answer has its end."""
        label = int(logits.argmax())
        answer.next = label if answer.greedy else self._draw(logits)
        answer.kept.append((hidden, final, label, answer.next))
        if self._teacher.vocabulary.ends(answer.next) or len(answer.kept) >= LONGEST_ANSWER:
            return True
        answer.tokens.append(answer.next)
        run = tuple(answer.tokens[-REPEAT:])
        if len(run) == REPEAT and run in answer.runs:
            del answer.kept[-REPEAT:]
            return True
        answer.runs.add(run)
        return False

    def _draw(self, logits: Floats) -> int:
        best = np.argpartition(logits, -TOP_K)[-TOP_K:]
        return int(best[(logits[best] / TEMPERATURE + self._random.gumbel(size=TOP_K)).argmax()])

    def _read(self, texts: Sequence[str]) -> None:
        """Keep the rows of all tokens of a user's texts."""
        began, kept = time.monotonic(), list[TaughtAnswer]()
        for number, text in enumerate(texts):
            ids = self._teacher.vocabulary.tokenize(text)
            for at in range(0, len(ids), TEXT_TOKENS):
                part = ids[at : at + TEXT_TOKENS]
                self._teacher.free(0)
                computed = self._teacher.run([(id_, i, 0, True) for i, id_ in enumerate(part)])
                answer = TaughtAnswer(True, number, 0)
                answer.kept = [(h, f, int(z.argmax()), 0) for h, f, z in zip(*computed, strict=True)]
                kept.append(answer)
            self._report(f"reading your texts: {number + 1} of {len(texts)}")
        self._save(PromptPart.TRAIN, kept, time.monotonic() - began, name="texts")

    def _save(self, part: PromptPart, answers: Sequence[TaughtAnswer], seconds: float, name: str = "") -> None:
        """Write a file of finished answers, whole or not at all. Raises OSError."""
        kept = [(answer.prompt, *one) for answer in answers for one in answer.kept]
        numbers, hidden, finals, labels, tokens = zip(*kept, strict=True)
        rows = np.array(hidden, np.float32)
        length = np.sqrt(np.mean(np.square(rows), axis=1))
        path = self._folder / f"{part}-{name or format(len(self._files(part)), '05d')}.npz"
        unfinished = path.with_suffix(".new")
        with unfinished.open("wb") as file:
            np.savez(
                file, rows=normed(rows, 0.0).astype(np.float16), length=length, labels=np.array(labels, np.int32),
                finals=np.array(finals, np.float16), tokens=np.array(tokens, np.int32),
                answers=np.array(numbers, np.int32), seconds=np.float64(seconds),
            )  # fmt: skip
        unfinished.replace(path)
