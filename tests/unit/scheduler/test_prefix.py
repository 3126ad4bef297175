from __future__ import annotations

import random
from array import array

import pytest

from disco_daemon.scheduler.prefix import DEEPER, PrefixIndex

HALF_LIFE = 600.0
SYSTEM = list(range(1000, 1100))  # a system prompt that clients share


def index_of(*texts: list[int], now: float = 0.0) -> PrefixIndex:
    index = PrefixIndex(HALF_LIFE)
    for seq, text in enumerate(texts):
        index.hold(seq, text, now)
    return index


def chats(n: int, length: int = 10) -> list[list[int]]:
    return [[100 * i + j for j in range(length)] for i in range(1, n + 1)]


# --- holding and sharing --------------------------------------------------------------------------------------------


def test_clients_of_one_system_prompt_hold_its_cells_once() -> None:
    index = index_of([*SYSTEM, 1, 2])
    for seq in range(1, 5):
        index.share(0, seq, len(SYSTEM), now=seq)
        index.grow(seq, [10 * seq, 10 * seq + 1, 10 * seq + 2], now=seq)
    assert index.n_cells == len(SYSTEM) + 2 + 4 * 3
    assert [index.length(seq) for seq in range(6)] == [102, 103, 103, 103, 103, 0]
    assert [index.unique(seq) for seq in range(6)] == [2, 3, 3, 3, 3, 0]
    assert index.match([*SYSTEM, 30, 31, 99]) == (102, 3)


def test_equal_texts_that_were_computed_apart_are_not_shared() -> None:
    index = index_of(SYSTEM, SYSTEM)
    assert index.n_cells == 2 * len(SYSTEM)
    assert index.unique(0) == index.unique(1) == len(SYSTEM)
    index.drop(0)
    assert index.n_cells == len(SYSTEM)
    assert index.match(SYSTEM) == (len(SYSTEM), 1)


def test_a_sequence_that_takes_another_way_leaves_the_shared_cells_to_the_rest() -> None:
    index = index_of([1, 2, 3, 4, 5])
    index.share(0, 1, 4, now=1)
    index.hold(1, [1, 2, 9], now=2)
    assert index.n_cells == 6
    assert index.match([1, 2, 3, 4, 5]) == (5, 0)
    assert index.match([1, 2, 9, 9]) == (3, 1)


def test_only_the_cells_before_the_first_difference_are_kept() -> None:
    index = index_of([1, 2, 3, 4, 5])
    index.share(0, 1, 3, now=0)
    index.hold(0, [1, 9, 3, 4, 5], now=0)
    assert index.n_cells == 3 + 4
    assert index.unique(0) == 4


@pytest.mark.parametrize("given", [[1, 2, 3], array("i", [1, 2, 3]), (1, 2, 3)])
def test_any_sequence_of_tokens_will_do(given: list[int]) -> None:
    index = index_of([1, 2, 3, 4])
    index.hold(0, given, now=0)
    index.grow(0, given, now=0)
    assert index.match(array("i", [1, 2, 3, 1, 2, 3])) == (6, 0)
    assert list(given) == [1, 2, 3]


def test_the_last_owner_frees_the_cells() -> None:
    index = index_of(SYSTEM)
    index.share(0, 1, 60, now=0)
    index.drop(0)
    assert index.n_cells == 60
    index.drop(1, 20)
    assert index.n_cells == 20
    index.drop(1)
    assert (index.n_cells, index.n_spans) == (0, 0)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    index = index_of([1, 2, 3], [4, 5])
    for src, dst, n in ((0, 1, 2), (0, 0, 1), (0, 2, 4), (7, 2, 1), (0, 2, -1)):
        with pytest.raises(ValueError, match="cannot get"):
            index.share(src, dst, n, now=0)
    with pytest.raises(ValueError, match="begin at 0"):
        index.drop(0, -1)
    with pytest.raises(OverflowError):
        index.hold(0, [1, 9, 2**31], now=0)
    with pytest.raises(OverflowError):
        index.grow(0, [2**31], now=0)
    assert (index.n_cells, index.length(0), index.length(1), index.length(2)) == (5, 3, 2, 0)
    with pytest.raises(ValueError, match="half-life"):
        PrefixIndex(0)


def test_a_long_life_leaves_few_spans() -> None:
    index = index_of(list(range(2000)))
    draw = random.Random(5)
    most = 0
    for i in range(1000):
        index.share(0, 1, draw.randrange(1, 2000), now=i)
        index.grow(1, [9999], now=i)
        index.drop(1)
        most = max(most, index.n_spans)
    assert (index.n_cells, index.match(list(range(2000)))) == (2000, (2000, 0))
    assert most < 40


def test_old_differences_are_forgotten() -> None:
    index = index_of(list(range(2000)))
    for i in range(50):
        index.used(0, now=20 * HALF_LIFE * i, n=2000 - 20 * i)
    assert index.n_spans < 5


# --- matching -------------------------------------------------------------------------------------------------------


def test_nothing_matches_nothing() -> None:
    assert PrefixIndex().match([1, 2]) == (0, -1)
    index = index_of([1, 2])
    assert index.match([]) == (0, -1)
    assert index.match([2, 1]) == (0, -1)


def test_the_longest_of_several_equal_beginnings_is_found() -> None:
    index = index_of([1, 2, 3, 9], [1, 2, 3, 4, 5, 9], [1, 2, 9])
    assert index.match([1, 2, 3, 4, 5, 6]) == (5, 1)


def test_a_sequence_that_can_be_continued_in_place_is_preferred() -> None:
    index = index_of([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert index.match([1, 2, 3, 7]) == (3, 0)
    index.pin(0)
    assert index.match([1, 2, 3, 7]) == (3, 1)
    index.pin(1)
    index.pin(2)
    assert index.match([1, 2, 3, 7]) == (3, 0)


# --- eviction -------------------------------------------------------------------------------------------------------


def test_no_more_than_asked_for_is_taken_and_from_the_end() -> None:
    index = index_of(*chats(2))
    assert index.evict(0) == []
    (cut,) = index.evict(3)
    assert cut in [(0, 7), (1, 7)]
    assert index.n_cells == 17


def test_pinned_cells_stay_also_for_those_who_share_them() -> None:
    index = index_of([*SYSTEM, 1, 2, 3])
    index.share(0, 1, len(SYSTEM), now=0)
    index.grow(1, [7, 8], now=0)
    index.pin(1)
    assert index.evict(50) == [(0, len(SYSTEM))]
    assert index.n_cells == len(SYSTEM) + 2
    assert index.evict(1) == []
    index.unpin(1)
    assert sorted(index.evict(1000)) == [(0, 0), (1, 0)]
    assert index.n_cells == 0


def test_of_texts_never_used_again_the_oldest_goes_first() -> None:
    index = PrefixIndex(HALF_LIFE)
    for now, seq in enumerate((2, 0, 1)):
        index.hold(seq, chats(3)[seq], now=100 * now)
    assert [index.evict(10), index.evict(10), index.evict(10)] == [[(2, 0)], [(0, 0)], [(1, 0)]]


@pytest.mark.parametrize("by_copy", [False, True])
def test_a_text_that_is_used_again_stays_longer(by_copy: bool) -> None:
    index = index_of(*chats(3))
    if by_copy:
        index.share(0, 7, 10, now=50)
        index.drop(7)
    else:
        index.used(0, now=50)
    assert index.evict(25) == [(1, 0), (2, 0), (0, 5)]


def test_uses_fade() -> None:
    """Four uses long ago are worth less than one now; four a while ago are worth more."""
    for wait, first in ((HALF_LIFE, 0), (5 * HALF_LIFE, 1)):
        index = index_of(*chats(2))
        for _ in range(4):
            index.used(1, now=0)
        index.used(0, now=wait)
        assert index.evict(10) == [(first, 0)]


def test_a_text_being_written_is_as_new_as_its_last_token() -> None:
    index = index_of(chats(1)[0], list(range(30)))
    index.grow(0, [1], now=HALF_LIFE)
    assert index.evict(10) == [(1, 20)]


def test_a_shared_prompt_outlives_what_its_clients_said() -> None:
    index = index_of([*SYSTEM, 1, 2, 3])
    for seq in range(1, 4):
        index.share(0, seq, len(SYSTEM), now=seq)
        index.grow(seq, [10 * seq], now=seq)
    index.hold(9, list(range(50)), now=4)
    cuts = dict(index.evict(56))
    assert cuts == {0: 100, 1: 100, 2: 100, 3: 100, 9: 0}


def test_uses_of_a_beginning_do_not_save_the_end() -> None:
    index = index_of(list(range(20)))
    index.hold(1, list(range(100, 120)), now=100)
    index.used(0, now=200, n=8)
    assert index.evict(12) == [(0, 8)]
    assert index.evict(20) == [(1, 0)]


def test_parts_used_about_as_often_are_one_and_worth_their_mean() -> None:
    index = index_of(list(range(100, 120)))
    for _ in range(6):
        index.used(0, now=0)
    index.hold(1, list(range(20)), now=HALF_LIFE)  # the other one has 3.5 uses left
    for n in (20, 20, 19):
        index.used(1, now=HALF_LIFE, n=n)  # 4 uses, of the last token 3
    assert index.n_spans == 2
    assert index.evict(1) == [(0, 19)]


def test_the_deeper_of_two_cells_is_dearer() -> None:
    index = index_of(list(range(DEEPER)), [5, 6])
    assert index.evict(2) == [(1, 0)]


def test_a_text_of_several_is_taken_from_all_of_them() -> None:
    index = index_of([1, 2, 3, 4])
    index.share(0, 1, 4, now=0)
    assert sorted(index.evict(1)) == [(0, 3), (1, 3)]
    assert (index.n_cells, index.length(0), index.length(1)) == (3, 3, 3)


def test_the_id_whose_own_cells_are_worth_least_is_freed() -> None:
    index = index_of([*SYSTEM, 1, 2, 3], list(range(20)))
    index.share(0, 2, len(SYSTEM), now=0)  # has nothing of its own
    assert index.evict_seq() == 2
    assert index.n_cells == 123
    index.hold(3, [7, 8, 9], now=HALF_LIFE)  # dearer a cell, but has few
    assert index.evict_seq() == 3
    assert index.evict_seq() == 1
    index.pin(0)
    assert index.evict_seq() is None
    index.unpin(0)
    assert index.evict_seq() == 0
    assert index.evict_seq() is None
    assert index.n_cells == 0
