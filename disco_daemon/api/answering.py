"""How a request becomes an answer, whichever API it came by: read, named, conducted, and sent as a stream or whole."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..conductor import Conductor, eligible, ignored_by, planned_quality, prompt_length
from ..errors import DiscoError, ReaderGone, RequestError, TooManyRequests
from ..keys import key_fields
from ..keys.named_key import KeyTerms
from ..types import OWNER, Embedding, GenerationRequest, Given, Side, TextTask
from .http import sse
from .http.connections import body
from .http.failures import error_shape, failure, json_response, unexpected
from .http.guard import CONFIG, key_of
from .names import ModelNames, NamedModel
from .openai import openai_request
from .openai.shapes import AnswerShape

BYTES_PER_TOKEN = 4  # of what an estimate counts beside the text: tools and calls, in JSON


class Turnstile:
    """Lets one new request in per turn of the event loop.

    Starting an answer takes a millisecond or two; fifty at once would keep every running stream waiting for all of it.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._is_passed = False  # in this turn

    async def enter(self) -> None:
        """Go on at once if nobody has in this turn of the loop, else wait for one's own."""
        async with self._lock:
            if self._is_passed:
                await asyncio.sleep(0)  # `_turn` stands before it in the loop's queue
            self._is_passed = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_passed = False


TURNSTILE = web.AppKey("turnstile", Turnstile)
CONDUCTOR = web.AppKey("conductor", Conductor)


async def received(request: web.Request) -> bytes:
    """Return a new request's body, in its turn. Raises RequestError, also where a key asks too often."""
    if (key := key_of(request)) is not None:
        wait_s = request.app[CONFIG].keys.admit(key, request.app[CONDUCTOR].context.clock.now())
        if wait_s:
            msg = (
                f"The key '{key.name}' may make {key.terms.requests_per_minute} requests a minute: ask again in "
                f"{math.ceil(wait_s)} s. `disco keys change {key.name}` on the machine of the daemon changes that."
            )
            raise TooManyRequests(msg, wait_s)
    found = await body(request)
    await request.app[TURNSTILE].enter()
    return found


def new_id() -> str:
    """Return an id that no other request has."""
    return f"req-{secrets.token_hex(8)}"


def created(request: web.Request) -> int:
    """Return the present time as OpenAI tells it, s since 1970."""
    return int(request.app[CONDUCTOR].context.clock.wall())


def named(request: web.Request, model: str) -> NamedModel:
    """Return what a model name stands for. Raises RequestError."""
    return names(request).find(model)


def names(request: web.Request) -> ModelNames:
    """Return all names that models have now."""
    return ModelNames(request.app[CONDUCTOR], request.app[CONFIG].aliases, key_of(request))


def asked_by(request: web.Request, generation: GenerationRequest) -> GenerationRequest:
    """Return what a request asks as the key that it shows may have it answered. Raises RequestError."""
    if (key := key_of(request)) is None:
        return generation
    if key.terms.models and generation.extra:
        generation = _of_its_models(request, generation, key.terms)
    if key.terms.is_capped and Side.SERVER in generation.allowed and not key.terms.private:
        generation = _within_its_caps(generation, key.name)
    if not key.terms.private:
        return replace(generation, caller=key.caller)
    if Side.DEVICE not in generation.allowed:
        msg = f"What the key '{key.name}' asks stays on this machine, and this is for the server: use 'disco'."
        raise RequestError(msg, status=403, param="model", code="private")
    return replace(generation, caller=key.caller, allowed=frozenset({Side.DEVICE}), private=True)


def _of_its_models(request: web.Request, generation: GenerationRequest, terms: KeyTerms) -> GenerationRequest:
    """Return a request without what could get it another model than the key may ask for. Raises RequestError.

    A server knows its models by names of its own, before which disco puts the server's.
    """
    extra = key_fields.kept(generation.extra)
    servers = {model.partition("/")[0] for model in generation.servers}
    for name in key_fields.models_named(extra):
        if not terms.allow(name) and not (servers and all(terms.allow(f"{server}/{name}") for server in servers)):
            raise names(request).not_allowed(name)
    return _with_these(generation, extra)


def _within_its_caps(generation: GenerationRequest, key: str) -> GenerationRequest:
    """Return a request whose most can be held of the caps of a key. Raises RequestError."""
    if name := key_fields.unheld(generation.extra, generation.messages):
        msg = (
            f"What '{name}' asks for may cost more than can be held of the limit of the key '{key}': ask without it, "
            f"or with a key without usd_per_day and usd_per_month (`disco keys change {key}`)."
        )
        raise RequestError(msg, status=403, param=name, code="field_not_allowed")
    return _with_these(generation, key_fields.kept(generation.extra)) if generation.extra else generation


def _with_these(generation: GenerationRequest, extra: dict[str, Any]) -> GenerationRequest:
    """Return a request with these of its fields; the answer names the others."""
    left = (name for name, value in generation.extra.items() if name not in extra and value is not None)
    return replace(generation, extra=extra, left_out=(*generation.left_out, *left))


Shape = Callable[[str, int, str], AnswerShape]  # of an answer's id, its time, and the model as it was asked for


async def chat(
    request: web.Request, raw: dict[str, Any], shape: Shape, left_out: Sequence[str] = ()
) -> web.StreamResponse:
    """Answer a conversation that came as a chat's JSON object, or was made one. Raises RequestError.

    What a chat has no place for, its translation `left_out`; the answer names it.
    """
    asked, generation = conversation(request, raw, left_out)
    return await answer(request, asked, generation, shape(generation.request_id, created(request), asked.model))


async def complete(
    request: web.Request, raw: dict[str, Any], shape: Shape, left_out: Sequence[str] = ()
) -> web.StreamResponse:
    """Continue a raw prompt that came as a text completion's JSON object, or was made one. Raises RequestError."""
    asked, extra = openai_request.parse_completion(raw)
    model = named(request, asked.model)
    if not asked.suffix and not model.local and Side.DEVICE not in request.app[CONDUCTOR].endpoints:
        msg = "Text completions are served by the device only, and none is configured: use /v1/chat/completions."
        raise RequestError(msg, code="unsupported")
    generation = openai_request.to_raw_generation(asked, extra, new_id(), model.sides)
    generation = replace(
        generation, adapter=model.adapter, local=model.local, servers=model.servers, left_out=tuple(left_out)
    )
    return await answer(request, asked, generation, shape(generation.request_id, created(request), asked.model))


class Collector(Protocol):
    """Takes what is computed of texts, and makes a response of it in an API's shape."""

    def add(self, embedding: Embedding) -> None:
        """Take the vectors of the next texts. Raises RequestError."""
        ...

    def body(self) -> bytes | bytearray:
        """Return the whole response, once."""
        ...


async def embed(
    request: web.Request, asked_model: str, texts: Sequence[Given], task: TextTask, vectors: Collector
) -> web.Response:
    """Answer with the vectors of texts, or of token ids, as `vectors` writes them. Raises RequestError."""
    model = named(request, asked_model)
    if Side.DEVICE not in model.sides or model.adapter:
        what = "Embeddings are" if task.query is None else "Ratings are"
        msg = f"{what} of this machine's models, without an adapter: use the model 'disco' or 'disco/device'."
        raise RequestError(msg, param="model", code="unsupported_value")
    request_id, conductor = new_id(), request.app[CONDUCTOR]
    device = conductor.context_of(model.local).endpoints.get(Side.DEVICE)
    caller = OWNER if (key := key_of(request)) is None else key.caller
    async with aclosing(conductor.embed(texts, task, asked_model, request_id, model.local, caller)) as found:
        async for embedding in found:
            vectors.add(embedding)
    headers = sse.headers(request_id, Side.DEVICE, model=device.model if device else None)
    return web.Response(body=vectors.body(), headers=headers, content_type="application/json")


def conversation(
    request: web.Request, raw: dict[str, Any], left_out: Sequence[str] = ()
) -> tuple[openai_request.ChatRequest, GenerationRequest]:
    """Return a chat's JSON object as it was asked, and as endpoints get it. Raises RequestError."""
    asked, extra = openai_request.parse_chat(raw)
    model = named(request, asked.model)
    generation = openai_request.to_generation(asked, extra, new_id(), model.sides)
    generation = replace(generation, adapter=model.adapter, local=model.local, servers=model.servers)
    return asked, replace(generation, left_out=tuple(left_out))


async def prompt_size(request: web.Request, raw: dict[str, Any]) -> tuple[int, bool]:
    """Return the tokens of a conversation as a prompt, and whether they are an estimate; nothing is sent anywhere.

    Raises RequestError or Unavailable if nobody could answer it.
    """
    _, generation = conversation(request, raw)
    generation = asked_by(request, generation)
    with request.app[CONDUCTOR].held(generation.local) as context:
        generation, available = eligible(generation, context)
        length = await prompt_length(generation, available, context)
    beside = 0 if length.counted else unread_bytes(raw) // BYTES_PER_TOKEN
    return length.tokens + beside, not length.counted


async def _ruled(request: web.Request, asked_model: str, generation: GenerationRequest) -> GenerationRequest:
    """Return a request as the user's rules narrow it; a model that one names answers it. Raises RequestError."""
    conductor = request.app[CONDUCTOR]
    assert conductor.rules is not None
    context = conductor.context_of(generation.local)
    generation, name = await conductor.rules.apply(generation, asked_model, request.headers, context)
    every = ModelNames(conductor, request.app[CONFIG].aliases)  # a rule is the owner's, whatever a key may ask for
    return generation if not name else by_rule(generation, every.find(name))


def by_rule(generation: GenerationRequest, model: NamedModel) -> GenerationRequest:
    """Return a request for the model that a rule names. Raises RequestError where it asks for another one itself."""
    allowed = generation.allowed & model.sides
    servers = tuple(one for one in model.servers if not generation.servers or one in generation.servers)
    others = (generation.local, model.local), (generation.adapter, model.adapter)
    if not allowed or len(servers) < bool(model.servers) or any(own and own != ruled for own, ruled in others):
        asks = "is private" if generation.private else "asks for another one"
        msg = f"Rule '{generation.rule}' has only '{model.target}' answer this, and the request {asks}"
        raise RequestError(f"{msg}: [[rules]] of config.toml.", status=403, param="model", code="rule")
    return replace(
        generation, allowed=allowed, local=model.local, adapter=model.adapter, servers=servers, ruled=True
    )  # fmt: skip


def unread_bytes(chat: dict[str, Any]) -> int:
    """Return the bytes of a chat's tools and calls, which are a part of the prompt and no text of a message."""
    calls = [call for message in chat["messages"] for call in message.get("tool_calls") or ()]
    found = [part for part in (chat.get("tools"), calls) if part]
    return len(msgspec.json.encode(found)) if found else 0


async def answer(
    request: web.Request, asked: openai_request.AnswerRequest, generation: GenerationRequest, shape: AnswerShape
) -> web.StreamResponse:
    """Answer a request, as a stream or as one body. Raises RequestError where a rule leaves nobody to answer it."""
    conductor, request_id = request.app[CONDUCTOR], generation.request_id
    generation = asked_by(request, generation)
    if conductor.rules is not None:
        generation = await _ruled(request, asked.model, generation)
    context = conductor.context_of(generation.local)
    wanted, quality = bool(asked.return_token_ids), planned_quality(generation, context)
    if asked.stream:
        usage, sides = asked.include_usage, asked.options.sides
        unheeded = {side: ignored_by(endpoint, generation) for side, endpoint in context.endpoints.items()}
        stream = sse.StreamSink(
            request,
            shape,
            request_id,
            context.clock,
            include_usage=usage,
            token_ids=wanted,
            sides=sides,
            quality=quality,
            ignored=unheeded,
        )
        try:
            outcome = await conductor.run(generation, asked.model, stream)
            return await stream.finish(outcome)
        except ReaderGone:
            raise
        except DiscoError as e:
            if not stream.begun:
                return failure(e, sse.headers(request_id, None), shape=error_shape(request.path))
            return await stream.fail(e)
        except Exception as e:
            if not stream.begun:
                raise
            return await stream.fail(unexpected(e))
        finally:
            await stream.closed()
    whole = sse.BodySink(shape, token_ids=wanted)
    try:
        outcome = await conductor.run(generation, asked.model, whole)
    except DiscoError as e:
        return failure(e, sse.headers(request_id, None), shape=error_shape(request.path))
    if quality is not None:
        quality = "whole" if outcome.split is None else str(outcome.split["quality"])
    told = sse.headers(
        request_id,
        outcome.winner,
        quality,
        model=outcome.winner_model,
        reason=outcome.reason,
        ignored=outcome.ignored,
    )
    return json_response(whole.body(outcome), headers=told | sse.bill(outcome))
