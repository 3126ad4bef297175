"""What a Load message is made of besides numbers."""

from __future__ import annotations

import msgspec


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: a GGUF file, and how strongly it is applied (1 = as it was trained)."""

    name: str
    path: str
    scale: float = 1.0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The folder for idle conversations, those unused for `idle_s`, s: it may hold `max_bytes`."""

    folder: str
    max_bytes: int
    idle_s: float


class ExitCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the exit in a range's file may be: coefficients and table of `exits.calibrate.Calibration`.

    Of the tokens that it was judged by, the share `coverage` may leave at theta 0.8.
    """

    coefficients: tuple[float, ...]
    scores: tuple[float, ...]
    shares: tuple[float, ...]
    coverage: float = 0.0
