"""What servers, model files and file names say reaches a terminal as plain text, whichever verb prints it."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from disco_daemon.cli import main as cli
from disco_daemon.cli.terminal import direct, make_console, plainly
from disco_daemon.client.once import DaemonError
from disco_daemon.errors import ConfigError
from disco_daemon.plain import plain
from disco_tui.data.banner import Banner
from disco_tui.draw.theme import fit
from tests.fixtures.gguf import model_file
from tests.fixtures.upstream import Upstream

EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b[31m\u202egnp\x9b2J"


def verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every verb and every action of one, as words, with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name, inner
                yield from ((f"{name} {more}", deeper) for more, deeper in verbs(inner))


def least(parser: argparse.ArgumentParser) -> list[str]:
    """As many arguments as a verb must have."""
    one_of = [group._group_actions[0] for group in parser._mutually_exclusive_groups if group.required]
    said: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [*said, *([next(iter(action.choices)), *least(next(iter(action.choices.values())))])]
        value = str(next(iter(action.choices))) if action.choices else "1"
        if action.option_strings:
            if action.required or action in one_of:
                said += [action.option_strings[0]] + [value] * (action.nargs != 0)
        elif action.nargs not in ("?", "*"):
            said.append(value)
    return said


EVERY = dict(verbs(cli.make_parser()))


def test_the_verbs_are_found() -> None:
    assert {"chat", "status", "models list", "doctor", "trace", "setup", "bench relay"} <= {*EVERY}


@pytest.mark.parametrize("verb", EVERY)
def test_no_verb_prints_what_a_terminal_would_obey(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a verb prints, logs or fails with, by any way that Python has."""

    def say(args: argparse.Namespace) -> int:
        del args
        print(EVIL)
        print(EVIL, file=sys.stderr)
        sys.stdout.writelines([EVIL, "\n"])
        make_console(force_terminal=True, color_system="standard", highlight=False).print(f"[bold]{EVIL}[/bold]")
        raise ConfigError(EVIL)

    made = cli.make_parser

    def with_this_verb(*words: str) -> argparse.ArgumentParser:
        parser = made(*words)
        for _, inner in verbs(parser):
            inner.set_defaults(run=say)
        return parser

    monkeypatch.setattr(cli, "make_parser", with_this_verb)
    assert cli.main([*verb.split(), *least(EVERY[verb])]) == 1
    told = capsys.readouterr()
    assert "gnp" in told.out
    assert "disco: " in told.err
    ours = told.out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    for words in (ours, told.err):
        assert plain(words) == words


# --- real verbs, at a real terminal -----------------------------------------------------------------------------------


def at_a_terminal(folder: Path, *argv: str) -> str:
    """What `disco ARGV` writes to its terminal."""
    ours, theirs = pty.openpty()
    env = os.environ | {
        "DISCO_CONFIG": str(folder / "config.toml"), "XDG_DATA_HOME": str(folder), "HOME": str(folder),
        "DISCO_MODELS_DIR": str(folder / "models"), "NO_COLOR": "1", "TERM": "dumb",
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "disco_daemon.cli.main", *argv]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux tells the end of the other side like that
            break
        if not part:
            break
        said += part
    process.wait(60)
    os.close(ours)
    return said.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.fixture
async def stranger(tmp_path: Path) -> Any:
    """What answers like a daemon, and says nothing but bad words."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/disco/v1/state" and "quiet" not in request.query:
            side = {"model": EVIL, "state": EVIL, "last_error": EVIL}
            state = {
                "version": EVIL, "url": EVIL, "uptime_s": 1, "policy": EVIL, "served": 0, "in_flight": 0,
                "loop_lag_ms": {"p99": 0}, "endpoints": {"server": side},
            }  # fmt: skip
            return web.json_response(state)
        return web.json_response({"error": {"message": EVIL, "code": EVIL}}, status=500)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("argv", [("chat", "hello"), ("status",), ("trace",), ("plan",)], ids=lambda a: a[0])
async def test_a_daemon_that_is_none_drives_no_terminal(argv: tuple[str, ...], stranger: str, tmp_path: Path) -> None:
    told = await asyncio.to_thread(at_a_terminal, tmp_path, *argv, "--url", stranger)
    assert "gnp" in told or argv == ("status",)
    assert plain(told) == told


async def test_model_files_and_their_names_drive_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "models" / f"evil-{EVIL}.gguf"
    model_file(path, general__architecture=EVIL, general__name=EVIL)
    for argv in (("models", "list"), ("models", "show", str(path)), ("models", "use", str(path))):
        told = await asyncio.to_thread(at_a_terminal, tmp_path, *argv)
        assert "gnp" in told, argv
        assert plain(told) == told, argv


async def test_setup_and_doctor_show_a_servers_words_plainly(tmp_path: Path) -> None:
    async with Upstream() as upstream:
        with upstream.says_error(EVIL, 400):
            told = await asyncio.to_thread(at_a_terminal, tmp_path, "setup", "--server", upstream.url, "--model", "x")
            assert plain(told) == told
            (tmp_path / "config.toml").write_text(
                f'[server]\nbase_url = "{upstream.url}"\nmodel = {json.dumps("m" + EVIL)}\n'
            )
            told = await asyncio.to_thread(at_a_terminal, tmp_path, "doctor")
            assert "server model" in told
            assert plain(told) == told


# --- where it comes in, and the terminal UI ---------------------------------------------------------------------------


def test_what_a_daemon_says_is_plain_where_it_comes_in() -> None:
    assert plain(str(DaemonError(EVIL))) == str(DaemonError(EVIL))


def test_the_terminal_ui_shows_it_plainly_too() -> None:
    assert plain(Banner(f"in trouble: {EVIL}").text) == Banner(f"in trouble: {EVIL}").text
    assert plain(fit(EVIL)) == fit(EVIL)


def test_what_is_for_the_terminal_itself_goes_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with plainly():
        direct(sys.stdout).write("\x1b[2m")
        sys.stdout.write("\x1b[2m")
    assert out.getvalue() == "\x1b[2m\ufffd[2m"
