"""What is installed: from lock files, each file by its hash, and the same versions for users and for these tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKS = tuple(f"requirements{kind}.lock" for kind in ("", "-dev", "-fleet", "-build", "-tools"))


def locked(name: str) -> dict[str, tuple[str, int]]:
    """By package: its version, and how many hashes it has."""
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    found: dict[str, tuple[str, int]] = {}
    for line in filter(None, text.splitlines()):
        requirement = re.match(r"([\w.-]+)==([\w.]+)", line)
        assert requirement is not None, line
        found[canonicalize_name(requirement[1])] = (requirement[2], line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_one_version_and_hashes(name: str) -> None:
    packages = locked(name)
    assert packages
    assert all(n_hashes for _, n_hashes in packages.values())
    assert "://" not in (ROOT / name).read_text("utf-8"), "where it comes from is the user's choice"


def test_what_users_get_is_what_is_tested() -> None:
    users, tested = locked("requirements.lock"), locked("requirements-dev.lock")
    assert users.items() <= tested.items()
    assert users.items() <= locked("requirements-fleet.lock").items()


@pytest.mark.parametrize(
    ("extras", "kind"), [((), ""), (("fleet",), "-fleet"), (("dev", "binary"), "-dev")], ids=("users", "fleet", "dev")
)
def test_a_lock_has_all_that_the_project_asks_for(extras: tuple[str, ...], kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    packages = locked(f"requirements{kind}.lock")
    for requirement in map(Requirement, wanted):
        version, _ = packages[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


@pytest.mark.parametrize("path", ["install.sh", "Makefile"])
def test_nothing_is_installed_without_its_hash_but_this_checkout(path: str) -> None:
    text = (ROOT / path).read_text("utf-8")
    text += (ROOT / "native/install_locked.py").read_text("utf-8").replace("*locked", '"--require-hashes"')
    lines = [
        line
        for line in text.splitlines()
        if re.search(r"\[\*install,|^ +\*whole, |-m pip install|P(IP\)|IP, ).*install", line)
    ]
    assert len(lines) >= 3
    for line in lines:
        assert "--require-hashes" in line or ("--no-deps" in line and "--no-build-isolation" in line), line
