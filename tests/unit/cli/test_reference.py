"""docs/reference/cli.md is what the parser says, and the parser says something of everything."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from disco_daemon.cli.arguments import Command, arguments, commands
from disco_daemon.cli.main import make_parser
from disco_daemon.cli.reference import document

ROOT = Path(__file__).parent.parent.parent.parent
ALL = list(commands(make_parser()))


def test_the_document_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/cli.md").read_text("utf-8") == document(make_parser()), "run `make docs`"


def test_the_command_writes_the_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "disco_daemon.cli.reference"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout
    subprocess.run([*command, str(tmp_path / "cli.md")], cwd=ROOT, timeout=60, check=True)
    assert (tmp_path / "cli.md").read_bytes() == printed
    assert printed.decode() == document(make_parser())


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.words)
def test_every_command_and_argument_is_explained(command: Command) -> None:
    assert command.summary
    assert [action.dest for action in arguments(command.parser) if not action.help] == []


def test_every_kind_of_argument_has_its_form() -> None:
    parser = argparse.ArgumentParser(prog="x")
    verbs = parser.add_subparsers()
    verb = verbs.add_parser("verb", help="do it")
    verb.add_argument("word")
    verb.add_argument("more", nargs="*", help="100%% of them")
    verb.add_argument("-f", "--flag", action="store_true")
    verb.add_argument("--size", type=int, default=3, help="(default: %(default)s)")
    verb.add_argument("--how", choices=("a", "b"), metavar="A|B")
    verb.add_argument("--must", required=True)
    verb.add_argument("--hidden", help=argparse.SUPPRESS)
    either = verb.add_mutually_exclusive_group()
    either.add_argument("--one", action="store_true")
    either.add_argument("--other", choices=(1, 2))
    verbs.add_parser("hidden verb")
    page = document(parser)
    synopsis = "x verb WORD [MORE ...] [-f, --flag] [--size SIZE] [--how A|B] --must MUST [--one | --other {1,2}]"
    assert f"```\n{synopsis}\n```" in page
    assert "| `--size SIZE` | (default: 3) |" in page
    assert "| `MORE ...` | 100% of them |" in page
    assert "| `--how A\\|B` |" in page
    assert "## x verb\n\nDo it.\n" in page
    assert "hidden" not in page
