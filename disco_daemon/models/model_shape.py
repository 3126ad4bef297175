"""Arithmetic of a token, from the shape of a model. Pure.

Why: energy is taken as proportional to floating-point operations, which carries a figure measured at one length or
model over to others (the linear energy model of DiSCo, arXiv 2502.11417, Appendix E, Eqs. 7 to 9).

The formulas are the standard ones, not the paper's: it counts an embedding as a full product and a multiplication with
its addition as 1, and states other shapes than its models have (`benchmarks.eval.published` has its own, to reproduce
its tables). Here: Kaplan et al., Scaling Laws for Neural Language Models (arXiv 2001.08361), Table 1, with grouped keys
and values, gated and mixed feed-forward layers, and the true position in place of the mean context. One multiplication
with its addition counts 2. Not counted: softmax, rotations, activations, biases (together below 1 % for models of 0.1 G
parameters and more).

    attention   2 h d (2 H + 2 K) per layer for queries, output (H heads), keys and values (K heads), of width d each;
                4 H d t per layer for scores and mix, for a token that sees t positions, itself included
    FFN         2 h f (2, or 3 if gated) per layer, for each of the experts that a token goes through
    norms       5 h each, two in a layer and one at the end
    output      2 h V, for tokens whose successor is asked for: every decode token, the last one of a prompt
    embedding   a look-up: 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

from .gguf import Value

_NORM_FLOPS = 5  # per element: mean, variance, scale (Kaplan counts none)

# Architectures (general.architecture) whose feed-forward layer has no gate, of those that llama.cpp runs.
UNGATED = frozenset(
    {"bloom", "codeshell", "falcon", "gpt2", "gptj", "gptneox", "mpt", "nemotron", "phi2", "starcoder", "starcoder2"}
)


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations by component."""

    embedding: float = 0.0
    attention: float = 0.0
    ffn: float = 0.0
    norm: float = 0.0
    output: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all components."""
        return float(sum(astuple(self)))

    def shares(self) -> dict[str, float]:
        """Each component as a share of the total, in [0, 1]; they add up to 1."""
        return {f.name: getattr(self, f.name) / self.total for f in fields(self)}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a decoder-only transformer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    experts_used: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a number below 1."""
        wrong = [f.name for f in fields(self) if f.name != "gated" and getattr(self, f.name) < 1]
        if wrong:
            msg = f"{', '.join(wrong)} must be at least 1"
            raise ValueError(msg)

    def span(self, begin: int, end: int, *, outputs: int) -> Flops:
        """Return operations for tokens at positions begin..end-1 (from 0), of which `outputs` predict their successor.

        Raises ValueError unless 0 <= begin <= end.
        """
        if not 0 <= begin <= end:
            msg = f"no span from {begin} to {end}"
            raise ValueError(msg)
        n = end - begin
        seen = (begin + 1 + end) * n / 2  # positions that the tokens see, added up: begin+1 for the first, end the last
        projections = 4 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        matrices = 3 if self.gated else 2
        return Flops(
            attention=self.layers * (n * projections + 4.0 * self.heads * self.head_dim * seen),
            ffn=float(n * self.layers * 2 * matrices * self.hidden * self.ffn * self.experts_used),
            norm=float((n * 2 * self.layers + outputs) * _NORM_FLOPS * self.hidden),
            output=float(outputs * 2 * self.hidden * self.vocab),
        )

    def prefill(self, length: int, cached: int = 0) -> Flops:
        """Return operations for a prompt of `length` tokens of which the first `cached` are in the KV cache."""
        return self.span(cached, length, outputs=1 if length > cached else 0)

    def decode(self, context: int) -> Flops:
        """Return operations for one token after `context` others."""
        return self.span(context, context + 1, outputs=1)


def joules_per_token(shape: ModelShape, joules_per_flop: float, length: int, context: int) -> tuple[float, float]:
    """Return J of one prompt token, on average over a prompt of `length`, and of one decode token at `context`.

    The linear model: energy = joules_per_flop * operations. Raises ValueError for an empty prompt.
    """
    if length < 1:
        raise ValueError("a prompt has at least one token")
    prefill = joules_per_flop * shape.prefill(length).total / length
    return prefill, joules_per_flop * shape.decode(context).total


def calibrate(shape: ModelShape, prefill_j_per_token: float, length: int) -> float:
    """Return J per operation, from J per prompt token measured over prompts of `length` tokens."""
    return prefill_j_per_token * length / shape.prefill(length).total


def shape_of(metadata: Mapping[str, Value | list[Value]]) -> ModelShape:
    """Return the shape in a GGUF file's keys (github.com/ggml-org/ggml, docs/gguf.md), as `gguf.read_gguf` reads them.

    Where layers differ (a list of values), their mean counts. Raises ValueError that names what is missing.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError("general.architecture is missing: no GGUF metadata of a model")  # noqa: TRY004 - file, not caller

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        if not numbers:
            msg = f"{arch}.{key} is missing"
            raise ValueError(msg)
        return round(sum(numbers) / len(numbers))

    hidden, heads = number("embedding_length"), number("attention.head_count")
    used = number("expert_used_count", 0)
    return ModelShape(
        layers=number("block_count"),
        hidden=hidden,
        ffn=number("expert_feed_forward_length", number("feed_forward_length"))
        if used
        else number("feed_forward_length"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", hidden // max(1, heads)),
        vocab=_vocabulary(metadata, arch),
        gated=arch not in UNGATED,
        experts_used=max(1, used),
    )


def _vocabulary(metadata: Mapping[str, Value | list[Value]], arch: str) -> int:
    for key in ("tokenizer.ggml.tokens.length", f"{arch}.vocab_size"):
        if isinstance(found := metadata.get(key), int):
            return found
    msg = f"neither {arch}.vocab_size nor tokenizer.ggml.tokens is there"
    raise ValueError(msg)
