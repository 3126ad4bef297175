"""What the doctor says of the model that ships: that it is a stand-in, and which real one would fit."""

from __future__ import annotations

import asyncio

from ...client.offers import size_words
from ...config.layers import config_path
from ...config.schema import Config
from ...machines.device_settings import has_stand_in
from ...machines.model_offers import recommendation
from ...models.offered import offered_models
from .finding import Finding, Level, warn


def real_model(config: Config, found: Finding) -> Finding:
    """Return the finding on the model file, with a real model where the stand-in answers and one fits."""
    if found.level is not Level.OK or not has_stand_in(config.device):
        return found
    models = offered_models(config_path().parent)
    advice = asyncio.run(recommendation(config, models, may_measure=lambda: False))
    if not advice.models:
        return found
    text = f"{found.found}: a stand-in of 135M parameters. A real model fits"
    if advice.measured is None:  # a name now could be another one than that which is recommended once it is measured
        return warn(found.name, text, "`disco models recommend` measures this machine and says which is fast enough")
    model, memory = advice.models[0].model, advice.models[0].memory
    size = f"{size_words(model.n_bytes)}, {size_words(memory.n_bytes)} of memory, {model.licence}"
    text = f"{text}: {model.title} ({size})"
    return warn(found.name, text, f"`disco models pull {model.name} --use`, or `disco models recommend` for others")
