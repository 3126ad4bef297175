"""What a planner goes by until it has seen a model answer: its measured times, else its predicted ones."""

from __future__ import annotations

import asyncio

from ..config.schema import Config
from ..dispatch.mover import CostMover
from ..machines.expected_speed import predicted_speed, speed_of
from ..profiling.saved import Measured
from ..types import Side
from .tasks.learner import Learner


async def begin_with(measured: Measured | None, config: Config, learner: Learner, costs: CostMover) -> None:
    """Have a learner that has restored what it knew, and the mover beside it, begin with a model's expected times.

    Those that were `measured` go before all but samples. Predicted ones are for a model of which nothing is known, and
    the first speed that its engine measures takes their place.
    """
    knowledge = learner.planner.knowledge
    speed = None if measured is None else speed_of(measured)
    is_seen = knowledge.device.n > 0 and Side.DEVICE.value in costs.known_tps
    if speed is not None:
        knowledge.use_profile(speed.k_s_per_token, speed.c_s)
    elif knowledge.is_new_device:
        speed = await asyncio.to_thread(predicted_speed, config)
        if speed is not None:
            knowledge.use_prediction(speed.k_s_per_token, speed.c_s)
    if speed is not None:
        if not is_seen:
            costs.decode_tps[Side.DEVICE] = speed.decode_tps
        await learner.fit()
