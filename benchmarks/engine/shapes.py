"""Whole model files with random weights, in the shapes and packings of models that people run.

`make` writes a file in seconds: a matrix is drawn from a thousand blocks that ggml has packed. What a model says
is nonsense, but each product is as large, and each weight as wide, as in a file of users. The packing of each tensor is
the one that llama_model_quantize gives it (llama.cpp, src/llama-quant.cpp; `tests/unit/benchmarks/test_shapes.py` holds
it against that).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disco_daemon.engine.llama.ggml import Ggml, Packing
from disco_daemon.models.default import default_model_path
from tests.fixtures import gguf
from tests.fixtures.weights import vocabulary_of

CONTEXT = 32768  # tokens that a model says it was made for
UNIT, N_UNITS = 256, 1024  # numbers of a block that is drawn, the largest of any packing, and how many there are
AT_ONCE = 1 << 16  # units that are drawn and written at a time
ALIGNMENT = 32
F32, Q5_K, Q6_K, Q8_0, MXFP4 = 0, 13, 14, 8, 39  # ggml's types, as in a file


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its layers, and the lengths of a token's row, of the feed-forward part, and of a head.

    Of `n_experts` each token has `n_used`, all with `n_ff`. Layers that are not in `attention` are convolutions (None:
    all have attention). `is_tied`: the output head is the embeddings. `n_words` is the size of the vocabulary, at
    least that of the default model.
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head: int
    n_words: int = 0
    is_tied: bool = True
    n_experts: int = 0
    n_used: int = 0
    attention: tuple[int, ...] | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    def has_attention(self, layer: int) -> bool:
        """Whether this layer has attention."""
        return self.attention is None or layer in self.attention

    def tensors(self, n_words: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, the length of a row first."""
        yield "token_embd.weight", (self.n_embd, n_words)
        if not self.is_tied:
            yield "output.weight", (self.n_embd, n_words)
        yield f"{'token_embd' if self.architecture == 'lfm2' else 'output'}_norm.weight", (self.n_embd,)
        for layer in range(self.n_layers):
            for name, shape in self._layer(layer):
                yield f"blk.{layer}.{name}.weight", shape

    def _layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        n, n_ff, at_query, at_key = self.n_embd, self.n_ff, self.n_heads * self.head, self.n_kv_heads * self.head
        yield "attn_norm", (n,)
        if self.has_attention(layer):
            yield from (("attn_q", (n, at_query)), ("attn_k", (n, at_key)), ("attn_v", (n, at_key)))
            yield "attn_output", (at_query, n)
            if self.architecture != "llama":
                yield from (("attn_q_norm", (self.head,)), ("attn_k_norm", (self.head,)))
        else:
            yield from (("shortconv.conv", (3, n)), ("shortconv.in_proj", (n, 3 * n)), ("shortconv.out_proj", (n, n)))
        yield "ffn_norm", (n,)
        if self.n_experts:
            yield from (("ffn_gate_inp", (n, self.n_experts)), ("ffn_gate_exps", (n, n_ff, self.n_experts)))
            yield from (("ffn_up_exps", (n, n_ff, self.n_experts)), ("ffn_down_exps", (n_ff, n, self.n_experts)))
        else:
            yield from (("ffn_gate", (n, n_ff)), ("ffn_up", (n, n_ff)), ("ffn_down", (n_ff, n)))


WORDS = 151_936  # of Qwen3's vocabulary
SHAPES = {
    "tiny": Shape("qwen3", 2, 256, 512, 4, 2, 64),
    "0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, WORDS),  # Qwen3-0.6B
    "1.7b": Shape("llama", 24, 2048, 8192, 32, 32, 64),  # SmolLM2-1.7B
    "3b": Shape("llama", 28, 3072, 8192, 24, 8, 128, 128_256),  # Llama-3.2-3B
    "4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, WORDS),  # Qwen3-4B
    "8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, WORDS, is_tied=False),  # Qwen3-8B
    "moe": Shape("qwen3moe", 24, 1024, 512, 16, 8, 64, n_experts=32, n_used=8),  # as Granite 3.1 1B-A400M
    "hybrid": Shape(
        "lfm2", 16, 2048, 8192, 32, 8, 64, 65_536, attention=(2, 5, 8, 10, 12, 14), others={"shortconv.l_cache": 3}
    ),  # LFM2-1.2B
}  # fmt: skip
QUANTS = {  # llama.h, `llama_ftype`, and ggml.h, the `ggml_type` of most weights
    "f32": (0, F32), "f16": (1, 1), "bf16": (32, 30), "q8_0": (7, Q8_0), "q6_k": (18, Q6_K), "q5_k_m": (17, Q5_K),
    "q4_k_m": (15, 12), "q4_0": (2, 2), "q4_1": (3, 3), "iq4_nl": (25, 20), "iq4_xs": (30, 23), "mxfp4": (38, MXFP4),
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")


def packing_of(name: str, dims: Sequence[int], shape: Shape, quant: str) -> int:
    """Return the type of a tensor in a file of this packing, as llama_model_quantize chooses it.

    One thing is not its choice: of a dense model MXFP4 has the feed-forward part, where it would pack nothing so.
    """
    usual = QUANTS[quant][1]
    if len(dims) == 1 or "shortconv.conv" in name or "ffn_gate_inp" in name:
        return F32
    if quant in FLOATS:
        return usual
    if name.startswith("output.") or (name.startswith("token_embd.") and shape.is_tied):
        return Q8_0 if quant in ("q8_0", "mxfp4") else Q6_K
    if quant == "mxfp4":
        return MXFP4 if ".ffn_" in name else Q8_0
    if ".attn_v." in name:
        with_values = [layer for layer in range(shape.n_layers) if shape.has_attention(layer)]
        if quant in ("q4_k_m", "q5_k_m") and _has_more_bits(with_values.index(_layer_of(name)), len(with_values)):
            return Q6_K
        is_shared = shape.has_attention(0) and shape.n_heads // shape.n_kv_heads >= 4
        return Q5_K if quant in ("iq4_nl", "iq4_xs") and is_shared else usual
    if ".ffn_down" in name:
        if quant in ("q4_k_m", "q5_k_m") and _has_more_bits(_layer_of(name), shape.n_layers):
            return Q6_K
        return Q5_K if quant in ("iq4_nl", "iq4_xs") and _layer_of(name) < shape.n_layers // 8 else usual
    return usual


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _has_more_bits(i: int, n: int) -> bool:
    """llama-quant.cpp, `use_more_bits`."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def make(path: Path, shape: Shape, quant: str, ggml: Ggml, speaker: Path | None = None, seed: int = 0) -> Path:
    """Write a model with random weights, and the vocabulary and template of `speaker`, the default model's."""
    entries, n_known = vocabulary_of(speaker or default_model_path())
    n_words = max(n_known, shape.n_words)
    tensors = [(name, dims, packing_of(name, dims, shape, quant)) for name, dims in shape.tensors(n_words)]
    weights, told, at = _Weights(ggml, np.random.default_rng(seed), 1 / math.sqrt(shape.n_embd)), [], 0
    for name, dims, packing in tensors:
        told.append(gguf.tensor(name, dims, packing, at))
        at += -(-weights.n_bytes(dims, packing) // ALIGNMENT) * ALIGNMENT
    head = gguf.header(
        gguf.encoded("general.architecture", shape.architecture),
        gguf.encoded("general.name", f"Random {quant}"),
        gguf.number("general.file_type", QUANTS[quant][0]),
        *_widened(entries, n_known, n_words),
        *_numbers(shape, n_words),
        tensors=told,
    )
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, dims, packing in tensors:
            for piece in weights.of(dims, packing):
                file.write(piece)
            file.write(bytes(-file.tell() % ALIGNMENT))
    return path


def _numbers(shape: Shape, n_words: int) -> Iterator[bytes]:
    """Yield the header's entries of a shape."""
    numbers: dict[str, int] = {
        "context_length": CONTEXT, "embedding_length": shape.n_embd, "block_count": shape.n_layers,
        "feed_forward_length": shape.n_ff, "vocab_size": n_words, "attention.head_count": shape.n_heads,
        "attention.key_length": shape.head, "attention.value_length": shape.head, "rope.dimension_count": shape.head,
        **shape.others,
    }  # fmt: skip
    if shape.n_experts:
        numbers |= {"expert_count": shape.n_experts, "expert_used_count": shape.n_used}
        numbers["expert_feed_forward_length"] = shape.n_ff
    for key, value in numbers.items():
        yield gguf.number(f"{shape.architecture}.{key}", value)
    kv = f"{shape.architecture}.attention.head_count_kv"
    if shape.attention is None:
        yield gguf.number(kv, shape.n_kv_heads)
    else:
        yield gguf.int32s(kv, [shape.n_kv_heads * shape.has_attention(i) for i in range(shape.n_layers)])
    yield gguf.float32(f"{shape.architecture}.attention.layer_norm_rms_epsilon", 1e-5)


def _widened(entries: Sequence[bytes], n_known: int, n_words: int) -> Iterator[bytes]:
    """Yield a vocabulary's entries with further words that no text has: a large head takes its time."""
    more = {
        "tokenizer.ggml.tokens": b"".join(gguf.text(f"[{i}]") for i in range(n_known, n_words)),
        "tokenizer.ggml.token_type": struct.pack("<i", 1) * (n_words - n_known),  # normal
        "tokenizer.ggml.scores": bytes(4 * (n_words - n_known)),
    }
    for entry in entries:
        n_key = struct.unpack_from("<Q", entry)[0]
        key, at = entry[8 : 8 + n_key].decode(), 16 + n_key  # behind the kind of the value, and that of its elements
        if key in more:
            yield entry[:at] + struct.pack("<Q", n_words) + entry[at + 8 :] + more[key]
        else:
            yield entry


class _Weights:
    """Random numbers as a file has them; of each packing a thousand blocks, from which all are drawn."""

    def __init__(self, ggml: Ggml, chance: np.random.Generator, spread: float) -> None:
        self._ggml, self._chance, self._spread = ggml, chance, spread
        self._units: dict[int, NDArray[np.uint8]] = {}

    def n_bytes(self, dims: Sequence[int], packing: int) -> int:
        """Return the size of a tensor, bytes."""
        found = self._packing(packing)
        return math.prod(dims) // found.block * found.n_bytes

    def of(self, dims: Sequence[int], packing: int) -> Iterator[bytes]:
        """Yield a tensor's numbers, packed; what is no matrix is a norm."""
        n = math.prod(dims)
        if len(dims) == 1:
            yield np.ones(n, np.float32).tobytes()
            return
        units = self._packed(packing)
        for begin in range(0, n // UNIT, AT_ONCE):
            yield units[self._chance.integers(0, N_UNITS, min(AT_ONCE, n // UNIT - begin))].tobytes()

    def _packed(self, packing: int) -> NDArray[np.uint8]:
        if packing not in self._units:
            numbers = (self._spread * self._chance.standard_normal((N_UNITS, UNIT))).astype(np.float32)
            self._units[packing] = self._ggml.packed(self._packing(packing), numbers).reshape(N_UNITS, -1)
        return self._units[packing]

    def _packing(self, number: int) -> Packing:
        found = self._ggml.packing(number)
        assert found is not None
        return found
