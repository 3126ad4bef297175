"""Requests that the engine cannot take, each with a message that is fit for a user."""

from __future__ import annotations


class PromptError(ValueError):
    """A raw prompt, or ids, that this model cannot take. `reason` and `param` are as clients read them."""

    reason = "bad_messages"
    param: str | None = None


class FormatError(PromptError):
    """A response format that cannot be obeyed."""

    reason = "bad_response_format"
    param = "response_format"


class PromptTooLong(PromptError):
    """A prompt of `n_tokens`, at least or about, where a context has `n_ctx`."""

    reason = "context_length_exceeded"

    def __init__(self, n_ctx: int, n_tokens: int, *, exact: bool = False, what: str = "prompt") -> None:
        about = "" if exact else "about "
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens, but the {what} has {about}{n_tokens}. "
            f"Shorten the {what}, or raise device.n_ctx."
        )
        self.n_ctx, self.n_tokens, self.exact = n_ctx, n_tokens, exact

    def of(self, what: str) -> PromptTooLong:
        """The same of something that is no prompt."""
        return PromptTooLong(self.n_ctx, self.n_tokens, exact=self.exact, what=what)
