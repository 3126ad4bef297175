"""What is told of a model whose inner layers are at hosts."""

from __future__ import annotations

from ...types import LayerRange
from ..llama.model import Llama
from .ends import Ends
from .legs import HomeSegment, Leg
from .placing import Route
from .pool import number_of
from .remote import RemoteHost


class HomeView(Llama):
    """The last range as a model, with its legs and hosts as they are."""

    _first: Llama | None = None
    _ends: Ends
    _legs: list[Leg]
    hosts: dict[int, RemoteHost]

    def _beat(self) -> None:
        """Tell, once there is somebody who listens, that this does not hang: it waits for what gets on."""
        self.vocabulary.beat()

    @property
    def moves_states(self) -> bool:
        """Whether cells can be cut by layers, as far as hosts have told."""
        return all(host.moves_states for host in self.hosts.values())

    @property
    def _ranges(self) -> list[LayerRange]:
        return [self._ends.ranges[0], *(leg.layers for leg in self._legs), self._ends.ranges[-1]]

    @property
    def host_pids(self) -> dict[int, int]:
        """The present process of each host by its number; 0 if there is none."""
        return {number: host.pid for number, host in self.hosts.items()}

    @property
    def n_lost(self) -> int:
        """How many processes of hosts were lost."""
        return sum(host.n_lost for host in self.hosts.values())

    @property
    def replaced_s(self) -> float:
        """How long the slowest replacement of a host took, of the latest of each, s."""
        return max((host.replaced_s for host in self.hosts.values()), default=0.0)

    @property
    def kept_bytes(self) -> int:
        """What the rows take that are kept for other hosts."""
        return sum(one.kept.n_bytes for host in self.hosts.values() for one in host.segments.values())

    @property
    def own(self) -> tuple[LayerRange, LayerRange]:
        """Home's own ranges, which stay: the first and the last one."""
        return self._ends.ranges[0], self._ends.ranges[-1]

    @property
    def first_took_s(self) -> float:
        """How long the first range's latest batch took, s; `took_s` is the last range's."""
        return 0.0 if self._first is None else self._first.took_s

    @property
    def here(self) -> list[HomeSegment]:
        """The legs, or replicas of them, that are at home."""
        return [one for leg in self._legs for one in leg.replicas if isinstance(one, HomeSegment)]

    @property
    def has_replicas(self) -> bool:
        """Whether a leg has several."""
        return any(len(leg.replicas) > 1 for leg in self._legs)

    @property
    def is_all_here(self) -> bool:
        """Whether home computes all layers of all sequences, so that nothing is computed beside it."""
        at = (one for leg in self._legs for one in (leg.pins.values() or leg.replicas))
        return all(isinstance(one, HomeSegment) for one in at)

    def route(self, seq: int) -> Route:
        """Return where a sequence's rows go: its replica of each leg that has several."""
        return tuple(leg.replica_of(seq) for leg in self._legs if len(leg.replicas) > 1)

    def cells_of_legs(self) -> list[dict[int, int] | None]:
        """Return how many cells each sequence has in each leg, by what is kept here; None of legs that are here."""
        return [leg.cells() for leg in self._legs]

    @property
    def cut(self) -> list[tuple[LayerRange, tuple[int, ...]]]:
        """The legs as they are: their layers and hosts, each once, also where home has two copies."""
        return [(leg.layers, tuple(dict.fromkeys(map(number_of, leg.replicas)))) for leg in self._legs]
