"""Models are compared by a person, blind if wished, and what is kept of it has no word of the texts."""

from __future__ import annotations

import argparse
import asyncio
import json
import stat
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.cli import models_compare
from disco_daemon.cli.models_compare import ALIKE, add_arguments, keep, kept, tally
from tests.fixtures.tui import DISCO, Dictated, dictated

NAMES = ["disco/device", "disco/server"]


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        yield server


def given(*words: str, as_json: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args([*words])), json=as_json)


async def asked(daemon: Dictated, args: argparse.Namespace, names: list[str], path: Path) -> int:
    """Compare in a thread, whose questions to the daemon run in the loop of the test."""
    loop = asyncio.get_running_loop()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    return await asyncio.to_thread(models_compare.ask, args, names, daemon.root, "", path, run)


async def compared(
    daemon: Dictated, args: argparse.Namespace, path: Path, n_questions: int = 1, first: str = "apples"
) -> int:
    for _ in range(n_questions):
        for text, side in ((first, "device"), ("pears", "server")):
            daemon.say(text)
            daemon.end(disco=DISCO | {"winner": side, "request_id": side})
    return await asked(daemon, args, NAMES, path)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a person types at a terminal."""
    lines: list[str] = []

    def answer(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    return lines


async def test_a_choice_is_kept_by_the_models_that_answered(
    daemon: Dictated, tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    typed += ["5", "what?", "2", "0"]  # of the second question both are alike
    assert await compared(daemon, given("--question", "Fruit?", "--question", "More?"), path, 2) == 0
    out = capsys.readouterr().out
    assert "Fruit?" in out
    assert "1: smollm2-135m" in out
    assert "pears" in out
    assert [choice["better"] for choice in kept(path)] == ["big-one", ALIKE]
    assert "Fruit" not in path.read_text()
    assert "pears" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "big-one rather than smollm2-135m: 1 of 2, 0 the other way, 1 alike" in out
    assert {body["model"] for body in daemon.asked} == set(NAMES)
    assert daemon.outdone == ["device"], "the daemon learns that this answer would not do, and nothing of the others"


async def test_blind_names_come_after_the_choice(
    daemon: Dictated,
    tmp_path: Path,
    typed: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def choose(_: str) -> str:
        seen.append(capsys.readouterr().out)
        return "1"

    monkeypatch.setattr("builtins.input", choose)
    assert await compared(daemon, given("--question", "Fruit?", "--blind"), tmp_path / "kept") == 0
    assert "smollm2" not in seen[0]
    assert "$" not in seen[0]
    assert "1 was" in capsys.readouterr().out
    asked_first = {"disco/device": "smollm2-135m", "disco/server": "big-one"}
    assert kept(tmp_path / "kept")[0]["better"] in asked_first.values()


async def test_without_a_terminal_nobody_is_asked_and_nothing_is_kept(
    daemon: Dictated, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    path = tmp_path / "kept"
    assert await compared(daemon, given("--question", "Fruit?"), path) == 0
    assert "apples" in capsys.readouterr().out
    assert await compared(daemon, given("--question", "Fruit?", as_json=True), path) == 0
    (asked,) = json.loads(capsys.readouterr().out)["asked"]
    assert [answer["text"] for answer in asked["answers"]] == ["apples", "pears"]
    assert not path.exists()


async def test_no_answer_steers_the_terminal(
    daemon: Dictated, tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed += ["q"]
    evil = "a\x1b]0;title\x07b\x1b[2Jc"
    assert await compared(daemon, given("--question", "Fruit?"), tmp_path / "kept", first=evil) == 0
    assert "\x1b]" not in (out := capsys.readouterr().out)
    assert "\x1b[2J" not in out


async def test_enough_is_enough(daemon: Dictated, tmp_path: Path, typed: list[str]) -> None:
    typed += ["q"]
    assert await compared(daemon, given(), tmp_path / "kept") == 0
    assert len(daemon.asked) == 2
    assert kept(tmp_path / "kept") == []


async def test_a_name_that_nobody_has_is_told_with_those_that_exist(
    daemon: Dictated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = given()
    assert await asked(daemon, args, ["disco/device", "gpt-9"], tmp_path / "kept") == 2
    assert "no model gpt-9; there are disco, disco/device, disco/server" in capsys.readouterr().err
    assert daemon.asked == []


@pytest.mark.parametrize("names", [[], ["device"], ["device", "disco/device"]])
def test_two_different_models_are_needed(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert models_compare.compare(given(*names)) == 2
    assert "two different models" in capsys.readouterr().err


def test_pairs_are_counted_whatever_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    for models, better in (
        ("ab", "a"),
        ("ba", "a"),
        ("ab", "b"),
        ("abc", "c"),
        ("ab", ALIKE),
        ("ab", "z"),
        ("aa", "a"),
    ):
        keep(path, list(models), better, 1.0)
    with path.open("a") as file:
        file.write('{"models": 3}\n[]\n{"models": ["a", "b"], "bet')
    keep(path, ["x", "y"], "y", 1.0)

    def rows() -> Iterator[tuple[Any, ...]]:
        yield ("a", "b", 2, 1, 1)
        yield ("c", "a", 1, 0, 0)
        yield ("c", "b", 1, 0, 0)
        yield ("y", "x", 1, 0, 0)

    assert tally(kept(path)) == list(rows())
