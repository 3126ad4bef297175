"""The device as two machines: this one has the lower layers in its engine, a partner has the rest and draws the tokens.

The engine answers as that of a whole model does, and fails with `partner_gone` while the link is down. So all that is
different here is what cannot be served this way, and what is said about the link.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...config.schema import Config
from ...endpoints.base import Controls, Endpoint
from ...endpoints.choices import Event
from ...endpoints.device import Device
from ...engine import wire
from ...engine.supervisor import Engine, EngineState
from ...errors import ConfigError, EndpointError
from ...types import (
    DeviceHealth,
    Embedding,
    GenerationRequest,
    Given,
    LinkHealth,
    Readiness,
    Refusal,
    Side,
    SplitWish,
    TextTask,
    Usage,
    n_choices,
    tool_use,
    top_logprobs,
)
from ..managed_device import EngineDevice
from .split_rules import SplitRules, resolve, why_not

TRY_AGAIN_S = 1.0  # for which a device without its partner is left alone, if there is a server
NEW = 0.2  # weight of the newest answer in what the partner spends on a token


@dataclass(frozen=True, slots=True)
class PartnerPower:
    """What the partner's machine draws more while it computes, W, and by which source it says so."""

    watts: float
    source: str


@dataclass(slots=True)
class PartnerEnergy:
    """What a partner spends on a prefill and on a decode token, J: a running mean over answers. Pure."""

    prefill_j: float | None = None
    decode_j: float | None = None

    def observe(self, use: wire.SplitUsage, n_completion: int, watts: float) -> None:
        """Learn from one answer."""
        if use.prompt_rows > 0:
            self.prefill_j = _mean(self.prefill_j, watts * use.partner_prompt_s / use.prompt_rows)
        if n_completion > 0 and use.round_trips > 0:
            decode_s = max(0.0, use.partner_s - use.partner_prompt_s)
            self.decode_j = _mean(self.decode_j, watts * decode_s / n_completion)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + NEW * (new - before)


class PartnerLink(Protocol):
    """The way to the partner, as the device needs it."""

    @property
    def is_up(self) -> bool:
        """Whether rows reach the partner now."""
        ...

    @property
    def why_down(self) -> str:
        """Why they do not, in words for the user; empty while they do."""
        ...

    def is_same(self, other: object) -> bool:
        """Whether another link would be this one."""
        ...

    @property
    def n_ctx(self) -> int | None:
        """How many tokens a text may have at the partner, as it last said; None if it never did."""
        ...

    @property
    def power(self) -> PartnerPower | None:
        """What the partner draws while it computes, as it last said; None if it does not know."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the link for `disco status`: `state`, `partner`, `cut`, `codec`, `rtt_ms`, `same_bits`."""
        ...

    async def start(self) -> None:
        """Begin to connect, and go on trying."""
        ...

    async def hold(self, *, private: bool) -> None:
        """Send nothing any more while `private`: when this returns the link is down. It comes back without."""
        ...

    async def close(self) -> None:
        """Disconnect, and wait until all is stopped; idempotent."""
        ...


class SplitDevice(EngineDevice):
    """`Endpoint` over an engine that has the lower layers only, and the `link` to the machine with the others.

    `layers` counts those of the model here and there; with none here, the engine has a small model, which drafts.
    `adapters` are the names of the configured LoRA adapters, which are for a whole model. `whole` is the same model as
    a whole, if this machine has it: private requests, adapters and embeddings are its, and it is loaded when the first
    of them comes. All mutable state: the `rules` for the next request, the server that takes answers over when the
    partner has gone (`fallback`), `whole`, and what the partner was seen to spend.
    """

    def __init__(
        self,
        engine: Engine,
        link: PartnerLink,
        name: str,
        layers: tuple[int, int],
        adapters: tuple[str, ...] = (),
        rules: SplitRules | None = None,
    ) -> None:
        super().__init__(engine, name)
        self._link, self._layers = link, layers
        self._unused = dict.fromkeys(adapters, "the device is split, and an adapter is for a whole model")
        self.rules = rules or SplitRules()
        self.fallback: Endpoint | None = None
        self.whole: Device | None = None
        self._partner_energy = PartnerEnergy()

    @property
    def link(self) -> PartnerLink:
        """The way to the partner."""
        return self._link

    @property
    def n_ctx(self) -> int | None:
        """Tokens that prompt and answer may have: as many as fit on both sides."""
        known = [n for n in (super().n_ctx, self._link.n_ctx) if n is not None]
        return min(known, default=None)

    @property
    def adapters(self) -> dict[str, str]:
        """The configured adapters, and why one cannot be used."""
        return self._unused if self.whole is None else self.whole.adapters

    def _whole_for(self, request: GenerationRequest) -> Device | None:
        """Return the whole model, if it is here and the request is for it."""
        needs_whole = request.private or request.adapter or _whole_field(request)
        whole = self.whole if needs_whole else None
        return None if whole is None or whole.engine.state is EngineState.FAILED else whole

    @property
    def coverage(self) -> float | None:
        """The share of tokens that may leave by this machine's exit at theta 0.8; None without an exit."""
        found = self.engine.config.exit
        return None if found is None else found.coverage

    def partner_token_j(self) -> tuple[float, float]:
        """Return what the partner spends on a prefill and on a decode token, J; 0 as long as that is not known."""
        return self._partner_energy.prefill_j or 0.0, self._partner_energy.decode_j or 0.0

    def check(self, config: Config) -> None:
        """Raise ConfigError if this machine's exit does not allow the mode."""
        rules = rules_of(config)
        if why := why_not(rules.mode, self.coverage, drafts=rules.drafts):
            raise ConfigError(f"split.mode = {rules.mode!r}: {why}")

    def follow(self, config: Config, server: Endpoint | None) -> None:
        """Decide tokens by these settings, and let that server take over, from the next request on."""
        self.rules, self.fallback = rules_of(config), server

    def is_same(self, other: Endpoint) -> bool:
        """Whether the other one has the same layers, link and whole model."""
        return (
            isinstance(other, SplitDevice)
            and super().is_same(other)
            and self._link.is_same(other.link)
            and _is_set_alike(self.whole, other.whole)
        )

    async def hold(self, *, private: bool) -> None:
        """Keep the link down while `private`."""
        await self._link.hold(private=private)

    def refuses(self, request: GenerationRequest) -> str | None:
        """As a whole device, and what cannot be answered in the mode that it asks for, or in private."""
        if (whole := self._whole_for(request)) is not None and request.split.mode != "alone":
            return whole.refuses(request)
        found = resolve(request, self.rules, self.coverage)
        if isinstance(found, Refusal):
            return found
        if request.drawing.mirostat:
            return Refusal("mirostat goes by all that it drew, and here two machines draw: leave it out", "mirostat")
        if field := _whole_field(request):
            return Refusal(f"{field} is for a whole model, and this machine has a part of one: leave it out", field)
        if tool_use(request.extra) is not None:
            return Refusal(
                "calls of tools are for a device that has its whole model, and here two machines draw", "tools"
            )
        return super().refuses(replace(request, split=SplitWish()))

    def prepare(self, request: GenerationRequest) -> GenerationRequest:
        """As a whole device, with the mode that is resolved; a server that may take over goes before the exit alone."""
        found = resolve(request, self.rules, self.coverage)
        if isinstance(found, Refusal):
            raise EndpointError(self.side, "unsupported", str(found), your_fault=True)
        server = self.fallback if Side.SERVER in request.allowed else None
        takes_over = server is not None and server.may_serve() and server.refuses(request) is None
        return super().prepare(
            replace(found, split=replace(found.split, goes_on=found.split.goes_on and not takes_over))
        )

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run the answer on both machines, or on this one alone if it has the whole model and the request is for it."""
        whole = self._whole_for(request) if request.split.mode != "alone" else None
        if whole is None:
            answer = super().generate(request, usage, controls)
        else:
            await _load(whole)
            answer = whole.generate(request, usage, controls)
        async with aclosing(answer) as events:
            async for event in events:
                yield event

    def planned_quality(self, request: GenerationRequest) -> str:
        """Return what an answer is planned to be: whole, confident or alone; the last chunk says what it was."""
        if self._whole_for(request) is not None and request.split.mode != "alone":
            return "whole"
        found = resolve(request, self.rules, self.coverage)
        if isinstance(found, Refusal):
            return "whole"  # by a server, if at all
        wish = found.split
        is_alone = wish.mode == "alone" or (wish.goes_on and not self._link.is_up)
        return "alone" if is_alone else "confident" if wish.mode == "confident" else "whole"

    @property
    def _can_be_alone(self) -> bool:
        """Whether some requests are answered while the partner is gone."""
        rules = self.rules
        if self.whole is not None and self.whole.engine.state is not EngineState.FAILED:
            return True
        return self.coverage is not None and (rules.goes_on or rules.private_alone or rules.mode == "alone")

    def may_serve(self) -> bool:
        """Whether the engine is up, or about to be, and so is the link if it is needed."""
        return super().may_serve() and (self._link.is_up or self._can_be_alone)

    def readiness(self) -> Readiness:
        """As a whole device; down while the partner is, unless it is not needed."""
        found = super().readiness()
        return found if self._link.is_up or self.rules.mode == "alone" else replace(found, down_s=TRY_AGAIN_S)

    async def embed(self, texts: Sequence[Given], task: TextTask, usage: Usage) -> Embedding:
        """Return what the whole model makes of texts, if it is here. Raises EndpointError."""
        if self.whole is not None:
            await _load(self.whole)
            return await self.whole.embed(texts, task, usage)
        message = "the device is split over two machines, and makes no embeddings: ask a machine with the whole model"
        raise EndpointError(self.side, "unsupported", message, your_fault=True)

    def describe_split(self, request: GenerationRequest, done: wire.Done) -> dict[str, Any] | None:
        """Return who made an answer, and the partner's part of it; `partner_usd` follows from the prices in force."""
        use, (n_here, n_there) = done.split, self._layers
        if use is None:
            return None
        link, power = self._link.status(), self._link.power
        if power is not None:
            self._partner_energy.observe(use, done.n_completion, power.watts)
        return {
            "mode": request.split.mode,
            "quality": "alone" if use.n_alone else "confident" if use.n_left else "whole",
            "theta": request.split.theta,
            "alone_from": use.alone_from,
            "codec": link["codec"],
            "same_bits": link["same_bits"],
            "n_rows": use.partner_rows,
            "n_judged": use.partner_rows - use.prompt_rows,
            "round_trips": use.round_trips,
            "drafted": use.drafted,
            "accepted": use.accepted,
            "left": use.n_left,
            "alone": use.n_alone,
            "layer_tokens": {
                "edge": use.edge_rows * n_here,
                "partner": use.partner_rows * n_there,
            },
            "bytes": {"up": use.bytes_up, "down": use.bytes_down},
            "partner_s": use.partner_s,
            "partner_j": None if power is None else power.watts * use.partner_s,
            "partner_j_from": None if power is None else power.source,
            "partner_usd": None,
        }

    def split_status(self) -> dict[str, Any]:
        """Return the link and the mode of the next request, for `disco status`."""
        found = self._link.status()
        power = self._link.power
        return {
            "state": found.pop("state"),
            "partner": found.pop("partner"),
            "mode": self.rules.mode,
            **found,
            "partner_watts": None if power is None else round(power.watts, 2),
            "partner_watts_from": None if power is None else power.source,
        }

    def document(self) -> dict[str, Any]:
        """Return the link, and what a round trip has given so far; None before the first one."""
        use = self.engine.stats.split if self.engine.stats is not None else None
        n = use.round_trips if use is not None else 0
        given = round((use.accepted + n) / n, 2) if use is not None and n else None
        return {"split": self.split_status() | {"tokens_per_round_trip": given}}

    def health(self) -> DeviceHealth:
        """Return how the engine and the link are."""
        status = self._link.status()
        rtt_s = None if status["rtt_ms"] is None else status["rtt_ms"] / 1e3
        return replace(super().health(), split=LinkHealth(status["state"] == "up", rtt_s))

    def status(self) -> dict[str, Any]:
        """Engine state, last failure and the link."""
        found = super().status()
        why = self._link.why_down
        return found | {"split": self.split_status(), "last_error": why or found["last_error"]}

    async def start(self) -> None:
        """Connect, and load the lower layers, both in the background."""
        await self._link.start()
        await super().start()

    async def close(self) -> None:
        """Stop the engine, then the link."""
        await super().close()
        await self._link.close()
        if self.whole is not None:
            await self.whole.close()


def rules_of(config: Config) -> SplitRules:
    """Return who decides a token by the settings."""
    split = config.split
    return SplitRules(split.mode, split.theta, split.alone == "go-on", split.private_alone, drafts=split.cut == 0)


def _is_set_alike(one: Device | None, other: Device | None) -> bool:
    return one is other if one is None or other is None else one.engine.is_set_as(other.engine)


def _whole_field(request: GenerationRequest) -> str:
    """Return the field that only a whole model can honour; empty if there is none."""
    if top_logprobs(request.extra) is not None:
        return "logprobs"
    return "n" if n_choices(request.extra) > 1 else ""


async def _load(whole: Device) -> None:
    """Load the whole model when the first request comes for it; its engine unloads it when none has come for long."""
    if whole.engine.state is EngineState.STOPPED:
        await whole.start()
