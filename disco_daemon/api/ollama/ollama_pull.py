"""The lines of a pull, as Ollama sends them (ollama/ollama, server/images.go: PullModel, server/download.go)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ..control.documents import FetchedFile

PULLED = {"status": "success"}  # the last line
SHOWN_DIGITS = 12  # of a checksum, in a status
_DIGITS = 64  # of a SHA-256


async def pull_lines(
    steps: AsyncIterator[tuple[dict[str, Any], FetchedFile | None]],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a line for each step of a fetch; the last one is `success`, or has `error`.

    What disco's own clients are told at the end stands in a status of its own before that.
    """
    last: dict[str, Any] = {"status": "pulling manifest"}
    yield last
    async for document, file in steps:
        state = document["state"]
        if state in ("failed", "cancelled", "stopped"):
            yield {"error": document["message"] or "the fetch was cancelled: what came is kept, pull again"}
            return
        if file is not None and last != (line := _line(file)):
            yield (last := line)
            if file.done == file.n_bytes:
                yield {"status": "verifying sha256 digest"}
        if state == "done":
            yield {"status": "writing manifest"}
            if document["message"]:
                yield {"status": document["message"]}
            yield PULLED
            return


def _line(file: FetchedFile) -> dict[str, Any]:
    kind = "sha256" if len(file.digest) == _DIGITS else "sha1"
    status, digest = f"pulling {file.digest[:SHOWN_DIGITS]}", f"{kind}:{file.digest}"
    return {"status": status, "digest": digest, "total": file.n_bytes, "completed": file.done}
