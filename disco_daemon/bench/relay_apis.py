"""The APIs that the relay is measured in: how one question is asked in each, and how its answer is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .child import BenchError

MODEL = "disco"  # the daemon decides, and its policy leaves it one choice; the loopback server takes any name
DONE = b"data: [DONE]"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamApi:
    """One API with streams: server-sent events, or a JSON document a line.

    `path` stands behind the address without `/v1`. `piece` is the text that a document of the stream brings, `ends`
    whether one says that the answer is whole; after that comes the line `last`, where there is one.
    """

    path: str
    asked: Callable[[str, int], Document]
    piece: Callable[[Document], str]
    ends: Callable[[Document], bool]
    last: bytes = b""

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """Return a streaming request."""
        return json.dumps({"model": MODEL, "stream": True, **self.asked(prompt, max_tokens)}).encode()

    def has_text(self, line: bytes) -> bool:
        """Whether a line of the stream brings text. Raises BenchError for an error."""
        document = document_of(line)
        return document is not None and bool(self.piece(document))

    def text(self, lines: Sequence[bytes]) -> str:
        """Return the text of a whole stream. Raises BenchError for an error."""
        return "".join(self.piece(document) for document in _documents(lines))

    def is_whole(self, lines: Sequence[bytes]) -> bool:
        """Whether a stream ended as it should."""
        told = any(self.ends(document) for document in _documents(lines))
        return told and (not self.last or self.last in map(bytes.strip, lines))


def document_of(line: bytes) -> Document | None:
    """Return the document in a line of a stream, None if there is none. Raises BenchError for an error."""
    data = line.removeprefix(b"data:").strip()
    if not data.startswith(b"{"):
        return None
    document: Document = json.loads(data)
    if document.get("error") or document.get("type") == "response.failed":
        raise BenchError(f"the stream carried an error: {document.get('error') or document['response']}")
    return document


def choice_of(line: bytes) -> Document | None:
    """Return the first choice in a line of a chat's stream; None if there is none. Raises BenchError for an error."""
    document = document_of(line)
    return None if document is None else _choice(document) or None


def _documents(lines: Sequence[bytes]) -> Iterator[Document]:
    return (document for line in lines if (document := document_of(line)) is not None)


def _choice(document: Document) -> Document:
    return next(iter(document.get("choices") or ()), {})


def _user(prompt: str) -> list[Document]:
    return [{"role": "user", "content": prompt}]


CHAT = StreamApi(
    "/v1/chat/completions",
    lambda prompt, most: {"messages": _user(prompt), "max_tokens": most},
    lambda chunk: _choice(chunk).get("delta", {}).get("content") or "",
    lambda chunk: bool(_choice(chunk).get("finish_reason")),
    DONE,
)
APIS = {
    "chat": CHAT,
    "responses": StreamApi(
        "/v1/responses",
        lambda prompt, most: {"input": prompt, "max_output_tokens": most, "store": False},
        lambda event: event["delta"] if event.get("type") == "response.output_text.delta" else "",
        lambda event: event.get("type") in ("response.completed", "response.incomplete"),
    ),
    "messages": StreamApi(
        "/v1/messages",
        lambda prompt, most: {"messages": _user(prompt), "max_tokens": most},
        lambda event: event["delta"].get("text", "") if event.get("type") == "content_block_delta" else "",
        lambda event: event.get("type") == "message_stop",
    ),
    "ollama": StreamApi(
        "/api/chat",
        lambda prompt, most: {"messages": _user(prompt), "options": {"num_predict": most}},
        lambda document: document.get("message", {}).get("content") or "",
        lambda document: document.get("done") is True,
    ),
}
