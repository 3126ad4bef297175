"""One server's answer as it comes: chunks become tokens, with the bill beside them, in bounded steps.

A chunk takes less time than its token takes elsewhere. One as long as hundreds of them is a whole answer at once, or
ill will: it is read in a thread, and its text given out in pieces, with a turn for others between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any

from ..clock import Clock
from ..errors import EndpointError
from ..types import Token
from .bill import Bill
from .chunks import Reader
from .server_errors import ServerErrors
from .stream import EventStream

LARGE = 16 * 1024  # bytes of a chunk; more take as long to look at as those of hundreds of tokens
USAGE_TIMEOUT_S = 1.0  # for each chunk after finish_reason: the answer is whole, only the bill is missing
BEHIND_S = 5.0  # for all of them

log = logging.getLogger("disco.server")

Chunks = AsyncIterator[dict[str, Any]]


class ServerAnswer:
    """The tokens of one answer, of a request that was sent at `began`, by the clock."""

    def __init__(
        self, stream: EventStream, reader: Reader, bill: Bill, errors: ServerErrors, clock: Clock, began: float
    ) -> None:
        self._stream, self._reader, self._bill = stream, reader, bill
        self._errors, self._clock, self._began = errors, clock, began

    async def behind(self, chunks: Chunks) -> AsyncGenerator[Token, None]:
        """Yield what comes behind the end: the bill, perhaps text. None of it has to: nothing there is an error."""
        now = asyncio.get_running_loop().time
        until = now() + BEHIND_S
        while (began := now()) < until:  # a server that never rests would not be stopped while it is waited for
            self._stream.wait_until(min(until, began + USAGE_TIMEOUT_S))
            if (more := await self._next_behind(chunks)) is None:
                break
            for token in more:
                yield token

    async def _next_behind(self, chunks: Chunks) -> Iterable[Token] | None:
        """Return what one chunk says, None if there is none."""
        try:
            with self._errors.translate():
                chunk = await anext(chunks, None)
                if chunk is None:
                    return None
                return await self.read_large(chunk) if self._stream.n_bytes > LARGE else list(self.read(chunk))
        except EndpointError as e:
            log.debug("no usage after the answer: %s", e)
            return None

    async def read_large(self, chunk: dict[str, Any]) -> list[Token]:
        """Return the tokens of a large chunk, with texts of bounded length."""
        return await asyncio.to_thread(lambda: [one for part in self._reader.parts(chunk) for one in self.read(part)])

    def token(self, chunk: dict[str, Any]) -> Token | None:
        """Return the token of a chunk that has nothing else, as nearly every one does; `read` reads all others."""
        if chunk.get("usage") or chunk.get("error"):
            return None
        token = self._reader.plain(chunk)
        if token is not None:
            self._bill.count_token(token, self._reader.n_tokens)
        return token

    def read(self, chunk: dict[str, Any]) -> Iterator[Token]:
        """One of OpenAI's chunks as tokens; the bill follows."""
        if error := chunk.get("error"):
            raise self._errors.reported(error)
        if billed := chunk.get("usage"):
            self._bill.take(billed, self._clock.now() - self._began)
        reader, bill = self._reader, self._bill
        for choice in reader.choices(chunk):
            told = bill.n_billed if billed else None
            token = reader.token(choice, told)
            if token is not None:
                bill.count_token(token, reader.n_tokens, counted=told is not None)
                yield token
            elif error := choice.get("error"):
                raise self._errors.reported(error)
