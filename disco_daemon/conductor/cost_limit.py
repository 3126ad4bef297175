"""Keeps what servers may bill for one answer below the `max_cost_usd` of its request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ..clock import Clock
from ..endpoints.bill import is_open_ended
from ..errors import EndpointError
from ..money.catalog import Price
from ..money.cost_limit import billed, fit
from ..money.spending import BYTES_PER_TOKEN, CostBound, Spending, n_beside_content
from ..types import GenerationRequest, PromptLength, Side
from .answer_server import Fits, ServerMember
from .endpoint_run import EndpointRun, PromptSize


class CostLimit:
    """The limit of one answer; each start at a server takes the most that it may cost from it. Without one, all may."""

    def __init__(self, request: GenerationRequest, spending: Spending) -> None:
        self._max_usd, self._spending, self._request = request.max_cost_usd, spending, request

    def follow(self, spending: Spending) -> None:
        """Go by the prices of another server from now on; what was taken so far stays taken."""
        self._spending = spending

    def within(self, sides: frozenset[Side], request: GenerationRequest, length: PromptLength) -> frozenset[Side]:
        """Return those of the sides that may begin the answer. Raises EndpointError (429) if none is left."""
        if Side.SERVER not in sides or self._fit(request, length, 0, self._max_usd or 0.0) is not None:
            return sides
        if sides == {Side.SERVER}:
            raise self.reached()
        return sides - {Side.SERVER}

    def admit(
        self, run: EndpointRun, request: GenerationRequest, length: PromptLength, runs: Sequence[EndpointRun]
    ) -> GenerationRequest | None:
        """Return the request of a start at a server with the limit that it needs, None where it does not fit.

        What it may cost is held from then on; `runs` are the starts before it.
        """
        if self._max_usd is None or run.side is not Side.SERVER:
            return request
        bound = self._fit(request, length, run.n_before, self._left_usd(runs))
        if bound is None:
            return None
        run.most_usd, run.limit = billed(self._spending.price, bound), bound.max_tokens
        return replace(request, sampling=replace(request.sampling, max_tokens=bound.max_tokens))

    def allows(
        self,
        request: GenerationRequest,
        length: PromptLength,
        n_before: int,
        runs: Sequence[EndpointRun],
        price: Price | None = None,
    ) -> bool:
        """Whether a server could be started behind `n_before` tokens of the answer, or another one at its `price`."""
        return self._fit(request, length, n_before, self._left_usd(runs), price) is not None

    def fitting(
        self,
        run: EndpointRun,
        request: GenerationRequest,
        prompt: PromptSize,
        runs: Sequence[EndpointRun],
        clock: Clock,
    ) -> Fits:
        """Return what says whether a start at a member, in the place of a run, fits into the rest of limit and caps.

        By its own price: one that is dearer than what is left does not keep a cheaper one from being asked.
        """

        def fits(member: ServerMember) -> bool:
            n_before = run.n_before + run.n_tokens
            if not self.allows(request, prompt.length, n_before, runs, member.spending.price):
                return False
            wanted = CostBound.of(request, prompt.n_tokens, n_before, counted=prompt.counted)
            return member.spending.check(Side.SERVER, wanted, clock.wall()) is None

        return fits

    def admit_again(self, run: EndpointRun, runs: Sequence[EndpointRun]) -> bool:
        """Whether the request of a run may be sent a second time; what that may cost is held, too."""
        if self._max_usd is None:
            return True
        if run.most_usd > self._left_usd(runs):
            return False
        run.hedge_most_usd = run.most_usd
        return True

    def admit_elsewhere(
        self,
        run: EndpointRun,
        request: GenerationRequest,
        length: PromptLength,
        runs: Sequence[EndpointRun],
        price: Price,
    ) -> bool:
        """Whether the request of a run may go to another server as well, at its price; what that may cost is held."""
        if self._max_usd is None:
            return True
        if not price.known:
            return False
        most_usd = billed(price, _bound(request, _most_prompt(request, length), run.limit))
        if most_usd > self._left_usd(runs):
            return False
        run.hedge_most_usd = most_usd
        return True

    def reached(self) -> EndpointError:
        """Return the error where the limit is in the way."""
        request, mend = self._request, "Allow more, or ask for less."
        if is_open_ended(request.extra, request.messages):
            why, mend = "what it looks up, sees or hears has no bound that is known", "Leave that out, or the limit."
        elif self._spending.price.known:
            why = "prompt and max_tokens may cost more"
        else:
            why, mend = (
                "the server's price is not known",
                f"Set {self._spending.price_settings}, or ask without a limit.",
            )
        message = f"disco.max_cost_usd = {self._max_usd:g} does not allow to ask the server: {why}. {mend}"
        return EndpointError(Side.SERVER, "max_cost_reached", message, param="disco.max_cost_usd")

    def _left_usd(self, runs: Sequence[EndpointRun]) -> float:
        held = (run.most_usd + run.hedge_most_usd for run in runs if not run.turned_away or run.hedge_most_usd)
        return (self._max_usd or 0.0) - math.fsum(held)

    def _fit(
        self,
        request: GenerationRequest,
        length: PromptLength,
        n_before: int,
        left_usd: float,
        price: Price | None = None,
    ) -> CostBound | None:
        if self._max_usd is None:
            return CostBound(length.tokens)
        if is_open_ended(request.extra, request.messages):
            return None
        bound = _bound(request, _most_prompt(request, length) + n_before, request.sampling.max_tokens)
        return fit(price or self._spending.price, bound, left_usd)


def _bound(request: GenerationRequest, n_prompt: int, max_tokens: int | None) -> CostBound:
    """Return the bound of a start whose prompt has all that is read in it (`_most_prompt`)."""
    whole = CostBound.of(request, n_prompt, counted=True)
    return replace(whole, max_tokens=max_tokens, beside=(0, whole.beside[1]))


def _most_prompt(request: GenerationRequest, length: PromptLength) -> int:
    """Return the tokens that the prompt has at most, by the device's tokenizer where that has counted it.

    Of what it has not counted, by bytes: a schema or tools are read by a server as well, and so are earlier calls.
    """
    n_bytes = len(msgspec.json.encode(request.extra)) if request.extra else 0
    if not length.counted:
        n_bytes += len(msgspec.json.encode(request.messages)) + len(request.answer_so_far.encode())
    by_bytes = math.ceil(n_bytes / BYTES_PER_TOKEN)
    if not length.counted:
        return max(length.tokens, by_bytes)
    return length.tokens + by_bytes + sum(map(n_beside_content, request.messages))
