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

IN_USE = "is the device's model"


def require_unused(path: Path, *, but_default: bool = False) -> None:
    """Raise ConfigError while settings name the file, or another part of its model, by whatever spelling.

    `but_default`: the default model may go in any case, as it is fetched when it is needed.
    """
    from ..errors import ConfigError

    files = _parts(path)
    for named, (whose, mend) in _used().items():
        if files & _parts(named) and not (but_default and whose == IN_USE):
            raise ConfigError(f"{path} {whose}: {mend}")


def remove(args: argparse.Namespace, path: Path) -> int:
    """Remove the file if it is ours, and the segments and exits of the model; exit code 1 without a yes."""
    path = path.resolve()  # a link to it may be anybody's
    places = _places(path)
    if not places:
        print(f"nothing of {path} is disco's: the program that fetched it removes it", file=sys.stderr)
        return 1
    if not _agreed(args, f"These files go: {', '.join(map(str, places))}."):
        return 1
    return _done(args, places, [] if _is_ours(path) else [f"{path} stays: another program fetched it"])


def remove_named(args: argparse.Namespace, settings: ModelSettings) -> int:
    """Take a model of `[[models]]` out of the settings, and remove what is disco's of it and nobody else's.

    Its file stays while other settings name it. Exit code 1 without a yes. Raises ConfigError, and then nothing has
    changed.
    """
    from ..errors import ConfigError
    from ..machines.resident_models import path_of
    from .models_named import names_by_file, unname

    name, why = settings.name, ""
    places: list[Path] = []
    path: Path | None = None
    try:
        path = path_of(settings).resolve()
    except ConfigError:  # its file is gone already
        pass
    else:
        files = _parts(path)
        others = [
            f"is the file of disco/{other}"
            for file in files
            for other in names_by_file().get(file, ())
            if other != name
        ]
        others += [whose for named, (whose, _) in _used().items() if files & _parts(named)]
        why = f"it {' and '.join(others)}" if others else "" if _is_ours(path) else "another program fetched it"
        places = [] if others else _places(path)
    gone = f"These files go: {', '.join(map(str, places))}." if places else "No file goes."
    if not _agreed(args, f"disco/{name} is taken out of the settings. {gone}"):
        return 1
    return _done(args, places, [unname(name), *([f"{path} stays: {why}"] if why else [])])


def _used() -> dict[Path, tuple[str, str]]:
    """Return the files that settings beside `[[models]]` name, each with what it is there and what to do first."""
    from pathlib import Path

    from ..config.layers import load
    from ..models.default import default_model_path

    config = load()
    device, found = config.device, dict[Path, tuple[str, str]]()
    for name, adapter in device.adapters.items():
        path = adapter if isinstance(adapter, str) else adapter.path
        found[Path(path)] = f"is the adapter {name}", f"take it out of [device.adapters] in {_config()} first"
    if config.split.draft_model:
        unset = "`disco config set split.draft_model ''` first"
        found[Path(config.split.draft_model)] = "drafts for the partner's model", unset
    if device.draft_model:
        unset = "`disco config set device.draft_model ''` first"
        found[Path(device.draft_model)] = "guesses for the device's model", unset
    if not device.base_url:
        path_in_use = Path(device.model) if device.model else default_model_path()
        found[path_in_use] = IN_USE, "`disco models use` another one first"
    return found


def _config() -> Path:
    from ..config.layers import config_path

    return config_path()


def _parts(path: Path) -> set[Path]:
    """Return all files of a model, without links: of several parts any one stands for them all."""
    from ..models.gguf import with_shards

    return {part.resolve() for part in with_shards([path.expanduser().resolve()])}


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
