"""Text files as part of a question."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from disco_daemon.errors import DiscoError

MAX_BYTES = 256 * 1024  # some 60,000 tokens; more than most contexts hold
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # no text has these; tabs, line ends and escapes may occur
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


class AttachError(DiscoError):
    """The file cannot be attached; the message says why, and what to do."""


def as_attachment(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return a text file as Markdown for a question: its name, and its text in a fence. Blocks on disk.

    Raises AttachError if it is missing, not a file, not text, or larger than `max_bytes`.
    """
    text = _text(path.name, _read(path.expanduser(), max_bytes))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    language = path.suffix.removeprefix(".") if re.fullmatch(r"\.\w+", path.suffix) else ""
    return f"File `{path.name.replace('`', '')}`:\n\n{fence}{language}\n{text.removesuffix(chr(10))}\n{fence}\n"


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        # Checked first: opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            msg = f"{path.name or path} is no file: give the path of a text file"
            raise AttachError(msg)
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as e:
        msg = f"{path} cannot be read: {getattr(e, 'strerror', None) or e}"
        raise AttachError(msg) from e
    if len(data) > max_bytes:
        msg = f"{path.name} is larger than {max_bytes // 1024} KiB: attach a part of it"
        raise AttachError(msg)
    return data


def _text(name: str, data: bytes) -> str:
    encoding = next((known for mark, known in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if _CONTROL.search(text):
        msg = f"{name} is not text (UTF-8): only text files can be attached"
        raise AttachError(msg)
    return text.replace("\r\n", "\n")
