"""`disco eval --history`: replay your own requests under other exchange rates and budgets; no text is read."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .terminal import moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config.schema import Config
    from ..dispatch.policy import Policy
    from ..simulate.recorded import Recorded
    from ..simulate.whatif import WhatIf, WhatIfPoint, WhatIfSetting, WhatIfTerms

BUDGETS = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
RATES = "0.01,0.1,1,10,100,1000"
DAY_S = 86_400.0  # of a day


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `eval`."""
    parser = subparsers.add_parser(
        "eval",
        help="what other settings would have cost, and how long you would have waited",
        description="Replay your own requests under other exchange rates and budgets: docs/howto/whatif.md.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--history", action="store_true", help="replay your own requests")
    for name in ("--traces", "--chats"):
        source.add_argument(name, action=Moved, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--path", metavar="FILE", help="the history file (default: the daemon's)")
    parser.add_argument("--rates", default=RATES, help="exchange rates, $/kWh (default: %(default)s)")
    parser.add_argument("--days", type=float, metavar="N", help="only the last N days")
    parser.add_argument("--policies", help="comma-separated (default: the one that is set)")
    parser.add_argument(
        "--budgets", default=BUDGETS, help="budget ratios b, comma-separated (default: 0.1 to 0.9 by tenths)"
    )
    parser.add_argument(
        "--model", nargs="?", const="recommended", metavar="NAME",
        help="as other models of the list would have served them, by their predicted times: names with commas between "
        "them (default: the recommended one)",
    )  # fmt: skip
    parser.add_argument(
        "--servers", nargs="?", const="all", metavar="NAMES",
        help="what each of your servers alone, and all of them, would have given: names with commas between them "
        "(default: all of the settings)",
    )  # fmt: skip
    parser.add_argument(
        "--rules", metavar="FILE", help="where requests would have gone by the [[rules]] of a TOML file"
    )
    parser.add_argument(
        "--set", metavar="NAMES", help="the same by ready-made sets of policy.set, with commas between them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plots", metavar="DIR", help="draw the table as pictures")
    parser.set_defaults(run=run)


class Moved(argparse.Action):
    """An option that became a script of a checkout: for one release its old name says where it went."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """End with one line."""
        parser.exit(2, f"disco: {moved(f'disco eval {self.option_strings[0]}', 'eval')}\n")


def run(args: argparse.Namespace) -> int:
    """Replay and print; the table, or one JSON document, goes to stdout."""
    from ..config.layers import load
    from ..simulate.figures import require_plots
    from ..simulate.whatif import WhatIf, WhatIfSetting
    from ..simulate.whatif_report import Findings, as_json, draw, summary

    _check(args)
    if args.plots:
        require_plots()
    config = load()
    now = WhatIfSetting(config.device.usd_per_kwh, config.policy.budget)
    if args.model is not None:
        return _play_models(args, config, now)
    if args.servers is not None:
        return _play_servers(args, config)
    if args.rules is not None or args.set is not None:
        return _play_rules(args, config, now)
    rates, budgets = _numbers(args.rates, "--rates", now.usd_per_kwh), _numbers(args.budgets, "--budgets", now.budget)
    recorded, known = _past(args, config)
    models = [WhatIf(recorded, known, policy) for policy in _policies(args.policies or config.policy.name, config)]
    cells = tuple(m.predict(rate, budget) for m in models for rate in rates for budget in budgets)
    (in_force,) = _policies(config.policy.name, config)
    findings = Findings(models[0], cells, now, in_force.name)
    if args.plots:
        for path in draw(findings, Path(args.plots)):
            print(f"drew {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(findings) | {"ms_per_setting": _ms(models[0], cells)}))
    else:
        print(summary(findings))
    return 0


def _past(args: argparse.Namespace, config: Config) -> tuple[Recorded, WhatIfTerms]:
    """Read the history; what it says of the requests, and today's terms."""
    from ..simulate.recorded import Recorded
    from ..store.recorded_outcomes import outcomes

    path = _path(args, config)
    recorded = Recorded.of(outcomes(path, _since(args)))
    return recorded, _terms(path, config, recorded)


def _terms(path: Path, config: Config, recorded: Recorded) -> WhatIfTerms:
    from ..config.layers import config_path
    from ..daemon.prediction import terms, with_played_server
    from ..endpoints.continuation import profile_name
    from ..store.checkup import profile

    played = with_played_server(config, recorded).server
    server = profile_name(played.base_url, played.model)
    return terms(config, recorded, config_path().parent / "servers", profile(path, server))


def _play_models(args: argparse.Namespace, config: Config, now: WhatIfSetting) -> int:
    """Print what other models would have made of the history, under the settings in force."""
    from dataclasses import replace

    from ..machines.model_offers import watts_of
    from ..simulate.whatif import WhatIf
    from ..simulate.whatif_models import play, summary
    from ..simulate.whatif_report import notes, recorded_outcome
    from .whatif_models import about, predicted_devices

    others = predicted_devices(args.model, config)
    recorded, known = _past(args, config)
    if not known.prices.device_watts:  # nothing was booked: the same rule of thumb for all models
        known = replace(known, prices=replace(known.prices, device_watts=watts_of(config) or 0.0))
    (policy,) = _policies(config.policy.name, config)
    found, model = play(recorded, known, policy, now, others), WhatIf(recorded, known, policy)
    was, said = recorded_outcome(model), notes(model)
    if args.json:
        told = {"requests": recorded.n, "days": recorded.days, "recorded": was, "about": about(), "notes": said}
        print(json.dumps(told | {"models": [one.to_json(found[0].point) for one in found]}))
    else:
        print("\n\n".join([summary(found, was, about()), *(["\n".join(said)] if said else [])]))
    return 0


def _play_servers(args: argparse.Namespace, config: Config) -> int:
    """Print what other lists of servers would have made of the history."""
    from ..config.layers import config_path
    from ..simulate.whatif_servers import as_json, summary
    from ..store.recorded_outcomes import outcomes
    from .whatif_servers import replay_of

    past = outcomes(_path(args, config), _since(args))
    replay = replay_of(args.servers, config, config_path().parent / "servers", past)
    found = replay.play()
    print(json.dumps(as_json(replay, found)) if args.json else summary(replay, found))
    return 0


def _play_rules(args: argparse.Namespace, config: Config, now: WhatIfSetting) -> int:
    """Print where other rules would have sent the requests of the history."""
    from ..simulate.whatif_rules import play
    from ..store.recorded_outcomes import outcomes
    from .whatif_rules import lists_of, router_of

    lists = lists_of(args.rules, args.set, config)
    path = _path(args, config)
    (policy,) = _policies(config.policy.name, config)
    found = play(
        outcomes(path, _since(args)), lambda known: _terms(path, config, known), policy, now, lists, router_of(config)
    )
    print(json.dumps(found.to_json()) if args.json else found.summary())
    return 0


def _since(args: argparse.Namespace) -> float:
    return 0.0 if args.days is None else time.time() - args.days * DAY_S


def _check(args: argparse.Namespace) -> None:
    others = [f"--{name}" for name in ("model", "servers", "rules", "set") if getattr(args, name) is not None]
    if len(others) > 1 and others != ["--rules", "--set"]:
        msg = f"{' and '.join(others)} are questions of their own: ask one of them at a time"
        raise ConfigError(msg)
    if others and (args.rates, args.budgets, args.policies, args.plots) != (RATES, BUDGETS, None, None):
        msg = f"{others[0]} plays the settings in force: leave --rates, --budgets, --policies and --plots out"
        raise ConfigError(msg)
    if args.days is not None and not args.days > 0:
        msg = f"--days takes a number above 0, not {args.days:g}"
        raise ConfigError(msg)


def _policies(names: str, config: Config) -> list[Policy]:
    from msgspec.structs import replace

    from ..daemon.prediction import policy_of

    try:
        return [policy_of(replace(config.policy, name=name)) for name in names.split(",")]
    except ValueError as e:
        msg = f"--policies: {e}"
        raise ConfigError(msg) from e


def _ms(model: WhatIf, cells: Sequence[WhatIfPoint]) -> float:
    """Return the time of one setting once all is fitted, ms: the shortest, least disturbed by other work."""
    took = []
    for cell in cells[:20]:
        began = time.perf_counter()
        model.predict(cell.usd_per_kwh, cell.budget)
        took.append(time.perf_counter() - began)
    return round(1e3 * min(took), 3)


def _numbers(text: str, option: str, in_force: float) -> list[float]:
    """Return the numbers asked for and the one in force, ascending."""
    try:
        numbers = {float(word) for word in text.split(",")}
    except ValueError as e:
        msg = f"{option} takes numbers with commas between them: {e}"
        raise ConfigError(msg) from e
    most = 1.0 if option == "--budgets" else float("inf")
    if wrong := [x for x in numbers if not (0 <= x <= most and x < float("inf"))]:
        msg = f"{option} takes numbers from 0{' to 1' if most == 1 else ' on'}, not {wrong[0]:g}"
        raise ConfigError(msg)
    return sorted(numbers | {in_force})


def _path(args: argparse.Namespace, config: Config) -> Path:
    from ..config.layers import data_path

    named = args.path or config.history.path
    path = Path(named).expanduser() if named else data_path() / "history.sqlite"
    if not path.is_file():
        msg = f"there is no history at {path}: the daemon writes one (`disco up`), or name the file with --path"
        raise ConfigError(msg)
    return path
