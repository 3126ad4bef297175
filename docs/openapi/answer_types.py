"""The types of answers as /openapi.json tells them; tests hold what the shapes make against them. Pure.

Objects may have more keys than are named here: a server's own travel through. What is not always there has a default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = dict[str, Any]


class DiscoOutcome(msgspec.Struct):
    """What became of the request: docs/reference/api.md#one-request. Times in s, money in $, energy in J."""

    request_id: str
    ttft_s: float | None
    winner: Literal["device", "server"] | None
    reason: str | None
    plan: Json
    prompt_tokens: int
    endpoints: dict[str, Json]
    tokens: dict[str, int]
    handoffs: int
    moves: list[Json]
    cost_usd: float
    server_usd: float
    energy_j: float
    delivery: str
    qoe: float | None
    reading: Json | None
    ignored: list[str]
    narrowed: list[str] | None = None
    stand_in: Json | None = None
    split: Json | None = None
    stopped: Literal["repetition"] | None = None
    rule: str | None = None
    server: str | None = None


class CompletionUsage(msgspec.Struct):
    """Tokens that were read and made; `cost` in $, where the server told one."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    cost: float | None = None


class ChatAnswerMessage(msgspec.Struct):
    """What the assistant says, thinks and calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Json] | None = None


class ChatAnswerChoice(msgspec.Struct):
    """One of the answers to a chat."""

    index: int
    message: ChatAnswerMessage
    logprobs: Json | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct):
    """A whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: CompletionUsage
    disco: DiscoOutcome


class TextAnswerChoice(msgspec.Struct):
    """One of the answers to a raw prompt."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str
    token_ids: list[int] | None = None


class TextCompletion(msgspec.Struct):
    """A whole answer to a raw prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextAnswerChoice]
    usage: CompletionUsage
    disco: DiscoOutcome


class InfillAnswer(msgspec.Struct):
    """What stands in a gap, as llama-server tells it."""

    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    truncated: bool
    stop_type: Literal["limit", "eos"]
    timings: dict[str, float]
    disco: DiscoOutcome


class EmbeddingItem(msgspec.Struct):
    """One vector: numbers, or their little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: dict[str, int]


class RatedDocument(msgspec.Struct):
    """A document by its place in the request; `document` where documents were to be returned."""

    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Reranked(msgspec.Struct):
    """Documents as they are rated, the best first."""

    object: Literal["list"]
    model: str
    usage: dict[str, int]
    results: list[RatedDocument]


class ResponsesUsage(msgspec.Struct):
    """Tokens, as the Responses API tells them."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    cost: float | None = None


class ResponsesAnswer(msgspec.Struct):
    """A whole response; it is not stored."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[Json]
    error: Json | None
    incomplete_details: Json | None
    usage: ResponsesUsage
    disco: DiscoOutcome
    store: Literal[False]
    previous_response_id: None
    instructions: str | None
    tools: list[Json]
    completed_at: int | None = None
    token_ids: list[int] | None = None


class MessagesUsage(msgspec.Struct):
    """Tokens, as the Messages API tells them: those from a cache are not among the input's."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessagesAnswer(msgspec.Struct):
    """A whole message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: MessagesUsage
    disco: DiscoOutcome
    token_ids: list[int] | None = None


class CountOrigin(msgspec.Struct):
    """Whether a count of tokens is an estimate."""

    estimated: bool


class MessagesCount(msgspec.Struct):
    """The tokens of a request as a prompt."""

    input_tokens: int
    disco: CountOrigin


class ResponsesCount(msgspec.Struct):
    """The tokens of a request as a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int
    disco: CountOrigin


class ModelCard(msgspec.Struct):
    """One name that may be asked for: docs/reference/api.md#names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: Json
    alias_of: str | None = None
    state: str | None = None
    use: str | None = None
    context_length: int | None = None
    max_output: int | None = None


class ModelCards(msgspec.Struct):
    """All names; `models` has them as Codex reads them."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[Json]


class RootAnswer(msgspec.Struct):
    """That this is a disco, and where it answers."""

    name: Literal["disco"]
    answers_at: str


class HealthAnswer(msgspec.Struct):
    """Whether something can serve, and which side."""

    status: Literal["ok", "unavailable"]
    endpoints: dict[str, bool]


class DatedRows(msgspec.Struct):
    """DatedRows, newest first."""

    data: list[Json]


class AdjustedAnswer(msgspec.Struct):
    """What a running answer was told."""

    request_id: str
    pace_tps: float | None
    delivery: str | None


class OllamaEnd(msgspec.Struct, kw_only=True):
    """What whole answers of Ollama's API share; durations in ns."""

    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_duration: int | None = None
    eval_duration: int | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    disco: DiscoOutcome | None = None


class OllamaChatAnswer(OllamaEnd, kw_only=True):
    """A whole answer to a conversation."""

    message: Json


class OllamaAnswer(OllamaEnd, kw_only=True):
    """A whole answer to one prompt."""

    response: str


class OllamaEmbeddings(msgspec.Struct):
    """The vectors of all texts, in their order."""

    embeddings: list[list[float]]
    model: str
    prompt_eval_count: int
    total_duration: int


class OllamaEmbedding(msgspec.Struct):
    """The vector of one text, as older clients read it."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct):
    """What a model is; texts are empty for one that is not a file of this machine."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(msgspec.Struct, kw_only=True):
    """One name that may be asked for; `size` in bytes, 0 of a server's model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str


class OllamaTags(msgspec.Struct):
    """All names but patterns."""

    models: list[OllamaListed]


class OllamaLoaded(msgspec.Struct, kw_only=True):
    """One name of the model in memory, and when it would leave."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int | None = None


class OllamaInMemory(msgspec.Struct):
    """The names of the model that the device has in memory."""

    models: list[OllamaLoaded]


class OllamaShown(msgspec.Struct):
    """One model; its context is in `model_info`, by its architecture's name."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Json
    capabilities: list[str]
    modified_at: str


class OllamaPulled(msgspec.Struct):
    """The end of a fetch: `success`."""

    status: str


class OllamaVersion(msgspec.Struct):
    """The version of the Ollama whose API this is."""

    version: str
