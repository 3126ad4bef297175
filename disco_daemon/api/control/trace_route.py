"""GET /disco/v1/trace/ID: when each token of a recent answer came, and when it was shown."""

from __future__ import annotations

from typing import Any

from ...conductor import Conductor
from ...conductor.traces import LATEST, MAX_TRACES
from ...errors import RequestError
from ...types import Caller

GONE = "trace_gone"  # the error's code


def document(conductor: Conductor, request_id: str, caller: Caller | None = None) -> dict[str, Any]:
    """Return the trace of an answer, or of the latest one. Raises RequestError (404) if it is not kept.

    A `caller` with a key sees its own alone; others' are not there for it.
    """
    trace = conductor.context.traces.find(request_id, None if caller is None else caller.name)
    if trace is not None:
        return trace.to_json()
    if request_id == LATEST:
        whom = "" if caller is None else f" to the key '{caller.name}'"
        msg = f"No answer has been given{whom} since the daemon started."
    elif conductor.in_flight.is_answering(request_id, caller):
        msg = f"The answer '{request_id}' is still running: its trace is there when it has ended."
    else:
        msg = f"No trace of '{request_id}' is kept: only those of the last {MAX_TRACES} answers are, in memory."
    raise RequestError(msg, status=404, code=GONE)
