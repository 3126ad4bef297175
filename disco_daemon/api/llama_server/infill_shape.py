"""llama-server's `/infill`: its requests, and its shapes of answers and errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from ...errors import DiscoError, RequestError
from ...types import ExtraText, FinishReason, GenerationRequest, Infill, Outcome, Side, Token
from ...types.fields import asked
from ..http.events import event
from ..openai.openai_request import MAX_INT, NO_LIMIT, AnswerRequest, raw_generation, read
from ..openai.shapes import AnswerShape, Ids

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error",
    503: "unavailable_error",
}  # fmt: skip

_NO_PLACE = frozenset({"n", "logprobs", "top_logprobs"})

# llama-server's words for an end; of one that nobody knows, it says nothing.
_STOP_TYPES: dict[str | None, str] = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}


class InfillRequest(AnswerRequest, kw_only=True):
    """The fields of `/infill` that this daemon reads; the rest travels in `extra`.

    The answer stands between `input_prefix` with `prompt` and `input_suffix`, and has `n_predict` tokens at most; with
    0 the prompt is read and one token drawn, so that the next request finds it in the KV cache.
    """

    model: str = "disco"
    input_prefix: str
    input_suffix: str
    input_extra: tuple[ExtraText, ...] = ()
    prompt: str = ""
    n_predict: Annotated[int, Meta(ge=NO_LIMIT, le=MAX_INT)] | None = None
    return_tokens: bool | None = False


def parse(raw: dict[str, Any]) -> tuple[InfillRequest, dict[str, Any]]:
    """Check a request. Raises RequestError."""
    request, extra = read(raw, InfillRequest)
    if request.n_predict is not None:
        request.max_tokens = request.n_predict or 1
    request.return_token_ids = request.return_token_ids or request.return_tokens
    if (name := next((row.name for row in asked(extra) if row.name in _NO_PLACE), None)) is not None:
        msg = f"'{name}' has no place in the answers of this route: use /v1/completions with a 'suffix'."
        raise RequestError(msg, param=name, code="unsupported_value")
    return request, extra


def to_generation(
    request: InfillRequest, extra: dict[str, Any], request_id: str, allowed: frozenset[Side]
) -> GenerationRequest:
    """Return the endpoint-neutral form of a request. Raises RequestError."""
    gap = Infill(
        prefix=request.input_prefix, suffix=request.input_suffix, begun=request.prompt, extra=request.input_extra
    )
    return raw_generation(request, gap, extra, request_id, allowed)


def error_body(error: DiscoError) -> dict[str, Any]:
    """Return an error in llama-server's shape."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": str(error), "type": kind}}


class InfillShape(AnswerShape):
    """llama-server's own shape of an answer, which is not OpenAI's; a stream of it has no `[DONE]`."""

    def __init__(self, request_id: str, created: int, model: str) -> None:
        del request_id, created
        self._model = model
        self._n_shown = 0
        self._has_new_line = False

    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token as an event."""
        del first
        self._n_shown += token.n_tokens
        self._has_new_line = self._has_new_line or "\n" in token.text
        told: dict[str, Any] = {
            "index": token.index, "content": token.text, "tokens": ids or [], "stop": False,
            "tokens_predicted": self._n_shown,
        }  # fmt: skip
        return event(told if side is None else told | {"disco": {"side": side}})

    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the last event, which has what a whole answer has beside its text."""
        del include_usage
        return event(self._end(outcome, "", []))

    def failed(self, error: DiscoError) -> bytes:
        """Return a failure as an event."""
        return event(error_body(error))

    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer."""
        text = "".join(token.text for token in tokens)
        self._has_new_line = "\n" in text
        return self._end(outcome, text, ids.get(0, ()))

    def _end(self, outcome: Outcome, content: str, ids: Ids) -> dict[str, Any]:
        n_prompt, n_answer = outcome.billed
        return {
            "index": 0, "content": content, "tokens": ids, "stop": True, "model": self._model,
            "tokens_predicted": n_answer, "tokens_evaluated": n_prompt, "has_new_line": self._has_new_line,
            "truncated": False, "stop_type": _STOP_TYPES.get(outcome.finish_reason, "none"),
            "stopping_word": "", "tokens_cached": n_prompt + n_answer, "timings": _timings(outcome),
            "disco": outcome.to_json(),
        }  # fmt: skip


def _timings(outcome: Outcome) -> dict[str, float]:
    """Return how long it took; the wait for the first token counts as the prompt's time."""
    n_prompt, n_answer = outcome.billed
    n_read = n_prompt - outcome.used.cached_tokens
    prompt_s = outcome.duration_s if outcome.ttft_s is None else outcome.ttft_s
    return {
        "cache_n": outcome.used.cached_tokens,
        **_rate("prompt", n_read, prompt_s),
        **_rate("predicted", n_answer, max(0.0, outcome.duration_s - prompt_s)),
    }


def _rate(name: str, n: int, took_s: float) -> dict[str, float]:
    return {
        f"{name}_n": n, f"{name}_ms": 1000 * took_s, f"{name}_per_token_ms": 1000 * took_s / max(1, n),
        f"{name}_per_second": n / took_s if took_s else 0.0,
    }  # fmt: skip
