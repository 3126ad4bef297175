"""GET /disco/v1/trace/ID: when each token of a recent answer came, and when it was shown."""

from __future__ import annotations

from typing import Any

from ...conductor import Conductor
from ...conductor.traces import LATEST, MAX_TRACES
from ...errors import RequestError

GONE = "trace_gone"  # the error's code


def document(conductor: Conductor, request_id: str) -> dict[str, Any]:
    """Return the trace of an answer, or of the latest one. Raises RequestError (404) if it is not kept."""
    trace = conductor.context.traces.find(request_id)
    if trace is not None:
        return trace.to_json()
    if request_id == LATEST:
        msg = "No answer has been given since the daemon started."
    elif request_id in conductor.in_flight.answering:
        msg = f"The answer '{request_id}' is still running: its trace is there when it has ended."
    else:
        msg = f"No trace of '{request_id}' is kept: only those of the last {MAX_TRACES} answers are, in memory."
    raise RequestError(msg, status=404, code=GONE)
