"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import msgspec
from aiohttp import web

from ...errors import RequestError
from ...types import Side, TextTask
from .. import answering
from ..answering import CONDUCTOR, created, named, names, received
from ..control.documents import DOCUMENTS, settings_at_fault
from ..http.bodies import convert, decoded
from ..http.failures import ERROR_SHAPES, json_response
from ..http.sse import READER_TIMEOUT_S
from ..names import ModelNames
from .ollama_models import DeviceFile, OllamaModels, shown
from .ollama_pull import PULLED, pull_lines
from .ollama_request import Asked, OllamaPullRequest, OllamaShowRequest, to_chat, to_generation, to_inputs
from .ollama_shape import ChatLines, GenerateLines, OllamaShape, OllamaVectors, OneVector, error_body

PATH = "/api/"
VERSION = "0.12.11"  # of the Ollama whose API this is, the first with log-probabilities; clients ask for a least one
NOT_HERE = ("create", "push", "copy")


def add_routes(app: web.Application) -> None:
    """Add the routes, and the shape of their errors."""
    ERROR_SHAPES[PATH] = error_body
    app.router.add_post(f"{PATH}chat", _chat)
    app.router.add_post(f"{PATH}generate", _generate)
    app.router.add_post(f"{PATH}embed", _embed)
    app.router.add_post(f"{PATH}embeddings", _embed_one)
    app.router.add_get(f"{PATH}tags", _tags)
    app.router.add_get(f"{PATH}ps", _in_memory)
    app.router.add_post(f"{PATH}show", _show)
    app.router.add_get(f"{PATH}version", _version)
    app.router.add_post(f"{PATH}pull", _pull)
    for verb in NOT_HERE:
        app.router.add_post(f"{PATH}{verb}", _not_here)
    app.router.add_delete(f"{PATH}delete", _not_here)
    app.router.add_post(f"{PATH}blobs/{{digest}}", _not_here)


async def _chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat: Answer a conversation in Ollama's API, as lines of JSON or whole."""
    return await _answer(request, to_chat(decoded(await received(request))), ChatLines)


async def _generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate: Answer one prompt in Ollama's API; with `raw` or `suffix` a raw prompt, on the device."""
    return await _answer(request, to_generation(decoded(await received(request))), GenerateLines)


async def _answer(request: web.Request, asked: Asked, shape: type[OllamaShape]) -> web.StreamResponse:
    if asked.only:
        model = asked.body["model"]
        named(request, model)
        return json_response(shape("", created(request), model).loaded(asked.only))
    way = answering.complete if asked.is_raw else answering.chat
    return await way(request, asked.body, shape, asked.left_out)


async def _embed(request: web.Request) -> web.Response:
    """POST /api/embed: Turn texts into vectors by the device's model."""
    return await _vectors(request, OllamaVectors)


async def _embed_one(request: web.Request) -> web.Response:
    """POST /api/embeddings: Turn one text into a vector, as older clients ask for it."""
    return await _vectors(request, OneVector)


async def _vectors(request: web.Request, shape: type[OllamaVectors]) -> web.Response:
    model, texts, dimensions = to_inputs(decoded(await received(request)))
    if shape is OneVector and len(texts) > 1:
        raise RequestError("'input' has several texts, and this route takes one: use /api/embed.", param="input")
    clock = request.app[CONDUCTOR].context.clock
    began_at = clock.now()
    vectors = shape(len(texts), model, lambda: clock.now() - began_at)
    return await answering.embed(request, model, texts, TextTask(dimensions=dimensions), vectors)


async def _tags(request: web.Request) -> web.Response:
    """GET /api/tags: List the models that may be asked for now, with `:latest` where they have no tag."""
    models = await _models(request)
    return json_response(await asyncio.to_thread(models.tags))


async def _in_memory(request: web.Request) -> web.Response:
    """GET /api/ps: List the names of the model that the device has in memory."""
    models = await _models(request)
    return json_response(await asyncio.to_thread(models.in_memory))


async def _show(request: web.Request) -> web.Response:
    """POST /api/show: Show one model: its capabilities, and in `model_info` its context."""
    asked = convert(decoded(await received(request)), OllamaShowRequest)
    name = asked.model or asked.name
    if name is None:
        raise RequestError("'model' is missing: /api/tags lists the models there are.", param="model")
    files = await request.app[DOCUMENTS].device_files()
    known = names(request)
    card = known.card(name)
    return json_response(shown(card, _file_of(known, files, card["id"])))


async def _models(request: web.Request) -> OllamaModels:
    files = await request.app[DOCUMENTS].device_files()
    known = names(request)
    own = {name: file for name in known if (file := _file_of(known, files, name)) is not None}
    return OllamaModels(await known.cards(), own)


def _file_of(known: ModelNames, files: Mapping[str, DeviceFile], name: str) -> DeviceFile | None:
    """Return the file of this machine that a name stands for; `files` are by the names of several models."""
    found = known.find(name)
    return files.get(found.local) if Side.DEVICE in found.sides else None


async def _version(_request: web.Request) -> web.Response:
    """GET /api/version: Return the version of the Ollama whose API this is."""
    return json_response({"version": VERSION})


async def _pull(request: web.Request) -> web.StreamResponse:
    """POST /api/pull: Fetch a model of disco's list, or `USER/REPO[:QUANT]` of the Hub, into the folder of models."""
    asked = convert(decoded(await received(request)), OllamaPullRequest)
    name = asked.model or asked.name
    if name is None:
        raise RequestError("'model' is missing: it is a name of `disco models recommend`, or USER/REPO.", param="model")
    with settings_at_fault():
        fetch = await request.app[DOCUMENTS].pull_model(name)
    async with fetch.followed() as steps, aclosing(pull_lines(steps)) as lines:
        if not asked.stream:
            async for line in lines:
                if "error" in line:
                    raise RequestError(line["error"], status=502, code="pull_failed")
            return json_response(PULLED)
        response = web.StreamResponse(headers={"Content-Type": OllamaShape.content_type})
        await response.prepare(request)
        async for line in lines:
            async with asyncio.timeout(READER_TIMEOUT_S):
                await response.write(msgspec.json.encode(line) + b"\n")
        return response


async def _not_here(request: web.Request) -> web.Response:
    """ANY /api/create: Answer 501: models are fetched by `disco models pull USER/REPO`."""
    msg = f"{request.path} is not here: `disco models pull USER/REPO` fetches a model, device.model says which to use."
    raise RequestError(msg, status=501, code="not_implemented")
