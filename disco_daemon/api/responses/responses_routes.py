"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from .. import answering
from ..answering import received
from ..http.bodies import decoded
from ..http.failures import ERROR_SHAPES, json_response
from .responses_request import responses_error, to_chat
from .responses_shape import ResponsesShape

PATH = "/v1/responses"


def add_routes(app: web.Application) -> None:
    """Add the routes, and the shape of their errors."""
    ERROR_SHAPES[PATH] = responses_error
    app.router.add_post(PATH, _respond)
    app.router.add_post(f"{PATH}/input_tokens", _count)


async def _respond(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: Answer a conversation in the Responses API, streamed or whole; nothing is stored."""
    asked = to_chat(decoded(await received(request)))
    return await answering.chat(request, asked.chat, partial(ResponsesShape, asked=asked), asked.left_out)


async def _count(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens: Count a request's tokens: exactly for the device, an estimate for a server."""
    asked = to_chat(decoded(await received(request)))
    n_tokens, estimated = await answering.prompt_size(request, asked.chat)
    told = {"object": "response.input_tokens", "input_tokens": n_tokens}
    return json_response(told | {"disco": {"estimated": estimated}})
