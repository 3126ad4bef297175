"""The routes for documents to be rated by a query, in the shape of Jina's and Cohere's, as llama-server has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from ...errors import RequestError
from ...types import Embedding, TextTask
from .. import answering
from ..answering import received
from ..http.bodies import convert, decoded
from ..openai.embeddings import MAX_INPUTS, floats
from ..openai.openai_request import MAX_INT

PATHS = (
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)  # llama-server's and Jina's, Cohere's, and what clients build of neither

Document = str | dict[str, Any]


class RerankRequest(msgspec.Struct, kw_only=True):
    """The fields of a request that this daemon reads; a document may be an object with its `text`."""

    model: str
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    return_documents: bool | None = None
    raw_scores: bool | None = None


class Ratings:
    """Collects how documents are rated, and sorts them, the best first."""

    def __init__(self, request: RerankRequest, texts: list[str]) -> None:
        self._request, self._texts = request, texts
        self._scores: list[float] = []
        self._n_tokens = 0

    def add(self, embedding: Embedding) -> None:
        """Take the ratings of the next documents: the model's own, and the same from 0 to 1."""
        which = 0 if self._request.raw_scores else 1
        self._scores += [floats(vector)[which] for vector in embedding.vectors]
        self._n_tokens += embedding.n_tokens

    def body(self) -> bytes:
        """Return the whole response."""
        request = self._request
        order = sorted(range(len(self._scores)), key=lambda i: -self._scores[i])[: request.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": self._scores[i]} for i in order]
        if request.return_documents:
            for result in results:
                result["document"] = {"text": self._texts[result["index"]]}
        usage = {"prompt_tokens": self._n_tokens, "total_tokens": self._n_tokens}
        return msgspec.json.encode({"object": "list", "model": request.model, "usage": usage, "results": results})


def add_routes(app: web.Application) -> None:
    """Add the routes."""
    for path in PATHS:
        app.router.add_post(path, _rerank)


async def _rerank(request: web.Request) -> web.Response:
    """POST /v1/rerank: Rate documents by how well they answer a query, if the device's model does that; best first."""
    asked = convert(decoded(await received(request)), RerankRequest)
    texts = [_text_of(document) for document in asked.documents]
    task = TextTask(query=asked.query)
    return await answering.embed(request, asked.model, texts, task, Ratings(asked, texts))


def _text_of(document: Document) -> str:
    """Return the text of a document. Raises RequestError."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        msg = "Invalid value for 'documents': each has to be a text, or an object with a 'text'."
        raise RequestError(msg, param="documents", code="invalid_type")
    return text
