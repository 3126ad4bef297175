"""Whether a test notices when a line of the wiring is broken: `python -m benchmarks.faults.mutants`.

Each mutant of benchmarks/faults/mutants.toml breaks one line of the daemon's assembly or of the engine's doors, in a
copy of the tree, and the one test that is named beside it is run there: it has to fail. First all named tests are run
in the copy as it is: a test that fails anyway catches nothing. A line that is not found, or found more than once, is an
error, so that the table cannot rot.

Tests run in forks of this process, which has imported what takes longest; what they start finds the copy by PYTHONPATH.
Exit code 1: a mutant was not caught.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("disco_daemon", "tui", "tests", "benchmarks", "profiles", "docs", "pyproject.toml")
PRELOADED = ("pytest", "aiohttp", "msgspec", "numpy", "llama_cpp")  # no plugins, which pytest has to load
OURS = ("benchmarks", "tests", "disco_daemon", "disco_tui")
LIMIT_S = 300.0  # of one test, on a busy machine
SAID, SHOWN = "pytest.log", 4000  # what the latest tests have said, and how many characters of it are shown
CRASHED = 70  # the exit code of a fork in which pytest has not come to an end
CAUGHT = 1  # pytest's exit code where a test failed


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `file`, `line` (there just once) becomes `becomes`; `what` says what is broken then, `test` has to notice."""

    file: str
    what: str
    line: str
    becomes: str
    test: str


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant: `caught` if its test failed by an assertion or an error of its own."""

    file: str
    what: str
    test: str
    caught: bool
    outcome: str


def mutants() -> list[Mutant]:
    """Return the table."""
    with (Path(__file__).with_name("mutants.toml")).open("rb") as file:
        return [Mutant(**one) for one in tomllib.load(file)["mutant"]]


def broken(mutant: Mutant, source: str) -> str:
    """Return a file's text with the mutant's line replaced. Raises LookupError unless it is there just once."""
    if source.count(mutant.line) != 1:
        msg = (
            f"{mutant.file} has {mutant.line!r} {source.count(mutant.line)} times: mend benchmarks/faults/mutants.toml"
        )
        raise LookupError(msg)
    return source.replace(mutant.line, mutant.becomes)


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        else:
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> int | None:
    """Run tests in a fork, in the tree; return pytest's exit code, None for one that took too long."""
    fork = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, list(tests)))
    fork.start()
    fork.join(LIMIT_S * max(1, len(tests) // 8))
    if fork.exitcode is None:
        fork.kill()
        fork.join()
        return None
    return fork.exitcode


def _pytest(tree: Path, tests: list[str]) -> None:
    """Run pytest in this process, and end it with pytest's exit code; CRASHED if there is none."""
    try:
        os._exit(_pytest_code(tree, tests))
    except BaseException:
        traceback.print_exc()
        os._exit(CRASHED)


def _pytest_code(tree: Path, tests: list[str]) -> int:
    os.chdir(tree)
    said = os.open(SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()
    import pytest

    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(tree), *tests]))


def judge(mutant: Mutant, tree: Path) -> Result:
    """Break the line in the tree, run the test, and mend it again."""
    path = tree / mutant.file
    source = path.read_text("utf-8")
    cached = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(broken(mutant, source), "utf-8")
        cached.unlink(missing_ok=True)
        code = run_tests(tree, [mutant.test])
    finally:
        path.write_text(source, "utf-8")
        cached.unlink(missing_ok=True)
    outcome = {None: "too slow", 0: "passed", CAUGHT: "failed"}.get(code, f"pytest ended with {code}")
    return Result(mutant.file, mutant.what, mutant.test, code == CAUGHT, outcome)


def measure(chosen: Sequence[Mutant]) -> dict[str, object] | None:
    """Judge mutants one after the other; None if a named test fails without any."""
    for mutant in chosen:
        broken(mutant, (ROOT / mutant.file).read_text("utf-8"))
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        if (code := run_tests(tree, sorted({mutant.test for mutant in chosen}))) != 0:
            print((tree / SAID).read_text()[-SHOWN:], file=sys.stderr)
            print(f"a named test fails as it is (pytest ended with {code}): mend that first", file=sys.stderr)
            return None
        found = list[Result]()
        for mutant in chosen:
            found.append(judge(mutant, tree))
            sign = "caught" if found[-1].caught else f"NOT CAUGHT ({found[-1].outcome})"
            print(f"{len(found)}/{len(chosen)} {mutant.file}: {mutant.what}: {sign}", file=sys.stderr, flush=True)
    n_caught = sum(one.caught for one in found)
    return {"mutants": len(found), "caught": n_caught, "list": [asdict(one) for one in found]}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.mutants", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("only", nargs="*", help="parts of names of files or tests: only those mutants")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(
        [one for one in mutants() if not args.only or any(word in f"{one.file} {one.test}" for word in args.only)]
    )
    if figures is None:
        return 1
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['caught']} of {figures['mutants']} mutants were caught, each by its named test")
    return int(figures["caught"] != figures["mutants"])


if __name__ == "__main__":
    sys.exit(main())
