from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.engine.kv.host_cache import HostCache

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def n_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(texts, st.lists(st.integers(0, 2), max_size=10))
def test_the_text_with_most_in_common_is_found(kept: list[list[int]], wanted: list[int]) -> None:
    cache = HostCache(1000)
    for text in kept:
        cache.put(text, bytes(text))
    most = max(n_common(text, wanted) for text in kept)
    assert cache.match(wanted) == most
    n = len(cache)
    text, data, _ = cache.take(wanted)
    assert n_common(text, wanted) == most
    assert data == bytes(text)
    assert len(cache) == n - (most == len(text)), "what is only begun with stays for others"
    assert cache.n_bytes == sum(len(data) for data in cache._kept.values())


def test_a_text_that_goes_on_takes_the_place_of_its_beginning() -> None:
    cache = HostCache(1000)
    cache.put([1, 2], b"12")
    cache.put([1, 2, 3], b"123")
    cache.put([1, 4], b"14")
    assert (len(cache), cache.n_bytes) == (2, 5)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = HostCache(max_bytes=6)
    cache.put([1, 1], b"aa")
    cache.put([2, 2], b"bb")
    cache.put([3, 3], b"cc")
    cache.take([1])  # a beginning only: it stays, and was used
    cache.put([4, 4], b"dd")
    assert [cache.match([k]) for k in (1, 2, 3, 4)] == [1, 0, 1, 1]
    cache.put([5] * 7, b"too large")
    assert (len(cache), cache.n_bytes) == (0, 0)


def test_nothing_is_taken_from_an_empty_host_cache() -> None:
    with pytest.raises(KeyError):
        HostCache(1000).take([1])
