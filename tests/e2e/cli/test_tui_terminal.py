"""The terminal UI in a real terminal: with a daemon that it starts itself, and killed in mid-answer."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from pathlib import Path

import pytest
import tomlkit

from disco_daemon.bench.child import child_env
from disco_daemon.bench.loopback import bind
from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link
from disco_daemon.config.layers import load
from disco_daemon.models.default import default_model_path
from disco_tui.data.store import Store
from tests.e2e.daemon.test_whatif import remembered
from tests.fixtures.daemon import PRICES
from tests.fixtures.tmux import PATIENCE_S, Pane, Tmux, tmux
from tests.fixtures.tui import Dictated, dictated
from tests.fixtures.upstream import Upstream

QUESTION = "Which lamp shines farthest over the water?"


def env(folder: Path) -> dict[str, str]:
    """A home of its own, and the colours of a usual terminal."""
    told = child_env(folder) | {
        "HOME": str(folder),
        "TERM": "tmux-256color",
        "COLORTERM": "truecolor",
        "LANG": "C.UTF-8",
    }
    told |= {"DISCO_CONFIG": str(folder / "config.toml"), "DISCO_MODELS_DIR": str(default_model_path().parent)}
    return {name: value for name, value in told.items() if name not in os.environ or os.environ[name] != value}


class Home:
    """A user's machine: configuration, history, conversations; the daemon's port is free."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        with bind(0) as free:
            self.port = free.getsockname()[1]
        remembered(folder, 60)
        settings = {
            "api": {"port": self.port},
            # A small model may not find an end: its context is soon full.
            "device": {"n_threads": 1, "autotune": False, "watts": 15.0, "n_ctx": 512},
            # The model that was remembered: of another one, too little would be known as soon as it has answered.
            "server": {"base_url": server, "model": "gpt", "probe": False} | PRICES,
            "history": {"path": str(folder / "history.sqlite")},
        }
        self.config.write_text(tomlkit.dumps(settings))

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def terminal(self, terminals: Tmux) -> Pane:
        """`disco tui` with a daemon that it has started itself, whose model is loaded."""
        program = [
            sys.executable,
            "-P",
            "-m",
            "disco_daemon.cli.main",
            "tui",
            "--store",
            str(self.folder / "chats.sqlite"),
        ]
        pane = await terminals.open(program, env(self.folder))
        await pane.until(lambda words: "! " in words, "a banner: there is no daemon")
        await pane.press("F9")  # where one is being started already, it does nothing
        await pane.until(lambda words: "Ask something" in words and "! " not in words, "a daemon, and no banner")
        return pane

    async def settings(self, link: Link) -> tuple[float, str]:
        """The exchange rate in force, and which side is planned as the scarce one."""
        rate = (await link.settings())["settings"]["device"]["usd_per_kwh"]
        return rate, (await link.plan(400))["learned"]["constrained"]


async def gone(link: Link) -> None:
    """Wait until nobody listens any more."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await link.state()
            except DaemonError:
                return
            await asyncio.sleep(0.05)  # the other process has no event to wait for


async def taken_up(home: Home, link: Link, rate: float, scarcer: str) -> None:
    """Wait until the daemon has that rate and plans by it."""
    async with asyncio.timeout(PATIENCE_S):
        while await home.settings(link) != (rate, scarcer):
            await asyncio.sleep(0.05)  # the other process has no event to wait for


@pytest.mark.slow
async def test_from_nothing_to_an_answer_a_knob_and_back_again(tmp_path: Path) -> None:
    async with Upstream() as upstream, tmux(tmp_path / "t") as terminals:
        home = Home(tmp_path / "home", upstream.url)
        async with Link(home.root) as link:
            pane = await home.terminal(terminals)
            await pane.type(QUESTION)
            await pane.press("Enter")
            await pane.until(lambda words: re.search(r"TTFT \d.* tok", words), "an answer")
            await pane.press("F3")
            await pane.shows("Exchange rate", "is scarce", "What-if on your")
            plans = []
            for key, shows, rate, scarcer in (
                ("Home", "set $0.01", 0.01, "server"), ("End", "set $1,000", 1000.0, "device"),
            ):  # fmt: skip
                await pane.press(key)
                await pane.shows(shows, f"{scarcer} is scarce")
                await taken_up(home, link, rate, scarcer)
                plans.append((await link.plan(400))["plan"])
            assert plans[0] != plans[1], "the next request starts otherwise"
            await pane.press("C-q")
            assert await pane.ended() == 0
            await gone(link)  # the daemon ends with the window that started it
            assert load(home.config, {}).device.usd_per_kwh == 1000.0
            pane = await home.terminal(terminals)
            await pane.press("C-f")
            await pane.type("farthest")
            await pane.press("Enter")
            await pane.until(lambda words: QUESTION in words, "the conversation, where the word stands")
            await pane.press("Escape")
            await pane.press("End")
            await pane.until(lambda words: "TTFT" in words, "how its answer came, however long that is")
            await pane.press("F3")
            await pane.shows("set $1,000", "device is scarce")
            assert (await home.settings(link))[0] == 1000.0
            await pane.press("C-q")
            assert await pane.ended() == 0


@pytest.mark.slow
async def test_a_daemon_started_by_the_window_ends_with_it_when_the_terminal_is_closed(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        home = Home(tmp_path / "home", upstream.url)
        async with Link(home.root) as link:
            async with tmux(tmp_path / "t") as terminals:
                await home.terminal(terminals)
                assert await link.state()
            await gone(link)


class Killed:
    """A terminal before a dictated server, to be killed in mid-answer; `said` is what the server had, by question.

    `seen` is what the screen had shown when its program was killed.
    """

    def __init__(self, daemon: Dictated, terminals: Tmux, path: Path) -> None:
        self.daemon, self.terminals, self.path = daemon, terminals, path
        self.said: dict[str, list[str]] = {}
        self.seen: dict[str, set[str]] = {}

    async def open(self) -> Pane:
        program = [sys.executable, "-P", "-m", "disco_tui", "--url", self.daemon.root, "--store", str(self.path)]
        pane = await self.terminals.open(program, env(self.path.parent))
        await pane.shows("Ask something")
        return pane

    def say(self, question: str, n: int) -> None:
        """So many words more, each of its own, of either side."""
        for _ in range(n):
            i = len(self.said[question])
            self.said[question].append(f"{question}w{i}.")
            self.daemon.say(f"{question}w{i}. ", "device" if i % 5 < 3 else "server")

    async def kill(self, question: str, random: random.Random) -> None:
        """Ask, let some words be read, and kill the terminal while more of them come."""
        pane = await self.open()
        n_left, n_first = self.daemon.left, random.randint(1, 60)
        await pane.press("C-n")  # the conversation before was interrupted, and is open again
        await pane.type(question)
        await pane.press("Enter")
        self.said[question] = []
        self.say(question, n_first)
        await pane.shows(self.said[question][-1])
        self.say(question, 200)
        if random.random() < 0.5:
            await pane.until(lambda words: latest(question, words) > n_first, "words as they come")
        await pane.kill()
        self.seen[question] = set(re.findall(rf"{question}w\d+\.", await pane.screen()))
        async with asyncio.timeout(PATIENCE_S):
            while self.daemon.left == n_left:
                await asyncio.sleep(0.01)  # the server finds that its reader is gone
        self.daemon.forget()


def latest(question: str, words: str) -> int:
    """The number of the last word of an answer on a screen; -1 if there is none."""
    return max(map(int, re.findall(rf"{question}w(\d+)\.", words)), default=-1)


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 20), marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=len
)
async def test_no_word_that_the_screen_has_shown_is_missing_after_a_kill(seeds: range, tmp_path: Path) -> None:
    async with dictated() as daemon, tmux(tmp_path / "t") as terminals:
        killed = Killed(daemon, terminals, tmp_path / "chats.sqlite")
        questions = [f"q{i}" for i in seeds]
        for i, question in zip(seeds, questions, strict=True):
            await killed.kill(question, random.Random(i))
        with Store(killed.path) as store:
            found = {c.title: store.turns(c.id) for c in store.list()}
        assert sorted(found) == sorted(questions)
        for title, (asked, answer) in found.items():
            words = answer.text.split()
            assert (asked.text, answer.role, answer.finish) == (title, "assistant", None)
            assert words == killed.said[title][: len(words)], "a word is missing, or doubled"
            assert killed.seen[title], "the terminal was killed before it had shown anything"
            assert killed.seen[title] <= set(words)
            assert {side for _, side in answer.sides} <= {"device", "server"}
        pane = await killed.open()  # and the next terminal shows it
        await pane.press("C-f")
        await pane.type(questions[-1])
        await pane.until(lambda words: questions[0] not in words.split(), "the search")
        await pane.press("Enter")
        await pane.shows(found[questions[-1]][1].text.split()[-1], "interrupted")
        await pane.press("C-q")
        assert await pane.ended() == 0
