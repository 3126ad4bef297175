"""How long rows were on their way to a host and back, gathered until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_SIZES = 64  # of flights that are told apart at a time; there are few in a second, prompts' parts aside


@dataclass(slots=True)
class WayTimes:
    """The quickest way of a flight there and back, by its rows, since somebody asked, s.

    Home takes what has come when it has time for it. So a single time may be too long, and the quickest says most.
    """

    _least: dict[int, float] = field(default_factory=dict)

    def add(self, n_rows: int, seconds: float) -> None:
        """Take a flight's time on its way, without that at the host."""
        if n_rows in self._least or len(self._least) < MAX_SIZES:
            self._least[n_rows] = min(self._least.get(n_rows, float("inf")), max(0.0, seconds))

    def take(self) -> list[tuple[int, float]]:
        """Return rows and seconds, and begin anew."""
        found = sorted(self._least.items())
        self._least.clear()
        return found
