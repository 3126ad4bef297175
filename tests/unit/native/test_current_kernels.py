"""Whether llama.cpp is compiled anew (`native/current_kernels.py`), and what an engine with faulty kernels does."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from disco_daemon.engine.llama import build_features, library
from disco_daemon.engine.llama.model import PREFILL_ROWS, AbortFlag, Llama
from disco_daemon.engine.wire import Load
from disco_daemon.models.default import default_model_path
from tests.unit.native.test_llama_build import CI, compiled

SCRIPT = CI / "current_kernels.py"
LIMIT_S = 60.0
NEEDS_HASHES = ["--no-deps", "-r", "some.lock"]


@pytest.fixture(scope="module")
def script() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("current_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with a library of kernels that has these versions."""

    def make(**versions: int) -> Path:
        folder = tmp_path_factory.mktemp("build")
        told = "".join(f"DISCO_TOLD({name}, {version})\n" for name, version in versions.items())
        compiled(folder, f'#include "{CI / "told.h"}"\n{told}')
        (folder / "made.so").rename(folder / "libggml-cpu.so")
        return folder

    return make


def test_the_sources_tell_the_versions_that_are_wanted_and_what_is_installed_has_them(script: Any) -> None:
    versions = script.wanted()
    assert versions["disco_products"] > build_features.WRONG_PRODUCTS
    assert set(versions) == {build_features.PRODUCTS, build_features.EXACT_ATTENTION, build_features.MASKED_CELLS}
    found = {name: build_features._marked(library.kernels(), name) for name in versions}
    assert {name: version for name, version in found.items() if version not in (0, versions[name])} == {}
    assert not list(script.old(script.installed(), versions))


@pytest.mark.parametrize(
    ("versions", "old"),
    [
        ({}, []),  # llama.cpp as it comes
        ({"disco_products": 0, "disco_exact_attention": 0, "disco_masked_cells": 1}, []),  # another processor
        ({"disco_products": 2, "disco_exact_attention": 2}, []),
        ({"disco_products": 3, "disco_exact_attention": 2}, []),  # a checkout that went back
        ({"disco_products": 1, "disco_exact_attention": 2}, ["disco_products 1, not 2"]),
        ({"disco_products": 2, "disco_exact_attention": 1}, ["disco_exact_attention 1, not 2"]),
        ({"disco_products": 1, "disco_exact_attention": 0}, ["disco_products 1, not 2"]),
    ],
)
def test_a_build_is_old_where_one_version_is_lower(
    script: Any, build: Callable[..., Path], versions: dict[str, int], old: list[str]
) -> None:
    wanted = {"disco_products": 2, "disco_exact_attention": 2, "disco_masked_cells": 1}
    assert list(script.old(build(**versions), wanted)) == old


def test_of_several_libraries_one_that_is_old_is_enough_and_one_that_cannot_be_loaded_is_left(
    script: Any, build: Callable[..., Path]
) -> None:
    folder = build(disco_products=2)
    shutil.copy(build(disco_products=1) / "libggml-cpu.so", folder / "libggml-cpu-zen4.so")
    (folder / "libggml-cpu-other.so").write_bytes(b"of another machine")
    assert list(script.old(folder, {"disco_products": 2})) == ["disco_products 1, not 2"]
    assert list(script.old(folder / "nothing", {"disco_products": 2})) == []


@pytest.mark.parametrize(
    ("answers", "steps", "code"),
    [
        ([True], [], 0),
        ([False, True], ["uninstall", "install"], 0),
        ([False, False, True], ["uninstall", "install", "cache", "uninstall", "install"], 0),
        ([False, False, False], ["uninstall", "install", "cache", "uninstall", "install"], 1),
    ],
    ids=["current", "the cache is", "compiled anew", "no mend"],
)
def test_the_cache_is_asked_first_then_emptied(
    script: Any, monkeypatch: pytest.MonkeyPatch, answers: list[bool], steps: list[str], code: int
) -> None:
    left, called = iter(answers), list[list[str]]()
    monkeypatch.setattr(script, "is_current", lambda: next(left))

    def call(command: list[str], timeout: float) -> int:
        assert timeout > 0
        called.append(command)
        return 0

    monkeypatch.setattr(script.subprocess, "call", call)
    assert script.main(NEEDS_HASHES) == code
    assert [command[4] for command in called] == steps
    assert all(command[5:] == NEEDS_HASHES for command in called if command[4] == "install")
    assert next(left, None) is None


def test_an_installation_that_fails_is_told(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "is_current", lambda: False)
    monkeypatch.setattr(script.subprocess, "call", lambda command, timeout: 7 if command[4] == "install" else 0)
    assert script.main(NEEDS_HASHES) == 7


def test_it_says_what_is_old_and_nothing_of_what_is_current(
    tmp_path: Path, build: Callable[..., Path], script: Any
) -> None:
    """As `make` and install.sh start it, beside a package of that name."""

    def say() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT)], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip

    current = script.wanted()["disco_products"]
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    shutil.copytree(build(disco_products=1), tmp_path / "llama_cpp" / "lib")
    done = say()
    assert (done.returncode, f"disco_products 1, not {current}" in done.stdout) == (1, True)
    shutil.rmtree(tmp_path / "llama_cpp" / "lib")
    shutil.copytree(build(disco_products=current), tmp_path / "llama_cpp" / "lib")
    done = say()
    assert (done.returncode, done.stdout) == (0, "")


def test_make_and_install_ask_it() -> None:
    root = CI.parent
    make, install = (root / "Makefile").read_text(), (root / "install.sh").read_text()
    assert "model: .venv/.stamp .venv/.kernels" in make  # which all that runs tests needs
    assert "python native/current_kernels.py" in make
    assert install.index('-r", f"{source}/requirements-build.lock"') < install.index("native/current_kernels.py")
    assert install.index("native/current_kernels.py") < install.index('"uninstall", "--yes"')  # the tools that build


@pytest.mark.parametrize(("version", "threads"), [(None, 3), (0, 3), (1, 1), (2, 3)])
def test_with_products_of_before_the_mend_one_thread_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, threads: int
) -> None:
    told = "" if version is None else f'#include "{CI / "told.h"}"\nDISCO_TOLD(disco_products, {version})\n'
    kernels: ctypes.CDLL = compiled(tmp_path, told)
    monkeypatch.setattr(library, "kernels", lambda: kernels)
    asked = Load(model_path=str(default_model_path()), n_ctx=128, n_threads=3, n_threads_batch=2, n_gpu_layers=0)
    llama = Llama(asked, AbortFlag())
    found = [llama_cpp.llama_n_threads(llama._ctx), llama_cpp.llama_n_threads_batch(llama._ctx)]
    for n in (PREFILL_ROWS, 1):  # each by a number of its own
        assert llama.decode([(100, at, n % 2, False) for at in range(n)]) == 0
        found.append(llama_cpp.llama_n_threads(llama._ctx))
    llama.close()
    assert found == [threads, threads, min(threads, 2), threads]
    assert bool(build_features.fault(kernels)) is (threads == 1)
