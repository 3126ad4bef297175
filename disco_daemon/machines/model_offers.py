"""Which of the offered models suit this machine: by its free memory, and by what was measured on it.

A processor is measured once, without a model (`profiling.measured_machine`). A GPU is not: speeds there are not known.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config.schema import Config
from ..engine.measure.checkup_messages import CheckupRequest, Fit
from ..engine.measure.predicted_memory import in_use
from ..errors import ConfigError
from ..models.kept_numbers import GOING_BACK
from ..models.offered import (  # fmt: skip
    CONTEXT,
    Memory,
    OfferedModel,
    PredictedModel,
    predict,
    recommend,
)
from ..models.roofline import ERROR, MachineSpeed
from ..profiling.measured_machine import (  # fmt: skip
    MachineError,
    computing_watts,
    keep_speed,
    kept_speed,
    machine_key,
    measure_machine,
)
from ..profiling.tuned_profile import Wanted, choose_knobs
from ..system.idle import unless
from ..system.processors import n_cores
from .device_settings import load_measured, n_gpu_layers, profiles
from .model_memory import run_checkup

log = logging.getLogger("disco.models")

QUICK_S = 30.0  # the longest measurement that somebody waits for: 4 s on a quiet machine, 24 s beside ten others
SPARE = 0.9  # of the free memory, as in the engine; something else may want some


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The models that suit this machine, the recommended one first, by the bytes that are free and what it does.

    `problem` says why nothing is known of the machine's memory, and then nothing is offered.
    """

    free_bytes: int
    gpu_bytes: int
    measured: MachineSpeed | None
    models: tuple[PredictedModel, ...]
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as `disco models recommend --json` and the API show it."""
        return {
            "machine": {
                "free_bytes": self.free_bytes, "gpu_bytes": self.gpu_bytes,
                "measured": None if self.measured is None else _machine_json(self.measured),
            },
            "models": [one.to_json() for one in self.models], "problem": self.problem,
        }  # fmt: skip


def _machine_json(machine: MachineSpeed) -> dict[str, Any]:
    return {
        "threads": machine.n_threads, "bytes_per_s": round(machine.bytes_per_s),
        "multiply_adds_per_s": {name: round(of.multiply_adds_per_s) for name, of in machine.packings.items()},
        "relative_error": ERROR,
    }  # fmt: skip


async def recommendation(
    config: Config,
    models: tuple[OfferedModel, ...],
    *,
    may_measure: Callable[[], bool] = lambda: True,
) -> Recommendation:
    """Return the models of the list that suit this machine as it is now.

    While `may_measure` says so, the machine is measured for some seconds if it never was.
    """
    requests = [request_for(model, config) for model in models]
    seen = await run_checkup(*requests)
    if seen.bindings is None or len(seen.fits) < len(models):
        return Recommendation(0, 0, None, (), seen.problem or "the engine's part said nothing of memory")
    machine = await this_machine(config, seen.bindings.build, may_measure)
    found, shared = [], sys.platform == "darwin"
    watts = await asyncio.to_thread(watts_of, config)
    for model, request, fit in zip(models, requests, seen.fits, strict=True):
        is_measured = not fit.gpu_layers
        found.append(predict(model, memory_of(request, fit, shared=shared), machine if is_measured else None, watts))
    return Recommendation(seen.fits[0].available, seen.bindings.gpu_bytes, machine, tuple(recommend(found)))


def watts_of(config: Config) -> float | None:
    """Return what computing draws here, W: as `disco profile` measured it, else as it is set or assumed. Blocks."""
    try:
        measured = load_measured(config)
    except (ConfigError, OSError):  # the device has no model yet
        measured = None
    if measured is not None and (energy := measured.known_energy) is not None:
        return energy.decode_j_per_token * measured.device.decode_tps
    return computing_watts(config.device.watts, n_threads(config))


def n_threads(config: Config) -> int:
    """Return with how many threads models compute here: as it is set, or all cores but one."""
    return choose_knobs(Wanted(config.device.n_threads), None, n_cores()).n_threads


async def this_machine(config: Config, build: str, may_measure: Callable[[], bool]) -> MachineSpeed | None:
    """Return what this machine does, as it was kept or is measured now; None where neither can be."""
    folder, threads = profiles().folder, n_threads(config)
    key = await asyncio.to_thread(machine_key, threads, build)
    kept = await asyncio.to_thread(kept_speed, folder, key)
    if kept is not None or not may_measure():
        return kept
    try:
        async with asyncio.timeout(QUICK_S):
            measure = measure_machine(threads, log.debug)
            measured = await unless(measure, lambda: not may_measure(), "speed of the machine")
        if measured is not None:
            await asyncio.to_thread(keep_speed, folder, key, measured)
    except (MachineError, OSError) as e:  # a TimeoutError is an OSError
        log.info("the speed of models cannot be predicted: %s", e)
        return None
    return measured


def request_for(model: OfferedModel, config: Config) -> CheckupRequest:
    """Return what the checkup is asked of a model of the list: with a context of CONTEXT tokens, or the set one."""
    settings = config.device
    n_ctx = min(model.context, max(CONTEXT, settings.n_ctx))
    return CheckupRequest(
        model.n_bytes, model.layers, model.hidden, model.vocab, 0, model.kv_numbers, n_ctx,
        max(n_ctx, settings.n_cells), settings.divided_kv_type, n_gpu_layers(settings), window=model.window,
        window_numbers=model.window_numbers, state_bytes=model.state_bytes,
        goes_back=model.architecture in GOING_BACK and settings.speculation != "off",
    )  # fmt: skip


def memory_of(request: CheckupRequest, fit: Fit, *, shared: bool = False) -> Memory:
    """Return whether a model fits, its weights and the whole context, in what others leave free; and what it takes.

    `shared`: the GPU has no memory of its own.
    """
    taken = fit.in_all if shared else fit.n_bytes
    fits = not fit.problem and fit.n_ctx >= request.n_ctx and taken <= SPARE * fit.available
    return Memory(in_use(request, fit), fits, on_gpu=fit.gpu_layers >= request.n_layers)
