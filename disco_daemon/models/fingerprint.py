"""The fingerprint of a model: the SHA-256 of its whole file, computed once and kept for as long as the file stays.

Two machines that compute one model compare it, so that no rows of one model reach the layers of another: a fine-tune
has the same shapes and the same header.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError

DIGITS = 64  # of a SHA-256 in hex


def fingerprint(model: Path, folder: Path) -> str:
    """Return a model's fingerprint in hex; results are kept in `folder`. Reads the whole file the first time.

    Raises ConfigError if it cannot be read.
    """
    try:
        stat = model.stat()
        told = hashlib.sha256(f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
        kept = folder / f"{told[:24]}.sha256"
        with suppress(OSError):
            found = kept.read_text("ascii", "replace").strip()
            if len(found) == DIGITS:
                return found
        with model.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise ConfigError(f"{model} cannot be read: {e.strerror}") from e
    with suppress(OSError):  # then it is computed again the next time
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept.write_text(found, "ascii")
    return found
