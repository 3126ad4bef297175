"""The client for conversations against a real daemon; `disco chat`, which uses it, at a real terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from disco_daemon.bench.script import sse
from disco_daemon.client.once import REFUSED_KEY, DaemonError
from disco_daemon.client.stream import AnswerPiece, Link
from disco_daemon.system import socketfile
from disco_daemon.types import Side
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

PATIENCE_S = 60.0


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def server_only(
    folder: Path, *, tokens: int = 8, interval_s: float = 0.0, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[tuple[Upstream, DaemonProcess]]:
    """A daemon without a device, and its server."""
    async with (
        Upstream(tokens=tokens, interval_s=interval_s) as upstream,
        running(folder, server=upstream.url, device=False, settings=settings) as daemon,
    ):
        yield upstream, daemon


async def heard(link: Link, text: str, **options: Any) -> list[AnswerPiece]:
    async with aclosing(link.chat(asking(text), **options)) as pieces:
        return [piece async for piece in pieces]


async def stored(link: Link) -> list[dict[str, Any]]:
    """The history once something is in it: it is written beside the requests."""
    async with asyncio.timeout(PATIENCE_S):
        while not (rows := await link.history(5)):
            await asyncio.sleep(0.01)  # the other process has no event to wait for
    return rows


async def test_an_answer_and_all_documents_of_a_real_daemon(tmp_path: Path) -> None:
    async with server_only(tmp_path, tokens=4) as (_, daemon), Link(daemon.root) as link:
        pieces = await heard(link, "one two")
        assert "".join(piece.text for piece in pieces) == "one two one two "
        assert {piece.side for piece in pieces if piece.text} == {Side.SERVER}
        told = pieces[-1]
        assert told.finish == "stop"
        assert told.disco is not None
        assert told.disco["tokens"] == {"device": 0, "server": 4}
        assert "disco/server" in await link.models()
        assert (await link.state())["endpoints"]["server"]["model"] == "loopback"
        assert [row["request_id"] for row in await stored(link)] == [told.disco["request_id"]]
        assert (await link.plan(100))["plan"]
        assert len(await link.ledger(31)) <= 1
        await link.change({"delivery.pace_tps": 7.5})
        assert (await link.settings())["settings"]["delivery"]["pace_tps"] == 7.5
        with pytest.raises(DaemonError, match="usd_per_kwh"):
            await link.change({"device.usd_per_kwh": -1})
        with pytest.raises(DaemonError) as raised:
            await heard(link, "x", model="gpt-9")
        assert raised.value.code == "model_not_found"


async def test_closing_the_pieces_stops_the_answer_at_the_server(tmp_path: Path) -> None:
    async with server_only(tmp_path, tokens=500, interval_s=0.05) as (upstream, daemon), Link(daemon.root) as link:
        async with aclosing(link.chat(asking("one"))) as pieces:
            assert (await anext(pieces)).text
        await upstream.wait_closed(0, PATIENCE_S)
        await daemon.until(lambda state: state["in_flight"] == 0)


async def test_over_tcp_a_wrong_key_is_told_with_the_next_step_and_by_the_socket_none_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Mapping[str, Mapping[str, Any]] = {"api": {"key": "hush"}}
    async with server_only(tmp_path, tokens=2, settings=settings) as (_, daemon):
        async with Link(daemon.root, "guess") as link:
            assert "".join(piece.text for piece in await heard(link, "one two")) == "one two "
        monkeypatch.setattr(socketfile, "found", lambda port: None)  # as from another machine
        for key in ("", "guess"):
            async with Link(daemon.root, key) as link:
                with pytest.raises(DaemonError, match=r"disco config set api\.key") as raised:
                    await link.state()
            assert raised.value.code == REFUSED_KEY
        async with Link(daemon.root, "hush") as link:
            assert "".join(piece.text for piece in await heard(link, "one two")) == "one two "


# --- at a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """`disco chat` on a terminal of its own; `seen` is what stood on it so far."""

    def __init__(self, daemon: DaemonProcess, home: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.seen = ""
        self._argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "chat", "--url", daemon.url, *args]
        dropped = ("DISCO_", "XDG_", "NO_COLOR")  # but for where the daemons of the tests have their sockets
        own = {k: v for k, v in os.environ.items() if k == "XDG_RUNTIME_DIR" or not k.startswith(dropped)}
        self._env = (
            own | {"HOME": str(home), "DISCO_CONFIG": str(home / "config.toml"), "TERM": "dumb"} | dict(env or {})
        )

    async def __aenter__(self) -> Self:
        ours, theirs = pty.openpty()
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, env=self._env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._file = os.fdopen(ours, "r+b", buffering=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self._file.close()

    def type(self, text: str) -> None:
        self._file.write(text.encode())

    async def until(self, text: str) -> None:
        """Read on until `text` has come, or the terminal's end."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.seen:
                data = await asyncio.to_thread(self._read)
                assert data, f"the terminal ended without {text!r}: {self.seen!r}"
                self.seen += data.decode("utf-8", "replace").replace("\r\n", "\n")

    async def interrupt(self) -> None:
        """Ctrl-C at a question, once it waits there: Python keeps one that comes before until there is an answer."""
        process = psutil.Process(self.process.pid)
        async with asyncio.timeout(PATIENCE_S):
            while process.status() != psutil.STATUS_SLEEPING:
                await asyncio.sleep(0.01)  # the other process has no event to wait for
        self.process.send_signal(signal.SIGINT)

    def _read(self) -> bytes:
        try:
            return self._file.read(4096) or b""
        except OSError:  # the other end is closed
            return b""


async def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async with (
        server_only(tmp_path / "d", tokens=500, interval_s=0.05) as (upstream, daemon),
        Terminal(daemon, tmp_path, "--delivery", "off") as terminal,
    ):
        await terminal.until("> ")
        terminal.type("red green\n")
        await terminal.until("red green red")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("(stopped)")
        await upstream.wait_closed(0, PATIENCE_S)
        upstream.tokens = 4
        terminal.type("blue\n")
        await terminal.until("blue blue blue blue")
        assert upstream.exchanges[1].body["messages"] == asking("blue")
        terminal.type("/quit\n")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_S) == 0
        assert "Traceback" not in terminal.seen


@pytest.mark.parametrize(
    ("env", "shown"),
    [({}, "\x1b[2mLet me see.\x1b[0m\n\nFour."), ({"NO_COLOR": "1"}, "(thinks: Let me see.)\n\nFour.")],
)
async def test_thoughts_are_dimmed_and_no_control_character_comes_through(
    tmp_path: Path, env: Mapping[str, str], shown: str
) -> None:
    thoughts = [{"choices": [{"index": 0, "delta": {"reasoning_content": t}}]} for t in ("Let me ", "see.")]
    thinking = b"".join(map(sse, thoughts))
    async with server_only(tmp_path / "d") as (upstream, daemon):
        with upstream.garbage_after(0, thinking), upstream.answering("\x1b]0;ha\x07Four."):
            async with Terminal(daemon, tmp_path, "2+2?", env=env) as terminal:
                await terminal.until(shown.replace("Four.", "]0;haFour."))
                assert await asyncio.wait_for(terminal.process.wait(), PATIENCE_S) == 0
