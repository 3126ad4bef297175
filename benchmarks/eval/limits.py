"""Bounds that no policy can beat: the clairvoyant optimum of the mean, and the best P99 for a known distribution."""

from __future__ import annotations

import numpy as np

from disco_daemon.arrays import FloatArray
from disco_daemon.estimation.survival import Survival
from disco_daemon.simulate.recorded import Phone
from disco_daemon.types import Side

from .player import Played, Stream

HALVINGS = 40


def clairvoyant(stream: Stream, phone: Phone, budgets: FloatArray, constrained: Side) -> Played:
    """Knows each server TTFT beforehand and spends the budget where a token of it saves most time.

    The other side serves every request at once. A fractional knapsack taken greedily: optimal up to one request a lane.
    """
    length, server_s = stream.prompt, stream.server_s
    device_s = phone.ttft_s(length)
    own, other = (device_s, server_s) if constrained is Side.DEVICE else (server_s, device_s)
    gain = np.maximum(other - own, 0.0)
    order = np.argsort(-gain / length, axis=0, kind="stable")
    sorted_length = np.take_along_axis(length, order, axis=0)
    affordable = sorted_length.cumsum(axis=0)[:, None, :] <= budgets[None, :, None] * length.sum(axis=0)
    used = np.empty_like(affordable)
    np.put_along_axis(used, order[:, None, :], affordable, axis=0)
    ttft = other[:, None, :] - used * gain[:, None, :]
    ratio = (used * length[:, None, :]).sum(axis=0) / length.sum(axis=0)
    helped = used & (gain > 0)[:, None, :]
    everyone = np.ones_like(used)
    if constrained is Side.DEVICE:
        return Played(ttft, helped, used, everyone, ratio)
    return Played(ttft, ~helped, everyone, used, ratio)


def best_p99(
    server: Survival, lengths: FloatArray, shares: FloatArray, device_s: FloatArray, budget: float, constrained: Side
) -> float:
    """The lowest P99 of the TTFT, s, that start delays by length can promise; the rest of the distribution is ignored.

    For a limit tau: a length whose T_d fits below it is kept (device-constrained: its device starts tau - T_d after the
    server; server-constrained: the server is asked at once where the device is too slow) or given up, the dearest per
    request first and the last of them in part, until 1 % of the requests may exceed tau. Bisection finds the least tau
    that the budget pays for.
    """
    tokens = lengths * shares / (lengths @ shares)
    low, high = 0.0, float(max(device_s[-1], server.times[-1]))
    for _ in range(HALVINGS):
        tau = (low + high) / 2
        if _price(tau, server, shares, tokens, device_s, constrained) <= budget:
            high = tau
        else:
            low = tau
    return high


def _price(
    tau: float, server: Survival, shares: FloatArray, tokens: FloatArray, device_s: FloatArray, constrained: Side
) -> float:
    """The least budget that keeps all but 1 % of the requests at or below `tau`; infinite where none does."""
    quick, late = device_s <= tau, float(server.at(tau))
    if constrained is Side.DEVICE:
        cost = np.where(quick, tokens * server.at(np.maximum(tau - device_s, 0.0)), 0.0)
        over, lost = shares * late, float((shares[~quick] * late).sum())
    else:
        cost = np.where(quick, 0.0, tokens)
        over, lost = shares * (1 - late), float((shares[~quick] * late).sum())
    cost = np.where(over > 0, cost, 0.0)  # whom the other side serves in time anyway need not be paid for
    slack = 0.01 - lost
    if slack < 0:
        return float("inf")
    candidates = np.flatnonzero((cost > 0) & (over > 0))
    candidates = candidates[np.argsort(-(cost[candidates] / over[candidates]))]
    taken = np.clip(slack - (over[candidates].cumsum() - over[candidates]), 0.0, over[candidates])
    return float(cost.sum() - (taken / over[candidates]) @ cost[candidates])
