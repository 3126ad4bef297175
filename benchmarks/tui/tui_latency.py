"""Key press to screen in the terminal UI, in a real pseudo-terminal, while an answer streams into a long conversation.

`python benchmarks/tui/tui_latency.py [--messages 200] [--tps 100] [--keys 200]`; the last line is JSON, times in ms.
A key is pressed every 50 ms; its time ends when the terminal has been sent the input line with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import platform
import pty
import random
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from disco_tui.data.store import Store

SIZE = (40, 120)  # rows, columns
START_S, KEY_S, EVERY_S = 30.0, 5.0, 0.05
PARAGRAPHS = (
    "A **list** keeps order, a `set` keeps nothing twice, and this paragraph goes on for some words more.\n\n",
    "```python\nfor word in words:\n    seen.add(word)\n```\n\n",
    "- first of all\n- and then\n- and so on\n\n",
)


def fill(path: Path, messages: int) -> None:
    """One long conversation."""
    with Store(path) as store:
        conversation = store.new()
        for i in range(messages):
            turn = store.add(conversation.id, "assistant" if i % 2 else "user", f"Message {i}. {PARAGRAPHS[i % 3] * 3}")
            store.finish(turn, "stop", None)


@contextlib.asynccontextmanager
async def endless(tps: float) -> AsyncIterator[str]:
    """A daemon that answers for ever, `tps` words a second."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        begun, n, words = time.monotonic(), 0, [w for p in PARAGRAPHS * 2 for w in p.split(" ")]
        with contextlib.suppress(ConnectionError):
            while True:
                chunk = {"choices": [{"delta": {"content": words[n % len(words)] + " "}}], "disco": {"side": "device"}}
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                n += 1
                await asyncio.sleep(max(0.0, begun + n / tps - time.monotonic()))
        return response

    async def state(request: web.Request) -> web.Response:
        return web.json_response({"endpoints": {}, "money": {"caps": {}}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/disco/v1/state", state)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Terminal:
    """The master side of a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self._news = asyncio.Event()
        self._seen = b""
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._seen += os.read(self.master, 65536)
        self._news.set()

    def press(self, keys: str) -> None:
        self._seen = b""
        os.write(self.master, keys.encode())

    async def shows(self, text: str, limit_s: float) -> float:
        """Return the time at which `text` was sent to the terminal."""
        async with asyncio.timeout(limit_s):
            while text.encode() not in self._seen:
                self._news.clear()
                await self._news.wait()
        return time.perf_counter()

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        self.process.terminate()
        await asyncio.to_thread(self.process.wait)
        os.close(self.master)


async def measure(messages: int, tps: float, keys: int) -> list[float]:
    """The times of `keys` key presses, s."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.sqlite"
        fill(path, messages)
        async with endless(tps) as root:
            terminal = Terminal([sys.executable, "-m", "disco_tui", "--url", root, "--store", str(path)])
            try:
                return await press_keys(terminal, messages, keys)
            finally:
                await terminal.close()


async def press_keys(terminal: Terminal, messages: int, keys: int) -> list[float]:
    """Open the conversation, ask something, and type while the answer comes."""
    await terminal.shows("Ask", START_S)
    await asyncio.sleep(1)
    terminal.press("\x06Message")  # Ctrl+F, search
    await asyncio.sleep(1)
    terminal.press("\r")
    await terminal.shows(f"Message {messages - 1}.", START_S)
    terminal.press("go\r")
    await terminal.shows("answering", START_S)
    times, typed = [], ""
    for _ in range(keys):
        await asyncio.sleep(EVERY_S)
        if len(typed) == 40:
            typed = ""
            terminal.press("\x15")  # Ctrl+U empties the line
            await asyncio.sleep(0.2)
        typed += random.choice("abcdefghijklmnopqrstuvwxyz")
        pressed = time.perf_counter()
        terminal.press(typed[-1])
        times.append(await terminal.shows(typed, KEY_S) - pressed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--tps", type=float, default=100.0)
    parser.add_argument("--keys", type=int, default=200)
    args = parser.parse_args()
    times = sorted(1e3 * t for t in asyncio.run(measure(args.messages, args.tps, args.keys)))
    found = {f"p{q}_ms": round(times[min(len(times) - 1, len(times) * q // 100)], 1) for q in (50, 90, 99)}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps(vars(args) | found | {"max_ms": round(times[-1], 1)} | machine))


if __name__ == "__main__":
    main()
