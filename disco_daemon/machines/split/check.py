"""The device over two machines: so far its check, whether a model in ranges computes what the whole model does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from ...config.layers import data_path
from ...config.schema import Config
from ...engine.measure.split_messages import SplitCompared, SplitJob, SplitRange
from ...errors import ConfigError, DiscoError
from ...models.fingerprint import fingerprint
from ...models.segment_files import SegmentFiles, read_head
from ...models.segments import NotCuttableError, n_layers
from ...system.job import run_job
from ...types import LayerRange
from ..device_settings import knobs_for

SEGMENT_BYTES = 64 << 30  # of segments on disk; the largest model that one cuts on purpose
LAST_S = 3600.0  # a check that takes longer hangs; a model of 8 B takes minutes


class SplitError(DiscoError):
    """The ranges of a model cannot be compared; the message is fit for a user."""


def segment_files(*, one_embedding: bool = False) -> SegmentFiles:
    """Return the folder of segments on this machine; `one_embedding` where one process has both ends of a model."""
    return SegmentFiles(data_path() / "segments", SEGMENT_BYTES, one_embedding=one_embedding)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a model's file, or of a range's, which is kept. Raises ConfigError."""
    return fingerprint(path, data_path() / "profiles" / "fingerprints")


def ranges_of(model: Path, cuts: Sequence[int]) -> list[LayerRange]:
    """Return the ranges between `cuts`, or the two halves if there are none. Raises ConfigError."""
    _, header = read_head(model)
    try:
        n = n_layers(header)
    except NotCuttableError as e:
        raise ConfigError(f"{model.name} cannot be cut into ranges of layers: {e}") from e
    edges = [0, *(cuts or (n // 2,)), n]
    if any(first >= last for first, last in itertools.pairwise(edges)):
        raise ConfigError(f"{model.name} has {n} layers: give cuts from 1 to {n - 1}, each above the one before")
    return [LayerRange(first, last, n) for first, last in itertools.pairwise(edges)]


async def check(
    config: Config,
    model: Path,
    ranges: Sequence[LayerRange],
    progress: Callable[[str], None],
    *,
    longest: int,
) -> SplitCompared:
    """Write the ranges of a model, and compare them with the whole in a child process, which a cancellation kills.

    The longest text has `longest` tokens.
    Raises ConfigError if the model cannot be cut, and SplitError if the comparison fails.
    """
    files = segment_files()
    files.clean()
    progress("writing the ranges")
    paths = await asyncio.to_thread(files.write, model, ranges)
    knobs = knobs_for(config, model)
    job = SplitJob(
        whole=str(model),
        n_layers=ranges[0].of,
        ranges=[SplitRange(str(path), r.first, r.last) for path, r in zip(paths, ranges, strict=True)],
        longest=longest,
        n_threads=knobs.n_threads,
        n_threads_batch=knobs.n_threads_batch,
        kv_type=config.device.kv_type,
        flash_attn=knobs.flash_attn,
    )
    return await run_job(
        "disco_daemon.engine.measure.split_check",
        job,
        progress,
        SplitCompared,
        SplitError,
        name="the check",
        timeout_s=LAST_S,
        hint="memory is short, or llama.cpp cannot compute this model in these ranges",
    )
