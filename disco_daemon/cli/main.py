"""The entry point `disco`. Each verb is a module of this package; all heavy imports stand inside the verbs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .. import __version__
from . import up
from .terminal import plainly

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def verbs() -> Sequence[ModuleType]:
    """Load the modules of all verbs; return them in the order in which the help has them."""
    from . import (
        bench,
        chat,
        completion,
        config,
        demo,
        doctor,
        exits,
        fleet,
        machines,
        models,
        plan,
        profiling,
        service,
        setup,
        split,
        status,
        trace,
        tui,
        tune,
        whatif,
    )

    return (
        setup, up, chat, tui, service, status, trace, doctor, plan, tune, profiling, demo, bench, whatif, config,
        models, machines, split, exits, fleet, completion,
    )  # fmt: skip


def make_parser(verb: str = "") -> argparse.ArgumentParser:
    """Make the parser of the whole command line; parsed arguments have the parser itself as `parser`.

    If `verb` is `up`, the parser knows that alone: a daemon starts without the modules and arguments of the others.
    """
    parser = argparse.ArgumentParser(
        prog="disco",
        description="Local-first LLM streaming: this machine's model and a server race for each answer.",
        epilog="Start with `disco setup`, then `disco tui`; or point any OpenAI client at http://127.0.0.1:4747/v1.",
    )
    parser.add_argument("--version", action="version", version=f"disco {__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for module in (up,) if verb == "up" else verbs():
        module.add_parser(subparsers)
    parser.set_defaults(parser=parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; exit codes 0 done, 1 failed, 2 wrong usage (argparse)."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["partner"], ["split"], ["fleet"]):
        from .machines import words_today

        words = words_today(words)
    args = make_parser(*words[:1]).parse_args(words)
    with plainly():
        return _run(args)


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
