"""What becomes of answers while a machine that lends is short of memory: `python -m benchmarks.fleet --pressure`.

A daemon and a `disco machines join` run as users run them, while readers ask for answers again and again. First the
owner allows less memory (`--memory`), then all of it again; then a *hog* takes memory in the control group of the
kernel that the joined machine's processes are in; then more readers come than can be served in time, and go. Each
second is kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import tomlkit

from disco_daemon.bench.child import LOG_TAIL, BenchError, child, child_env, end, start
from disco_daemon.bench.command import Figures, progress, run_measurement
from disco_daemon.models.default import default_model_path
from disco_daemon.system import socketfile
from disco_daemon.system.program import command, verb

from .memory_group import MemoryGroup, NoGroupError, memory_group

N_READERS, CROWD = 8, 24  # answers at a time, and while there are too many
N_TOKENS = 24  # of an answer
N_CELLS = 32_768  # 28 MB a layer of the default model, with its cells: most of a host's memory is what moves
CUTS = [5, 22]
LOOK_S = 1.0
READY_S = 180.0  # for the model, and for the machine to have its layers
ENDS_S = 30.0  # asked of each violation
LESS_GIB = 0.5  # what the owner allows at first, of the 0.7 GiB that the host takes
GROUP_BYTES = 1_100_000_000  # of the control group: the host, its relay, and what lends it take about 0.95 GB
HOG_BYTES, HOG_BYTES_PER_S = 550_000_000, 25_000_000
HOST, NAME = "disco_daemon.engine.hosts.process", "attic"
WORDS = ("river", "lamp", "stone", "garden", "winter", "silver", "music", "door")
KINDS_DOWN = ("lower_batch", "offload")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each part lasts, s: after a violation has ended, for the hog, for the crowd and the calm at most.

    0 leaves out the crowd, or the calm.
    """

    quiet_s: float = 5.0
    hog_s: float = 20.0
    crowd_s: float = 90.0
    calm_s: float = 150.0  # for a reduction to be taken back: a minute after it was made, at the earliest


SMALL = Plan(quiet_s=1.0, hog_s=4.0, crowd_s=0.0, calm_s=0.0)


@dataclass
class Pressure:
    """Home's daemon, the machine that lends, and what was seen of both."""

    root: str
    session: aiohttp.ClientSession
    controls: aiohttp.ClientSession
    folder: Path  # of the machine
    group: MemoryGroup | None
    pid: int = 0  # what lends
    hog_pid: int = 0
    part: str = "before"
    began: float = field(default_factory=time.monotonic)
    seconds: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)
    n_answers: int = 0
    failed: list[str] = field(default_factory=list)
    n_changed: int = 0

    # --- readers ----------------------------------------------------------------------------------------------------

    async def answer(self, number: int) -> str:
        """Ask one question. Raises BenchError if there is no answer."""
        word = WORDS[number % len(WORDS)]
        question = {"role": "user", "content": f"Tell me a story about a {word}, number {number}."}
        body = {"model": "disco", "messages": [question], "temperature": 0, "max_tokens": N_TOKENS}
        try:
            async with self.session.post(f"{self.root}/v1/chat/completions", json=body) as response:
                found = await response.json()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise BenchError(str(e) or type(e).__name__) from e
        if response.status != 200:
            raise BenchError(str(found))
        return str(found["choices"][0]["message"]["content"])

    async def read(self, number: int) -> None:
        """Ask the same question again and again."""
        while True:
            try:
                said = await self.answer(number)
            except BenchError as e:
                self.failed.append(str(e))
                await asyncio.sleep(LOOK_S)
                continue
            self.n_answers += 1
            self.n_changed += said != self.expected[number]

    @asynccontextmanager
    async def readers(self, numbers: Sequence[int]) -> AsyncIterator[None]:
        """Let so many readers ask beside what is done."""
        going = [asyncio.create_task(self.read(number)) for number in numbers]
        try:
            yield
        finally:
            for one in going:
                one.cancel()
            await asyncio.gather(*going, return_exceptions=True)

    # --- what is seen -----------------------------------------------------------------------------------------------

    async def fleet(self, path: str = "fleet") -> dict[str, Any]:
        """Return how the fleet is, by home's own word."""
        async with self.controls.get(f"{self.root}/disco/v1/{path}") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def look(self) -> dict[str, Any]:
        """See how all is now, and keep it."""
        found = await self.fleet()
        hosts = {host["name"]: host for host in found["hosts"]}
        host = hosts.get(NAME, {"excess_bytes": 0, "segments": [], "state": "missing"})
        for step in found["last_steps"]:
            self.steps[tuple(step[name] for name in ("kind", "first", "last", "seconds", "why"))] = step
        now = {
            "at_s": round(time.monotonic() - self.began, 1),
            "part": self.part,
            "host_mb": round(max(map(_rss, self._hosts()), default=0) / 1e6),
            "group_mb": None if self.group is None else round(self.group.used() / 1e6),
            "hog_mb": round(_rss(self.hog_pid) / 1e6),
            "layers": sum(one["last"] - one["first"] for one in host["segments"]),
            "state": host["state"],
            "excess_mb": round(host["excess_bytes"] / 1e6),
            "late": found["slo_violation"],
            "n_answers": self.n_answers,
            "steps": len(self.steps),
        }
        self.seconds.append(now)
        progress(line_of(now))
        return now

    def _hosts(self) -> list[int]:
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            return [one.pid for one in children if HOST in one.cmdline()]
        return []

    async def until(self, true: Callable[[dict[str, Any]], object], seconds: float) -> bool:
        """Look once a second until something is so; return whether it was, within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            is_so = true(await self.look())
            if is_so or time.monotonic() > deadline:
                return bool(is_so)
            await asyncio.sleep(LOOK_S)

    def phase_3(self) -> str:
        """Return the last step that made a reduction, or took one back; "" for none."""
        kinds = [step["kind"] for step in self.steps.values() if step["kind"] in (*KINDS_DOWN, "raise_batch")]
        return kinds[-1] if kinds else ""

    # --- parts ------------------------------------------------------------------------------------------------------

    async def owner_allows_less(self, plan: Plan) -> float | None:
        """Lower `--memory`, and then lift it; return the seconds until the host had no more than that, or None."""
        self.part = "owner"
        await self._allow(LESS_GIB)
        began = time.monotonic()  # from the moment on when the command has said that it is so
        most = LESS_GIB * 2**30 / 1e6
        is_over = await self.until(lambda now: now["host_mb"] <= most and not now["excess_mb"], 2 * ENDS_S)
        took_s = time.monotonic() - began
        await self.until(lambda _: False, plan.quiet_s)
        await self._allow(0.0)
        self.part = "more again"
        await self.until(lambda _: False, plan.quiet_s)
        return round(took_s, 1) if is_over else None

    async def _allow(self, gib: float) -> None:
        env = child_env(self.folder)
        process = await start(verb("machines", "join", "--memory", f"{gib:g}"), env, self.folder / "allow.log")
        await asyncio.wait_for(process.communicate(), READY_S)
        if process.returncode:
            raise BenchError((self.folder / "allow.log").read_text())

    async def hog_takes_memory(self, plan: Plan) -> float | None:
        """Let another program of the group take memory; return how long the host had more than was left, or None."""
        assert self.group is not None
        self.group.limit(max(GROUP_BYTES, self.group.used() + 100_000_000))
        self.part = "hog"
        words = self.group.command(command("benchmarks.fleet.hog", str(HOG_BYTES_PER_S), str(HOG_BYTES)))
        env = child_env(self.folder) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = await start(words, env, self.folder / "hog.log")
        self.hog_pid = process.pid
        n_before = len(self.seconds)
        try:
            await self.until(lambda _: False, HOG_BYTES / HOG_BYTES_PER_S + plan.hog_s)
            is_over = await self.until(lambda now: not now["excess_mb"], ENDS_S)
        finally:
            await end(process)
        self.part, self.hog_pid = "after the hog", 0
        await self.until(lambda _: False, plan.quiet_s)
        over = [now["at_s"] for now in self.seconds[n_before:] if now["excess_mb"]]
        return None if not is_over else round(over[-1] - over[0] + LOOK_S, 1) if over else 0.0


def _rss(pid: int) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss) if pid else 0
    return 0


def line_of(now: dict[str, Any]) -> str:
    """Return one second as a line."""
    group = "" if now["group_mb"] is None else f" group {now['group_mb']} MB, hog {now['hog_mb']} MB,"
    late = "" if now["late"] is None else f", {now['late']:.0%} late"
    over = f", {now['excess_mb']} MB too much" if now["excess_mb"] else ""
    return (
        f"{now['at_s']:6.1f} s {now['part']:13} host {now['host_mb']} MB,{group} {now['layers']} layers "
        f"({now['state']}){over}{late}; {now['n_answers']} answers, {now['steps']} steps"
    )


async def measure(plan: Plan) -> Figures:
    """Run all parts; the one with the control group only where one can be made. Raises BenchError."""
    with ExitStack() as left:
        group, why_not = None, ""
        try:
            group = left.enter_context(memory_group())
        except NoGroupError as e:
            why_not = str(e)
        folder = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="disco-pressure-")))
        async with _home(folder, group) as found:
            owner_s, hog_s = await _parts(found, plan)
            phase_3 = await _until_calm(found, plan.calm_s)
            n_killed = None if group is None else group.oom_kills()
    kept = list(found.seconds)
    return {
        "group": None if group is None else "v2" if group.is_v2 else "v1",
        "skipped": why_not,
        "seconds": kept,
        "steps": list(found.steps.values()),
        "answers": found.n_answers,
        "failed": found.failed,
        "changed": found.n_changed,
        "oom_kills": n_killed,
        "owner_violation_s": owner_s,
        "hog_violation_s": hog_s,
        "host_mb_peak": max(now["host_mb"] for now in kept),
        "phase_3": phase_3,
    }


async def _parts(found: Pressure, plan: Plan) -> tuple[float | None, float | None]:
    numbers, hog_s = range(N_READERS), None
    async with found.readers(numbers):
        await found.until(lambda _: False, plan.quiet_s)
        owner_s = await found.owner_allows_less(plan)
        if found.group is not None:
            hog_s = await found.hog_takes_memory(plan)
    if plan.crowd_s and found.phase_3() not in KINDS_DOWN:
        found.part = "crowd"
        async with found.readers(range(CROWD)):
            await found.until(lambda _: found.phase_3() in KINDS_DOWN, plan.crowd_s)
    return owner_s, hog_s


async def _until_calm(found: Pressure, calm_s: float) -> dict[str, Any]:
    """Wait, without readers, until a reduction is taken back; return whether there was one, and how long that took."""
    if not calm_s:
        return {"reached": None, "undone": None, "undone_after_s": None}
    found.part = "calm"
    is_reached = any(step["kind"] in KINDS_DOWN for step in found.steps.values())
    began = time.monotonic()
    is_undone = is_reached and await found.until(lambda _: found.phase_3() == "raise_batch", calm_s)
    return {
        "reached": is_reached,
        "undone": is_undone if is_reached else None,
        "undone_after_s": round(time.monotonic() - began, 1) if is_undone else None,
    }


@asynccontextmanager
async def _home(folder: Path, group: MemoryGroup | None) -> AsyncIterator[Pressure]:
    """Start home, let the machine join, and wait until it computes; the expected answers are those of home alone."""
    home, attic = folder / "home", folder / NAME
    home.mkdir()
    attic.mkdir()
    settings = {
        "device": {"n_ctx": 512, "n_cells": N_CELLS, "rounding": "exact", "autotune": False},
        "fleet": {"enabled": True, "hosts": 0, "cuts": CUTS, "mode": "auto", "listen": "127.0.0.1", "ray": "off"},
        "peer": {"port": _free_port()},
        "server": {"probe": False},
    }
    (home / "config.toml").write_text(tomlkit.dumps(settings))
    argv = [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(home / "config.toml"), "--policy",
        "all-device", "--threads", "1", "--model", str(default_model_path()), "--history", str(home / "history.sqlite"),
    ]  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=READY_S)
    async with child(argv, home, "home") as url, aiohttp.ClientSession(timeout=timeout) as session:
        root = url.removesuffix("/v1")
        path = socketfile.found(int(root.rpartition(":")[2]))
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as controls:
            found = Pressure(root, session, controls, attic, group)
            found.expected = list(await asyncio.gather(*map(found.answer, range(CROWD))))
            async with controls.post(f"{root}/disco/v1/fleet/new", json={"address": "127.0.0.1"}) as response:
                code = (await response.json())["code"]
            words = verb(
                "machines", "join", code, "--without-ray", "--until-eof", "--cpus", "1", "--yes", "--name", NAME
            )
            words = words if group is None else group.command(words)
            process = await start(words, child_env(attic), attic / "join.log")
            found.pid = process.pid
            try:
                await _until_lent(found, process)
                yield found
            finally:
                await end(process)


async def _until_lent(found: Pressure, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + READY_S
    while not any(one["lent"] for one in (await found.fleet("fleet/members"))["members"]):
        if process.returncode is not None or time.monotonic() > deadline:
            log = (found.folder / "join.log").read_text(errors="replace")[-LOG_TAIL:]
            msg = f"the machine has not joined:\n{log}"
            raise BenchError(msg)
        await found.answer(0)  # home takes a host with an answer
        await asyncio.sleep(LOOK_S / 5)
    found.n_answers, found.began = 0, time.monotonic()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def pressure_lines(figures: Figures) -> list[str]:
    """Return the figures as text."""

    def within(seconds: float | None) -> str:
        return "did not end" if seconds is None else f"ended after {seconds:.0f} s"

    phase = figures["phase_3"]
    undone = (
        f"taken back {phase['undone_after_s']} s after the readers had gone"
        if phase["undone"]
        else {None: "not looked at", False: "was not needed", True: "not taken back"}[phase["reached"]]
    )
    group = (
        f"control group of memory ({figures['group']}) with a hog: the violation {within(figures['hog_violation_s'])} "
        f"(asked: {ENDS_S:g} s), {figures['oom_kills']} out-of-memory kills (asked: 0)"
        if figures["group"]
        else f"no control group with a hog, skipped: {figures['skipped']}"
    )
    lines = [line_of(now) for now in figures["seconds"]]
    for step in figures["steps"]:
        layers = f" layers {step['first']}-{step['last']}" if step["last"] else ""
        lines.append(f"step: {step['kind']}{layers}, {step['why']}; {step['seconds']:.2f} s")
    return [
        *lines,
        f"--memory {LESS_GIB:g}: the violation {within(figures['owner_violation_s'])} (asked: {ENDS_S:g} s)",
        group,
        f"{figures['answers']} answers; {len(figures['failed'])} failed, {figures['changed']} changed (asked: 0)",
        f"the host took {figures['host_mb_peak']} MB at most",
        f"fewer answers at a time (phase 3): {undone}",
    ]


def pressure(plan: Plan) -> Figures | None:
    """Measure; None when it was ended by SIGTERM. Raises BenchError."""
    return run_measurement(measure(plan))


if __name__ == "__main__":  # as the test runs it; no other word is known here
    if sys.argv[1:]:
        sys.exit(__doc__)
    print(json.dumps(pressure(SMALL)))
