"""`disco fleet`: inner layers of this machine's model in other processes or machines: how they are, where to be."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from .terminal import make_console

if TYPE_CHECKING:
    from ..machines.fleet.layer_plan import FleetPlan

WATCH_S = 1.0  # between two looks
WELL = ("up", "idle", "draining", "drained")  # states of a host in which nothing is wrong
N_STEPS = 5  # of the latest, that are shown


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "fleet",
        help="have several processes or machines compute one model",
        description="Look at a fleet: processes of this machine or of others, its hosts, that compute inner layers of "
        "the model. `disco config set fleet.enabled true` turns it on, and with fleet.mode = auto layers move, are "
        "replicated and evicted while it answers; `disco machines pair --as fleet` lets another machine join.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    status = actions.add_parser(
        "status",
        help="show which host computes which layers",
        description="Show the hosts of the running daemon's model, their layers, and how they are; exit code 1 where "
        "one is not up.",
    )
    status.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")
    status.add_argument("--url", help="daemon to ask (default from the configuration)")
    status.set_defaults(run=_status)
    plan = actions.add_parser(
        "plan",
        help="show which layers hosts should have, and change nothing",
        description="Show what should be done with the layers of the configured model, and what that should bring. "
        "Nothing is changed. What this machine takes for a token is as `disco tune` or `disco profile` measured it.",
    )
    plan.add_argument("--model", help="GGUF file (default from the configuration)")
    plan.set_defaults(run=_plan)
    pause = actions.add_parser(
        "pause",
        help="let no layers move by themselves",
        description="Let no layers move by themselves until `disco fleet resume`; answers go on. A host that is "
        "drained, or that may have less, is relieved all the same.",
    )
    resume = actions.add_parser(
        "resume",
        help="let layers move by themselves again",
        description="End a pause, and let hosts that were drained have layers again.",
    )
    drain = actions.add_parser(
        "drain",
        help="move all layers off a host",
        description="Move all layers off a host while answers go on, and none there until `disco fleet resume`.",
    )
    drain.add_argument("host", help="of the fleet, as `disco fleet status` shows it")
    for action in (pause, resume, drain):
        action.add_argument("--url", help="daemon to ask (default from the configuration)")
        action.set_defaults(run=_steer, order=action.prog.split()[-1])
    for action in (status, plan, pause, resume, drain):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def _status(args: argparse.Namespace) -> int:
    """Print the hosts; exit code 1 where one is not up."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    while True:
        found = client.get(root, "/disco/v1/fleet", key)
        print(json.dumps(found) if args.json else "\n".join(lines_of(found)), flush=True)
        if not args.watch:
            return 0 if all(host["state"] in WELL for host in found["hosts"]) else 1
        time.sleep(WATCH_S)


def _steer(args: argparse.Namespace) -> int:
    """Have the daemon pause, resume or drain; print the fleet as it is then."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    given = {"host": args.host} if args.order == "drain" else {}
    found = client.post(root, f"/disco/v1/fleet/{args.order}", given, key)
    print(json.dumps(found) if args.json else "\n".join(lines_of(found)))
    return 0


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the document of `disco fleet status` in words."""
    hosts = found["hosts"]
    if not hosts:
        text = (
            "The device has no hosts: `disco config set fleet.enabled true`, then `disco config reload`, gives it as "
            "many of this machine as fleet.hosts says; `disco machines pair --as fleet` lets another machine lend some."
        )
        return [text]
    lines = [_line(host) for host in hosts]
    expected = found["speedup_predicted"]
    if expected is not None:
        measured = "" if found["speedup_measured"] is None else f", {found['speedup_measured']:.2f} measured"
        lines.append(f"expected: {expected:.2f} times the token/s of the whole model in one process{measured}")
    shares = {"late answers": found["slo_violation"], "unused at the idlest": found["vacancy"]}
    told = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share is not None]
    policy = f", {found['policy']}" if found["policy"] else ""
    lines.append("; ".join([f"mode: {found['mode']}{policy}{', paused' * found['paused']}", *told]))
    return lines + [step_line(step) for step in found["last_steps"][-N_STEPS:]]


def step_line(step: dict[str, Any]) -> str:
    """Return a step that has ended in words: what, why, what was expected and measured, and how long it took."""
    layers = f" layers {step['first']}-{step['last']}" if step["last"] else ""
    way = "".join(f" {word} {step[key]}" for word, key in (("from", "source"), ("to", "target")) if step[key])
    came = "" if step["measured"] is None else f", {step['measured']:.2f} times measured"
    parts = [(name, step[key]) for name, key in (("files", "stage_s"), ("load", "load_s"), ("copy", "copy_s"))]
    told = ", ".join(f"{name} {part_s:.3f}" for name, part_s in parts if part_s is not None)
    took = f"{step['seconds']:.2f} s{f' ({told})' * bool(told)}, {step['pause_s']:.3f} s of it held for the switch"
    return f"{step['kind']}{layers}{way}: {step['why']}; {step['predicted']:.2f} times expected{came}; {took}"


def _line(host: dict[str, Any]) -> str:
    layers = " and ".join(f"{part['first']}-{part['last']}" for part in host["segments"])
    share = "" if host["cpu_share"] is None else f", {100 * host['cpu_share']:.0f} % of a processor"
    life = f", its {host['epoch']}. process" if host["epoch"] > 1 else ""
    if not layers:
        return f"{host['name']:<8} {host['state']}: no layers"
    n = sum(part["sequences"] for part in host["segments"][:1])
    excess = f", {host['excess_bytes'] / 1e6:.0f} MB more than it may have" if host["excess_bytes"] else ""
    return f"{host['name']:<8} {host['state']}: layers {layers}, {n} answers{share}{excess}{life}"


def _plan(args: argparse.Namespace) -> int:
    """Show the plan."""
    from msgspec import to_builtins

    from ..config.layers import load
    from ..machines.fleet.local_fleet import plan

    found = plan(load(flags={"device.model": args.model}))
    if args.json:
        print(json.dumps(to_builtins(found)))
    else:
        _show(found)
    return 0


def _show(found: FleetPlan) -> None:
    console = make_console(highlight=False, soft_wrap=True)
    for step in found.steps:
        console.print(f"{step.kind} layers {step.first}-{step.last} from {step.source} to {step.target}")
    if found.steps:
        console.print(f"That gives {found.steps[0].predicted:.2f} times as much: {found.steps[0].why}.")
        console.print(
            "Nothing is moved unless fleet.mode is auto: fleet.cuts says where layers lie. `disco split check` with a "
            "--cut for each of them shows whether the pieces equal the whole model."
        )
    else:
        console.print("Nothing: no step would bring 2 % more or better.")
    console.print(
        f"Expected are {found.speedup_predicted:.2f} times the token/s of the whole model in one process; the hosts "
        f"take {found.memory_bytes / 1e6:.0f} MB."
    )
