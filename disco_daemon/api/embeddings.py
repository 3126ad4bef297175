"""OpenAI's embeddings: parses requests, and builds the body of the vectors. Pure."""

from __future__ import annotations

import base64
import math
import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..errors import RequestError
from ..types import Embedding
from .bodies import convert, decoded
from .openai import MAX_INT, MAX_TOKEN_ID, DiscoOptions

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


def parse(body: bytes) -> tuple[EmbeddingsRequest, list[Given]]:
    """Decode and check a request; return it with its texts or token ids. Raises RequestError."""
    request = convert(decoded(body), EmbeddingsRequest)
    if request.disco is not UNSET and request.disco.route == "server":
        raise RequestError("Embeddings are made by the device only.", param="disco", code="unsupported_value")
    inputs = _inputs(request.input)
    if any(text == "" for text in inputs):
        raise RequestError("'input' cannot be an empty string.", param="input")
    if len(inputs) > MAX_INPUTS:
        msg = f"At most {MAX_INPUTS} inputs a request are supported, got {len(inputs)}."
        raise RequestError(msg, param="input")
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
        msg = f"Invalid value for 'input': {e}"
        raise RequestError(msg, param="input", code="invalid_type") from e
    msg = "Invalid value for 'input': expected text, token ids, or an array of one or the other, and not an empty one."
    raise RequestError(msg, param="input", code="invalid_type")


class Vectors:
    """Collects the `n` vectors of one answer. Each becomes JSON at once: all together would hold up every stream."""

    def __init__(self, request: EmbeddingsRequest, n: int) -> None:
        self._request, self._n = request, n
        self._body = bytearray(b'{"data":[')
        self._n_made = 0
        self._n_tokens = 0

    def add(self, embedding: Embedding) -> None:
        """Take the next vector.

        Raises RequestError if it has fewer dimensions than requested, or if by the first one all will exceed
        MAX_RESPONSE.
        """
        vector = shortened(embedding.vector, self._request.dimensions)
        text: Any = base64.b64encode(vector).decode() if self._request.encoding_format == "base64" else _floats(vector)
        item = msgspec.json.encode({"object": "embedding", "index": self._n_made, "embedding": text})
        if max(len(self._body), len(item) * self._n) > MAX_RESPONSE:
            msg = (
                f"{self._n} such vectors are more than the {MAX_RESPONSE} bytes of one response: ask for fewer at a "
                "time, for 'encoding_format': 'base64', or for fewer 'dimensions'."
            )
            raise RequestError(msg, param="input", code="response_too_large")
        self._body += b"," if self._n_made else b""
        self._body += item
        self._n_made += 1
        self._n_tokens += embedding.n_tokens

    def body(self) -> bytearray:
        """Return the whole response; to be called once, for it may be large."""
        usage = {"prompt_tokens": self._n_tokens, "total_tokens": self._n_tokens}
        rest = msgspec.json.encode({"object": "list", "model": self._request.model, "usage": usage})
        self._body += b"]," + rest[1:]
        return self._body


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
    numbers = _floats(vector[: 4 * n])
    length = math.sqrt(math.fsum(x * x for x in numbers)) or 1.0
    return struct.pack(f"<{n}f", *(x / length for x in numbers))


def _floats(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
