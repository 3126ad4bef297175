from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.kv.host_cache import Attic

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def n_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(texts, st.lists(st.integers(0, 2), max_size=10))
def test_the_text_with_most_in_common_is_found(kept: list[list[int]], wanted: list[int]) -> None:
    attic = Attic(1000)
    for text in kept:
        attic.put(text, bytes(text))
    most = max(n_common(text, wanted) for text in kept)
    assert attic.match(wanted) == most
    n = len(attic)
    text, data, _ = attic.take(wanted)
    assert n_common(text, wanted) == most
    assert data == bytes(text)
    assert len(attic) == n - (most == len(text)), "what is only begun with stays for others"
    assert attic.n_bytes == sum(len(data) for data in attic._kept.values())


def test_a_text_that_goes_on_takes_the_place_of_its_beginning() -> None:
    attic = Attic(1000)
    attic.put([1, 2], b"12")
    attic.put([1, 2, 3], b"123")
    attic.put([1, 4], b"14")
    assert (len(attic), attic.n_bytes) == (2, 5)


def test_what_was_used_longest_ago_goes_first() -> None:
    attic = Attic(max_bytes=6)
    attic.put([1, 1], b"aa")
    attic.put([2, 2], b"bb")
    attic.put([3, 3], b"cc")
    attic.take([1])  # a beginning only: it stays, and was used
    attic.put([4, 4], b"dd")
    assert [attic.match([k]) for k in (1, 2, 3, 4)] == [1, 0, 1, 1]
    attic.put([5] * 7, b"too large")
    assert (len(attic), attic.n_bytes) == (0, 0)


def test_nothing_is_taken_from_an_empty_attic() -> None:
    with pytest.raises(KeyError):
        Attic(1000).take([1])
