"""The shape of a model, as the header of its file tells it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .gguf import Header, Value

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # tensors of experts: llama.cpp, common.h, LLM_FFN_EXPS_REGEX
_OF_A_LAYER = re.compile(rf"^blk\.(\d{{1,4}}){EXPERTS}")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a decoder-only transformer that say how much memory it takes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def __post_init__(self) -> None:
        """Raise ValueError for a number below 1."""
        wrong = [f.name for f in fields(self) if getattr(self, f.name) < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be at least 1")


def shape_of(metadata: Mapping[str, Value | list[Value]]) -> ModelShape:
    """Return the shape in a GGUF file's keys (github.com/ggml-org/ggml, docs/gguf.md), as `read_header` has them.

    Where layers differ (a list of values), their mean counts, and one head where none attends. Raises ValueError that
    names what is missing.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError("general.architecture is missing: no GGUF metadata of a model")  # noqa: TRY004 - file, not caller

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        if not numbers:
            raise ValueError(f"{arch}.{key} is missing")
        return round(sum(numbers) / len(numbers))

    hidden, is_recurrent = number("embedding_length"), f"{arch}.ssm.state_size" in metadata
    heads = max(number("attention.head_count", 1), 1) if is_recurrent else number("attention.head_count")
    return ModelShape(
        layers=number("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads) or int(is_recurrent),
        head_dim=number("attention.key_length", hidden // max(1, heads)),
        vocab=_vocabulary(metadata, arch),
    )


def expert_bytes(header: Header, n_layers: int) -> tuple[int, ...]:
    """Return the bytes of the experts in each layer; () of a model without any. `header` has the tensors of all parts.

    Tensors in a packing that this program does not know count as none.
    """
    found = [0] * n_layers
    for tensor in header.tensors:
        match = _OF_A_LAYER.match(tensor.name)
        if match and (layer := int(match[1])) < n_layers:
            found[layer] += tensor.n_bytes or 0
    return tuple(found) if any(found) else ()


def _vocabulary(metadata: Mapping[str, Value | list[Value]], arch: str) -> int:
    for key in ("tokenizer.ggml.tokens.length", f"{arch}.vocab_size"):
        if isinstance(found := metadata.get(key), int):
            return found
    raise ValueError(f"neither {arch}.vocab_size nor tokenizer.ggml.tokens is there")
