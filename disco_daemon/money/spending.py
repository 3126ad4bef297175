"""Spending: the prices of the next request, which side is scarce, and which side may still spend. Pure.

The prices follow the exchange rate that the user sets, the source of the energy (battery, heat: `exchange`), and the
measured energy of a token. The caps are checked before an endpoint is planned with and again when it is started; then
the most it may cost is reserved until its real cost is known (`caps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakSet

import msgspec

from ..errors import EndpointError
from ..types import Attempt, GenerationRequest, Side, finite, n_choices
from ..types.content import text_of
from ..types.infill import n_chars_of
from .caps import PROMPT_MARGIN, CapLimits, CapRefusal, Caps, Reservation, device_bound, server_bound, sooner
from .catalog import Price
from .exchange import DEFAULT_FLOOR, Power, Regime, effective, regime
from .prices import J_PER_WH, Prices

IMAGES = ("image_url", "input_image", "image")
IMAGE_TOKENS = 49_152  # of one image, at most: gpt-4o-mini counts 2,833 and 5,667 for each of up to eight tiles
FILE_TOKENS = 262_144  # of one document: as many as may be booked (`endpoints.bill`)
BYTES_PER_TOKEN = 2  # at least, of text that nobody could count: random letters have 1.4, English 4, Chinese 3

__all__ = ["CapRefusal", "CostBound", "Reservation", "Spending"]

PRICE_SETTINGS = "server.input_usd_per_mtok and server.output_usd_per_mtok"  # of `[server]`


@dataclass(frozen=True, slots=True)
class CostBound:
    """The token counts that bound what a start may cost. `choices` is OpenAI's `n`; `max_tokens` None sets no limit.

    `key` is the name of the key that asks, whose caps it counts in as well. `beside` the prompt's text and the answer
    are at most so many tokens to read (images, files, tools) and to write (a `prediction` that is not what is said).
    """

    prompt_tokens: int
    max_tokens: int | None = None
    choices: int = 1
    key: str = ""
    beside: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        n_prompt: int,
        n_before: int = 0,
        *,
        counted: bool,
        beside: tuple[int, int] | None = None,
    ) -> CostBound:
        """The bound on one start, for a prompt of `n_prompt` tokens and `n_before` of the answer.

        Where nobody has `counted` them, the prompt's bytes are. `beside` is known to whoever asks for each token: an
        agent's tools and calls take 0.1 ms to look through.
        """
        if not counted:
            n_prompt = max(n_prompt, math.ceil(_n_bytes(request) / BYTES_PER_TOKEN / PROMPT_MARGIN))
        max_tokens = request.sampling.max_tokens
        left = None if max_tokens is None else max(1, max_tokens - n_before)
        n_prompt += n_before
        best_of = request.extra.get("best_of")
        choices = max(n_choices(request.extra), best_of if isinstance(best_of, int) else 1)
        return cls(n_prompt, left, choices, request.caller.name, beside or beside_text(request))


def _n_bytes(request: GenerationRequest) -> int:
    texts = (request.answer_so_far, *(text_of(message.get("content")) for message in request.messages))
    return n_chars_of(request.prompt) + sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def n_beside_content(message: Mapping[str, Any]) -> int:
    """Return the tokens of what a message has beside its content, at most: calls of tools, and thoughts.

    By bytes, also where the device has counted the prompt: many a template leaves them out that a server reads.
    """
    others = {name: said for name, said in message.items() if name not in ("role", "content")}
    return math.ceil(len(msgspec.json.encode(others)) / BYTES_PER_TOKEN) if others else 0


def _n_read(part: Mapping[str, Any]) -> int:
    """Return the tokens of a part that is no text, at most; an answer that was refused is words."""
    if (kind := part.get("type")) in IMAGES:
        return IMAGE_TOKENS
    return FILE_TOKENS if kind != "refusal" else math.ceil(len(msgspec.json.encode(part)) / BYTES_PER_TOKEN)


def beside_text(request: GenerationRequest) -> tuple[int, int]:
    """Return the tokens to read and to write that a prompt's text and its answer do not have, at most."""
    read = predicted = 0
    for message in request.messages:
        read += n_beside_content(message)
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") != "text"]
            read += sum(_n_read(part) for part in parts)
    if request.extra:
        if (said := request.extra.get("prediction")) is not None:
            predicted = math.ceil(len(msgspec.json.encode(said)) / BYTES_PER_TOKEN)
        read += math.ceil(len(msgspec.json.encode(request.extra)) / BYTES_PER_TOKEN)
    return read, predicted


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of the device, token/s."""

    prefill_tps: float
    decode_tps: float


class Spending:
    """Owns the prices in force and the caps. `prices` changes between requests only by its methods.

    `watts` is the power that computing is assumed to draw until a token's energy is measured, W. `stops_billing`:
    closing a stream at the server ends its bill. `context` is the device's, in tokens. `limits` are those that the
    prices go by, if they are not yet those of the caps. `price_settings` is where the user says this price, for errors.
    """

    def __init__(
        self,
        price: Price,
        caps: Caps,
        *,
        usd_per_kwh: float,
        watts: float,
        speeds: Speeds,
        context: int,
        stops_billing: bool = False,
        limits: CapLimits | None = None,
        price_settings: str = PRICE_SETTINGS,
    ) -> None:
        self.price, self.price_settings = price, price_settings
        self.caps = caps
        self._floor = (limits or caps.limits).battery_floor
        self.usd_per_kwh = usd_per_kwh
        self.stops_billing = stops_billing
        self.speeds = speeds
        self._context = context
        self._elsewhere: WeakSet[Spending] = WeakSet()
        self._power = Power()
        self._base = Prices(price.input, price.output, watts, usd_per_kwh, price.cached_input)
        self.prices = self._base
        self._reprice()

    def at(self, price: Price, *, stops_billing: bool, price_settings: str = PRICE_SETTINGS) -> Spending:
        """Return the same account at another server's prices: caps, rate and energy are these, now and later."""
        other = Spending(
            price,
            self.caps,
            usd_per_kwh=self.usd_per_kwh,
            watts=self._base.device_watts,
            speeds=self.speeds,
            context=self._context,
            stops_billing=stops_billing,
            price_settings=price_settings,
        )
        other._follow(self)
        self._elsewhere.add(other)
        return other

    # --- changes ------------------------------------------------------------------------------------------------------

    def set_rate(self, usd_per_kwh: float) -> None:
        """Set the user's exchange rate, $/kWh, from the next request on."""
        self.usd_per_kwh = usd_per_kwh
        self._reprice()

    def set_limits(self, limits: CapLimits) -> None:
        """Set the user's caps; amounts spent and reserved stay."""
        self.caps.set_limits(limits)
        self._floor = limits.battery_floor
        self._reprice()

    def update_power(
        self,
        power: Power,
        speeds: Speeds,
        watts: float,
        token_j: tuple[float, float] | None,
        partner_token_j: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Update the power source, the device's speeds and its energy: `token_j` (J) if measured, else `watts`.

        A partner spends `partner_token_j` (J) besides.
        """
        self._power, self.speeds = power, speeds
        self._base = replace(self._base, device_watts=watts, token_j=token_j, partner_token_j=partner_token_j)
        self._reprice()

    def _reprice(self) -> None:
        floor = DEFAULT_FLOOR if self._floor is None else self._floor
        rate = effective(self.usd_per_kwh, self._power, floor)
        self.prices = replace(self._base, usd_per_kwh=rate)
        for other in self._elsewhere:
            other._follow(self)

    def _follow(self, of: Spending) -> None:
        """Take over all that is not the server's price."""
        self.usd_per_kwh, self.speeds, self._floor, self._power = of.usd_per_kwh, of.speeds, of._floor, of._power
        self._base = replace(
            of._base,
            server_input_usd_per_mtok=self.price.input,
            server_output_usd_per_mtok=self.price.output,
            server_cached_usd_per_mtok=self.price.cached_input,
        )
        self.prices = replace(self._base, usd_per_kwh=of.prices.usd_per_kwh)

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def regime(self) -> Regime:
        """The scarcer side at the rate in force, and the rate at which that changes."""
        return regime(self.prices, self.speeds.prefill_tps, self.speeds.decode_tps)

    def check(self, side: Side, bound: CostBound, now: float) -> CapRefusal | None:
        """Return why a side may not start such a request, None if it may; for a plan. `now` is Unix time, s."""
        return self.caps.check(side, self._bound(side, bound), now, self._charge, bound.key)

    def affordable(self, sides: frozenset[Side], bound: CostBound, now: float) -> frozenset[Side]:
        """Return those of the sides that no cap closes. Raises EndpointError (429) if none is left."""
        asked = {side: self.check(side, bound, now) for side in sides}
        refusals = {side: refused for side, refused in asked.items() if refused is not None}
        if refusals and len(refusals) == len(sides):
            raise capped(*refusals.values())
        return sides.difference(refusals)

    def reserve(self, side: Side, bound: CostBound, now: float) -> Reservation | CapRefusal:
        """Admit a start and hold the most it may cost. The reservation has to be settled."""
        return self.caps.reserve(side, self._bound(side, bound), now, self._charge, bound.key)

    def settle(self, reservation: Reservation, attempt: Attempt) -> None:
        """Replace a reservation by the real cost of its attempt."""
        self.caps.settle(reservation, spent_by(attempt))

    def book(self, attempt: Attempt, now: float) -> None:
        """Count an attempt without a reservation; it is booked already, see `Prices.booked`."""
        self.caps.book(attempt.side, spent_by(attempt), now)

    def state(self, now: float) -> dict[str, Any]:
        """Return prices, spending and caps as JSON; `now` is Unix time, s."""
        found, per_token = self.regime, self.prices.per_token(self.speeds.prefill_tps, self.speeds.decode_tps)
        return {
            "usd_per_kwh": self.usd_per_kwh,
            "effective_usd_per_kwh": self.prices.usd_per_kwh,
            "power": asdict(self._power),
            "scarcer": found.scarcer.value,
            "threshold_usd_per_kwh": finite(found.threshold_usd_per_kwh),
            "usd_per_token": per_token,
            "server_price": {
                "input_usd_per_mtok": self.price.input,
                "cached_input_usd_per_mtok": self.price.cached_input,
                "output_usd_per_mtok": self.price.output,
                "known": self.price.known,
                "source": self.price.source,
                "as_of": None if self.price.as_of is None else self.price.as_of.isoformat(),
                "closing_stops_billing": self.stops_billing,
            },
            "spent": asdict(self.caps.spent(now)),
            "caps": self.caps.state(now),
        }

    @property
    def charge(self) -> float | None:
        """The charge of the battery that the device runs on, 0 to 1; None on mains."""
        return self._charge

    def cap_used(self, now: float) -> float:
        """Return the share that is spent of the cap that is nearest to its end; 0 where none is set."""
        caps: dict[str, dict[str, Any]] = self.caps.state(now)
        shares = (cap["spent"] / cap["limit"] if cap["limit"] else 1.0 for cap in caps.values())
        return max(shares, default=0.0)

    @property
    def _charge(self) -> float | None:
        """The charge of the battery that the device runs on, 0 to 1; None on mains."""
        return None if self._power.on_mains else self._power.charge

    def _bound(self, side: Side, bound: CostBound) -> float:
        if side is Side.SERVER:
            return server_bound(
                self.price, bound.prompt_tokens, bound.max_tokens, choices=bound.choices, beside=bound.beside
            )
        joules = self.prices.joules(self.speeds.prefill_tps, self.speeds.decode_tps)
        return device_bound(*joules, bound.prompt_tokens, bound.max_tokens, self._context, choices=bound.choices)


def spent_by(attempt: Attempt) -> float:
    """Return what an attempt counts against the caps of its side: $ at the server, Wh on the device."""
    return attempt.bill_usd if attempt.side is Side.SERVER else attempt.energy_j / J_PER_WH


def capped(*refusals: CapRefusal) -> EndpointError:
    """Return the error for sides that caps close; it may be tried again when the first of them opens."""
    first = sooner(*refusals)
    reasons = "; ".join(refused.reason for refused in refusals)
    keys = dict.fromkeys(refused.key for refused in refusals)  # "" for the caps of the whole
    mend = " ".join(
        f"`disco keys change {key}` on the machine of the daemon changes a limit of this key."
        if key
        else "`disco config set caps.NAME VALUE` changes a limit, null ends it."
        for key in keys
    )
    message = f"{reasons[:1].upper()}{reasons[1:]}. {mend}"
    return EndpointError(first.side, "cap_reached", message, retry_after_s=retry_after_s(first))


def retry_after_s(refusal: CapRefusal) -> int:
    """Return whole seconds for a Retry-After, rounded up so that no client comes back too early."""
    return max(1, math.ceil(refusal.retry_after_s))
