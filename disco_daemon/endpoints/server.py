"""An OpenAI-compatible server. Also serves as the device when that is a local server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from ..clock import Clock, SystemClock
from ..continuations import METHODS, RAW_METHODS
from ..errors import EndpointError
from ..system.net import is_plain, without_credentials
from ..types import (
    UNKNOWN,
    Capabilities,
    CaughtUp,
    Continuation,
    Finish,
    GenerationRequest,
    Infill,
    Paused,
    PromptLength,
    Readiness,
    Side,
    Token,
    Usage,
    finite,
    most_tokens,
    n_choices,
)
from . import model_facts
from .base import Controls, Render, Resumption, Tokens
from .bill import Bill, finds
from .breaker import BreakerState
from .chunks import Reader
from .continuation import CHAT, RAW_DEFAULT, Ask, Profile, Way, chat, completion, last_words, profile_name, resumption
from .gaps import fill, refuses_gap
from .hedge import ServerEvents, hedged
from .leading_thought import tags_for
from .plainhttp import NotPrivateError
from .refused import refused_limit
from .server_answer import LARGE, ServerAnswer
from .server_call import ServerCall
from .server_capabilities import ServerCapabilities, lack_of, with_other_limit
from .server_client import ServerClient, look_up_private
from .server_config import ServerConfig
from .server_errors import ServerErrors, StatusError, refusal_of, refused_wish
from .stream import Bytes, EventStream, most_bytes
from .thoughts import Thoughts

__all__ = ["Server", "ServerConfig"]

log = logging.getLogger("disco.server")

# What was wrong when a server has no list of models, or none that can be read.
TELLS_NOTHING = ("not_found", "refused", "unauthorized", "forbidden", "redirected", "garbage", "endless")


class Server:
    """`Endpoint` over a `ServerClient`."""

    can_hold = False

    def __init__(
        self,
        config: ServerConfig,
        side: Side = Side.SERVER,
        clock: Clock | None = None,
        *,
        tokens: Tokens | None = None,
        render: Render | None = None,
    ) -> None:
        self.side = side
        self._clock = clock or SystemClock()
        self._errors = ServerErrors(side, config.base_url, config.api_key, self._clock, config.name)
        self.breaker = self._errors.breaker
        self.known_since = self._clock.wall()
        self.config, self.model = config, config.model
        self.last_error: str | None = None
        self.n_parameters: int | None = None  # of its model, once its catalogue has told
        self.n_failures = 0
        self._together: tuple[Capabilities, Way, Capabilities] | None = None  # what is known, and as one
        self._known = ServerCapabilities(self._clock, config.chosen, config.listed)
        self._thoughts = Thoughts(config.first_token_timeout_s, config.token_timeout_s, config.thinking_timeout_s)
        self._doubted = False  # whether a bill of this server has been doubted in the log
        self.adapters: dict[str, str] = {}  # a server has models, and its own names for them
        self._tokens, self._render = tokens, render
        self._way = Way.from_setting(config.continuation, config.base_url)
        self.profile: Profile | None = None
        self._client: ServerClient | None = None
        # A key by plain http: the name may stand for private addresses only, whenever a connection is made.
        self._confined = bool(config.api_key) and is_plain(config.base_url) and not config.insecure

    @property
    def name(self) -> str:
        """The key of a profile: address and model, no credentials."""
        return profile_name(self.config.base_url, self.model)

    @property
    def continuation(self) -> Continuation:
        """The trust in its way to continue."""
        return self._way.trust

    @property
    def resumption(self) -> Resumption:
        """Sure where its exact way to continue was tried here, or is the user's word."""
        return resumption(self._way, is_tried=self.profile is not None or self.config.continuation != "auto")

    @property
    def should_probe(self) -> bool:
        """Whether it is unknown how this server continues: no setting, no table of hosts and no probe says it."""
        return not self._way.known

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that can be tried here, best first: all that the device provides the input for."""
        told = {"token_ids": self._tokens is not None, "text": self._render is not None}
        return tuple(method for method in METHODS if told.get(method, True))

    def adopt(self, profile: Profile) -> None:
        """Continue as the probe found best. What the user has set stands, and another server's profile is ignored."""
        if profile.server == self.name and self.config.continuation == "auto":
            self.profile, self._way = profile, Way.of(profile)

    def overlap_of(self, request: GenerationRequest) -> str | None:
        """The end of the answer so far that this server is asked to repeat first; None if it is not."""
        return last_words(request.answer_so_far) or None if self._way.method == "instruct" else None

    async def start(self) -> None:
        """Make the client; nothing but the name is asked for."""
        self.open()
        if self._confined and self.config.shared is None:
            await self._look()

    def open(self) -> None:
        """Make the client, at once; nothing is sent."""
        config, told = self.config, self._errors.told
        if config.shared is not None:
            self._client = config.shared().beside(told)
        else:
            self._client = ServerClient(config.base_url, config.api_key, confined=self._confined, told=told)

    async def _look(self) -> None:
        """Resolve the name, so that `disco status` shows at once if the server is not asked because of it."""
        try:
            await look_up_private(self.config.base_url)
        except NotPrivateError:
            self.last_error = str(self._errors.refuse_clear_text())
            log.warning("the server is off: %s", self.last_error)
        except (OSError, ValueError):  # a TimeoutError is an OSError; the first request tells
            pass

    async def close(self) -> None:
        """Close all connections."""
        self._thoughts.close()
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    @property
    def capabilities(self) -> Capabilities:
        """All that is known of it."""
        known, way = self._known.known, self._way
        if self._together is None or self._together[0] is not known or self._together[1] is not way:
            whole = replace(known, continuation=way.method != "none") if way.known else known
            self._together = known, way, whole
        return self._together[2]

    @property
    def should_inquire(self) -> bool:
        """Whether it has not told what it can do, or long ago."""
        return self._known.is_due

    async def inquire(self) -> None:
        """Ask what it tells of its model: its list of models, llama-server's properties. Nothing of it is an error."""
        if self._client is None:
            return
        try:
            with self._errors.translate():
                found = await self._ask_models(self._client)
        except EndpointError as e:
            log.debug("the %s does not tell what it can do: %s", self.side, e.reason)
            if e.reason == "unreachable" or (e.reason == "unauthorized" and self._errors.is_unheard):
                self.last_error = str(e)
                self._errors.failed(e)
            if e.reason not in TELLS_NOTHING:
                return  # it may later
            found = UNKNOWN
        self._errors.reached()
        self._known.tell(found)

    async def _ask_models(self, client: ServerClient) -> Capabilities:
        base_url = self.config.base_url.rstrip("/")
        entry = await asyncio.to_thread(model_facts.entry_of, await client.get(f"{base_url}/models"), self.model)
        if entry is None:
            return UNKNOWN
        self.n_parameters = model_facts.n_parameters_of(entry)
        if not model_facts.is_llama_server(entry):
            return model_facts.of_entry(entry)
        props = await client.get(f"{base_url.removesuffix('/v1')}/props")
        return model_facts.of_props(props).over(model_facts.of_entry(entry))

    def forget(self) -> None:
        """Forget what it refused, and how it failed: it is asked again for all of it."""
        self._known.forget()
        self._errors.breaker.forget()

    def refuses(self, request: GenerationRequest) -> str | None:
        """A server takes every chat, except to continue where it has no way to."""
        if isinstance(request.prompt, Infill):
            return refuses_gap(request, self.capabilities)
        if request.prompt is not None:
            return "a raw prompt is for the device's model only"
        if request.answer_so_far and self._way.method == "none":
            return "this server cannot continue a partial answer"
        return None

    def may_serve(self) -> bool:
        """A configured server may always be tried."""
        return True

    def readiness(self) -> Readiness:
        """Nothing to load; down for as long as its breaker says, and asked once only for a day after a 429."""
        n_ctx = self.capabilities.context_length
        return Readiness(down_s=self._errors.down_s, n_ctx=n_ctx, hedgeable=self._errors.hedgeable)

    def breakers(self) -> dict[str, BreakerState]:
        """Return the state of its breaker, by its side's name."""
        return {self.side.value: self._errors.breaker.state(self._clock.now())}

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Unknown: servers do not tell before they bill."""
        del request
        return None

    def status(self) -> dict[str, Any]:
        """Address, model, continuation method and last failure."""
        return {
            "kind": "openai",
            "base_url": without_credentials(self.config.base_url),
            "model": self.model,
            "state": "off" if self._errors.exposed else "configured",
            "continuation": self._way.method,
            "probed": None if self.profile is None else self.profile.to_json(),
            "failures": self.n_failures,
            "down_s": finite(round(self._errors.down_s, 1)),
            "last_error": self.last_error,
            **self._errors.health(),
            **self._known.status(),
        }

    # --- one answer ----------------------------------------------------------------------------------------------

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Paused | Finish, None]:
        """Stream one answer; the stream is closed on the way out, however that is. A server cannot be held.

        What may be silent since it thinks is not asked a second time: both thoughts would be paid for.
        """
        hedge = None if controls is None else controls.hedge
        if hedge is None or finds(request.extra) or self._thoughts.thinks(request):
            return self.ask(request, usage, noted=True)
        return hedged(lambda own: self.ask(request, own, noted=True), usage, hedge, self._clock)

    async def ask(
        self, request: GenerationRequest, usage: Usage, method: str | None = None, *, noted: bool = False
    ) -> ServerEvents:
        """Generate with a continuation method to try; a failure is not `noted`. For the probe."""
        call = ServerCall(self._errors, self._clock, noted=noted)
        try:
            with self._errors.translate():
                if method is None and (refusal := self.refuses(request)) is not None:
                    raise self._errors.error("no_continuation", refusal)
                began = self._clock.now()
                limit = most_tokens(request)
                patience = self._thoughts.patience(request, limit)
                async with AsyncExitStack() as stack:
                    stack.callback(patience.close)
                    with patience.waiting():
                        asked = await self._compose(request, method)
                        call.begin(patience, thinks=self._thoughts.thinks(request))
                        body = await self._send(asked, stack)
                    stream = EventStream(body, patience, most_bytes(limit))
                    chunks = await stack.enter_async_context(aclosing(stream.objects()))
                    bill = Bill(usage, asked.body, limit)
                    ids_back, n = "return_token_ids" in asked.body, n_choices(request.extra)
                    tags = tags_for(request)
                    reader = Reader(ids_back=ids_back, n_choices=n, name=request.request_id, tags=tags)
                    answer = ServerAnswer(stream, reader, bill, self._errors, self._clock, began)
                    async for chunk in chunks:
                        if self._errors.failing is not None or not self._errors.is_tried:
                            self._errors.heard()
                        is_large = stream.n_bytes > LARGE
                        if not is_large and (plain := answer.token(chunk)) is not None:
                            patience.renew(plain)
                            stream.n_idle = 0
                            yield plain
                            continue
                        for token in await answer.read_large(chunk) if is_large else answer.read(chunk):
                            patience.renew(token)
                            stream.n_idle = 0
                            yield token
                            if is_large:
                                await asyncio.sleep(0)  # others have a turn
                        if reader.is_over:
                            break
                    if reader.is_over:
                        async for token in await stack.enter_async_context(aclosing(answer.behind(chunks))):
                            yield token
                    self._doubt(bill)
                    self._thoughts.add(request, patience.first, usage)
                    for event in reader.ends(is_done=stream.done):
                        if event == Finish("length") and asked.unlimited and usage.completion_tokens <= RAW_DEFAULT:
                            text = "the server cut an answer without a limit to its own default"
                            raise self._errors.error("cut", text)
                        if isinstance(event, Finish):
                            call.succeed()
                        if isinstance(event, Token) and event.n_tokens:
                            bill.count_token(event, reader.n_tokens, counted=usage.told)
                        told = isinstance(event, Finish) and usage.told
                        yield replace(event, n_tokens=usage.completion_tokens) if told else event
        except EndpointError as e:
            if noted and (lack := self._note(e, request, call)) is not None:
                raise lack from e
            raise
        finally:
            call.close()

    async def _compose(self, request: GenerationRequest, method: str | None) -> Ask:
        """Compose the request. Raises EndpointError when the device cannot give what the method needs."""
        # With stop strings a server may hold text back whose ids it has told already.
        ids_back = self._way.vocab and not request.sampling.stop and n_choices(request.extra) == 1
        if isinstance(request.prompt, Infill):
            return fill(request, request.prompt, ids_back=ids_back)
        if not request.answer_so_far:
            return chat(request, "none", ids_back=ids_back)
        chosen = method or self._way.method
        if chosen in RAW_METHODS:
            prompt = await self._raw_prompt(request, chosen)
            if prompt:
                return completion(request, prompt, ids_back=ids_back)
            if method is not None or self._way.fallback == "none":
                raise self._errors.error("no_continuation", f"the device does not tell what {chosen} needs")
            chosen = self._way.fallback
        return chat(request, chosen, ids_back=ids_back)

    async def _raw_prompt(self, request: GenerationRequest, method: str) -> str | tuple[int, ...] | None:
        if method == "token_ids":
            return await self._tokens(request) if self._tokens else None
        return await self._render(request) if self._render else None

    async def _send(self, asked: Ask, stack: AsyncExitStack) -> Bytes:
        """Send the request; return the response's body as it comes. `stack` closes it."""
        assert self._client is not None, "start() comes first"
        body = {"model": self.model, **asked.body, "stream": True}
        if self.config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        body = self._known.renamed(body) if asked.path == CHAT else body
        try:
            response = await self._client.stream(asked.path, body, stack)
        except StatusError as e:  # of a limit's name; nothing was said yet, so nobody has to know
            limit = refused_limit(e.status, e.document, body) if asked.path == CHAT else None
            if limit is None:
                raise
            response = await self._client.stream(asked.path, with_other_limit(body, limit), stack)
            self._known.rename(limit, self._errors.show(str(e)))
        self._errors.exposed = False
        return response

    def _doubt(self, bill: Bill) -> None:
        """Log once what of a bill cannot be true."""
        if bill.odd and not self._doubted:
            self._doubted = True
            odd = self._errors.show(bill.odd)
            log.warning("the %s's usage is not taken as it says: %s (told once)", self.side, odd)

    def _note(self, error: EndpointError, request: GenerationRequest, call: ServerCall) -> EndpointError | None:
        """Take note of a failure; return the error to raise in its place, where it says what the server lacks."""
        lack = self._learn(error, request)
        if lack is not None or error.your_fault:
            call.succeed()
            return lack
        self.n_failures += 1
        self.last_error = str(error)
        self._errors.failed(error)
        call.fail(error, request)
        if error.reason == "unreachable":  # it may be another one when it is back
            self._known.forget()
        return None

    def _learn(self, error: EndpointError, request: GenerationRequest) -> EndpointError | None:
        """Return the error for a refusal that says what the server lacks, which is remembered, or that is of a wish."""
        status, document = refusal_of(error)
        understood = self._known.learn(status, document, str(error), request)
        return refused_wish(error, request) if understood is None else lack_of(understood, error, request)
