"""The cost of an attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..types import Attempt, Side

J_PER_KWH = 3.6e6
J_PER_WH = J_PER_KWH / 1000


@dataclass(frozen=True, slots=True)
class Prices:
    """Server prices in $ per million tokens; the device's power in W while it computes, and the exchange rate λ.

    `server_cached_usd_per_mtok` is for prompt tokens from the server's cache; None: as input. `token_j` is the measured
    energy of a prefill and of a decode token, J; where it is not known, power and time take its place. A partner spends
    `partner_token_j` on the same tokens, J, where the device is two machines.
    """

    server_input_usd_per_mtok: float = 0.0
    server_output_usd_per_mtok: float = 0.0
    device_watts: float = 0.0
    usd_per_kwh: float = 0.0
    server_cached_usd_per_mtok: float | None = None
    token_j: tuple[float, float] | None = None
    partner_token_j: tuple[float, float] = (0.0, 0.0)

    def joules(self, prefill_tps: float, decode_tps: float) -> tuple[float, float]:
        """Return the energy of one prefill and one decode token, J, on a device of those speeds in token/s."""
        prefill_j, decode_j = self.token_j or (self.device_watts / prefill_tps, self.device_watts / decode_tps)
        return prefill_j + self.partner_token_j[0], decode_j + self.partner_token_j[1]

    def per_token(self, prefill_tps: float, decode_tps: float) -> dict[str, float]:
        """Return $ of one prefill and one decode token on either side, for a device of those speeds in token/s."""
        prefill_j, decode_j = self.joules(prefill_tps, decode_tps)
        return {
            "device_prefill": prefill_j / J_PER_KWH * self.usd_per_kwh,
            "device_decode": decode_j / J_PER_KWH * self.usd_per_kwh,
            "server_prefill": self.server_input_usd_per_mtok / 1e6,
            "server_decode": self.server_output_usd_per_mtok / 1e6,
        }

    def scarcer(self, prefill_tps: float, decode_tps: float) -> Side:
        """Return the side whose use a budget limits: the device if its cheapest token is dearer than any other.

        The rule is in docs/explain/design.md#policies.
        """
        c = self.per_token(prefill_tps, decode_tps)
        device_s, server_s = (c["device_prefill"], c["device_decode"]), (c["server_prefill"], c["server_decode"])
        return Side.DEVICE if min(device_s) > max(server_s) else Side.SERVER

    def energy_j(self, attempt: Attempt) -> float:
        """Return the energy of an attempt, J: by its tokens where a token's energy is measured, else by its time.

        What a partner spent on it is added.
        """
        if attempt.side is Side.SERVER:
            return 0.0
        usage = attempt.usage
        if self.token_j is None:
            return self.device_watts * usage.busy_s + usage.partner_j
        return usage.prompt_tokens * self.token_j[0] + usage.completion_tokens * self.token_j[1] + usage.partner_j

    def bill_usd(self, attempt: Attempt) -> float:
        """Return the server's bill for an attempt, $; a loser is billed for its tokens and those it may go on to make.

        `usage.cached_tokens` of a server are those that it found in its own cache.
        """
        if attempt.side is Side.DEVICE:
            return 0.0
        usage, fresh = attempt.usage, self.server_input_usd_per_mtok
        cached = fresh if self.server_cached_usd_per_mtok is None else self.server_cached_usd_per_mtok
        made = usage.completion_tokens + attempt.unseen_tokens
        return (
            usage.prompt_tokens * fresh + usage.cached_tokens * cached + made * self.server_output_usd_per_mtok
        ) / 1e6

    def booked(self, attempt: Attempt) -> Attempt:
        """Return the attempt with its bill and its energy, and the worth of the partner's in the partner's part."""
        usage = attempt.usage
        if usage.split is not None and usage.split["partner_j"] is not None:
            partner_usd = usage.partner_j / J_PER_KWH * self.usd_per_kwh
            attempt = replace(attempt, usage=replace(usage, split={**usage.split, "partner_usd": partner_usd}))
        return replace(attempt, bill_usd=self.bill_usd(attempt), energy_j=self.energy_j(attempt))

    def cost_usd(self, attempt: Attempt) -> float:
        """Return the cost of an attempt, $: the server's bill, or the worth of the device's energy."""
        return self.bill_usd(attempt) + self.energy_j(attempt) / J_PER_KWH * self.usd_per_kwh
