"""Make docs/reference/cli.md of the parser: every command with its arguments.

`python -m disco_daemon.cli.reference docs/reference/cli.md` writes the page, as `make docs` does; without a path it is
printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .arguments import Command, arguments, commands, takes_value
from .main import make_parser

INTRODUCTION = """\
# The command line

Made of the parser by `make docs`; a test compares the two. Every command takes `--help`, too. Exit codes: 0 done,
1 failed, 2 wrong usage.
"""


def document(parser: argparse.ArgumentParser) -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *(_section(command) for command in commands(parser))])


def _section(command: Command) -> str:
    level = "#" * command.words.count(" ")
    parser, own = command.parser, arguments(command.parser)
    description = parser.description or ""
    lines = [
        f"#{level} {command.words}",
        "",
        description if description.endswith(".") or not description else f"{description}.",
    ]
    if not description:
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
    """Return the command and its arguments on one line; bars separate arguments that exclude each other."""
    groups = {
        id(action): group for group in command.parser._mutually_exclusive_groups for action in group._group_actions
    }
    parts, done = [command.words], set()
    for action in own:
        group = groups.get(id(action))
        if group is None:
            parts.append(_name(action) if _is_required(action) else f"[{_name(action)}]")
        elif id(group) not in done:
            done.add(id(group))
            either = " | ".join(_name(one) for one in group._group_actions if one.help != argparse.SUPPRESS)
            parts.append(f"({either})" if group.required else f"[{either}]")
    return " ".join(parts)


def _is_required(action: argparse.Action) -> bool:
    return action.required if action.option_strings else action.nargs not in ("?", "*")


def _name(action: argparse.Action) -> str:
    """Return an argument as it is typed, such as `--port PORT`, `-f, --follow` or `KEY`."""
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
    """Return the help text with its figures filled in, as argparse does it."""
    return (action.help or "") % (vars(action) | {"prog": parser.prog})


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page, or print it."""
    page = document(make_parser())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page, "utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
