"""A whole small model on this machine that drafts for a large one at a partner: which file, and how sure it may be."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...config.schema import Config
from ...engine.wire import ExitCalibration
from ...errors import ConfigError
from ...models.segment_files import read_head
from ...models.segments import is_recurrent
from ...models.vocabulary import vocabulary_mark
from ..device_settings import model_path
from .joined_model import shape_of

STEPS = 64  # of the table
REACH = 8.0  # log-odds up to which it goes: a chance of 0.9997


def draft_path(config: Config) -> Path:
    """Return the small model's file: `split.draft_model`, or the device's model. Raises ConfigError."""
    named = config.split.draft_model
    return Path(named).expanduser() if named else model_path(config.device)


def choose_draft(config: Config, named: str) -> Path:
    """Return the small model's file that the user has `named`; "" = the device's model. Raises ConfigError."""
    path = Path(named).expanduser().resolve() if named else model_path(config.device)
    if not path.is_file():
        raise ConfigError(f"--draft {path}: there is no such file; name a small GGUF model of the same family")
    return path


def require_drafter(small: Path, wanted: str, n_vocab: int, large: str) -> None:
    """Raise ConfigError unless the model in `small` can draft, and its tokens are those with the mark `wanted`.

    `large`, whose they are, has `n_vocab` of them: as many as the small one, or more that are unused.
    """
    head, header = read_head(small)
    if is_recurrent(header):
        msg = f"{small.name} is a recurrent model: it cannot take back what was guessed wrong, so it cannot draft"
        raise ConfigError(msg)
    if not wanted or vocabulary_mark(head, header) != wanted or shape_of(small)[1] > n_vocab:
        msg = (
            f"{small.name} cannot draft for {large}: their vocabularies differ, so token ids do not mean the same "
            "words. It has to be a small model of the same family (--draft FILE)"
        )
        raise ConfigError(msg)


def own_certainty() -> ExitCalibration:
    """Return how sure a small model may be before any verdict: by the probability that it gives to its first word.

    Verdicts put that right. As nobody has measured it, no tokens may leave by it without a verdict (`coverage` 0).
    """
    odds = np.linspace(-REACH, REACH, STEPS)
    return ExitCalibration(
        coefficients=(1.0, 0.0, 0.0, 0.0), scores=tuple(odds.tolist()), shares=tuple((1 / (1 + np.exp(-odds))).tolist())
    )
