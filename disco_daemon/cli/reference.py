"""docs/cli.md, made of the parser: every command with its arguments.

`python -m disco_daemon.cli.reference docs/cli.md` writes it (`make docs`), without a path it is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTRODUCTION = """\
# The command line

Made of the parser by `make docs`; a test compares the two. Every command takes `--help`, too. Exit codes: 0 done,
1 failed, 2 wrong usage.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, such as `disco bench relay`, what its parent says of it in a line, and its parser."""

    words: str
    summary: str
    parser: argparse.ArgumentParser


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """All commands below `parser`, parents first; those without a help text are nobody's business."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {shown.dest: shown.help for shown in action._choices_actions}
            for name, child in action.choices.items():
                if name in summaries:
                    yield Command(f"{parser.prog} {name}", summaries[name] or "", child)
                    yield from commands(child)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a command takes of its own, but for --help."""
    return [
        action
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction | argparse._VersionAction)
        and action.help != argparse.SUPPRESS
    ]


def takes_value(action: argparse.Action) -> bool:
    """Whether a word follows an option."""
    return action.nargs != 0


def document(parser: argparse.ArgumentParser) -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(command) for command in commands(parser))])


def _section(command: Command) -> str:
    level = "#" * command.words.count(" ")
    parser, own = command.parser, arguments(command.parser)
    told = parser.description or ""
    lines = [f"#{level} {command.words}", "", told if told.endswith(".") or not told else f"{told}."]
    if not told:
        lines[-1] = f"{command.summary[:1].upper()}{command.summary[1:]}."
    if _has_children(parser):
        return "\n".join([*lines, ""])
    lines += ["", "```", _synopsis(command, own), "```", ""]
    if own:
        lines += ["| argument | meaning |", "| --- | --- |"]
        lines += [f"| `{_cell(_name(action))}` | {_cell(_meaning(action, parser))} |" for action in own]
        lines.append("")
    return "\n".join(lines)


def _has_children(parser: argparse.ArgumentParser) -> bool:
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def _synopsis(command: Command, own: list[argparse.Action]) -> str:
    """The command's words and arguments on one line; what excludes each other stands between bars."""
    groups = {
        id(action): group for group in command.parser._mutually_exclusive_groups for action in group._group_actions
    }
    parts, done = [command.words], set()
    for action in own:
        group = groups.get(id(action))
        if group is None:
            parts.append(_name(action) if _required(action) else f"[{_name(action)}]")
        elif id(group) not in done:
            done.add(id(group))
            either = " | ".join(_name(one) for one in group._group_actions if one.help != argparse.SUPPRESS)
            parts.append(f"({either})" if group.required else f"[{either}]")
    return " ".join(parts)


def _required(action: argparse.Action) -> bool:
    return action.required if action.option_strings else action.nargs not in ("?", "*")


def _name(action: argparse.Action) -> str:
    """Such as `--port PORT`, `-f, --follow` or `KEY`."""
    if not action.option_strings:
        several = " ..." if action.nargs in ("*", "+") else ""
        return f"{_value(action)}{several}"
    flags = ", ".join(action.option_strings)
    return f"{flags} {_value(action)}" if takes_value(action) else flags


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """The help text with its figures filled in, as argparse does it."""
    return (action.help or "") % (vars(action) | {"prog": parser.prog})


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page, or print it."""
    from .main import make_parser

    page = document(make_parser())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page, "utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
