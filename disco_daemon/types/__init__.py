"""The frozen values that travel between the rooms. Nothing here does I/O."""

from .caller import OWNER, Caller
from .capabilities import UNKNOWN, Capabilities, Capability, Tools, together
from .choices import choice_of, most_tokens, n_choices
from .content import is_text, text_of
from .delta import CallForm, CallPart, Delta, FinishReason, ObjectScan
from .drawing import AS_USUAL, Drawing, drawing_of
from .embedding import Embedding, Given, Purpose, TextFamily, TextKind, TextTask
from .fields import FIELDS, Field, Json, Treatment, field_of
from .generation import Finish, Plan, PromptLength, Readiness, Token
from .grade import EQUAL, Grade, Relation, Unequal, raced, relation
from .health import DeviceHealth, EngineHealth, FleetHealth, LinkHealth
from .infill import ExtraText, Infill, RawPrompt
from .layers import LayerRange
from .likelihood import Likelihood, TextLogprobs, chat_logprobs, top_logprobs
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
from .request import BOTH, Continuation, Delivery, EarlierAnswer, GenerationRequest, NextAct, Sampling, Side
from .rest import GENERATED, ExpectedRest, rest_at
from .split import SplitMode, SplitWish
from .tools import ToolUse, refused_tools, tool_use
from .wanted import lacking, wanted
