"""`python -m disco_daemon.models.fetching`: fetches a model from the Hub for the daemon, in a process of its own.

A FetchJob comes on standard input; FetchProgress lines, then Fetched or FetchRefused go to standard output, as JSON.
The daemon cancels it by killing it: what has come is kept, and the next one goes on from there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from ..errors import DiscoError
from ..system.program import end_with_stdin

STEP_S = 0.2  # between two reports of one file


class FetchJob(msgspec.Struct, frozen=True):
    """Fetch the model `spec` (`USER/REPO:FILE`) into a folder."""

    spec: str
    folder: str


class FetchProgress(msgspec.Struct, tag=True, frozen=True):
    """`done` of a file's `total` bytes are there."""

    file: str
    done: int
    total: int


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """The model is there, whole and checked."""

    path: str


class FetchRefused(msgspec.Struct, tag=True, frozen=True):
    """It could not be fetched; the message says what to do."""

    message: str


FetchReply = FetchProgress | Fetched | FetchRefused
encode = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(FetchJob).decode
decode_reply = msgspec.json.Decoder(FetchReply).decode


def _say(reply: FetchReply) -> None:
    sys.stdout.buffer.write(encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Do the job on standard input."""
    from .hub import pull

    job = decode_job(sys.stdin.buffer.readline())
    end_with_stdin()
    told_at = -STEP_S

    def report(file: str, done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if done == total or now - told_at >= STEP_S:
            told_at = now
            _say(FetchProgress(file, done, total))

    try:
        _say(Fetched(str(pull(job.spec, Path(job.folder), lambda _: None, report))))
    except DiscoError as e:
        _say(FetchRefused(str(e)))


if __name__ == "__main__":
    main()
