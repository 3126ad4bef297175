"""The frozen values that travel between the rooms. Nothing here does I/O."""

from .embedding import Embedding
from .generation import Finish, Plan, PromptLength, Readiness, Token
from .layers import LayerRange
from .needs import Json, Refusal
from .orders import Append, CaughtUp, Hold, Order, Pace, Paused
from .outcome import (
    Attempt,
    EntryKind,
    HandoffRecord,
    HedgeResult,
    LedgerEntry,
    Outcome,
    Reading,
    Reason,
    Usage,
    finite,
)
from .request import BOTH, Continuation, Delivery, GenerationRequest, Sampling, Side
from .rest import GENERATED, ExpectedRest, rest_at
from .split import SplitMode, SplitWish

__all__ = [
    "BOTH",
    "GENERATED",
    "Append",
    "Attempt",
    "CaughtUp",
    "Continuation",
    "Delivery",
    "Embedding",
    "EntryKind",
    "ExpectedRest",
    "Finish",
    "GenerationRequest",
    "HandoffRecord",
    "HedgeResult",
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
    "Reason",
    "Refusal",
    "Sampling",
    "Side",
    "SplitMode",
    "SplitWish",
    "Token",
    "Usage",
    "finite",
    "rest_at",
]
