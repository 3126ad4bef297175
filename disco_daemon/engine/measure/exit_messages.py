"""The messages of an exit's training, the child process of `disco exits train`: a job and its result (`system.job`)."""

from __future__ import annotations

import msgspec

from .split_messages import SplitRange


class ExitJob(msgspec.Struct, frozen=True):
    """Train an exit behind the first of the two `ranges` of the model `whole` of `n_layers`.

    `head` is auto, linear or mlp; `tokens` of own answers to the prompts of `patterns` are computed, beside the user's
    `texts`. What is computed is kept in `folder`, so that a training that was ended goes on from there; the result is
    put there, too. The rest is as in `wire.Load`; `nice` is added to the process's niceness.
    """

    whole: str
    n_layers: int
    ranges: list[SplitRange]
    head: str
    tokens: int
    patterns: str
    folder: str
    n_threads: int
    texts: list[str] = []
    kv_type: str = "auto"
    flash_attn: bool | None = None
    repack: bool = True
    nice: int = 19


FAITHFUL = 0.95  # ROUGE-L to the whole model's answers: an exit below it claims no coverage


class ExitFigures(msgspec.Struct, frozen=True):
    """What an exit is worth, on answers to prompts that neither training nor calibration saw.

    `agreement` is the share of tokens that the whole model would say, `ece` the calibration error, `coverage` the share
    of tokens that may leave by threshold. `perplexity` is that of the whole model on what the exit writes alone, and
    `rouge_l_alone` compares that with the whole model's own answers, and `rouge_l_confident` answers where it decides
    what it is sure of by 0.9; older exits have none. Training took `seconds` in all.
    """

    model: str
    cut: int
    head: str
    train_tokens: int
    seconds: float
    agreement: float
    perplexity: float
    ece: float
    coverage: dict[str, float]
    tokens_per_round_trip: float
    rouge_l_alone: float
    rouge_l_confident: float | None = None

    @property
    def is_faithful(self) -> bool:
        """Whether answers by what it is sure of are near enough to the whole model's for a coverage to be claimed."""
        return self.rouge_l_confident is None or self.rouge_l_confident >= FAITHFUL


class ExitTrained(msgspec.Struct, tag=True, frozen=True):
    """The training is done: `file` in the job's folder has the exit."""

    figures: ExitFigures
    file: str
