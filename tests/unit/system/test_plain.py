"""What strangers say is shown plainly, and nothing of a key in it."""

from __future__ import annotations

import base64
import io
import logging
import unicodedata
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.daemon.logs import JsonFormatter, TextFormatter
from disco_daemon.plain import MAX_LINE, PIECE, masked, one_line, plain, tells

EVIL = "\x1b]52;c;eA==\x07\x1b[31m\u202e\u2066\x9b\x7f\r\x00"


@given(st.text(st.characters(), max_size=80))
def test_plain_text_has_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = plain(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t" for c in shown)
    assert not any(unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
                   for c in shown)  # fmt: skip
    assert plain(shown) == shown
    shown.encode()


@pytest.mark.parametrize(
    "text", ["grün 東京 🦊 naïve", "👩‍👩‍👧 👍🏽 e\u0301", "می‌خواهم", "a\tb\nc", "non\u00a0breaking"]
)
def test_what_is_fit_stays(text: str) -> None:
    assert plain(text) == text


def test_each_sign_is_marked_or_left_out() -> None:
    assert plain("a\x1b[31mb\u202ec") == "a\ufffd[31mb\ufffdc"
    assert plain("a\x1b[31mb\r\nc", "") == "a[31mb\nc"


@given(st.text(max_size=400))
def test_one_line_is_one_and_short(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert len(line) <= MAX_LINE + 1


KEYS = st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), min_size=8, max_size=60)


@given(KEYS, st.text(max_size=20), st.text(max_size=20), st.integers(0, 2))
def test_no_piece_of_a_key_is_left_however_it_is_spelled(key: str, before: str, after: str, lead: int) -> None:
    packed = base64.b64encode(b"u" * lead + key.encode()).decode()
    for form in (key, key[1:], key[:-1], f"Bearer {key}", quote(key, safe=""), quote_plus(key), packed):
        left = masked(f"{before} {form} {after}", key)
        assert not any(key[i : i + PIECE] in left for i in range(len(key) - PIECE + 1))
    assert "***" in masked(packed, key)


def test_the_rest_of_a_text_stays() -> None:
    assert masked("wrong key sk-abcdefgh, go to https://x", "sk-abcdefgh") == "wrong key ***, go to https://x"
    assert masked("nothing", "sk-abcdefgh") == "nothing"
    assert masked("anything at all", "") == "anything at all"
    assert masked("max x", "x") == "max x", "what is so short is no secret"
    assert masked("pass1 and pass", "pass1") == "*** and pass"
    assert tells("abcdef", "0abcdef0")
    assert not tells("abcde", "0abcdef0")


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_a_log_has_one_plain_line_for_what_a_stranger_says(kind: type[logging.Formatter]) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(kind())
    record = logging.makeLogRecord({"name": "x", "levelno": 30, "levelname": "WARNING", "msg": "it says %s"})
    record.args = (f"{EVIL}\n2026-01-01 00:00:00,000 INFO disco: all is well",)
    handler.handle(record)
    assert len(out.getvalue().splitlines()) == 1
    assert plain(out.getvalue()) == out.getvalue()
