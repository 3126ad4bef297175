"""`disco completion`: a script that lets a shell complete disco's commands, options and settings."""

from __future__ import annotations

import argparse

from .arguments import arguments, commands, takes_value

SHELLS = ("bash", "zsh", "fish")
_PATHS = ("FILE", "FILE.png", "CSV", "GGUF")  # names of values that are files


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description="Print a script for your shell. bash: `disco completion bash > "
        "~/.local/share/bash-completion/completions/disco`; zsh: write it to a file _disco in a folder of your fpath; "
        "fish: `disco completion fish > ~/.config/fish/completions/disco.fish`. Again after an update of disco.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that runs it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.parser, args.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of SHELLS; it completes what the whole `parser` of disco takes."""
    import shtab

    for command in commands(parser):
        command.parser.description = command.summary  # shells show it beside the word: a line is enough
        for action in arguments(command.parser):
            _describe(action)
    return shtab.complete(parser, shell)


def _describe(action: argparse.Action) -> None:
    """Tell shtab which values an argument takes: files, folders, settings."""
    import shtab

    from ..config.schema import keys

    if action.dest == "key" and not action.option_strings:
        action.choices = keys()
    elif action.metavar == "DIR":
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif _is_file(action):
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def _is_file(action: argparse.Action) -> bool:
    """Whether a value is the path of a file, by its type, its name or its help text."""
    from pathlib import Path

    if not takes_value(action) or action.choices is not None:
        return False
    words = f" {action.help or ''} ".replace(",", " ")
    return action.type is Path or action.metavar in _PATHS or " file " in words
