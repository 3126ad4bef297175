"""`disco launch AGENT`: start a coding agent, an editor or Open WebUI that asks disco, for this run only.

What it needs is set by variables, flags and generated files of disco's own: the program's own settings stay as they
are.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..onboarding.agents import AGENTS
from ..plain import which
from .arguments import Parser
from .terminal import agrees, progress

if TYPE_CHECKING:
    from pathlib import Path

    from ..client.launcher import DaemonLauncher
    from ..config.schema import Config
    from ..onboarding.agents import Agent, AgentRun, AgentTarget

NOT_ALLOWED, NOT_FOUND = 126, 127  # what a shell returns for a program that it cannot run, or cannot find
CONTROL_KEY = "DISCO_API_CONTROL_KEY"  # for nobody else, and an agent's model may run any command
HIDDEN = "(api.key)"  # in place of the key in what is shown


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("launch", help="start a coding agent that asks disco", description=__doc__)
    if isinstance(parser, Parser):
        parser.passes_on = "arguments"
    parser.add_argument("agent", metavar="AGENT", help=f"one of {', '.join(AGENTS)}")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="behind `--`: what the program itself gets")
    parser.add_argument("--model", default="disco", help="disco (decide), disco/device, disco/server, or another name")
    parser.add_argument("--print", action="store_true", dest="show", help="show what would be set, and start nothing")
    parser.add_argument("--anyway", action="store_true", help="start it even if the model lacks what it needs")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--no-start", action="store_true", help="start no daemon where none runs")
    parser.add_argument("--json", action="store_true", help="with --print: print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look whether the daemon and its model will do, and become the program; its exit status is then its own."""
    import asyncio

    from ..client import once as client
    from ..client.launcher import DaemonLauncher
    from ..config.layers import data_path, load

    if args.agent not in AGENTS:
        print(f"disco launch: there is no agent {args.agent}: {which(args.agent, AGENTS)}", file=sys.stderr)
        return 2
    agent, config = AGENTS[args.agent], load()
    program = shutil.which(agent.program)
    if program is None and not args.show:
        message = f"{agent.title} is not installed (there is no `{agent.program}` in the PATH): {agent.install}"
        print(f"disco: {message}", file=sys.stderr)
        return NOT_FOUND
    root, key = client.daemon_at(args.url, config)
    launcher = DaemonLauncher(root, data_path() / "daemon.log")
    runner = asyncio.Runner()  # never closed where the program takes over: that would end the daemon
    started = False
    try:
        may_start = args.url is None and not (args.no_start or args.show or agent.leaves)
        models = runner.run(_models(launcher, root, key, agent, may_start=may_start))
        card = _card(models, args.model)
        if (lacking := agent.lacks(card)) and not (args.anyway or args.show):
            print(_refusal(agent, card, lacking, config), file=sys.stderr)
            return 1
        own_key = config.api.key if key else ""  # not the key for controls
        setup, target = _setup(agent, card, models, root, HIDDEN if own_key and args.show else own_key)
        if args.show:
            _show(args, agent, setup, target, lacking)
            return 0
        _write(setup, target)
        started = True
    finally:
        if not started:
            runner.run(launcher.close())
            runner.close()
    assert program is not None
    launcher.hand_over()
    return _become(program, [agent.program, *setup.arguments, *args.arguments], _environment(setup))


async def _models(launcher: DaemonLauncher, root: str, key: str, agent: Agent, *, may_start: bool) -> dict[str, Any]:
    """Return the document of /v1/models, once the device's model is known. Raises DaemonError."""
    import asyncio

    from ..client import once as client
    from ..client.launcher import have_daemon

    if may_start:
        await have_daemon(launcher, root, key, f"ends with {agent.title}", progress, settled=True)
    try:
        found: dict[str, Any] = await asyncio.to_thread(client.get, root, "/v1/models", key)
    except client.DaemonError as e:
        if e.code == client.NOT_RUNNING and agent.leaves:
            message = f"{e}; or `disco service install`, which starts one at each login"
            raise client.DaemonError(message, e.code) from e
        raise
    return found


def _card(models: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the document of one model. Raises ConfigError for a name that the daemon does not have."""
    from ..errors import ConfigError

    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in models["data"]}
    if name not in cards:
        msg = f"the daemon has no model {name}: {which(name, cards)}"
        raise ConfigError(msg)
    return cards[name]


# --- what lacks -------------------------------------------------------------------------------------------------------


def _refusal(agent: Agent, card: dict[str, Any], lacking: list[str], config: Config) -> str:
    """Return why an agent would get nowhere with a model, and what to do."""
    lines = [f"disco: {agent.title} cannot work with {card['id']}: {', and '.join(lacking)}."]
    if 0 < config.device.n_ctx < agent.context:
        lines.append(f"`disco config set device.n_ctx {agent.context}` lets a longer context be.")
    if better := _better(agent, config):
        lines.append(f"`disco models pull {better.name} --use` gets one that can and fits: {better.title}.")
    lines.append("`disco setup` adds a server that can. --anyway starts it all the same.")
    return "\n".join(lines)


def _better(agent: Agent, config: Config) -> Any:
    """Return the model of the list that fits with the context that an agent needs; None where none does."""
    import asyncio

    from ..config.layers import config_path, with_values
    from ..machines.model_offers import recommendation
    from ..models.offered import offered_models

    listed = offered_models(config_path().parent)
    able = (model for model in listed if model.tools or not agent.tools)
    roomy = tuple(model for model in able if model.context >= agent.context)
    if not roomy:
        return None
    wanted = with_values(config, {"device.n_ctx": agent.context})
    found = asyncio.run(recommendation(wanted, roomy, may_measure=lambda: False))
    return found.models[0].model if found.models else None


# --- what is set ------------------------------------------------------------------------------------------------------


def _setup(
    agent: Agent, card: dict[str, Any], models: dict[str, Any], root: str, key: str
) -> tuple[AgentRun, AgentTarget]:
    from ..config.layers import data_path
    from ..onboarding.agents import AgentTarget

    folder = str(data_path() / "launch" / agent.name)
    target = AgentTarget(root, key, card["id"], card.get("context_length"), folder, models, _no_proxy(root))
    setup = agent.run(target)
    return replace(setup, env={**target.direct, **setup.env}), target


def _no_proxy(root: str) -> str:
    """Return the hosts that are asked without a proxy: the shell's, and the daemon's where that is on this machine.

    A proxy would get each turn and the key, and could seldom reach the daemon. Few programs spare loopback.
    """
    from ..system.net import hostname, is_loopback

    if not is_loopback(host := hostname(root)):
        return ""
    theirs = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}".split(",")
    return ",".join(dict.fromkeys(name for word in (*theirs, host) if (name := word.strip())))


def _show(args: argparse.Namespace, agent: Agent, setup: AgentRun, target: AgentTarget, lacking: list[str]) -> None:
    """Print what would be set, as lines for a shell or as JSON."""
    files = {f"{target.folder}/{name}": json.dumps(content) for name, content in setup.files.items()}
    command = [agent.program, *setup.arguments, *args.arguments]
    env = dict(setup.env)
    if args.json:
        print(json.dumps({"agent": agent.name, "command": command, "env": env, "files": files, "lacks": lacking}))
        return
    for path, text in files.items():
        print(f"# {path}\n{text}")
    for name, value in env.items():
        print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    print(shlex.join(command))
    if lacking:
        progress(f"{agent.title} would get nowhere with {target.model}: {', and '.join(lacking)}")


def _write(setup: AgentRun, target: AgentTarget) -> None:
    """Write the generated files, which only their owner can read. Raises ConfigError."""
    from pathlib import Path

    from ..config.layers import write_private
    from ..errors import ConfigError
    from ..plain import reason_of

    try:
        for name, content in setup.files.items():
            path = Path(target.folder) / name
            if (settings := _with_theirs(path, content) if setup.merged else content) is not None:
                write_private(path, json.dumps(settings, indent=2))
    except OSError as e:
        msg = f"{target.folder} cannot be written: {reason_of(e)}"
        raise ConfigError(msg) from e


def _with_theirs(path: Path, ours: dict[str, Any]) -> dict[str, Any] | None:
    """Return settings with those that the user has made there; None to leave the file as it is. Raises OSError."""
    from ..onboarding.agents import merged
    from ..system.smallfile import open_regular

    try:
        with open_regular(path) as f:
            theirs = json.loads(f.read())
    except FileNotFoundError:
        return ours
    except ValueError:  # comments, mostly
        return ours if agrees(f"{path} cannot be read as JSON. Write it anew?") else None
    return merged(ours, theirs) if isinstance(theirs, dict) else ours


def _environment(setup: AgentRun) -> dict[str, str]:
    """Return the variables of the program: those of this process but the key for controls, and what is set for it."""
    changed: dict[str, str | None] = {**os.environ, CONTROL_KEY: None, **setup.env}
    return {name: value for name, value in changed.items() if value is not None}


def _become(program: str, argv: list[str], env: dict[str, str]) -> int:
    """Put the program in the place of this process, with the signals as a shell would have them; return if that fails.

    Its exit status and the signals that it gets are its own then.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, argv, env)  # noqa: S606 - a program of the user's own PATH, and no shell
    except OSError as e:
        print(f"disco: {program} cannot be started: {e.strerror}", file=sys.stderr)
        return NOT_ALLOWED
