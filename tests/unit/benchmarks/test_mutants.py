"""The table of mutants is of this code: its lines are there, and its tests."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from benchmarks.faults.mutants import ROOT, Mutant, broken, mutants


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_line_is_there_once_and_each_named_test_exists() -> None:
    found = mutants()
    assert len({(mutant.file, mutant.line, mutant.becomes) for mutant in found}) == len(found) >= 60
    for mutant in found:
        assert ast.parse(broken(mutant, (ROOT / mutant.file).read_text("utf-8")))
        path, _, name = mutant.test.partition("::")
        assert name in functions_of(path), mutant.test


def test_a_line_that_is_gone_or_there_twice_is_an_error() -> None:
    for line in ("no such line", "from "):
        with pytest.raises(LookupError):
            broken(
                Mutant("benchmarks/faults/mutants.py", "", line, "", ""),
                (ROOT / "benchmarks/faults/mutants.py").read_text(),
            )
