"""Numbers packed as ggml does, for the tensors of an exit in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .head import ExitHead, Floats

F32, Q8_0 = 0, 8  # ggml's numbers of these packings
BLOCK = 32  # numbers that share a scale
ROWS_AT_ONCE = 4096  # packed at a time, so that a large vocabulary is not in memory twice


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as it is in a GGUF file: its shape with the shortest stride first, ggml's packing, and its bytes."""

    shape: tuple[int, ...]
    packing: int
    data: bytes


def pack(numbers: Floats) -> PackedTensor:
    """Return a matrix with 8 bits a number and a 16-bit scale for 32 of a row, where rows divide so; else as is."""
    shape = numbers.shape[::-1]
    if numbers.ndim == 1 or shape[0] % BLOCK:
        return PackedTensor(shape, F32, np.ascontiguousarray(numbers, np.float32).tobytes())
    parts = (numbers[at : at + ROWS_AT_ONCE] for at in range(0, len(numbers), ROWS_AT_ONCE))
    return PackedTensor(shape, Q8_0, b"".join(_q8_0(part) for part in parts))


def _q8_0(numbers: Floats) -> bytes:
    blocks = numbers.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    packed = np.empty(len(blocks), [("scale", "<f2"), ("numbers", "i1", BLOCK)])
    packed["scale"], packed["numbers"] = scale, np.rint(blocks * inverse[:, None])
    return packed.tobytes()


def tensors_of(head: ExitHead, output: Floats) -> dict[str, PackedTensor]:
    """Return the tensors that make an exit of a segment's tail, by their names in a GGUF file, without `blk.N.`.

    `output` is the model's output matrix, n_vocab x n_embd.
    """
    found = {"output_norm.weight": pack(head.scale), "output.weight": pack(head.folded(output))}
    if head.block is not None:
        found |= {f"ffn_{name}.weight": pack(getattr(head.block, name)) for name in ("norm", "gate", "up", "down")}
    return found
