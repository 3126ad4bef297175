"""When an engine that owes an answer and says nothing hangs, and when it only has had no processor.

A chunk of a prompt is reported as it is computed, so silence is a hang, unless the process could not run: beside a
build on all cores it gets a small part of one, its model may have to be read from the disk again, and a machine that
stood still for a while had it stand still, too. To kill it then would only make its answers later. Pure but for
`look_at`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..system.process import waited_s
from . import wire

HANG_S = 15.0  # an engine that owes answers and is silent; a decode takes less than 1 s, a chunk a few at most
LOOK_S = 1.0  # between two looks
MOST_LOOK_S = 2.0  # a look that comes later than that was held up itself, and so was the engine, most likely
UNMEASURED_S = 120.0  # in place of HANG_S before anything is measured: a chunk at some 20 token/s, with all that slack
CHUNKS = 4  # of a prompt, that a slow processor may take beyond what was measured


@dataclass(frozen=True, slots=True)
class HeldUp:
    """What held up the thread that computes: `waited_s`, s, for a processor since it began; whether the disk does."""

    waited_s: float = 0.0
    by_disk: bool = False


@dataclass(slots=True)
class HangWatch:
    """How long an engine has been silent though it could run, s, as seen at the looks so far: `silent_s`."""

    silent_s: float = 0.0
    _at: float | None = None
    _waited_s: float = 0.0

    def hangs(self, now: float, silent_s: float, held_up: HeldUp, info: wire.Loaded | None) -> bool:
        """Say whether it hangs: it owes an answer and has said nothing for `silent_s`, s, by the clock.

        All this time counts but for that in which it was `held_up`. `info` has how quickly it reads prompts.
        """
        if self._at is not None:
            waited_s = now - self._at if held_up.by_disk else held_up.waited_s - self._waited_s
            could_run_s = min(now - self._at, MOST_LOOK_S) - waited_s
            self.silent_s = min(silent_s, self.silent_s + max(0.0, could_run_s))
        self._at, self._waited_s = now, held_up.waited_s
        if info is not None and not info.prefill_tps:
            return self.silent_s > UNMEASURED_S
        chunk_s = info.n_at_once / info.prefill_tps if info is not None else 0.0
        return self.silent_s > max(HANG_S, CHUNKS * chunk_s)


def look_at(pid: int) -> HeldUp:
    """Return what holds up the main thread of a process, which computes.

    Nothing is known where the kernel does not say (Linux does), and of a process that has gone.
    """
    folder = Path(f"/proc/{pid}")
    try:
        state = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return HeldUp()
    return HeldUp(waited_s(folder), by_disk=state == "D")
