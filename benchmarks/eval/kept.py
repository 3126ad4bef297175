"""Measurements of many traces that take longer than one sitting: what a trace came to is kept, and not measured again.

A file has one line of JSON for each trace: its label, the setting that it was measured with, and what was found. So a
run that was cut off is begun again with the same command, several may share a file (`--part 1/2`, `--part 2/2`), and
the last one, without a part, makes the table of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from disco_daemon.bench.child import BenchError

Named = TypeVar("Named")
Part = tuple[int, int]  # the k-th of n, from 1 on


class KeptResults:
    """What each trace came to, by its label, for one setting; `path` None keeps nothing beyond this process.

    Raises BenchError for a file that cannot be read, or was made with another setting.
    """

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self._path = path
        self._setting = json.loads(json.dumps(setting))  # tuples become lists, as they are when they are read again
        self._found: dict[str, Any] = {}
        if path is None or not path.exists():
            return
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if line["setting"] != self._setting:
                    msg = f"{path} was made with other settings: name another file, or remove it"
                    raise BenchError(msg)
                self._found[line["trace"]] = line["found"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            msg = f"{path} cannot be read as results of traces: {e}"
            raise BenchError(msg) from e

    def __contains__(self, label: str) -> bool:
        return label in self._found

    def __getitem__(self, label: str) -> Any:
        return self._found[label]

    def add(self, label: str, found: Any) -> None:
        """Keep what a trace came to. Raises BenchError where the file cannot be written."""
        self._found[label] = found
        if self._path is None:
            return
        line = json.dumps({"trace": label, "setting": self._setting, "found": found}) + "\n"
        try:
            with self._path.open("a") as file:
                file.write(line)
        except OSError as e:
            msg = f"{self._path} cannot be written: {e}"
            raise BenchError(msg) from e


def part_of(text: str) -> Part:
    """Read "1/2", the first of two parts. Raises ArgumentTypeError."""
    k, _, n = text.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError("must be a part like 1/2")
    return int(k), int(n)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--keep` and `--part`."""
    parser.add_argument("--keep", metavar="FILE", type=Path, help="keep what each trace came to, and go on from there")
    parser.add_argument("--part", metavar="K/N", type=part_of, help="measure every N-th trace only; needs --keep")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program where a part would be lost."""
    if args.part is not None and args.keep is None:
        parser.error("--part needs --keep, else nothing would be left of it")


def of_part(given: Sequence[Named], part: Part | None) -> Sequence[Named]:
    """Return every n-th from the k-th on; all without a part."""
    return given if part is None else given[part[0] - 1 :: part[1]]
