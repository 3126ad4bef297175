"""The frozen values that travel between the rooms. Nothing here does I/O."""

from .content import is_text, text_of
from .drawing import AS_USUAL, Drawing, drawing_of
from .embedding import Embedding
from .fields import FIELDS, Field, Json, Treatment, field_of
from .generation import Finish, Plan, PromptLength, Readiness, Token
from .layers import LayerRange
from .needs import Refusal, WishError, form_parameter, ignored, is_for_a_server, named, response_format
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
from .tools import ToolUse, refused_tools, tool_use

__all__ = [
    "AS_USUAL",
    "BOTH",
    "FIELDS",
    "GENERATED",
    "Append",
    "Attempt",
    "CaughtUp",
    "Continuation",
    "Delivery",
    "Drawing",
    "Embedding",
    "EntryKind",
    "ExpectedRest",
    "Field",
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
    "ToolUse",
    "Treatment",
    "Usage",
    "WishError",
    "drawing_of",
    "field_of",
    "finite",
    "form_parameter",
    "ignored",
    "is_for_a_server",
    "is_text",
    "named",
    "refused_tools",
    "response_format",
    "rest_at",
    "text_of",
    "tool_use",
]
