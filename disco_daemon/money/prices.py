"""What an attempt costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Attempt, Side

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Server prices in $ per million tokens; the device's power in W while it computes, and the exchange rate λ."""

    server_input_usd_per_mtok: float = 0.0
    server_output_usd_per_mtok: float = 0.0
    device_watts: float = 0.0
    usd_per_kwh: float = 0.0

    def energy_j(self, attempt: Attempt) -> float:
        """Energy this machine spent on an attempt, J."""
        return self.device_watts * attempt.usage.busy_s if attempt.side is Side.DEVICE else 0.0

    def cost_usd(self, attempt: Attempt) -> float:
        """Cost of an attempt, $; a loser costs what it processed."""
        if attempt.side is Side.DEVICE:
            return self.energy_j(attempt) / J_PER_KWH * self.usd_per_kwh
        usage = attempt.usage
        return (
            usage.prompt_tokens * self.server_input_usd_per_mtok
            + usage.completion_tokens * self.server_output_usd_per_mtok
        ) / 1e6
