"""An answer as the Responses API has it: a stream of numbered events, or one body. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import DiscoError
from ...types import FinishReason, Outcome, Side, Token
from ..http.events import named_event
from ..openai.shapes import AnswerShape, Ids
from .responses_output import Event, Output, logprobs_of
from .responses_request import ResponsesAsked

# Why an answer is not whole, by a chat's reason for its end. An end that nobody knows is no whole answer either.
_CUT: dict[str | None, str] = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.FUNCTION_CALL)
_TOO_LONG = "context_length_exceeded"  # a code that Codex knows: it then makes its conversation shorter
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # OpenAI's for failed responses, by the HTTP status


class ResponsesShape(AnswerShape):
    """One response. It has the state of its stream: which items are open, and how many events were sent."""

    def __init__(self, request_id: str, created: int, model: str, asked: ResponsesAsked) -> None:
        self._request_id, self._asked = request_id, asked
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model}
        self._output = self._no_output()
        self._n_events = 0

    def token(self, token: Token, ids: Ids | None, *, first: bool, side: Side | None = None) -> bytes:
        """Return one token as events; the deltas have its `ids` and the `side` that made it."""
        del first
        more: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if side is not None:
            more["disco"] = {"side": side, "alone": True} if token.alone else {"side": side}
        if token.delta or not token.text:
            return self._begun() + self._sent(_events(self._output, token, more))
        return self._begun() + self._sent(_said(self._output, token, more))

    def ending(self, outcome: Outcome, *, include_usage: bool) -> bytes:
        """Return the ends of all items, and the whole response with its usage and the `disco` object."""
        del include_usage  # a response always has it
        status = _status(outcome)
        closing = self._begun() + self._sent(self._output.end(status))
        whole = self._whole(self._output, outcome)
        return closing + self._sent([{"type": f"response.{status}", "response": whole}])

    def failed(self, error: DiscoError) -> bytes:
        """Return a failure as an event, with what was whole by then."""
        code = error.code if error.code == _TOO_LONG else _CODES.get(error.status, "server_error")
        told = {"code": code, "message": str(error)}
        response = self._response("failed", self._output.done()) | {"error": told}
        return self._begun() + self._sent([{"type": "response.failed", "response": response}])

    def body(self, tokens: Sequence[Token], ids: Mapping[int, Ids], outcome: Outcome) -> dict[str, Any]:
        """Return a whole answer; there is one choice."""
        output = self._no_output()
        for token in tokens:
            for _ in _events(output, token, {}):
                pass
        for _ in output.end(_status(outcome)):
            pass
        whole = self._whole(output, outcome)
        return whole | {"token_ids": ids[0]} if 0 in ids else whole

    def sign_of_life(self) -> bytes:
        """Return an event: clients of this API count no comments."""
        begun = self._begun()
        return begun or self._sent([self._in_progress()])

    def _no_output(self) -> Output:
        return Output(self._request_id, self._asked.custom, carries_thoughts=self._asked.carries_thoughts)

    def _begun(self) -> bytes:
        """Return the first events, if they have not been sent."""
        if self._n_events:
            return b""
        created = {"type": "response.created", "response": self._response("in_progress", [])}
        return self._sent([created, self._in_progress()])

    def _in_progress(self) -> Event:
        return {"type": "response.in_progress", "response": self._response("in_progress", self._output.done())}

    def _sent(self, events: Iterable[Event]) -> bytes:
        """Return events as they are on the wire, each with its number."""
        sent = b""
        for event in events:
            event["sequence_number"] = self._n_events
            self._n_events += 1
            sent += named_event(event)
        return sent

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return self._head | {"status": status, "output": output} | nothing | self._asked.echoed

    def _whole(self, output: Output, outcome: Outcome) -> dict[str, Any]:
        status = _status(outcome)
        found = self._response(status, output.done()) | {"usage": _usage(outcome), "disco": outcome.to_json()}
        if status == "completed":
            return found | {"completed_at": int(outcome.created + outcome.duration_s)}
        return found | {"incomplete_details": {"reason": _CUT.get(outcome.finish_reason, "max_output_tokens")}}


def _events(output: Output, token: Token, more: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of one token: what was thought, then what was said, then what is called."""
    delta = token.delta
    if delta and delta.thought:
        yield from output.thought(delta.thought)
    if token.text:
        yield from _said(output, token, more)
    if delta:
        if delta.refusal:
            yield from output.refused(delta.refusal)
        for piece in delta.calls:
            yield from output.called(piece)


def _said(output: Output, token: Token, more: dict[str, Any]) -> Iterator[Event]:
    """Return the events of a token's text."""
    return output.said(token.text, {"logprobs": logprobs_of(token.logprobs), **more})


def _status(outcome: Outcome) -> str:
    return "completed" if outcome.finish_reason in _WHOLE else "incomplete"


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Return this API's usage block."""
    prompt, completion = outcome.billed
    used = outcome.used
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": used.cached_tokens,
            "cache_write_tokens": used.cache_write_tokens,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": prompt + completion,
    } | ({} if used.cost is None else {"cost": used.cost})
