"""OpenAI's embeddings: parses requests, and builds the body of the vectors. Pure."""

from __future__ import annotations

import base64
import math
import struct
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import RequestError
from ...plain import in_words
from ...types import Embedding
from ..http.bodies import convert
from .openai_request import MAX_INT, MAX_TOKEN_ID, DiscoOptions

MAX_INPUTS = 2048  # texts of one request, as OpenAI
MAX_RESPONSE = 64 * 1024 * 1024  # bytes of one response; 2,048 vectors of 4,096 numbers in base64 are 45 million

Given = str | tuple[int, ...]
_Ids = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)], ...], Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The fields of a request that this daemon reads."""

    model: str
    input: Any
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
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
    """Collects the `n` vectors of one answer, in an API's shape, with as many `dimensions` (None: all).

    Each becomes JSON at once: all together would hold up every stream.
    """

    begin = b""  # of the body, up to the first vector

    def __init__(self, n: int, dimensions: int | None) -> None:
        self._n, self._dimensions = n, dimensions
        self._body = bytearray(self.begin)
        self._n_made = 0
        self.n_tokens = 0

    def add(self, embedding: Embedding) -> None:
        """Take the next vector.

        Raises RequestError if it has fewer dimensions than requested, or if by the first one all will exceed
        MAX_RESPONSE.
        """
        item = self._item(shortened(embedding.vector, self._dimensions), self._n_made)
        if max(len(self._body), len(item) * self._n) > MAX_RESPONSE:
            msg = (
                f"{self._n} such vectors are more than the {MAX_RESPONSE} bytes of one response: ask for fewer at a "
                "time, for 'encoding_format': 'base64', or for fewer 'dimensions'."
            )
            raise RequestError(msg, param="input", code="response_too_large")
        self._body += b"," if self._n_made else b""
        self._body += item
        self._n_made += 1
        self.n_tokens += embedding.n_tokens

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
        super().__init__(n, request.dimensions)
        self._request = request

    def _item(self, vector: bytes, index: int) -> bytes:
        text: Any = base64.b64encode(vector).decode() if self._request.encoding_format == "base64" else floats(vector)
        return msgspec.json.encode({"object": "embedding", "index": index, "embedding": text})

    def _rest(self) -> dict[str, Any]:
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "model": self._request.model, "usage": usage}


def shortened(vector: bytes, n: int | None) -> bytes:
    """Return the first `n` of a vector's numbers (little-endian float32) at length 1 again; None for all of them.

    Raises RequestError if there are fewer. The first numbers of a model that was not trained for it (Matryoshka, arXiv
    2205.13147) hold less than a smaller model's vector.
    """
    size = len(vector) // 4
    if n is None or n == size:
        return vector
    if n > size:
        msg = f"This model's embeddings have {size} dimensions: 'dimensions' can be at most that."
        raise RequestError(msg, param="dimensions", code="unsupported_value")
    numbers = floats(vector[: 4 * n])
    length = math.sqrt(math.fsum(x * x for x in numbers)) or 1.0
    return struct.pack(f"<{n}f", *(x / length for x in numbers))


def floats(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector of little-endian float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)
