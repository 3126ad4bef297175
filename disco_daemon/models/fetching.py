"""`python -m disco_daemon.models.fetching`: fetches a model from the Hub for the daemon, in a process of its own.

The job of `system.job` is a FetchJob, its result Fetched; what it says meanwhile is a FetchProgress as JSON.
The daemon cancels it by killing it: what has come is kept, and the next one goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import DiscoError
from ..system.job import JobSocket
from .quants import NO_PIN, Pin, RemoteFile

STEP_S = 0.2  # between two reports of one file


class FetchJob(msgspec.Struct, frozen=True):
    """Fetch the model `spec` (`USER/REPO:FILE`) into a folder; it has to be the one of its `pin`."""

    spec: str
    folder: str
    pin: Pin = NO_PIN


class FetchProgress(msgspec.Struct, frozen=True):
    """How far a file is: `done` of `n_bytes`, beside the bytes of others `before` it, of `all_bytes` of the model.

    `digest` is its SHA-256 (or git's SHA-1) in hex.
    """

    name: str
    digest: str
    done: int
    n_bytes: int
    before: int
    all_bytes: int


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """The model is there, whole and checked."""

    path: str


def main() -> None:
    """Do the job of the inherited socket."""
    from .hub import pull

    home = JobSocket()
    job, _ = home.job(FetchJob, lambda _: None)  # it needs the network, and the user's token
    told_at = -STEP_S
    there: dict[str, tuple[RemoteFile, int]] = {}  # by name: the file, and how much of it is here

    def begin(files: Mapping[RemoteFile, bool]) -> None:
        there.update({file.name: (file, file.n_bytes if is_here else 0) for file, is_here in files.items()})

    def report(name: str, done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        there[name] = (there[name][0], done)
        if done == total or now - told_at >= STEP_S:
            told_at = now
            before = sum(n for one, n in there.values() if one.name != name)
            all_bytes = sum(one.n_bytes for one, _ in there.values())
            progress = FetchProgress(name, there[name][0].digest, done, total, before, all_bytes)
            home.progress(msgspec.json.encode(progress).decode())

    with home.refusing(DiscoError):
        path = pull(job.spec, Path(job.folder), lambda _: None, report, begin=begin, pin=job.pin)
        home.done(Fetched(str(path)))


if __name__ == "__main__":
    main()
