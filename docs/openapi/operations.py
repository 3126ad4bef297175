"""What each route takes and gives, for /openapi.json: one table, with an entry for every route. Pure.

All else that the document says of a route stands elsewhere: what it does in its handler's docstring, where it is served
in `doors.ROUTES`, how its errors look in `failures.ERROR_SHAPES`, what its fields mean in `types.FIELDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import msgspec

from disco_daemon.api.anthropic.messages_request import MessagesRequest
from disco_daemon.api.control.control_requests import Adjustment, DeviceWish, ServerWish
from disco_daemon.api.control.documents import MAX_PLAN_TOKENS, TAIL_KNOBS, OutdoneAnswer
from disco_daemon.api.control.fleet_routes import DrainWish
from disco_daemon.api.control.key_routes import USAGE, KeyChange, KeyEnd, KeyWish
from disco_daemon.api.control.machine_routes import PairWish, RevokeWish
from disco_daemon.api.llama_server.infill_shape import InfillRequest
from disco_daemon.api.llama_server.rerank_routes import PATHS as RERANK_PATHS
from disco_daemon.api.llama_server.rerank_routes import RerankRequest
from disco_daemon.api.ollama.ollama_request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from disco_daemon.api.openai.embeddings import EmbeddingsRequest
from disco_daemon.api.openai.openai_request import ChatRequest, CompletionRequest
from disco_daemon.api.responses.responses_request import ResponsesRequest
from docs.openapi import answer_types as gives

Schema = dict[str, Any]
OBJECT: Schema = {"type": "object"}


class Fields(StrEnum):
    """Which rows of the fields' table belong to a body beside its type."""

    NONE = ""
    CHAT = "chat"
    RAW = "raw"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Failing(Enum):
    """The statuses of errors that a kind of route has, beside those that every one has (`openapi.everywhere`)."""

    NOT = ()
    WRONG = (400,)
    GONE = (404,)
    HISTORY = (400, 404)
    BODY = (400, 408)
    RUNNING = (400, 404, 408)
    SHOWN = (400, 404, 408, 429)
    CHECK = (400, 408, 429, 504)
    ANSWER = (400, 404, 408, 429, 502, 504)
    PULL = (400, 404, 408, 429, 502)
    ALWAYS = (501,)


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of the query, or of the path."""

    name: str
    schema: Schema
    about: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: the type of its body, with the `fields` that travel beside it, and of its answer.

    `takes` is None for a route without a body, `may_be_empty` for one that does without; `requires` are fields that the
    type can do without and the route cannot. `streams` is the media type of its streams. `statuses` are answers of
    another status that have the type of a 200.
    """

    takes: type[msgspec.Struct] | Schema | None = None
    gives: type[msgspec.Struct] | Schema = field(default_factory=lambda: OBJECT)
    failing: Failing = Failing.NOT
    fields: Fields = Fields.NONE
    streams: str = ""
    query: tuple[Query, ...] = ()
    may_be_empty: bool = False
    statuses: tuple[int, ...] = ()
    media: str = "application/json"
    requires: tuple[str, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)


SSE, LINES = "text/event-stream", "application/x-ndjson"
HELLO = {"model": "disco", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
OLLAMA = {"model": "disco", "stream": False, "options": {"num_predict": 8}}
RESPOND = {"model": "disco", "input": "Hello!", "max_output_tokens": 8}
SETTINGS: Schema = {
    "type": "object",
    "minProperties": 1,
    "description": "Settings by `section.name`: docs/reference/settings.md, those with a ●.",
}
_BETA = Query("beta", {"type": "string"}, "Taken, and without effect.")
_ROWS: Schema = {"type": "integer"}
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_TAIL = tuple(
    Query(name, _AMOUNT | ({} if most == float("inf") else {"maximum": most}), "The policy's knob of that name.")
    for name, most in TAIL_KNOBS.items()
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        ChatRequest, gives.ChatCompletion, Failing.ANSWER, Fields.CHAT, SSE,
        examples={"hello": HELLO, "streamed": HELLO | {"stream": True}},
    ),
    ("POST", "/v1/completions"): Operation(
        CompletionRequest, gives.TextCompletion, Failing.ANSWER, Fields.RAW, SSE,
        examples={"once": {"model": "disco", "prompt": "Once upon a time", "max_tokens": 8}},
    ),
    ("POST", "/v1/embeddings"): Operation(
        EmbeddingsRequest, gives.EmbeddingList, Failing.ANSWER,
        examples={"two": {"model": "disco/device", "input": ["one", "two"]}},
    ),
    **dict.fromkeys((("POST", path) for path in RERANK_PATHS), Operation(
        RerankRequest, gives.Reranked, Failing.ANSWER,
        examples={"two": {"model": "disco/device", "query": "Where is it?", "documents": ["here", "tomorrow"]}},
    )),
    ("POST", "/v1/responses"): Operation(
        ResponsesRequest, gives.ResponsesAnswer, Failing.ANSWER, Fields.RESPONSES, SSE, requires=("input",),
        examples={"hello": RESPOND, "streamed": RESPOND | {"stream": True}},
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        ResponsesRequest, gives.ResponsesCount, Failing.ANSWER, Fields.RESPONSES, requires=("input",),
        examples={"hello": RESPOND},
    ),
    ("POST", "/v1/messages"): Operation(
        MessagesRequest, gives.MessagesAnswer, Failing.ANSWER, Fields.MESSAGES, SSE, query=(_BETA,),
        requires=("max_tokens",),
        examples={"hello": HELLO, "streamed": HELLO | {"stream": True}},
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        MessagesRequest, gives.MessagesCount, Failing.ANSWER, Fields.MESSAGES, query=(_BETA,),
        examples={"hello": HELLO},
    ),
    ("POST", "/infill"): Operation(InfillRequest, gives.InfillAnswer, Failing.ANSWER, Fields.RAW, SSE),
    ("POST", "/api/chat"): Operation(
        OllamaChatRequest, gives.OllamaChatAnswer, Failing.ANSWER, streams=LINES,
        examples={"hello": OLLAMA | {"messages": HELLO["messages"]}},
    ),
    ("POST", "/api/generate"): Operation(
        OllamaGenerateRequest, gives.OllamaAnswer, Failing.ANSWER, streams=LINES,
        examples={"once": OLLAMA | {"prompt": "Once upon a time"}},
    ),
    ("POST", "/api/embed"): Operation(
        OllamaEmbedRequest, gives.OllamaEmbeddings, Failing.ANSWER, requires=("input",),
        examples={"two": {"model": "disco", "input": ["one", "two"]}},
    ),
    ("POST", "/api/embeddings"): Operation(
        OllamaEmbedRequest, gives.OllamaEmbedding, Failing.ANSWER, requires=("prompt",),
        examples={"one": {"model": "disco", "prompt": "one"}},
    ),
    ("GET", "/api/tags"): Operation(gives=gives.OllamaTags),
    ("GET", "/api/ps"): Operation(gives=gives.OllamaInMemory),
    ("POST", "/api/show"): Operation(
        OllamaShowRequest, gives.OllamaShown, Failing.SHOWN, examples={"disco": {"model": "disco"}}
    ),
    ("GET", "/api/version"): Operation(gives=gives.OllamaVersion),
    ("POST", "/api/pull"): Operation(
        OllamaPullRequest, gives.OllamaPulled, Failing.PULL, streams=LINES,
        examples={"list": {"model": "qwen3-4b"}, "hub": {"model": "hf.co/Qwen/Qwen3-4B-GGUF:Q4_K_M"}},
    ),
    ("POST", "/api/create"): Operation(failing=Failing.ALWAYS),
    ("POST", "/api/push"): Operation(failing=Failing.ALWAYS),
    ("POST", "/api/copy"): Operation(failing=Failing.ALWAYS),
    ("DELETE", "/api/delete"): Operation(failing=Failing.ALWAYS),
    ("POST", "/api/blobs/{digest}"): Operation(failing=Failing.ALWAYS),
    ("GET", "/v1/models"): Operation(gives=gives.ModelCards),
    ("GET", "/v1/models/{name}"): Operation(gives=gives.ModelCard, failing=Failing.GONE),
    ("GET", "/"): Operation(gives=gives.RootAnswer),
    ("GET", "/openapi.json"): Operation(),
    ("GET", "/health"): Operation(gives=gives.HealthAnswer, statuses=(503,)),
    ("GET", "/metrics"): Operation(gives={"type": "string"}, media="text/plain"),
    ("GET", "/disco/v1/state"): Operation(),
    ("GET", "/disco/v1/trace/{request_id}"): Operation(failing=Failing.GONE),
    ("GET", "/disco/v1/providers"): Operation(failing=Failing.WRONG),
    ("GET", "/disco/v1/ledger"): Operation(
        gives=gives.DatedRows, failing=Failing.WRONG, query=(Query("days", _ROWS, "How many days; from 1 to 1,000."),)
    ),
    ("GET", "/disco/v1/plan"): Operation(
        failing=Failing.WRONG,
        query=(
            Query("tokens", {"type": "integer", "minimum": 1, "maximum": MAX_PLAN_TOKENS}, "Of the prompt.", True),
            Query("waited", _AMOUNT, "Seconds that are over already."),
        ),
    ),
    ("GET", "/disco/v1/whatif"): Operation(
        failing=Failing.HISTORY,
        query=(
            Query("rate", _AMOUNT, "The exchange rate, $/kWh.", True),
            Query("budget", _AMOUNT | {"maximum": 1}, "The budget ratio.", True),
            *_TAIL,
        ),
    ),
    ("POST", "/disco/v1/answers/{request_id}"): Operation(
        Adjustment, gives.AdjustedAnswer, Failing.RUNNING, examples={"slower": {"pace_tps": 8}}
    ),
    ("GET", "/disco/v1/history"): Operation(
        gives=gives.DatedRows, failing=Failing.WRONG, query=(Query("limit", _ROWS, "How many rows; from 1 to 1,000."),)
    ),
    ("POST", "/disco/v1/history/outdone"): Operation(OutdoneAnswer, failing=Failing.BODY),
    ("GET", "/disco/v1/settings"): Operation(),
    ("PATCH", "/disco/v1/settings"): Operation(SETTINGS, failing=Failing.BODY),
    ("POST", "/disco/v1/reload"): Operation(failing=Failing.WRONG),
    ("POST", "/disco/v1/server/check"): Operation(ServerWish, failing=Failing.CHECK),
    ("PUT", "/disco/v1/server"): Operation(ServerWish, failing=Failing.BODY),
    ("PUT", "/disco/v1/device"): Operation(DeviceWish, failing=Failing.BODY),
    ("GET", "/disco/v1/offers"): Operation(),
    ("POST", "/disco/v1/fetch"): Operation(DeviceWish, failing=Failing.BODY, statuses=(429,)),
    ("DELETE", "/disco/v1/fetch"): Operation(),
    ("GET", "/disco/v1/fleet"): Operation(),
    ("POST", "/disco/v1/fleet/pause"): Operation(failing=Failing.WRONG),
    ("POST", "/disco/v1/fleet/resume"): Operation(failing=Failing.WRONG),
    ("POST", "/disco/v1/fleet/drain"): Operation(DrainWish, failing=Failing.BODY),
    ("GET", "/disco/v1/fleet/members"): Operation(),
    ("POST", "/disco/v1/fleet/new"): Operation(PairWish, failing=Failing.BODY, may_be_empty=True),
    ("POST", "/disco/v1/fleet/revoke"): Operation(RevokeWish, failing=Failing.BODY),
    ("GET", "/disco/v1/partner"): Operation(),
    ("POST", "/disco/v1/partner/pair"): Operation(PairWish, failing=Failing.BODY, may_be_empty=True),
    ("POST", "/disco/v1/partner/revoke"): Operation(RevokeWish, failing=Failing.BODY),
    ("GET", "/disco/v1/keys"): Operation(failing=Failing.WRONG),
    ("POST", "/disco/v1/keys"): Operation(KeyWish, failing=Failing.BODY),
    ("POST", "/disco/v1/keys/change"): Operation(KeyChange, failing=Failing.BODY),
    ("POST", "/disco/v1/keys/revoke"): Operation(KeyEnd, failing=Failing.BODY),
    ("GET", "/disco/v1/usage"): Operation(
        failing=Failing.WRONG,
        query=(
            Query("by", {"type": "string", "enum": [*USAGE]}, "What it is summed up by."),
            Query("days", _ROWS, "How many days; from 1 to 1,000."),
        ),
    ),
    ("GET", "/disco/v1/usage/own"): Operation(
        failing=Failing.WRONG, query=(Query("days", _ROWS, "How many days; from 1 to 1,000."),),
    ),
}  # fmt: skip
