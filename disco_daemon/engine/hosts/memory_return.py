"""Memory that is freed goes back to the system: what a host's owner is to have, the allocator must not keep."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # as in glibc's malloc.h
MAPPED_BYTES = 8 << 20  # blocks from this size on, such as a cache's, are mapped alone; an iteration's are smaller


def give_back_what_is_freed() -> None:
    """Let large blocks be mapped one by one, so that they are given back when they are freed.

    glibc does so at first, but takes each such block that is freed for a reason to put larger ones on its heap, where
    others keep it from shrinking: 40 MB stayed in memory behind four segments. Other C libraries have no such call, and
    nothing is done.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MAPPED_BYTES)
