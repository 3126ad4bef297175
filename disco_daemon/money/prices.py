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

    def per_token(self, prefill_tps: float, decode_tps: float) -> dict[str, float]:
        """$ of one prefill and one decode token on either side, for a device of those speeds in token/s."""
        usd_per_s = self.device_watts / J_PER_KWH * self.usd_per_kwh
        return {
            "device_prefill": usd_per_s / prefill_tps,
            "device_decode": usd_per_s / decode_tps,
            "server_prefill": self.server_input_usd_per_mtok / 1e6,
            "server_decode": self.server_output_usd_per_mtok / 1e6,
        }

    def scarcer(self, prefill_tps: float, decode_tps: float) -> Side:
        """The side whose use a budget limits (DESIGN §6): the device if its cheapest token is dearer than any other."""
        c = self.per_token(prefill_tps, decode_tps)
        device_s, server_s = (c["device_prefill"], c["device_decode"]), (c["server_prefill"], c["server_decode"])
        return Side.DEVICE if min(device_s) > max(server_s) else Side.SERVER

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
