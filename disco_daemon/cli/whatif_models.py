"""The models of `disco eval --history --model`: names of the list with their predicted speeds on this machine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..models.offered import OfferedModel
    from ..simulate.recorded import Phone

RECOMMENDED = "recommended"


def about() -> str:
    """Return what predictions are worth, in a sentence."""
    from ..models.roofline import ERROR

    return (
        f"Predicted: by what this machine was measured to do, the first token within {100 * ERROR['prompt']:.0f} % and "
        f"token/s within {100 * ERROR['decode']:.0f} %.\n"
        "Answers are as long as they were; how good they are is not played."
    )


def predicted_devices(names: str, config: Config) -> list[Phone]:
    """Return a predicted device for each name, with commas between them. Raises ConfigError that says what to do."""
    from ..machines.expected_speed import expected_of, measured_processor
    from ..machines.model_offers import n_threads
    from ..simulate.whatif_models import PredictedPhone

    machine = measured_processor(config, n_threads(config))
    if machine is None:
        msg = (
            "no model can be predicted here: `disco models recommend` measures this machine's processor, once; what a "
            "GPU does is not predicted (device.n_gpu_layers = 0 leaves it out)"
        )
        raise ConfigError(msg)
    found: list[Phone] = []
    for model in _models(names, config):
        speed, first_s = expected_of(model.work, machine), partial(model.work.prompt_s, machine)
        found.append(PredictedPhone(model.name, 1 / speed.k_s_per_token, speed.decode_tps, speed.c_s, first_s))
    return found


def _models(names: str, config: Config) -> list[OfferedModel]:
    from ..config.layers import config_path
    from ..models.offered import find, offered_models

    offered = offered_models(config_path().parent)
    wanted = dict.fromkeys(name.strip() for name in names.split(","))
    return [_recommended(config, offered) if name == RECOMMENDED else find(name, offered) for name in wanted]


def _recommended(config: Config, offered: tuple[OfferedModel, ...]) -> OfferedModel:
    import asyncio

    from ..machines.model_offers import recommendation

    found = asyncio.run(recommendation(config, offered, may_measure=lambda: False))
    if not found.models:
        msg = f"no model is recommended here: {found.problem or 'none of the list fits into the memory that is free'}"
        raise ConfigError(msg)
    return found.models[0].model
