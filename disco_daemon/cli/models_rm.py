"""`disco models rm`: remove a model that disco has fetched, with what was made of it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def remove(args: argparse.Namespace, path: Path) -> int:
    """Remove the file if it is ours, and the segments and exits of the model; exit code 1 without a yes."""
    from ..machines.split.check import segment_files
    from ..machines.split.trained_exits import KeptExits
    from ..models.default import models_dir
    from ..models.gguf import with_shards

    is_ours = models_dir().resolve() in path.resolve().parents
    files = [part for part in with_shards([path]) if part.exists()] if is_ours else []
    segments, exits = segment_files().of_model(path), KeptExits(path).folder
    places = [*files, *segments, *([exits] if exits.is_dir() else [])]
    if not places:
        print(f"nothing of {path} is disco's: the program that fetched it removes it", file=sys.stderr)
        return 1
    if not args.yes:
        print(f"These files go: {', '.join(map(str, places))}.", file=sys.stderr)
        if not (sys.stdin.isatty() and input("Remove? [y/N] ").strip().lower() in ("y", "yes")):
            print("disco: nothing was removed; --yes removes it without a question", file=sys.stderr)
            return 1
    n_bytes = sum(_remove(place) for place in places)
    if args.json:
        print(json.dumps({"removed": [str(place) for place in places], "removed_bytes": n_bytes}))
    else:
        print(f"{n_bytes / 1e6:.0f} MB removed" + ("" if is_ours else f"; {path} stays: another program fetched it"))
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
