"""The entry point `disco`. Each verb is a module of this package; all heavy imports stand inside the verbs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .. import __version__
from . import up
from .arguments import Parser
from .terminal import has_screen, plainly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType


def verbs() -> Mapping[str, Sequence[ModuleType]]:
    """Load the modules of all verbs; return them in the groups and the order in which the help has them."""
    from . import (
        bench,
        chat,
        completion,
        config,
        demo,
        doctor,
        exits,
        fleet,
        keys,
        launch,
        machines,
        models,
        plan,
        prices,
        profiling,
        service,
        setup,
        split,
        status,
        trace,
        tui,
        tune,
        usage,
        whatif,
    )

    return {
        "Ask": (chat, tui, launch, trace, plan),
        "Set up": (setup, config, models, keys, prices),
        "The daemon": (up, service, status, usage, doctor),
        "Measure": (demo, tune, profiling, bench, whatif),
        "Several machines": (machines, split, fleet, exits),
        "This command": (completion,),
    }


def make_parser(verb: str = "") -> argparse.ArgumentParser:
    """Make the parser of the whole command line; parsed arguments have the parser itself as `parser`.

    If `verb` is `up`, the parser knows that alone: a daemon starts without the modules and arguments of the others.
    """
    parser = Parser(
        prog="disco",
        description="Local-first LLM streaming: this machine's model and a server race for each answer.",
        epilog="`disco help VERB` shows what one takes. Start with `disco setup`, then `disco tui`;\n"
        "or point any OpenAI client at http://127.0.0.1:4747/v1.",
    )
    parser.add_argument("--version", action="version", version=f"disco {__version__}")
    whole: argparse.ArgumentParser = parser  # what verbs are added to knows no groups
    subparsers = whole.add_subparsers(metavar="VERB", required=True)
    if verb == "up":
        up.add_parser(subparsers)
        return parser
    for group, modules in verbs().items():
        before = len(subparsers._choices_actions)
        for module in modules:
            module.add_parser(subparsers)
        parser.groups[group] = [verb.dest for verb in subparsers._choices_actions[before:]]
    helper = subparsers.add_parser("help", help="show all verbs, or what one takes")
    helper.add_argument("words", nargs="*", metavar="VERB", help="such as `config set`")
    helper.set_defaults(run=_help)
    parser.groups["This command"].append("help")
    parser.set_defaults(parser=parser)
    return parser


def _help(args: argparse.Namespace) -> int:
    """Print all verbs, or what `--help` prints of one."""
    if args.words:
        args.parser.parse_args([*args.words, "--help"])  # which ends the program
    args.parser.print_help()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one verb; exit codes 0 done, 1 failed, 2 wrong usage (argparse)."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["partner"], ["split"], ["fleet"]):
        from .machines import words_today

        words = words_today(words)
    if not words:
        words = ["tui"] if has_screen() else ["help"]
    with plainly():
        return _run(make_parser(*words[:1]).parse_args(words))


def _run(args: argparse.Namespace) -> int:
    from ..errors import DiscoError

    try:
        return int(args.run(args))
    except DiscoError as e:
        print(f"disco: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `disco … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
