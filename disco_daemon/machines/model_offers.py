"""Which of the offered models suit this machine: by its free memory, and by the speed that was measured on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..engine.measure.checkup_messages import CheckupRequest, Fit
from ..errors import ConfigError
from ..models.files import examine
from ..models.offered import (  # fmt: skip
    CONTEXT,
    MeasuredSpeed,
    Memory,
    OfferedModel,
    PredictedModel,
    predict,
    recommend,
)
from ..profiling.autotuner import TuneError, run_tune
from ..system.idle import unless
from .device_settings import job_for, measured_speeds, model_path, n_gpu_layers
from .model_memory import run_checkup

log = logging.getLogger("disco.models")

QUICK_S = 20.0  # the longest measurement that somebody waits for; one takes 3 s on a machine with nothing else to do
SPARE = 0.9  # of the free memory, as in the engine; something else may want some


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The models that suit this machine, the recommended one first, by the bytes that are free and a measured speed.

    `problem` says why nothing is known of the machine's memory, and then nothing is offered.
    """

    free_bytes: int
    gpu_bytes: int
    measured: MeasuredSpeed | None
    models: tuple[PredictedModel, ...]
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as `disco models recommend --json` and the API show it."""
        measured = self.measured
        scaled = None if measured is None else {"model": measured.model, "tps": round(measured.decode_tps, 1)}
        machine = {"free_bytes": self.free_bytes, "gpu_bytes": self.gpu_bytes, "measured": scaled}
        return {"machine": machine, "models": [one.to_json() for one in self.models], "problem": self.problem}


async def recommendation(
    config: Config,
    models: tuple[OfferedModel, ...],
    *,
    may_measure: Callable[[], bool] = lambda: True,
    known: MeasuredSpeed | None = None,
) -> Recommendation:
    """Return the models of the list that suit this machine as it is now.

    While `may_measure` says so, the device's model is measured for some seconds if it never was: on a machine that has
    something else to do, that would tell too little. `known` is what was measured so before, of whichever model.
    """
    requests = [request_for(model, config) for model in models]
    seen = await run_checkup(*requests)
    if seen.bindings is None or len(seen.fits) < len(models):
        return Recommendation(0, 0, None, (), seen.problem or "the engine's part said nothing of memory")
    measured = known or await measured_speed(config, models, may_measure=may_measure)
    gpu_bytes = seen.bindings.gpu_bytes
    found = []
    for model, request, fit in zip(models, requests, seen.fits, strict=True):
        known = measured if not gpu_bytes or fit.gpu_layers >= model.layers else None  # one on the GPU was measured
        found.append(predict(model, memory_of(request, fit), known))
    return Recommendation(seen.fits[0].available, gpu_bytes, measured, tuple(recommend(found)))


def request_for(model: OfferedModel, config: Config) -> CheckupRequest:
    """Return what the checkup is asked of a model of the list: with a context of CONTEXT tokens, or the set one."""
    settings = config.device
    n_ctx = min(model.context, max(CONTEXT, settings.n_ctx))
    return CheckupRequest(
        model.n_bytes, model.layers, model.hidden, model.vocab, 0, model.kv_numbers, n_ctx,
        max(n_ctx, settings.n_cells), settings.divided_kv_type, n_gpu_layers(settings), window=model.window,
        window_numbers=model.window_numbers, state_bytes=model.state_bytes,
    )  # fmt: skip


def memory_of(request: CheckupRequest, fit: Fit) -> Memory:
    """Return whether a model fits: its weights and the whole context, in what others leave free."""
    fits = not fit.problem and fit.n_ctx >= request.n_ctx and fit.n_bytes <= SPARE * fit.available
    return Memory(fit.in_all or request.n_bytes, fits)


async def measured_speed(
    config: Config, models: tuple[OfferedModel, ...], *, may_measure: Callable[[], bool]
) -> MeasuredSpeed | None:
    """Return the speed of the device's model here: as it was measured, or measured now; None where neither can be."""
    settings = config.device
    if not settings.enabled or settings.base_url or config.split.enabled or config.fleet.enabled:
        return None
    try:
        path = model_path(settings)
        shape = await asyncio.to_thread(_shape_of, path, models)
        if shape is None:
            return None
        speed = await asyncio.to_thread(measured_speeds, config, path)
        if speed is None and may_measure():
            tune = run_tune(job_for(config, path, budget_s=0.0), log.debug)
            async with asyncio.timeout(QUICK_S):
                tuned = await unless(tune, lambda: not may_measure(), "speed for offers")
            speed = None if tuned is None else tuned.speed
    except (ConfigError, TuneError, OSError) as e:  # a TimeoutError is an OSError
        log.info("the speed of models cannot be predicted: %s", e)
        return None
    return None if speed is None else MeasuredSpeed(path.name, *shape, speed.prefill_tps, speed.decode_tps)


def _shape_of(path: Path, models: tuple[OfferedModel, ...]) -> tuple[float, float] | None:
    """Return the bytes and the parameters that a token takes; None where experts are chosen, and the list has no such.

    Blocks on disk.
    """
    for model in models:
        if model.file == path.name:
            return model.active_bytes, model.active_parameters
    found = examine(path)
    if found.problem or not found.n_parameters or found.header.number(f"{found.header.architecture}.expert_count"):
        return None
    return found.n_bytes, found.n_parameters
