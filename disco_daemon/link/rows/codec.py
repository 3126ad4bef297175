"""How hidden rows are written into the bytes behind a `SendRows`, and read from them. Pure.

A payload has n rows of the same length, one after the other, each of d numbers (`n_embd`), little-endian:

- `f32`: d x float32, 4 d bytes. To the bit what was computed.
- `bf16`: d x bfloat16 (the upper half of a float32), 2 d bytes, rounded to nearest even: off by 2^-8 of it at most.
- `ids`: nothing. The rows have no numbers (d = 0): the partner has all layers, and computes from the token ids.
- `int8`: d x int8, then ceil(d / 32) x bfloat16, then 8 x uint16, then 8 x float32. The 8 largest numbers of the row
  (all of them if d < 8) travel as they are, with their places in rising order. The others are whole multiples of a
  scale of their block of 32 numbers, which is rounded up: each is off by half a scale at most. 660 bytes for d = 576,
  instead of 2,304. The blocks are those of llama.cpp's Q8_0; the outliers are those of LLM.int8() (Dettmers et al.
  2022).

Plain float16 is none of them: rows of gemma-3 have numbers up to 98,408, beyond its range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol import CODECS, IDS, BadFrameError

RowArray = NDArray[np.float32]  # [n, n_embd]

SLOW_ROW_S = 0.001  # upload of a float32 row from which on half of it is worth other bits, s

BLOCK = 32  # numbers that share a scale, as in llama.cpp's Q8_0
N_OUTLIERS = 8  # numbers of a row that travel as they are: hidden rows have a few dimensions that dwarf the others
LEVELS = 127  # whole multiples of a scale on each side of zero
MAX_EMBD = 1 << 16  # numbers of a row: places of outliers are 16 bits


def choose_codec(wanted: str, n_embd: int, bytes_per_s: float, *, exact: bool) -> str:
    """Return the codec for rows over a link that carries so many bytes a second (0 = not known), where auto is wanted.

    Rows of an answer that is to be exact travel as they are. Others lose what bf16 rounds off where a float32 row takes
    long to upload; int8 is only taken where somebody asks for it.
    """
    if wanted != "auto":
        return wanted
    is_slow = bytes_per_s > 0 and row_bytes("f32", n_embd) / bytes_per_s > SLOW_ROW_S
    return "bf16" if is_slow and not exact else "f32"


def salt_for(salt: int, codecs: Sequence[str]) -> int:
    """Return a machine's salt for links whose rows come by `codecs`: cells of rounded rows are no exact answer's."""
    return salt ^ sum(2 << at for at, codec in enumerate(CODECS) if codec in codecs and codec != "f32")


def row_bytes(codec: str, n_embd: int) -> int:
    """Return how many bytes one row takes. Raises ValueError for another codec, or rows of too many numbers.

    Rows without numbers go by `ids`, and no others do.
    """
    if codec == IDS and n_embd == 0:
        return 0
    if codec not in CODECS or not 0 < n_embd <= MAX_EMBD:
        raise ValueError(f"no rows of {n_embd} numbers by the codec {codec!r}")
    if codec == "int8":
        return n_embd + 2 * -(-n_embd // BLOCK) + 6 * min(N_OUTLIERS, n_embd)
    return n_embd * (2 if codec == "bf16" else 4)


def encode_rows(codec: str, rows: RowArray) -> bytes:
    """Return rows [n, d] as a payload. Raises ValueError for numbers that are not finite, or that the codec cannot say.

    bf16 and int8 end where float32 does, less the rounding: numbers beyond 3.3e38 may be too large for them.
    """
    if rows.ndim != 2:
        raise ValueError(f"rows are [n, n_embd], not {rows.shape}")
    row_bytes(codec, rows.shape[1])
    if not np.isfinite(rows).all():
        raise ValueError("a row has a number that is not finite")
    rows = np.ascontiguousarray(rows, "<f4")
    if codec in ("f32", IDS):
        return rows.tobytes()
    if codec == "bf16":
        halves = _to_bf16(rows)
        if not np.isfinite(_from_bf16(halves)).all():
            raise ValueError("a row has a number beyond the range of bf16")
        return halves.tobytes()
    return _to_int8(rows)


def decode_rows(codec: str, payload: bytes | memoryview, n_rows: int, n_embd: int) -> RowArray:
    """Return a payload's rows, [n_rows, n_embd].

    Raises BadFrameError unless the payload has just their length and every number is finite.
    """
    try:
        expected = n_rows * row_bytes(codec, n_embd)
    except ValueError as e:
        raise BadFrameError(str(e)) from e
    if len(payload) != expected:
        raise BadFrameError(f"{n_rows} rows of {n_embd} numbers by {codec} have {expected} bytes, not {len(payload)}")
    if codec == IDS:
        return np.empty((n_rows, 0), np.float32)
    raw = np.frombuffer(payload, np.uint8)
    if codec == "f32":
        rows = raw.view("<f4").reshape(n_rows, n_embd).astype(np.float32)
    elif codec == "bf16":
        rows = _from_bf16(raw.view("<u2").reshape(n_rows, n_embd))
    else:
        rows = _from_int8(raw.reshape(n_rows, row_bytes(codec, n_embd)), n_embd)
    if not np.isfinite(rows).all():
        raise BadFrameError("a row has a number that is not finite")
    return rows


def _to_bf16(numbers: RowArray) -> NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even."""
    bits = numbers.view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _from_bf16(halves: NDArray[np.uint16]) -> RowArray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _to_int8(rows: RowArray) -> bytes:
    n, d = rows.shape
    if not n:
        return b""
    n_blocks, n_out = -(-d // BLOCK), min(N_OUTLIERS, d)
    places = np.sort(np.argpartition(np.abs(rows), d - n_out, axis=1)[:, d - n_out :], axis=1)
    outliers = np.take_along_axis(rows, places, axis=1)
    rest = np.zeros((n, n_blocks * BLOCK), np.float32)
    rest[:, :d] = rows
    np.put_along_axis(rest, places, 0.0, axis=1)
    blocks = rest.reshape(n, n_blocks, BLOCK)
    least = np.abs(blocks).max(axis=2) / np.float32(LEVELS)
    bits = np.ascontiguousarray(least, "<f4").view("<u4")
    scales = ((bits.astype(np.uint64) + 0xFFFF) >> 16).astype("<u2")  # rounded up: 127 scales reach the largest number
    divisor = _from_bf16(scales)[:, :, None]
    levels = np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor > 0)
    written = np.rint(levels).astype(np.int8).reshape(n, -1)[:, :d]
    parts = (written, scales, places.astype("<u2"), outliers.astype("<f4"))
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1).tobytes()


def _from_int8(raw: NDArray[np.uint8], d: int) -> RowArray:
    n_blocks, n_out = -(-d // BLOCK), min(N_OUTLIERS, d)
    levels, scales, places, outliers = np.split(raw, np.cumsum([d, 2 * n_blocks, 2 * n_out]), axis=1)
    spread = np.repeat(_from_bf16(np.ascontiguousarray(scales).view("<u2")), BLOCK, axis=1)[:, :d]
    with np.errstate(over="ignore", invalid="ignore"):  # a stranger's scales: what is not finite is refused below
        rows = np.ascontiguousarray(levels).view(np.int8).astype(np.float32) * spread
    where = np.ascontiguousarray(places).view("<u2").astype(np.intp)
    if (where >= d).any():
        raise BadFrameError(f"a row of {d} numbers has an outlier at {int(where.max())}")
    np.put_along_axis(rows, where, np.ascontiguousarray(outliers).view("<f4").astype(np.float32), axis=1)
    return rows
