"""Mistakes at the command line are answered by the command at hand, with what may have been meant."""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from disco_daemon.cli import main as cli
from disco_daemon.cli.arguments import MEANT, arguments, commands
from disco_daemon.cli.main import make_parser

PARSER = make_parser()
ALL = {one.words: one.parser for one in commands(PARSER)}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what is said of a wrong command, below its usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words])
    assert ended.value.code == 2
    usage, _, said = capsys.readouterr().err.rstrip("\n").rpartition("\n")
    assert usage.startswith("usage: disco")
    return said


def misspelled(word: str) -> str:
    """Return a word with its last letter twice, as a key that bounces writes it."""
    return word + word[-1]


@pytest.mark.parametrize("words", ALL)
def test_a_misspelled_command_is_answered_with_the_one_that_was_meant(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *before, name = words.split()[1:]
    said = refused(capsys, *before, misspelled(name))
    assert said.startswith(f"{' '.join(['disco', *before])}: there is no `{words[: -len(name)]}{misspelled(name)}`")
    assert name in said.partition("did you mean ")[2].partition("?")[0].split(", ")


@pytest.mark.parametrize("words", ALL)
def test_a_misspelled_option_is_answered_by_its_own_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [name for action in arguments(ALL[words]) for name in action.option_strings if name.startswith("--")]
    if not flags:
        return
    needed = [
        str(next(iter(action.choices or ["1"])))
        for action in arguments(ALL[words])
        if not action.option_strings and action.nargs is None
    ]
    for action in arguments(ALL[words]):
        if action.required and action.option_strings:
            needed += [action.option_strings[0], str(next(iter(action.choices or ["1"])))]
    for group in ALL[words]._mutually_exclusive_groups:
        needed += list(group._group_actions[0].option_strings[:1]) if group.required else []
    said = refused(capsys, *words.split()[1:], *needed, misspelled(flags[-1]))
    assert said.startswith(f"{words}: there is no {misspelled(flags[-1])} here: did you mean {flags[-1]}")


def test_a_command_of_another_place_or_program_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean `disco models pull`?" in refused(capsys, "pull")
    for other, ours in MEANT.items():
        assert f"did you mean {ours}?" in refused(capsys, other)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("config", "disco config: say which: get, set, reload, path"),
        ("config set caps.usd_per_day", "disco config set: value is missing"),
        ("chat --pace fast", "disco chat: --pace wants a number, not 'fast'"),
        ("chat --max-tokens 1.5", "disco chat: --max-tokens wants a whole number, not '1.5'"),
        ("chat --delivery pacd", "disco chat: --delivery cannot be 'pacd': did you mean paced? It is one of"),
        ("help confg", "disco: there is no `disco confg`: did you mean config?"),
    ],
)
def test_a_mistake_is_said_in_plain_words(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words.split()).startswith(says)


@pytest.mark.parametrize("words", [[], ["help"]])
def test_disco_alone_and_its_help_show_every_verb_on_a_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0  # pytest's streams are no terminal
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("  ")}
    assert lines == {one.words.split()[1]: one.summary for one in commands(PARSER) if one.words.count(" ") == 1}
    assert max(map(len, shown.splitlines())) <= 100


def test_help_of_a_verb_is_what_its_option_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", "config", "set"], ["config", "set", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown == 2 * shown[: len(shown) // 2]
    assert shown.startswith("usage: disco config set")


def test_disco_alone_at_a_terminal_is_the_terminal_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[argparse.Namespace] = []

    def show(args: argparse.Namespace) -> int:
        shown.append(args)
        return 0

    monkeypatch.setattr("disco_daemon.cli.tui.run", show)
    monkeypatch.setattr(cli, "has_screen", lambda: True)
    assert cli.main([]) == 0
    assert len(shown) == 1


@pytest.mark.parametrize("piped", ["stdin", "stdout", "stderr"])
def test_the_terminal_ui_says_that_it_needs_a_terminal(piped: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {piped: subprocess.PIPE}
    command = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "tui"]
    env = os.environ | {"DISCO_CONFIG": str(tmp_path / "config.toml"), "HOME": str(tmp_path)}
    try:
        process = subprocess.Popen(command, env=env, **streams)  # type: ignore[call-overload]
        os.close(theirs)
        said = process.communicate(timeout=60)[1]
        if piped != "stderr":
            said = os.read(ours, 4096)
    finally:
        os.close(ours)
    assert process.returncode == 2
    assert said.count(b"\n") == 1
    assert b"\x1b" not in said
    assert b"terminal" in said
