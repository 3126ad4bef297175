"""`disco prices`: what is known of the prices of the servers in use; `disco prices refresh` fetches a newer list.

The list is that of genai-prices (https://github.com/pydantic/genai-prices, MIT). Nothing is asked for without the verb.
What you give in a list of your own, or in the settings, goes before it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plain import count_of, one_line

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..money.catalog import Catalog
    from ..onboarding.price_refresh import Change

MAX_SHOWN = 20  # changes of servers that are not in use; all are counted
MAX_CELL = 200  # characters of a name, which a server may have made up


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("prices", help="show what is known of prices, or refresh it", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    verbs = parser.add_subparsers(metavar="VERB")
    shown = verbs.add_parser("list", help="show what is known of the servers in use (also plain `disco prices`)")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=run)
    refresh = verbs.add_parser("refresh", help="fetch a newer list, and show what it changes")
    refresh.add_argument("--from", dest="file", metavar="FILE", help="a list that you have fetched yourself")
    refresh.add_argument("--list-url", metavar="URL", help="another address of such a list (https)")
    refresh.add_argument("--dry-run", action="store_true", help="show what it would change, and write nothing")
    refresh.add_argument("--online", action="store_true", help="fetch it, although policy.private is on")
    refresh.add_argument("--json", action="store_true", help="print JSON")
    refresh.set_defaults(run=_refresh)


def run(args: argparse.Namespace) -> int:
    """Show the prices of the servers in use."""
    from ..config.layers import config_path, load
    from ..config.pricelist import load as load_prices

    folder = config_path().parent / "servers"
    rows = _rows(load(), load_prices(folder))
    if args.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print("No server is configured: `disco setup` adds one.")
    for row in rows:
        print(_line(row))
    if any(not row["known"] for row in rows):
        print(f"\nWhat is not known counts as the dearest price. `disco prices refresh` fetches a newer list;\n"
              f"or put it into {folder / 'own.toml'} (`disco doctor` shows how).")  # fmt: skip
    return 0


def _rows(config: Config, catalog: Catalog) -> list[dict[str, Any]]:
    """Return a row for each model of each server that the settings name, by the prices that a daemon uses."""
    from ..config.servers import alone, of_model, servers_of
    from ..daemon.money import price_of

    rows = []
    for name, server in servers_of(config).items():
        models = dict.fromkeys(model for model in (server.model, *getattr(server, "models", ())) if model)
        for model in models:
            price = price_of(alone(config, of_model(server, model)), catalog)
            rows.append(
                {
                    "server": name,
                    "model": model,
                    "known": price.known,
                    "input_usd_per_mtok": price.input,
                    "cached_input_usd_per_mtok": price.cached_input,
                    "output_usd_per_mtok": price.output,
                    "source": price.source,
                    "as_of": None if price.as_of is None else price.as_of.isoformat(),
                }
            )
    return rows


def _line(row: dict[str, Any]) -> str:
    name = one_line(f"{row['server']}/{row['model']}", MAX_CELL)
    if not row["known"]:
        return f"{name}: not known"
    amounts = f"${row['input_usd_per_mtok']:g} in, ${row['output_usd_per_mtok']:g} out"
    cached = row["cached_input_usd_per_mtok"]
    if cached != row["input_usd_per_mtok"]:
        amounts += f", ${cached:g} in from its cache"
    day = f", {row['as_of']}" if row["as_of"] else ""
    return f"{name}: {amounts} per million tokens ({one_line(row['source'], MAX_CELL)}{day})"


def _refresh(args: argparse.Namespace) -> int:
    """Fetch a list or read one, show the difference, and write it."""
    from datetime import UTC, datetime

    from ..config.layers import config_path, load
    from ..config.pricelist import FETCHED, fetched_lists
    from ..config.pricelist import load as load_prices
    from ..errors import ConfigError
    from ..onboarding import price_refresh as new_prices
    from ..system.net import without_credentials

    config, folder = load(), config_path().parent / "servers"
    if args.file:
        raw, day = new_prices.read(Path(args.file).expanduser())
        source = f"genai-prices, from {Path(args.file).name}"
    elif config.policy.private and not args.online:
        raise ConfigError("nothing is asked for, policy.private is on: `--online` fetches it, `--from FILE` reads one")
    else:
        url, day = args.list_url or new_prices.URL, datetime.now(UTC).date()
        raw, source = new_prices.fetch(url), without_credentials(url)
    new = new_prices.looked_at(raw, source, day)
    before, kept = load_prices(folder), fetched_lists(folder)
    found, lost = new_prices.changes(before, new), new_prices.gone(kept, new)
    path = folder / FETCHED if args.dry_run else new_prices.keep(folder, new)
    if args.json:
        print(json.dumps(_document(found, lost, path, new.n_models, written=not args.dry_run)))
        return 0
    print(f"{source}, {day}: prices of {new.n_models} models of {count_of(len(new.servers), 'server')}")
    _show(found, lost, _in_use(config, before))
    print(f"Nothing was written to {path}." if args.dry_run else
          f"Written to {path}; a running daemon goes by it after `disco config reload`.")  # fmt: skip
    return 0


def _in_use(config: Config, catalog: Catalog) -> set[str]:
    """Return the names of the price lists of the servers in use."""
    from ..config.servers import servers_of

    found = (catalog.server(server.base_url) for server in servers_of(config).values())
    return {one.name for one in found if one is not None}


def _show(found: list[Change], lost: list[str], in_use: set[str]) -> None:
    changed = sorted((one for one in found if one.before is not None), key=lambda one: one.server not in in_use)
    n_used = sum(one.server in in_use for one in changed)
    for one in changed[: max(n_used, MAX_SHOWN)]:
        print(f"  {one_line(f'{one.server}: {one.model}', MAX_CELL)}: {_amounts(one.before)} -> {_amounts(one.now)}")
    print(f"{len(found) - len(changed)} are new, {len(changed)} have changed, {len(lost)} are gone")


def _amounts(price: Any) -> str:
    cached = "" if price.cached_input == price.input else f" ({price.cached_input:g} cached)"
    return f"${price.input:g}{cached} in, ${price.output:g} out"


def _document(
    found: list[Change], lost: list[str], path: Path, n_models: int, *, written: bool
) -> dict[str, Any]:  # fmt: skip
    def amounts(price: Any) -> list[float] | None:
        return None if price is None else [price.input, price.cached_input, price.output]

    rows = [
        {"server": one.server, "model": one.model, "before": amounts(one.before), "now": amounts(one.now)}
        for one in found
    ]
    return {"models": n_models, "changes": rows, "gone": lost, "path": str(path), "written": written}
