"""One trial of an agent, and all of them: what runs inside the namespace."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.coding_agents.programs import PROGRAMS, QUIET, Program
from tests.coding_agents.recorder import Recorder, Request
from tests.coding_agents.replay import AT_LEAST, AT_MOST, WITHOUT, ask, cached, first_lines, roomy, turns
from tests.coding_agents.scripted import FILE, RIGHT, SAID, WRONG, Dictating, content
from tests.fixtures.daemon import DaemonProcess, running

PATIENCE_S = 120.0  # for one trial
SHOWING_S = 45.0  # for what an agent shows of a refusal; opencode then tries to shorten its conversation, on and on
TASK = "Mend the typo in the file {path}: read it, change the one wrong word, and then say what you did."
ALIASES = {"api": {"aliases": {"claude-*": "disco"}}}
# The embedded model has these marks, and with such a template it is taken for one that calls tools.
TEMPLATE = Path(__file__).parent.parent / "fixtures/templates/tools/Qwen-Qwen2.5-7B-Instruct.jinja"
SMALL = 2048  # tokens: even aider's first prompt has more
# What agents show of the refusal: its words, or their own for its code.
SHOWN = re.compile("maximum context length|context window|Prompt is too long", re.IGNORECASE)
CLAUDE = "@anthropic-ai/claude-code"


def loopback_up() -> None:
    """Bring up the loopback of a new network namespace, which has nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


async def run(
    program: Program, url: str, folder: Path, text: str, patience_s: float = PATIENCE_S
) -> tuple[int | None, str, Path]:
    """Run an agent in a new home; return its exit status (None: it took too long), what it wrote, and the file."""
    home, work = folder / "home", folder / "work"
    work.mkdir(parents=True)
    for name, text_of_file in program.files(url).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text_of_file)
    home.mkdir(exist_ok=True)
    file = work / FILE
    file.write_text(text)
    env = QUIET | {"HOME": str(home)} | dict(program.env(url))
    log = folder / "output"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *program.command(TASK.format(path=file), str(file)), cwd=work, env=env, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        return None, log.read_text(errors="replace"), file
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started as well
        await process.wait()
    return process.returncode, log.read_text(errors="replace"), file


async def trial(program: Program, server: Dictating, url: str, folder: Path) -> str:
    """Have an agent mend a word; return what went wrong, "" if nothing did."""
    secret = f"secret-{secrets.randbelow(10**9)}"
    server.steps.clear()
    status, out, file = await run(program, url, folder, content(WRONG, secret))
    steps = [step for step in server.steps if step != "text"]
    if status != 0:
        return f"it ended with {status}, after {steps}: {out[-600:]}"
    if steps != ["read", "edit", "end"]:
        return f"its steps were {steps}: {out[-600:]}"
    if file.read_text() != content(RIGHT, secret):
        return f"the file is {file.read_text()!r}: {out[-600:]}"
    return "" if f"{SAID}: {secret}" in out else f"it did not say what it was to: {out[-600:]}"


async def by_server(
    name: str, server: Dictating, daemon: DaemonProcess, runs: int, folder: Path
) -> tuple[dict[str, Any], list[Request]]:
    """Try one agent so many times, the first time with a recorder between it and the daemon; return what it asked."""
    program, passed, failed = PROGRAMS[name], [], {}
    async with Recorder(daemon.root) as recorder:
        for i in range(runs):
            url = daemon.root if i else recorder.url
            if why := await trial(program, server, url, folder / str(i)):
                failed[f"run {i + 1}"] = why
            else:
                passed.append(f"run {i + 1}")
    told = {
        "version": program.version,
        "passed": passed,
        "failed": failed,
        "asked": sorted({f"{r.method} {r.path} {r.status}" for r in recorder.requests}),
        "sends_key": any(r.has_key for r in recorder.requests),
    }
    return told, recorder.requests


async def by_small_device(name: str, daemon: DaemonProcess, folder: Path) -> tuple[str, str]:
    """Ask one agent of a device that its first prompt does not fit; return what it showed, and what is wrong."""
    _, out, _ = await run(PROGRAMS[name], daemon.root, folder, content(WRONG, "secret-0"), SHOWING_S)
    shown = next((line for line in out.splitlines() if SHOWN.search(line)), "")
    return shown[:300], "" if shown else f"it did not show that its prompt does not fit: {out[-600:]}"


async def first_prompt(daemon: DaemonProcess, requests: Sequence[Request]) -> tuple[int | None, str]:
    """Return the tokens of the longest of the first requests, as a device with room counts them, and what is wrong.

    Beside the task agents ask for titles and the like; those prompts are short.
    """
    posted = [r for r in requests if r.body and r.status == 200][:3]
    if not posted:
        return None, "it asked nothing"
    first = max(posted, key=lambda r: len(json.dumps(r.body.get("tools") or r.body)))
    told = await ask(daemon, first.path, first.body)
    if "usage" not in told:
        return None, f"the device refused it: {told}"
    usage = told["usage"]
    return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), ""


async def try_all(names: list[str], runs: int, folder: Path) -> dict[str, Any]:
    """Try these agents: by a server, by a device that has no room for them, and by one that has."""
    clients: dict[str, Any] = {}
    asked: dict[str, list[Request]] = {}

    def note(name: str, case: str, wrong: str) -> None:
        if wrong:
            clients[name]["failed"][case] = wrong
        else:
            clients[name]["passed"].append(case)

    async with Dictating() as server, running(folder / "server", server=server.url, settings=ALIASES) as daemon:
        await daemon.device_ready()
        for name in names:
            clients[name], asked[name] = await by_server(name, server, daemon, runs, folder / name.replace("/", "_"))
            print(f"{name}: {len(clients[name]['failed'])} of {runs} runs failed", file=sys.stderr)
    device = {"chat_template": str(TEMPLATE)}
    small = ALIASES | {"device": device | {"n_ctx": SMALL}}
    async with running(folder / "small", settings=small) as daemon:
        await daemon.device_ready()
        for name in names:
            shown, wrong = await by_small_device(name, daemon, folder / f"{name.replace('/', '_')}-small")
            clients[name]["shown"] = shown
            note(name, "a prompt that does not fit", wrong)
    settings = ALIASES | {"device": device}
    claude = asked.get(CLAUDE)
    async with roomy(folder / "roomy", settings) as daemon:
        for name in names:
            clients[name]["first_prompt_tokens"], wrong = await first_prompt(daemon, asked[name])
            note(name, "a device with room", wrong)
        if claude and len(turns(claude)) == 2:
            clients[CLAUDE]["cached"] = await cached(daemon, claude)
    if claude and len(turns(claude)) == 2:
        async with roomy(folder / "without", settings, WITHOUT) as daemon:
            clients[CLAUDE]["cached_without_rule"] = await cached(daemon, claude)
        clients[CLAUDE]["first_lines"] = first_lines(turns(claude))
        found = clients[CLAUDE]["cached"], clients[CLAUDE]["cached_without_rule"]
        ok = found[0] >= AT_LEAST and found[1] < AT_MOST
        note(CLAUDE, "a second turn from the cache", "" if ok else f"{found} of its prompt, with the rule and without")
    return clients
