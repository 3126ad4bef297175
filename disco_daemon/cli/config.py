"""`disco config`: show and change settings."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

_OF_SET = """Write one setting into config.toml. A running daemon takes up rate, caps, budget, tail, privacy and
delivery at once; nothing else is changed over its HTTP API. A server with its key is best set by `disco setup`:
server.key_origin names the origin that the key is for, and it is sent nowhere else."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("config", help="show and change settings", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    get = actions.add_parser("get", help="show one setting, or all")
    get.add_argument("key", nargs="?", help="such as server.base_url")
    get.add_argument("--json", action="store_true", help="print JSON")
    get.set_defaults(run=_get)
    put = actions.add_parser("set", help="write one setting into config.toml", description=_OF_SET)
    put.add_argument("key", help="such as server.base_url")
    put.add_argument("value", help="such as 0.5, true or a text; null = no value")
    put.add_argument("--json", action="store_true", help="print JSON")
    put.set_defaults(run=_set)
    again = actions.add_parser("reload", help="have the running daemon read config.toml again; no answer is dropped")
    again.add_argument("--url", help="daemon to ask (default from the configuration)")
    again.add_argument("--json", action="store_true", help="print JSON")
    again.set_defaults(run=_reload)
    path = actions.add_parser("path", help="show where config.toml is")
    path.add_argument("--json", action="store_true", help="print JSON")
    path.set_defaults(run=_path)


def _get(args: argparse.Namespace) -> int:
    from ..config.layers import as_dict, get_value, load
    from ..config.schema import MODELS, SECRET_KEYS, SERVERS

    config = load()
    if args.key is not None:
        value = get_value(config, args.key)
        _print("********" if args.key in SECRET_KEYS and value else value, as_json=args.json)
    elif args.json:
        _print(as_dict(config), as_json=True)
    else:
        shown = as_dict(config)
        for several in (MODELS, SERVERS):
            for one in shown.pop(several, ()):
                print(f"{several}: {json.dumps(one)}")
        for section, values in shown.items():
            for name, value in values.items():
                print(f"{section}.{name} = {json.dumps(value)}")
    return 0


def _set(args: argparse.Namespace) -> int:
    from ..config.layers import config_path, get_value, set_values
    from ..config.schema import FOR_LIFE, LIVE, SECRET_KEYS
    from ..onboarding.before_writing import check_settings, mended, remarks

    path = config_path()
    given = mended(args.key, args.value)
    config = set_values(path, {args.key: given}, lambda found: check_settings(found, [args.key]))
    value = get_value(config, args.key)
    if args.key.startswith("server."):
        _warn_of_key()
    for remark in remarks(config, args.key, value):
        print(f"disco: {remark}", file=sys.stderr)
    shown = "********" if args.key in SECRET_KEYS else value
    taken_up = args.key in LIVE and _reload_daemon(args.key, value)
    if args.json:
        _print({args.key: shown}, as_json=True)
        return 0
    later = "a daemon reads it at its next start"
    if not args.key.startswith(FOR_LIFE):
        later += ", or `disco config reload`"
    when = "the running daemon goes by it from now on" if taken_up else later
    print(f"{args.key} = {json.dumps(shown)} in {path}; {when}")
    return 0


def _warn_of_key() -> None:
    """Warn if the server will be off with these settings, since its key may not go there."""
    from ..config.layers import KeyRefusedError, load, server_api_key
    from ..errors import ConfigError

    try:
        server_api_key(load())
    except KeyRefusedError as e:
        print(f"disco: the server will be off: {e}", file=sys.stderr)
    except ConfigError:  # reported where the key is taken
        pass


def _reload_daemon(key: str, value: Any) -> bool:
    """Reload a running daemon; return whether there is one that goes by the change."""
    from ..client import once as client
    from ..config.layers import load

    root, api_key = client.daemon_at(None, load())
    try:
        client.change(root, {key: value}, api_key)
    except client.DaemonError:
        return False
    return True


def _reload(args: argparse.Namespace) -> int:
    from ..client import once as client
    from ..config.layers import load

    root, api_key = client.daemon_at(args.url, load())
    found = client.reload(root, api_key)
    if args.json:
        _print(found, as_json=True)
        return 0
    print(f"taken up: {', '.join(found['changed']) or 'nothing has changed'}")
    if found["needs_restart"]:
        print(f"only at the next start: {', '.join(found['needs_restart'])}")
    return 0


def _path(args: argparse.Namespace) -> int:
    from ..config.layers import config_path

    _print(str(config_path()), as_json=args.json)
    return 0


def _print(value: Any, *, as_json: bool) -> None:
    print(json.dumps(value) if as_json or not isinstance(value, str) else value)
