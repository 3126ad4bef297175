from __future__ import annotations

import time
import unicodedata

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.delivery.graphemes import extends, settled

# Whole clusters that arrive in pieces in practice: cut anywhere, the beginning is open.
COMPOSED = [
    "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "❤\ufe0f",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "क्षि", "กำ", "มี่", "ကို", "שָׁ", "بِّ", "각", "\r\n", "மி", "ക്ഷ", "កំ", "བོ", "ගේ",
]  # fmt: skip


@pytest.mark.parametrize("cluster", COMPOSED)
def test_the_beginning_of_a_composed_character_is_held(cluster: str) -> None:
    assert regex.fullmatch(r"\X", cluster), "the example is one cluster"
    for n in range(1, len(cluster)):
        assert settled("漢 " + cluster[:n]) == 2, f"open after {n} of {len(cluster)}"
        assert extends(cluster[:n], cluster[n:])


@given(st.text(st.characters(max_codepoint=127, exclude_characters="\r")))
def test_ascii_is_never_held(text: str) -> None:
    assert settled(text) == len(text)


@pytest.mark.parametrize(
    "script", ["CJK UNIFIED", "HIRAGANA", "KATAKANA", "HANGUL SYLLABLE", "LATIN", "GREEK", "CYRILLIC"]
)
def test_nor_is_text_whose_characters_are_mostly_whole(script: str) -> None:
    chars = [chr(c) for c in range(0x21, 0x10000) if unicodedata.name(chr(c), "").startswith(script)]
    letters = [c for c in chars if unicodedata.category(c) in ("Lu", "Ll", "Lo")]
    assert len(letters) > 70
    assert [c for c in letters if settled("a" + c) != 2] == []


@given(st.text())
def test_what_is_settled_ends_at_the_border_of_a_cluster(text: str) -> None:
    at = settled(text)
    assert at == len(text) or at in {m.start() for m in regex.finditer(r"\X", text)}


@given(st.text(min_size=1), st.text(min_size=1))
def test_what_extends_is_no_border(before: str, after: str) -> None:
    cluster = regex.findall(r"\X", before)[-1]
    assert extends(cluster, after) == (len(cluster) not in {m.end() for m in regex.finditer(r"\X", cluster + after)})


def test_an_emoji_is_ended_by_any_plain_character() -> None:
    assert not extends("👍🏽", " ok")
    assert not extends("🇩🇪", "🇫")
    assert extends("🇩", "🇪🇫")


def test_a_long_text_is_quick() -> None:
    text = "กำลังทำงาน" * 1000
    times = []
    for _ in range(3):  # a busy machine may hold one of them up
        begin = time.thread_time()
        assert settled(text) == len(text) - 1
        times.append(time.thread_time() - begin)
    assert min(times) < 0.1
