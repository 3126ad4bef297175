"""`disco eval --history --model`: the user's own requests as another local model would have served them.

Only the device is another one: each request keeps its prompt, the length of its answer, and the server's TTFT. The
other model's times are predicted, so its figures are, and how good its answers would have been is not played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..arrays import FloatArray
from ..dispatch.policy import Policy
from .figures import align
from .recorded import Phone, Recorded
from .whatif import WhatIf, WhatIfPoint, WhatIfSetting, WhatIfTerms

PRESENT = "the present one"


@dataclass(frozen=True, slots=True)
class PredictedPhone(Phone):
    """A device that was never seen: its TTFT is `first_s` of the tokens to read, s; the line of `Phone` is near it."""

    first_s: Callable[[float], float] = float

    def ttft_s(self, lengths: FloatArray) -> FloatArray:
        """Return T_d(l), s."""
        distinct, where = np.unique(lengths, return_inverse=True)
        return np.array([self.first_s(n) for n in distinct.tolist()])[where]


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """What the whole history would have come to with one model as the device's."""

    name: str
    predicted: bool
    phone: Phone
    point: WhatIfPoint

    def to_json(self, present: WhatIfPoint) -> dict[str, Any]:
        """Return it as plain JSON; `saved` is what it saves against the present model, negative where it costs more."""
        mine, device = self.point, self.phone
        return asdict(mine) | {
            "name": self.name,
            "predicted": self.predicted,
            "device": {n: getattr(device, n) for n in ("prefill_tps", "decode_tps", "start_s")},
            "cost_usd": mine.cost_usd,
            "saved": {n: getattr(present, n) - getattr(mine, n) for n in ("mean_ttft_s", "server_usd", "device_wh")},
        }


def play(
    recorded: Recorded, terms: WhatIfTerms, policy: Policy, now: WhatIfSetting, others: Sequence[Phone]
) -> list[ModelOutcome]:
    """Return the present model as it was learned, and then each other one, all under the setting in force."""

    def outcome(phone: Phone, name: str, *, predicted: bool) -> ModelOutcome:
        model = WhatIf(replace(recorded, phone=phone), terms, policy)
        return ModelOutcome(name, predicted, phone, model.predict(now.usd_per_kwh, now.budget))

    present = outcome(recorded.phone, PRESENT, predicted=False)
    return [present, *(outcome(phone, phone.name, predicted=True) for phone in others)]


def summary(found: Sequence[ModelOutcome], recorded: dict[str, float], about: str) -> str:
    """Return a table, and what each model would have cost and saved in a sentence; `about` is said of predictions."""
    head = ("model", "reads/s", "writes/s", "mean s", "P99 s", "$", "Wh", "device %", "moved %")
    was = f"{recorded['mean_ttft_s']:.3f}", f"{recorded['p99_ttft_s']:.3f}"
    rows = [["as it was", "", "", *was, f"{recorded['server_usd']:.4f}", f"{recorded['device_wh']:.2f}", "", ""]]
    for one in found:
        point, name = one.point, f"{one.name} (predicted)" if one.predicted else one.name
        rows.append([
            name, f"{one.phone.prefill_tps:.0f}", f"{one.phone.decode_tps:.1f}", f"{point.mean_ttft_s:.3f}",
            f"{point.p99_ttft_s:.3f}", f"{point.server_usd:.4f}", f"{point.device_wh:.2f}",
            f"{100 * point.device_won:.1f}", f"{100 * point.moved:.1f}",
        ])  # fmt: skip
    told = [_sentence(one, found[0].point) for one in found if one.predicted]
    return "\n\n".join([align(head, rows), "\n".join([*told, about])])


def _sentence(one: ModelOutcome, present: WhatIfPoint) -> str:
    mine = one.point
    waited = _more(mine.mean_ttft_s - present.mean_ttft_s, "{:.3f} s", "longer", "shorter")
    paid = _more(mine.server_usd - present.server_usd, "{:.4f} $", "more", "less")
    used = _more(mine.device_wh - present.device_wh, "{:.2f} Wh", "more", "less")
    return f"{one.name}, as predicted: waits {waited} on average, bill {paid}, energy {used} than {PRESENT}."


def _more(difference: float, unit: str, more: str, less: str) -> str:
    return f"{unit.format(abs(difference))} {more if difference >= 0 else less}"
