"""The loopback server's answers: the script, its encoding, and the record of one exchange. Nothing here does I/O."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


def text_of(message: Mapping[str, Any]) -> str:
    """Return the plain text of one chat message, whether its content is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def script(prompt: str, n: int) -> list[str]:
    """List the `n` tokens of the answer to a prompt: its words, in rounds, each followed by a space.

    After three rounds a word has the round's number: an answer that says the same again and again is stopped.
    """
    words = prompt.split() or ["nothing"]
    return [f"{words[i % len(words)]}{i // len(words) if i >= 3 * len(words) else ''} " for i in range(n)]


def rest_of(tokens: Sequence[str], so_far: str) -> list[str]:
    """Return what follows `so_far` in the answer; all of it if the answer does not start like that."""
    if not "".join(tokens).startswith(so_far):
        return list(tokens)
    used = 0
    for i, token in enumerate(tokens):
        if used + len(token) > len(so_far):
            return [token[len(so_far) - used :], *tokens[i + 1 :]]
        used += len(token)
    return []


def script_answer(body: Mapping[str, Any], n: int) -> tuple[list[str], str]:
    """Work out the tokens and the finish reason of the answer to a chat request, for a script of `n` tokens."""
    messages = body["messages"]
    tokens = script(text_of(next((m for m in reversed(messages) if m["role"] == "user"), {})), n)
    if body.get("continue_final_message") and messages[-1]["role"] == "assistant":
        tokens = rest_of(tokens, text_of(messages[-1]))
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(tokens)
    return tokens[:limit], "length" if limit < len(tokens) else "stop"


def sse(data: Mapping[str, Any]) -> bytes:
    """One server-sent event with a JSON document; text beyond ASCII stays as it is."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True, eq=False)
class Exchange:
    """One chat request and how its answer went. Times in s of the running event loop.

    `chunks` counts those with content. `closed_at` is when the client went away before the end of its answer;
    `closed` is set then. `ended_at` is when it was over, in whatever way.
    """

    id: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    tokens: Sequence[str]
    reason: str
    started_at: float
    created: int
    chunks: int = 0
    ended: bool = False
    ended_at: float | None = None
    closed_at: float | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, *, by_client: bool, now: float) -> None:
        """Settle how the exchange ended, once: the first reason counts."""
        if self.ended:
            return
        self.ended, self.ended_at = True, now
        if by_client:
            self.closed_at = now
            self.closed.set()

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object; a token of the prompt is a word."""
        prompt = sum(len(text_of(m).split()) for m in self.body["messages"])
        done = len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}

    def envelope(self, kind: str) -> dict[str, Any]:
        """Return the fields that every document of this answer starts with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.get("model") or "loopback"}

    def completion(self) -> dict[str, Any]:
        """Return the whole answer as one document."""
        message = {"role": "assistant", "content": "".join(self.tokens), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.reason}
        return {**self.envelope("chat.completion"), "choices": [choice], "usage": self.usage()}

    def content_events(self) -> Iterator[bytes]:
        """One event a token; the first one carries the role as well. Encoded by hand: this is the fast path."""
        head = json.dumps(self.envelope("chat.completion.chunk"), ensure_ascii=False, separators=(",", ":"))
        prefix = f'data: {head[:-1]},"choices":[{{"index":0,"delta":{{'
        tail = '},"logprobs":null,"finish_reason":null}]' + (',"usage":null' if self.wants_usage else "") + "}\n\n"
        role = '"role":"assistant",'
        for token in self.tokens:
            yield f'{prefix}{role}"content":{json.dumps(token, ensure_ascii=False)}{tail}'.encode()
            role = ""

    def last_events(self) -> bytes:
        """Return what follows the content, `[DONE]` aside: the finish reason, and usage if asked for."""
        chunk = self.envelope("chat.completion.chunk")
        usage: dict[str, Any] = {"usage": None} if self.wants_usage else {}
        finish = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.reason}
        events = sse({**chunk, "choices": [finish], **usage})
        if self.wants_usage:
            events += sse({**chunk, "choices": [], "usage": self.usage()})
        return events

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))


def error_body(message: str, *, type_: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error document."""
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}
