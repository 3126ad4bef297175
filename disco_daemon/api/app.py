"""The HTTP application: its routes, and the handlers of answers, models and health."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ..conductor import Conductor
from ..errors import RequestError
from ..types import Delivery, Side
from . import answering
from .answering import CONDUCTOR, TURNSTILE, Turnstile, names, received
from .anthropic import messages_routes
from .control import documents, fleet_routes, key_routes, machine_routes, openapi_route, server_routes, trace_route
from .control.control_requests import parse_adjustment
from .control.documents import Documents
from .control.metrics import Metrics
from .control.scrape import METRICS, counted
from .doors import DOOR, UnixDoor, check_control, fit, sees_keys
from .http import cross_origin
from .http.bodies import decoded
from .http.connections import body, bounded
from .http.failures import MAX_BODY, json_response, shape_errors, signed
from .http.guard import CONFIG, ApiConfig, check_caller, key_of
from .llama_server import infill_routes, rerank_routes
from .ollama import ollama_routes
from .openai import embeddings
from .openai.codex import codex_models
from .openai.shapes import ChatShape, TextShape
from .responses import responses_routes


def make_app(conductor: Conductor, daemon: Documents, config: ApiConfig, metrics: Metrics) -> web.Application:
    """Make the application: all routes and middleware; `daemon` stands behind the documents."""
    middlewares = [counted, shape_errors, check_caller, check_control, bounded]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app.on_response_prepare.extend((signed, cross_origin.tell))
    app[TURNSTILE] = Turnstile()
    app[CONDUCTOR], app[CONFIG], app[METRICS] = conductor, config, metrics
    app[DOOR] = UnixDoor()
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/embeddings", _embed)
    responses_routes.add_routes(app)
    messages_routes.add_routes(app)
    infill_routes.add_routes(app)
    rerank_routes.add_routes(app)
    ollama_routes.add_routes(app)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _model)
    app.router.add_get("/", _root)
    app.router.add_get("/health", _health)
    app.router.add_get("/disco/v1/trace/{request_id}", _trace)
    documents.add_routes(app, daemon)
    server_routes.add_routes(app)
    machine_routes.add_routes(app)
    fleet_routes.add_routes(app)
    key_routes.add_routes(app)
    app.router.add_post("/disco/v1/answers/{request_id}", _adjust)
    app.router.add_get("/metrics", _metrics)
    openapi_route.add_routes(app)
    return app


# --- answers ------------------------------------------------------------------------------------------------------


async def _chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions: Answer a conversation, streamed or whole, on the device, the server or both."""
    return await answering.chat(request, decoded(await received(request)), ChatShape)


async def _complete(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions: Continue a raw prompt, text or token ids, or fill the gap before a `suffix`."""
    return await answering.complete(request, decoded(await received(request)), TextShape)


async def _embed(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: Turn texts into vectors by the device's model."""
    asked, texts = embeddings.parse(decoded(await received(request)))
    vectors = embeddings.OpenAIVectors(asked, len(texts))
    return await answering.embed(request, asked.model, texts, embeddings.task_of(asked), vectors)


async def _adjust(request: web.Request) -> web.Response:
    """POST /disco/v1/answers/ID: Change a running answer, by `{"pace_tps": 8}` or `{"delivery": "off"}`."""
    request_id = request.match_info["request_id"]
    wish = parse_adjustment(await body(request))
    delivery = None if wish.delivery is None else Delivery(wish.delivery)
    caller = None if (key := key_of(request)) is None else key.caller
    if not request.app[CONDUCTOR].in_flight.adjust(request_id, wish.pace_tps, delivery, caller):
        raise RequestError(f"No answer '{request_id}' is running.", status=404, code="not_found")
    return json_response({"request_id": request_id, "pace_tps": wish.pace_tps, "delivery": wish.delivery})


async def _models(request: web.Request) -> web.Response:
    """GET /v1/models: List the models that may be asked for now, aliases and patterns too; `models` is for Codex."""
    cards = await names(request).cards()
    codex = await asyncio.to_thread(codex_models, cards)
    return json_response({"object": "list", "data": cards, "models": codex})


async def _model(request: web.Request) -> web.Response:
    """GET /v1/models/NAME: Show one model, also one that only a pattern of an alias has."""
    return json_response(names(request).card(request.match_info["name"]))


# --- the daemon itself --------------------------------------------------------------------------------------------


async def _root(_request: web.Request) -> web.Response:
    """GET /: Say that this is a disco, and where it answers; some clients ask for its HEAD first."""
    return json_response({"name": "disco", "answers_at": "/v1"})


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
    caller = None if (key := key_of(request)) is None else key.caller
    found = trace_route.document(request.app[CONDUCTOR], request.match_info["request_id"], caller)
    return json_response(fit(request, found))


async def _metrics(request: web.Request) -> web.Response:
    """GET /metrics: Return all metrics for Prometheus; those by key for who may see keys."""
    accept = request.headers.get("Accept", "")
    text, content_type = request.app[METRICS].render(accept, by_key=sees_keys(request))
    return web.Response(body=text, headers={"Content-Type": content_type})
