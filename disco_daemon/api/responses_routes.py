"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from . import answering
from .answering import received
from .bodies import decoded
from .failures import ERROR_SHAPES, json_response
from .responses import responses_error, to_chat
from .responses_shape import ResponsesShape

PATH = "/v1/responses"
BYTES_PER_TOKEN = 4  # of what an estimate counts beside the text: tools and calls, in JSON


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
    length, _ = await answering.prompt_size(request, asked.chat)
    beside = 0 if length.counted else unread_bytes(asked.chat) // BYTES_PER_TOKEN
    told = {"object": "response.input_tokens", "input_tokens": length.tokens + beside}
    return json_response(told | {"disco": {"estimated": not length.counted}})


def unread_bytes(chat: dict[str, Any]) -> int:
    """Return the bytes of a chat's tools and calls, which are a part of the prompt and no text of a message."""
    calls = [call for message in chat["messages"] for call in message.get("tool_calls") or ()]
    found = [part for part in (chat.get("tools"), calls) if part]
    return len(msgspec.json.encode(found)) if found else 0
