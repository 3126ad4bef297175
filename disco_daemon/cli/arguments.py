"""The parser of the command line, and walks over one: its commands, and the arguments of each.

Help, shell completion and docs/reference/cli.md are made by such walks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..plain import FEW, did_you_mean, which

# Verbs of other programs, and what they are here.
MEANT = {"serve": "up", "start": "up", "daemon": "up", "run": "chat", "ask": "chat", "init": "setup", "login": "setup"}
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with the usage of the command at hand, and what may have been meant."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups: dict[str, list[str]] = {}  # names of its commands below the title of each group, for its help
        self.passes_on = ""  # where the words behind `--` go, which are another program's

    def format_help(self) -> str:
        """Return the help; with groups, a line for each command below the title of its group."""
        if not self.groups:
            return super().format_help()
        lines = {one.words.removeprefix(f"{self.prog} "): one.summary for one in commands(self)}
        shown = [self.format_usage(), f"{self.description}\n"]
        for title, names in self.groups.items():
            shown += [f"{title}:", *(f"  {name:<11} {lines[name]}" for name in names), ""]
        return "\n".join([*shown, f"{self.epilog}", ""])

    def parse_known_args(  # type: ignore[override]  # argparse has one form for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does; words that this command does not know end here, and not at `disco` itself."""
        words = list(sys.argv[1:] if args is None else args)
        at = words.index("--") if self.passes_on and "--" in words else len(words)
        found, rest = super().parse_known_args(words[:at], namespace)
        if at < len(words):
            setattr(found, self.passes_on, [*getattr(found, self.passes_on), *words[at + 1 :]])
        if rest:
            flag = rest[0].partition("=")[0]
            known = [name for action in arguments(self) for name in action.option_strings]
            near = did_you_mean(flag, known) if flag.startswith("-") else ""
            self.error(f"there is no {flag} here: {near}`{self.prog} --help` shows what it takes")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with those that are alike, or all if they are few."""
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            known = [one.dest for one in action._choices_actions]
            near = self._meant(str(value), known)
            more = which("", known) if len(known) <= FEW else "`disco help` lists all"
            self.error(f"there is no `{self.prog} {value}`: {near}{more if not near else more[:1].upper() + more[1:]}")
        name = "/".join(action.option_strings) or action.metavar or action.dest
        self.error(f"{name} cannot be {value!r}: {which(str(value), map(str, action.choices))}")

    def _meant(self, said: str, known: Sequence[str]) -> str:
        """Return a question for the commands that may have been meant, with a space behind it; empty if none was."""
        if said in MEANT and MEANT[said] in known:
            return f"did you mean {MEANT[said]}? "
        if near := did_you_mean(said, known):
            return near
        deeper = [one.words for one in commands(self) if one.words.rpartition(" ")[2] == said]
        return f"did you mean `{'`, `'.join(deeper[:3])}`? " if deeper else ""

    def error(self, message: str) -> NoReturn:
        """Print usage and mistake, and end with 2."""
        if missing := re.match(r"the following arguments are required: (.*)", message):
            nested = [one.dest for action in _nested(self) for one in action._choices_actions]
            message = f"say which: {', '.join(nested)}" if nested else f"{missing[1]} is missing"
        elif wrong := re.match(r"argument (\S+): invalid (\w+) value: (.*)", message):
            message = f"{wrong[1]} wants {_KINDS.get(wrong[2], 'another value')}, not {wrong[3]}"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")


def _nested(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its words, such as `disco bench relay`, its line in the parent's help, and its parser."""

    words: str
    summary: str
    parser: argparse.ArgumentParser


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """Yield all commands below `parser`, parents first, without those that are hidden (no help text)."""
    for action in _nested(parser):
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
