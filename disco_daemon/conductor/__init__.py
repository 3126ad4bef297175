"""Answers requests: `Conductor.run` is the path of one, `answer_run` its story, `context` what all of them share."""

from .conductor import Conductor
from .context import AnswerContext, DeliveryDefaults, LocalModels, Privacy, Sink
from .eligible import eligible, ignored_by, planned_quality
from .keeper import Keeper
from .plan import prompt_length

__all__ = [
    "AnswerContext",
    "Conductor",
    "DeliveryDefaults",
    "Keeper",
    "LocalModels",
    "Privacy",
    "Sink",
    "eligible",
    "ignored_by",
    "planned_quality",
    "prompt_length",
]
