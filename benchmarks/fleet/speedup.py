"""The paper's model of what replicas of layers gain, as printed: Equations 1 to 4 (CoCoServe, section 4.1).

W and T grow with the times of computing and sending; they are not times. What the model leaves out is told in
docs/explain/fleet.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerReplica:
    """One replica of a layer: its part of the batch, its host's compute C, and the bandwidth B to the original."""

    batch: float
    compute: float
    bandwidth: float


# The replicas of each layer. The first is the original, whose part of the batch does not travel: Equation 2's sum has
# p_i - 1 terms, which are those of the copies.
Replicas = Sequence[Sequence[LayerReplica]]


def work(layers: Replicas, width: float, length: float) -> float:
    """Return W(P), Equation 1: for each layer its slowest replica."""
    return sum(max(width**2 * one.batch * length / one.compute for one in layer) for layer in layers)


def transfer(layers: Replicas, width: float, length: float, transitions: float) -> float:
    """Return T(P), Equation 2. `transitions` is δ, a constant in the paper: changes between hosts."""
    sent = sum(width * one.batch * length / one.bandwidth for layer in layers for one in layer[1:])
    return transitions * sent


def speedup(begin: Replicas, layers: Replicas, width: float, length: float, transitions: float) -> float:
    """Return S(P), Equation 3, of `layers` against `begin`, which is P_0."""
    taken = work(layers, width, length) + transfer(layers, width, length, transitions)
    return work(begin, width, length) / taken


def overhead(transitions: float, compute: float, width: float, bandwidth: float) -> float:
    """Return gamma = δC / (dB), which Equation 4 takes for a constant of the cluster."""
    return transitions * compute / (width * bandwidth)


def equal_hosts_speedup(parallelism: Sequence[int], gamma: float) -> float:
    """Return S(P) on equal hosts with the batch split evenly, Equation 4; `parallelism` has p_i of each layer."""
    return 1 / (gamma + (1 - gamma) / len(parallelism) * sum(1 / p for p in parallelism))


def split_evenly(
    parallelism: Sequence[int], batch: float, compute: float, bandwidth: float
) -> list[list[LayerReplica]]:
    """Return the replicas that Equation 4 assumes."""
    return [[LayerReplica(batch / p, compute, bandwidth)] * p for p in parallelism]
