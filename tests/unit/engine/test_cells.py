"""Who has the cells of the KV cache, against the fake of tests/unit/engine/test_batch.py, which checks every one."""

from __future__ import annotations

from typing import Any, cast

from disco_daemon.engine.kv.cells import BLOCK, Cells
from disco_daemon.engine.kv.checkpoints import Checkpoints
from disco_daemon.engine.kv.holder import Held
from disco_daemon.engine.llama.rows import ABORTED
from tests.unit.engine.test_batch import FakeLlama

A, B = list(range(1, 41)), list(range(101, 141))


def made(
    n_cells: int = 200, skip_s: float = 0.0, n_seqs: int = 4, *, divisible: bool = True
) -> tuple[FakeLlama, Cells]:
    llama = FakeLlama(n_ctx=n_cells, n_cells=n_cells, skip_s=skip_s, divisible=divisible)
    return llama, Cells(cast(Any, llama), n_seqs, n_cells, iter(range(10**6)).__next__)


def computed(llama: FakeLlama, cells: Cells, tokens: list[int]) -> int:
    """Take a sequence for `tokens` and compute what it lacks; its id."""
    taken = cells.take(tokens)
    assert taken is not None
    seq, n = taken
    cells.advance(len(tokens) - n)
    assert llama.decode([(tokens[i], i, seq, False) for i in range(n, len(tokens))]) == 0
    cells.grow(seq, tokens[n:])
    assert llama.tokens(seq) == tokens
    return seq


def test_a_second_turn_goes_on_in_the_cells_of_the_first() -> None:
    llama, cells = made()
    first = computed(llama, cells, A)
    cells.leave(first)
    assert cells.count_cached(A + B) == 40
    assert cells.take(A + B) == (first, 40)
    assert cells.n_reused == 40


def test_a_prompt_that_begins_alike_shares_those_cells_even_of_a_running_answer() -> None:
    llama, cells = made()
    first = computed(llama, cells, A + B)
    second = computed(llama, cells, A + [7] * 5)
    assert second != first
    assert (cells.n_used, cells.n_reused) == (85, 40)
    cells.free(first)
    assert cells.n_used == 45
    assert llama.tokens(second) == A + [7] * 5


def test_all_of_a_prompt_is_known_but_its_last_token_is_computed() -> None:
    llama, cells = made()
    cells.leave(computed(llama, cells, A))
    taken = cells.take(A)
    assert taken is not None
    assert taken[1] == 39


def test_what_is_in_the_way_for_long_goes_to_the_host_cache_and_comes_back() -> None:
    llama, cells = made(skip_s=1e-6)
    cells.leave(computed(llama, cells, A))
    other = computed(llama, cells, B)
    cells.advance(1)
    assert cells.n_moves == 1
    assert cells.n_used == len(B), "only what runs is in the KV cache"
    assert llama.tokens(other) == B
    assert cells.count_cached(A) == 40
    again = computed(llama, cells, [*A, 9])
    assert llama.tokens(again) == [*A, 9]
    assert cells.n_reused == 40


def test_a_text_stays_in_the_host_cache_if_only_its_beginning_is_wanted() -> None:
    llama, cells = made(skip_s=1e-6)
    cells.leave(computed(llama, cells, A + B))
    computed(llama, cells, B)
    cells.advance(1)
    computed(llama, cells, A + [9] * 3)
    assert cells.n_reused == 40
    assert cells.count_cached(A + B) == 80


def test_cells_are_moved_to_the_front_when_the_end_is_reached() -> None:
    llama, cells = made(n_cells=100)
    kept = computed(llama, cells, A)
    for i in range(5):
        cells.free(computed(llama, cells, [150 + i] * 40))
    assert cells.n_moves >= 2
    assert llama.tokens(kept) == A
    assert llama.n_placed <= 100


def test_there_is_no_room_for_more_than_there_are_cells() -> None:
    llama, cells = made(n_cells=100)
    first = computed(llama, cells, A)
    taken = cells.take(B)
    assert taken is not None, "there are 100 cells: 80 are promised now"
    assert cells.take([3] * 21) is None
    assert cells.n_taken == 2
    cells.free(first)
    assert cells.take([3] * 21) is not None


def test_swapping_brings_back_the_same_and_frees_the_cells_meanwhile() -> None:
    llama, cells = made()
    seq = computed(llama, cells, A)
    saved = cells.swap_out(seq, recompute_s=1.0)
    assert saved is not None
    assert (cells.n_used, cells.saved_bytes) == (0, 40)
    back = cells.swap_in(saved, A)
    assert back is not None
    assert llama.tokens(back) == A
    assert (cells.n_of(back), cells.saved_bytes) == (40, 0)


def test_what_is_computed_again_sooner_is_not_swapped() -> None:
    llama, cells = made()
    llama.bytes_per_token = 10**9
    assert cells.swap_out(computed(llama, cells, A), recompute_s=1.0) is None
    assert cells.n_used == 0


def test_ids_are_given_up_by_cached_prefixes() -> None:
    llama, cells = made(n_seqs=2)
    cells.leave(computed(llama, cells, A))
    cells.leave(computed(llama, cells, B))
    assert llama.tokens(computed(llama, cells, [5] * 10)) == [5] * 10
    assert cells.count_cached(B) == 40, "the one used longest ago went"


def test_with_a_recurrent_state_the_next_turn_goes_on_from_the_end_of_the_last_one() -> None:
    llama, cells = made(divisible=False)
    first = computed(llama, cells, A)
    cells.leave(first)
    assert cells.count_cached(A + B) == 40
    assert computed(llama, cells, A + B) == first, "which checks that the state has read what its cells hold"
    assert cells.n_reused == 40


def test_with_a_recurrent_state_a_text_is_used_again_up_to_a_copy_of_it_also_of_a_running_answer() -> None:
    llama, cells = made(divisible=False)
    running = computed(llama, cells, A)
    assert cells.count_cached([*A, 9]) == 0, "nothing is copied of it yet"
    cells.pass_by(running, 20)
    other = computed(llama, cells, [*A, 9])
    assert other != running
    assert (cells.n_reused, cells.n_used) == (40, 41)
    cells.leave(other)
    assert cells.count_cached([*A, 9, 9]) == 41
    assert cells.count_cached([*A[:30], 9]) == 0, "a state cannot be cut"


def test_where_a_text_parts_from_one_that_was_read_a_state_is_copied_on_the_way() -> None:
    llama, cells = made(divisible=False)
    cells.leave(computed(llama, cells, A + B))
    prompt = A + [7] * 30
    taken = cells.take(prompt)
    assert taken is not None
    seq, n = taken
    assert n == 0
    end = cells.checkpoints.chunk_end(seq, 0, 64, len(prompt))
    assert end == 40
    cells.advance(end)
    assert llama.decode([(prompt[i], i, seq, False) for i in range(end)]) == 0
    cells.grow(seq, prompt[:end])
    cells.pass_by(seq, len(prompt) - end)
    assert cells.count_cached(A + [8] * 30) == 40


def test_a_state_that_a_broken_decode_has_spoilt_goes_back_to_its_latest_copy() -> None:
    llama, cells = made(divisible=False)
    held = Held(computed(llama, cells, A), 40)
    cells.pass_by(held.slot, 20)
    assert llama.decode([(9, 40, held.slot, False)]) == 0
    cells.grow(held.slot, [9])
    llama.faults = [(ABORTED, 1)]
    assert llama.decode([(9, 41, held.slot, False)]) == ABORTED
    cells.go_back(held, 41)
    assert (held.n_past, llama.tokens(held.slot)) == (40, A)
    assert llama.decode([(8, 40, held.slot, False)]) == 0


def test_states_that_were_not_used_for_longest_give_way_and_their_texts_are_computed_again() -> None:
    llama, cells = made(divisible=False)
    cells.checkpoints = Checkpoints(100)
    for text in (A, B, [5] * 50):
        cells.leave(computed(llama, cells, text))
    assert cells.checkpoints.n_bytes == 90
    assert [cells.count_cached(text) for text in (A, B, [5] * 50)] == [0, 40, 50]
    computed(llama, cells, [*A, 9])
    assert cells.n_reused == 0


def test_a_state_for_which_there_is_no_room_at_all_costs_none_of_the_others() -> None:
    copies = Checkpoints(100)
    copies.put(A, bytes(60))
    copies.put(B, bytes(101))
    assert (copies.reach(A, len(A)), copies.reach(B, len(B)), copies.n_bytes) == (len(A), 0, 60)


def test_with_a_recurrent_state_an_answer_that_is_to_be_computed_again_goes_on_from_a_copy() -> None:
    llama, cells = made(divisible=False)
    seq = computed(llama, cells, A)
    cells.swap_s_per_byte = 1.0
    assert cells.swap_out(seq, 1e-9) is None
    assert cells.n_taken == 0
    computed(llama, cells, [*A, 9])
    assert cells.n_reused == 40


def test_with_a_recurrent_state_a_text_whose_id_is_given_up_comes_back_from_the_host_cache() -> None:
    llama, cells = made(n_seqs=2, divisible=False)
    for text in (A, B, [5] * 40):
        cells.leave(computed(llama, cells, text))
    for n, text in enumerate((A, B, [5] * 40), 1):
        cells.leave(computed(llama, cells, [*text, 9]))
        assert cells.n_reused == 40 * n


def test_where_few_states_have_room_none_is_copied_within_a_prompt() -> None:
    for room, is_due in ((7, False), (8, True)):
        copies = Checkpoints(room * 100, every=20, last=2)
        copies.put(A, bytes(100))
        copies.begin(0, 0)
        assert copies.is_due(0, 40, 100) is is_due
        assert copies.is_due(0, 120, 3), "at its end in any case"


def test_with_a_recurrent_state_cached_texts_go_to_the_host_cache_and_come_back() -> None:
    llama, cells = made(skip_s=1e-6, divisible=False)
    cells.leave(computed(llama, cells, A))
    other = computed(llama, cells, B)
    cells.advance(1)
    assert (cells.n_moves, cells.n_used) == (1, len(B))
    assert llama.decode([(9, 40, other, False)]) == 0, "the moved one goes on"
    assert cells.count_cached([*A, 9]) == 40
    computed(llama, cells, [*A, 9])
    assert cells.n_reused == 40


def test_what_fills_the_cells_is_evicted_in_blocks_or_put_away_and_not_moved_again_at_each_decode() -> None:
    for spare_bytes in (0, 1000):
        llama, cells = made(n_cells=200)
        cells = Cells(cast(Any, llama), 8, 200, iter(range(10**6)).__next__, spare_bytes=spare_bytes)
        for i in range(100):  # ten times over
            seq = computed(llama, cells, [i % 200] * 10)
            for _ in range(10):
                computed_one(llama, cells, seq)
            cells.leave(seq)
        assert cells.n_moves <= 2 * 100 * 20 // (200 // BLOCK)


def computed_one(llama: FakeLlama, cells: Cells, seq: int) -> None:
    n = cells.n_of(seq)
    assert cells.promise([(seq, n + 1)])
    cells.advance(1)
    assert llama.decode([(7, n, seq, False)]) == 0
    cells.grow(seq, [7])


def test_nothing_is_moved_where_all_cells_are_of_running_answers() -> None:
    llama, cells = made(n_cells=100)
    first, second = computed(llama, cells, A), computed(llama, cells, B)
    for _ in range(10):
        computed_one(llama, cells, first)
        computed_one(llama, cells, second)
    cells.advance(1)
    assert cells.n_moves == 0, "llama_decode will say that there is no cell, and one of them gives way"
