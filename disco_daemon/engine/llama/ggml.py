"""ggml from Python: tensors over numpy's memory, and graphs of operations that its CPU kernels compute.

llama-cpp-python binds llama.cpp alone. Measuring kernels and checking them needs the library below.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import library

F32, F16, Q8_K, I32, BF16 = 0, 1, 15, 26, 30
Array = NDArray[Any]
Shape = tuple[int, int, int, int]


class GgmlTensor(ctypes.Structure):
    """ggml.h, `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )  # fmt: skip


Node = Any  # a pointer to a GgmlTensor; ctypes has no name for that which mypy takes


class _Memory(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p), ("abort_callback", ctypes.c_void_p), ("abort_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )  # fmt: skip


_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p), ("blck_size", ctypes.c_int64), ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool), ("to_float", _TO_FLOAT),
    )  # fmt: skip


class _CpuTraits(ctypes.Structure):
    _fields_ = (
        ("from_float", _TO_FLOAT), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """A type of ggml's: numbers and bytes of a block, and the type that rows are packed into for a product with it.

    `is_of_weights`: there are such products.
    """

    number: int
    name: str
    block: int
    n_bytes: int
    of_rows: int
    is_of_weights: bool


class Ggml:
    """The libraries in a folder, or in one that holds all (`kernels`), as llama.cpp has them."""

    def __init__(self, base: ctypes.CDLL, cpu: ctypes.CDLL) -> None:
        self.base, self.cpu = base, cpu
        place, number, node = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(GgmlTensor)
        for part, name, result, arguments in (
            (base, "ggml_init", place, (_Memory,)),
            (base, "ggml_free", None, (place,)),
            (base, "ggml_new_tensor", node, (place, ctypes.c_int, ctypes.c_int, ctypes.POINTER(number))),
            (base, "ggml_mul_mat", node, (place, node, node)),
            (base, "ggml_mul", node, (place, node, node)),
            (base, "ggml_mul_mat_id", node, (place, node, node, node)),
            (base, "ggml_flash_attn_ext", node, (place, node, node, node, node, *[ctypes.c_float] * 3)),
            (base, "ggml_flash_attn_ext_add_sinks", None, (node, node)),
            (base, "ggml_new_graph_custom", place, (place, ctypes.c_size_t, ctypes.c_bool)),
            (base, "ggml_build_forward_expand", None, (place, node)),
            (base, "ggml_get_type_traits", ctypes.POINTER(_TypeTraits), (ctypes.c_int,)),
            (base, "ggml_quantize_chunk", ctypes.c_size_t, (ctypes.c_int, place, place, *[number] * 3, place)),
            (cpu, "ggml_get_type_traits_cpu", ctypes.POINTER(_CpuTraits), (ctypes.c_int,)),
            (cpu, "ggml_cpu_init", None, ()),
            (cpu, "ggml_graph_plan", _Plan, (place, ctypes.c_int, place)),
            (cpu, "ggml_graph_compute", ctypes.c_int, (place, ctypes.POINTER(_Plan))),
        ):
            function = getattr(part, name)
            function.restype, function.argtypes = result, arguments
        cpu.ggml_cpu_init()

    @classmethod
    def of_folder(cls, folder: Path) -> Ggml:
        """Load the libraries of a folder. Raises OSError where they are not there."""
        found = [next(iter(sorted(folder.glob(f"libggml-{part}.*"))), folder / part) for part in ("base", "cpu")]
        return cls(*(ctypes.CDLL(str(path)) for path in found))

    @classmethod
    def installed(cls) -> Ggml:
        """Return the libraries that the engine computes with."""
        return cls(library.LIBRARY, library.kernels())

    def marks(self, names: Sequence[str]) -> dict[str, int]:
        """Return versions of changes by their names; 0 where a build has not a change."""
        found = {}
        for name in names:
            try:
                found[name] = ctypes.c_int.in_dll(self.cpu, name).value
            except ValueError:
                found[name] = 0
        return found

    def packing(self, number: int) -> Packing | None:
        """Return a type of ggml's that weights or rows can have; None where this is none."""
        traits = self.base.ggml_get_type_traits(number).contents
        cpu = self.cpu.ggml_get_type_traits_cpu(number).contents
        if not traits.type_name or not traits.blck_size or not (cpu.vec_dot or cpu.from_float):
            return None
        name = traits.type_name.decode()
        return Packing(number, name, traits.blck_size, traits.type_size, cpu.vec_dot_type, bool(cpu.vec_dot))

    def packed(self, packing: Packing, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Pack weights as a model's file has them."""
        found = np.zeros(numbers.size // packing.block * packing.n_bytes, np.uint8)
        if packing.number == F32:
            return numbers.reshape(-1).view(np.uint8)
        even = np.ones(numbers.shape[-1], np.float32)  # importance; some types want to know
        self.base.ggml_quantize_chunk(
            packing.number, numbers.ctypes.data, found.ctypes.data, 0, len(numbers), numbers.shape[-1], even.ctypes.data
        )
        return found

    def rows(self, packing: Packing, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Pack rows as a product has them."""
        if packing.number == F32:
            return numbers.reshape(-1).view(np.uint8)
        found = np.zeros(numbers.size // packing.block * packing.n_bytes, np.uint8)
        self.cpu.ggml_get_type_traits_cpu(packing.number).contents.from_float(
            numbers.ctypes.data, found.ctypes.data, numbers.size
        )
        return found

    def unpacked(self, packing: Packing, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the numbers that packed ones stand for."""
        if packing.number == F32:
            return data.view(np.float32)
        found = np.empty(data.size // packing.n_bytes * packing.block, np.float32)
        self.base.ggml_get_type_traits(packing.number).contents.to_float(
            data.ctypes.data, found.ctypes.data, found.size
        )
        return found


class Graph:
    """Operations that are computed one after the other, again and again."""

    def __init__(self, ggml: Ggml, n_nodes: int) -> None:
        self.ggml = ggml
        self._context = ggml.base.ggml_init(_Memory((1 << 20) + n_nodes * 4096, None, True))
        self._graph = ggml.base.ggml_new_graph_custom(self._context, 8 * n_nodes, False)
        self._kept: list[Array] = []

    def tensor(self, number: int, ne: Sequence[int], nb: Sequence[int], memory: Array, offset: int = 0) -> Node:
        """Return a tensor of this type and shape, `nb` bytes from one to the next, over memory from `offset` on."""
        node = self.ggml.base.ggml_new_tensor(self._context, number, 4, (ctypes.c_int64 * 4)(*ne))
        node.contents.nb[:] = nb
        node.contents.data = memory.ctypes.data + offset
        self._kept.append(memory)
        return node

    def call(self, name: str, *arguments: Any) -> Node:
        """Return the node of an operation."""
        return getattr(self.ggml.base, name)(self._context, *arguments)

    def compute_into(self, node: Node, memory: NDArray[np.float32], nb: Sequence[int]) -> None:
        """Have an operation's result computed into memory, `nb` bytes from one to the next."""
        node.contents.nb[:] = nb
        node.contents.data = memory.ctypes.data
        self._kept.append(memory)
        self.ggml.base.ggml_build_forward_expand(self._graph, node)

    def run(self, n_threads: int) -> None:
        """Compute all. Raises RuntimeError if ggml refuses."""
        plan = self.ggml.cpu.ggml_graph_plan(self._graph, n_threads, None)
        work = np.full(plan.work_size + 64, 0xFF, np.uint8)  # nothing that was there before may be of use
        plan.work_data = -(-work.ctypes.data // 64) * 64
        if rc := self.ggml.cpu.ggml_graph_compute(self._graph, ctypes.byref(plan)):
            msg = f"ggml_graph_compute returned {rc}"
            raise RuntimeError(msg)

    def close(self) -> None:
        """Give the nodes' memory back."""
        self.ggml.base.ggml_free(self._context)
