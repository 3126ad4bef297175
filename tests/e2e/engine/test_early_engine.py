"""An engine's process that begins before the daemon does: it is the first engine, and none is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import tomlkit

from disco_daemon.bench.child import child_env, end, start
from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.early import NICE, EarlyEngine, early_engine
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.models.default import default_model_path
from disco_daemon.system.control_groups import n_processors
from disco_daemon.types import GenerationRequest, Sampling
from tests.fixtures.ports import free_port

PATIENCE_S = 60.0
MARK = "XDG_RUNTIME_DIR"  # an engine is told it, so that its value finds those of one daemon
WORKER = "disco_daemon.engine.worker"


def workers(mark: str) -> list[int]:
    """The engines' processes that are told this value of MARK."""
    found = []
    for process in psutil.process_iter():
        try:
            if WORKER in process.cmdline() and process.environ().get(MARK) == mark:
                found.append(process.pid)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


async def gone(pid: int) -> None:
    """Wait until a process has ended; a child of another process has no event here."""
    async with asyncio.timeout(PATIENCE_S):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def up(folder: Path, config: Mapping[str, object], *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "config.toml"
    path.write_text(tomlkit.dumps(config))
    mark = folder / "run"
    mark.mkdir(mode=0o700)
    argv = [
        sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--json", "--config", str(path), "--history",
        str(folder / "history.sqlite"), *words,
    ]  # fmt: skip
    process = await start(argv, child_env(folder) | {MARK: str(mark)}, folder / "daemon.log")
    try:
        yield process
    finally:
        await end(process)


@pytest.mark.skipif(n_processors() < 2, reason="nothing is started early on a single processor")
@pytest.mark.parametrize("fault", ["no such model", "the port is taken"])
async def test_a_daemon_that_fails_to_start_leaves_no_engine(tmp_path: Path, fault: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if fault == "the port is taken" else free_port()
        model = default_model_path() if fault == "the port is taken" else tmp_path / "missing.gguf"
        config = {"api": {"port": port}, "device": {"autotune": False, "model": str(model), "n_threads": 1}}
        async with up(tmp_path, config) as process:
            seen: set[int] = set()
            ending = asyncio.create_task(process.wait())
            async with asyncio.timeout(PATIENCE_S):
                while not ending.done():
                    seen.update(workers(str(tmp_path / "run")))
                    await asyncio.wait([ending], timeout=0.01)
            assert ending.result() == 1
            assert seen  # else there was nothing to leave behind
            assert workers(str(tmp_path / "run")) == []
    assert "disco: " in (tmp_path / "daemon.log").read_text()


@pytest.mark.skipif(n_processors() < 2, reason="nothing is started early on a single processor")
async def test_a_daemon_has_one_engine_and_it_is_the_early_one(tmp_path: Path) -> None:
    device = {"autotune": False, "model": str(default_model_path()), "n_threads": 1, "n_ctx": 512}
    async with up(tmp_path, {"api": {"port": 0}, "device": device}) as process:
        assert process.stdout is not None
        mark = str(tmp_path / "run")
        async with asyncio.timeout(PATIENCE_S):
            while not (early := workers(mark)):
                await asyncio.sleep(0.005)
            assert not process.stdout.at_eof()
            json.loads(await process.stdout.readline())
        assert workers(mark) == early
        assert psutil.Process(early[0]).nice() == min(19, psutil.Process(process.pid).nice() + NICE)


async def test_a_daemon_without_an_engine_starts_none(tmp_path: Path) -> None:
    config = {"api": {"port": 0}, "server": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "probe": False}}
    async with up(tmp_path, config, "--no-device", "--policy", "all-server") as process:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert json.loads(await process.stdout.readline())["url"]
        assert [child.cmdline() for child in psutil.Process(process.pid).children() if WORKER in child.cmdline()] == []


async def test_an_engine_ends_with_a_daemon_that_is_killed_before_it_serves() -> None:
    code = (
        "import asyncio, os, signal; from disco_daemon.engine.early import EarlyEngine\n"
        "async def main():\n"
        "    early = EarlyEngine(); await early.start()\n"
        "    print(early.take().pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    await gone(int(out))


async def test_a_process_that_nobody_takes_is_ended_and_one_that_is_taken_is_not() -> None:
    async with early_engine(wanted=True) as early:
        assert early._started is not None
        pid = early._started.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    async with early_engine(wanted=True) as early:
        taken = early.take()
        assert taken is not None
        assert early.take() is None
    assert taken.is_alive
    taken.sockets[0].close()  # it ends with its socket
    await asyncio.wait_for(taken.process.wait(), PATIENCE_S)
    async with early_engine(wanted=False) as early:
        assert early.take() is None


async def test_the_first_life_of_an_engine_is_the_early_process_and_the_next_one_is_new() -> None:
    early = EarlyEngine()
    await early.start()
    assert early._started is not None
    pid = early._started.pid
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), SystemClock(), early=early)
    engine.start()
    try:
        await engine.ready(PATIENCE_S)
        assert engine.pid == pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while engine.state is EngineState.READY:
                await asyncio.sleep(0.01)
        await engine.ready(PATIENCE_S)
        assert engine.pid not in (None, pid)
        assert engine.restarts == 1
    finally:
        await engine.close()


# --- what is measured after readiness -----------------------------------------------------------------------------


async def test_an_engine_is_measured_once_it_can_serve_also_where_a_request_comes_first() -> None:
    for asks in (False, True):
        engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), SystemClock())
        engine.start()
        try:
            loaded = await engine.ready(PATIENCE_S)
            if asks:
                messages = ({"role": "user", "content": "Tell me about the sea and its tides."},)
                answer = engine.open(GenerationRequest("r", messages, Sampling(max_tokens=4, temperature=0)))
                async for _ in answer:
                    pass
                assert answer.done is not None
                assert answer.done.reason == "length"
            async with asyncio.timeout(PATIENCE_S):
                while not (engine.info and engine.info.prefill_tps):
                    await asyncio.sleep(0.01)
            assert loaded.n_ctx == engine.info.n_ctx
            assert engine.info.prefill_tps > 1.0
            assert engine.restarts == 0
        finally:
            await engine.close()


def test_a_warm_up_that_is_ended_measures_nothing_and_leaves_no_cells() -> None:
    abort = AbortFlag()
    llama = Llama(wire.Load(model_path=str(default_model_path()), n_ctx=512, n_threads=1), abort, warm=False)
    try:
        guess = llama.latency_prior
        assert llama.prefill_tps == 0.0
        abort.set()
        assert not llama.warm_up()
        assert (llama.prefill_tps, llama.latency_prior) == (0.0, guess)
        abort.clear()
        assert llama.warm_up()
        assert llama.prefill_tps > 1.0
        assert llama.latency_prior != guess
        assert llama.decode([(1, 0, 0, True)]) == 0  # at position 0: nothing was left there
    finally:
        llama.close()
