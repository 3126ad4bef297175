"""What the daemon logs: lines for people or for programs, and no secret in either."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from disco_daemon.daemon import logs

SECRETS = (
    ("Authorization: Bearer abc.def-123", "abc.def-123"),
    ("key sk-proj-abcdefghijklmnop was refused", "sk-proj-abcdefghijklmnop"),
    ('{"api_key": "hunter2hunter2"}', "hunter2hunter2"),
    ("api-key=hunter2hunter2&x=1", "hunter2hunter2"),
    ("GET https://me:hunter2@example.com/v1/models", "hunter2"),
    ("gsk_abcdefghijklmnop", "gsk_abcdefghijklmnop"),
    ("hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = before, level


@pytest.mark.parametrize(("text", "secret"), SECRETS)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_secret_reaches_the_log(text: str, secret: str, as_json: bool, stream: io.StringIO) -> None:
    logs.begin("info", as_json=as_json, stream=stream)
    logging.getLogger("disco.test").warning("it said %s", text)
    logging.getLogger("disco.test").error("it failed", exc_info=ValueError(text))
    assert secret not in stream.getvalue()
    assert "***" in stream.getvalue()


@pytest.mark.parametrize("text", ["12 tokens=40 at 3.5 token/s", "http://127.0.0.1:4747/v1", "risk-averse", "ask me"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert logs.redact(text) == text


def test_under_a_service_each_line_is_an_object(stream: io.StringIO) -> None:
    logs.begin("info", as_json=True, stream=stream)
    logging.getLogger("disco.a").info("two\nlines")
    logging.getLogger("disco.b").debug("not shown")
    logging.getLogger("httpx2").info("not shown: it logs headers")
    [line] = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "info", "logger": "disco.a", "message": "two\nlines"}
