"""A server's breaker on a real wire: what opens it, what its headers say, and that one request at a time tries it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from disco_daemon.endpoints.breaker import MAX_S, STALL_S
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.endpoints.server_errors import MAX_DOWN_S
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Sampling, Token, Usage
from tests.fixtures.clock import StoppedClock
from tests.fixtures.upstream import Upstream

REQUEST = GenerationRequest("r", ({"role": "user", "content": "one two three"},), Sampling(max_tokens=3))
CHUNK = {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
WHOLE = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"


@dataclass
class Stand:
    upstream: Upstream
    server: Server
    clock: StoppedClock

    async def asks(self, request: GenerationRequest = REQUEST) -> str | None:
        """Ask for a whole answer; return the reason of its failure."""
        try:
            async with aclosing(self.server.generate(request, Usage())) as events:
                *_, last = [event async for event in events]
            assert isinstance(last, Finish)
        except EndpointError as e:
            return e.reason
        return None

    @property
    def down_s(self) -> float:
        return self.server.readiness().down_s

    def breaker(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.status()["breaker"]
        return found


@asynccontextmanager
async def standing() -> AsyncIterator[Stand]:
    clock = StoppedClock()
    async with Upstream() as upstream:
        config = ServerConfig(upstream.url, "m", "k", first_token_timeout_s=0.2, token_timeout_s=0.2)
        server = Server(config, clock=clock)
        await server.start()
        try:
            yield Stand(upstream, server, clock)
        finally:
            await server.close()


@pytest.mark.parametrize(
    "what", ["a status", "nobody there", "silence", "a cut in mid-answer", "an error in mid-answer"]
)
async def test_three_failures_in_a_row_open_it_and_one_answer_closes_it(what: str) -> None:
    faults = {
        "a status": lambda u: u.status(500), "nobody there": lambda u: u.refuse(), "silence": lambda u: u.hang(),
        "a cut in mid-answer": lambda u: u.cut_after(2), "an error in mid-answer": lambda u: u.error_event_after(2),
    }  # fmt: skip
    async with standing() as one:
        assert one.breaker() == {"state": "closed", "why": None, "until_s": None}
        fault = faults[what](one.upstream)
        async with fault if what == "nobody there" else as_async(fault):
            reasons = {await one.asks() for _ in range(3)}
            assert None not in reasons
            found = one.breaker()
            assert (found["state"], found["why"] in reasons) == ("open", True)
            assert found["until_s"] == pytest.approx(one.clock.at + one.down_s, abs=0.06)
            assert 0 < one.down_s <= MAX_S
            one.clock.at += one.down_s
            assert (one.breaker()["state"], one.down_s) == ("half_open", 0)
            first = one.server._errors.breaker._until
            assert await one.asks() is not None
            assert one.server._errors.breaker._until > first, "the trial has failed: it is left alone for longer"
        one.clock.at += one.down_s
        assert await one.asks() is None
        assert one.breaker() == {"state": "closed", "why": None, "until_s": None}


@asynccontextmanager
async def as_async(fault: Any) -> AsyncIterator[None]:
    with fault:
        yield


@pytest.mark.parametrize(("status", "why"), [(401, "unauthorized"), (404, "not_found")])
async def test_a_refused_key_and_an_unknown_model_open_it_until_the_settings_change(status: int, why: str) -> None:
    async with standing() as one:
        with one.upstream.status(status):
            assert await one.asks() == why
        one.clock.at += 1e6
        assert one.breaker() == {"state": "open", "why": why, "until_s": None}
        assert (one.down_s, one.server.status()["down_s"]) == (math.inf, None)
        one.server.forget()
        assert (one.breaker()["state"], one.down_s) == ("closed", 0)
        with one.upstream.status(status):
            await one.asks()
        assert await one.asks() is None, "whoever has nobody else asks it all the same"
        assert one.breaker()["state"] == "closed"


async def test_a_path_that_is_not_there_says_nothing_of_the_model() -> None:
    async with standing() as one:
        with one.upstream.status(404):
            assert await one.asks(replace(REQUEST, answer_so_far="one ")) == "not_found"
        assert one.breaker()["state"] == "closed"


NO_PROVIDER = "No allowed providers are available for the selected model."
NO_POLICY = "No endpoints found matching your data policy."


@pytest.mark.parametrize("said", [NO_PROVIDER, NO_POLICY])
@pytest.mark.parametrize("name", ["provider", "models", "route"])
async def test_one_clients_wish_that_nobody_fits_takes_the_server_from_no_other(said: str, name: str) -> None:
    wish = {"provider": {"only": ["x"]}, "models": ["x/y"], "route": "fallback"}[name]
    async with standing() as one:
        with one.upstream.status(404, {"error": {"message": said, "code": 404}}):
            for _ in range(9):
                assert await one.asks(replace(REQUEST, extra={name: wish})) == "refused"
        assert (one.breaker()["state"], one.down_s) == ("closed", 0)
        assert await one.asks() is None


async def test_a_further_model_of_the_client_that_is_unknown_is_the_requests_fault() -> None:
    async with standing() as one:
        with one.upstream.status(404):  # its code says that the model is unknown, and not which
            assert await one.asks(replace(REQUEST, extra={"models": ["x/y"]})) == "refused"
        assert one.breaker()["state"] == "closed"


async def test_an_unknown_model_is_one_whatever_the_client_wishes() -> None:
    async with standing() as one:
        with one.upstream.status(404):
            assert await one.asks(replace(REQUEST, extra={"provider": {"order": ["x"]}})) == "not_found"
        assert (one.breaker()["state"], one.down_s) == ("open", math.inf)


async def test_that_nobody_has_what_a_request_wants_says_nothing_of_the_model_and_a_plain_one_does() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    async with standing() as one:
        with one.upstream.status(404, {"error": {"message": "Not Found"}}):
            assert await one.asks(replace(REQUEST, extra=tools)) is not None
            assert one.down_s < math.inf
            assert await one.asks() == "not_found"
        assert one.down_s == math.inf


async def test_requests_at_fault_and_a_kept_connection_that_was_closed_are_no_failures() -> None:
    async with standing() as one:
        with one.upstream.status(400):
            for _ in range(9):
                assert await one.asks() == "refused"
        assert one.breaker()["state"] == "closed"


async def test_a_rate_limit_opens_it_for_as_long_as_it_says() -> None:
    async with standing() as one:
        with one.upstream.status(429, headers={"Retry-After": "7"}):
            assert await one.asks() == "rate_limited"
        assert one.breaker() == {"state": "open", "why": "rate_limited", "until_s": one.clock.at + 7}
        assert one.down_s == 7
        one.clock.at += 7
        assert await one.asks() is None
        assert one.breaker()["state"] == "closed"


@pytest.mark.parametrize(
    ("headers", "s"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2m59.56s"}, 179.56),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, MAX_DOWN_S),
        ({"anthropic-ratelimit-requests-remaining": "0",
          "anthropic-ratelimit-requests-reset": "1970-01-01T00:17:00Z"}, 20.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1741305600000"}, MAX_DOWN_S),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "11"}, 11.0),
        ({"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "9s"}, 0.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"}, 0.0),
        ({"x-ratelimit-remaining-requests": "0"}, 0.0),
        ({"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0",
          "x-ratelimit-reset-requests": "9s"}, 0.0),
    ],
)  # fmt: skip
async def test_a_good_answer_whose_headers_say_that_nothing_is_left_opens_it_until_the_reset(
    headers: dict[str, str], s: float
) -> None:
    async with standing() as one:
        dated = headers | {"Date": "Thu, 01 Jan 1970 00:16:40 GMT"}
        with one.upstream.status(200, WHOLE, headers=dated):
            assert await one.asks() is None
        assert one.down_s == pytest.approx(s)
        assert one.breaker()["state"] == ("open" if s else "closed")
        one.clock.at += s
        assert one.breaker()["state"] == "closed", "it has not failed, so nothing is to be tried"


async def test_a_trial_that_is_cancelled_is_none_any_more() -> None:
    async with standing() as one:
        with one.upstream.status(500):
            for _ in range(3):
                await one.asks()
        one.clock.at += one.down_s
        with one.upstream.hang():
            trial = asyncio.create_task(one.asks())
            await one.upstream.wait_request(3)
            assert one.down_s > MAX_S / 2, "others go elsewhere while it is tried"
            assert not one.server.readiness().hedgeable
            trial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trial
        assert (one.breaker()["state"], one.down_s) == ("half_open", 0)
        assert await one.asks() is None
        assert one.breaker()["state"] == "closed"


async def test_a_reader_who_leaves_is_no_failure_and_silences_that_are_given_up_are() -> None:
    async with standing() as one:
        for _ in range(9):
            async with aclosing(one.server.generate(REQUEST, Usage())) as events:
                assert isinstance(await anext(events), Token)
        assert one.breaker()["state"] == "closed"
        real = one.server._thoughts.patience

        def waiting(*args: Any) -> Any:  # as if it had been silent for long when it is let go
            patience = real(*args)
            patience._since -= STALL_S
            return patience

        one.server._thoughts.patience = waiting  # type: ignore[assignment]
        with one.upstream.hang():
            for n in range(2):
                answer = asyncio.create_task(one.asks())
                await one.upstream.wait_request(9 + n)
                answer.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await answer
        assert (one.breaker()["state"], one.breaker()["why"]) == ("open", "stalled")
