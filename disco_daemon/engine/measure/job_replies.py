"""What each child process that measures says on its standard output beside its result: JSON, a message a line."""

from __future__ import annotations

import sys

import msgspec


class JobProgress(msgspec.Struct, tag=True, frozen=True):
    """A line for the user on what is being computed."""

    text: str


class JobFailed(msgspec.Struct, tag=True, frozen=True):
    """Why there is no result, fit for a user."""

    message: str


encode = msgspec.json.Encoder().encode


def reply(message: msgspec.Struct) -> None:
    """Write a message to standard output at once."""
    sys.stdout.buffer.write(encode(message) + b"\n")
    sys.stdout.buffer.flush()
