"""The preferences of this window: the theme, whether the welcome was shown, and whether unread words are faded."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

NAME = "tui.json"  # beside the conversations
MAX_BYTES = 4096


@dataclass(slots=True)
class Preferences:
    """The preferences in the file at `path`; None keeps nothing. A file that fails costs a colour, no more."""

    path: Path | None = None
    theme: str = ""
    welcomed: bool = False
    faded: bool = False

    @classmethod
    def load(cls, path: Path | None) -> Preferences:
        """Read the file; what is missing or malformed gets its default."""
        found: object = None
        if path is not None:
            with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                found = json.loads(file.read(MAX_BYTES))
        kept = found if isinstance(found, dict) else {}
        theme = kept.get("theme")
        flags = (kept.get(name) is True for name in ("welcomed", "faded"))
        return cls(path, theme if isinstance(theme, str) else "", *flags)

    def save(self) -> None:
        """Write the file, whole or not at all, readable by the user only."""
        if self.path is None:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                json.dump({"theme": self.theme, "welcomed": self.welcomed, "faded": self.faded}, file)
            new.replace(self.path)
