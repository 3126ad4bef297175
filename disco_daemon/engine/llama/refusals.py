"""Errors of requests that the engine cannot take, each with a message that is fit for a user."""

from __future__ import annotations

from typing import NoReturn


class PromptError(ValueError):
    """The model cannot take a raw prompt, or ids. `reason` and `param` are as clients read them."""

    reason = "bad_messages"
    param: str | None = None


class FormatError(PromptError):
    """A response format cannot be obeyed."""

    reason = "bad_response_format"
    param = "response_format"
    whose = "the response format"


class ToolsError(FormatError):
    """Tools cannot be offered, or calls of them cannot be kept to their schemas."""

    reason = "bad_tools"
    param = "tools"
    whose = "the schemas of the tools"


class DrawingError(PromptError):
    """Tokens cannot be drawn as a parameter says."""

    reason = "bad_value"

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class DimensionsError(PromptError):
    """Vectors have fewer numbers than are asked for."""

    reason = "unsupported_value"
    param = "dimensions"


class PromptTooLong(PromptError):
    """A prompt has `n_tokens`, at least or about, and a context only `n_ctx`."""

    reason = "context_length_exceeded"

    def __init__(self, n_ctx: int, n_tokens: int, *, exact: bool = False, what: str = "prompt") -> None:
        about = "" if exact else "about "
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens, but the {what} has {about}{n_tokens}. "
            f"Shorten the {what}, or raise device.n_ctx."
        )
        self.n_ctx, self.n_tokens, self.exact = n_ctx, n_tokens, exact

    def of(self, what: str) -> PromptTooLong:
        """Return the same error about something that is no prompt."""
        return PromptTooLong(self.n_ctx, self.n_tokens, exact=self.exact, what=what)


class ModelError(RuntimeError):
    """The model cannot be loaded or used; the message is fit for a user."""


def refuse_to_cut() -> NoReturn:
    """Raise ModelError: what a range of layers has of a text is gone, and only those that can be cut are in use."""
    raise ModelError("a range of layers has a state that cannot be cut")
