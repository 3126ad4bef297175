"""A model whose inner layers are at hosts: like a whole one to whoever batches, and its ends are here.

Home has the first range, with the embedding, and the last one, with the head and the vocabulary. Between them is a way
of legs: ranges at hosts, or here as well. Rows between two hosts pass home. What happens to cells here happens at all
hosts, in the same order. A batch is computed at once (`decode`), or it departs and arrives later, so that hosts compute
one while home is busy with another.

A host of this machine may see private texts. Where hosts are other machines, the daemon refuses private requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ..llama.hidden import FloatRows
from ..llama.model import AbortFlag, Llama
from ..llama.refusals import ModelError, refuse_to_cut
from ..llama.rows import Row
from ..wire import Load
from .ends import Ends
from .flight import Flight
from .home_cells import HomeCells
from .joining_legs import Span
from .legs import FlightFailedError, HomeSegment, Leg, keep_rows
from .link import HostGoneError
from .loading import BrokenOffError
from .memory_return import give_back_what_is_freed
from .pool import HERE, HostPool, hand_over, range_load
from .recut import MoveReport, Recut
from .remote import MAX_LOST, OpenHost, RemoteHost, RemoteSegment, wait_for
from .spares import Spares

__all__ = ["BROKEN", "HERE", "Ends", "HomeLlama"]

BROKEN = -1  # of a decode, as llama_decode returns it
MAX_REPORTS = 64  # of the latest moves


class HomeLlama(HomeCells):
    """The last range as a model, with the first one and the legs before it."""

    def __init__(self, load: Load, ends: Ends, abort: AbortFlag, open_host: OpenHost | Sequence[OpenHost]) -> None:
        """Load both ends, and let hosts load the layers between them. Raises ModelError.

        `open_host` starts any host's process, or there is one for each host, by its number.
        """
        self._ends = ends
        self._flights = deque[Flight]()
        self._legs: list[Leg] = []
        self.hosts: dict[int, RemoteHost] = {}
        self._n_flights = 0
        self.moves = deque[MoveReport](maxlen=MAX_REPORTS)
        self._move: Recut | None = None
        self._is_switching = False  # from when it is time to finish a move
        self._held_at = 0.0  # when what had departed last was held, s
        self._spans: list[Span] = []  # that a move copies; none where cells have changed since they were told
        give_back_what_is_freed()  # of layers that leave
        load = msgspec.structs.replace(load, speculate=False, draft_path="", adapters=())
        super().__init__(range_load(load, ends.ranges[-1], ends.paths[-1]), abort, warm=False)
        # One cache with as many cells in all ranges: what is in one of them has its place in the others.
        self._sized = msgspec.structs.replace(load, n_ctx=self.n_ctx, n_cells=self.n_cells)
        self._ends_bytes = self.bytes_per_token
        folders = tuple(sorted({str(Path(path).parent) for path in ends.paths}))
        self._pool = HostPool(open_host, folders, self.n_embd, self._sized, self.hosts, self._beat)
        self._spares = Spares(self._pool.load_of, load.keep_home, self._beat)
        try:
            self._first = self._first_of(abort)
            self._ends_bytes += self._first.bytes_per_token
            self._begin_legs()
        except (ModelError, ValueError) as e:
            self.close()
            raise ModelError(str(e)) from e
        self._weigh()
        self.warm_up()

    def _first_of(self, abort: AbortFlag) -> Llama:
        first = Llama(range_load(self._sized, self._ends.ranges[0], self._ends.paths[0]), abort)
        if first.n_cells != self.n_cells:
            first.close()
            raise ModelError("there is no memory for the first layers' cells: lower device.n_ctx")
        return first

    def _begin_legs(self) -> None:
        self._legs = [self._pool.leg(plan) for plan in self._ends.legs]
        self._spares.learn(self._ends)
        self._spares.follow(self._legs)
        for host in self.hosts.values():
            try:
                host.begin()
            except HostGoneError as e:
                host.lose(e)
                host.replace()  # such as by one of another machine, which has just come
                if host.link is None and not self._spares.replace(host, self._legs):
                    raise ModelError(f"a host cannot have {', '.join(map(str, host.segments.values()))}: {e}") from e
        keep_rows(self._legs, not self.moves_states)

    def _weigh(self) -> None:
        """Reckon what a cell takes here: at both ends, in legs that are here, and a kept row for each other leg."""
        per_layer = self._ends_bytes // max(1, sum(self._ends.ranges[number].n_layers for number in (0, -1)))
        at = [[isinstance(one, HomeSegment) for one in leg.replicas] for leg in self._legs]
        kept = self._spares.wanted
        here = sum(leg.layers.n_layers for leg, is_home in zip(self._legs, at, strict=True) if kept or any(is_home))
        n_kept = sum(any(one.kept is not None for one in leg.replicas) for leg in self._legs)
        self.bytes_per_token = self._ends_bytes + here * per_layer + 4 * self.n_embd * n_kept

    def close(self) -> None:
        """Free both ends and the legs that are here, and let the hosts go."""
        self.break_off("the model is closed")
        for host in self.hosts.values():
            host.end()
        for leg in self._legs:
            for segment in leg.replicas:
                if isinstance(segment, HomeSegment):
                    segment.release()
        self._spares.close()
        if self._first is not None:
            self._first.close()
        super().close()

    # --- computing --------------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Row], hidden: FloatRows | None = None) -> int:
        """Run one batch through all layers; return llama_decode's return value. No flight may be under way."""
        if self._first is None or not self._legs:  # the last range alone, which is being loaded
            return super().decode(rows, hidden)
        rc = self.depart(rows)
        return rc or self.arrive()

    def depart(self, rows: Sequence[Row]) -> int:
        """Compute a batch up to the first leg, and send it there; return llama_decode's return value."""
        assert self._first is not None
        if (rc := self._first.decode(rows)) != 0:
            return rc
        flight = Flight(self._n_flights, list(rows), [(position, seq) for _, position, seq, _ in rows])
        self._n_flights += 1
        self._flights.append(flight)
        flight.held = self._first.hidden_out
        if self._move is None:
            self.send_held()
        self.poll()
        if self.is_switching:
            self._held_at = time.perf_counter()
            return 0
        self.send_held()
        self._pass_on()
        return 0

    @property
    def is_switching(self) -> bool:
        """Whether it is time to finish a move: let flights land, but for one that is held."""
        return self._move is not None and self._is_switching

    @property
    def holds(self) -> bool:
        """Whether the flight that departed last is held until the legs have been moved."""
        return bool(self._flights) and self._flights[-1].held is not None

    def send_held(self) -> None:
        """Send the flight that departed last to the first leg, if that has not been done."""
        if self.holds:
            flight = self._flights[-1]
            rows, flight.held = flight.held, None
            assert rows is not None
            self._legs[0].send(flight.number, flight.places, rows)

    def arrive(self) -> int:
        """Wait for the flight that departed first, and compute the rest; return llama_decode's value."""
        flight = self._flights[0]
        if flight.held is not None:
            self.send_held()
        self._pass_on()
        while flight.arrived is None and not flight.has_failed:
            self._wait()
            if flight.leg < len(self._legs) and any(
                isinstance(one, RemoteSegment) and one.host.n_lost_in_a_row >= MAX_LOST and flight.number in one.air
                for one in self._legs[flight.leg].replicas
            ):
                flight.has_failed = True
        self._flights.popleft()
        if flight.arrived is None:
            for leg in self._legs:
                leg.drop(flight.number)
            return BROKEN
        if self._spans:
            self._spans += flight.spans()
        self.poll()
        if self._spans and self.is_switching and len(self._flights) == self.holds:
            self._end_switch()
        return super().decode(flight.rows, flight.arrived)

    def poll(self) -> None:
        """Send on what has come from hosts, and go on with a move, without waiting."""
        wait_for(self._awaited(), 0.0)
        self._pass_on()
        if self._spans:
            self._go_on()

    def _wait(self) -> None:
        """Wait until something comes from a host, and send that on; hosts that are lost are replaced."""
        for host in self._awaited():
            self._mend(host)
        wait_for(self._awaited())
        self._pass_on()
        if self._spans:
            self._go_on()

    def _awaited(self) -> set[RemoteHost]:
        found = {host for host in self.hosts.values() if host.is_awaited}
        return found if self._move is None else found | self._move.hosts

    def _pass_on(self) -> None:
        """Send what has come of flights to the next leg."""
        for flight in self._flights:
            try:
                while flight.leg < len(self._legs) and flight.held is None and not flight.has_failed:
                    if (rows := self._legs[flight.leg].take(flight.number)) is None:
                        break
                    flight.leg += 1
                    if flight.leg < len(self._legs):
                        self._legs[flight.leg].send(flight.number, flight.places, rows)
                    else:
                        flight.arrived = rows
            except FlightFailedError:
                flight.has_failed = True

    def _mend(self, host: RemoteHost) -> None:
        """Let a new process take the place of one that is lost; a move that it was part of is over."""
        if host.link is not None:
            return
        if self._move is not None and self._move.legs:
            self.break_off(f"host {host.number} is lost")
        if not host.segments:
            return
        host.replace()
        if host.link is None:
            self._spares.replace(host, self._legs)

    # --- moves ------------------------------------------------------------------------------------------------------

    def begin_move(self, ends: Ends) -> None:
        """Begin to move layers: the legs will be those of `ends`, whose first and last ranges are the present ones.

        Raises ModelError if that is not so, or if a move is under way.
        """
        if self._move is not None:
            raise ModelError("a move of layers is under way")
        self._ends.require_move(ends)
        self._spares.learn(ends)
        report = MoveReport(ends.ranges, began_at=0.0)
        wanted = self._pool.wanted(self._legs, ends.legs)
        self._move = Recut(self._legs, wanted, report, lambda: self.moves_states)
        report.began_at = self._move.clock()

    @property
    def is_moving(self) -> bool:
        """Whether a move is under way."""
        return self._move is not None

    def progress_move(self, spans: Iterable[Span]) -> None:
        """Go on with a move, where the KV cache has these spans.

        If it `is_switching` then, what departs is held until it is finished, and nothing else may be under way when it
        is.
        """
        self._spans = list(spans)
        wait_for(self._awaited(), 0.0)
        self._pass_on()
        self._go_on()

    def _go_on(self) -> None:
        if self._move is None:
            return
        try:
            is_ready = self._move.progress(self._spans)
        except BrokenOffError as e:
            self.break_off(str(e))
            return
        if is_ready and not self._move.needs_landing:
            self.finish_move(())
        elif is_ready:
            self._is_switching = True

    def _end_switch(self) -> None:
        """Finish a move before the last range computes what has landed, so that the held flight does not wait for it.

        Where that would take long, what is left is asked for, and comes while the last range computes.
        """
        assert self._move is not None
        if self._move.ends_quickly:
            self.finish_move(self._spans)
            return
        try:
            self._move.ask_rest(self._spans)
        except BrokenOffError as e:
            self.break_off(str(e))

    def finish_move(self, spans: Iterable[Span]) -> None:
        """Copy what is left, and let the new legs take the place of the old ones, with no flight under way.

        One that is held departs by the new legs.
        """
        move, self._is_switching = self._move, False
        if move is None:  # it is finished, or a host was lost while the last flights landed
            return
        assert not (len(self._flights) > self.holds and move.needs_landing)
        began = self._held_at if self.holds else move.clock()
        try:
            legs = move.finish(spans, lambda: wait_for(move.hosts))
        except BrokenOffError as e:
            self.break_off(str(e))
            return
        old, self._legs, self._move, self._spans = self._legs, legs, None, []
        hand_over(old, legs)
        self.send_held()  # before the old segments are freed, which may take the same processors
        move.report.pause_s = move.clock() - began if move.needs_landing else 0.0
        stay = {id(segment) for leg in legs for segment in leg.replicas}
        for leg in old:
            for segment in leg.replicas:
                if id(segment) not in stay:
                    segment.release()
        self._spares.follow(self._legs)
        self._weigh()
        move.report.total_s = move.clock() - move.report.began_at
        self.moves.append(move.report)

    def break_off(self, reason: str) -> None:
        """End a move, if there is one: all is as it was before."""
        if (move := self._move) is None:
            return
        self._move, self._spans, self._is_switching = None, [], False
        move.undo()
        move.report.error = reason
        move.report.total_s = move.clock() - move.report.began_at
        self.moves.append(move.report)

    def leave(self, number: int) -> None:
        """Let a host go. Raises ModelError if it has layers."""
        if self.hosts[number].segments or self._move is not None:
            raise ModelError(f"host {number} has layers, or a move is under way")
        self.hosts.pop(number).end()

    # --- cells: the same everywhere ---------------------------------------------------------------------------------

    def forget(self, seq: int) -> None:
        """Take all that it has from a sequence."""
        super().forget(seq)
        self._cut_ranges(seq, 0)

    def truncate(self, seq: int, n: int, otherwise: Callable[[], object]) -> None:
        """Take what is behind its first `n` tokens from a sequence."""
        super().truncate(seq, n, otherwise)
        self._cut_ranges(seq, n)

    def _cut_ranges(self, seq: int, n: int) -> None:
        if self._first is None:
            return
        self._first.truncate(seq, n, refuse_to_cut)
        for leg in self._legs:
            leg.forget(seq, n)
        if self._move is not None:
            self._spans = []
            self._move.forget(seq, n)

    def clear(self) -> None:
        """Free all cells of all sequences."""
        super().clear()
        if self._first is None:
            return
        self._first.clear()
        for leg in self._legs:
            leg.clear()
        if self._move is not None:
            self._spans = []
            self._move.clear()

    def share(self, source: int, seq: int, n: int) -> None:
        """Let a sequence without cells have the first `n` of another's."""
        assert self._first is not None
        super().share(source, seq, n)
        self._first.share(source, seq, n)
        for leg in self._legs:
            leg.share(source, seq, n)
        if self._move is not None:
            self._spans = []
            self._move.share(source, seq, n)
