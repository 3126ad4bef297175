"""The route of llama-server's API for editors that fill in the middle."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from ..answering import answer, created, named, new_id, received
from ..http.bodies import decoded
from ..http.failures import ERROR_SHAPES
from .infill_shape import InfillShape, error_body, parse, to_generation

PATH = "/infill"


def add_routes(app: web.Application) -> None:
    """Add the route, and the shape of its errors."""
    ERROR_SHAPES[PATH] = error_body
    app.router.add_post(PATH, _infill)


async def _infill(request: web.Request) -> web.StreamResponse:
    """POST /infill: Fill the gap between `input_prefix` and `input_suffix`, as llama-server does, streamed or whole."""
    asked, extra = parse(decoded(await received(request)))
    model = named(request, asked.model)
    generation = replace(to_generation(asked, extra, new_id(), model.sides), adapter=model.adapter, local=model.local)
    generation = replace(generation, servers=model.servers)
    shape = InfillShape(generation.request_id, created(request), asked.model)
    return await answer(request, asked, generation, shape)
