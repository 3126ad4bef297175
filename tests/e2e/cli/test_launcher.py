"""The launcher of the single binary, with shell scripts for programs: what it unpacks, starts, keeps and removes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from binary import pack

pytest.importorskip("lz4", reason="lz4 packs what the launcher unpacks: pip install lz4")
if shutil.which(os.environ.get("CC") or "cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)

MODEL = bytes(range(256)) * 2000
PATIENCE_S = 60.0
SAYS = '#!/bin/sh\necho "$#:$*"\necho "$DISCO_EXECUTABLE"\nexit 7\n'
WAITS = '#!/bin/sh\necho "$$"\nread line\necho "${0%/*}" && ls "${0%/*}"\n'


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launcher")


@pytest.fixture(scope="module")
def made(workshop: Path) -> Callable[..., Path]:
    """Builds a binary out of a program's text and other files, once for each."""
    done: dict[str, Path] = {}

    def make(name: str, program: str, files: dict[str, bytes] | None = None) -> Path:
        if name not in done:
            folder = workshop / name
            for path, content in {"disco": program.encode(), **(files or {})}.items():
                (folder / "program" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "program" / path).write_bytes(content)
            (folder / "program" / "disco").chmod(0o755)
            (folder / "model").write_bytes(MODEL)
            pack.pack(folder / "program", folder / pack.PROGRAM, f"1.{name}")
            done[name] = folder / "disco"
            pack.link(folder, folder / "model", done[name], "-Wall", "-Wextra", "-Wpedantic", "-Werror")
        return done[name]

    return make


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def start(binary: Path, home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it with that home and nothing else in its environment but a path to the shell's tools."""
    return subprocess.run(
        [str(binary), *words], env={"HOME": str(home), "PATH": os.environ["PATH"]} | env, capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def versions(home: Path) -> list[str]:
    """What is unpacked below a home."""
    return sorted(path.name for folder in home.rglob("disco/program") for path in folder.iterdir() if path.is_dir())


def test_it_becomes_the_program_with_its_words_and_exit_code(made: Callable[..., Path], home: Path) -> None:
    binary = made("says", SAYS)
    done = start(binary, home, "one", "two three", "")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"3:one two three \n{binary}\n"
    assert [name.startswith("1.says-") for name in versions(home)] == [True]


def test_the_process_is_the_one_that_was_started(made: Callable[..., Path], home: Path) -> None:
    with waiting(made("waits", WAITS), home) as (process, told):
        assert told == str(process.pid)


def test_it_is_unpacked_once(made: Callable[..., Path], home: Path) -> None:
    binary = made("says", SAYS)
    start(binary, home)
    [folder] = [path.parent for path in home.rglob("disco/program/*/disco")]
    (folder / "mark").touch()
    start(binary, home)
    assert (folder / "mark").exists()


def test_what_was_removed_by_hand_is_unpacked_again(made: Callable[..., Path], home: Path) -> None:
    binary = made("says", SAYS)
    start(binary, home)
    for program in home.rglob("disco/program/*/disco"):
        program.unlink()
    assert start(binary, home).returncode == 7


def contents() -> dict[str, bytes]:
    """Files that are hard to compress, easy, empty, repeated, and links."""
    noise = random.Random(1)
    runs = b"".join(bytes([noise.randrange(256)]) * noise.randrange(1, 70_000) for _ in range(40))
    words = b"".join(noise.choice([b"token ", b"answer ", b"\n", b"disco "]) for _ in range(50_000))
    far = noise.randbytes(70_000)  # repeats farther back than an LZ4 offset reaches
    return {
        "lib/noise": noise.randbytes(200_000), "lib/zeros": bytes(3_000_000), "lib/runs": runs, "lib/words": words,
        "lib/far": far + far, "empty": b"", "one": b"1", "lib/deep/er/words.1": words, "lib/words.2": words,
    } | {f"short/{n}": noise.choice([b"ab", bytes(n), noise.randbytes(n)]) * n for n in range(1, 60)}  # fmt: skip


def test_every_file_comes_out_as_it_went_in(made: Callable[..., Path], home: Path) -> None:
    files = contents()
    assert start(made("files", SAYS, files), home).returncode == 7
    [folder] = [path.parent for path in home.rglob("disco/program/*/disco")]
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {"disco", *files}
    for name, content in files.items():
        assert (folder / name).read_bytes() == content, name
    assert (folder / "lib/words.2").readlink() == Path("words"), "a copy in the same folder is a link"
    assert not (folder / "lib/deep/er/words.1").is_symlink()
    assert not os.access(folder / "one", os.X_OK)


def test_the_model_comes_out_without_anything_being_unpacked(made: Callable[..., Path], home: Path) -> None:
    done = subprocess.run(
        [str(made("says", SAYS)), "--model-bytes"], env={"HOME": str(home)}, capture_output=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    assert done.stdout == MODEL
    assert versions(home) == []


@contextmanager
def waiting(binary: Path, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program WAITS while it runs, and the first line that it said."""
    pipe = subprocess.PIPE
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}
    process = subprocess.Popen([str(binary)], env=env, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_another_version_removes_the_ones_that_do_not_run(made: Callable[..., Path], home: Path) -> None:
    first, second, third = made("waits", WAITS), made("says", SAYS), made("files", SAYS, contents())
    start(third, home)
    with waiting(first, home) as (process, _):
        start(second, home)
        assert [name.split("-")[0] for name in versions(home)] == ["1.says", "1.waits"], "the one that runs stays"
        out, _ = process.communicate("go on\n", timeout=PATIENCE_S)
        assert out.splitlines()[1:] == ["disco"], "and still has its files"
    start(third, home)
    assert [name.split("-")[0] for name in versions(home)] == ["1.files"]


def test_many_first_starts_at_once_unpack_once(made: Callable[..., Path], home: Path) -> None:
    binary = made("says", SAYS)
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}
    pipe = subprocess.PIPE
    started = [subprocess.Popen([str(binary), "x"], env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(8)]
    said = [process.communicate(timeout=PATIENCE_S) for process in started]
    assert said == [(f"1:x\n{binary}\n", "")] * 8
    assert len(versions(home)) == 1


def test_an_unpacking_that_was_killed_leaves_nothing_that_counts(made: Callable[..., Path], home: Path) -> None:
    binary = made("files", SAYS, contents())
    process = subprocess.Popen([str(binary)], env={"HOME": str(home), "PATH": os.environ["PATH"]})
    until = time.monotonic() + PATIENCE_S
    while not versions(home) and process.poll() is None and time.monotonic() < until:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert start(binary, home).returncode == 7
    assert len(versions(home)) == 1


@pytest.mark.parametrize("spoil", ["packed", "head"])
def test_a_damaged_file_says_so_and_leaves_nothing(made: Callable[..., Path], home: Path, spoil: str) -> None:
    binary = made("files", SAYS, contents())
    whole = binary.read_bytes()
    packed = (binary.parent / pack.PROGRAM).read_bytes()
    at = whole.index(packed)
    wrong = at + (2 if spoil == "head" else len(packed) // 2)
    bad = home / "bad"
    bad.write_bytes(whole[:wrong] + bytes([whole[wrong] ^ 0xFF]) + whole[wrong + 1 :])
    bad.chmod(0o755)
    done = start(bad, home)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "disco: this file is damaged or not whole: get it again\n"
    assert versions(home) == []


def test_it_says_what_to_do_where_it_cannot_write(made: Callable[..., Path], home: Path) -> None:
    (home / ".local").write_text("a file where the folder should be")
    (home / "Library").write_text("the same on macOS")
    done = start(made("says", SAYS), home)
    assert done.returncode == 1
    assert "cannot make the folder" in done.stderr
    assert "XDG_DATA_HOME" in done.stderr


def test_it_unpacks_where_the_user_wants_it(made: Callable[..., Path], home: Path, tmp_path: Path) -> None:
    assert start(made("says", SAYS), home, XDG_DATA_HOME=str(tmp_path / "elsewhere")).returncode == 7
    assert len(versions(tmp_path / "elsewhere")) == 1
    assert list(home.iterdir()) == []
