"""How servers continue an answer they did not begin: the probe's verdict on each method, at real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.continuations import CHAT_METHODS, METHODS
from disco_daemon.delivery.seam import Seam
from disco_daemon.endpoints.continuation import Profile
from disco_daemon.endpoints.probe import PROMPTS, judge, probe
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.errors import EndpointError
from disco_daemon.types import Continuation, Finish, GenerationRequest, Sampling, Token, Usage
from tests.fixtures.daemon import running
from tests.fixtures.documents import CONTINUING
from tests.fixtures.replay import replayed
from tests.fixtures.servers import Vocabulary, llama_cpp_server, llama_server
from tests.fixtures.upstream import Upstream

# A server that starts over, in the words of its answer or in others: the model decides.
ANEW = "restarts or differs"
# Our own server reads control tokens that are spelled out in a text as text, so its prompt is not quite the same one:
# the model decides whether the answer is.
UNSURE = "exact or differs"
# The matrix: which verdict each method must get.
EXPECTED: Mapping[str, Mapping[str, str]] = {
    "llama-server": dict.fromkeys(METHODS, "exact"),
    "llama_cpp.server": {
        "token_ids": "failed",
        "text": "exact",
        "continue_final_message": ANEW,
        "prefix": ANEW,
        "assistant": ANEW,
    },
    "disco": {
        "token_ids": "exact",
        "text": UNSURE,
        "continue_final_message": "exact",
        "prefix": "exact",
        "assistant": ANEW,
    },
    "openai": {
        "token_ids": "refused",
        "text": "refused",
        "continue_final_message": "refused",
        "prefix": "refused",
        "assistant": "restarts",
    },
    "anthropic": dict.fromkeys(METHODS, "refused"),
    "deepseek": {
        "token_ids": "refused",
        "text": "refused",
        "continue_final_message": "refused",
        "prefix": "exact",
        "assistant": "refused",
    },
    "deepseek-stable": {
        "token_ids": "refused",
        "text": "refused",
        "continue_final_message": "differs",
        "prefix": "refused",
        "assistant": "differs",
    },
    "mistral": {
        "token_ids": "refused",
        "text": "refused",
        "continue_final_message": "refused",
        "prefix": "echoes",
        "assistant": "refused",
    },
    "openrouter": {
        "token_ids": "refused",
        "text": "refused",
        "continue_final_message": "exact",
        "prefix": "exact",
        "assistant": "exact",
    },
}
BEST: Mapping[str, tuple[str, str, Continuation]] = {
    "llama-server": ("token_ids", "continue_final_message", Continuation.EXACT),
    "llama_cpp.server": ("text", "none", Continuation.EXACT),
    "disco": ("token_ids", "continue_final_message", Continuation.EXACT),
    "openai": ("none", "none", Continuation.NONE),
    "anthropic": ("none", "none", Continuation.NONE),
    "deepseek": ("prefix", "prefix", Continuation.EXACT),
    "deepseek-stable": ("none", "none", Continuation.NONE),
    "mistral": ("prefix", "prefix", Continuation.GUARDED),
    "openrouter": ("continue_final_message", "continue_final_message", Continuation.EXACT),
}
vocabulary = Vocabulary()


def matrix(profiles: Mapping[str, Profile]) -> str:
    """The verdicts as a markdown table, one server a line."""
    head = ["server", *METHODS, "used"]
    lines = [head, ["---"] * len(head)]
    for name, profile in profiles.items():
        verdicts = [profile.verdicts[m].result if m in profile.verdicts else "" for m in METHODS]
        lines.append([name, *verdicts, profile.method])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_documented_matrix_is_the_one_checked_here() -> None:
    lines = [f"| {' | '.join([n, *(v[m] for m in METHODS), BEST[n][0]])} |" for n, v in EXPECTED.items()]
    assert "\n".join(lines) in CONTINUING


@asynccontextmanager
async def started(name: str, folder: Path) -> AsyncIterator[Server]:
    """A client of the named server, which runs."""
    async with AsyncExitStack() as stack:
        model = name
        if name == "llama-server":
            url = await stack.enter_async_context(llama_server(folder))
        elif name == "llama_cpp.server":
            url = await stack.enter_async_context(llama_cpp_server(folder))
        elif name == "disco":
            daemon = await stack.enter_async_context(running(folder))
            await daemon.device_ready()
            url, model = daemon.url, "disco/device"
        else:
            _, url = await stack.enter_async_context(replayed(name))
        server = Server(ServerConfig(url, model, "none"), tokens=vocabulary.token_ids, render=vocabulary.render)
        await server.start()
        stack.push_async_callback(server.close)
        yield server


async def said(server: Server, request: GenerationRequest, method: str | None = None) -> tuple[list[Token], str]:
    """All tokens of an answer and its finish reason; asked once more where a kept connection was closed meanwhile."""
    try:
        return await said_once(server, request, method)
    except EndpointError as e:
        if e.reason != "dropped":
            raise
        return await said_once(server, request, method)


async def said_once(server: Server, request: GenerationRequest, method: str | None = None) -> tuple[list[Token], str]:
    tokens, reason = [], ""
    async with aclosing(server.ask(request, Usage(), method)) as events:
        async for event in events:
            if isinstance(event, Finish):
                reason = event.reason
            else:
                tokens.append(event)
    return tokens, reason


def asking(prompt: str, n: int, so_far: str = "") -> GenerationRequest:
    messages = ({"role": "user", "content": prompt},)
    return GenerationRequest("t", messages, Sampling(max_tokens=n, temperature=0.0), answer_so_far=so_far)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
async def test_the_probe_judges_every_method_right(name: str, tmp_path: Path) -> None:
    async with started(name, tmp_path) as server:
        profile = await probe(server, SystemClock(), thorough=True)
        assert profile is not None
        found = {method: verdict.result for method, verdict in profile.verdicts.items()}
        assert found.keys() == EXPECTED[name].keys()
        assert all(found[method] in EXPECTED[name][method] for method in METHODS), profile.verdicts
        assert (profile.method, profile.fallback, profile.trust) == BEST[name]
        assert profile.vocab == (found["token_ids"] == "exact")
        assert Profile.from_json(profile.to_json()) == profile
        assert name in matrix({name: profile})
        server.adopt(profile)
        assert server.continuation is profile.trust
        assert server.status()["continuation"] == profile.method


async def test_a_probe_that_is_not_thorough_finds_the_same_way_for_less(tmp_path: Path) -> None:
    async with started("llama-server", tmp_path) as server:
        quick = await probe(server, SystemClock())
        thorough = await probe(server, SystemClock(), thorough=True)
        assert quick is not None
        assert thorough is not None
        assert (quick.method, quick.fallback, quick.vocab) == (thorough.method, thorough.fallback, thorough.vocab)
        assert quick.tokens < thorough.tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
async def test_llama_server_continues_at_every_word_as_it_would_have_gone_on(method: str, tmp_path: Path) -> None:
    async with started("llama-server", tmp_path) as server:
        whole = [t.text for t in (await said(server, asking(PROMPTS[0], 32)))[0]]
        cuts = [i for i in range(4, len(whole), 5) if whole[i].startswith(" ")]
        assert cuts
        for i in cuts:
            before, rest = "".join(whole[:i]), "".join(whole[i:])
            tokens, _ = await said(server, asking(PROMPTS[0], 32 - i, before), method)
            assert "".join(t.text for t in tokens) == rest, (method, before)


async def test_a_server_that_starts_over_is_not_asked_to_continue_once_it_is_probed(tmp_path: Path) -> None:
    async with started("llama_cpp.server", tmp_path) as server:
        request = asking(PROMPTS[0], 24)
        whole = [t.text for t in (await said(server, request))[0]]
        for i in range(8, 20, 4):
            before, rest = "".join(whole[:i]), "".join(whole[i:])
            for method in CHAT_METHODS:
                again = "".join(t.text for t in (await said(server, replace(request, answer_so_far=before), method))[0])
                assert judge(before, rest, again).result in ("restarts", "differs"), again
        server.adopt(_found(await probe(server, SystemClock())))
        server._render = server._tokens = _loading  # the device cannot say what its method needs
        with pytest.raises(EndpointError) as refused:
            await said(server, replace(request, answer_so_far="".join(whole[:9])))
        assert refused.value.reason == "no_continuation"


async def test_before_it_is_probed_the_seam_detects_the_restart_at_every_cut() -> None:
    async with Upstream(tokens=24) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k", continuation="assistant"))  # which it does not know
        await server.start()
        request = replace(asking(PROMPTS[0], 24), sampling=Sampling())
        whole = [t.text for t in (await said(server, request))[0]]
        for i in range(1, len(whole)):
            before = "".join(whole[:i])
            if len(before) < Seam.MIN_RESTART:
                continue
            seam = Seam(before, guarded=True)
            for token in (await said(server, replace(request, answer_so_far=before)))[0]:
                seam.feed(token)
            joined = seam.join("")
            assert seam.swallowed
            assert joined is not None
            assert before + "".join(t.text for t in joined) == "".join(whole)
        await server.close()


async def test_without_the_device_s_ids_the_best_chat_method_is_used(tmp_path: Path) -> None:
    async with started("llama-server", tmp_path) as server:
        server.adopt(_found(await probe(server, SystemClock())))
        whole = [t.text for t in (await said(server, asking(PROMPTS[0], 20)))[0]]
        before, rest = "".join(whole[:10]), "".join(whole[10:])
        server._tokens = _loading
        tokens, _ = await said(server, asking(PROMPTS[0], 10, before))
        assert "".join(t.text for t in tokens) == rest


def _found(profile: Profile | None) -> Profile:
    assert profile is not None
    return profile


async def _loading(request: GenerationRequest) -> None:
    del request


async def test_our_own_server_tells_the_ids_of_what_it_says(tmp_path: Path) -> None:
    async with started("disco", tmp_path) as server:
        profile = await probe(server, SystemClock())
        assert profile is not None
        assert profile.vocab
        server.adopt(profile)
        request = asking(PROMPTS[1], 24)
        tokens, _ = await said(server, request)
        ids = tuple(i for token in tokens for i in token.ids)
        text = "".join(token.text for token in tokens)
        prompt = await vocabulary.token_ids(request)
        assert await vocabulary.token_ids(replace(request, answer_so_far=text)) == prompt + ids
        assert sum(token.n_tokens for token in tokens) == len(ids) == 24


FAULTS: Mapping[str, Any] = {
    "unauthorized": lambda u: u.status(401),
    "rate limited": lambda u: u.status(429),
    "down for now": lambda u: u.status(503),
    "cut": lambda u: u.cut_after(3),
    "a page of HTML": lambda u: u.html_200(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_cannot_be_asked_gets_no_verdict(fault: str) -> None:
    async with Upstream(tokens=40) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        with FAULTS[fault](upstream):
            assert await probe(server, SystemClock()) is None
        assert server.should_probe
        assert server.n_failures == 0, "the probe's failures are not the answers'"
        found = await probe(server, SystemClock())
        assert found is not None
        assert found.method == "continue_final_message"
        await server.close()


async def test_a_server_that_hangs_on_a_method_is_judged_and_the_probe_ends() -> None:
    async with Upstream(tokens=40) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k", first_token_timeout_s=0.3, token_timeout_s=0.3))
        await server.start()
        probing = asyncio.create_task(probe(server, SystemClock()))
        await upstream.wait_request(0)
        with upstream.hang(times=1):
            await upstream.wait_request(1)
            found = await probing
        assert found is not None
        assert found.verdicts["continue_final_message"].result == "failed"
        await server.close()


async def test_a_cancelled_probe_closes_its_request() -> None:
    async with Upstream(tokens=40) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        with upstream.stall_after(5):
            probing = asyncio.create_task(probe(server, SystemClock()))
            await upstream.wait_request(0)
            probing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probing
            await upstream.wait_closed(0)
        await server.close()


async def test_an_answer_that_is_too_short_is_not_judged() -> None:
    async with Upstream(tokens=3) as upstream:
        server = Server(ServerConfig(upstream.url, "m", "k"))
        await server.start()
        assert await probe(server, SystemClock()) is None
        assert len(upstream.exchanges) == 1
        await server.close()
