"""What fetching from the Hub and from any other address have in common: a line that breaks, and is tried again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import httpx2

from ..errors import DiscoError
from ..plain import reason_of
from .part import Part, PartTooLong
from .quants import RemoteFile, Variant, variants

TIMEOUT_S = 30.0  # for a connection, and between two reads of an answer
MAX_TRIES = 6  # in a row without a new byte; then the network is down, and the user has to try again
PAUSE_S = 0.5  # before the second try; doubles from there
MAX_PAUSE_S = 15.0  # the longest pause between two tries

Pause = Callable[[float], None]
T = TypeVar("T")


class PullError(DiscoError):
    """A model could not be fetched; the message says what to do. A partial download that may be good is kept."""


class TransferCut(Exception):
    """The connection broke, or the server failed for now: trying again may help."""


class RemoteSource(ABC):
    """Where a model is fetched from. `where` is what it is called in messages, `kind` what it should be."""

    where, kind = "", "a server of files"

    def __init__(self, pause: Pause = time.sleep) -> None:
        self._pause = pause

    @abstractmethod
    def _files(self) -> list[RemoteFile]:
        """Return the files there. Raises TransferCut, PullError, or an error of httpx2."""

    @abstractmethod
    def _append(self, part: Part) -> None:
        """Send one request for what is missing of a part. Raises TransferCut, PullError, or an error of httpx2."""

    def variants(self) -> list[Variant]:
        """Return the models there. Raises PullError."""
        return variants(self._patiently(self._files, lambda: 0))

    def fetch(self, part: Part) -> None:
        """Download all of `part.file` that is missing, however often it is cut. Raises PullError or OSError."""
        while not part.whole:
            self._patiently(lambda: self._append(part), lambda: part.n_bytes)

    def _take(self, response: httpx2.Response, part: Part) -> None:
        """Append the answer to a request for what is behind the part's end. Raises TransferCut or PullError."""
        if (
            response.headers.get("Content-Encoding", "identity") != "identity"
        ):  # a few bytes of it can become any number
            raise PullError(f"{self.where} sends the file packed, although it was asked for it as it is")
        if part.n_bytes and not _goes_on(response, part.n_bytes):
            part.restart()
        for chunk in response.iter_bytes():
            part.write(chunk)
        if not part.whole:
            raise TransferCut("the server ended the file too early")

    def _patiently(self, work: Callable[[], T], got: Callable[[], int]) -> T:
        """Try again while that helps; `got` returns the bytes so far. Raises PullError."""
        tries = 0
        while True:
            had = got()
            try:
                return self._translate_errors(work)
            except TransferCut as e:
                tries = 1 if got() > had else tries + 1
                if tries >= MAX_TRIES:
                    kept = f"; {got() / 1e6:.0f} MB are kept, and the same command goes on from there" if got() else ""
                    msg = f"{self.where} cannot be reached: {reason_of(e)}{kept}"
                    raise PullError(msg) from e
            self._pause(min(MAX_PAUSE_S, PAUSE_S * 2 ** (tries - 1)))

    def _translate_errors(self, work: Callable[[], T]) -> T:
        """Translate foreign errors: `TransferCut` if trying again may help, else PullError."""
        try:
            return work()
        except httpx2.TransportError as e:
            raise TransferCut(reason_of(e)) from e
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as e:  # such as the log-in page of a hotel
            msg = f"{self.where} does not answer as {self.kind} does: {reason_of(e)}"
            raise PullError(msg) from e
        except PartTooLong as e:
            raise PullError(f"{self.where} sends more of the file than there is of it; nothing was kept") from e


def is_for_now(status: int) -> bool:
    """Whether a server that answers so may do better in a moment."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _goes_on(response: httpx2.Response, begin: int) -> bool:
    """Whether the response continues at `begin`. Raises TransferCut if it begins elsewhere."""
    if response.status_code != HTTPStatus.PARTIAL_CONTENT:
        return False
    if response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
        return True
    raise TransferCut("the server sent another piece than it was asked for")
