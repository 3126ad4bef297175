"""How llama.cpp is to lay out and multiply a model's weights, so that exact answers are exact."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from ...models.gguf import Header, joined, with_shards
from ...models.gguf_file import read_file_header
from ...models.rounding import INTERLEAVES, may_interleave
from ..wire import Load

TILED = "GGML_CPU_TILED_MM"  # llama.cpp's switch, in the environment, for kernels that round by the number of rows


def use_extra_buffers(load: Load) -> bool:
    """Return whether llama.cpp may lay weights out anew for this processor, as `use_extra_bufts` of a model has it.

    Where answers are exact this also turns off kernels that round a row by how many there are, once for this process.
    A range of layers does as the whole model.
    """
    if not load.exact or load.n_gpu_layers:
        return load.repack
    os.environ[TILED] = "0"
    try:
        header = whole_header(load.model_path)
    except (OSError, ValueError):  # llama.cpp says better what is wrong with a file
        return load.repack
    if (told := header.number(INTERLEAVES)) is not None:
        return load.repack and bool(told)
    return load.repack and may_interleave(header)


def whole_header(path: str) -> Header:
    """Return the header of a model's first file, with the tensors of all its parts. Raises OSError, ValueError."""
    return _read_header(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a load asks for it more than once, and a large vocabulary takes tenths of a second
def _read_header(path: str, _changed_at: int) -> Header:
    return joined(map(_header, with_shards([Path(path)])))


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        return read_file_header(file)[1]
