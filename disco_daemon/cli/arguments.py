"""Walks a parser: its commands, and the arguments of each, for shell completion and docs/reference/cli.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its words, such as `disco bench relay`, its line in the parent's help, and its parser."""

    words: str
    summary: str
    parser: argparse.ArgumentParser


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """Yield all commands below `parser`, parents first, without those that are hidden (no help text)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {shown.dest: shown.help for shown in action._choices_actions}
            for name, child in action.choices.items():
                if name in summaries:
                    yield Command(f"{parser.prog} {name}", summaries[name] or "", child)
                    yield from commands(child)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command itself, without --help and hidden ones."""
    return [
        action
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction | argparse._VersionAction)
        and action.help != argparse.SUPPRESS
    ]


def takes_value(action: argparse.Action) -> bool:
    """Whether an option is followed by a value."""
    return action.nargs != 0
