"""Memory of the terminal UI while one conversation grows to 10,000 messages.

`python benchmarks/tui/tui_memory.py [--messages 10000] [--every 1000]`; the last line is JSON, memory in MiB. The real
application runs without a terminal behind it, in a process of its own, which is all that is measured: questions are put
into its input and sent by key, the answers come in pieces from a loopback server, and all of it is kept in a file. The
screen is painted after every tenth answer.
`ratio` is its resident memory at the end over that at the first mark (1,000 messages).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
from aiohttp import web
from textual.pilot import Pilot

from disco_daemon.client.stream import Link
from disco_daemon.system.program import end_with_stdin
from disco_tui.app import DiscoApp
from disco_tui.data.store import Store
from disco_tui.widgets.prompt import Prompt

SIZE = (120, 40)  # columns, rows
PIECES = 12  # of an answer
ANSWER = (
    "A **list** keeps order, a `set` keeps nothing twice, and this paragraph goes on for some words more.\n\n"
    "```python\nfor word in words:\n    seen.add(word)\n```\n\n- first of all\n- and then\n- and so on\n"
)
QUESTION = "Question {i}: what keeps order, what keeps nothing twice, and why would I want the one or the other here?"
PATIENCE_S = 60.0
PAINT_EVERY = 10  # exchanges between two paintings of the screen: each takes 50 ms, and nobody looks
MAX_BODY = 1 << 30  # a question takes the whole conversation along


@contextlib.asynccontextmanager
async def daemon() -> AsyncIterator[str]:
    """A daemon that gives the same answer at once, each piece with its side."""
    step = -(-len(ANSWER) // PIECES)
    pieces = [ANSWER[i : i + step] for i in range(0, len(ANSWER), step)]
    chunks = [
        {"choices": [{"delta": {"content": piece}}], "disco": {"side": "server" if i % 3 else "device"}}
        for i, piece in enumerate(pieces)
    ]
    record = {"request_id": "r", "ttft_s": 0.1, "tokens": {"device": 4, "server": 8}, "qoe": 1.0}
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "disco": record})
    stream = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=stream, headers={"Content-Type": "text/event-stream"})

    async def state(request: web.Request) -> web.Response:
        return web.json_response({"endpoints": {}, "money": {"caps": {}}})

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/disco/v1/state", state)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def grow(root: str, path: Path, messages: int, every: int) -> None:
    """The child: let a conversation grow, and print what it takes."""
    with Store(path) as store:
        app = DiscoApp(Link(root), store, path=path)
        async with app.run_test(size=SIZE) as pilot:
            while not app.ready:
                await pilot.pause(0.01)
            began = time.monotonic()
            for first in range(0, messages // 2, PAINT_EVERY):
                with app.batch_update():
                    for i in range(first, min(first + PAINT_EVERY, messages // 2)):
                        await exchange(app, pilot, i)
                await pilot.pause()
                if (n := 2 * (i + 1)) % every == 0:
                    gc.collect()
                    rss = psutil.Process().memory_info().rss / 2**20
                    print(json.dumps({"messages": n, "rss_mib": round(rss, 1), "s": round(time.monotonic() - began)}))
                    sys.stdout.flush()


async def exchange(app: DiscoApp, pilot: Pilot[None], i: int) -> None:
    """One question, answered."""
    app.chat.query_one(Prompt).put(QUESTION.format(i=i))
    await pilot.press("enter")
    async with asyncio.timeout(PATIENCE_S):
        while len(app.conversations.entries) < 2 * (i + 1) or app.conversations.running is not None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)


async def measure(messages: int, every: int) -> dict[int, float]:
    """Resident memory by messages, MiB."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with daemon() as root:
            argv = [sys.executable, __file__, "--child", root, "--store", str(Path(folder) / "chats.sqlite")]
            argv += ["--messages", str(messages), "--every", str(every)]
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            try:
                async for line in process.stdout:
                    print(line.decode().strip(), flush=True)
                    mark = json.loads(line)
                    found[mark["messages"]] = mark["rss_mib"]
                if await process.wait() != 0:
                    sys.exit("the terminal UI ended too early")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        end_with_stdin()
        asyncio.run(grow(args.child, args.store, args.messages, args.every))
        return
    found = asyncio.run(measure(args.messages, args.every))
    first, last = found[min(found)], found[max(found)]
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"rss_mib": found, "ratio": round(last / first, 3)} | machine))


if __name__ == "__main__":
    main()
