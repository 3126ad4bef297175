"""The device: this machine's own model, in the engine process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from ..engine import wire
from ..engine.inbox import EngineAnswer
from ..engine.supervisor import Engine, EngineState
from ..errors import EndpointError
from ..types import CaughtUp, Continuation, Finish, GenerationRequest, Json, PromptLength, Readiness, Side, Token, Usage
from .base import Append, Hold, Reins

Event = Token | CaughtUp | Finish
LOAD_WAIT_S = 120.0  # a first token later than this is no answer


class Device:
    """`Endpoint` over the supervised engine."""

    side = Side.DEVICE
    continuation = Continuation.EXACT
    can_hold = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model = engine.config.model_path.name.removesuffix(".gguf")
        self.last_error: str | None = None

    def refuses(self, request: GenerationRequest) -> str | None:
        """Text in, text or JSON out: no tools, images or log-probabilities yet."""
        if not request.text_only:
            return "the device takes plain text messages only"
        needs = [need for need in request.needs if need != "response_format"]
        return f"the device does not support {', '.join(needs)}" if needs else None

    def may_serve(self) -> bool:
        """Whether the engine is up, loading or about to be restarted."""
        return self._engine.state in (EngineState.READY, EngineState.LOADING, EngineState.BACKOFF)

    def readiness(self) -> Readiness:
        """How long the model still loads, and the answers the engine is working on."""
        engine = self._engine
        return Readiness(engine.load_wait_s, engine.in_flight, prefill_tps=self.prefill_tps)

    @property
    def ready(self) -> bool:
        """Whether the model is in memory."""
        return self._engine.state is EngineState.READY

    @property
    def prefill_tps(self) -> float | None:
        """Prefill speed measured at load, token/s."""
        return self._engine.info.prefill_tps if self._engine.info else None

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        """Prompt length; None while loading."""
        return await self._engine.count(_readable(request)) if request.text_only else None

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...] | None:
        """Token ids of the prompt and the answer so far, by this model's vocabulary; None while loading."""
        return await self._engine.token_ids(_readable(request)) if request.text_only else None

    async def rendered(self, request: GenerationRequest) -> str | None:
        """Prompt and answer so far as the text that the model reads; None where that cannot be told."""
        return await self._engine.rendered(_readable(request)) if request.text_only else None

    def overlap_of(self, request: GenerationRequest) -> None:
        """Goes right on."""
        del request

    async def generate(
        self, request: GenerationRequest, usage: Usage, reins: Reins | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run the answer on the engine; waits for the rest of a load first."""
        try:
            async with aclosing(self._generate(request, usage, reins or Reins())) as events:
                async for event in events:
                    yield event
        except EndpointError as e:
            if not e.your_fault:
                self.last_error = str(e)
            raise

    async def _generate(self, request: GenerationRequest, usage: Usage, reins: Reins) -> AsyncGenerator[Event, None]:
        await self._engine.ready(LOAD_WAIT_S)
        answer = self._engine.open(_readable(request), hold=reins.held)
        reins.bind(lambda order: _obey(answer, order))
        try:
            while True:
                match await anext(answer):  # ends: the supervisor kills an engine that hangs
                    case wire.Progress() as progress:
                        usage.prompt_tokens, usage.cached_tokens = progress.n_prefilled, progress.n_cached
                        if progress.caught_up and answer.up_to_date:
                            yield CaughtUp()
                    case wire.Piece(text=text, n_tokens=n_tokens, ids=ids):
                        usage.completion_tokens += n_tokens
                        if not answer.outdated:
                            yield Token(text, n_tokens, ids=ids)
                    case wire.Done(reason=reason):
                        yield Finish(reason)
                        return
                    case wire.Failed(reason=reason, message=text, your_fault=your_fault):
                        raise EndpointError(self.side, reason, text, your_fault=your_fault)
        finally:
            await answer.close()
            if answer.done is not None:
                usage.prompt_tokens, usage.cached_tokens = answer.done.n_prompt, answer.done.n_cached
                usage.completion_tokens = answer.done.n_completion
                usage.busy_s = answer.done.busy_s

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
            "n_ctx": info.n_ctx if info else None,
            "n_cells": info.n_cells if info else None,
            "bytes_per_token": info.bytes_per_token if info else None,
            "engine": msgspec.to_builtins(engine.stats) if engine.stats else None,
            "prefill_tps": round(info.prefill_tps, 1) if info else None,
            "load_s": round(info.load_s, 3) if info else None,
            "last_error": engine.last_error or self.last_error,
        }

    async def start(self) -> None:
        """Load the model in the background."""
        self._engine.start()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()


def _obey(answer: EngineAnswer, order: Hold | Append) -> None:
    match order:
        case Hold():
            answer.hold()
        case Append(text=text, ids=ids, go=go):
            answer.append(text, ids, go=go)


def _readable(request: GenerationRequest) -> GenerationRequest:
    return replace(request, messages=tuple(_renamed(request.messages)))


def _renamed(messages: Sequence[Json]) -> list[dict[str, Any]]:
    """What a chat template reads. OpenAI's newer name for the system role is unknown to most."""
    return [{"role": "system" if m["role"] == "developer" else m["role"], "content": m["content"]} for m in messages]
