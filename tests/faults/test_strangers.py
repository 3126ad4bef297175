"""What a server says is a stranger's word: it takes no prompt elsewhere, shows no key, drives no terminal, books no
millions, and never ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from disco_daemon.client import once as client
from disco_daemon.client.stream import Link
from disco_daemon.onboarding.asking import ask_answer, ask_models
from disco_daemon.plain import PIECE, plain
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import BROKEN, HUGE, INSTEAD, ODD, Upstream, without_finish

SHORT = {"server": {"first_token_timeout_s": 0.5, "token_timeout_s": 0.5}}
SECRET = "secret-of-the-test"  # as tests.fixtures.daemon sets it
WORDS = "red green blue yellow black white"
EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b[31m\u202egnp\x9b2J"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Upstream, DaemonProcess]]:
    """One daemon, server first, with a device behind it, for all that a server may say."""
    async with (
        Upstream(tokens=6) as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-server", settings=SHORT) as daemon,
    ):
        await daemon.device_ready()
        yield upstream, daemon


async def asked_under(fault: Any, daemon: DaemonProcess, **options: Any) -> Any:
    if isinstance(fault, AbstractAsyncContextManager):
        async with fault:
            return await ask(daemon, WORDS, **options)
    with fault:
        return await ask(daemon, WORDS, **options)


def holds_key(text: str) -> bool:
    return any(SECRET[i : i + PIECE] in text for i in range(len(SECRET) - PIECE + 1))


# --- faults by name ---------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", INSTEAD)
async def test_in_place_of_an_answer_the_device_answers_and_nothing_strange_is_kept(what: str, both: Any) -> None:
    upstream, daemon = both
    reason, fault = INSTEAD[what]
    heard = await asked_under(fault(upstream), daemon, max_tokens=6)
    assert heard.disco["winner"] == "device"
    assert heard.disco["endpoints"]["server"]["error"] == reason
    told = json.dumps(await daemon.state(), ensure_ascii=False) + json.dumps(await daemon.history())
    for words in (told, daemon.log):
        assert plain(words) == words
        assert not holds_key(words)
    assert "Traceback" not in daemon.log
    # A server that asked to be left alone is asked again, so that the next test means what it says.
    await daemon.controls.post(f"{daemon.root}/disco/v1/reload")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", BROKEN)
async def test_a_server_that_breaks_off_is_carried_on_within_its_time_outs(what: str, both: Any) -> None:
    upstream, daemon = both
    heard = await asyncio.wait_for(asked_under(BROKEN[what](upstream, 2), daemon, max_tokens=12), 15)
    assert heard.pieces[:2] == ["red ", "green "]
    assert heard.disco["handoffs"] == 1
    assert heard.finish_reason in ("stop", "length")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", ODD)
async def test_an_odd_answer_is_an_answer(what: str, both: Any) -> None:
    upstream, daemon = both
    heard = await asked_under(ODD[what](upstream), daemon, max_tokens=None)
    assert heard.text == f"{WORDS} "
    assert heard.finish_reason == "stop"
    assert heard.disco["winner"] == "server"
    assert heard.disco["endpoints"]["server"]["error"] is None


@pytest.mark.asyncio(loop_scope="module")
async def test_text_and_done_is_an_end_but_text_and_a_closed_connection_is_a_cut(both: Any) -> None:
    upstream, daemon = both
    with upstream.rewriting(without_finish), upstream.close_without_done():
        heard = await ask(daemon, WORDS, max_tokens=12)
    assert heard.disco["handoffs"] == 1
    assert heard.disco["endpoints"]["server"]["error"] == "cut"


# --- redirects --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed_and_the_error_names_where_it_leads(status: int, both: Any) -> None:
    upstream, daemon = both
    async with Upstream() as other:
        with upstream.redirect(other.url.replace("//", "//user:pass@") + "/x?token=1#", status):
            heard = await ask(daemon, "My secret question", max_tokens=6)
        assert heard.disco["winner"] == "device"
        assert not other.exchanges
        told = (await daemon.state())["endpoints"]["server"]["last_error"]
        assert f"{status} and points to {other.url}/x:" in told
        assert "user" not in told


async def test_a_local_server_in_the_devices_place_cannot_send_a_private_prompt_away(tmp_path: Path) -> None:
    async with Upstream() as local, Upstream() as other:
        settings = {"device": {"base_url": local.url, "model": "llama3"}}
        async with running(tmp_path, settings=settings, device=None) as daemon:
            with local.redirect(other.url), pytest.raises(openai.APIStatusError, match="points to") as told:
                await daemon.client.chat.completions.create(
                    model="disco",
                    messages=[{"role": "user", "content": "TOP SECRET"}],
                    extra_body={"disco": {"private": True}},
                )
        assert told.value.code == "redirected"
        assert f"points to {other.url}" in told.value.message
        assert "set device.base_url" in told.value.message
        assert local.exchanges
        assert not other.exchanges


# --- keys and words ---------------------------------------------------------------------------------------------------


async def test_words_and_keys_of_a_server_reach_nobody(tmp_path: Path) -> None:
    async with Upstream(tokens=6) as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        with upstream.echoes_key(), pytest.raises(openai.BadRequestError, match=r"\*\*\*") as echoed:
            await ask(daemon, WORDS)
        with upstream.says_error(EVIL, 500), pytest.raises(openai.APIStatusError) as evil:
            await ask(daemon, WORDS)
        with (
            upstream.error_event_after(2, {"message": f"{EVIL} Bearer {SECRET}"}),
            pytest.raises(openai.APIError) as late,
        ):
            await ask(daemon, WORDS)
        state = json.dumps(await daemon.state(), ensure_ascii=False)
        for words in (echoed.value.message, evil.value.message, late.value.message, state, daemon.log):
            assert not holds_key(words)
            assert plain(words) == words


async def test_what_a_client_says_of_whom_to_ask_does_not_travel_on(tmp_path: Path) -> None:
    ours = {
        "api_key": "sk-mine", "api_base": "http://evil", "base_url": "http://evil", "extra_headers": {"X": "1"},
        "api_version": "1", "organization": "o", "timeout": 1, "custom_llm_provider": "x", "API-Base": "http://evil",
        "aws_secret_access_key": "s", "vertex_credentials": "v", "mock_response": "hello", "model_list": [],
    }  # fmt: skip
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        body = {"model": "disco", "messages": [{"role": "user", "content": "x"}], "top_k": 5, "extra_body": {"a": 1}}
        async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | ours) as response:
            assert response.status == 200
        sent = upstream.exchanges[0].body
        assert not set(sent) & ({*ours} | {"extra_body"})
        assert sent["top_k"] == 5


# --- money ------------------------------------------------------------------------------------------------------------


async def test_a_bill_beyond_reason_books_what_can_be_true_and_closes_no_cap(tmp_path: Path) -> None:
    settings = {"caps": {"usd_per_day": 1.0}}
    bill = {"prompt_tokens": HUGE, "completion_tokens": HUGE, "total_tokens": HUGE}
    async with (
        Upstream(tokens=6) as upstream,
        running(tmp_path, server=upstream.url, device=False, settings=settings) as daemon,
    ):
        with upstream.billing(bill):
            for _ in range(3):
                heard = await ask(daemon, WORDS, max_tokens=None)
        used = heard.disco["endpoints"]["server"]
        assert used["prompt_tokens"] < 20_000
        assert used["completion_tokens"] < 10_000
        assert (await daemon.state())["money"]["caps"]["usd_per_day"]["spent"] < 0.1
        assert daemon.log.count("is not taken as it says") == 1


async def test_what_a_server_thought_unseen_is_told_the_client(tmp_path: Path) -> None:
    bill = {
        "prompt_tokens": 11, "completion_tokens": 30, "total_tokens": 41,
        "completion_tokens_details": {"reasoning_tokens": 24},
    }  # fmt: skip
    async with Upstream(tokens=6) as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        with upstream.billing(bill):
            whole = await daemon.client.chat.completions.create(
                model="disco", messages=[{"role": "user", "content": WORDS}]
            )
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == 24


# --- when to come back ------------------------------------------------------------------------------------------------


async def test_a_servers_retry_after_reaches_the_client_whatever_it_looks_like(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:

        async def told(status: int, header: str) -> tuple[int, str | None]:
            with upstream.status(status, headers={"Retry-After": header}):
                body = {"model": "disco", "messages": [{"role": "user", "content": "x"}]}
                async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
                    assert (await response.json())["error"]["message"]
                    return response.status, response.headers.get("Retry-After")

        assert await told(429, "7") == (429, "7")
        assert await told(429, "nan") == (429, None)
        assert await told(429, "1e400") == (429, "86400")
        assert await told(429, "999999999999") == (429, "86400")
        assert await told(429, "-5") == (429, "1")
        assert await told(503, "9") == (503, "9")
        assert await told(529, "9") == (503, "9")
        begun = time.time()
        status, after = await told(503, formatdate(begun + 60, usegmt=True))
        assert status == 503
        assert 58 - (time.time() - begun) <= int(after or 0) <= 60  # the date has whole seconds, and so has the answer


# --- the form of an answer --------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "guided_regex": "[ab]", "guided_grammar": "root ::= x", "grammar": "root ::= x", "structural_tag": {"a": 1},
    "regex": "[a-z]", "ebnf": "root ::= x", "guided_anything": "x", "response_format": {"type": "grammar"},
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FORMS)
async def test_a_constraint_that_the_device_does_not_know_goes_to_the_server_or_is_refused_by_name(
    name: str, both: Any
) -> None:
    upstream, daemon = both
    body = {"messages": [{"role": "user", "content": WORDS}], name: FORMS[name]}
    before = len(upstream.exchanges)
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | {"model": "disco"}) as response:
        assert response.headers["X-Disco-Route"] == "server"
    assert upstream.exchanges[before].body[name] == FORMS[name]
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body | {"model": "disco/device"}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("value", [5, [], {}, "json", {"type": 5}])
async def test_a_response_format_that_is_none_is_never_lost(value: Any, both: Any) -> None:
    _, daemon = both
    body = {"model": "disco/device", "messages": [{"role": "user", "content": "x"}], "response_format": value}
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        param = (await response.json())["error"]["param"]
        assert (response.status, param.partition(".")[0]) == (400, "response_format")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_asks_for_nothing_and_knobs_of_sampling_go_to_the_device_as_before(both: Any) -> None:
    _, daemon = both
    body = {
        "model": "disco/device", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "guided_json": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "min_p": 0.1, "top_k": 5, "tools": [],
        "guided_decoding_backend": "auto",
    }  # fmt: skip
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body) as response:
        assert response.status == 200


# --- without end ------------------------------------------------------------------------------------------------------


async def test_an_error_page_without_end_is_read_to_its_bound(tmp_path: Path) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oops\r\nContent-Type: text/html\r\n\r\n<html>")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                written.append(65536)
        except ConnectionError:
            ended.set()

    written: list[int] = []
    ended = asyncio.Event()
    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    async with listener, running(tmp_path, server=url, device=False) as daemon:
        with pytest.raises(openai.APIStatusError, match="500"):
            await ask(daemon, WORDS)
        await asyncio.wait_for(ended.wait(), 30)
        assert sum(written) < 64 * 2**20


# --- our own clients --------------------------------------------------------------------------------------------------


async def test_no_client_of_ours_follows_a_redirect_with_its_key() -> None:
    heard: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n")).decode())
        writer.close()

    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % there.encode())
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    there = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    listener = await asyncio.start_server(moved, "127.0.0.1", 0)
    root = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with other, listener:
        with pytest.raises(client.DaemonError):
            await asyncio.to_thread(client.get, root, "/disco/v1/state", SECRET)
        with pytest.raises(client.DaemonError):
            await asyncio.to_thread(client.change, root, {"policy.private": False}, SECRET)
        with pytest.raises(client.DaemonError):
            await asyncio.to_thread(client.reload, root, SECRET)
        async with Link(root, SECRET) as link:
            with pytest.raises(client.DaemonError):
                await link.state()
        assert (await asyncio.to_thread(ask_models, root, SECRET)).elsewhere == f"{there}/x"
        assert (await asyncio.to_thread(ask_answer, root, SECRET, "m")).elsewhere == f"{there}/x"
    assert not heard
