"""The error tree, by whose fault it is. HTTP status and OpenAI `type`/`code` live on the class."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which takes longer to load than `disco --help` does
    from .types import Side


class DiscoError(Exception):
    """Base of everything this software raises on purpose; `str(error)` is fit for a user."""

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None


class ConfigError(DiscoError):
    """The configuration is wrong; the message names the key and the mend."""


class RequestError(DiscoError):
    """The request is at fault; nothing was started, or nothing can serve it as it is."""

    status = 400
    type = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        if status is not None:
            self.status = status


class TooManyRequests(RequestError):
    """A key asks more often than it may; it may again in `retry_after_s`."""

    type = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class EndpointError(DiscoError):
    """One endpoint failed. `reason` is a short stable word, used in `disco status`, history and metrics.

    `your_fault` marks failures that the request itself caused (context too long, refused parameter), by its
    parameter `param` if that is known. OpenAI's `code` is the reason, unless another word says more to a client.
    """

    status = 502
    type = "upstream_error"

    def __init__(
        self,
        side: Side,
        reason: str,
        message: str,
        *,
        your_fault: bool = False,
        retry_after_s: float | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.side = side
        self.reason = reason
        self.your_fault = your_fault
        self.retry_after_s = retry_after_s
        self.code = code or reason
        self.param = param
        if your_fault:
            self.status = 400
            self.type = "invalid_request_error"
        elif reason in ("cap_reached", "max_cost_reached", "no_credit"):
            self.status = 429
            self.type = "insufficient_quota"
        elif reason == "rate_limited":
            self.status = 429
            self.type = "rate_limit_error"
        elif reason == "overloaded":  # its queue is full
            self.status = 503
            self.type = DiscoError.type
        elif reason in ("timeout", "stalled"):
            self.status = 504


class ReaderGone(DiscoError):
    """The client has left, or has not read for too long; there is nobody to tell."""


class Unavailable(DiscoError):
    """Nothing can serve right now; trying later may help, `retry_after_s` from now on if that is known."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


def release_frames(error: BaseException) -> None:
    """Clear the finished frames that `error`, its causes and its contexts have passed through.

    An error that something keeps holds these frames by its traceback, and their locals: often whatever keeps it. Such a
    circle stays in memory until the collector looks for one. Frames that still run are left as they are; the lines that
    a log shows of a traceback stay, too.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        traceback.clear_frames(e.__traceback__)
        todo += [e.__cause__, e.__context__]
        if isinstance(e, BaseExceptionGroup):
            todo += e.exceptions
