"""`disco split plan`: what each cut of a model would cost on two machines, and which one to take."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from .terminal import make_console

if TYPE_CHECKING:
    from pathlib import Path

    from ..config.schema import Config
    from ..machines.split.cut_plan import SplitPlan

RTT_MS, MBIT = 20.0, 100.0  # a home network over Wi-Fi, or a machine in the same city


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action."""
    parser = actions.add_parser(
        "plan",
        help="show what each cut would cost on both machines",
        description="Show for each cut of a model the weights on both machines, the time for a token there and over "
        "the link, and which cut is best. Both machines count as this one where nothing else is given. What this "
        "machine takes for a token is as `disco tune` or `disco profile` measured it.",
    )
    parser.add_argument("--model", help="GGUF file (default from the configuration)")
    parser.add_argument("--rtt-ms", type=_amount, default=RTT_MS, metavar="MS", help=f"round trip ({RTT_MS:g})")
    parser.add_argument("--mbit", type=_amount, default=MBIT, metavar="N", help=f"upload, Mbit/s ({MBIT:g})")
    parser.add_argument(
        "--edge-gib", type=_amount, metavar="GIB", help="free memory of the machine with the lower layers"
    )
    parser.add_argument("--partner-gib", type=_amount, metavar="GIB", help="free memory of the partner")
    parser.add_argument(
        "--edge-token-ms", type=_amount, metavar="MS", help="what the whole model would take a token there"
    )
    parser.add_argument("--partner-token-ms", type=_amount, metavar="MS", help="the same of the partner")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_plan)


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _plan(args: argparse.Namespace) -> int:
    """Show the plan; exit code 1 if no cut fits."""
    from msgspec import to_builtins

    from ..config.layers import load
    from ..machines.device_settings import model_path

    config = load(flags={"device.model": args.model})
    plan = _planned(args, config, model_path(config.device))
    if args.json:
        print(json.dumps(to_builtins(plan)))
    else:
        _show(plan)
    return 0 if plan.chosen is not None else 1


def _planned(args: argparse.Namespace, config: Config, model: Path) -> SplitPlan:
    """Plan by the arguments, and by what is known of this machine. Raises ConfigError."""
    from ..machines.split.cut_plan import LinkSpeed, PlanInput, plan_cuts
    from ..machines.split.hosted_range import tell_cuts
    from ..system import control_groups

    cuts = tell_cuts(config)
    here_s = None if args.edge_token_ms and args.partner_token_ms else _token_s(cuts.token_s, model)
    _, free_bytes = control_groups.memory()

    def seconds(given_ms: float | None) -> float:
        return given_ms / 1e3 if given_ms is not None else here_s or 0.0

    def memory(given_gib: float | None) -> float:
        return free_bytes if given_gib is None else given_gib * 2**30

    there_s = seconds(args.partner_token_ms)
    given = PlanInput(
        seconds(args.edge_token_ms),
        there_s,
        LinkSpeed(args.rtt_ms / 1e3, args.mbit * 1e6 / 8),
        memory(args.edge_gib),
        memory(args.partner_gib),
        cuts.n_cells,
        partner_row_s=there_s * cuts.row_s / cuts.token_s if cuts.token_s else 0.0,
    )
    return plan_cuts(cuts, given)


def _token_s(measured_s: float, model: Path) -> float:
    """Return what the whole model takes for a token here, as it was measured, s. Raises ConfigError if it was not."""
    from ..errors import ConfigError

    if measured_s:
        return measured_s
    msg = (
        f"how long {model.name} takes for a token here is not known: measure it with `disco tune`, or give "
        "--edge-token-ms and --partner-token-ms"
    )
    raise ConfigError(msg)


def _show(plan: SplitPlan) -> None:
    console = make_console(highlight=False)
    console.print("behind  lower layers  the rest   here     partner  a trip  a token")  # tokens a round trip
    for one in plan.cuts:
        mark = " <- best" if one.layer == plan.chosen else ""
        console.print(
            f"{one.layer:>6}  {one.edge_bytes / 1e6:>9.1f} MB  {one.partner_bytes / 1e6:>5.1f} MB "
            f"{1e3 * one.edge_s_per_token:>6.1f} ms {1e3 * one.partner_s_per_token:>6.1f} ms "
            f"{one.tokens_per_round_trip:>6.2f}  {1e3 * one.token_s:>6.1f} ms{mark}"
        )
    console.print(plan.why[0].upper() + plan.why[1:] + ".")
