"""What the verbs print: plain text only, whoever it comes from.

A verb prints what servers, model files, file names and other programs say. So that none can forget, all that goes to
stdout and stderr is made plain on the way (`plainly`). What is meant for the terminal itself goes by `direct`, and
colours by a console of `make_console`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ..plain import plain

if TYPE_CHECKING:
    from rich.console import Console


class Plainly:
    """A text stream that passes on nothing which a terminal would obey."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """As a text stream; tells the length of what was given."""
        self.stream.write(plain(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As a text stream."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plainly() -> Iterator[None]:
    """Within this, what is printed is plain."""
    with _printing(Plainly(sys.stdout), Plainly(sys.stderr)):
        yield


@contextmanager
def undisguised() -> Iterator[None]:
    """Within this it is not: for a program that fills the whole screen, and sees to it itself."""
    with _printing(direct(sys.stdout), direct(sys.stderr)):
        yield


@contextmanager
def _printing(out: Any, err: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def direct(stream: TextIO) -> TextIO:
    """The terminal itself behind stdout or stderr: for words and codes of ours only."""
    return stream.stream if isinstance(stream, Plainly) else stream


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """Rich's console, whose colours are ours and whose text is plain."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for part in super().render(*args, **options):
                yield part if part.control else Segment(plain(part.text), part.style)

    return PlainConsole(file=direct(cast("TextIO", sys.stderr if stderr else sys.stdout)), **options)


def progress(line: str) -> None:
    """Print one line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
