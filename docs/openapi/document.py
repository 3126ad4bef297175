"""/openapi.json: the whole API as an OpenAPI 3.1 document, made of the routes, their types and the fields' table. Pure.

`make docs` writes it into the package (docs/generate.py), and the route serves that file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from disco_daemon import __version__
from disco_daemon.api.app import make_app
from disco_daemon.api.doors import ROUTES, At
from disco_daemon.api.http.failures import ERROR_SHAPES, ErrorShape, error_shape
from disco_daemon.api.http.guard import WITHOUT_KEY, ApiConfig
from disco_daemon.api.openai.shapes import error_body
from disco_daemon.errors import DiscoError, EndpointError, RequestError
from disco_daemon.types import Side

from .bodies import REF, body_schema, types_of
from .operations import OPERATIONS, SSE, Failing, Operation, Schema
from .words import HEADERS, WORDS

OPENAPI = "3.1.0"
WITH_STATUS = {
    400: "Something is wrong with the request; the message says what.",
    401: "A key is asked for and was not shown, or it is none of this daemon's, or was revoked.",
    403: "Not for this caller: a stranger's web page or user, a Host that is not this machine, a control, or a model "
    "that this key may not ask for.",
    404: "There is no such model, answer or trace, or too little is on record.",
    408: "The body did not come within `api.receive_timeout_s`.",
    413: "The body is too large.",
    415: "A web page has to send JSON as such.",
    429: "A cap is reached, a key asks too often, the server wants no more requests now, or another check of one is "
    "under way.",
    501: "This API cannot do that; the message says what can.",
    502: "An endpoint failed, and no other one could go on.",
    503: "Nothing can serve now, or the daemon is full.",
    504: "An endpoint was silent for too long.",
}
OPENAI = "OpenAI"  # whose shape errors have where no other API is asked
RETRY = frozenset({429, 503})  # where a Retry-After may tell when to come again; a 503 always has one
# What headers may hold that are no plain text.
HEADER_VALUES: dict[str, Schema] = {"X-Disco-Route": {"enum": ["device", "server"]}}
# One event of a stream; how each looks is for docs/reference/api.md.
EVENT: Schema = {
    "type": "object",
    "description": "With `stream: true`: events. The last one of OpenAI's chats and completions is `[DONE]`.",
    "required": ["data"],
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
LINE: Schema = {
    "type": "object",
    "description": "With `stream` not false: lines, of which each is an object, and the last one is `done`.",
}
_PATH_KEY = re.compile(r"{(\w+)}")


@cache
def described() -> dict[str, Any]:
    """Return the document of all routes."""
    nothing: Any = object()
    whole: dict[str, Any] = _plain(
        document(_routes_of(make_app(nothing, nothing, ApiConfig("127.0.0.1", ""), nothing)))
    )
    return whole


def _plain(value: Any) -> Any:
    """Write whole numbers without a fraction: of two equal types, with 0 and with 0.0, Python keeps the first."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def document(routes: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the document; `routes` are methods, paths and docstrings of handlers. Raises KeyError without an entry."""
    found = [(method, path, told, OPERATIONS[method, path]) for method, path, told in routes]
    schemas = _schemas(operation for *_, operation in found)
    shapes: dict[str, Schema] = {}
    paths: dict[str, Any] = {}
    for method, path, told, operation in found:
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, told, operation, schemas, shapes)
    headers = {
        name: {"schema": HEADER_VALUES.get(name, {"type": "string"}), "description": about}
        for name, about in HEADERS.items()
    }
    headers["Retry-After"] = {"schema": {"type": "string"}, "description": "seconds until it is worth asking again"}
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "disco",
            "version": __version__,
            "description": "Answers from the device, the server or both, by the APIs of OpenAI, Anthropic and Ollama.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas | shapes,
            "headers": headers,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "`api.key`, or `api.control_key`."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
            },
        },
    }


def _routes_of(app: web.Application) -> Iterator[tuple[str, str, str]]:
    """Yield method, path and the handler's docstring of each route."""
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:  # served as GET is
            yield route.method, route.resource.canonical, inspect.getdoc(route.handler) or ""


def _operation(
    method: str, path: str, told: str, operation: Operation, schemas: dict[str, Schema], shapes: dict[str, Schema]
) -> dict[str, Any]:
    about = " ".join(told.split()).partition(": ")[2]
    kind = "fill" if path.startswith("/infill") else path.strip("/").split("/")[0] or "root"
    made: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": about,
        "tags": [{"v1": "answers", "api": "ollama", "disco": "daemon", "fill": "answers"}.get(kind, "daemon")],
        "security": _security(method, path),
        "parameters": [*_path_parameters(path), *_query(operation)],
        "responses": _responses(method, path, operation, shapes),
    }
    if operation.takes is not None:
        media: dict[str, Any] = {"schema": body_schema(operation, schemas)}
        if operation.examples:
            media["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        made["requestBody"] = {"required": not operation.may_be_empty, "content": {"application/json": media}}
    return made


def _security(method: str, path: str) -> list[dict[str, list[str]]]:
    """Return the keys that a route wants: a control one of them, others only where `api.key` is set."""
    if path in WITHOUT_KEY:
        return []
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    return keys if ROUTES[method, path] is At.CONTROL else [{}, *keys]


def _path_parameters(path: str) -> list[dict[str, Any]]:
    part: Schema = {"type": "string", "minLength": 1, "pattern": "^[^{}/]+$"}  # as aiohttp reads one
    whole: Schema = {"type": "string", "minLength": 1}  # a model's name, which may have slashes
    return [
        {"name": name, "in": "path", "required": True, "schema": whole if name == "name" else part}
        for name in _PATH_KEY.findall(path)
    ]


def _query(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": one.name, "in": "query", "required": one.required, "schema": one.schema, "description": one.about}
        for one in operation.query
    ]


def _responses(method: str, path: str, operation: Operation, shapes: dict[str, Schema]) -> dict[str, Any]:
    """Return what a route answers, by the status."""
    schema = (
        {"$ref": REF.format(name=operation.gives.__name__)} if isinstance(operation.gives, type) else operation.gives
    )
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.streams:
        content[operation.streams] = {"schema": EVENT if operation.streams == SSE else LINE}
    whole: dict[str, Any] = {"description": "What was asked for.", "content": content}
    if operation.failing is Failing.ANSWER:
        whole["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    found: dict[str, Any] = {} if operation.failing is Failing.ALWAYS else {"200": whole}
    for status in sorted({*everywhere(method, path), *operation.failing.value, *operation.statuses}):
        error = _error(status, path, shapes)
        if status in operation.statuses:
            media = error["content"]["application/json"]
            error["content"]["application/json"] = {"schema": {"anyOf": [schema, media["schema"]]}}
        found[str(status)] = error
    return found


def everywhere(method: str, path: str) -> set[int]:
    """Return the statuses of errors that a route has for what is wrong with a caller, a body's length or the daemon."""
    keys = set() if path in WITHOUT_KEY else {401}
    return keys | {403, 413, 503} | (set() if method == "GET" else {415})


def _error(status: int, path: str, shapes: dict[str, Schema]) -> dict[str, Any]:
    """Return an error of a route, in the shape that its clients know.

    A connection too many is refused before it says what it wants: in OpenAI's shape, whatever that is.
    """
    begin = next((begin for begin in ERROR_SHAPES if path.startswith(begin)), OPENAI)
    names = {begin: error_shape(path)} | ({OPENAI: error_body} if status == 503 else {})
    refs = []
    for kind, shape in names.items():
        name = f"{kind.strip('/').rpartition('/')[2].capitalize() if kind.startswith('/') else kind}Error"
        shapes.setdefault(name, error_schema(shape))
        refs.append({"$ref": REF.format(name=name)})
    found: dict[str, Any] = {
        "description": WITH_STATUS[status],
        "content": {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}},
    }
    return found | (
        {"headers": {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}} if status in RETRY else {}
    )


def error_schema(shape: ErrorShape) -> Schema:
    """Return the schema of errors in a shape, by what it makes of two: one that tells all, one that tells little."""
    errors: tuple[DiscoError, ...] = (
        RequestError("Something is wrong.", param="model", code="invalid_value"),
        EndpointError(Side.SERVER, "failed", "The server failed."),
        RequestError("Something is wrong."),
    )
    return _like([shape(error) for error in errors])


def _like(values: list[Any]) -> Schema:
    """Return the schema of values that were seen."""
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {
            "type": "object",
            "properties": {key: _like([value[key] for value in values if key in value]) for key in keys},
            "required": [key for key in keys if all(key in value for value in values)],
        }
    names = {str: "string", type(None): "null", int: "integer", bool: "boolean"}
    kinds = list(dict.fromkeys(names[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def _schemas(operations: Iterable[Operation]) -> dict[str, Schema]:
    """Return the schemas of all types, and of those within them, by their names."""
    types = [
        kind for operation in operations for kind in (*types_of(operation), operation.gives) if isinstance(kind, type)
    ]
    _, found = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=REF)
    for name, words in WORDS.items():
        properties = found[name]["properties"]
        found[name] |= {"properties": {key: schema | {"description": words[key]} for key, schema in properties.items()}}
    return dict(found)
