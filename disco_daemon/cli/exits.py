"""`disco exits`: what lets a laptop guess the whole model's next token by its own layers alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import make_console, progress

if TYPE_CHECKING:
    from ..machines.split.trained_exits import KeptExit

TEXT_BYTES = 16 << 20  # of one file of the user's


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "exits",
        help="train a model's early exits, and show what they are worth",
        description="An exit guesses the whole model's next token from a model's lower layers. It is trained here, on "
        "what the model itself says to prompts that come with disco.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    train = actions.add_parser(
        "train",
        help="train an exit of a model",
        description="Let the model answer prompts, fit an exit behind its lower layers to what it says, and measure it "
        "on answers that the training never saw. It runs at the lowest priority; Ctrl-C ends it, and the same command "
        "goes on from there.",
    )
    _add_common(train)
    train.add_argument("--cut", type=int, metavar="K", help="behind K layers (default: 80 %% of them)")
    train.add_argument("--head", choices=("auto", "linear", "mlp"), default="auto", help="kind of exit (auto)")
    train.add_argument("--tokens", type=_tokens, metavar="N", help="of the model's own answers (default: 40000)")
    train.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE", help="train on a text of yours as well"
    )
    train.add_argument("--now", action="store_true", help="also while the machine runs on its battery")
    train.set_defaults(run=_train)
    found = actions.add_parser("list", help="list the exits of a model")
    _add_common(found)
    found.set_defaults(run=_list)
    show = actions.add_parser("show", help="show what an exit is worth")
    _add_common(show)
    show.add_argument("--cut", type=int, metavar="K", help="the one behind K layers (default: the last one)")
    show.set_defaults(run=_show)
    remove = actions.add_parser("rm", help="remove a model's exits")
    remove.add_argument("--model", help="GGUF file (default from the configuration)")
    remove.add_argument("--cut", type=int, metavar="K", help="only those behind K layers")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.set_defaults(run=_remove)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="GGUF file (default from the configuration)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _tokens(text: str) -> int:
    from ..machines.split.trained_exits import FEWEST, MOST

    value = int(text)
    if not FEWEST <= value <= MOST:
        msg = f"must be {FEWEST} to {MOST}: less text is too little to train an exit"
        raise argparse.ArgumentTypeError(msg)
    return value


def _train(args: argparse.Namespace) -> int:
    """Train, keep and show an exit."""
    import asyncio

    import psutil

    from ..config.layers import load
    from ..errors import ConfigError
    from ..machines.device_settings import model_path
    from ..machines.split.trained_exits import TOKENS, train
    from ..system.smallfile import read_text

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and battery.power_plugged is False and not args.now:
        raise ConfigError("the machine runs on its battery, and a training takes minutes of all cores: give --now")
    texts = [read_text(path, max_bytes=TEXT_BYTES) for path in args.text]
    config = load(flags={"device.model": args.model})
    kept = asyncio.run(
        train(
            config, model_path(config.device), progress, cut=args.cut, head=args.head, tokens=args.tokens or TOKENS,
            texts=texts,
        )
    )  # fmt: skip
    _print(kept, as_json=args.json)
    return 0


def _list(args: argparse.Namespace) -> int:
    from msgspec import to_builtins

    kept = _kept(args.model)
    if args.json:
        print(json.dumps([to_builtins(one.figures) for one in kept]))
    elif not kept:
        print("no exits of this model: `disco exits train` makes one")
    for one in [] if args.json else kept:
        f = one.figures
        print(
            f"behind {f.cut} layers, {f.head}: agrees on {f.agreement:.1%} of the tokens, "
            f"{f.tokens_per_round_trip:.2f} tokens a round trip, trained on {f.train_tokens}"
        )
    return 0


def _show(args: argparse.Namespace) -> int:
    from ..errors import ConfigError

    kept = [one for one in _kept(args.model) if args.cut in (None, one.figures.cut)]
    if not kept:
        where = "" if args.cut is None else f" behind {args.cut} layers"
        msg = f"there is no exit of this model{where}: `disco exits train` makes one"
        raise ConfigError(msg)
    last = kept[-1].figures.cut
    _print(next(one for one in kept if one.figures.cut == last), as_json=args.json)
    return 0


def _remove(args: argparse.Namespace) -> int:
    """Remove exits after asking; exit code 1 if the answer is no."""
    from ..config.layers import load
    from ..machines.device_settings import model_path
    from ..machines.split.trained_exits import KeptExits

    exits = KeptExits(model_path(load(flags={"device.model": args.model}).device))
    chosen = [one for one in exits.all() if args.cut in (None, one.figures.cut)]
    if not chosen:
        print("no such exits")
        return 1
    for one in chosen:
        print(f"behind {one.figures.cut} layers, {one.figures.head}: {one.path}")
    if not args.yes:
        if not sys.stdin.isatty():
            print("nothing is removed: give --yes", file=sys.stderr)
            return 1
        if input("Remove? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for one in chosen:
        exits.remove(one)
    return 0


def _kept(model: str | None) -> list[KeptExit]:
    from ..config.layers import load
    from ..machines.device_settings import model_path
    from ..machines.split.trained_exits import KeptExits

    return KeptExits(model_path(load(flags={"device.model": model}).device)).all()


def _print(one: KeptExit, *, as_json: bool) -> None:
    from msgspec import to_builtins

    f, console = one.figures, make_console(highlight=False)
    if as_json:
        print(json.dumps(to_builtins(f)))
        return
    console.print(
        f"{f.model}, behind {f.cut} layers, {f.head}, trained on {f.train_tokens} tokens in {f.seconds:.0f} s"
    )
    console.print(f"says what the whole model says for {f.agreement:.1%} of the tokens of answers it never saw")
    console.print(f"{f.tokens_per_round_trip:.2f} tokens a round trip as drafts")
    leave = ", ".join(f"{share:.1%} at {theta}" for theta, share in f.coverage.items())
    if not f.is_faithful:
        console.print(
            f"confident: answers are too far from the whole model's to claim a coverage (ROUGE-L "
            f"{f.rouge_l_confident:.2f} at 0.9, calibration error {f.ece:.3f})"
        )
    else:
        console.print(f"tokens that may leave by confidence: {leave} (calibration error {f.ece:.3f})")
    console.print(f"alone: ROUGE-L {f.rouge_l_alone:.2f}, perplexity {f.perplexity:.1f} by the whole model")
    console.print(f"kept in {one.path}")
