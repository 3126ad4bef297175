"""A terminal that is killed in mid-answer loses no word that its reader has seen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from disco_tui.data.store import Store

# As the chat screen does it: what came is put into the store, then shown. Here a line of stdout is the screen.
TERMINAL = """
import sys
from pathlib import Path
from disco_tui.data.store import Store

store = Store(Path(sys.argv[1]))
conversation = store.new()
store.add(conversation.id, "user", "Count!")
n = 0
while True:
    answer = store.add(conversation.id, "assistant", "")
    for _ in range(700):
        store.append(answer, f"{n} ", "device" if n % 300 < 200 else "server")
        print(n, flush=True)
        n += 1
    store.finish(answer, "stop", {"n": n})
"""
PATIENCE_S = 60.0


async def killed(file: Path, n_seen: int) -> int:
    """Kill a terminal once it has shown `n_seen` words; how many it had shown in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TERMINAL, str(file), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    shown = 0
    async with asyncio.timeout(PATIENCE_S):
        while shown < n_seen:
            assert await process.stdout.readline(), "the terminal ended by itself"
            shown += 1
        os.kill(process.pid, signal.SIGKILL)
        rest = await process.stdout.read()  # what it had shown by then, and nobody had read
        assert await process.wait() == -signal.SIGKILL
    return shown + rest.count(b"\n")


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=len)
async def test_no_word_that_was_shown_is_missing_after_a_kill(seeds: range, tmp_path: Path) -> None:
    file = tmp_path / "conversations.sqlite"
    shown = [await killed(file, random.Random(i).randint(1, 2500)) for i in seeds]
    with Store(file) as store:
        conversations = sorted(store.list(), key=lambda c: c.id)
        assert len(conversations) == len(seeds)
        for conversation, n in zip(conversations, shown, strict=True):
            question, *answers = store.turns(conversation.id)
            words = [int(word) for turn in answers for word in turn.text.split()]
            assert question.text == conversation.title == "Count!"
            assert words == list(range(len(words))), "a word is missing, or doubled"
            assert n <= len(words) <= n + 1, "the last one may have been stored and not shown yet"
            assert [turn.finish for turn in answers[:-1]] == ["stop"] * (len(answers) - 1)
            assert {side for turn in answers for _, side in turn.sides} <= {"device", "server"}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
