"""The prefix index against a KV cache in the plainest form: a list of cells for each sequence, each cell with a token.

Whatever sequences grow, are cut, replaced, copied, evicted or pinned: the index counts the same cells, finds the same
prefixes, and what it gives up frees what it says.
"""

from __future__ import annotations

from array import array
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disco_daemon.scheduler.prefix import PrefixIndex

N_SEQS = 6
seqs = st.integers(0, N_SEQS - 1)
texts = st.lists(st.integers(0, 2), max_size=9)  # few tokens: texts have much in common
Cell = tuple[int, int]  # its number, and the token whose key and value are in it


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Cache(RuleBasedStateMachine):
    """An index, and the cache that it is to describe."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(half_life_s=10)
        self.cells: dict[int, list[Cell]] = {}
        self.pinned: set[int] = set()
        self.new = count()
        self.now = 0.0

    def tokens(self, seq: int) -> list[int]:
        return [token for _, token in self.cells.get(seq, [])]

    def unique_cells(self) -> set[Cell]:
        return {cell for held in self.cells.values() for cell in held}

    def safe_cells(self) -> set[Cell]:
        return {cell for seq in self.pinned for cell in self.cells.get(seq, [])}

    def keep(self, seq: int, n: int) -> None:
        """llama_memory_seq_rm(seq, n, -1)."""
        self.cells[seq] = self.cells.get(seq, [])[:n]

    def write(self, seq: int, tokens: list[int]) -> None:
        """llama_decode."""
        self.cells.setdefault(seq, []).extend((next(self.new), token) for token in tokens)

    # --- what the engine does ------------------------------------------------------------------------------------

    @rule(seq=seqs, tokens=texts, as_array=st.booleans())
    def hold(self, seq: int, tokens: list[int], as_array: bool) -> None:
        given = array("i", tokens) if as_array else tokens
        self.index.hold(seq, given, self.now)
        same = common(self.tokens(seq), tokens)
        self.keep(seq, same)
        self.write(seq, tokens[same:])
        if isinstance(given, array):
            given.extend([2, 2])  # it is the caller's again

    @rule(seq=seqs, more=texts)
    def hold_as_before_and_more(self, seq: int, more: list[int]) -> None:
        self.index.hold(seq, self.tokens(seq) + more, self.now)
        self.write(seq, more)

    @rule(data=st.data(), seq=seqs)
    def hold_with_one_token_changed(self, data: st.DataObject, seq: int) -> None:
        tokens = self.tokens(seq)
        if not tokens:
            return
        at = data.draw(st.integers(0, len(tokens) - 1))
        tokens[at] = 3
        self.hold(seq, tokens, as_array=False)

    @rule(seq=seqs, tokens=texts, as_array=st.booleans())
    def grow(self, seq: int, tokens: list[int], as_array: bool) -> None:
        given = array("i", tokens) if as_array else tokens
        self.index.grow(seq, given, self.now)
        self.write(seq, tokens)
        if isinstance(given, array):
            given.extend([2, 2])

    @rule(data=st.data(), src=seqs)
    def share(self, data: st.DataObject, src: int) -> None:
        empty = [seq for seq in range(N_SEQS) if not self.cells.get(seq)]
        if not empty:
            return
        dst = data.draw(st.sampled_from(empty))
        n = data.draw(st.integers(0, len(self.tokens(src))))
        self.index.share(src, dst, n, self.now)
        self.cells[dst] = self.cells.get(src, [])[:n]

    @rule(seq=seqs, from_pos=st.integers(0, 12))
    def drop(self, seq: int, from_pos: int) -> None:
        self.index.drop(seq, from_pos)
        self.keep(seq, from_pos)

    @rule(seq=seqs)
    def pin(self, seq: int) -> None:
        self.index.pin(seq)
        self.pinned.add(seq)

    @rule(seq=seqs)
    def unpin(self, seq: int) -> None:
        self.index.unpin(seq)
        self.pinned.discard(seq)

    @rule(seq=seqs, n=st.none() | st.integers(0, 12))
    def used(self, seq: int, n: int | None) -> None:
        self.index.used(seq, self.now, n)

    @rule(dt=st.sampled_from([0.1, 3.0, 40.0, 1e5]))
    def time_passes(self, dt: float) -> None:
        self.now += dt

    # --- what it asks --------------------------------------------------------------------------------------------

    @rule(tokens=texts)
    def match(self, tokens: list[int]) -> None:
        n, seq = self.index.match(tokens)
        longest = {s: common(self.tokens(s), tokens) for s in range(N_SEQS)}
        assert n == max(longest.values())
        if not n:
            assert seq == -1
            return
        assert longest[seq] == n
        # Best is a sequence that nobody runs, with the least beyond the prefix.
        best = [s for s in longest if longest[s] == n]
        rank = {s: (s in self.pinned, len(self.tokens(s))) for s in best}
        assert rank[seq] == min(rank.values())

    @rule(n=st.integers(0, 30))
    def evict(self, n: int) -> None:
        before = self.unique_cells()
        free = before - self.safe_cells()
        cuts = self.index.evict(n)
        assert len({seq for seq, _ in cuts}) == len(cuts)
        for seq, from_pos in cuts:
            assert seq not in self.pinned
            assert 0 <= from_pos < len(self.tokens(seq))
            self.keep(seq, from_pos)
        assert len(before) - len(self.unique_cells()) == min(n, len(free))

    @rule()
    def evict_seq(self) -> None:
        held = {seq for seq in self.cells if self.cells[seq]} - self.pinned
        seq = self.index.evict_seq()
        assert (seq in held) if held else seq is None
        if seq is not None:
            self.keep(seq, 0)

    @rule(seq=seqs)
    def refused_orders_change_nothing(self, seq: int) -> None:
        with pytest.raises(ValueError):
            self.index.share(seq, (seq + 1) % N_SEQS, len(self.tokens(seq)) + 1, self.now)
        with pytest.raises(ValueError):
            self.index.drop(seq, -1)
        with pytest.raises(OverflowError):
            self.index.hold(seq, [*self.tokens(seq)[:1], 2**31], self.now)

    # --- what holds at all times ---------------------------------------------------------------------------------

    @invariant()
    def the_same_cells_are_counted(self) -> None:
        assert self.index.n_cells == len(self.unique_cells())
        for seq in range(N_SEQS):
            held = self.cells.get(seq, [])
            others = {cell for s in self.cells if s != seq for cell in self.cells[s]}
            assert self.index.length(seq) == len(held)
            assert self.index.unique(seq) == len(set(held) - others)

    @invariant()
    def every_text_is_found_whole(self) -> None:
        for seq in range(N_SEQS):
            assert self.index.match(self.tokens(seq))[0] == len(self.tokens(seq))


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
