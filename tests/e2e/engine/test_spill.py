"""Conversations outlive the engine and the daemon: real model, real files."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from disco_daemon.clock import SystemClock
from disco_daemon.engine import framing, wire
from disco_daemon.engine.serve.next_turn import MOST_TOKENS
from disco_daemon.engine.supervisor import Engine
from disco_daemon.models.default import default_model_path
from disco_daemon.system.process import start
from disco_daemon.types import GenerationRequest, Sampling
from tests.fixtures.daemon import DaemonProcess, running

Messages = list[dict[str, Any]]
QUESTIONS = (
    "Tell me a story about a fox and a lighthouse, and about the people who live on the island around it.",
    "What was the name of the fox? Make one up if you did not say it.",
    "And what did the fox eat?",
)
LATER_S = 1000.0  # nothing becomes idle within a test
PATIENCE_S = 30.0


async def turn(daemon: DaemonProcess, chat: Messages, question: str, **disco: Any) -> tuple[str, int]:
    """Ask, and note question and answer; the answer, and how many tokens of the prompt were there."""
    chat.append({"role": "user", "content": question})
    asked: Any = chat
    answer = await daemon.client.chat.completions.create(
        model="disco/device", messages=asked, temperature=0, max_tokens=24, extra_body={"disco": disco}
    )
    text = answer.choices[0].message.content or ""
    chat.append({"role": "assistant", "content": text})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return text, answer.usage.prompt_tokens_details.cached_tokens or 0


def spilling(after_s: float, gib: float = 0.5) -> dict[str, dict[str, Any]]:
    return {"device": {"spill_gib": gib, "spill_after_s": after_s}}


def engine_of(state: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = state["endpoints"]["device"].get("engine") or {}
    return engine


async def test_a_chat_goes_on_after_the_engine_was_killed_and_after_a_restart(tmp_path: Path) -> None:
    chat: Messages = []
    kv = tmp_path / "disco" / "kv"
    async with running(tmp_path, settings=spilling(after_s=0.0)) as daemon:
        told = [await turn(daemon, chat, QUESTIONS[0])]
        state = await daemon.until(lambda s: engine_of(s).get("disk_texts") == 1)
        assert engine_of(state)["disk_bytes"] > 1000
        pid = state["endpoints"]["device"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await daemon.until(lambda s: s["endpoints"]["device"]["pid"] not in (pid, None))
        await daemon.device_ready()
        told.append(await turn(daemon, chat, QUESTIONS[1]))
    async with running(tmp_path, settings=spilling(after_s=LATER_S)) as daemon:
        await daemon.device_ready()
        told.append(await turn(daemon, chat, QUESTIONS[2]))
        await turn(daemon, [], "My name is Ada, and I keep bees. What may I call them? " * 3, private=True)
    assert stat.S_IMODE(kv.stat().st_mode) == 0o700
    files = list(kv.glob("*.kv"))
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600], "one chat; the other one was private"
    undisturbed: Messages = []
    async with running(tmp_path, settings=spilling(after_s=LATER_S, gib=0.0)) as daemon:
        await daemon.device_ready()
        assert list(kv.glob("*.kv")) == [], "none are wanted any more"
        again = [await turn(daemon, undisturbed, question) for question in QUESTIONS]
    assert [text for text, _ in again] == [text for text, _ in told]
    for (_, n), (_, n_told) in zip(again, told, strict=True):  # the tokens behind an answer may be there, or not
        assert abs(n - n_told) <= MOST_TOKENS
    assert told[0][1] == 0
    assert told[1][1] > 50


@asynccontextmanager
async def loaded(folder: Path, max_bytes: int = 2**30, idle_s: float = LATER_S) -> AsyncIterator[Engine]:
    disk = wire.Disk(folder=str(folder), max_bytes=max_bytes, idle_s=idle_s)
    engine = Engine(wire.Load(model_path=str(default_model_path()), n_ctx=1024, n_threads=1, disk=disk), SystemClock())
    engine.start()
    try:
        await engine.ready(60)
        yield engine
    finally:
        await engine.close()


async def answer(engine: Engine, question: str, max_tokens: int = 8) -> tuple[str, wire.Done]:
    """The text, and what it took."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    opened = engine.open(GenerationRequest("r", ({"role": "user", "content": question},), sampling))
    try:
        text = "".join([m.text async for m in opened if isinstance(m, wire.TextPiece)])
    finally:
        await opened.close()
    assert opened.done is not None
    return text, opened.done


async def until_kept(engine: Engine) -> None:
    """Wait until a text of this engine's is on disk, however busy the machine is."""
    async with asyncio.timeout(PATIENCE_S):
        while engine.stats is None or not engine.stats.disk_texts:
            await asyncio.sleep(0.01)  # the other process has no event to wait for


def kinds_of(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


async def test_a_damaged_file_is_computed_anew(tmp_path: Path) -> None:
    async with loaded(tmp_path, idle_s=0.0) as engine:
        text, done = await answer(engine, QUESTIONS[0])
        await until_kept(engine)
    (file,) = tmp_path.glob("*.kv")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    async with loaded(tmp_path, idle_s=0.0) as engine:
        again, done_again = await answer(engine, QUESTIONS[0])
        await until_kept(engine)
    assert (again, done_again.n_prompt, done_again.n_cached) == (text, done.n_prompt, 0)
    async with loaded(tmp_path) as engine:
        assert (await answer(engine, QUESTIONS[0]))[1].n_prompt == 1, "and is whole again"
    assert kinds_of(tmp_path) == {"", ".kv"}


async def test_the_disk_has_no_more_than_it_may(tmp_path: Path) -> None:
    async with loaded(tmp_path, idle_s=0.0) as engine:
        await answer(engine, QUESTIONS[0])
        await until_kept(engine)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.kv"))
    async with loaded(tmp_path, max_bytes=2 * size) as engine:
        for animal in ("cat", "dog", "cow", "owl", "bee"):
            await answer(engine, f"{animal}: {QUESTIONS[0]}")
    sizes = [file.stat().st_size for file in tmp_path.glob("*.kv")]
    assert size <= sum(sizes) <= 2 * size
    async with loaded(tmp_path, max_bytes=2 * size) as engine:
        assert (await answer(engine, f"bee: {QUESTIONS[0]}"))[1].n_prompt == 1, "the newest is there"
        assert (await answer(engine, f"cow: {QUESTIONS[0]}"))[1].n_prompt > 10


async def test_a_text_is_written_beside_running_answers_and_none_of_them_changes(tmp_path: Path) -> None:
    questions = [f"{animal}: {QUESTIONS[0]}" for animal in ("cat", "dog", "cow", "owl")]
    async with loaded(tmp_path / "off", max_bytes=0) as engine:
        alone = [(await answer(engine, question, 24))[0] for question in questions]
    assert not (tmp_path / "off").exists()
    async with loaded(tmp_path / "on", idle_s=0.0) as engine:
        await answer(engine, questions[0], 24)
        await until_kept(engine)
    async with loaded(tmp_path / "on", idle_s=0.0) as engine:
        together = await asyncio.gather(*(answer(engine, question, 24) for question in questions))
        assert [text for text, _ in together] == alone
        assert together[0][1].n_prompt == 1


def test_an_engine_writes_what_it_has_though_the_daemon_went_with_messages_unread(tmp_path: Path) -> None:
    disk = wire.Disk(folder=str(tmp_path), max_bytes=2**30, idle_s=LATER_S)
    config = wire.Load(model_path=str(default_model_path()), n_ctx=1024, n_threads=1, disk=disk)
    asked = wire.Generate(id="r", messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=900)
    daemon, theirs = socket.socketpair()
    daemon.settimeout(PATIENCE_S)
    with theirs:
        process = start("disco_daemon.engine.worker", sock=theirs)
    with process, daemon:
        daemon.sendall(framing.frame(config))
        stream = daemon.makefile("rb")
        answers = (wire.decode_from_engine(f) for f, _, _ in iter(lambda: framing.FRAMES.read(stream), None))
        assert isinstance(next(answers), wire.Loaded)
        daemon.sendall(framing.frame(asked))
        assert any(isinstance(message, wire.TextPiece) for message in answers)
        assert select.select([daemon], [], [], PATIENCE_S)[0], "more has come, which nobody will read"
        stream.close()
        daemon.close()
        assert process.wait(PATIENCE_S) == 0
    assert len(list(tmp_path.glob("*.kv"))) == 1


async def test_an_engine_that_ends_while_it_answers_writes_what_it_has(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        sampling = Sampling(max_tokens=400, temperature=0)
        request = GenerationRequest("r", ({"role": "user", "content": QUESTIONS[0]},), sampling)
        opened = engine.open(request)
        async for message in opened:
            if isinstance(message, wire.TextPiece):
                break
    async with loaded(tmp_path) as engine:
        assert (await answer(engine, QUESTIONS[0]))[1].n_prompt == 1
