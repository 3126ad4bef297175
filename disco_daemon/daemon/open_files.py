"""The limit of open files, and the connections that fit into it: each connection is a file."""

from __future__ import annotations

import resource

from ..api.http.connections import MAX_CONNECTIONS

WANTED_FILES = 4096  # open: 1,400 connections of clients at most, 512 to servers, the engine, the history, and room
SPARE_FILES = 128  # what is open beside connections
LEAST_CONNECTIONS = 32  # of clients, however few files may be open


def raise_limit() -> int:
    """Raise the limit of open files as far as needed and allowed; return it.

    The usual soft limits, 1,024 on Linux and 256 on macOS, are for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox forbids it
        return soft
    return wanted


def connections(n_files: int) -> int:
    """Return the connections that `n_files` allow: each connection of a client may cause one to a server."""
    return max(LEAST_CONNECTIONS, min(MAX_CONNECTIONS, (n_files - SPARE_FILES) // 2))
