"""`disco setup`: take the first steps. It asks at a terminal, and asks nothing where flags are given."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import progress

if TYPE_CHECKING:
    from ...config.schema import Config
    from ...onboarding.checking import Checked
    from ...onboarding.saving import Choice
    from ...onboarding.setup import Onboarding

MAX_KEY_FILE = 65536  # characters; a key has about a hundred
USAGE = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "setup", help="first steps: a server with its key and model, a local model", description=__doc__
    )
    parser.add_argument("--server", metavar="NAME", help="openai, openrouter, … or a URL; none takes the server away")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", help="beside the others: add, change or (--server none) remove that one"
    )
    parser.add_argument("--model", help="the model's name at the server")
    parser.add_argument("--key-file", metavar="FILE", help="a file with the API key (- = stdin); it is copied")
    parser.add_argument("--no-test", action="store_true", help="do not ask the server anything")
    parser.add_argument("--local", metavar="NAME", help="this machine's model: default, a name or a GGUF file")
    parser.add_argument("--service", action="store_true", help="start disco at each login, too")
    parser.add_argument("--json", action="store_true", help="print what was found and saved as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, test and save; before it saves it changes nothing."""
    from ...config.layers import config_path, load
    from ...onboarding.setup import Onboarding

    if (wrong := _wrong_usage(args)) is not None:
        print(f"disco setup: {wrong}", file=sys.stderr)
        return USAGE
    path = config_path()
    setup = Onboarding(path, os.environ, load(path).api.port)
    if args.server is not None or args.local is not None:
        return _by_flags(args, setup)
    from .dialog import Dialog

    dialog = Dialog(setup, offers=_offers(setup), fetch=_fetch)
    try:
        choice, checked = dialog.run()
    except (KeyboardInterrupt, EOFError):
        print("\nNothing was changed.", file=sys.stderr)
        return 130
    _save(setup, choice, checked, as_json=False)
    try:
        wanted = args.service or (_could_serve() and dialog.service())
    except (KeyboardInterrupt, EOFError):
        print()
        return 0
    return _serve() if wanted else 0


def _offers(setup: Onboarding) -> Callable[[], dict[str, Any]] | None:
    """Return what finds models that suit this machine; None where it has a model of its own already."""
    from ...machines.device_settings import has_stand_in
    from ..models_offer import recommended

    return (lambda: recommended().to_json()) if has_stand_in(setup.config().device) else None


def _fetch(chosen: dict[str, Any]) -> str:
    """Fetch an offered model with its progress shown; return its path. Raises PullError or ConfigError."""
    from ...models.default import models_dir
    from ...models.hub import pull
    from ...models.progress import ProgressBar
    from ..models_offer import chosen_spec

    bar, (spec, pin) = ProgressBar(sys.stderr), chosen_spec(chosen)
    try:
        return str(pull(spec, models_dir(), progress, bar, pin=pin))
    finally:
        bar.end()


def _wrong_usage(args: argparse.Namespace) -> str | None:
    of_server = [flag for flag, value in (("--model", args.model), ("--key-file", args.key_file)) if value]
    if args.name is not None and args.server is None:
        return "--as is for a server: give --server, too"
    if args.server in (None, "none") and of_server:
        return f"{of_server[0]} is for a server: give --server, too"
    if args.server not in (None, "none") and not args.model:
        return "--server needs --model, too; without any flag, at a terminal, the models are listed"
    if args.service and args.json:
        return "--service prints no JSON: `disco service install` does it apart"
    if args.server is None and args.local is None and (args.json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        return "this is no terminal: give --server NAME --model NAME --key-file FILE, or --local NAME"
    return None


# --- by flags ---------------------------------------------------------------------------------------------------------


def _by_flags(args: argparse.Namespace, setup: Onboarding) -> int:
    from ...errors import ConfigError
    from ...models.default import default_model_path, fetch_default_model
    from ...onboarding.saving import Choice, local_model

    local = None if args.local is None else local_model(args.local)
    choice, checked = Choice(local=local), None
    if args.server == "none":
        choice = Choice("", local=local, name=args.name or "")
    elif args.server is not None:
        base_url = setup.address(args.server)
        name = args.name or ""
        key = setup.key(base_url, "" if args.key_file is None else _read_key(args.key_file), name)
        setup.plan(Choice(base_url, args.model, key, local, name))  # what cannot be written is not asked
        if args.no_test:
            _require(setup, base_url, key.value)
        else:
            checked = setup.check(base_url, key, args.model, name)
            if checked.problem is not None:
                _print_refusal(checked, as_json=args.json)
                return 1
        choice = Choice(base_url, args.model, key, local, name)
    if local == "":
        setup.plan(choice)  # what cannot be used is not fetched
        if setup.private() and not default_model_path().exists():
            raise ConfigError("nobody is asked for a model, policy.private is on: `disco models fetch --online` does")
        fetch_default_model(progress)
    _save(setup, choice, checked, as_json=args.json)
    return _serve() if args.service else 0


def _could_serve() -> bool:
    """Whether a service manager is here, and does not start disco yet."""
    from ...service.managers import ServiceError, of_this_machine

    try:
        manager = of_this_machine()
        return manager.answers() and not manager.status().installed
    except ServiceError:
        return False


def _serve() -> int:
    from ...service.managers import of_this_machine
    from ..service import install

    return install(of_this_machine())


def _read_key(name: str) -> str:
    """Return the key in a file, or on standard input. Raises ConfigError."""
    from ...errors import ConfigError

    try:
        if name == "-":
            text = sys.stdin.read(MAX_KEY_FILE)
        else:
            with Path(name).expanduser().open(encoding="utf-8") as f:
                text = f.read(MAX_KEY_FILE)
    except (OSError, UnicodeDecodeError) as e:
        msg = f"--key-file {name} cannot be read: {getattr(e, 'strerror', None) or 'it is no text file'}"
        raise ConfigError(msg) from e
    if not text.strip():
        msg = f"--key-file {name} is empty"
        raise ConfigError(msg)
    return text.strip()


def _require(setup: Onboarding, base_url: str, key: str) -> None:
    """Raise ConfigError for an address or a key that cannot be right."""
    from ...errors import ConfigError

    if (problem := setup.problem(base_url, key)) is not None:
        msg = f"{problem.text}: {problem.mend}"
        raise ConfigError(msg)


# --- output -----------------------------------------------------------------------------------------------------------


def _print_refusal(checked: Checked, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"saved": None, "check": checked.to_json()}))
    else:
        print(
            "\n".join([*(f"disco setup: {line}" for line in checked.sentences()), "Nothing was changed."]),
            file=sys.stderr,
        )


def _save(setup: Onboarding, choice: Choice, checked: Checked | None, *, as_json: bool) -> None:
    """Write the choice down, and print what was written and what comes next. Raises ConfigError."""
    from ...onboarding.saving import SavedChoice, overriding_variables

    saved = setup.save(choice) if choice.base_url is not None or choice.local is not None else SavedChoice()
    changes = saved.changes
    hidden = overriding_variables(changes, setup.env)
    following = reload_running(setup.config())
    running = bool(following)
    following = following or "`disco up` starts the daemon, `disco tui` the UI."
    if as_json:
        shown: dict[str, Any] = {
            "saved": changes, "config": str(setup.path), "check": None if checked is None else checked.to_json(),
            "notes": saved.notes(), "shadowed": hidden, "daemon_runs": running, "next": following,
        }  # fmt: skip
        print(json.dumps(shown))
        return
    lines = [] if checked is None else checked.sentences()
    if not changes:
        print("\n".join([*lines, "Nothing was changed."]))
        return
    lines.append(f"Saved in {setup.path}.")
    if file := (saved.entry or {}).get("api_key_file") or changes.get("server.api_key_file"):
        lines.append(f"The key is in {file}, for you alone.")
    lines += saved.notes()
    lines += [f"But the variable {name} is set, and goes before it." for name in hidden]
    print("\n".join([*lines, following]))


def reload_running(config: Config) -> str:
    """Reload the daemon that runs, if one does; return a sentence on the result, "" where none runs."""
    from ...client import once as client

    root, key = client.daemon_at(None, config)
    if not _daemon_runs(root, key):
        return ""
    try:
        client.reload(root, key)
    except client.DaemonError as e:
        return f"The running daemon has not taken it up ({e}): restart it."
    return "The running daemon goes by it from now on."


def _daemon_runs(root: str, key: str) -> bool:
    from ...client import once as client

    try:
        client.get(root, "/disco/v1/state", key, timeout_s=2.0)
    except client.DaemonError as e:
        return e.code not in (client.NOT_RUNNING, client.NOT_OURS)
    except ValueError:  # another program's JSON, or none
        return False
    return True
