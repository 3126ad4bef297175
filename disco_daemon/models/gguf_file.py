"""The header of a GGUF file on the disk, of which no more is read than that takes."""

from __future__ import annotations

from typing import BinaryIO

from .gguf import HEADER_BYTES, Header, read_header

FIRST_BYTES = 1 << 18  # read at first: that is the whole header of a range of layers, which has no vocabulary
MORE_BYTES = 1 << 24  # then: enough for the vocabularies there are, and read in a fifth of the time that all takes


def read_file_header(file: BinaryIO) -> tuple[bytes, Header]:
    """Return the first bytes of a GGUF file, with its whole header where it has one, and the header.

    A host reads it while it computes for answers: 64 MiB at once would be most of what it takes to load ten layers.
    Raises OSError, and ValueError if it is no GGUF header.
    """
    head = b""
    for n in (FIRST_BYTES, MORE_BYTES, HEADER_BYTES):
        head += file.read(n - len(head))
        header = read_header(head)
        if header.whole or len(head) < n:
            break
    return head, header
