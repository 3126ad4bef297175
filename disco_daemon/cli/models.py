"""`disco models`: list the models on this machine, fetch the default one."""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "models",
        help="list the models on this machine, fetch the default one",
        description="List the models on this machine; `disco models fetch` fetches the default one.",
    )
    parser.add_argument("action", nargs="?", choices=["list", "fetch"], default="list", help="default: list")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List or fetch."""
    import json

    from disco_daemon.models import fetch_default_model, installed_models, models_dir

    if args.action == "fetch":
        path = fetch_default_model(lambda line: print(line, file=sys.stderr, flush=True))
        print(json.dumps({"path": str(path), "size_bytes": path.stat().st_size}) if args.json else path)
        return 0

    models = installed_models()
    if args.json:
        print(json.dumps({"folder": str(models_dir()), "models": models}))
    elif not models:
        print(f"no models in {models_dir()}: `disco models fetch` gets the default one")
    for model in [] if args.json else models:
        print(f"{model['name']}  {model['size_bytes'] / 1e6:.0f} MB{'  (default)' if model['default'] else ''}")
    return 0
