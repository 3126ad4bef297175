"""How the program starts itself again, from source and out of the single binary."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from disco_daemon.cli import frozen, service
from disco_daemon.config.schema import DeviceSettings
from disco_daemon.errors import ConfigError
from disco_daemon.machines.device_settings import model_path
from disco_daemon.models import default as models
from disco_daemon.system import program

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("disco_daemon", "tui") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if this were the single binary: a file that writes a model when asked for it."""
    file = tmp_path / "bin" / "disco"
    file.parent.mkdir()
    file.write_text('#!/bin/sh\n[ "$*" = "--model-bytes" ] && printf "GGUF of a model"\n')
    file.chmod(0o755)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/unpacked/disco")
    monkeypatch.setenv(program.EXECUTABLE, str(file))
    return file


def test_a_part_is_run_as_python_does_from_source() -> None:
    part = program.command("disco_daemon.engine.measure.requantize")
    done = subprocess.run(part, capture_output=True, text=True, check=False)
    assert "IndexError" in done.stderr, "its main has run, and was given no socket"
    done = subprocess.run(program.verb("--version"), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("disco ")
    assert program.file() is None


def test_the_binary_runs_its_parts_and_verbs_itself(binary: Path) -> None:
    assert program.command("disco_daemon.engine.worker", "3") == [
        "/unpacked/disco", "-m", "disco_daemon.engine.worker", "3",
    ]  # fmt: skip
    assert program.verb("up", "--json") == ["/unpacked/disco", "up", "--json"]
    assert program.file() == binary


def test_a_service_starts_the_file_that_the_user_has(binary: Path) -> None:
    assert service.own_command() == (str(binary),)
    binary.unlink()
    assert service.own_command() == ("/unpacked/disco",)


def test_every_part_that_is_started_somewhere_is_known() -> None:
    texts = [path.read_text("utf-8") for path in SOURCES]
    started = {
        name
        for text in texts
        for name in re.findall(
            r'(?:(?<!files)\(\s*|\bmodule = )"(disco_daemon\.[\w.]+)"', text, re.IGNORECASE
        )  # whatever starts it
    }
    assert started == set(program.PARTS)


@pytest.mark.parametrize("name", program.PARTS)
def test_every_part_has_a_main_that_needs_no_arguments(name: str) -> None:
    main = importlib.import_module(name).main
    assert all(p.default is not p.empty for p in inspect.signature(main).parameters.values())


def test_nothing_starts_a_python_but_the_one_place_that_knows_how() -> None:
    # Besides, models runs pip, and a unit of the service names the interpreter.
    allowed = {"disco_daemon/system/program.py", "disco_daemon/models/default.py", "disco_daemon/cli/service.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if re.search(r"sys\.executable,\s*\"", path.read_text("utf-8"))
    }
    assert found <= allowed


def test_the_entry_runs_a_part_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []
    part = importlib.import_module("disco_daemon.engine.measure.requantize")
    monkeypatch.setattr(part, "main", lambda: heard.append(sys.argv[1:]))
    monkeypatch.setattr(frozen, "prepare", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["disco", "-m", "disco_daemon.engine.measure.requantize", "from", "to"])
    assert frozen.main() == 0
    assert heard == [["from", "to"]]


@pytest.mark.parametrize("words", [["-m"], ["-m", "os"], ["-m", "disco_daemon.cli.main"]])
def test_the_entry_runs_nothing_else_that_way(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frozen, "prepare", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["disco", *words])
    assert frozen.main() == 2
    assert "parts of this program" in capsys.readouterr().err


def test_the_entry_is_the_command_line_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frozen, "prepare", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["disco", "--version"])
    with pytest.raises(SystemExit) as stop:
        frozen.main()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("disco ")


@pytest.mark.parametrize("original", [None, "/own/lib"])
def test_children_do_not_see_the_boot_loaders_environment(original: str | None) -> None:
    told = {"LD_LIBRARY_PATH": "/unpacked/_internal", "_PYI_ARCHIVE_FILE": "x", "_PYI_PARENT_PROCESS_LEVEL": "1"}
    environ = told | {"HOME": "/home/me", "SSL_CERT_DIR": "/certs"}
    if original is not None:
        environ["LD_LIBRARY_PATH_ORIG"] = original
    frozen.prepare(environ)
    wanted = {"HOME": "/home/me", "SSL_CERT_DIR": "/certs"}
    assert environ == wanted | ({} if original is None else {"LD_LIBRARY_PATH": original})


def test_certificates_are_the_systems_own_and_else_those_that_were_packed(tmp_path: Path) -> None:
    there = tmp_path / "bundle.pem"
    there.touch()
    for environ, bundles, wanted in (
        ({}, ("/nowhere.pem", str(there)), str(there)),
        ({}, ("/nowhere.pem",), str(frozen.OWN_BUNDLE)),
        ({"SSL_CERT_FILE": "/mine.pem"}, (str(there),), "/mine.pem"),
    ):
        found: dict[str, str] = dict(environ)
        frozen.prepare(found, bundles)
        assert found["SSL_CERT_FILE"] == wanted


# --- the model that the binary carries -----------------------------------------------------------------------------


@pytest.fixture
def carried(binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model goes; the one that `binary` carries is the right one."""
    content = b"GGUF of a model"
    monkeypatch.setattr(models, "SIZE", len(content))
    monkeypatch.setattr(models, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models" / models.DEFAULT_MODEL


def test_the_default_model_comes_out_of_the_binary(carried: Path) -> None:
    lines: list[str] = []
    assert models.fetch_default_model(lines.append) == carried
    assert carried.read_bytes() == b"GGUF of a model"
    assert "unpacking" in lines[0]
    models.fetch_default_model(lines.append)
    assert len(lines) == 2, "nothing to do, nothing to say"


def test_the_daemon_takes_it_out_where_none_was_chosen(carried: Path) -> None:
    assert model_path(DeviceSettings()) == carried
    with pytest.raises(ConfigError, match=r"check device\.model"):
        model_path(DeviceSettings(model="/nowhere.gguf"))


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("printf 'GGUF of a wrong one'", "wrong checksum"),
        ("printf 'GGUF of'", "wrong checksum"),
        ("echo 'disco: it broke' >&2; exit 1", "it broke"),
        ("exit 3", "status 3"),
    ],
)
def test_a_damaged_binary_leaves_no_model(carried: Path, binary: Path, does: str, why: str) -> None:
    binary.write_text(f"#!/bin/sh\n{does}\n")
    with pytest.raises(ConfigError, match=f"{re.escape(str(binary))} is damaged .*{why}"):
        models.fetch_default_model(lambda _: None)
    assert list(carried.parent.iterdir()) == []


def test_a_binary_that_is_gone_or_cannot_be_started_says_what_to_do(carried: Path, binary: Path) -> None:
    binary.chmod(0o644)
    with pytest.raises(ConfigError, match="permission denied"):
        models.fetch_default_model(lambda _: None)
    binary.unlink()
    with pytest.raises(ConfigError, match="get that file again, or put"):
        models.fetch_default_model(lambda _: None)
    assert list(carried.parent.iterdir()) == []


def test_a_full_disk_is_no_damage(carried: Path, binary: Path) -> None:
    binary.write_text("#!/bin/sh\necho 'disco: No space left on device' >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"free .* MB there, or set DISCO_MODELS_DIR"):
        models.fetch_default_model(lambda _: None)
