"""The credits of a link: how many rows may be on their way, so that none waits where it takes memory. Pure."""

from __future__ import annotations

from ..protocol import BadFrameError, Credit


class LinkCredits:
    """How many rows may still be sent over a link."""

    def __init__(self, n: int) -> None:
        self.total = self.left = n

    def spend(self, n: int) -> None:
        """Take credits for rows. Raises ValueError if there are not as many."""
        if not 0 <= n <= self.left:
            raise ValueError(f"{n} rows for {self.left} credits")
        self.left -= n

    def give_back(self, message: Credit) -> None:
        """Take credits back. Raises BadFrameError for more than were spent."""
        if not 0 < message.rows <= self.total - self.left:
            raise BadFrameError(f"{message.rows} credits came back, but {self.total - self.left} rows are on their way")
        self.left += message.rows
