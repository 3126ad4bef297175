"""Completion as the shells do it, where they are installed: the script is sourced, and a word is completed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.cli.arguments import commands
from disco_daemon.cli.completion import SHELLS, script
from disco_daemon.cli.main import make_parser
from disco_daemon.config.schema import keys

Complete = Callable[..., set[str]]

BASH = """
source "$1"; shift
set -- "$@"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
f=$(complete -p disco); f=${f##*-F }; "${f%% *}"
[ ${#COMPREPLY[@]} = 0 ] || printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C (string join " " -- $argv[2..])'
# zsh completes nothing without a terminal. Read at its start, this writes what it would offer to a file, then ends it.
ZSHRC = """
fpath=($SCRIPTS $fpath)
autoload -Uz compinit && compinit -u -D
PROMPT=
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
  local -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -rl -- $hits >> $OFFERED
  builtin compadd "$@"
}
finish() { exit }
comppostfuncs=(finish)
bindkey '^I' complete-word
"""


def bash(path: Path, *words: str) -> list[str]:
    return ["bash", "--norc", "--noprofile", "-c", BASH, "-", str(path), *words]


def fish(path: Path, *words: str) -> list[str]:
    return ["fish", "--no-config", "-c", FISH, str(path), *words]


def zsh(path: Path, *words: str) -> list[str]:
    """Type the words and a tab into a pseudo-terminal."""
    home = path.parent
    offered = home / "offered"
    offered.write_text("")
    (home / ".zshrc").write_text(ZSHRC)
    master, slave = os.openpty()
    env = os.environ | {"ZDOTDIR": str(home), "SCRIPTS": str(home), "OFFERED": str(offered), "TERM": "xterm"}
    shell = subprocess.Popen(
        ["zsh", "-d", "-i"], cwd=home.parent, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    limit = threading.Timer(60, shell.kill)
    limit.start()
    os.write(master, f"{' '.join(words)}\t".encode())
    with contextlib.suppress(OSError):  # the end of a terminal nobody has open any more
        while os.read(master, 4096):
            pass
    assert shell.wait() >= 0, "it was killed: nothing came of the tab"
    limit.cancel()
    os.close(master)
    return offered.read_text().splitlines()


def run(argv: list[str], folder: Path) -> list[str]:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(params=SHELLS)
def complete(request: pytest.FixtureRequest, tmp_path: Path) -> Complete:
    """What a shell offers for the last of some words."""
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    path = tmp_path / ".shell" / "_disco"  # hidden: not among the files that are offered
    path.parent.mkdir()
    path.write_text(script(make_parser(), shell), "utf-8")

    def offered(*words: str) -> set[str]:
        if shell == "zsh":
            return set(zsh(path, *words))
        return {line.partition("\t")[0] for line in run({"bash": bash, "fish": fish}[shell](path, *words), tmp_path)}

    return offered


def verbs(*words: str) -> set[str]:
    parent = " ".join(words)
    return {c.words.removeprefix(parent + " ") for c in commands(make_parser()) if c.words.rpartition(" ")[0] == parent}


def test_verbs_are_offered_at_every_level(complete: Complete) -> None:
    assert complete("disco", "") == verbs("disco")
    assert complete("disco", "st") == {"status"}
    assert complete("disco", "bench", "") == verbs("disco", "bench")
    assert complete("disco", "service", "re") == {"restart"}
    assert complete("disco", "nothing", "x") == set()


def test_options_are_those_of_the_verb(complete: Complete) -> None:
    assert complete("disco", "up", "--po") == {"--port", "--policy"}
    assert complete("disco", "up", "--port", "1", "--po") >= {"--policy"}
    assert complete("disco", "status", "--po") == set()
    assert complete("disco", "bench", "relay", "--str") == {"--streams"}


def test_values_that_are_known_are_offered(complete: Complete) -> None:
    assert complete("disco", "up", "--log-level", "") == {"debug", "info", "warning", "error"}
    assert complete("disco", "config", "set", "server.base") == {"server.base_url"}
    assert complete("disco", "config", "get", "caps.") == {key for key in keys() if key.startswith("caps.")}
    assert complete("disco", "models", "l") == {"list"}
    assert complete("disco", "completion", "") == set(SHELLS)


def test_files_and_folders_are_offered_where_one_is_wanted(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.d").mkdir()
    assert {name.rstrip("/") for name in complete("disco", "up", "--config", "mi")} == {"mine.toml", "mine.d"}
    assert {name.rstrip("/") for name in complete("disco", "eval", "--history", "--plots", "mi")} == {"mine.d"}
    assert complete("disco", "up", "--host", "mi") == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_finds_nothing_wrong_with_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    path = tmp_path / "script"
    path.write_text(script(make_parser(), shell), "utf-8")
    flag = "--no-execute" if shell == "fish" else "-n"
    done = subprocess.run([shell, flag, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_the_script(shell: str) -> None:
    text = script(make_parser(), shell)
    for command in commands(make_parser()):
        assert command.words.rpartition(" ")[2] in text
    for option in ("log-level", "force-handoff", "dry-run"):
        assert option in text
    assert "server.base_url" in text
