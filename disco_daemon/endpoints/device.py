"""The device: this machine's own model, in the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ..engine import wire
from ..engine.supervisor import Engine, EngineState
from ..errors import EndpointError
from ..types import Finish, GenerationRequest, Json, Side, Token, Usage

LOAD_WAIT_S = 120.0  # a first token later than this is no answer
FIRST_TOKEN_TIMEOUT_S = 60.0  # without any prefill progress; long prompts report progress chunk by chunk
TOKEN_TIMEOUT_S = 15.0  # a decode takes well under a second: this is a hang


class Device:
    """`Endpoint` over the supervised engine."""

    side = Side.DEVICE

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model = engine.config.model_path.name.removesuffix(".gguf")
        self.last_error: str | None = None

    def refuses(self, request: GenerationRequest) -> str | None:
        """Text in, text out: no tools, schemas, images or log-probabilities yet."""
        if not request.text_only:
            return "the device takes plain text messages only"
        needs = sorted(key for key, value in request.extra.items() if key in _SERVER_ONLY and value not in _NO_NEED)
        return f"the device does not support {', '.join(needs)}" if needs else None

    def may_serve(self) -> bool:
        """Whether the engine is up, loading or about to be restarted."""
        return self._engine.state in (EngineState.READY, EngineState.LOADING, EngineState.BACKOFF)

    @property
    def ready(self) -> bool:
        """Whether the model is in memory."""
        return self._engine.state is EngineState.READY

    @property
    def prefill_tps(self) -> float | None:
        """Prefill speed measured at load, token/s."""
        return self._engine.info.prefill_tps if self._engine.info else None

    async def count(self, request: GenerationRequest) -> int | None:
        """Prompt length in tokens; None while loading."""
        return await self._engine.count(_renamed(request.messages)) if request.text_only else None

    async def generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        """Run the answer on the engine; waits for the rest of a load first."""
        try:
            async with aclosing(self._generate(request, usage)) as events:
                async for event in events:
                    yield event
        except EndpointError as e:
            if not e.your_fault:
                self.last_error = str(e)
            raise

    async def _generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        await self._engine.ready(LOAD_WAIT_S)
        answer = self._engine.open(replace(request, messages=tuple(_renamed(request.messages))))
        limit_s = FIRST_TOKEN_TIMEOUT_S
        try:
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        message = await anext(answer)
                except TimeoutError:
                    text = f"the device engine gave no token for {limit_s:g} s"
                    raise EndpointError(self.side, "stalled", text) from None
                match message:
                    case wire.Progress(n_past=n_past):
                        usage.prompt_tokens = n_past
                    case wire.Piece(text=text, n_tokens=n_tokens):
                        limit_s = TOKEN_TIMEOUT_S
                        usage.completion_tokens += n_tokens
                        yield Token(text, n_tokens)
                    case wire.Done(reason=reason):
                        yield Finish(reason)
                        return
                    case wire.Failed(reason=reason, message=text, your_fault=your_fault):
                        raise EndpointError(self.side, reason, text, your_fault=your_fault)
        finally:
            await answer.close()
            if answer.done is not None:
                usage.prompt_tokens = answer.done.n_prompt
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


def _renamed(messages: Sequence[Json]) -> list[dict[str, Any]]:
    """OpenAI's newer name for the system role is unknown to most chat templates."""
    return [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in messages]


# Parameters whose meaning would be lost on the device; everything else unknown is a hint that it may ignore.
_SERVER_ONLY = frozenset(
    {
        "tools", "tool_choice", "functions", "function_call", "response_format", "logprobs", "top_logprobs",
        "logit_bias", "modalities", "audio", "web_search_options", "grammar", "guided_json", "guided_regex",
    }
)  # fmt: skip
_NO_NEED: tuple[Any, ...] = (None, False, 0, "none", [], {}, {"type": "text"})
