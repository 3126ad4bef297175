"""What a model's tokens take on a machine, by what the machine was measured to do at most: a roofline. Pure.

A token that is written alone reads all weights once; a prompt reads them once a batch, and each of its tokens
multiplies each once. How fast that goes differs by packing, and for experts, so each is measured by itself
(`engine.measure.machine_speed`), with the kernels that will compute. On top come attention, by how many tokens stand
before, what is done number by number, and what starting an operation takes.
(S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52(4), 2009.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

# Bits of a number in a block of ggml's: ggml-common.h.
BITS = {
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q5_1": 6.0, "Q5_0": 5.5,
    "Q4_K": 4.5, "Q4_1": 5.0, "Q4_0": 4.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "Q3_K": 3.4375, "Q2_K": 2.625,
}  # fmt: skip
OPERATIONS = 24  # of a layer: norms, products, rotations, attention, gates, sums, copies into cells
BATCH = 512  # tokens of a prompt that are computed together
# How many times a number of a row is touched in a layer, beside products. Chosen on the shape of 0.6B:
# `python -m benchmarks.engine.predicted` judges them on others.
TOUCHED_HIDDEN, TOUCHED_INNER, TOUCHED_HEADS = 10.0, 4.0, 4.0
ERROR = {"decode": 0.15, "prompt": 0.25, "memory": 0.07}  # what predictions are off by at most, where that was measured


class PackedSpeed(msgspec.Struct, frozen=True):
    """Products with weights in one packing: bytes of them a second for one token, multiply-adds a second for many."""

    bytes_per_s: float
    multiply_adds_per_s: float


class MachineSpeed(msgspec.Struct, frozen=True):
    """What a machine does at most in a second, with so many threads.

    `packings` are products by the packing of weights, `experts` those with the experts that tokens chose. Attention is
    in multiply-adds, for one token and for many, while caches hold the cells; `kept_bytes_per_s` is how fast one token
    reads them from memory, by the length of a head, whose numbers lie together. `elements_per_s` are numbers that are
    multiplied one by one, `scaled_per_s` those of rows that are multiplied with one number each. `operation_s` is what
    an operation of no size takes, s.
    """

    packings: dict[str, PackedSpeed]
    experts: dict[str, PackedSpeed]
    kept_bytes_per_s: dict[str, float]
    attention_one_per_s: float
    attention_many_per_s: float
    elements_per_s: float
    scaled_per_s: float
    operation_s: float
    n_threads: int

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of memory, bytes a second: of the packing that comes closest."""
        return max(speed.bytes_per_s for speed in self.packings.values())

    def of(self, packing: str) -> PackedSpeed:
        """Return the speed of a packing; of one that was not measured, that of the next in bits, by its numbers."""
        return _nearest(self.packings, packing)

    def of_experts(self, packing: str) -> PackedSpeed:
        """Return the same of experts' products."""
        return _nearest(self.experts, packing)

    def kept_speed(self, head_dim: int) -> float:
        """Return how many bytes of cells one token reads a second, whose heads are so long: as of the next length."""
        return self.kept_bytes_per_s[min(self.kept_bytes_per_s, key=lambda length: abs(int(length) - head_dim))]


def _nearest(speeds: Mapping[str, PackedSpeed], packing: str) -> PackedSpeed:
    if packing in speeds:
        return speeds[packing]
    bits = BITS.get(packing, 4.5)
    near = min(speeds, key=lambda name: abs(BITS[name] - bits))
    found = speeds[near]
    return PackedSpeed(found.bytes_per_s * bits / BITS[near], found.multiply_adds_per_s)


@dataclass(frozen=True, slots=True)
class TokenWork:
    """What a token takes of a model.

    `weights` are numbers by packing, without the output `head`, which a prompt needs once. `experts` are those of the
    experts that one token uses, `used` as a share of all. Attention is in multiply-adds for each token before, in
    layers that see all and in those that see a `window`; `kept_bytes` is what each leaves there, in heads of `head_dim`
    numbers. `touched` numbers are computed one by one; `weighed` are those that experts give, each row by its weight.
    """

    weights: Mapping[str, float]
    head: Mapping[str, float]
    layers: int
    attention: float
    kept_bytes: float
    touched: float
    window: int = 0
    window_attention: float = 0.0
    window_kept_bytes: float = 0.0
    head_dim: int = 128
    experts: Mapping[str, float] = field(default_factory=dict)
    used: float = 1.0
    weighed: float = 0.0

    def decode_s(self, machine: MachineSpeed, context: float) -> float:
        """Return what one token takes behind a context of so many tokens, s."""
        seen = min(context, self.window)
        attention = context * self.attention + seen * self.window_attention
        kept = context * self.kept_bytes + seen * self.window_kept_bytes
        return (
            _read_s(self.weights, machine.of)
            + _read_s(self.experts, machine.of_experts)
            + _read_s(self.head, machine.of)
            + max(attention / machine.attention_one_per_s, kept / machine.kept_speed(self.head_dim))
            + self._one_by_one_s(machine)
            + self.layers * OPERATIONS * machine.operation_s
        )

    def prompt_s(self, machine: MachineSpeed, n: float) -> float:
        """Return what reading a prompt of n tokens takes until there are logits for the first of an answer, s."""
        within = min(n, self.window)
        pairs = within * within / 2 + (n - within) * within
        attention = n * n / 2 * self.attention + pairs * self.window_attention
        batches = max(1.0, n / BATCH)
        needed = (1 - math.pow(1 - self.used, min(n, BATCH))) / self.used  # times the experts of a token
        return (
            n * (_multiply_s(self.weights, machine.of) + _multiply_s(self.experts, machine.of_experts))
            + batches * _read_s(self.weights, machine.of)  # what comes from memory is not multiplied meanwhile
            + batches * needed * _read_s(self.experts, machine.of_experts)
            + _read_s(self.head, machine.of)
            + attention / machine.attention_many_per_s
            + n * self._one_by_one_s(machine)
            + batches * self.layers * OPERATIONS * machine.operation_s
        )

    def _one_by_one_s(self, machine: MachineSpeed) -> float:
        return (self.touched + self.weighed) / machine.elements_per_s + self.weighed / machine.scaled_per_s  # and added


def touched(hidden: int, inner: int, at_query: int) -> float:
    """Return how many numbers of a token's rows a layer computes one by one, by the lengths of its rows."""
    return TOUCHED_HIDDEN * hidden + TOUCHED_INNER * inner + TOUCHED_HEADS * at_query


def _read_s(weights: Mapping[str, float], speed: Callable[[str], PackedSpeed]) -> float:
    return sum(n * BITS[name] / 8 / speed(name).bytes_per_s for name, n in weights.items())


def _multiply_s(weights: Mapping[str, float], speed: Callable[[str], PackedSpeed]) -> float:
    return sum(n / speed(name).multiply_adds_per_s for name, n in weights.items())


# What the matrices of a file are packed in: most of them, and those that get more bits (llama-quant.cpp).
MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K"), "Q4_K_S": ("Q4_K", "Q5_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "Q5_K_S": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q8_0"), "Q8_0": ("Q8_0", "Q8_0"), "Q4_0": ("Q4_0", "Q6_K"), "Q4_1": ("Q4_1", "Q6_K"),
    "IQ4_NL": ("IQ4_NL", "Q6_K"), "IQ4_XS": ("IQ4_XS", "Q6_K"), "MXFP4": ("MXFP4", "Q8_0"), "F16": ("F16", "F16"),
    "BF16": ("BF16", "BF16"), "F32": ("F32", "F32"), "Q3_K_M": ("Q3_K", "Q5_K"), "Q2_K": ("Q2_K", "Q4_K"),
}  # fmt: skip
_HEADS = {"Q8_0": "Q8_0", "MXFP4": "Q8_0", "F16": "F16", "BF16": "BF16", "F32": "F32"}  # the others': Q6_K
_BLOCK = 256  # numbers that a K packing takes together; rows of another length get another
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL", "Q3_K": "IQ4_NL", "Q2_K": "Q4_0"}


def is_odd(hidden: int, packing: str) -> bool:
    """Whether most matrices of a file cannot be in the packing that it is named by: their rows are no whole blocks."""
    return hidden % _BLOCK != 0 and MIXTURES.get(packing.upper(), ("Q4_K", ""))[0] in _INSTEAD


def mixture(packing: str, hidden: int) -> tuple[str, str]:
    """Return what most matrices of a file are packed in, and the others; their rows have `hidden` numbers."""
    name = packing.upper().removeprefix("UD-")
    found = MIXTURES.get(name) or MIXTURES["Q4_K_M"]
    return found if hidden % _BLOCK == 0 else (_INSTEAD.get(found[0], found[0]), _INSTEAD.get(found[1], found[1]))


def head_packing(packing: str, hidden: int) -> str:
    """Return what the output head of a file is packed in, which is the embeddings too where they are one."""
    found = _HEADS.get(packing.upper(), "Q6_K")
    return found if hidden % _BLOCK == 0 else _INSTEAD.get(found, found)


def split_odd(n_weights: float, layers: int, hidden: int, inner: int, at_query: int, packing: str) -> dict[str, float]:
    """Return the same of a model whose rows no K packing can take: only two matrices of a layer have others.

    Of the feed-forward part's second one half the layers have more bits; the other is attention's last.
    """
    most, more = MIXTURES.get(packing.upper(), MIXTURES["Q4_K_M"])
    down = layers * hidden * inner if inner % _BLOCK == 0 else 0
    out = layers * hidden * at_query if at_query % _BLOCK == 0 else 0
    found = dict.fromkeys((most, more, _INSTEAD.get(most, most)), 0.0)
    found[most] += down / 2 + out
    found[more] += down / 2
    found[_INSTEAD.get(most, most)] += max(0.0, n_weights - down - out)
    return found


def split(n_weights: float, n_bytes: float, packing: str, hidden: int) -> dict[str, float]:
    """Return how many of a file's weights are in which packing, by the bytes that they have together."""
    most, more = mixture(packing, hidden)
    if most == more or n_weights <= 0:
        return {most: n_weights}
    bits = 8 * n_bytes / n_weights
    share = min(1.0, max(0.0, (bits - BITS[most]) / (BITS[more] - BITS[most])))
    return {most: (1 - share) * n_weights, more: share * n_weights}
