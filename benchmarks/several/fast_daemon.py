"""The daemon, with time that passes faster in what decides which models stay: `… fast_daemon FASTER up …`.

So a day that is played faster meets the same rule, with its minute ahead, its steps and its looks as fast as the day.
Loads, answers and all else of the daemon take the time that they take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from disco_daemon.cli.main import main as disco
from disco_daemon.clock import Clock
from disco_daemon.daemon import named_models
from disco_daemon.machines import resident_models
from disco_daemon.machines.resident_models import ResidentModels
from disco_daemon.system.control_groups import ProcessMemory


class FastClock:
    """A clock that is right now, and from now on `faster` times as fast as another one."""

    def __init__(self, clock: Clock, faster: float) -> None:
        self._clock, self._faster = clock, faster
        self._now, self._wall = clock.now(), clock.wall()

    def now(self) -> float:
        """Monotonic time, s."""
        return self._now + self._faster * (self._clock.now() - self._now)

    def wall(self) -> float:
        """Unix time, s."""
        return self._wall + self._faster * (self._clock.now() - self._now)


def main(argv: list[str]) -> int:
    """Run `disco` with that clock; the first argument is how many times it is as fast."""
    faster = float(argv[0])

    class Fast(ResidentModels):
        def __init__(self, clock: Clock, taken: Callable[[], tuple[int, ProcessMemory]], busy: Callable[[], bool]):
            super().__init__(FastClock(clock, faster), taken, busy)

    vars(named_models)["ResidentModels"] = Fast
    resident_models.LOOK_S /= faster
    return disco(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
