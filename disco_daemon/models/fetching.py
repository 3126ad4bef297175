"""`python -m disco_daemon.models.fetching`: fetches a model from the Hub for the daemon, in a process of its own.

The job of `system.job` is a FetchJob, its result Fetched; what it says meanwhile is the number of bytes that are there.
The daemon cancels it by killing it: what has come is kept, and the next one goes on from there.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ..errors import DiscoError
from ..system.job import JobSocket

STEP_S = 0.2  # between two reports of one file


class FetchJob(msgspec.Struct, frozen=True):
    """Fetch the model `spec` (`USER/REPO:FILE`) into a folder."""

    spec: str
    folder: str


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """The model is there, whole and checked."""

    path: str


def main() -> None:
    """Do the job of the inherited socket."""
    from .hub import pull

    home = JobSocket()
    job, _ = home.job(FetchJob, lambda _: None)  # it needs the network, and the user's token
    told_at = -STEP_S

    def report(_file: str, done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if done == total or now - told_at >= STEP_S:
            told_at = now
            home.progress(str(done))

    with home.refusing(DiscoError):
        home.done(Fetched(str(pull(job.spec, Path(job.folder), lambda _: None, report))))


if __name__ == "__main__":
    main()
