"""`disco keys`: give others keys of their own, each with a name, and with what it may.

A key with a name opens what editors and agents need, and nothing else: no settings, no history. It can have caps in
dollars, a rate and models of its own, and what it asks can be kept on this machine. `disco usage` says what it used.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from ..plain import count_of

if TYPE_CHECKING:
    from ..keys.key_file import KeyFile

LIMITS = ("usd_per_day", "usd_per_month", "requests_per_minute")
_EACH = "a running daemon goes by it from the next request on"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("keys", help="give others keys of their own, with caps", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser(
        "add",
        help="make a key with a name, and print it once",
        description="Make a key and print it. It is printed this once: only a hash of it is kept. Clients send it as "
        "their API key. Without options it may ask for everything that you may ask for.",
    )
    change = actions.add_parser(
        "change",
        help="give a key other limits",
        description=f"Give a key other limits; what is left out stays, and {_EACH}. `none` takes a limit away.",
    )
    listed = actions.add_parser("list", help="list the keys with names, and what they may")
    revoke = actions.add_parser(
        "revoke",
        help="let a key in no more",
        description="Let a key in no more. Its next request gets 401, and its answers that run end at once, with "
        "that error behind what was delivered. What it has used stays in `disco usage`.",
    )
    for action in (add, change, revoke):
        action.add_argument("name", metavar="NAME", help="of the key, such as anna or ci-bot")
    for action in (add, change):
        action.add_argument("--usd-per-day", type=_amount, metavar="X", help="what servers may bill for it a day, $")
        action.add_argument("--usd-per-month", type=_amount, metavar="X", help="the same a calendar month, $")
        action.add_argument("--requests-per-minute", type=_count, metavar="N", help="how often it may ask")
        action.add_argument(
            "--models",
            type=_patterns,
            metavar="PATTERN,…",
            help="models that it may ask for, * is any text; none = all",
        )
    add.add_argument("--private", action="store_true", help="keep everything that it asks on this machine")
    change.add_argument(
        "--private", action=argparse.BooleanOptionalAction, help="keep everything that it asks on this machine"
    )
    for action, run in ((add, _add), (change, _change), (listed, _list), (revoke, _revoke)):
        action.add_argument("--url", help="daemon to ask (default from the configuration)")
        action.add_argument("--json", action="store_true", help="print one JSON document")
        action.set_defaults(run=run)


def _amount(text: str) -> float | str:
    """Read an amount of dollars; `none` is no limit."""
    if text == "none":
        return text
    if not 0 <= (amount := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("give an amount from 0 on, or none")
    return amount


def _count(text: str) -> int | str:
    """Read a number; `none` is no limit."""
    return text if text == "none" else int(text)


def _patterns(text: str) -> list[str]:
    """Read names and patterns, with commas between them; the word `none` alone is no limit.

    A text without any, such as that of a variable which a script has not set, must not open everything.
    """
    found = [one.strip() for one in text.split(",") if one.strip()]
    if not found:
        raise argparse.ArgumentTypeError("give names or patterns of models, with commas between them, or none for all")
    return [] if found == ["none"] else found


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the terms that were given, as the API has them."""
    given = {name: getattr(args, name) for name in (*LIMITS, "models", "private")}
    return {name: None if value == "none" else value for name, value in given.items() if value is not None}


def _file() -> KeyFile:
    from ..config.layers import config_path
    from ..keys.key_file import KeyFile

    return KeyFile(config_path())


def _asked(args: argparse.Namespace, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the running daemon, by a route below /disco/v1; None where none runs here. Raises DaemonError."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    try:
        if body is None:
            return client.get(root, f"/disco/v1/{path}", key)
        return client.post(root, f"/disco/v1/{path}", body, key)
    except client.DaemonError as e:
        if args.url or e.code != client.NOT_RUNNING:
            raise
        return None


def _add(args: argparse.Namespace) -> int:
    """Make a key, by the daemon or in its file, and print it."""
    from ..client.key_words import may_words
    from ..keys.named_key import terms_of

    given = _given(args)
    made = _asked(args, "keys", given | {"name": args.name})
    if made is None:
        keys, text = _file().add(args.name, terms_of(given), time.time())
        made = keys[-1].document() | {"key": text}
    if args.json:
        print(json.dumps(made))
        return 0
    print(made["key"])
    print(f"This is the key of {args.name}, shown this once; as an API key it opens {may_words(made)}.")
    return 0


def _change(args: argparse.Namespace) -> int:
    """Give a key other terms."""
    from ..client.key_words import may_words
    from ..errors import ConfigError

    if not (given := _given(args)):
        raise ConfigError(f"say what `{args.name}` may from now on, such as --usd-per-day 2")
    changed = _asked(args, "keys/change", given | {"name": args.name})
    if changed is None:
        changed = next(key.document() for key in _file().change(args.name, given) if key.name == args.name)
    print(json.dumps(changed) if args.json else f"{args.name} opens {may_words(changed)} from now on.")
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print the keys, and what each may and has spent."""
    from ..client.key_words import may_words, spent_words

    found = _asked(args, "keys")
    if found is None:
        unknown = {"usd_today": None, "usd_this_month": None}
        found = {"data": [key.document() | unknown for key in _file().read()]}
    if args.json:
        print(json.dumps(found["data"]))
    elif not found["data"]:
        print("There are no keys with names; `disco keys add NAME` makes one.")
    for key in () if args.json else found["data"]:
        spent = spent_words(key)
        print(f"{key['name']}  {may_words(key)}{spent and f'  ({spent})'}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    """Forget a key; what runs for it ends."""
    found = _asked(args, "keys/revoke", {"name": args.name})
    if found is None:
        _file().revoke(args.name)
        found = {"revoked": args.name, "ended": 0}
    ended = f"; {count_of(found['ended'], 'request')} of it ran, and ended" if found["ended"] else ""
    print(json.dumps(found) if args.json else f"{args.name} gets no answer from now on{ended}.")
    return 0
