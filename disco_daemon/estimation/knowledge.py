"""The estimates learned from finished answers: of the server, the device, the prompts and the answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import FloatArray
from ..types import Attempt, Outcome, Side
from .device_ttft import DeviceTtft
from .lengths import LengthDistribution, OutputLengths, PromptLengths
from .server_ttft import Predictor, ServerTtft
from .survival import Survival
from .ttft_context import Contexts, estimate_contexts

DEVICE_TPS = 100.0  # prefill speed assumed until the engine has measured its own
FEW = 20  # samples of the device, up to which the speed that its engine measured counts
LEAST_S = 1e-4  # a server that answers within less was cancelled in the same instant
WHOLE = frozenset({"stop", "tool_calls", "function_call"})  # ends of an answer that was not cut
# The server was there, and silent for that long; anything else that fails says nothing about how fast it answers.
SILENT = frozenset({"timeout"})
# The request was not to its liking, and would not be to any other server's: it answered. Or it had closed the
# connection before that request.
NOT_ITS_FAULT = frozenset({"refused", "no_continuation", "dropped"})


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The estimates at one moment, in arrays of their own: safe to fit from in another thread."""

    server: Survival
    samples: tuple[FloatArray, NDArray[np.bool_], FloatArray, FloatArray]
    predictor: Predictor
    lengths: LengthDistribution
    device_s: FloatArray

    def contexts(self) -> Contexts | None:
        """The server's TTFT given the recent ones; None before there are samples."""
        return estimate_contexts(*self.samples) if len(self.samples[0]) else None


class Knowledge:
    """The estimators of one server model and one device model. Only `learn` and `use_measured_speed` change it."""

    def __init__(self) -> None:
        self.server = ServerTtft()
        self.device = DeviceTtft(1 / DEVICE_TPS)
        self._profiled = False
        self.prompts = PromptLengths()
        self.outputs = OutputLengths()

    def use_profile(self, k_s_per_token: float, c_s: float) -> None:
        """The device's line was measured before, over many prompts; of no interest once there are samples."""
        if self.device.n == 0:
            self.device, self._profiled = DeviceTtft(k_s_per_token, c_s), True

    @property
    def is_new_device(self) -> bool:
        """Whether nothing is known of the device: neither seen, nor measured, nor predicted."""
        return self.device.n == 0 and not self._profiled and math.isclose(self.device.prior_k, 1 / DEVICE_TPS)

    def use_prediction(self, k_s_per_token: float, c_s: float) -> None:
        """Begin with a predicted line, which counts until the engine has measured its speed."""
        if self.is_new_device:
            self.device = DeviceTtft(k_s_per_token, c_s)

    def use_measured_speed(self, prefill_tps: float) -> bool:
        """The engine has measured its prefill speed at its start, token/s; of no interest if more is known.

        A few samples are not more: the first one may have been disturbed, and short prompts tell little of long ones.
        """
        if prefill_tps <= 0 or self._profiled or self.device.n >= FEW:
            return False
        before, k = self.device, 1 / prefill_tps
        if not math.isclose(before.prior_k, k):
            self.device = before.believing(k)
        return self.device is not before

    def take_over(self, before: Knowledge, *, device: bool, server: bool) -> None:
        """Go on with what was known of a side that is the same, if that is more, and of the user's prompts."""
        if device and before.device.n > self.device.n:
            self.device, self._profiled = DeviceTtft.from_json(before.device.to_json()), before._profiled
        if server and before.server.n > self.server.n:
            self.server = ServerTtft.from_json(before.server.to_json())
        if before.prompts.n > self.prompts.n:
            self.prompts = PromptLengths.from_json(before.prompts.to_json())

    def learn(self, outcome: Outcome) -> None:
        """Take one finished answer. What a suspend or a stall of our own disturbed tells nothing of either side.

        Neither does a second request: it is sent only where the server is slow, so its times are none of just any.
        """
        for attempt in outcome.attempts:
            if attempt.disturbed or attempt.continued or attempt.hedge is not None:
                continue
            if attempt.side is Side.SERVER:
                self._learn_server(attempt)
            else:
                self._learn_device(attempt, max(1, outcome.prompt_tokens - attempt.usage.cached_tokens))
        if outcome.prompt_tokens > 0:
            self.prompts.add(outcome.prompt_tokens)
        if outcome.choices == 1 and (generated := sum(outcome.tokens.values())) > 0:
            is_cut = outcome.finish_reason not in WHOLE
            self.outputs.add(generated, censored=is_cut, prompt=max(0, outcome.prompt_tokens))

    def _learn_server(self, attempt: Attempt) -> None:
        silent = attempt.ttft_s if attempt.ttft_s > LEAST_S else None
        if attempt.error is not None and attempt.censored:
            if attempt.error not in NOT_ITS_FAULT:
                self.server.add_failure(silent if attempt.error in SILENT else None)
        elif attempt.censored and attempt.ttft_s > self.server.silence_s:
            self.server.add_failure(silent)  # the end was not waited for, but it had never been silent for so long
        elif silent is not None:
            self.server.add(silent, attempt.censored)

    def _learn_device(self, attempt: Attempt, prompt_tokens: int) -> None:
        ttft_s = attempt.ttft_s - attempt.load_s
        if attempt.error is not None or ttft_s <= 0 or prompt_tokens < 1:
            return
        # A prefill that was cancelled tells only how long it took at least. Where that is more than was predicted it
        # has to count: a device grown so slow that the server always wins would keep its old speed for ever.
        if not attempt.censored or ttft_s > self.device.predict(prompt_tokens, attempt.n_busy):
            self.device.add(prompt_tokens, ttft_s, attempt.n_busy)

    def snapshot(self) -> Snapshot:
        """The present state, for a fit."""
        lengths = self.prompts.distribution()
        return Snapshot(
            self.server.curve(),
            self.server.samples(),
            self.server.predictor(),
            lengths,
            np.asarray(self.device.predict(lengths.values)),
        )

    def to_json(self) -> dict[str, Any]:
        """The whole state in plain lists and numbers."""
        return {name: getattr(self, name).to_json() for name in _PARTS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Knowledge:
        """Return the state that wrote `data`. Raises ValueError for data that no state can have written."""
        new = cls()
        try:
            for name, part in _PARTS.items():
                setattr(new, name, part.from_json(data[name]))
        except KeyError as error:
            raise ValueError(f"the saved estimators lack {error}") from error
        return new


_PARTS: Mapping[str, Any] = {
    "server": ServerTtft, "device": DeviceTtft, "prompts": PromptLengths, "outputs": OutputLengths
}  # fmt: skip
