"""Batching where the inner layers are at a host: two flights are under way, so that neither it nor home waits long.

While the host computes one flight, home draws the tokens of the other and sends it off again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...types import LayerRange
from .. import wire
from ..hosts.home import HERE, Ends, HomeLlama
from ..hosts.placing import next_flight
from ..hosts.segment_runs import SegmentRuns
from ..llama.refusals import ModelError
from ..wire import FLIGHTS
from .iteration import Batch
from .remote_layers import RemoteLayers, RemoteUsage
from .sequence import IN_FLIGHT, Sequence

if TYPE_CHECKING:
    from .batch import Batcher

LOOK_S = 0.005  # between two looks at a move of layers while nothing is computed


def ends_of(parts: tuple[wire.RangeFile, ...]) -> Ends:
    """Return the ranges as home takes them. Raises ModelError if these are no ends and a leg between them."""
    if len(parts) < 3:
        raise ModelError(f"the model is in {len(parts)} ranges, where home and one host have three")
    try:
        ranges = tuple(LayerRange(part.first, part.last, part.of) for part in parts)
    except ValueError as e:
        raise ModelError(str(e)) from e
    hosts = tuple(tuple(number or HERE for number in part.hosts) for part in parts[1:-1])
    shares = tuple(part.shares for part in parts[1:-1])
    if any(of and (len(of) != len(at) or min(of) < 0 or not sum(of)) for of, at in zip(shares, hosts, strict=True)):
        raise ModelError("the hosts of a range have other shares than there are hosts, or none")
    return Ends(tuple(part.path for part in parts), ranges, hosts, shares)


@dataclass(slots=True)
class FleetHome(RemoteLayers):
    """The inner layers are at hosts: batches depart and arrive. `_flights` are under way, with their departures, s.

    `_moving` is the id of the move of layers that is to be reported, `_times` are those of home's own ranges.
    """

    _flights: deque[tuple[Batch, float]] = field(default_factory=deque)
    _moving: str = ""
    _times: SegmentRuns[LayerRange] = field(default_factory=SegmentRuns)

    def attach(self, batcher: Batcher) -> None:
        """Answer this batcher from now on."""
        RemoteLayers.attach(self, batcher)
        batcher.admission.cells.before_move = self.settle

    # --- moves of layers ------------------------------------------------------------------------------------------

    @property
    def _home(self) -> HomeLlama:
        llama = self.batcher.llama
        assert isinstance(llama, HomeLlama)
        return llama

    def obey(self, order: wire.ToFleet) -> None:
        """Carry out an order about layers, or about how many answers run at a time."""
        match order:
            case wire.MoveLayers(id=number, ranges=ranges):
                try:
                    self.begin_move(ends_of(ranges))
                except ModelError as e:
                    self.batcher.send(wire.LayersMoved(id=number, error=str(e)))
                else:
                    self._moving = number
            case wire.BreakOffMove(reason=reason):
                self.break_off_move(reason)
                self._report()
            case wire.LimitAnswers(n_answers=n, offload=offload):
                admission = self.batcher.admission
                admission.limit, admission.offloads = n, offload
                admission.reconsider()

    def _report(self) -> None:
        """Say what came of the move that was ordered, once it has ended; hosts without layers are let go."""
        if not self._moving or self._home.is_moving:
            return
        report, number = self._home.moves[-1], self._moving
        self._moving = ""
        for host in [number for number, host in self._home.hosts.items() if not host.segments]:
            self._home.leave(host)
        self.batcher.send(
            wire.LayersMoved(
                id=number, error=report.error, seconds=report.total_s, load_s=report.load_s, copy_s=report.copy_s,
                pause_s=report.pause_s, n_bytes=report.n_bytes,
            )
        )  # fmt: skip

    def begin_move(self, ends: Ends) -> None:
        """Begin to move layers, while answers go on; `HomeLlama.moves` has what came of it. Raises ModelError."""
        self._home.begin_move(ends)

    def break_off_move(self, reason: str) -> None:
        """End a move, if one is under way: all is as before."""
        self._home.break_off(reason)

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message at most before `look` is due, s; None while nothing is."""
        return LOOK_S if self._home.is_moving or self._moving else None

    def look(self) -> bool:
        """Go on with a move of layers; there is nothing to compute."""
        self._progress_move()
        if self._home.is_switching:
            self._switch()
        return False

    def _progress_move(self) -> None:
        """Go on with a move of layers."""
        if self._home.is_moving:
            self._home.progress_move(self.batcher.admission.cells.spans())
        self._report()

    def _switch(self) -> None:
        """Let the flights land, but for one that is held, and finish a move of layers."""
        llama = self._home
        while llama.is_switching and len(self._flights) > llama.holds:
            self._land()
        if llama.is_switching:  # else it was finished when the last one landed
            llama.finish_move(self.batcher.admission.cells.spans())
        llama.send_held()
        self._report()

    # --- what it tells --------------------------------------------------------------------------------------------

    def usage(self) -> RemoteUsage:
        """Return what was guessed so far, and what hosts computed since the last call."""
        return RemoteLayers.usage(self)._replace(fleet=self.fleet_usage())

    def fleet_usage(self) -> wire.FleetUsage:
        """Return what hosts computed, and how long runs of ranges took since the last call."""
        home = self._home
        found = [(0, *one) for one in self._times.take()]
        hosts, ways = list[wire.HostUsage](), list[wire.WaySample]()
        for number, host in home.hosts.items():
            rows, busy_s = host.computed()
            confined = () if host.link is None else host.link.confined
            hosts.append(wire.HostUsage(number=number, rows=rows, busy_s=busy_s, lost=host.n_lost, confined=confined))
            for n_rows, seconds in () if host.link is None else host.link.ways.take():
                ways.append(wire.WaySample(host=number, rows=n_rows, seconds=seconds))
            for segment, batch, n, seconds in () if host.link is None else host.link.runs.take():
                if segment in host.segments:  # else it was released since
                    found.append((number, host.segments[segment].layers, batch, n, seconds))
        for one in home.here:
            found += [(0, *run) for run in one.runs.take()]
        samples = tuple(
            wire.RunSample(host=host, first=layers.first, last=layers.last, batch=batch, n=n, seconds=seconds)
            for host, layers, batch, n, seconds in found
        )
        legs = ((layers.first, layers.last, tuple(max(0, host) for host in at)) for layers, at in home.cut)
        return wire.FleetUsage(hosts=tuple(hosts), samples=samples, legs=tuple(legs), ways=tuple(ways))

    # --- iterations -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Go on with a move of layers; let flights land where there may be one at a time only."""
        self._progress_move()
        if self._n_flights == 1:  # until now there may have been more
            self.settle()

    def compute(self, batch: Batch) -> bool:
        """Let a batch depart, and the one before it arrive; False if there was nothing to compute."""
        self.batcher.place(batch)
        batch.apart = False
        if batch.rows:
            self._depart(batch)
        if self._home.is_switching:
            self._switch()
            return True
        if len(self._flights) >= self._n_flights or (self._flights and not batch.rows):
            self._land()
            return True
        return bool(batch.rows)

    @property
    def _n_flights(self) -> int:
        """How many flights are under way at most: one where no host computes beside home, as in one process."""
        return 1 if self._home.is_all_here else FLIGHTS

    def candidates(self) -> list[Sequence]:
        """Return half of the sequences, those of like routes; the others are in the air, or come next.

        Where home computes all layers, there is one flight, of all.
        """
        resident = self.batcher.admission.resident
        here = [s for s in resident if not s.is_away]
        runnable = [s for s in resident if s.is_running or s.is_away]
        if self._home.has_replicas:
            routes = [self._home.route(s.slot) for s in runnable]
            half = {id(runnable[at]) for at in next_flight(routes, [not s.is_away for s in runnable], self._n_flights)}
        else:
            half = {id(s) for s in [s for s in here if s.is_running][: -(-len(runnable) // self._n_flights)]}
        return [s for s in here if not s.is_running or id(s) in half]

    def _depart(self, batch: Batch) -> None:
        rows, began = batch.next_rows(), self.batcher.clock()
        rc = self._home.depart(rows)
        self._times.add(self._home.own[0], len(rows), self._home.first_took_s)
        self.batcher.counters.busy_s += self.batcher.clock() - began
        if rc != 0:
            self.batcher.recover(rc, batch.part)
            return
        self._flights.append((batch, began))
        for s, _, _ in batch.shares:
            if s.is_running:
                self.batcher.admission.send_away(s, IN_FLIGHT)
        if not all(s.is_away for s, _, _ in batch.shares):  # one that is held may be changed by any order
            self.settle()

    def settle(self) -> None:
        """Let all flights land: an order is to find every sequence here."""
        while self._flights:
            self._land()

    def _land(self) -> None:
        """Wait for the first flight, and give each of its sequences what its rows have come to."""
        batch, departed = self._flights.popleft()
        batcher, clock = self.batcher, self.batcher.clock
        began = clock()
        rc = self._home.arrive()
        batch.ended_at = clock()
        batch.took_s = batch.ended_at - departed
        batcher.counters.busy_s += batch.ended_at - began
        for s, n, _ in batch.shares:
            if s.is_away:
                batcher.admission.bring_back(s)
            s.busy_s += batch.took_s * n / len(batch.rows)
        if rc != 0:
            batcher.recover(rc, batch.shares)
            return
        batch.n_decoded = len(batch.shares)
        batcher.collect(batch)
        # Home computes nothing while it draws the tokens, so that belongs to what its last range costs.
        self._times.add(self._home.own[1], len(batch.rows), self._home.took_s + clock() - batch.ended_at)
        batcher.learn(batch)
