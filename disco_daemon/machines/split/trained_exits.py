"""Exits of models on this machine: trained in a child process, kept in a folder, and put into the edge's segment."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from ...config.layers import data_path
from ...config.schema import Config
from ...engine.measure.exit_messages import ExitFigures, ExitJob, ExitTrained
from ...engine.measure.split_messages import SplitRange
from ...engine.wire import ExitCalibration
from ...errors import ConfigError, DiscoError
from ...exits.calibrate import Calibration
from ...models.segment_files import read_head
from ...models.segments import CALIBRATION, ExitTensor
from ...system.job import run_job
from ...system.processors import n_cores
from ...types import LayerRange
from ..device_settings import knobs_for
from .check import checksum, ranges_of, segment_files

LAST_S = 12 * 3600.0  # a training that takes longer hangs
TOKENS = 40_000  # of own answers to train on; twice as many gain two or three points
FEWEST, MOST = 1000, 2_000_000  # tokens that may be asked for
BACKGROUND = 19  # niceness: below all others
SPARE_BYTES = 256 << 20  # left free on the disk for everything else
N_SIGNALS, MOST_SHARES = 3, 10_000  # of a calibration: numbers that it is told from, steps of its table
ROWS = 2  # the format of kept rows
HEADS = ("auto", "linear", "mlp")


class ExitError(DiscoError):
    """An exit cannot be trained; the message is fit for a user."""


@dataclass(frozen=True, slots=True)
class KeptExit:
    """An exit on this machine: what it is worth, and its file."""

    figures: ExitFigures
    path: Path

    def tensors(self) -> dict[str, ExitTensor]:
        """Return its tensors, as `SegmentFiles.write_exit` takes them. Raises ConfigError."""
        with _readable(self.path), np.load(self.path) as kept:
            found = dict[str, ExitTensor]()
            for name in (key.removeprefix("data ") for key in kept.files if key.startswith("data ")):
                packing, *shape = (int(n) for n in kept[f"shape {name}"])
                found[name] = ExitTensor(tuple(shape), packing, kept[f"data {name}"].tobytes())
        return found

    def calibration(self) -> Calibration:
        """Return how sure it may be. Raises ConfigError."""
        with _readable(self.path), np.load(self.path) as kept:
            return Calibration(kept["coefficients"], kept["scores"], kept["shares"])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"the exit {path} cannot be read: remove it with `disco exits rm`, and train it anew") from e


class KeptExits:
    """The exits of one model."""

    def __init__(self, model: Path, folder: Path | None = None) -> None:
        """`folder` is that of all models' exits. Raises ConfigError if the model cannot be read."""
        self._model = model
        self.folder = (folder or data_path() / "exits") / checksum(model)

    def all(self) -> list[KeptExit]:
        """Return them by cut, and for each cut the one that agrees most first; damaged ones are left out."""
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                figures = msgspec.json.decode(path.read_bytes(), type=ExitFigures)
                if path.with_suffix(".npz").exists():
                    found.append(KeptExit(figures, path.with_suffix(".npz")))
        return sorted(found, key=lambda one: (one.figures.cut, -one.figures.agreement))

    def best(self, cut: int) -> KeptExit | None:
        """Return the exit behind `cut` layers that agrees most; None if there is none."""
        return next((one for one in self.all() if one.figures.cut == cut), None)

    def keep(self, trained: ExitTrained, source: Path) -> KeptExit:
        """Move a new exit here, whole or not at all: what has no figures yet is none. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / trained.file
        told = path.with_suffix(".json")
        told.unlink(missing_ok=True)  # of the one before, whose file is going to be another
        unfinished = path.with_suffix(".new")
        shutil.move(source, unfinished)
        unfinished.chmod(0o600)
        unfinished.replace(path)
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(trained.figures)) + b"\n")
        unfinished.replace(told)
        return KeptExit(trained.figures, path)

    def remove(self, one: KeptExit) -> None:
        """Remove an exit. Raises OSError."""
        one.path.with_suffix(".json").unlink(missing_ok=True)
        one.path.unlink(missing_ok=True)

    def segment(self, one: KeptExit, n_layers: int) -> Path:
        """Return the file of the first range with this exit in it; written if it is missing. Raises ConfigError."""
        layers = LayerRange(0, one.figures.cut, n_layers)
        text = msgspec.json.encode(told_of(one)).decode()
        return segment_files().write_exit(self._model, layers, one.tensors(), text)


def told_of(one: KeptExit) -> ExitCalibration:
    """Return how sure an exit may be, as it stands in its segment's header. Raises ConfigError."""
    found = one.calibration()
    return ExitCalibration(
        coefficients=tuple(found.coefficients.tolist()),
        scores=tuple(found.scores.tolist()),
        shares=tuple(found.shares.tolist()),
        coverage=one.figures.coverage.get("0.8", 0.0) if one.figures.is_faithful else 0.0,
    )


def mark_of(told: ExitCalibration | None) -> str:
    """Return what tells an exit from another one, by its calibration; empty for none."""
    return "" if told is None else hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:12]


def read_calibration(segment: Path) -> ExitCalibration | None:
    """Return how sure the exit in a range's file may be; None if it has none, or says what cannot be.

    Raises ConfigError if it cannot be read.
    """
    _, header = read_head(segment)
    return parse_calibration(header.text(CALIBRATION))


def parse_calibration(text: str) -> ExitCalibration | None:
    """Return a calibration, whose text may be another machine's; None if it says what cannot be."""
    try:
        found = msgspec.json.decode(text, type=ExitCalibration)
    except msgspec.MsgspecError:
        return None
    numbers = (*found.coefficients, *found.scores, *found.shares)
    is_sound = (
        len(found.coefficients) == N_SIGNALS + 1
        and 0 < len(found.scores) == len(found.shares) <= MOST_SHARES
        and all(math.isfinite(number) for number in numbers)
        and list(found.scores) == sorted(found.scores)
        and all(0 <= share <= 1 for share in (*found.shares, found.coverage))
    )
    return found if is_sound else None


async def train(
    config: Config,
    model: Path,
    progress: Callable[[str], None],
    *,
    cut: int | None = None,
    head: str = "auto",
    tokens: int = TOKENS,
    texts: Sequence[str] = (),
    nice: int = BACKGROUND,
) -> KeptExit:
    """Train an exit behind `cut` layers (None: 80 % of them) in a child process, which a cancellation kills.

    What is computed until then is kept: the same training goes on from there.
    Raises ConfigError if the model cannot be cut there, and ExitError if the training fails.
    """
    n_layers = ranges_of(model, [])[-1].of
    ranges = ranges_of(model, [cut if cut is not None else max(1, round(0.8 * n_layers))])
    exits = await asyncio.to_thread(KeptExits, model)
    progress("writing the ranges")
    paths = await asyncio.to_thread(segment_files().write, model, ranges)
    knobs = knobs_for(config, model)
    job = ExitJob(
        whole=str(model),
        n_layers=n_layers,
        ranges=[SplitRange(str(path), r.first, r.last) for path, r in zip(paths, ranges, strict=True)],
        head=head,
        tokens=tokens,
        patterns=(files("disco_daemon.profiles") / "exit_prompts.toml").read_text("utf-8"),
        folder="",
        n_threads=config.device.n_threads or n_cores(),  # nobody waits for each token: no core is kept free
        texts=list(texts),
        kv_type=config.device.kv_type,
        flash_attn=knobs.flash_attn,
        nice=nice,
    )
    folder = _unfinished(exits.folder, ranges[0].last, job)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_room(folder)
        with _alone(folder):
            trained = await run_job(
                "disco_daemon.engine.measure.exit_training",
                msgspec.structs.replace(job, folder=str(folder)),
                progress,
                ExitTrained,
                ExitError,
                name="the training",
                timeout_s=LAST_S,
            )
            kept = await asyncio.to_thread(exits.keep, trained, folder / trained.file)
            await asyncio.to_thread(shutil.rmtree, folder)
    except OSError as e:
        raise ExitError(f"the exit cannot be kept in {exits.folder}: {e.strerror or e}") from e
    return kept


def _unfinished(folder: Path, cut: int, job: ExitJob) -> Path:
    """Return the folder of an unfinished training that computes the same rows."""
    same = hashlib.sha256(msgspec.json.encode([ROWS, job.patterns, job.texts, job.kv_type])).hexdigest()[:12]
    return folder / f"unfinished-{cut}-{same}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder of a training: two that keep rows in one would lose them. Raises ExitError, OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            msg = "this exit is being trained already: wait until that has ended, or end it with Ctrl-C and go on here"
            raise ExitError(msg) from e
        yield
    finally:
        os.close(handle)


def _require_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < 2 * SPARE_BYTES:
        raise ExitError(f"{free / 1e9:.1f} GB are free in {folder}, too little to keep rows in: free some")
