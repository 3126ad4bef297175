"""The daemon's log: text at a terminal, one JSON object a line under a service; secrets are taken out of both."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import IO

from ..plain import plain

QUIET = ("openai", "httpx2", "httpcore2", "asyncio")  # they log prompts and headers at debug
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# All that looks like a key or a password, wherever it comes from: `sk-…`, `Bearer …`, `api_key=…`, `user:password@`.
_SECRET = re.compile(
    r"(?i)(?P<before>\bbearer\s+|\b(?:api[_-]?key|token|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+"
    r"|\b(?:sk|pk|rk|gsk|xai|hf)[-_][A-Za-z0-9_-]{8,}"
    r"|(?P<scheme>://)[^\s/@]+@"
)


def redact(text: str) -> str:
    """Return `text` with stars in place of everything that looks like a secret."""
    return _SECRET.sub(_star, text)


def _star(found: re.Match[str]) -> str:
    if found["scheme"]:
        return "://***@"
    return f"{found['before'] or ''}***"


class TextFormatter(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return plain(redact(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as `logging` calls it
        """Keep a message on one line: a stranger's second line would look like one of ours."""
        record.message = " ".join(record.message.splitlines())
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """A line for programs: `time` (RFC 3339), `level`, `logger`, `message`, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        entry["message"] = plain(redact(record.getMessage()))
        if record.exc_info:
            entry["exception"] = plain(redact(self.formatException(record.exc_info)))
        return json.dumps(entry, ensure_ascii=False)


def begin(level: str, *, as_json: bool, stream: IO[str] | None = None) -> None:
    """Log to stderr from `level` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
