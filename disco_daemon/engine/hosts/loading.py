"""Segments that are loaded while answers are written: at home by a thread, at a host by its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from ...types import LayerRange
from ..llama.refusals import ModelError
from ..llama.segment import SegmentModel
from ..wire import Load
from .legs import HomeSegment
from .link import HostGoneError, HostLink
from .remote import RemoteSegment

T = TypeVar("T", SegmentModel, HostLink)


class BrokenOffError(Exception):
    """A move cannot go on; its text says why."""


class InBackground(Generic[T]):
    """Something that a thread makes; it is closed if it comes when nobody wants it any more."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] = make
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self._found: T | None = None
        self._error = ""
        self._is_unwanted = False
        threading.Thread(target=self._run, name="loading", daemon=True).start()

    def _run(self) -> None:
        try:
            self._keep(self._make())
        except (ModelError, HostGoneError) as e:
            self._error = str(e) or type(e).__name__
        except BaseException:  # whatever it was, nobody may wait for what never comes; it is raised again
            self._error = "it could not be made"
            raise
        finally:
            self._has_ended.set()

    def _keep(self, found: T) -> None:
        with self._lock:
            if not self._is_unwanted:
                self._found = found
                return
        found.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is there, or will never be; for so long at most."""
        self._has_ended.wait(timeout_s)

    def take(self) -> T | None:
        """Return it if it is there. Raises BrokenOffError if it will never be."""
        if self._error:
            raise BrokenOffError(self._error)
        with self._lock:
            found, self._found = self._found, None
        return found

    def abandon(self) -> None:
        """Close it, now or when it comes."""
        with self._lock:
            self._is_unwanted = True
            found, self._found = self._found, None
        if found is not None:
            found.close()


@dataclass(eq=False, slots=True)
class HomeLoading:
    """A segment that is loaded into this process."""

    load: Load
    layers: LayerRange
    _coming: InBackground[SegmentModel] | None = None

    def begin(self) -> InBackground[SegmentModel]:
        """Begin to load it, if that has not begun."""
        if self._coming is None:
            self._coming = InBackground(lambda: SegmentModel(self.load, self.layers))
        return self._coming

    def progress(self) -> HomeSegment | None:
        """Begin to load it, or return it if it is there. Raises BrokenOffError."""
        found = self.begin().take()
        return None if found is None else HomeSegment(found)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is there, or will never be; for so long at most."""
        self.begin().wait(timeout_s)

    def undo(self) -> None:
        """Free it, also if it comes only now."""
        if self._coming is not None:
            self._coming.abandon()


@dataclass(eq=False, slots=True)
class HostStart:
    """A host's process that is being started; several segments may wait for it."""

    _coming: InBackground[HostLink] | None = None

    def progress(self, segment: RemoteSegment) -> HostLink | None:
        """Begin to start it, or return the link to it if it is there. Raises BrokenOffError."""
        host = segment.host
        if host.link is None:
            if self._coming is None:
                self._coming = InBackground(host.connect)
            host.link = self._coming.take()
        else:
            self.undo()  # there is a process, by whoever has replaced a lost one: what comes now is one too many
        return host.link

    def undo(self) -> None:
        """End it, also if it comes only now."""
        if self._coming is not None:
            self._coming.abandon()


@dataclass(eq=False, slots=True)
class RemoteLoading:
    """A segment that a host loads."""

    segment: RemoteSegment
    start: HostStart
    _link: HostLink | None = field(default=None)

    def progress(self) -> RemoteSegment | None:
        """Begin to load it, or return it if it is there. Raises BrokenOffError."""
        host, number = self.segment.host, self.segment.number
        if self._link is None:
            if (link := self.start.progress(self.segment)) is None:
                return None
            self._link = link
            try:
                host.load(self.segment)
            except HostGoneError as e:
                host.lose(e)
                raise BrokenOffError(str(e)) from e
        if host.link is not self._link:
            raise BrokenOffError("the host is lost")
        if (found := self._link.loaded.get(number)) is None:
            return None
        if isinstance(found, str):
            raise BrokenOffError(found)
        host.loaded(found)
        host.segments[number] = self.segment
        return self.segment

    def undo(self) -> None:
        """Free it, also if it comes only now."""
        self.start.undo()
        if self._link is not None:
            self.segment.host.segments[self.segment.number] = self.segment
            self.segment.host.release(self.segment)


Loading: TypeAlias = HomeLoading | RemoteLoading
