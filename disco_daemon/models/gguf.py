"""The header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md), without llama.cpp. Pure.

A header is untrusted, and llama.cpp has crashed on bad ones: every length is checked against the bytes that are there
before it is used, and values too long to be useful are dropped.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

Value = int | float | bool | str
Keys = dict[str, Value | list[Value]]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LISTED = 4096  # a longer array is a vocabulary, of which only the length is kept
_MOST_KEYS = 10_000
_MOST_TEXT = 1 << 24
_MOST_TENSORS = 1 << 17  # the largest models have some thousand
_SHOWN = 100  # characters of a key in a message
_MOST_DIMS = 4  # GGML_MAX_DIMS
_MOST_NUMBERS = 1 << 44  # in one tensor
HEADER_BYTES = 64 << 20  # read of a file for its whole header: the largest vocabularies take 16 MB
_ALIGNMENT = 32  # bytes, unless `general.alignment` says otherwise
_LENGTH = struct.Struct("<Q")

# How ggml packs numbers: type -> (name, numbers in a block, bytes of a block). ggml/src/ggml.c, `type_traits`.
_PACKED = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
# `general.file_type`, the recipe of the whole file. llama.h, `llama_ftype`.
_RECIPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its shape, the packing of its numbers, and their offset behind the header, bytes."""

    name: str
    shape: tuple[int, ...]
    packing: int
    offset: int

    @property
    def n_numbers(self) -> int:
        """The number of its numbers."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int | None:
        """The size in the file, bytes; None for a packing newer than this program."""
        if self.packing not in _PACKED:
            return None
        _, numbers, size = _PACKED[self.packing]
        return -(-self.n_numbers // numbers) * size


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a file before the weights.

    `whole`: all keys and tensors are here; else those before the end of the given bytes. `data_at` is the offset of the
    weights in the file, bytes; 0 unless `whole`. `spans` has the first and the last byte (exclusive) of each key, its
    name and value, in the file.
    """

    n_tensors: int
    keys: Keys
    tensors: tuple[Tensor, ...] = ()
    whole: bool = False
    data_at: int = 0
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def alignment(self) -> int:
        """The bytes to whose multiple each tensor is aligned."""
        return self.number("general.alignment") or _ALIGNMENT

    def text(self, key: str) -> str:
        """Return the text of a key; empty if it is missing."""
        found = self.keys.get(key)
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> int | None:
        """Return the whole number of a key; None if it is missing."""
        found = self.keys.get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    @property
    def architecture(self) -> str:
        """The architecture, such as `llama`; empty if unknown."""
        return self.text("general.architecture")

    @property
    def packing(self) -> str:
        """The packing of most weights, such as `Q4_K_M`; empty if unknown."""
        recipe = self.number("general.file_type")
        if recipe is not None and (name := _RECIPES.get(recipe & 1023)):  # 1024 marks a guess by the writer
            return name
        bytes_of: dict[int, int] = {}
        for tensor in self.tensors:
            bytes_of[tensor.packing] = bytes_of.get(tensor.packing, 0) + (tensor.n_bytes or 0)
        most = max(bytes_of, key=lambda packing: bytes_of[packing], default=-1)
        return _PACKED[most][0] if most in _PACKED else ""

    @property
    def n_numbers(self) -> int:
        """The number of parameters in this file."""
        return sum(tensor.n_numbers for tensor in self.tensors)

    @property
    def least_bytes(self) -> int:
        """The least size of the file, if it is complete."""
        ends = [tensor.offset + (tensor.n_bytes or 0) for tensor in self.tensors]
        return self.data_at + max(ends) if ends else 0


class _Short(Exception):
    """The bytes end here."""


class _HeaderReader:
    """Reads little-endian bytes. Lengths are untrusted: each is checked against the bytes left."""

    def __init__(self, head: bytes) -> None:
        self._head, self.at = head, 0

    def take(self, n: int) -> bytes:
        if n > len(self._head) - self.at:
            raise _Short
        self.at += n
        return self._head[self.at - n : self.at]

    def scalar(self, code: str) -> int | float | bool:
        [value] = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value  # type: ignore[no-any-return]

    def count(self) -> int:
        return int(self.scalar("Q"))

    def text(self) -> str:
        n = self.count()
        if n > _MOST_TEXT:
            raise ValueError(f"a string of {n} bytes: no GGUF header")
        return self.take(n).decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise ValueError(f"no GGUF value has type {kind}")
        return self.scalar(_SCALARS[kind])

    def pass_by(self, kind: int, n: int) -> None:
        """Skip `n` values: a vocabulary has hundreds of thousands."""
        if kind in _SCALARS:
            self.take(n * struct.calcsize(f"<{_SCALARS[kind]}"))
            return
        head, at, last = self._head, self.at, len(self._head) - _LENGTH.size
        for _ in range(n):
            if at > last:
                raise _Short
            at += _LENGTH.size + _LENGTH.unpack_from(head, at)[0]
        if at > len(head):
            raise _Short
        self.at = at


def read_header(head: bytes) -> Header:
    """Read the header from the first bytes of a GGUF file, version 2 or 3, little-endian. Values stay as they are.

    An array of more than 4096 elements only gives `KEY.length`. If `head` ends within the header, the part before is
    returned: the shape is in the first kilobytes, the vocabulary's length before its megabytes, so that 64 KiB suffice
    for it in most files. Raises ValueError if it is no GGUF header.
    """
    reader = _HeaderReader(head)
    n_tensors, n_keys = _begin(reader)
    keys: Keys = {}
    spans: dict[str, tuple[int, int]] = {}
    tensors: list[Tensor] = []
    try:
        for _ in range(n_keys):
            start = reader.at
            key = _pair(reader, keys)
            if key in spans:
                raise ValueError(f"the key {key[:_SHOWN]!r} twice: no GGUF header")
            spans[key] = (start, reader.at)
        for _ in range(n_tensors):
            tensors.append(_tensor(reader))  # noqa: PERF401 - those before the end of the bytes count
    except _Short:
        return Header(n_tensors, keys, tuple(tensors), spans=spans)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("a tensor's name twice: no GGUF header")
    alignment = keys.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment!r}: no GGUF header")
    data_at = -(-reader.at // alignment) * alignment
    return Header(n_tensors, keys, tuple(tensors), whole=True, data_at=data_at, spans=spans)


def joined(parts: Iterable[Header]) -> Header:
    """Return the header of a model's first file with the tensors of all its parts."""
    first, *others = parts
    return replace(first, tensors=tuple(tensor for header in (first, *others) for tensor in header.tensors))


def shard(name: str) -> tuple[int, int]:
    """Return (part, parts) of a file by its name, counted from 1; (1, 1) for a model in one file."""
    found = _SHARD.match(name)
    return (int(found["number"]), int(found["count"])) if found else (1, 1)


def shard_names(name: str) -> list[str]:
    """Return the names of all parts of the model of the file `name`, in order."""
    found = _SHARD.match(name)
    if not found:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}{found['suffix']}" for number in range(1, count + 1)]


def with_shards(paths: Iterable[Path]) -> list[Path]:
    """Return these model files; with the first of several parts, the others too."""
    found: list[Path] = []
    for path in paths:
        found += [path, *(path.with_name(name) for name in shard_names(path.name) if name != path.name)]
    return found


def _begin(reader: _HeaderReader) -> tuple[int, int]:
    """Return the numbers of tensors and of keys. Raises ValueError."""
    try:
        magic, version = reader.take(4), int(reader.scalar("I"))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF file of version 2 or 3")
        n_tensors, n_keys = reader.count(), reader.count()
    except _Short:
        raise ValueError("too short for a GGUF file") from None
    if n_keys > _MOST_KEYS or n_tensors > _MOST_TENSORS:
        raise ValueError(f"{n_keys} keys and {n_tensors} tensors: no GGUF header")
    return n_tensors, n_keys


def _pair(reader: _HeaderReader, found: Keys) -> str:
    """Read a key and its value into `found`; return the key."""
    key, kind = reader.text(), int(reader.scalar("I"))
    if kind != _ARRAY:
        found[key] = reader.value(kind)
        return key
    inner, n = int(reader.scalar("I")), reader.count()
    if inner != _STRING and inner not in _SCALARS:
        raise ValueError(f"no GGUF array has values of type {inner}")
    found[f"{key}.length"] = n
    if n > _LISTED:
        reader.pass_by(inner, n)
        return key
    found[key] = [reader.value(inner) for _ in range(n)]
    return key


def _tensor(reader: _HeaderReader) -> Tensor:
    name, n_dims = reader.text(), int(reader.scalar("I"))
    if n_dims > _MOST_DIMS:
        raise ValueError(f"a tensor of {n_dims} dimensions: no GGUF header")
    shape = tuple(reader.count() for _ in range(n_dims))
    if (numbers := math.prod(shape)) > _MOST_NUMBERS:
        raise ValueError(f"a tensor of {numbers} numbers: no GGUF header")
    return Tensor(name, shape, int(reader.scalar("I")), reader.count())
