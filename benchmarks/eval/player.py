"""Plays a trace against fitted policies: the daemon's tables and pacer, on many streams of requests at once.

Lanes are [budgets, seeds]: each is one user with a budget and a random order of prompts, all asking the same server in
the order of the trace (from a random start, around and around). The server's first token is always seen in the end
(the shadow), so what was slow lately is known wherever the server was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from disco_daemon.arrays import BoolArray, FloatArray
from disco_daemon.dispatch.pacer import Pacer
from disco_daemon.dispatch.table import Table
from disco_daemon.simulate.recorded import Phone, Recent
from disco_daemon.types import Side

from .traces import Requests


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The requests drawn, and the TTFTs drawn for the server: [requests, seeds]; draws in [0, 1)."""

    prompt: FloatArray
    output: FloatArray
    server_s: FloatArray
    draws: FloatArray

    @classmethod
    def draw(cls, ttft_s: FloatArray, requests: Requests, n: int, seeds: Sequence[int]) -> Stream:
        """`n` requests a seed: prompts drawn at random, server times in the trace's order from a random start."""
        columns = [_column(ttft_s, requests, n, np.random.default_rng(seed)) for seed in seeds]
        return cls(*(np.stack(c, axis=1) for c in zip(*columns, strict=True)))

    def asking_twice(self, after_s: float) -> Stream:
        """The same requests, of which the server is asked again where it was silent for `after_s`.

        The second time is the next one of the trace: a slow period is slow for both.
        """
        return replace(self, server_s=np.minimum(self.server_s, after_s + np.roll(self.server_s, -1, axis=0)))


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Outcome of a play: [requests, budgets, seeds]. `lead_s`: how long the device had run by the first token, s."""

    ttft_s: FloatArray
    device_won: BoolArray
    device_ran: BoolArray
    server_ran: BoolArray
    ratio: FloatArray  # [budgets, seeds]
    lead_s: FloatArray | None = None  # where it was played
    asked_twice: BoolArray | None = None  # whether the server was, where it may be

    def at(self, i: int) -> Played:
        """The `i`-th budget alone."""
        one = slice(i, i + 1)
        lead = None if self.lead_s is None else self.lead_s[:, one]
        twice = None if self.asked_twice is None else self.asked_twice[:, one]
        return Played(
            self.ttft_s[:, one], self.device_won[:, one], self.device_ran[:, one], self.server_ran[:, one],
            self.ratio[one], lead, twice,
        )  # fmt: skip


def _column(ttft_s: FloatArray, requests: Requests, n: int, rng: np.random.Generator) -> tuple[FloatArray, ...]:
    start = rng.integers(len(ttft_s))
    which = rng.integers(len(requests.prompt), size=n)
    server = ttft_s[(start + np.arange(n)) % len(ttft_s)]
    return requests.prompt[which].astype(float), requests.output[which].astype(float), server, rng.random(n)


def play(stream: Stream, phone: Phone, tables: Sequence[Table], budgets: FloatArray, constrained: Side) -> Played:
    """Without feedback: every table is used as it was fitted, `tables[i]` for `budgets[i]`."""
    device_s = phone.ttft_s(stream.prompt)
    scores = np.zeros(1)
    planned = [
        t.delays(stream.prompt, np.array([b]), scores, stream.draws) for t, b in zip(tables, budgets, strict=True)
    ]
    waits = [np.stack(w, axis=1) for w in zip(*planned, strict=True)]
    return _outcome(stream, device_s, waits[0], waits[1], constrained)


def play_paced(
    stream: Stream,
    phone: Phone,
    tables: Sequence[Table],
    pacer: Pacer,
    constrained: Side,
    recent: Recent,
) -> Played:
    """Play request by request, with the pacer's feedback and the score of the recent TTFTs."""
    stack = _Stack.of(tables)
    n, seeds = stream.prompt.shape
    shape = (n, len(tables), seeds)
    device_wait, server_wait = np.empty(shape), np.empty(shape)
    device_s = phone.ttft_s(stream.prompt)
    levels = np.broadcast_to(recent.levels, (len(tables), seeds, len(recent.levels)))
    for i in range(n):
        length = stream.prompt[i]
        waits = stack.delays(length, np.asarray(pacer.handed_out()), recent.predictor.score(levels), stream.draws[i])
        allowed = np.asarray(pacer.allows(length))
        if not allowed.all():
            waits[0 if constrained is Side.DEVICE else 1][~allowed] = np.inf
        device_wait[i], server_wait[i] = waits
        server_at, device_at = server_wait[i] + stream.server_s[i], device_wait[i] + device_s[i]
        asked = server_wait[i] < device_at
        ran = device_wait[i] < server_at if constrained is Side.DEVICE else asked
        pacer.settle(length, np.where(ran, length, 0.0))
        levels = np.where(asked[..., None], recent.after(levels, stream.server_s[i]), levels)
    return _outcome(stream, device_s, device_wait, server_wait, constrained)


def _outcome(
    stream: Stream, device_s: FloatArray, device_wait: FloatArray, server_wait: FloatArray, constrained: Side
) -> Played:
    server_at = server_wait + stream.server_s[:, None, :]
    device_at = device_wait + device_s[:, None, :]
    device_ran, server_ran = device_wait < server_at, server_wait < device_at
    used = device_ran if constrained is Side.DEVICE else server_ran
    length = stream.prompt[:, None, :]
    ratio = (used * length).sum(axis=0) / length.sum(axis=0)
    ttft = np.minimum(server_at, device_at)
    lead = np.where(device_ran, ttft - device_wait, 0.0)
    return Played(ttft, device_at < server_at, device_ran, server_ran, ratio, lead)


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """Tables of the same contexts and lengths for several budgets, looked up together."""

    edges: FloatArray
    bounds: FloatArray
    budgets: FloatArray  # [tables, rungs]
    waits: FloatArray  # [2, tables, rungs, contexts, lengths]

    @classmethod
    def of(cls, tables: Sequence[Table]) -> _Stack:
        rungs = max(len(t.budgets) for t in tables)

        def pad(array: FloatArray) -> FloatArray:
            return np.concatenate([array, np.repeat(array[-1:], rungs - len(array), axis=0)])

        return cls(
            tables[0].edges,
            np.empty(0) if tables[0].contexts is None else tables[0].contexts.bounds,
            np.stack([pad(t.budgets) for t in tables]),
            np.stack(
                [
                    np.stack([pad(w) for w in side])
                    for side in zip(*((t.device_s, t.server_s) for t in tables), strict=True)
                ]
            ),
        )

    def delays(self, length: FloatArray, budgets: FloatArray, scores: FloatArray, draws: FloatArray) -> FloatArray:
        """Device and server waits, [2, tables, seeds]."""
        last = self.budgets.shape[1] - 1
        which = np.arange(len(self.budgets))[:, None]
        upper = (self.budgets[:, :, None] <= budgets[:, None, :]).sum(axis=1)
        low, high = np.clip(upper - 1, 0, last), np.minimum(upper, last)
        below, above = self.budgets[which, low], self.budgets[which, high]
        rung = np.where((upper > 0) & (draws * (above - below) < budgets - below), high, low)
        context = np.searchsorted(self.bounds, scores, side="left")
        bucket = np.searchsorted(self.edges, length, side="left")
        delays: FloatArray = self.waits[:, which, rung, context, bucket]
        return delays
