"""What `disco models recommend` says on eight machines: docs/reference/recommended.md, of data alone.

One machine was measured. Of the others the memory's bandwidth is published, and what their processors multiply is that
of the measured one by cores, clock and width; each packing has the measured share of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_daemon.config.schema import Config
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.machines.model_offers import memory_of, request_for
from disco_daemon.models.offered import (
    CONTEXT,
    LONG_PROMPT,
    PROMPT,
    OfferedModel,
    PredictedModel,
    predict,
    recommend,
    shipped,
)
from disco_daemon.models.roofline import ERROR, MachineSpeed, PackedSpeed
from disco_daemon.power.sensors import FRUGAL_W, OTHER_W

GIB = 2**30
MEASURED = MachineSpeed(
    packings={
        "F16": PackedSpeed(6.51e09, 8.71e09),
        "Q4_0": PackedSpeed(7.19e09, 2.06e10),
        "Q4_1": PackedSpeed(3.05e09, 1.71e10),
        "Q5_0": PackedSpeed(3.88e09, 7.45e09),
        "Q8_0": PackedSpeed(1.04e10, 1.22e10),
        "Q4_K": PackedSpeed(7.68e09, 2.7e10),
        "Q5_K": PackedSpeed(6.46e09, 2.47e10),
        "Q6_K": PackedSpeed(7.82e09, 2.41e10),
        "IQ4_NL": PackedSpeed(4.91e09, 1.25e10),
        "MXFP4": PackedSpeed(6.44e09, 2.13e10),
    },
    experts={  # these, cells from memory and rows times one number were measured later: as the products and attention
        "Q8_0": PackedSpeed(1.04e10, 1.22e10),
        "Q4_K": PackedSpeed(7.68e09, 2.7e10),
        "Q6_K": PackedSpeed(7.82e09, 2.41e10),
        "MXFP4": PackedSpeed(6.44e09, 2.13e10),
    },
    kept_bytes_per_s={"64": 2.43e09, "128": 2.43e09, "256": 2.43e09},
    attention_one_per_s=2.43e09,
    attention_many_per_s=7.61e09,
    elements_per_s=1.62e09,
    scaled_per_s=1.62e09,
    operation_s=1.8e-07,
    n_threads=1,
)
REACHED = 0.8  # of a published bandwidth


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """A machine: free memory, a GPU's, which may be `shared`, GiB; what its processor does; W of computing."""

    name: str
    free: float
    gpu: float
    speed: MachineSpeed
    watts: float
    shared: bool = False


def scaled(threads: int, times: float, bandwidth: float) -> MachineSpeed:
    """Return a machine of `threads`, each `times` as fast as the measured one, with a `bandwidth` in bytes a second."""
    all_of_them = threads * times

    def products(of: dict[str, PackedSpeed]) -> dict[str, PackedSpeed]:
        return {
            name: PackedSpeed(min(bandwidth, all_of_them * one.bytes_per_s), all_of_them * one.multiply_adds_per_s)
            for name, one in of.items()
        }

    return MachineSpeed(
        packings=products(MEASURED.packings),
        experts=products(MEASURED.experts),
        kept_bytes_per_s={
            length: min(bandwidth, all_of_them * each) for length, each in MEASURED.kept_bytes_per_s.items()
        },
        attention_one_per_s=all_of_them * MEASURED.attention_one_per_s,
        attention_many_per_s=all_of_them * MEASURED.attention_many_per_s,
        elements_per_s=min(bandwidth / 12, all_of_them * MEASURED.elements_per_s),
        scaled_per_s=min(bandwidth / 12, all_of_them * MEASURED.scaled_per_s),
        operation_s=1e-6,
        n_threads=threads,
    )


LAPTOP = scaled(3, 1.5, REACHED * 42.7e9)  # 4 cores with AVX2, two channels of DDR4-2666
MAC = scaled(7, 2.0, REACHED * 68.2e9)  # 8 cores, LPDDR4X-4266 on 128 bits
DESKTOP = scaled(7, 2.0, REACHED * 76.8e9)  # 8 cores with AVX2, two channels of DDR5-4800
SERVER = scaled(15, 1.3, REACHED * 102e9)  # 16 cores with AVX2, four channels of DDR4-3200
BOARD = scaled(3, 0.6, REACHED * 17.1e9)  # 4 Cortex-A76, LPDDR4X-4267 on 32 bits
MACHINES = (
    RecordedMachine("a laptop with 8 GB, 4.5 of them free", 4.5, 0, LAPTOP, 3 * FRUGAL_W),
    RecordedMachine("a Mac with 16 GB, 10 of them free", 10, 10, MAC, 7 * FRUGAL_W, shared=True),
    RecordedMachine("a desktop with a GPU of 24 GB", 26, 22.5, DESKTOP, 7 * OTHER_W),
    RecordedMachine("a desktop with two GPUs of 16 GB", 26, 30, DESKTOP, 7 * OTHER_W),
    RecordedMachine("a server with 64 GB and 16 cores", 58, 0, SERVER, 15 * OTHER_W),
    RecordedMachine("a board with 4 GB and four Arm cores", 3.2, 0, BOARD, 3 * FRUGAL_W),
    RecordedMachine("a laptop with 16 GB, 6 of them free", 6, 0, LAPTOP, 3 * FRUGAL_W),
    RecordedMachine("the one that was measured: one of two cores of an AMD Zen 1", 20, 0, MEASURED, OTHER_W),
)


def offered(machine: RecordedMachine, models: tuple[OfferedModel, ...] | None = None) -> list[PredictedModel]:
    """Return what a machine is recommended, by the arithmetic of the engine itself."""
    found = []
    for model in models or shipped():
        request = request_for(model, Config())
        placed = fit(request, round(machine.free * GIB), round(machine.gpu * GIB))
        speed, watts = (None, None) if placed.gpu_layers else (machine.speed, machine.watts)
        found.append(predict(model, memory_of(request, placed, shared=machine.shared), speed, watts))
    return recommend(found)


UNKNOWN = "not known"
COLUMNS = (
    "model", "packing", "file", "memory", "first token, 100 and 2,000", "token/s", "J an answer", "MMLU-Pro", "can",
    "licence",
)  # fmt: skip
HEAD = """\
# Recommended models

Made of `profiles/models.toml` by `make docs`; a test compares the two. It shows what `disco models recommend` says on
eight machines.

Only the last machine was measured. The memory of the others has its published bandwidth, of which a program reaches
some {reached:.0f} %. Their processors are the measured one, times their cores and clock. Where a GPU holds the model
nothing is predicted, because disco does not measure GPUs yet.

A model has to fit with {context} tokens of context. Recommended is the best by published MMLU-Pro that surely writes
faster than a person reads, and does not think first. Speed never changes that figure. Sizes with "about" are reckoned
from the packing. Memory is what a model takes with that context.

On a processor predictions are a roofline. It adds up weights by the bandwidth that products in their packing reach,
multiply-adds by their rate, attention, and the rest. disco measures these rates once, in some seconds. Predictions
state their error: {decode:.0f} % for writing, {prompt:.0f} % for prompts, {memory:.0f} % for memory. To hold them
against real engines, run `python -m benchmarks.engine.predicted`.
"""


def recommended() -> str:
    """Return the page."""
    errors = {name: 100 * error for name, error in ERROR.items()}
    lines = [HEAD.format(reached=100 * REACHED, context=CONTEXT, **errors)]
    for machine in MACHINES:
        lines.append(f"## {machine.name[0].upper()}{machine.name[1:]}\n")
        lines += [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        lines += [_row(one) for one in offered(machine)]
        lines.append("")
    return "\n".join(lines)


def _row(one: PredictedModel) -> str:
    model, waits = one.model, [one.ttft_s(n) for n in (PROMPT, LONG_PROMPT)]
    cells = (
        f"**{model.title}**" if one.recommended else model.title, model.packing,
        f"{'about ' * model.is_reckoned}{model.n_bytes / 1e9:.1f} GB", f"{one.memory.n_bytes / 1e9:.1f} GB",
        ", ".join(f"{_short(wait)} s" for wait in waits if wait is not None) or UNKNOWN, _short(one.decode_tps),
        _short(one.j_per_answer), _short(model.quality, "none"), ", ".join(model.abilities) or "-", model.licence,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _short(number: float | None, unknown: str = UNKNOWN) -> str:
    return unknown if number is None else f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
