"""Cuts a model into ranges of layers, each a GGUF model of its own that llama.cpp loads. Pure.

A chain of ranges computes what the whole model does, bit for bit: the first takes tokens, each hands its hidden rows to
the next, and the last one gives logits. llama.cpp cannot load a part of a file, and it shows the rows of all positions
only at the *input* of a layer. So each range but the last gets one layer more, its tail, whose weights are zeros: it
adds nothing, and its input is what the range hands on. Zeros are a hole in the file: they take no disk.

Not every architecture can be cut: one that feeds its layers from the side, or that counts layers in its code, computes
something else in pieces. What is known to fail is refused here; the rest is found out by comparing (`split check`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..types import LayerRange
from .gguf import Header, Tensor, Value
from .kept_numbers import WINDOW_PERIODS
from .rounding import INTERLEAVES, may_interleave

FORMAT = 2  # of the segments' files; part of their names
_LAYER = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")
CALIBRATION = "disco.exit.calibration"  # key of a text in the header of a range with an exit
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_NO_VOCABULARY = "none"  # llama.cpp's tokenizer of a model without one
# Keys of all architectures that count something else than layers, though they may be as many.
_NO_LAYERS = ("rope.dimension_sections",)
_SCALARS = {2: "H", 4: "I", 5: "i", 6: "f", 7: "?"}
_U16, _U32, _I32, _BOOL, _TEXT, _ARRAY = 2, 4, 5, 7, 8, 9
_F32 = 0
_STATES = (".ssm_", ".time_mix_", ".shortconv.")  # in the names of tensors of layers with a state
_KEYS = (".attn_k.", ".attn_qkv.", ".attn_kv_a_mqa.")  # of layers with keys for each token


class NotCuttableError(ValueError):
    """The model cannot be cut into ranges; the message says why."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of the source file."""

    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros, which take no disk."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class GivenBytes:
    """Bytes that are in no file yet."""

    data: bytes

    @property
    def n_bytes(self) -> int:
        """How many there are."""
        return len(self.data)


Piece = FileSpan | Zeros | GivenBytes


@dataclass(frozen=True, slots=True)
class ExitTensor:
    """A tensor of an exit: shape as in the file, ggml's packing, and its bytes."""

    shape: tuple[int, ...]
    packing: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """What the file of a range consists of: its `header`, and then its weights."""

    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        """The length of the file."""
        return len(self.header) + sum(piece.n_bytes for piece in self.pieces)

    @property
    def disk_bytes(self) -> int:
        """What it takes on a disk whose file system knows holes."""
        return len(self.header) + sum(piece.n_bytes for piece in self.pieces if not isinstance(piece, Zeros))


def n_layers(header: Header) -> int:
    """Return the number of a model's layers. Raises NotCuttableError if its header does not tell."""
    found = header.number(f"{header.architecture}.block_count")
    if found is None or found < 1:
        raise NotCuttableError("its header does not say how many layers it has")
    return found


def cut(
    head: bytes,
    header: Header,
    layers: LayerRange,
    exit_: Mapping[str, ExitTensor] | None = None,
    calibration: str = "",
    *,
    apart: bool = False,
) -> Segment:
    """Return the segment of a model's `layers`; `head` are the first bytes of its file, with the whole header.

    With `exit_` the range also gives logits: those are the exit's tensors by name (`output_norm.weight` and
    `output.weight`, and `ffn_*.weight` of a block in its tail). What the range hands on stays the same. How sure the
    exit may be is kept in the header as the text `calibration`, under the key CALIBRATION. `apart` leaves out the
    embedding: the segment is then the first of two files, and `cut_embedding` returns the other one.
    Raises NotCuttableError.
    """
    _refuse(header, layers)
    placed: list[tuple[Tensor, int | bytes | None]] = list(_tensors(header, layers))
    if exit_:
        placed = list(_with_exit(placed, layers, exit_))
    keys = list(_keys(head, header, layers))
    if calibration:
        keys.append(_key(CALIBRATION, _TEXT, calibration))
    if apart:
        keys += _part_keys(0, len(placed))
        placed = [(tensor, source) for tensor, source in placed if tensor.name != _EMBEDDING]
    return _packed(header, keys, placed)


def cut_embedding(header: Header) -> Segment:
    """Return the second file of ranges cut `apart`, which is the same for all of them. Raises NotCuttableError."""
    keys = [*_part_keys(1, 0), _key("general.alignment", _U32, header.alignment)]
    return _packed(header, keys, [(t, t.offset) for t in header.tensors if t.name == _EMBEDDING])


def has_one_embedding(header: Header) -> bool:
    """Whether the embedding is the output head as well, so that the first range and the last one both need it."""
    return all(tensor.name != _OUTPUT for tensor in header.tensors)


def _part_keys(number: int, n_tensors: int) -> list[bytes]:
    """Return the keys by which llama.cpp knows a file as one of two parts; `n_tensors` are both parts'."""
    return [
        _key("split.no", _U16, number),
        _key("split.count", _U16, 2),
        _key("split.tensors.count", _I32, n_tensors),
    ]


def _packed(header: Header, keys: list[bytes], placed: Sequence[tuple[Tensor, int | bytes | None]]) -> Segment:
    """Return the file of tensors, each with its bytes, or their offset among the source's weights, or None for zeros.

    Raises NotCuttableError.
    """
    offset, infos, pieces = 0, [], list[Piece]()
    for tensor, source in placed:
        size = tensor.n_bytes
        if size is None:
            raise NotCuttableError(f"its tensor {tensor.name} is packed in a way that this program does not know")
        infos.append(_info(replace(tensor, offset=offset)))
        padded = -(-size // header.alignment) * header.alignment
        if source is None:
            pieces.append(Zeros(size))
        else:
            pieces.append(GivenBytes(source) if isinstance(source, bytes) else FileSpan(header.data_at + source, size))
        pieces.append(Zeros(padded - size))
        offset += padded
    packed = b"".join([b"GGUF", struct.pack("<IQQ", 3, len(placed), len(keys)), *keys, *infos])
    packed += bytes(-len(packed) % header.alignment)
    return Segment(packed, tuple(_joined(pieces)))


def _refuse(header: Header, layers: LayerRange) -> None:
    if not header.whole or not header.architecture:
        raise NotCuttableError("its header is longer than what was read of it, or names no architecture")
    if (header.number("split.count") or 1) > 1:
        raise NotCuttableError("it lies in several files: join them with llama-gguf-split --merge")
    if any(tensor.name.startswith(("enc.", "dec.")) for tensor in header.tensors):
        raise NotCuttableError("it has an encoder and a decoder")
    if is_recurrent(header):
        raise NotCuttableError("it is a recurrent model: its state cannot be cut back behind a wrong draft")
    if layers.is_first and layers.is_last:
        return
    if header.number(f"{header.architecture}.nextn_predict_layers"):
        raise NotCuttableError("it has layers that predict further tokens, which need the whole model")
    if any(tensor.name.startswith("per_layer_") for tensor in header.tensors):
        raise NotCuttableError("each of its layers reads an embedding of its own, which is in none of the rows")


def is_recurrent(header: Header) -> bool:
    """Whether a model carries a state through a text, by which nothing can be taken back."""
    return any(part in tensor.name for tensor in header.tensors for part in _STATES)


def state_of(header: Header) -> str:
    """Return what a model keeps of a text: "kv" for each token, of a window ("swa"), "recurrent" or "hybrid"."""
    if is_recurrent(header):
        attends = any(part in tensor.name for tensor in header.tensors for part in _KEYS)
        return "hybrid" if attends else "recurrent"
    return "swa" if header.number(f"{header.architecture}.attention.sliding_window") else "kv"


def _with_exit(
    placed: list[tuple[Tensor, int | bytes | None]], layers: LayerRange, exit_: Mapping[str, ExitTensor]
) -> Iterator[tuple[Tensor, int | bytes | None]]:
    """Yield the tensors of a first range with an exit's in place of its own. Raises NotCuttableError."""
    if not layers.is_first or layers.is_last:
        raise NotCuttableError("an exit belongs to the first of several ranges")
    new = {
        (name if name.startswith("output") else f"blk.{layers.n_layers}.{name}"): found for name, found in exit_.items()
    }
    n_vocab = next(tensor.shape[-1] for tensor, _ in placed if tensor.name == _EMBEDDING)
    if exit_[_OUTPUT].shape[-1] != n_vocab:
        raise NotCuttableError("the exit was trained for a model with another vocabulary")
    has_block = any(name.startswith("blk.") for name in new)
    for tensor, source in placed:
        own = new.pop(tensor.name, None)
        if own is None:
            if has_block and source is None and tensor.name.endswith(("post_ffw_norm.weight", "ffn_post_norm.weight")):
                raise NotCuttableError("its layers norm what their FFN gives, which a block of an exit does not")
            yield tensor, source
            continue
        if own.shape != tensor.shape:
            msg = f"the exit's {tensor.name} has another shape than the model's: it was trained for another model"
            raise NotCuttableError(msg)
        yield Tensor(tensor.name, own.shape, own.packing, 0), own.data
    for name, own in new.items():
        if name != _OUTPUT:
            raise NotCuttableError(f"its layers have no {name}, which the exit trained")
        yield Tensor(name, own.shape, own.packing, 0), own.data


# --- tensors --------------------------------------------------------------------------------------------------------


def _tensors(header: Header, layers: LayerRange) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the tensors of a range by their new names, with their offsets among the source's weights; None is zeros."""
    is_tied = has_one_embedding(header)
    tail = []
    for tensor in header.tensors:
        found = _LAYER.match(tensor.name)
        if found is None:
            yield from _shared(tensor, layers, is_tied=is_tied)
        elif layers.first <= (layer := int(found["layer"])) < layers.last:
            yield replace(tensor, name=f"blk.{layer - layers.first}.{found['rest']}"), tensor.offset
            if layer == layers.last - 1 and not layers.is_last:
                tail.append(replace(tensor, name=f"blk.{layers.n_layers}.{found['rest']}"))
    for tensor in tail:  # behind all others, so that its zeros are one hole
        yield tensor, None


def _shared(tensor: Tensor, layers: LayerRange, *, is_tied: bool) -> Iterator[tuple[Tensor, int | None]]:
    """Yield a tensor that is of no layer, where the range needs it."""
    if tensor.name == _OUTPUT:
        if layers.is_last:
            yield tensor, tensor.offset
    elif tensor.name != _EMBEDDING or layers.is_first or (layers.is_last and is_tied):
        yield tensor, tensor.offset
    elif layers.is_last:  # llama.cpp wants one for each word, though rows come in
        yield tensor, None
    else:
        yield Tensor(tensor.name, (tensor.shape[0], 1), _F32, 0), None


def _info(tensor: Tensor) -> bytes:
    """Return a tensor's entry in a header."""
    shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _text(tensor.name) + shape + struct.pack("<IQ", tensor.packing, tensor.offset)


def _joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the pieces with neighbours joined, and without empty ones."""
    last: Piece | None = None
    for piece in pieces:
        if not piece.n_bytes:
            continue
        match last, piece:
            case FileSpan(offset, n), FileSpan() if piece.offset == offset + n:
                last = FileSpan(offset, n + piece.n_bytes)
            case Zeros(n), Zeros():
                last = Zeros(n + piece.n_bytes)
            case _:
                if last is not None:
                    yield last
                last = piece
    if last is not None:
        yield last


# --- keys -----------------------------------------------------------------------------------------------------------


def _keys(head: bytes, header: Header, layers: LayerRange) -> Iterator[bytes]:
    """Yield the entries of the range's keys: the model's own, but for those that count layers, or tell words."""
    own = f"{header.architecture}."
    new = dict(_counted(header, layers))
    is_mute = not (layers.is_first or layers.is_last)
    if is_mute:
        new[f"{own}vocab_size"] = _key(f"{own}vocab_size", _U32, 1)
        new["tokenizer.ggml.model"] = _key("tokenizer.ggml.model", _TEXT, _NO_VOCABULARY)
    for key, (start, end) in header.spans.items():
        of_words, of_parts = key.startswith("tokenizer."), key.startswith("split.")  # parts that have been joined
        if key not in new and not (is_mute and of_words) and not of_parts:
            yield head[start:end]
    yield from new.values()
    for name, number in (("first", layers.first), ("last", layers.last), ("of", layers.of)):
        yield _key(f"disco.segment.{name}", _U32, number)
    yield _key(INTERLEAVES, _U32, int(may_interleave(header)))


def _counted(header: Header, layers: LayerRange) -> Iterator[tuple[str, bytes]]:
    """Yield the entries of the keys that count layers, or have a value for each."""
    own, n_tail = f"{header.architecture}.", 0 if layers.is_last else 1
    yield f"{own}block_count", _key(f"{own}block_count", _U32, layers.n_layers + n_tail)
    dense = header.number(f"{own}leading_dense_block_count")
    if dense is not None:
        yield (
            f"{own}leading_dense_block_count",
            _key(f"{own}leading_dense_block_count", _U32, max(0, dense - layers.first)),
        )
    for key, values in header.keys.items():
        counts = isinstance(values, list) and len(values) == layers.of and key.startswith(own)
        if counts and not key.endswith(_NO_LAYERS):
            assert isinstance(values, list)
            yield key, _list(key, _own(values, layers))
    windows, key = WINDOW_PERIODS.get(header.architecture), f"{own}attention.sliding_window_pattern"
    if windows is not None and f"{own}attention.sliding_window" in header.keys and key not in _arrays(header):
        period, begins_dense = header.number(key) or windows[0], windows[1]
        dense_at = 0 if begins_dense else period - 1
        yield key, _list(key, _own([layer % period != dense_at for layer in range(layers.of)], layers))


def _arrays(header: Header) -> frozenset[str]:
    """Return the keys whose value is an array."""
    return frozenset(key for key, value in header.keys.items() if isinstance(value, list))


def _own(values: list[Value], layers: LayerRange) -> list[Value]:
    """Return the values of a range's own layers; a tail has that of the layer before it."""
    own = values[layers.first : layers.last]
    return own if layers.is_last else [*own, own[-1]]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(key: str, kind: int, value: int | str) -> bytes:
    packed = _text(value) if isinstance(value, str) else struct.pack(f"<{_SCALARS[kind]}", value)
    return _text(key) + struct.pack("<I", kind) + packed


def _list(key: str, values: list[Value]) -> bytes:
    """Return the entry of an array of numbers or of truth values."""
    kind = _BOOL if isinstance(values[0], bool) else 6 if isinstance(values[0], float) else 5
    packed = struct.pack(f"<{len(values)}{_SCALARS[kind]}", *values)
    return _text(key) + struct.pack("<IIQ", _ARRAY, kind, len(values)) + packed
