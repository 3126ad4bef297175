"""The result of `disco profile`, and its file beside those of the tune: one for each model and way to compute."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ..engine.measure.tune_messages import Knobs
from ..estimation.prefill_curve import Interval, Line
from ..power.meter import TokenEnergy
from .tuned_profile import ProfileKey, TunedProfiles, write

TYPICAL = 512  # tokens: the prompt whose reading speed is shown, and up to which a straight line stands for the curve


class TtftFit(msgspec.Struct, frozen=True):
    """T_d(l) = c + k*l + q*l**2 in s, with 95 % intervals; the rest is as in `Line`."""

    k_s_per_token: float
    q_s_per_token2: float
    c_s: float
    r2: float
    k_interval: Interval
    q_interval: Interval
    c_interval: Interval
    relative_error: float
    n: int
    n_outliers: int

    @classmethod
    def of(cls, line: Line) -> TtftFit:
        """Return what is kept of a fit."""
        c, k, q = (line.interval(i) for i in range(3))
        values = line.k_s_per_token, line.q_s_per_token2, line.c_s, line.r2
        return cls(*values, k, q, c, line.relative_error, line.n, line.n_outliers)

    def predict(self, tokens: float) -> float:
        """Return T_d of a prompt of `tokens` uncached tokens, s."""
        return self.c_s + self.k_s_per_token * tokens + self.q_s_per_token2 * tokens**2


class Check(msgspec.Struct, frozen=True):
    """The distance of predictions from the TTFTs of `n` more answers: quantiles of |predicted / seen - 1|.

    `bias` is the median of predicted / seen - 1: above 0, the device is faster than predicted.
    """

    n: int
    median_relative_error: float
    p90_relative_error: float
    bias: float


class DeviceFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The machine with its model. Intervals are of 95 %, None where one sample was all there is.

    `load_s` is from the start of the engine's process until it can serve (mean); `first_load_s` is its first time, that
    may have read the file from the disk. `prefill_tps` is the speed of a prompt of TYPICAL tokens without c,
    `decode_tps` that of one answer alone (mean), token/s. `samples` are (fresh tokens, TTFT in s), as they came.
    `n_warm` samples were dropped since a cache knew a part of the prompt. `drift`: by what share prompts of one length
    took longer at the end than at the begin; `throttled`: a sensor, or the drift, says that the machine was
    slowed down. `busy_share` of the processor was taken by others before it began.
    """

    model: str
    load_s: float
    prefill_tps: float
    decode_tps: float
    ttft_fit: TtftFit
    energy: TokenEnergy
    n_ctx: int
    first_load_s: float
    prefill_interval: Interval
    drift: float
    throttled: bool
    n_warm: int
    busy_share: float
    samples: list[tuple[int, float]]
    load_interval: Interval | None = None
    decode_interval: Interval | None = None
    check: Check | None = None


class ServerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server as seen from here.

    `rtt_s` is a TCP connect (median); TTFTs are of `n` short streams, s; `n_failed` more gave none. `continuation` is
    its way to go on with a partial answer, "untried" if it is unknown; `tokens` is what all of this processed there.
    `error` is the last failure, in words.
    """

    base_url: str
    model: str
    n: int
    n_failed: int
    tokens: int
    continuation: str
    probed: bool = False
    rtt_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_interval: Interval | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_max_s: float | None = None
    samples: list[float] = []
    error: str = ""


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """The figures of one `disco profile`; `measured` is its date. They hold for this `key` and these `knobs` only."""

    key: ProfileKey
    knobs: Knobs
    measured: str
    device: DeviceFigures
    server: ServerFigures | None = None

    @property
    def prior(self) -> tuple[float, float]:
        """The prior of `DeviceTtft`, k in s/token and c in s: the line that meets the curve at 0 and at TYPICAL."""
        return 1 / self.device.prefill_tps, self.device.ttft_fit.c_s

    @property
    def known_energy(self) -> TokenEnergy | None:
        """The measured energy of a token, for `EnergyMeter(known=…)`; None if it was only assumed."""
        return self.device.energy if self.device.energy.windows else None


def path_of(profiles: TunedProfiles, key: ProfileKey) -> Path:
    """Return the path of the result: beside the tune's profile of the same model."""
    return profiles.path(key).with_suffix(".measured.toml")


def load(profiles: TunedProfiles, key: ProfileKey, knobs: Knobs) -> Measured | None:
    """Return the figures of this model, computed in this way; None if there are none, or the file is damaged."""
    try:
        found = msgspec.convert(tomllib.loads(path_of(profiles, key).read_text("utf-8")), Measured)
    except (OSError, ValueError, msgspec.ValidationError):
        return None
    return found if (found.key, found.knobs) == (key, knobs) else None


def save(profiles: TunedProfiles, measured: Measured) -> Path:
    """Write it, whole or not at all. Raises OSError."""
    comment = "Written by `disco profile`. Without it, the daemon learns from its requests alone."
    return write(path_of(profiles, measured.key), comment, _without_none(msgspec.to_builtins(measured)))


def _without_none(value: Any) -> Any:
    """TOML has no null: what is not known is left out."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return value
