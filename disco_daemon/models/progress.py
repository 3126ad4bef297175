"""Tells how a download goes: one line that is written over at a terminal, else a line for each tenth."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from ..plain import plain

WINDOW_S = 10.0  # the rate is that of the last seconds
STEP_S = 0.1  # between two looks of the line; the eye takes no more
TENTHS = 10  # lines of a whole download where there is no terminal

Report = Callable[[str, int, int], None]  # name of the file, bytes there, bytes in all


class ProgressBar:
    """Called with what is there; `out` is where it tells, and `clock` gives s."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._live = out.isatty()
        self._seen: deque[tuple[float, int]] = deque()
        self._name = ""
        self._told_at = -STEP_S
        self._tenth = -1
        self._open = False

    def __call__(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes of the file called `name` are there."""
        now = self._clock()
        if name != self._name or (self._seen and done < self._seen[-1][1]):
            self.end()
            self._name, self._tenth = name, -1
            self._seen.clear()
        self._seen.append((now, done))
        while now - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        if self._live:
            self._overwrite(now, done, total)
        else:
            self._write_on(done, total)

    def end(self) -> None:
        """End the line, so that the next output begins on one of its own."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False

    def _overwrite(self, now: float, done: int, total: int) -> None:
        if now - self._told_at < STEP_S and done < total:
            return
        self._told_at = now
        width = shutil.get_terminal_size().columns
        self._out.write("\r" + self._line(done, total)[: width - 1] + "\x1b[K")
        self._out.flush()
        self._open = True

    def _write_on(self, done: int, total: int) -> None:
        tenth = TENTHS * done // max(1, total)
        if tenth > self._tenth:
            self._tenth = tenth
            self._out.write(self._line(done, total) + "\n")
            self._out.flush()

    def _line(self, done: int, total: int) -> str:
        share = f"{100 * done / max(1, total):3.0f} %"
        line = f"{plain(self._name)}  {share}  {done / 1e6:.1f} of {total / 1e6:.1f} MB"
        rate = self._rate()
        if rate <= 0:
            return line
        line += f"  {rate / 1e6:.1f} MB/s"
        return f"{line}  {lasting((total - done) / rate)} left" if done < total else line

    def _rate(self) -> float:
        """Bytes a second lately; 0 while that is not known."""
        (then, least), (now, most) = self._seen[0], self._seen[-1]
        return (most - least) / (now - then) if now > then else 0.0


def lasting(seconds: float) -> str:
    """A time to wait, as one says it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
