"""The traces of the latest answers, in memory only: a daemon that ends forgets them."""

from __future__ import annotations

from ..delivery.trace import Trace

MAX_TRACES = 256  # answers whose token times are kept, in memory only; at most 8 MiB, where all of them are long
LATEST = "latest"  # in place of a request id: the answer that ended last


class Traces:
    """The latest `size` traces, by request id. Written by the conductor when an answer has ended."""

    def __init__(self, size: int = MAX_TRACES) -> None:
        self._size = size
        self._kept: dict[str, Trace] = {}  # in the order in which the answers ended

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, trace: Trace) -> None:
        """Remember one more; the oldest goes where there is no room."""
        self._kept[trace.outcome.request_id] = trace
        if len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]

    def find(self, request_id: str, key: str | None = None) -> Trace | None:
        """The trace of an answer, or of the latest one; None if it is not kept. With a `key`, of its answers alone."""
        if request_id == LATEST:
            every = reversed(self._kept.values())
            return next((one for one in every if key is None or one.outcome.key == key), None)
        found = self._kept.get(request_id)
        return found if found is None or key is None or found.outcome.key == key else None
