"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from aiohttp import web

from .. import answering
from ..answering import received
from ..http.bodies import decoded
from ..http.failures import ERROR_SHAPES, json_response
from .messages_request import to_chat
from .messages_shape import MessagesShape, error_body

PATH = "/v1/messages"


def add_routes(app: web.Application) -> None:
    """Add the routes, and the shape of their errors."""
    ERROR_SHAPES[PATH] = error_body
    app.router.add_post(PATH, _message)
    app.router.add_post(f"{PATH}/count_tokens", _count)


async def _message(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages: Answer a conversation in Anthropic's Messages API, streamed or whole."""
    asked = to_chat(decoded(await received(request)))
    return await answering.chat(request, asked.chat, MessagesShape, asked.left_out)


async def _count(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: Count a request's tokens: exactly for the device, an estimate for a server."""
    asked = to_chat(decoded(await received(request)), counts=True)
    n_tokens, estimated = await answering.prompt_size(request, asked.chat)
    return json_response({"input_tokens": n_tokens, "disco": {"estimated": estimated}})
