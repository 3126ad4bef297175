"""Tensors of a model's file as numbers: ggml unpacks whatever it has packed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from llama_cpp._ctypes_extensions import load_shared_library
from llama_cpp._ggml import libggml_base_path

from ...models.gguf import Header, Tensor
from .hidden import FloatRows
from .refusals import ModelError


class _Traits(ctypes.Structure):
    """ggml.h, `struct ggml_type_traits`, as far as it is used."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)),
    )


_base = load_shared_library("ggml-base", libggml_base_path)
_base.ggml_get_type_traits.argtypes = [ctypes.c_int]
_base.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
F32 = 0


def read_packed(path: Path, header: Header, tensor: Tensor) -> bytes:
    """Return a tensor's bytes as they are in a model's file. Raises ModelError if they are not there."""
    n_bytes = tensor.n_bytes or 0
    with path.open("rb") as file:
        file.seek(header.data_at + tensor.offset)
        data = file.read(n_bytes)
    if len(data) != n_bytes or not data:
        raise ModelError(f"{path.name} ends within its weights, or has some that cannot be read")
    return data


def read_weights(path: Path, header: Header, name: str) -> FloatRows:
    """Return a tensor of a model, with the shape's longest stride first. Raises ModelError if it is not there."""
    tensor = find_weights(header, name)
    if tensor is None or tensor.n_bytes is None:
        raise ModelError(f"{path.name} has no weights {name} that can be read")
    data = read_packed(path, header, tensor)
    shape = tensor.shape[::-1]
    if tensor.packing == F32:
        return np.frombuffer(data, np.float32).reshape(shape)
    traits = _base.ggml_get_type_traits(tensor.packing).contents
    if not traits.to_float:
        raise ModelError(f"llama.cpp does not unpack the weights {name} of {path.name}")
    found = np.empty(tensor.n_numbers, np.float32)
    traits.to_float(data, found.ctypes.data, tensor.n_numbers)
    return found.reshape(shape)


def find_weights(header: Header, name: str) -> Tensor | None:
    """Return the tensor of this name; None if there is none."""
    return next((tensor for tensor in header.tensors if tensor.name == name), None)


def read_output(path: Path, header: Header) -> FloatRows:
    """Return a model's output matrix, n_vocab x n_embd: its own, or the embedding's. Raises ModelError."""
    name = "output.weight" if find_weights(header, "output.weight") else "token_embd.weight"
    return read_weights(path, header, name)
