"""What each cut of a model costs on both machines, and which one to take: the figures of `disco split plan`. Pure.

Writing a token reads all weights once, so a range takes its share of the device's time for a token by the bytes of its
weights. The output head counts as the partner's, and looking up an embedding as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..models.gguf import Header
from ..models.segments import cut, n_layers
from ..types import LayerRange

SPARE = 0.2  # of the free memory, left for everything else
TIE = 0.02  # times for a token that are this near count as the same
FLOAT_BYTES = 4  # of a number of a row, as float32


class PlannedCut(msgspec.Struct, frozen=True):
    """One cut behind `layer` layers: the weights on both sides, bytes, and what a token takes, s."""

    layer: int
    edge_bytes: int
    partner_bytes: int
    edge_s_per_token: float
    partner_s_per_token: float
    tokens_per_round_trip: float
    token_s: float


class SplitPlan(msgspec.Struct, frozen=True):
    """All cuts, the chosen one (None if none fits both machines), and why."""

    cuts: list[PlannedCut]
    chosen: int | None
    why: str


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The way between two machines: the time there and back, s, and what it carries up, bytes/s."""

    rtt_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What a plan rests on: how long the whole model takes for a token on each machine, s, and their memory, bytes.

    `n_cells` tokens are to fit into the KV cache of each machine. `tokens_per_round_trip` is what one verdict gives.
    """

    edge_token_s: float
    partner_token_s: float
    link: LinkSpeed
    edge_memory_bytes: float
    partner_memory_bytes: float
    n_cells: int
    tokens_per_round_trip: float = 1.0


def token_time_s(
    edge_s: float, partner_s: float, row_bytes: int, link: LinkSpeed, tokens_per_round_trip: float
) -> float:
    """Return the time for a token of a split answer, s: both machines compute it, its row travels, and it waits.

    One round trip gives `tokens_per_round_trip` tokens. The edge waits for its verdict, and computes nothing meanwhile.
    """
    return edge_s + partner_s + row_bytes / link.bytes_per_s + link.rtt_s / tokens_per_round_trip


def plan_cuts(head: bytes, header: Header, given: PlanInput) -> SplitPlan:
    """Return what each cut of a model costs, and the best one; `head` as in `segments.cut`. Raises NotCuttableError."""
    n = n_layers(header)
    weights, output = _weights(header, n)
    row_bytes = (header.number(f"{header.architecture}.embedding_length") or 0) * FLOAT_BYTES
    cuts = [_planned(head, header, layer, weights, output, row_bytes, given) for layer in range(1, n)]
    per_cell = kv_bytes_per_layer(header) * given.n_cells
    fitting = [one for one in cuts if _fits(one, n, per_cell, given)]
    if not fitting:
        return SplitPlan(cuts, None, _too_large(cuts, n, per_cell, given))
    fastest = min(one.token_s for one in fitting)
    chosen = max((one for one in fitting if one.token_s <= fastest * (1 + TIE)), key=lambda one: one.layer)
    return SplitPlan(cuts, chosen.layer, _why(chosen, len(fitting), len(cuts), given))


def kv_bytes_per_layer(header: Header) -> int:
    """Return what a token takes in one layer's KV cache, bytes: a key and a value of 2 bytes a number for each head."""

    def number(name: str, default: int) -> int:
        return header.number(f"{header.architecture}.{name}") or default

    heads = number("attention.head_count", 1)
    width = number("attention.key_length", number("embedding_length", 0) // heads)
    values = number("attention.value_length", width)
    return number("attention.head_count_kv", heads) * (width + values) * 2


def _weights(header: Header, n: int) -> tuple[list[int], int]:
    """Return the bytes of each layer's weights, and those of the output head."""
    layers, output, embedding = [0] * n, 0, 0
    for tensor in header.tensors:
        size, (kind, _, rest) = tensor.n_bytes or 0, tensor.name.partition(".")
        number = rest.partition(".")[0]
        if kind == "blk" and number.isdigit() and int(number) < n:
            layers[int(number)] += size
        elif tensor.name == "output.weight":
            output = size
        elif tensor.name == "token_embd.weight":
            embedding = size
    return layers, output or embedding


def _planned(
    head: bytes, header: Header, layer: int, weights: Sequence[int], output: int, row_bytes: int, given: PlanInput
) -> PlannedCut:
    n, share = len(weights), sum(weights[:layer]) / max(1, sum(weights) + output)
    edge_s, partner_s = share * given.edge_token_s, (1 - share) * given.partner_token_s
    return PlannedCut(
        layer,
        cut(head, header, LayerRange(0, layer, n)).disk_bytes,
        cut(head, header, LayerRange(layer, n, n)).disk_bytes,
        edge_s,
        partner_s,
        given.tokens_per_round_trip,
        token_time_s(edge_s, partner_s, row_bytes, given.link, given.tokens_per_round_trip),
    )


def _fits(one: PlannedCut, n: int, per_layer: int, given: PlanInput) -> bool:
    """Whether both ranges fit into their machine's memory, with their KV caches."""
    edge = one.edge_bytes + one.layer * per_layer
    partner = one.partner_bytes + (n - one.layer) * per_layer
    return edge <= given.edge_memory_bytes * (1 - SPARE) and partner <= given.partner_memory_bytes * (1 - SPARE)


def _why(chosen: PlannedCut, n_fitting: int, n_cuts: int, given: PlanInput) -> str:
    return (
        f"{n_fitting} of {n_cuts} cuts fit both machines; of those that take the least time for a token "
        f"({1e3 * chosen.token_s:.1f} ms, within {TIE:.0%}) this one leaves the partner least to compute. Assumed are "
        f"a round trip of {1e3 * given.link.rtt_s:.3g} ms, {8e-6 * given.link.bytes_per_s:.3g} Mbit/s and "
        f"{given.tokens_per_round_trip:.2g} tokens a round trip: what the look-up in the text guesses comes on top"
    )


def _too_large(cuts: Sequence[PlannedCut], n: int, per_layer: int, given: PlanInput) -> str:
    least = min(one.edge_bytes + one.partner_bytes for one in cuts) + n * per_layer if cuts else 0
    return (
        f"no cut fits both machines: the ranges take {least / 1e9:.2f} GB in all with {given.n_cells} tokens of KV "
        f"cache, and {given.edge_memory_bytes / 1e9:.2f} GB are free for the lower layers, "
        f"{given.partner_memory_bytes / 1e9:.2f} GB for the rest, of which {SPARE:.0%} are left for everything else"
    )
