"""Bodies of requests: JSON objects of a bounded depth, converted to checked structures. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...errors import RequestError
from ...plain import in_words, pointed_to

MAX_DEPTH = 64  # objects and arrays within each other: readers further on recurse

_decoder = msgspec.json.Decoder(dict[str, Any])
_S = TypeVar("_S", bound=msgspec.Struct)
_TOO_DEEP = f"The request body is nested too deeply: more than {MAX_DEPTH} objects and arrays within each other."


def decoded(body: bytes) -> dict[str, Any]:
    """Decode a request's JSON object. Raises RequestError."""
    try:
        raw = _decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise RequestError(f"We could not parse the JSON body of your request: {e}") from e
    except UnicodeDecodeError as e:
        raise RequestError("The request body is not UTF-8.") from e
    except RecursionError as e:
        raise RequestError(_TOO_DEEP) from e
    _check_carried(body, raw)
    return raw


def _check_carried(body: bytes, raw: dict[str, Any]) -> None:
    """Raise RequestError for values that cannot be passed on to the engine: deep nesting, integers beyond 64 bits."""
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _deeper(raw):
        raise RequestError(_TOO_DEEP)
    for name, value in raw.items():
        try:
            msgspec.msgpack.encode(value)
        except OverflowError as e:
            msg = f"Invalid value for '{name}': it holds an integer that does not fit into 64 bits."
            raise RequestError(msg, param=name, code="invalid_value") from e


def _deeper(raw: Any) -> bool:
    """Whether a value is nested more deeply than MAX_DEPTH."""
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def convert(raw: dict[str, Any], kind: type[_S]) -> _S:
    """Convert a JSON object to a checked structure. Raises RequestError."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise invalid(e, kind) from e


def invalid(error: msgspec.ValidationError, kind: Any, where: str = "") -> RequestError:
    """Return the error for a value of the wrong type, or out of bounds: `kind` was expected below `where`."""
    problem = str(error)
    param = pointed_to(problem) or None
    if where:
        param = f"{where}.{param}" if param else where
    said = in_words(problem, kind)
    text = f"Invalid value for '{param}': it {said}." if param else f"The body {said}."
    return RequestError(text, param=param, code="invalid_type")
