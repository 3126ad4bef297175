"""The device: this machine's own model, in the engine process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ..engine import wire
from ..engine.json_schema.unenforced import left_out, narrowed
from ..engine.supervisor import Engine, EngineState
from ..errors import EndpointError
from ..tools.formats import GENERIC
from ..types import (
    CallPart,
    Capabilities,
    CaughtUp,
    Continuation,
    Delta,
    Embedding,
    Finish,
    GenerationRequest,
    Given,
    Infill,
    Paused,
    PromptLength,
    Readiness,
    Refusal,
    Side,
    TextFamily,
    TextKind,
    TextTask,
    Token,
    Tools,
    Usage,
    chat_logprobs,
    choice_of,
    form_parameter,
    ignored,
    n_choices,
    response_format,
    tool_use,
)
from ..types.infill import WITH_TOKENS
from .base import Controls, Resumption
from .chat_prompt import for_template
from .choices import Event, several
from .device_refusals import no_answers, refused_field, refused_form, unoffered

# What the engine can do with any model.
ENGINE = Capabilities(
    forced_tools=True, json_schema=True, images=False, logprobs=True, n=True, continuation=True,
)  # fmt: skip
LOAD_WAIT_S = 120.0  # a request that comes while the model loads; a first token later than this is no answer


class Device:
    """`Endpoint` over the supervised engine; its model is called by `name`, or else by the file's name."""

    side = Side.DEVICE
    continuation = Continuation.EXACT
    can_hold = True
    resumption = Resumption.ALONE

    def __init__(self, engine: Engine, name: str = "") -> None:
        self._engine = engine
        self.model = name or Path(engine.config.model_path).name.removesuffix(".gguf")
        self.known_since = _written_at(engine)
        self.last_error: str | None = None
        self._still_s: Callable[[], float] = _at_once
        # Tokens that prompt and answer will have, as far as that is known before the model is loaded.
        self.expected_n_ctx: Callable[[], int | None] = _unknown
        self.expected_text_kind: Callable[[], TextKind | None] = _unknown

    @property
    def adapters(self) -> dict[str, str]:
        """The configured adapters; once they are loaded, also which of them could not be, and why."""
        info = self._engine.info
        return info.adapters if info else dict.fromkeys((a.name for a in self._engine.config.adapters), "")

    @property
    def engine(self) -> Engine:
        """The engine that computes."""
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        """The engine's, and once its model is loaded, the context, tools and tokens for gaps that this has."""
        if (kind := self.text_kind) is not None:
            able = Capabilities(
                chat=False, embeddings=not kind.rates, rerank=kind.rates, tools=Tools.NONE, images=False
            )
            return replace(able, context_length=self.n_ctx)
        info = self._engine.info
        tools = None
        if info is not None and info.tool_format:
            tools = Tools.GENERIC if info.tool_format == GENERIC.name else Tools.NATIVE
        return replace(
            ENGINE,
            context_length=self.n_ctx,
            max_output=self.n_ctx,
            tools=tools,
            fim=None if info is None else info.fim,
        )

    def refuses(self, request: GenerationRequest) -> str | None:
        """Text in, text, JSON or calls of functions out, and the fields that `types.fields` has it take."""
        if (kind := self.text_kind) is not None:
            return no_answers(self.model, kind)
        if not request.text_only:
            return "the device takes plain text messages only"
        if not isinstance(request.extra.get("chat_template_kwargs"), Mapping | None):
            return "chat_template_kwargs must be an object"
        if request.split.mode not in (None, "exact") or request.split.theta is not None:
            return Refusal("split_mode and theta are for a device over two machines, and this one is whole", "disco")
        if isinstance(request.prompt, Infill) and self._engine.info is not None and not self._engine.info.fim:
            return Refusal(f"the device's model has no tokens for filling in the middle; {WITH_TOKENS}", "suffix")
        info = self._engine.info
        return refused_field(request) or refused_form(request) or unoffered(request, info.tool_format if info else "")

    def ignores(self, request: GenerationRequest) -> list[str]:
        """Return the fields that the engine does not know, or that nobody heeds."""
        found = ignored(request.extra, on_device=True, is_raw=request.prompt is not None)
        use = tool_use(request.extra)
        tools = use.tools if use is not None and not use.forced else ()  # a forced call is held, or refused
        return found + left_out(response_format(request.extra, whole=request.whole_schema), tools)

    def narrows(self, request: GenerationRequest) -> list[str]:
        """Return what a schema allows that the grammar leaves out."""
        return narrowed(response_format(request.extra, whole=request.whole_schema))

    def may_serve(self) -> bool:
        """Whether the engine is up, loading or about to be, and its model is not known to crash it."""
        return self._engine.state is not EngineState.STOPPED and not self._engine.down_s

    def readiness(self) -> Readiness:
        """Return the time until the model is loaded, s, the answers being computed, and how long to leave it alone."""
        engine = self._engine
        load_s = self._still_s() + engine.load_wait_s
        return Readiness(load_s, engine.in_flight, engine.down_s, prefill_tps=self.prefill_tps, n_ctx=self.n_ctx)

    @property
    def ready(self) -> bool:
        """Whether the model is in memory."""
        return self._engine.state is EngineState.READY

    @property
    def n_ctx(self) -> int | None:
        """Tokens that prompt and answer may have; before the model is loaded as predicted, or else as configured."""
        info = self._engine.info
        return info.n_ctx if info is not None else self.expected_n_ctx() or self._engine.config.n_ctx or None

    @property
    def prefill_tps(self) -> float | None:
        """Prefill speed measured at load, token/s."""
        return self._engine.info.prefill_tps if self._engine.info else None

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Prompt length; None while loading."""
        counted = await self._engine.count(_readable(request)) if request.text_only else None
        if counted is None:
            return None
        return PromptLength(counted.n_tokens, counted.n_cached)

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...] | None:
        """Token ids of the prompt and the answer so far, by this model's vocabulary; None while loading."""
        counted = await self._engine.count(_readable(request), ids=True) if request.text_only else None
        return counted.ids if counted is not None else None

    async def render(self, request: GenerationRequest) -> str | None:
        """Return prompt and answer so far as the text that the model reads; None where that is not known.

        It is not while loading, nor if messages spell control tokens.
        """
        counted = await self._engine.count(_readable(request), ids=True) if request.text_only else None
        return counted.text or None if counted is not None else None

    def overlap_of(self, request: GenerationRequest) -> None:
        """Goes right on."""
        del request

    def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run the answer on the engine, or several; waits for the rest of a load first."""
        controls = controls or Controls()
        if (n := n_choices(request.extra)) > 1:
            ask = lambda index, own, orders: self._answer(choice_of(request, index), own, orders)  # noqa: E731
            return several(n, ask, usage, controls)
        return self._answer(request, usage, controls)

    async def _answer(
        self, request: GenerationRequest, usage: Usage, controls: Controls
    ) -> AsyncGenerator[Event, None]:
        with self._note_failure():
            if not self.ready:
                await self._wait_for_load(usage)
            request = self.prepare(request)
            answer = self._engine.open(request, hold=controls.held)
            controls.bind(answer.send)
            ending = "stop"
            try:
                while True:
                    match await anext(answer):  # ends: the supervisor kills an engine that hangs
                        case wire.PrefillProgress() as progress:
                            usage.prompt_tokens, usage.cached_tokens = progress.n_prefilled, progress.n_cached
                            if progress.caught_up and answer.up_to_date:
                                yield CaughtUp()
                        case wire.TextPiece() as piece:
                            usage.completion_tokens += piece.n_tokens
                            usage.reasoning_tokens += piece.n_tokens * piece.thought
                            if not answer.outdated:
                                yield _token(piece)
                        case wire.CallPiece() as piece:
                            usage.completion_tokens += piece.n_tokens
                            ending = "tool_calls"
                            if not answer.outdated:
                                yield _call_token(piece)
                        case wire.PauseChange(paused=paused):
                            yield Paused(paused)
                        case wire.Done(reason=reason, stop=stop):
                            full = reason == wire.FULL
                            ended = "length" if full else ending if reason == "stop" else reason
                            yield Finish(ended, full=full, stop=stop)
                            return
                        case wire.Failed() as failed:
                            raise self._error(failed, form_parameter(request.extra))
            finally:
                await answer.close()
                if answer.done is not None:
                    usage.prompt_tokens, usage.cached_tokens = answer.done.n_prompt, answer.done.n_cached
                    usage.completion_tokens = answer.done.n_completion
                    usage.busy_s, usage.rearranged = answer.done.busy_s, answer.done.rearranged
                    usage.split = split = self.describe_split(request, answer.done)
                    usage.partner_j = (split or {}).get("partner_j") or 0.0

    def prepare(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request as the engine is to answer it. Raises EndpointError if it cannot be answered any more."""
        return _readable(request)

    def describe_split(self, request: GenerationRequest, done: wire.Done) -> dict[str, Any] | None:
        """Return the partner's part of an answer, for the last chunk; a whole device has none."""
        del request, done
        return None

    async def _wait_for_load(self, usage: Usage) -> None:
        began_at = self._engine.clock.now()
        try:
            await self._engine.ready(LOAD_WAIT_S)
        finally:  # a request that is cancelled meanwhile has waited for nothing else
            usage.load_s = self._engine.clock.now() - began_at

    @contextmanager
    def _note_failure(self) -> Iterator[None]:
        try:
            yield
        except EndpointError as e:
            if not e.your_fault:
                self.last_error = str(e)
            raise

    def _error(self, failed: wire.Failed, form: str | None = None) -> EndpointError:
        """Return what failed; `form` is the client's name for the parameter that the engine calls response_format."""
        param = form or failed.param if failed.param == "response_format" else failed.param
        return EndpointError(self.side, failed.reason, failed.message, your_fault=failed.your_fault, param=param)

    @property
    def text_kind(self) -> TextKind | None:
        """What the model makes of texts, where it answers nothing: as its engine says, before that by its file."""
        info, expected = self._engine.info, self.expected_text_kind
        if info is None:
            return expected()
        return (expected() or TextKind(info.pooling)) if info.pooling else None

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """The vectors of texts, or of token ids; waits for the rest of a load first. Raises EndpointError."""
        await self._engine.ready(LOAD_WAIT_S)
        kind = self.text_kind
        family = TextFamily(least_dimensions=1) if kind is None else kind.family
        prefix = family.prefixes.get(task.purpose, "")
        inputs = tuple(prefix + given if isinstance(given, str) else given for given in texts)
        asked = wire.Embed(
            id="", inputs=inputs, dimensions=task.dimensions, least_dimensions=family.least_dimensions,
            centred=family.centred, query=task.query,
        )  # fmt: skip
        reply = await self._engine.embed(asked, usage)
        if isinstance(reply, wire.Failed):
            raise self._error(reply)
        return Embedding(reply.vectors, reply.n_tokens)

    def status(self) -> dict[str, Any]:
        """Engine state and its last failure."""
        engine, info = self._engine, self._engine.info
        return {
            "kind": "engine",
            "model": self.model,
            "state": engine.state.value,
            "pid": engine.pid,
            "in_flight": engine.in_flight,
            "restarts": engine.restarts,
            "crashes": engine.n_crashed,
            "down_s": round(engine.down_s, 1),
            "n_ctx": self.n_ctx if info else None,
            "n_cells": info.n_cells if info else None,
            "bytes_per_token": info.bytes_per_token if info else None,
            "engine": msgspec.to_builtins(engine.stats) if engine.stats else None,
            "prefill_tps": round(info.prefill_tps, 1) if info else None,
            "load_s": round(info.load_s, 3) if info else None,
            "adapters": self.adapters,
            "n_gpu_layers": info.n_gpu_layers if info else None,
            "n_cpu_moe": info.n_cpu_moe if info else None,
            "kv_type": info.kv_type if info else None,
            "confined": info.confined if info else None,
            "last_error": engine.last_error or self.last_error,
        }

    def expect(self, still_s: Callable[[], float]) -> None:
        """Expect a start in `still_s()` seconds: requests until then wait, as for a model that loads."""
        self._still_s = still_s
        self._engine.expect()

    async def start(self) -> None:
        """Load the model in the background."""
        self._still_s = _at_once
        self._engine.start()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()


def _written_at(engine: Engine) -> float:
    """Return when the model's file was written, Unix time; now, where it is not there yet."""
    try:
        return Path(engine.config.model_path).stat().st_mtime
    except OSError:
        return engine.clock.wall()


def _unknown() -> None:
    """Know nothing before the model is loaded."""


def _at_once() -> float:
    return 0.0


def _token(piece: wire.TextPiece) -> Token:
    """Return a piece of an answer; a thought may precede it."""
    if piece.thought:
        return Token("", piece.n_tokens, Delta(thought=piece.text), alone=piece.alone)
    logprobs = chat_logprobs(piece.likelihoods) if piece.likelihoods else None
    return Token(piece.text, piece.n_tokens, None, logprobs, piece.ids, piece.alone)


def _call_token(piece: wire.CallPiece) -> Token:
    """Return a piece of a call; the first one has the call's id and name."""
    call_id = f"call_{secrets.token_hex(12)}" if piece.name else ""
    return Token("", piece.n_tokens, Delta(calls=(CallPart(piece.index, piece.arguments, call_id, piece.name),)))


def _readable(request: GenerationRequest) -> GenerationRequest:
    return replace(request, messages=for_template(request.messages))
