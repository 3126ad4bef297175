"""`disco split`: a model over two machines: joining a partner, where to cut, and whether the pieces are the whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import split_plan
from .terminal import make_console, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..profiling.split_checks import SplitCheck
    from ..types import LayerRange

LONGEST = 2048  # tokens; attention goes other ways for long texts than for short ones
MOST = 32_768  # tokens; a check of more takes hours on a laptop


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "split",
        help="have two machines compute one model",
        description="Work with a model in ranges of layers, which two machines can compute. `disco machines pair` on "
        "the one with the model lets another one join.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    status = actions.add_parser("status", help="show the link to the partner")
    status.add_argument("--url", help="daemon to ask (default from the configuration)")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    status.set_defaults(run=_status)
    split_plan.add_parser(actions)
    check = actions.add_parser(
        "check",
        help="compare a model in ranges with the whole one",
        description="Cut a model into ranges of layers, compute several thousand tokens with the chain of them and "
        "with the whole model, and compare each logit. A result is kept for this model, build and processor.",
    )
    check.add_argument("--model", help="GGUF file (default from the configuration)")
    check.add_argument(
        "--cut", type=int, action="append", metavar="K", help="cut behind K layers; may be given again (default: half)"
    )
    check.add_argument(
        "--tokens", type=_tokens, default=LONGEST, metavar="N", help=f"of the longest text that is compared ({LONGEST})"
    )
    check.add_argument("--again", action="store_true", help="compute it although there is a result")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    check.set_defaults(run=_check)


def _status(args: argparse.Namespace) -> int:
    """Show the link; exit code 1 while it is down."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    found = client.get(root, "/disco/v1/state", key).get("split")
    if args.json:
        print(json.dumps(found or {"state": "off"}))
    else:
        for line in lines_of(found):
            print(line)
    return 0 if found is None or found["state"] == "up" else 1


def lines_of(split: dict[str, Any] | None) -> list[str]:
    """Return the link in words, for `disco status` too."""
    if split is None:
        return ["The device is whole: no partner computes a part of its model."]
    rtt = "" if split["rtt_ms"] is None else f", round trip {split['rtt_ms']:.1f} ms"
    given = split.get("tokens_per_round_trip")
    rtt += "" if given is None else f", {given:.1f} tokens each"
    bits = {True: ", the whole model's very bits", False: ", another build there: answers may differ", None: ""}
    where, what = f"layers 0 to {split['cut']} here, the rest at {split['partner']}", f"rows as {split['codec']}"
    if not split["cut"]:
        where, what = (
            f"{Path(split['draft_model']).stem} drafts here, the whole model is at {split['partner']}",
            "token ids",
        )
    line = f"split        {split['state']}: {where}; {split['mode']}, {what}{rtt}{bits[split['same_bits']]}"
    return [line] + ([f"             {split['error']}"] if split.get("error") else [])


def _tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST:
        msg = f"must be 1 to {MOST}"
        raise argparse.ArgumentTypeError(msg)
    return value


def _check(args: argparse.Namespace) -> int:
    """Show whether the ranges equal the whole; exit code 1 if they do not."""
    import asyncio
    from datetime import UTC, datetime

    from ..config.layers import data_path, load
    from ..machines.device_settings import key_for, model_path
    from ..machines.split.check import check, ranges_of
    from ..profiling.split_checks import SplitCheck, SplitChecks

    config = load(flags={"device.model": args.model})
    model = model_path(config.device)
    ranges = ranges_of(model, args.cut or [])
    checks, key = SplitChecks(data_path() / "profiles" / "splits"), key_for(config, model)
    cuts = [layers.last for layers in ranges[:-1]]
    found = None if args.again else checks.load(key, cuts)
    if found is None or found.result.longest < args.tokens:
        result = asyncio.run(check(config, model, ranges, progress, longest=args.tokens))
        found = SplitCheck(key, cuts, result, datetime.now(UTC).date().isoformat())
        checks.save(found)
    if args.json:
        print(json.dumps(_document(found)))
    else:
        _show(found, ranges)
    return 0 if found.result.is_equal else 1


def _document(found: SplitCheck) -> dict[str, object]:
    from msgspec import to_builtins

    return {
        "model": found.key.model,
        "cuts": found.cuts,
        "equal": found.result.is_equal,
        "checked": found.checked,
        **to_builtins(found.result),
    }


def _show(found: SplitCheck, ranges: Sequence[LayerRange]) -> None:
    result, console = found.result, make_console(highlight=False)
    chain = ", ".join(str(layers) for layers in ranges)
    if result.is_equal:
        console.print(f"equal to the bit: layers {chain} give the very logits of the whole model")
    else:
        console.print(
            f"NOT equal: layers {chain} differ from the whole model by up to {result.worst:.3g}, and agree on "
            f"{result.agreement:.1%} of the tokens: this model is not to be cut there"
        )
    console.print(
        f"{result.n_rows} logit rows of {result.n_tokens} tokens, the longest text {result.longest}; "
        f"the whole took {result.whole_s:.1f} s, the chain {result.chain_s:.1f} s; checked on {found.checked}"
    )
