"""What goes wrong outside is said in words of ours: no `[Errno 111]`, no class name, no `ssl:default`, no bare type."""

from __future__ import annotations

import ast
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import aiohttp
import httpx2
import msgspec
import pytest

from disco_daemon.client import once
from disco_daemon.client.stream import Link
from disco_daemon.config.layers import load
from disco_daemon.config.schema import Config, keys
from disco_daemon.errors import ConfigError
from disco_daemon.onboarding.asking import ask_answer, ask_models
from disco_daemon.plain import count_of, in_words, reason_of, which

ROOT = Path(__file__).parents[3]
FOREIGN = {"OSError", "ClientError", "HTTPError", "HTTPException", "ConnectionError"}
# What a person only sees in a log, in a report to us, or hears from another process that has said it in words.
LEFT = {"disco_daemon/fleet_keeper/keeper.py", "disco_daemon/power/nvidia.py", "disco_daemon/engine/worker.py"}


def bare_uses(handler: ast.ExceptHandler) -> list[int]:
    """Return the lines where a handler puts its error into a text as it is."""
    lines = []
    for node in ast.walk(handler):
        if isinstance(node, ast.FormattedValue) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
        ):
            part = node.value if isinstance(node, ast.FormattedValue) else node.args[0] if node.args else node
            if isinstance(part, ast.Name) and part.id == handler.name:
                lines.append(node.lineno)
            if isinstance(part, ast.BoolOp) and isinstance(part.values[0], ast.Name):
                lines += [node.lineno] * (part.values[0].id == handler.name)
    return lines


def test_no_error_of_the_system_or_of_a_library_reaches_a_text_as_it_is() -> None:
    found = []
    for path in sorted(path for folder in ("disco_daemon", "tui") for path in (ROOT / folder).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        if where in LEFT or where.startswith(("disco_daemon/engine/hosts", "disco_daemon/engine/llama")):
            continue  # these processes' own words, which are written to a log
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
                named = {part.id if isinstance(part, ast.Name) else part.attr for part in ast.walk(node.type)
                         if isinstance(part, ast.Name | ast.Attribute)}  # fmt: skip
                if named & FOREIGN:
                    found += [f"{where}:{line}" for line in bare_uses(node)]
    assert not found, f"say it by plain.reason_of: {found}"


def free_port() -> int:
    """Return a port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def no_library_speaks(text: str) -> bool:
    """Whether a text has nothing of a library's words."""
    return not any(word in text for word in ("Errno", "ssl:", "Error", "urlopen", "<", "Connect call"))


async def test_nobody_who_asks_where_nothing_listens_reads_a_number() -> None:
    root = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(once.DaemonError) as caught:
        once.get(root, "/disco/v1/state")
    said = [str(caught.value), ask_models(root, "").problem, ask_answer(root, "", "m").problem]
    async with Link(root, "") as link:
        with pytest.raises(once.DaemonError) as caught:
            await link.state()
    said.append(str(caught.value))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as failed:
            await session.get(root)
    said.append(reason_of(failed.value))
    for text in said:
        assert "connection refused: nothing listens there" in text
        assert no_library_speaks(text)


def timed_out(_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (lambda: socket.getaddrinfo("disco.invalid", 80), "its name cannot be looked up"),
        (lambda: Path("/nowhere/at/all").read_text("utf-8"), "there is no such file"),
        (lambda: Path("/").read_text("utf-8"), "is a directory"),
        (lambda: urllib.request.urlopen(f"http://127.0.0.1:{free_port()}"), "connection refused"),
        (lambda: httpx2.get(f"http://127.0.0.1:{free_port()}"), "connection refused"),
        (lambda: timed_out(0), "no answer in time"),
    ],
)
def test_an_error_of_the_system_is_a_clause(fails: Callable[[], object], says: str) -> None:
    with pytest.raises((OSError, httpx2.HTTPError, urllib.error.URLError)) as caught:
        fails()
    assert reason_of(caught.value).startswith(says)
    assert no_library_speaks(reason_of(caught.value))


def test_a_message_of_ours_stays_as_it_is() -> None:
    assert reason_of(ConfigError("the file is not yours")) == "the file is not yours"
    assert reason_of(ValueError()) == "ValueError"


@pytest.mark.parametrize("key", keys())
def test_no_wrong_value_of_any_setting_is_answered_with_types_of_a_library(key: str, tmp_path: Path) -> None:
    """Whatever is wrong with it, in a variable as in the file."""
    section, name = key.split(".")
    path = tmp_path / "config.toml"
    for wrong in ("-1e99", "nan", "no such word", "{x = 1}", "[1, 2]", ""):
        variable = {f"DISCO_{key.replace('.', '_').upper()}": wrong}
        for text, env in (("", variable), (f"[{section}]\n{name} = {wrong or chr(34) * 2}", {})):
            path.write_text(text, "utf-8")
            try:
                load(path, env)
            except ConfigError as e:
                said = str(e)
                assert not any(word in said for word in ("Expected", "`int`", "`float", "`str", "enum", "regex")), said


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"fleet": {"policy": "paper"}}, "must be one of measured, not 'paper'"),
        ({"device": {"kv_type": "q80"}}, "must be one of auto, f16, q8_0, not 'q80'; did you mean q8_0?"),
        ({"api": {"aliases": {"a": 1}}}, "must be a text, not a whole number"),
        ({"caps": {"battery_floor": 1.5}}, "must be a number of at most 1"),
    ],
)
def test_what_is_allowed_is_said(document: object, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Config)
    assert in_words(str(caught.value), Config) == says


def test_few_names_are_all_shown_and_of_many_the_nearest() -> None:
    assert which("lapttop", ["laptop", "desktop"]).startswith("did you mean laptop")
    assert which("x", ["laptop", "desktop"]) == "it is one of laptop, desktop"
    many = [f"name-{i}" for i in range(100)]
    assert which("name-77x", many, "GET /names lists all").count("name-") == 3
    assert which("q", many, "GET /names lists all") == "GET /names lists all"
    assert which("q", []) == "there are none"
    assert [count_of(n, "sample") for n in (0, 1, 2, 1234)] == ["0 samples", "1 sample", "2 samples", "1,234 samples"]
