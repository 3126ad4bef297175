"""The frozen values that travel between the rooms. Nothing here does I/O."""

from .generation import (
    Append,
    CaughtUp,
    Embedding,
    Finish,
    Hold,
    Order,
    Pace,
    Paused,
    Plan,
    PromptLength,
    Readiness,
    Token,
    Usage,
)
from .outcome import Attempt, HandoffRecord, Outcome, Reading, finite
from .request import BOTH, Continuation, Delivery, GenerationRequest, Json, Refusal, Sampling, Side

__all__ = [
    "BOTH",
    "Append",
    "Attempt",
    "CaughtUp",
    "Continuation",
    "Delivery",
    "Embedding",
    "Finish",
    "GenerationRequest",
    "HandoffRecord",
    "Hold",
    "Json",
    "Order",
    "Outcome",
    "Pace",
    "Paused",
    "Plan",
    "PromptLength",
    "Readiness",
    "Reading",
    "Refusal",
    "Sampling",
    "Side",
    "Token",
    "Usage",
    "finite",
]
