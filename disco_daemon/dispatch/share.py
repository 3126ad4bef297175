"""A share of requests, and of their tokens, that is never passed over 200 of them. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 200  # requests, as many as the estimators look at: a quiet year saves up nothing
ROUNDING = 1e-9  # 0.07 * 200 is a little below 14


class WindowShare:
    """At most `share` of any WINDOW requests that follow each other, and of the tokens of the latest WINDOW of them.

    The first requests count as a whole window. Requests are bounded in every window. Tokens are in the one that ends
    with the request that takes some; a later window may have shorter prompts, which nobody can foresee.
    """

    __slots__ = ("_offered", "_offered_tokens", "_taken", "_taken_tokens", "n_requests", "n_taken", "share")

    def __init__(self, share: float) -> None:
        """Raises ValueError unless `share` lies in [0, 1]."""
        if not 0 <= share <= 1:
            msg = f"a share of requests lies between 0 and 1, not {share!r}"
            raise ValueError(msg)
        self.share = share
        self.n_requests = 0
        self.n_taken = 0
        self._offered: deque[int] = deque()  # tokens of the latest requests
        self._taken: deque[tuple[int, int]] = deque()  # which of them took some, and how many tokens
        self._offered_tokens = self._taken_tokens = 0

    def count(self, tokens: int = 1) -> None:
        """Count one more request with a prompt of `tokens` tokens."""
        self.n_requests += 1
        self._offered.append(tokens)
        self._offered_tokens += tokens
        if len(self._offered) > WINDOW:
            self._offered_tokens -= self._offered.popleft()
        while self._taken and self._taken[0][0] <= self.n_requests - WINDOW:
            self._taken_tokens -= self._taken.popleft()[1]

    @property
    def left(self) -> int:
        """How many requests may still be taken in the window that ends here."""
        return int(self.share * WINDOW + ROUNDING) - len(self._taken)

    def allows(self, tokens: int = 1) -> bool:
        """Whether the latest request may be taken, with `tokens` tokens."""
        if self.left <= 0 or not self._offered:
            return False
        whole = self._offered_tokens * WINDOW / len(self._offered)
        return self._taken_tokens + tokens <= self.share * whole + ROUNDING

    def take(self, tokens: int = 1) -> bool:
        """Take the latest request with `tokens` tokens; False, and nothing is taken, where that is not allowed."""
        if not self.allows(tokens):
            return False
        self._taken.append((self.n_requests, tokens))
        self._taken_tokens += tokens
        self.n_taken += 1
        return True
