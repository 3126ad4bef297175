"""A model's file as an entry of the list of offered models would have it, so that its speed can be predicted."""

from __future__ import annotations

from pathlib import Path

from .gguf import Header, with_shards
from .kept_numbers import kept_numbers
from .model_shape import shape_of
from .offered import CONTEXT, OfferedModel
from .quants import label


def listed(path: Path, header: Header) -> OfferedModel:
    """Return a file, whose whole header is at hand, as the list would have it. Raises OSError, ValueError."""
    shape, kept, own = shape_of(header.keys), kept_numbers(header.keys), header.architecture
    used = header.number(f"{own}.expert_used_count") or 0
    in_layer = 2 * shape.kv_heads * shape.head_dim
    return OfferedModel(
        name=path.stem.casefold(), title=path.stem, repo="", file=path.name, licence="", architecture=own,
        packing=label(path.name) or header.packing, n_bytes=sum(part.stat().st_size for part in with_shards([path])),
        parameters=header.n_numbers / 1e9, active=active(header) / 1e9, layers=shape.layers, hidden=shape.hidden,
        vocab=shape.vocab, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        context=header.number(f"{own}.context_length") or CONTEXT,
        inner=used * (header.number(f"{own}.expert_feed_forward_length") or 0)
        or header.number(f"{own}.feed_forward_length") or 0,
        experts_used=used,
        attending=kept.per_token // in_layer, window=kept.window,
        state_bytes=kept.state_bytes, tied=not any(tensor.name == "output.weight" for tensor in header.tensors),
    )  # fmt: skip


def active(header: Header) -> float:
    """Return the parameters that a token uses; 0 of a model without experts."""
    there, used = (header.number(f"{header.architecture}.expert{name}_count") for name in ("", "_used"))
    if not there or not used:
        return 0.0
    return sum(t.n_numbers * (used / there if "_exps" in t.name else 1.0) for t in header.tensors)
