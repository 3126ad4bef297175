"""OpenAI's embeddings: parses requests, and builds the body of the vectors. Pure."""

from __future__ import annotations

import base64
import struct
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import RequestError
from ...plain import in_words
from ...types import Embedding, Given, Purpose, TextTask
from ..http.bodies import convert
from .openai_request import MAX_INT, MAX_TOKEN_ID, DiscoOptions

MAX_INPUTS = 2048  # texts of one request, as OpenAI
MAX_RESPONSE = 64 * 1024 * 1024  # bytes of one response; 2,048 vectors of 4,096 numbers in base64 are 45 million

# What other APIs call a text's purpose: Cohere's and NVIDIA's `input_type`, Voyage's, and Jina's `task`.
PURPOSES: dict[str, Purpose] = {
    "query": "query", "search_query": "query", "retrieval.query": "query",
    "document": "document", "passage": "document", "search_document": "document", "retrieval.passage": "document",
    "classification": "classification", "clustering": "clustering", "separation": "clustering",
    "text-matching": "similarity",
}  # fmt: skip
_Ids = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)], ...], Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The fields of a request that this daemon reads."""

    model: str
    input: Any
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    input_type: str | None = None
    task: str | None = None
    disco: DiscoOptions | UnsetType = UNSET


def parse(raw: dict[str, Any]) -> tuple[EmbeddingsRequest, list[Given]]:
    """Check a request; return it with its texts or token ids. Raises RequestError."""
    request = convert(raw, EmbeddingsRequest)
    if request.disco is not UNSET and request.disco.route == "server":
        raise RequestError("Embeddings are made by the device only.", param="disco", code="unsupported_value")
    inputs = _inputs(request.input)
    if any(text == "" for text in inputs):
        raise RequestError("'input' cannot be an empty string.", param="input")
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"At most {MAX_INPUTS} inputs a request are supported, got {len(inputs)}.", param="input")
    return request, inputs


def task_of(request: EmbeddingsRequest) -> TextTask:
    """Return what the vectors of a request are for. Raises RequestError."""
    param = "task" if request.input_type is None else "input_type"
    asked = request.task if request.input_type is None else request.input_type
    if asked is None:
        return TextTask(dimensions=request.dimensions)
    if asked not in PURPOSES:
        msg = f"Invalid value for '{param}': {asked!r} is none of {', '.join(PURPOSES)}."
        raise RequestError(msg, param=param, code="invalid_value")
    return TextTask(PURPOSES[asked], request.dimensions)


def _inputs(given: Any) -> list[Given]:
    """Return one or many texts or lists of token ids. Raises RequestError."""
    try:
        match given:
            case str():
                return [given]
            case [str(), *_]:
                return list(msgspec.convert(given, list[str]))
            case [int(), *_]:
                return [msgspec.convert(given, _Ids)]
            case [list(), *_]:
                return list(msgspec.convert(given, list[_Ids]))
    except msgspec.ValidationError as e:
        msg = f"Invalid value for 'input': it {in_words(str(e), Any)}."
        raise RequestError(msg, param="input", code="invalid_type") from e
    msg = "Invalid value for 'input': expected text, token ids, or an array of one or the other, and not an empty one."
    raise RequestError(msg, param="input", code="invalid_type")


class Vectors(ABC):
    """Collects the `n` vectors of one answer, in an API's shape.

    Each becomes JSON at once: all together would hold up every stream.
    """

    begin = b""  # of the body, up to the first vector

    def __init__(self, n: int) -> None:
        self._n = n
        self._body = bytearray(self.begin)
        self._n_made = 0
        self.n_tokens = 0

    def add(self, embedding: Embedding) -> None:
        """Take the next vectors. Raises RequestError if by the first one all will exceed MAX_RESPONSE."""
        self.n_tokens += embedding.n_tokens
        for vector in embedding.vectors:
            item = self._item(vector, self._n_made)
            if max(len(self._body), len(item) * self._n) > MAX_RESPONSE:
                msg = (
                    f"{self._n} such vectors are more than the {MAX_RESPONSE} bytes of one response: ask for fewer at "
                    "a time, for 'encoding_format': 'base64', or for fewer 'dimensions'."
                )
                raise RequestError(msg, param="input", code="response_too_large")
            self._body += b"," if self._n_made else b""
            self._body += item
            self._n_made += 1

    def body(self) -> bytearray:
        """Return the whole response; to be called once, for it may be large."""
        self._body += b"]," + msgspec.json.encode(self._rest())[1:]
        return self._body

    @abstractmethod
    def _item(self, vector: bytes, index: int) -> bytes:
        """Return one vector (little-endian float32) as JSON."""

    @abstractmethod
    def _rest(self) -> dict[str, Any]:
        """Return what stands beside the list of vectors; not empty."""


class OpenAIVectors(Vectors):
    """Vectors in OpenAI's shape."""

    begin = b'{"data":['

    def __init__(self, request: EmbeddingsRequest, n: int) -> None:
        super().__init__(n)
        self._request = request

    def _item(self, vector: bytes, index: int) -> bytes:
        text: Any = base64.b64encode(vector).decode() if self._request.encoding_format == "base64" else floats(vector)
        return msgspec.json.encode({"object": "embedding", "index": index, "embedding": text})

    def _rest(self) -> dict[str, Any]:
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "model": self._request.model, "usage": usage}


def floats(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector of little-endian float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)
