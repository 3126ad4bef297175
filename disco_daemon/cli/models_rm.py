"""`disco models rm`: remove a model that disco has fetched, with what was made of it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..config.schema import ModelSettings


def remove(args: argparse.Namespace, path: Path) -> int:
    """Remove the file if it is ours, and the segments and exits of the model; exit code 1 without a yes."""
    places = _places(path)
    if not places:
        print(f"nothing of {path} is disco's: the program that fetched it removes it", file=sys.stderr)
        return 1
    if not _agreed(args, f"These files go: {', '.join(map(str, places))}."):
        return 1
    return _done(args, places, [] if _is_ours(path) else [f"{path} stays: another program fetched it"])


def remove_named(args: argparse.Namespace, settings: ModelSettings, in_use: Path | None) -> int:
    """Take a model of `[[models]]` out of the settings, and remove what is disco's of it and nobody else's.

    Its file stays while it is the device's (`in_use`), or has another name. Exit code 1 without a yes. Raises
    ConfigError, and then nothing has changed.
    """
    from ..errors import ConfigError
    from ..machines.resident_models import path_of
    from .models_named import names_by_file, unname

    name, why = settings.name, ""
    places: list[Path] = []
    path: Path | None = None
    try:
        path = path_of(settings)
    except ConfigError:  # its file is gone already
        pass
    else:
        others = [f"disco/{other}" for other in names_by_file().get(path.resolve(), ()) if other != name]
        if in_use is not None and in_use.resolve() == path.resolve():
            others.append("the device's")
        why = (
            f"it is {' and '.join(others)} as well"
            if others
            else ""
            if _is_ours(path)
            else "another program fetched it"
        )
        places = [] if others else _places(path)
    files = f"These files go: {', '.join(map(str, places))}." if places else "No file goes."
    if not _agreed(args, f"disco/{name} is taken out of the settings. {files}"):
        return 1
    return _done(args, places, [unname(name), *([f"{path} stays: {why}"] if why else [])])


def _is_ours(path: Path) -> bool:
    from ..models.default import models_dir

    return models_dir().resolve() in path.resolve().parents


def _places(path: Path) -> list[Path]:
    """Return what is disco's of a model: its files if they are, its segments and exits."""
    from ..machines.split.check import segment_files
    from ..machines.split.trained_exits import KeptExits
    from ..models.gguf import with_shards

    files = [part for part in with_shards([path]) if part.exists()] if _is_ours(path) else []
    segments, exits = segment_files().of_model(path), KeptExits(path).folder
    return [*files, *segments, *([exits] if exits.is_dir() else [])]


def _agreed(args: argparse.Namespace, words: str) -> bool:
    if args.yes:
        return True
    print(words, file=sys.stderr)
    if sys.stdin.isatty() and input("Remove? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print("disco: nothing was removed; --yes removes it without a question", file=sys.stderr)
    return False


def _done(args: argparse.Namespace, places: Sequence[Path], notes: Sequence[str]) -> int:
    n_bytes = sum(_remove(place) for place in places)
    if args.json:
        print(json.dumps({"removed": [str(place) for place in places], "removed_bytes": n_bytes}))
    else:
        print("\n".join([*([f"{n_bytes / 1e6:.0f} MB removed"] if places else []), *notes]))
    return 0


def _remove(place: Path) -> int:
    """Remove a file or a folder; return its bytes on the disk."""
    import shutil

    inside = list(place.rglob("*")) if place.is_dir() else [place]
    n_bytes = sum(one.stat().st_blocks * 512 for one in inside)
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    return n_bytes
