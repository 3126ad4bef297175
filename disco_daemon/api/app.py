"""The HTTP application: its routes, and the handlers of answers, models and health."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aiohttp import web

from ..conductor import Conductor, ignored_by, planned_quality
from ..errors import DiscoError, ReaderGone, RequestError
from ..types import BOTH, Delivery, GenerationRequest, Side
from . import documents, embeddings, fleet, openai, partner, servers, sse, trace
from .connections import body, bounded
from .documents import Documents
from .doors import DOOR, UnixDoor, check_control, fit
from .failures import MAX_BODY, failure, json_response, shape_errors, signed, unexpected
from .guard import CONFIG, ApiConfig, check_caller
from .metrics import Metrics
from .scrape import METRICS, counted, scraped
from .shapes import AnswerShape, ChatShape, TextShape


class Turnstile:
    """Lets one new request in per turn of the event loop.

    Starting an answer takes a millisecond or two; fifty at once would keep every running stream waiting for all of it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def enter(self) -> None:
        """Wait for a turn of the loop."""
        async with self._lock:
            await asyncio.sleep(0)


TURNSTILE = web.AppKey("turnstile", Turnstile)
CONDUCTOR = web.AppKey("conductor", Conductor)


def make_app(conductor: Conductor, daemon: Documents, config: ApiConfig, metrics: Metrics) -> web.Application:
    """Make the application: all routes and middleware; `daemon` stands behind the documents."""
    middlewares = [counted, shape_errors, check_caller, check_control, bounded]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.append(signed)
    app[TURNSTILE] = Turnstile()
    app[CONDUCTOR], app[CONFIG], app[METRICS] = conductor, config, metrics
    app[DOOR] = UnixDoor()
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/embeddings", _embed)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/health", _health)
    app.router.add_get("/disco/v1/trace/{request_id}", _trace)
    documents.add_routes(app, daemon)
    servers.add_routes(app)
    partner.add_routes(app)
    fleet.add_routes(app)
    app.router.add_post("/disco/v1/answers/{request_id}", _adjust)
    app.router.add_get("/metrics", scraped)
    return app


# --- answers ------------------------------------------------------------------------------------------------------


async def _chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions: Answer a conversation, streamed or whole, on the device, the server or both."""
    chat, extra = openai.parse(await _body(request))
    request_id = _new_id()
    generation = openai.to_generation(chat, extra, request_id, _route(request, chat.model))
    return await _answer(request, chat, generation, ChatShape(request_id, _created(request), chat.model))


async def _complete(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions: Continue a raw prompt, text or token ids, on the device."""
    asked, extra = openai.parse_completion(await _body(request))
    request_id = _new_id()
    allowed = _route(request, asked.model)
    if Side.DEVICE not in request.app[CONDUCTOR].endpoints:
        msg = "Text completions are served by the device only, and none is configured: use /v1/chat/completions."
        raise RequestError(msg, code="unsupported")
    generation = openai.to_raw_generation(asked, extra, request_id, allowed)
    return await _answer(request, asked, generation, TextShape(request_id, _created(request), asked.model))


async def _embed(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: Turn texts into vectors by the device's model: the mean of its last layer."""
    asked, texts = embeddings.parse(await _body(request))
    if Side.DEVICE not in _route(request, asked.model) or _adapter(asked.model):
        msg = "Embeddings are of the device's model, without an adapter: use the model 'disco' or 'disco/device'."
        raise RequestError(msg, param="model", code="unsupported_value")
    request_id, vectors = _new_id(), embeddings.Vectors(asked, len(texts))
    async with aclosing(request.app[CONDUCTOR].embed(texts, asked.model, request_id)) as found:
        async for embedding in found:
            vectors.add(embedding)
    headers = sse.headers(request_id, Side.DEVICE)
    return web.Response(body=vectors.body(), headers=headers, content_type="application/json")


async def _body(request: web.Request) -> bytes:
    received = await body(request)
    await request.app[TURNSTILE].enter()
    return received


def _new_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def _created(request: web.Request) -> int:
    return int(request.app[CONDUCTOR].context.clock.wall())


def _route(request: web.Request, model: str) -> frozenset[Side]:
    """Return the endpoints that may serve a model name. Raises RequestError."""
    conductor = request.app[CONDUCTOR]
    routes = _routes(conductor)
    if model not in routes:
        device = conductor.endpoints.get(Side.DEVICE)
        why = device.adapters.get(_adapter(model)) if device is not None else None
        reason = f" (its adapter was not loaded: {why})" if why else ""
        msg = f"The model '{model}' does not exist{reason}. Available: {', '.join(routes)}."
        raise RequestError(msg, status=404, param="model", code="model_not_found")
    return routes[model]


async def _answer(
    request: web.Request, asked: openai.AnswerRequest, generation: GenerationRequest, shape: AnswerShape
) -> web.StreamResponse:
    """Answer a request, as a stream or as one body."""
    conductor, request_id = request.app[CONDUCTOR], generation.request_id
    generation = replace(generation, adapter=_adapter(asked.model))
    wanted, quality = bool(asked.return_token_ids), planned_quality(generation, conductor.context)
    if asked.stream:
        usage, sides = asked.include_usage, asked.options.sides
        unheeded = {side: ignored_by(endpoint, generation) for side, endpoint in conductor.context.endpoints.items()}
        stream = sse.StreamSink(
            request, shape, request_id, include_usage=usage, token_ids=wanted, sides=sides, quality=quality,
            ignored=unheeded,
        )  # fmt: skip
        try:
            outcome = await conductor.run(generation, asked.model, stream)
            return await stream.finish(outcome)
        except ReaderGone:
            raise
        except DiscoError as e:
            if not stream.begun:
                return failure(e, sse.headers(request_id, None))
            return await stream.fail(e)
        except Exception as e:
            if not stream.begun:
                raise
            return await stream.fail(unexpected(e))
        finally:
            stream.close()
    whole = sse.BodySink(shape, token_ids=wanted)
    try:
        outcome = await conductor.run(generation, asked.model, whole)
    except DiscoError as e:
        return failure(e, sse.headers(request_id, None))
    if quality is not None:
        quality = "whole" if outcome.split is None else str(outcome.split["quality"])
    return json_response(whole.body(outcome), headers=sse.headers(request_id, outcome.winner, quality, outcome.ignored))


async def _adjust(request: web.Request) -> web.Response:
    """POST /disco/v1/answers/ID: Change a running answer, by `{"pace_tps": 8}` or `{"delivery": "off"}`."""
    request_id = request.match_info["request_id"]
    wish = openai.parse_adjustment(await body(request))
    delivery = None if wish.delivery is None else Delivery(wish.delivery)
    if not request.app[CONDUCTOR].in_flight.adjust(request_id, pace_tps=wish.pace_tps, delivery=delivery):
        msg = f"No answer '{request_id}' is running."
        raise RequestError(msg, status=404, code="not_found")
    return json_response({"request_id": request_id, "pace_tps": wish.pace_tps, "delivery": wish.delivery})


def _routes(conductor: Conductor) -> dict[str, frozenset[Side]]:
    """Return the configured model names with the endpoints that may serve each.

    `disco/device` means this machine even if the server is another disco, whose model has that name. With an adapter's
    name behind it, it is the device's model with that adapter.
    """
    ours = {"disco": BOTH} | {f"disco/{side}": frozenset({side}) for side in conductor.endpoints}
    for side, endpoint in conductor.endpoints.items():
        ours |= {f"disco/{side}:{name}": frozenset({side}) for name, why in endpoint.adapters.items() if not why}
    own: dict[str, frozenset[Side]] = {}
    for side, endpoint in conductor.endpoints.items():
        own[endpoint.model] = own.get(endpoint.model, frozenset()) | {side}
    return ours | {name: sides for name, sides in own.items() if name not in ours}


def _adapter(model: str) -> str:
    """Return the adapter that a model name asks for; "" if it asks for none."""
    prefix = f"disco/{Side.DEVICE}:"
    return model.removeprefix(prefix) if model.startswith(prefix) else ""


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "disco"}


async def _models(request: web.Request) -> web.Response:
    """GET /v1/models: List the models that may be asked for now."""
    conductor = request.app[CONDUCTOR]
    here = {Side.DEVICE} if conductor.context.private else BOTH
    names = [name for name, sides in _routes(conductor).items() if sides & here]
    return json_response({"object": "list", "data": [_model_card(name) for name in names]})


async def _model(request: web.Request) -> web.Response:
    """GET /v1/models/NAME: Show one model."""
    name = request.match_info["name"]
    if name not in _routes(request.app[CONDUCTOR]):
        msg = f"The model '{name}' does not exist."
        raise RequestError(msg, status=404, param="model", code="model_not_found")
    return json_response(_model_card(name))


# --- the daemon itself --------------------------------------------------------------------------------------------


async def _health(request: web.Request) -> web.Response:
    """GET /health: Answer 200 while something can serve, else 503."""
    conductor = request.app[CONDUCTOR]
    serving = {
        side.value: endpoint.may_serve() and (side is Side.DEVICE or not conductor.context.private)
        for side, endpoint in conductor.endpoints.items()
    }
    ok = any(serving.values())
    return json_response({"status": "ok" if ok else "unavailable", "endpoints": serving}, 200 if ok else 503)


async def _trace(request: web.Request) -> web.Response:
    """GET /disco/v1/trace/ID: Return when each token of an answer came and was shown; `latest` is the last one."""
    return json_response(fit(request, trace.document(request.app[CONDUCTOR], request.match_info["request_id"])))
