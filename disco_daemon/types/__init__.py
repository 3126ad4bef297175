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
from .layers import LayerRange
from .needs import Json, Refusal
from .outcome import Attempt, EntryKind, HandoffRecord, LedgerEntry, Outcome, Reading, finite
from .request import BOTH, Continuation, Delivery, GenerationRequest, Sampling, Side

__all__ = [
    "BOTH",
    "Append",
    "Attempt",
    "CaughtUp",
    "Continuation",
    "Delivery",
    "Embedding",
    "EntryKind",
    "Finish",
    "GenerationRequest",
    "HandoffRecord",
    "Hold",
    "Json",
    "LayerRange",
    "LedgerEntry",
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
