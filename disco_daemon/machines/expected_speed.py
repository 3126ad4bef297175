"""What a model takes for its tokens here before it was ever loaded: as it was measured, else as it is predicted."""

from __future__ import annotations

import logging
import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.schema import Config
from ..errors import ConfigError
from ..profiling.saved import TYPICAL, Measured
from ..profiling.tuned_profile import MACHINE
from .device_settings import header_of, is_for_gpu, knobs_for, model_path, n_gpu_layers, profiles

if TYPE_CHECKING:
    from ..models.roofline import MachineSpeed, TokenWork

log = logging.getLogger("disco.models")

SHORT = 100  # tokens: from here to TYPICAL most prompts are, and a straight line stands for the curve


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """The TTFT of n tokens is n * `k_s_per_token` + `c_s`; an answer alone comes at `decode_tps`, token/s."""

    k_s_per_token: float
    c_s: float
    decode_tps: float


def speed_of(measured: Measured) -> ExpectedSpeed:
    """Return the speed that `disco profile` measured."""
    return ExpectedSpeed(*measured.prior, measured.device.decode_tps)


def predicted_speed(config: Config) -> ExpectedSpeed | None:
    """Return the predicted speed of the device's model; None where nothing can be said. Blocks on disk.

    Nothing is measured: it takes a machine that was (`profiling.measured_machine`), and a model that its processor
    computes whole, for what a GPU does was not. Reading a file's header takes up to some tenths of a second.
    """
    settings = config.device
    if not settings.enabled or settings.base_url or config.split.enabled or config.fleet.enabled:
        return None
    try:
        return _predicted(config, model_path(settings))
    except (ConfigError, OSError, ValueError, ArithmeticError, LookupError) as e:
        log.info("the model's speed cannot be predicted: %s", e)  # a strange header, or a kept file that was edited
        return None


def _predicted(config: Config, path: Path) -> ExpectedSpeed | None:
    machine = measured_processor(config, knobs_for(config, path).n_threads)
    header = None if machine is None else header_of(path)
    if machine is None or header is None:
        return None
    from ..models.listed import listed  # only where a machine was measured, and its model is new

    found = expected_of(listed(path, header).work, machine)
    return found if found.k_s_per_token > 0 and all(map(math.isfinite, astuple(found))) else None


def measured_processor(config: Config, n_threads: int) -> MachineSpeed | None:
    """Return what the processor was measured to do with so many threads; None where a GPU may compute. Blocks on disk.

    The build of llama.cpp may have been another one.
    """
    if not (profiles().folder / MACHINE).exists() or (n_gpu_layers(config.device) != 0 and is_for_gpu()):
        return None
    from ..profiling.measured_machine import kept_by_any_build  # most machines were not measured

    return kept_by_any_build(profiles().folder, n_threads)


def expected_of(work: TokenWork, machine: MachineSpeed) -> ExpectedSpeed:
    """Return what is predicted of a model on a machine, with a line that meets the curve of prompts at TYPICAL."""
    short_s, typical_s = work.prompt_s(machine, SHORT), work.prompt_s(machine, TYPICAL)
    c = max(0.0, short_s - SHORT * (typical_s - short_s) / (TYPICAL - SHORT))  # attention bends the curve upwards
    return ExpectedSpeed((typical_s - c) / TYPICAL, c, 1 / work.decode_s(machine, SHORT))
