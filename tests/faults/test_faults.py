"""Whatever breaks, the reader gets a whole answer or a clear error, and the daemon stays up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import pytest_asyncio

from tests.fixtures.daemon import Heard, ask, running
from tests.fixtures.upstream import Upstream

STORY = "Tell me a long story about a fox."
Fault = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]

SERVER_FAULTS: dict[str, Callable[[Upstream], Fault]] = {
    "unreachable": lambda u: u.refuse(),
    "unauthorized": lambda u: u.status(401),
    "rate_limited": lambda u: u.status(429, headers={"Retry-After": "7"}),
    "server_error": lambda u: u.status(500),
    "timeout": lambda u: u.hang(),
    "garbage": lambda u: u.garbage_after(0),
    "cut": lambda u: u.cut_after(0),
}
SILENT_FAULTS: dict[str, Callable[[Upstream], Fault]] = {
    "an empty 200": lambda u: u.empty_200(),
    "a web page": lambda u: u.html_200(),
    "a stream without an end": lambda u: u.close_without_finish(0),
    "an error event": lambda u: u.error_event_after(0),
}
HANGS_SOON = "from disco_daemon.engine import hang\nhang.HANG_S = hang.UNMEASURED_S = 5.0"
SHORT = {"server": {"first_token_timeout_s": 0.5, "token_timeout_s": 0.5}}


async def _under(fault: Fault, do: Callable[[], Any]) -> Any:
    if isinstance(fault, AbstractAsyncContextManager):
        async with fault:
            return await do()
    with fault:
        return await do()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One daemon, server first, for all faults before the first token: each must leave it as it was."""
    async with (
        Upstream(tokens=6) as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-server", settings=SHORT) as daemon,
    ):
        await daemon.device_ready()
        yield upstream, daemon


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("reason", SERVER_FAULTS)
async def test_device_answers_when_the_server_cannot_and_status_says_why(reason: str, both: Any) -> None:
    upstream, daemon = both
    heard = await _under(SERVER_FAULTS[reason](upstream), lambda: ask(daemon, "Name three colours.", max_tokens=6))
    assert heard.disco["winner"] == "device"
    assert heard.finish_reason in ("stop", "length")
    assert heard.disco["endpoints"]["server"]["error"] == reason
    why = (await daemon.state())["endpoints"]["server"]["last_error"]
    assert why
    assert "Error" not in why, "an error is told in words of ours, not by a library's class"
    assert f"({reason})" in daemon.log
    assert "Traceback" not in daemon.log


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", SILENT_FAULTS)
async def test_device_answers_when_the_server_sends_what_is_no_answer(what: str, both: Any) -> None:
    upstream, daemon = both
    heard = await _under(SILENT_FAULTS[what](upstream), lambda: ask(daemon, "Name three colours.", max_tokens=6))
    assert heard.disco["winner"] == "device"
    assert heard.disco["endpoints"]["server"]["error"]
    assert "Traceback" not in daemon.log


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fault", ["cut_after", "stall_after", "close_without_finish", "error_event_after"])
async def test_device_carries_on_when_the_server_breaks_off(fault: str, n: int, both: Any) -> None:
    upstream, daemon = both
    prompt = "red green blue yellow black white"
    heard = await _under(getattr(upstream, fault)(n), lambda: ask(daemon, prompt, max_tokens=12))
    assert heard.pieces[:n] == [f"{word} " for word in prompt.split()[:n]]
    assert heard.disco["handoffs"] == 1
    assert heard.disco["tokens"]["server"] == n
    assert heard.disco["tokens"]["device"] > 0
    assert heard.finish_reason in ("stop", "length")
    assert sum(heard.disco["tokens"].values()) <= 12


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("reason", ["network_error", "insufficient_system_resource", "a new word"])
async def test_device_carries_on_when_the_servers_end_is_none(reason: str, both: Any) -> None:
    """And where it may not, each API says that the answer failed: half of it is never given out as whole."""
    upstream, daemon = both
    with upstream.chunks("red ", "green ", reason=reason):
        heard = await ask(daemon, "red green blue yellow", max_tokens=12)
        assert heard.text.startswith("red green ")
        assert (heard.disco["handoffs"], heard.disco["tokens"]["server"]) == (1, 2)
        assert heard.disco["endpoints"]["server"]["error"] == "cut"
        said: dict[str, Any] = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 12}
        bodies = {
            "/v1/chat/completions": said, "/v1/messages": said, "/api/chat": said | {"stream": False},
            "/v1/responses": {"input": "red"},
        }  # fmt: skip
        for path, body in bodies.items():
            url = daemon.url.removesuffix("/v1") + path
            async with daemon.session.post(url, json=body | {"model": "disco/server"}) as response:
                assert response.status == 502, path
                told = await response.text()
            assert reason in told


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("noise", ["with_comments", "split_utf8", "close_without_done"])
async def test_noise_on_the_wire_changes_nothing(noise: str, both: Any) -> None:
    upstream, daemon = both
    prompt = "grün 東京 🦊 naïve"
    heard = await _under(getattr(upstream, noise)(), lambda: ask(daemon, prompt, max_tokens=None))
    assert heard.text == "".join(f"{prompt.split()[i % 4]} " for i in range(6))
    assert heard.disco["winner"] == "server"


def _killer(pid: int, after: int) -> Callable[[Heard], None]:
    def kill(heard: Heard) -> None:
        if len(heard.pieces) == after:
            os.kill(pid, signal.SIGKILL)

    return kill


async def test_server_carries_on_when_the_engine_is_killed_in_mid_answer(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=7) as upstream,
        running(tmp_path, server=upstream.url, policy="all-device") as daemon,
    ):
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        heard = await ask(daemon, STORY, max_tokens=200, on_piece=_killer(pid, 8))
        partial = upstream.exchanges[0].body["messages"][-1]
        assert partial["role"] == "assistant"
        assert partial["content"], "the server was not told what the reader has"
        assert heard.text == partial["content"] + "".join(upstream.exchanges[0].tokens)
        assert heard.disco["handoffs"] == 1
        state = await daemon.device_ready()
        assert state["endpoints"]["device"]["pid"] != pid
        n_made = heard.disco["tokens"]["device"]
        alone = await ask(daemon, STORY, model="disco/device", max_tokens=n_made + 8)
        assert alone.text.startswith(partial["content"]), "a character was lost or doubled before the cut"


async def test_restarted_engine_carries_on_when_the_server_cannot(tmp_path: Path) -> None:
    settings = {"server": {"continuation": "none"}}
    async with (
        Upstream() as upstream,
        running(tmp_path, server=upstream.url, policy="all-device", settings=settings) as daemon,
    ):
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        heard = await ask(daemon, STORY, max_tokens=40, on_piece=_killer(pid, 8))
        whole = await ask(daemon, STORY, model="disco/device", max_tokens=40)
        assert heard.text == whole.text
        assert not upstream.exchanges


async def test_without_a_server_a_killed_engine_is_an_in_band_error_and_the_next_request_works(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        heard = Heard()
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            await ask(daemon, STORY, max_tokens=200, heard=heard, on_piece=_killer(pid, 5))
        assert len(heard.pieces) >= 5
        assert heard.finish_reason is None
        again = await ask(daemon, "Name three colours.")
        assert again.finish_reason in ("stop", "length")
        assert "Traceback" not in daemon.log


async def test_a_hanging_engine_loses_to_the_server(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            heard = await ask(daemon, "Name three colours.")
            assert heard.disco["winner"] == "server"
            assert heard.finish_reason in ("stop", "length")
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_nothing_left_to_serve_is_a_plain_http_error(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        with upstream.status(429, headers={"Retry-After": "7"}), pytest.raises(openai.RateLimitError) as limited:
            await ask(daemon, "Hello!")
        assert limited.value.response.headers["Retry-After"] == "7"
        async with upstream.refuse():
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                await ask(daemon, "Hello!")
        with upstream.cut_after(3), pytest.raises(openai.APIError):
            await ask(daemon, "Hello!", max_tokens=None)
        heard = await ask(daemon, "Hello!", max_tokens=None)
        assert heard.finish_reason == "stop"
        assert "Traceback" not in daemon.log


async def test_a_slow_reader_pauses_the_stream_and_loses_nothing(tmp_path: Path) -> None:
    ends_where_it_ends = {"delivery": {"stop_repetition": False}}  # two words again and again are a loop
    async with (
        Upstream(tokens=3_000) as upstream,
        running(tmp_path, server=upstream.url, device=False, settings=ends_where_it_ends) as daemon,
    ):
        payload = {
            "model": "disco",
            "messages": [{"role": "user", "content": f"{'a' * 9_000} {'b' * 9_000}"}],
            "stream": True,
        }
        async with daemon.session.post(f"{daemon.url}/chat/completions", json=payload) as response:
            await response.content.readline()
            await upstream.wait_request(0)
            counts: list[int] = []
            while len(counts) < 2 or counts[-1] != counts[-2]:
                counts.append(upstream.exchanges[0].chunks)
                await asyncio.sleep(0.1)  # the injected fault: a reader that does not read
            assert counts[-1] < 3_000, "the daemon swallowed a whole answer that nobody read"
            body = await response.read()
        assert body.count(b'"content"') >= 3_000 - 1
        assert body.endswith(b"data: [DONE]\n\n")


async def test_the_answer_is_the_uncut_one_when_a_real_server_with_the_same_model_carries_on(tmp_path: Path) -> None:
    async with (
        running(tmp_path / "server", policy="all-device") as server,
        running(
            tmp_path / "daemon", server=server.url, policy="all-device", settings={"server": {"model": "disco/device"}}
        ) as daemon,
    ):
        await server.device_ready()
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        whole = await ask(server, STORY, max_tokens=40)
        heard = await ask(daemon, STORY, max_tokens=40, on_piece=_killer(pid, 8))
        assert heard.disco["tokens"]["server"] > 0
        assert heard.disco["handoffs"] == 1
        assert heard.text == whole.text
        assert heard.finish_reason == whole.finish_reason


async def test_a_local_openai_server_can_be_the_device(tmp_path: Path) -> None:
    async with Upstream(tokens=3) as ollama, Upstream(tokens=5) as upstream:
        settings = {"device": {"base_url": ollama.url, "model": "llama3"}}
        async with running(tmp_path, server=upstream.url, settings=settings, device=None) as daemon:
            heard = await ask(daemon, "one two three", model="disco/device", max_tokens=None)
            assert heard.text == "one two three "
            assert heard.disco["tokens"] == {"device": 3, "server": 0}
            async with ollama.refuse():
                heard = await ask(daemon, "one two three", max_tokens=None)
            assert heard.disco["winner"] == "server"
            assert ollama.exchanges[0].headers.get("Authorization") != "Bearer secret-of-the-test"


async def test_a_killed_daemon_leaves_no_engine_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        state = await daemon.device_ready()
        engine = psutil.Process(state["endpoints"]["device"]["pid"])
        os.kill(state["pid"], signal.SIGKILL)
        await asyncio.to_thread(engine.wait, 30)
        assert not engine.is_running()


async def test_a_developer_message_is_a_system_message_on_the_device(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        counts = []
        for role in ("system", "developer"):
            messages: Any = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
            whole = await daemon.client.chat.completions.create(model="disco", messages=messages, max_tokens=2)
            assert whole.usage is not None
            counts.append(whole.usage.prompt_tokens)
        assert counts[0] == counts[1]


@pytest.mark.slow
async def test_an_engine_that_hangs_is_killed_and_restarted(tmp_path: Path) -> None:
    """Which silence is too long is for tests/unit/engine/test_hang.py to say."""
    async with running(tmp_path, before=HANGS_SOON) as daemon:
        pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="killed by signal 9: it gave no sign of life"):
            await ask(daemon, "Name three colours.")
        again = await ask(daemon, "Name three colours.")
        assert again.finish_reason in ("stop", "length")
        assert "no sign of life" in daemon.log


ODD_CHUNKS = {
    "logprobs that are a list": b'data: {"choices": [{"delta": {"content": "x"}, "logprobs": [1]}]}\n\n',
    "content that is a list of numbers": b'data: {"choices": [{"delta": {"content": [3]}}]}\n\n',
    "choices that are a number": b'data: {"choices": 3}\n\n',
    "nesting without end": b"data: " + b'{"a":' * 100_000 + b"\n\n",
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", ODD_CHUNKS)
async def test_well_formed_nonsense_from_the_server_is_its_failure_not_ours(what: str, both: Any) -> None:
    upstream, daemon = both
    with upstream.garbage_after(0, ODD_CHUNKS[what]):
        heard = await ask(daemon, "Name three colours.", max_tokens=6)
    assert heard.disco["winner"] == "device"
    assert heard.disco["endpoints"]["server"]["error"] == "garbage"
    assert "Traceback" not in daemon.log
