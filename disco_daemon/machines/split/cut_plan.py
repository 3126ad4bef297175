"""What each cut of a model costs on both machines, and which one to take: `disco split plan` and `machines join`. Pure.

Writing a token reads all weights once, so a range takes its share of the device's time for a token by the bytes of its
weights. The output head counts as the partner's, and looking up an embedding as nothing. An exit behind the cut is read
for each row there, too. It drafts as long as that pays (`scheduler.draft_length`), its guesses right with the share of
tokens on which it agreed with the whole model. The partner judges a draft for what a row of a prompt takes there, since
where arithmetic is what takes the time, a few rows share nothing; but for MORE_ROWS of the time of a row alone at
least, since few rows are computed less well than many. Where it takes less to judge drafts one after the other, and
none behind a wrong one, the partner does that: each token is then one row there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...link.relay.handshake import CutFacts, TheCuts
from ...models.gguf import Header
from ...models.segments import cut, n_layers
from ...scheduler.draft_length import ExpectedRun, RunTimes, expected_run
from ...types import LayerRange

SPARE = 0.2  # of the free memory, left for everything else
TIE = 0.02  # times for a token that are this near count as the same
FLOAT_BYTES = 4  # of a number of a row, as float32
MORE_ROWS = 0.25  # of a row alone, for each row beside it, at least: 9.8, 13.9, 16.5, 18.9 ms for 1 to 4 rows, once
LEAST_S = 1e-6  # no range takes less for a row
MEMORY_BYTES_PER_S = 10e9  # how fast weights are read where nothing was measured: a laptop of the last ten years


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """An exit: the chance of its guesses to be right, in [0, 1], and the bytes of its weights."""

    chance: float
    n_bytes: int


class PlannedCut(msgspec.Struct, frozen=True):
    """One cut behind `layer` layers: the weights on both sides, bytes, and what a token takes with its drafts, s.

    The edge's weights hold those of an exit.
    """

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

    `n_cells` tokens are to fit into the edge's KV cache. `assumed` says what was not measured. `partner_row_s` is how
    long the whole model takes for a row of a prompt at the partner, s; 0 = not measured.
    """

    edge_token_s: float
    partner_token_s: float
    link: LinkSpeed
    edge_memory_bytes: float
    partner_memory_bytes: float
    n_cells: int
    assumed: str = ""
    partner_row_s: float = 0.0

    @property
    def more_rows(self) -> float:
        """What a row beside others takes at the partner, in times of a row alone."""
        return min(1.0, max(MORE_ROWS, self.partner_row_s / max(LEAST_S, self.partner_token_s)))


def expected(
    edge_s: float, partner_s: float, row_bytes: int, link: LinkSpeed, chance: float, more_rows: float = MORE_ROWS
) -> ExpectedRun:
    """Return what a round trip is expected to give, and the time for a token, s; an exit's guess is right by `chance`.

    The edge computes each row, which travels, and waits for the verdict. A row beside others takes the partner
    `more_rows` of the time of one alone; or it judges them one after the other, up to the first wrong one.
    """
    row_s = row_bytes / link.bytes_per_s
    once_s = link.rtt_s + (1 - more_rows) * partner_s
    times = RunTimes(max(LEAST_S, edge_s), max(LEAST_S, once_s), max(LEAST_S, more_rows * partner_s + row_s))
    together = expected_run(times, chance)
    without = RunTimes(max(LEAST_S, edge_s), max(LEAST_S, link.rtt_s), max(LEAST_S, row_s))
    in_steps = expected_run(without, chance)
    in_steps = replace(in_steps, token_s=in_steps.token_s + partner_s)  # a row there for each token that comes back
    return min(together, in_steps, key=lambda run: run.token_s)


def describe_cuts(head: bytes, header: Header, exits: Mapping[int, ExitFacts]) -> TheCuts:
    """Return where a model may be cut; `head` as in `segments.cut`, `exits` by their cuts.

    Raises NotCuttableError.
    """
    n = n_layers(header)
    weights, output = weights_of(header, n)
    whole = sum(weights) + output
    cuts = tuple(
        CutFacts(
            layer=layer,
            edge_bytes=cut(head, header, LayerRange(0, layer, n)).disk_bytes + exit_bytes(exits, layer),
            partner_bytes=cut(head, header, LayerRange(layer, n, n)).disk_bytes,
            edge_share=sum(weights[:layer]) / max(1, whole),
            chance=exits[layer].chance if layer in exits else 0.0,
            exit_share=exit_bytes(exits, layer) / max(1, whole),
        )
        for layer in range(1, n)
    )
    row_bytes = (header.number(f"{header.architecture}.embedding_length") or 0) * FLOAT_BYTES
    return TheCuts(cuts=cuts, cell_bytes=kv_bytes_per_layer(header), row_bytes=row_bytes, whole_bytes=whole)


def exit_bytes(exits: Mapping[int, ExitFacts], layer: int) -> int:
    """Return what the weights of the exit behind a layer take, bytes; 0 without one."""
    return exits[layer].n_bytes if layer in exits else 0


def plan_cuts(model: TheCuts, given: PlanInput) -> SplitPlan:
    """Return what each cut of a model costs, and the best one; where the partner has a range already, only its cut."""
    cuts = [_planned(facts, model, given) for facts in model.cuts]
    fitting = [one for one in cuts if _fits(one, model, given)]
    if not fitting:
        return SplitPlan(cuts, None, _too_large(cuts, model, given))
    fastest = min(one.token_s for one in fitting)
    chosen = max((one for one in fitting if one.token_s <= fastest * (1 + TIE)), key=lambda one: one.layer)
    return SplitPlan(cuts, chosen.layer, _why(chosen, len(fitting), model, given))


def kv_bytes_per_layer(header: Header) -> int:
    """Return what a token takes in one layer's KV cache, bytes: a key and a value of 2 bytes a number for each head."""

    def number(name: str, default: int) -> int:
        return header.number(f"{header.architecture}.{name}") or default

    heads = number("attention.head_count", 1)
    width = number("attention.key_length", number("embedding_length", 0) // heads)
    values = number("attention.value_length", width)
    return number("attention.head_count_kv", heads) * (width + values) * 2


def weights_of(header: Header, n: int) -> tuple[list[int], int]:
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


def _planned(facts: CutFacts, model: TheCuts, given: PlanInput) -> PlannedCut:
    edge_s = (facts.edge_share + max(0.0, facts.exit_share)) * given.edge_token_s
    partner_s = (1 - facts.edge_share) * given.partner_token_s
    chance = min(max(facts.chance, 0.0), 1.0)
    run = expected(edge_s, partner_s, model.row_bytes, given.link, chance, given.more_rows)
    n_rows = run.n_drafts + 1
    judged_s = partner_s * min(1 + given.more_rows * run.n_drafts, run.n_tokens)
    return PlannedCut(
        facts.layer, facts.edge_bytes, facts.partner_bytes, edge_s * n_rows / run.n_tokens, judged_s / run.n_tokens,
        run.n_tokens, run.token_s,
    )  # fmt: skip


def edge_needs(one: PlannedCut | CutFacts, model: TheCuts, n_cells: int) -> int:
    """Return the memory that the lower range takes with its KV cache, and with a row kept for each cell, bytes."""
    return one.edge_bytes + (one.layer * model.cell_bytes + model.row_bytes) * n_cells


def _partner_needs(one: PlannedCut, model: TheCuts) -> float:
    n_layers = len(model.cuts) + 1 - one.layer
    return one.partner_bytes + (model.kv_bytes or n_layers * model.cell_bytes * model.n_cells)


def _fits(one: PlannedCut, model: TheCuts, given: PlanInput) -> bool:
    """Whether both ranges fit into their machine's memory, with their KV caches; a range that is there does."""
    if edge_needs(one, model, given.n_cells) > given.edge_memory_bytes * (1 - SPARE):
        return False
    if model.hosted:
        return one.layer == model.hosted
    return _partner_needs(one, model) <= given.partner_memory_bytes * (1 - SPARE)


def _why(chosen: PlannedCut, n_fitting: int, model: TheCuts, given: PlanInput) -> str:
    facts = next(one for one in model.cuts if one.layer == chosen.layer)
    if model.hosted:
        why = f"the partner has the layers from {model.hosted} on for other machines, and those below fit here"
    else:
        why = (
            f"{n_fitting} of {len(model.cuts)} cuts fit both machines; of those that take the least time for a token "
            f"({1e3 * chosen.token_s:.1f} ms, within {TIE:.0%}) this one leaves the partner least to compute"
        )
    if facts.chance > 0:
        trips = (
            f"{chosen.tokens_per_round_trip:.2g} tokens a round trip, by the exit behind these layers, whose guesses "
            f"are right {facts.chance:.0%} of the time"
        )
    else:
        trips = "1 token a round trip, since no exit is kept behind these layers (`disco exits train`)"
    return (
        f"{why}. Expected are {trips}; what the look-up in the text guesses comes on top. Counted with are a round "
        f"trip of {1e3 * given.link.rtt_s:.3g} ms and {8e-6 * given.link.bytes_per_s:.3g} Mbit/s{given.assumed}"
    )


def _too_large(cuts: Sequence[PlannedCut], model: TheCuts, given: PlanInput) -> str:
    here, there = given.edge_memory_bytes / 1e9, given.partner_memory_bytes / 1e9
    left = f"of which {SPARE:.0%} are left for everything else"
    if model.hosted:
        needed = next((edge_needs(one, model, given.n_cells) for one in cuts if one.layer == model.hosted), 0)
        return (
            f"the partner has the layers from {model.hosted} on for other machines, those below take "
            f"{needed / 1e9:.2f} GB here with {given.n_cells} tokens of KV cache, and {here:.2f} GB are free, {left}"
        )
    least = min((edge_needs(one, model, given.n_cells) + _partner_needs(one, model) for one in cuts), default=0.0)
    return (
        f"no cut fits both machines: the ranges and their KV caches take {least / 1e9:.2f} GB or more in all, and "
        f"{here:.2f} GB are free for the lower layers, {there:.2f} GB for the rest, {left}"
    )
