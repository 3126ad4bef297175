"""The prefix index: which sequence of the KV cache holds which prefix, and which cells to evict. Pure.

A radix tree as in SGLang's RadixAttention (Zheng et al. 2024, arXiv 2312.07104, §3), but over llama.cpp's unified KV
cache, where it is sequences that own cells. A *span* is a run of cells at consecutive positions that all belong to the
same sequences; a sequence is a path from the root. Cells come to be shared by copying a prefix from one sequence to
another (`llama_memory_seq_cp`) only, so sequences that share a cell share all before it: the tree is exact. Equal
tokens that were computed twice are in different cells, and hence in different spans side by side.

The index changes no cache: the caller does, and tells the index, or removes what the index returns. Times are in s, by
any one clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

DEEPER = 8192  # tokens; a cell this deep takes about twice as long to compute as the first: attention is q * n ** 2
SIMILAR = 0.75  # spans of the same sequences become one if one is reused this often for each time the other is
FAINT = 1 / 16  # hits; differences below this say nothing, and old spans would never be joined
TYPECODE = "i"  # llama_token is an int32
WIDTH = array(TYPECODE).itemsize


@dataclass(slots=True, eq=False)
class _Span:
    """Cells at the positions from `start` on, all owned by just the sequences `owners`; never empty but at the root.

    `children` are the spans that go on from here, by their first token. `hits` is the number of uses, decayed to `at`.
    """

    start: int
    tokens: array[int]
    owners: set[int]
    parent: _Span | None
    hits: float
    at: float
    children: dict[int, list[_Span]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def attach(self, child: _Span) -> None:
        child.parent = self
        self.children.setdefault(child.tokens[0], []).append(child)

    def detach(self, child: _Span) -> None:
        twins = self.children[child.tokens[0]]
        twins.remove(child)
        if not twins:
            del self.children[child.tokens[0]]

    def below(self) -> Iterator[_Span]:
        """Yield all spans of the tree under this one."""
        left = [self]
        while left:
            for twins in left.pop().children.values():
                yield from twins
                left += twins


class PrefixIndex:
    """The prefixes that the KV cache holds. `n_cells` is the number of cells in use, shared ones counted once.

    Each sequence id holds the tokens at positions 0, 1, ... of one text. A span's expected saving is the time that it
    would take to compute it again, times the chance that it is used within a half-life. Uses fade with that half-life,
    and a new span counts as used once; at a rate of h ln 2 / half-life the chance is 1 - 2 ** -h. So of two texts
    never used again the older one goes first, and a text that clients come back to outlives many that they do not.
    """

    def __init__(self, half_life_s: float = 600.0) -> None:
        """`half_life_s` in s; raises ValueError unless it is positive."""
        if not half_life_s > 0:
            raise ValueError("the half-life must be positive")
        self.n_cells = 0
        self._half_life_s = half_life_s
        self._now = -math.inf
        self._root = _Span(0, array(TYPECODE), set(), None, 0.0, 0.0)
        self._tails: dict[int, _Span] = {}  # the last span of each sequence that holds something
        self._pinned: set[int] = set()

    # --- what is there -------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Count the cells that a sequence holds, shared ones included."""
        tail = self._tails.get(seq)
        return tail.end if tail else 0

    def unique(self, seq: int) -> int:
        """Count the cells that only this sequence holds: those that dropping it frees."""
        return sum(len(span.tokens) for span in self._own(seq))

    def unpinned(self) -> list[int]:
        """List the sequences that hold cells and are not pinned."""
        return [seq for seq in self._tails if seq not in self._pinned]

    def tokens(self, seq: int) -> array[int]:
        """Return all tokens that a sequence holds."""
        return array(TYPECODE, [token for span in self._path(seq) for token in span.tokens])

    def spans(self) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield (start, end, owners) of each run of cells that the same sequences hold, each sequence's in order."""
        return ((span.start, span.end, frozenset(span.owners)) for span in self._root.below())

    @property
    def n_spans(self) -> int:
        """The number of spans: the work of a match or an eviction grows with it."""
        return sum(1 for _ in self._root.below())

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return (n, seq): the longest prefix of `tokens` that any one sequence holds, and that sequence; or (0, -1).

        Among sequences that hold it, an unpinned one is preferred, then the one with the least beyond it: it can be
        continued in place. Changes nothing; pin the sequence before making room, or `evict` may take it.
        """
        wanted = _array(tokens)
        as_bytes = wanted.tobytes()
        longest, found, left = 0, [self._root], [self._root]
        while left:
            for child in self._next(left.pop(), wanted):
                whole = as_bytes.startswith(child.tokens, WIDTH * child.start)
                n = child.end if whole else child.start + _n_common(child.tokens, wanted, child.start)
                if n > longest:
                    longest, found = n, []
                if n == longest:
                    found.append(child)
                if whole:
                    left.append(child)
        return longest, max((seq for span in found for seq in span.owners), key=self._freedom, default=-1)

    def _next(self, span: _Span, wanted: array[int]) -> Sequence[_Span]:
        """Return the children of a span that begin with the token wanted after it."""
        return span.children.get(wanted[span.end], ()) if span.end < len(wanted) else ()

    def _freedom(self, seq: int) -> tuple[bool, int]:
        """Rank how well a sequence can be continued in place."""
        return seq not in self._pinned, -self._tails[seq].end

    # --- what was done -------------------------------------------------------------------------------------------

    def hold(self, seq: int, tokens: Sequence[int], now: float) -> None:
        """Record that `seq` holds just the cells of `tokens` at `now`, s; those of the common prefix are kept.

        Takes time in proportion to all the tokens, if little (some 30 ns each, 2 ns for an `array("i")`); `grow` is
        for what comes after. Raises OverflowError for a token that is no int32, and changes nothing then.
        """
        wanted = _array(tokens)
        as_bytes = wanted.tobytes()
        same = 0
        for span in self._path(seq):
            if as_bytes.startswith(span.tokens, WIDTH * span.start):
                same = span.end
                continue
            same += _n_common(span.tokens, wanted, span.start)
            break
        self._cut(seq, same)
        self._grow(seq, wanted[same:], now)

    def grow(self, seq: int, tokens: Sequence[int], now: float) -> None:
        """Record that `seq` got the cells of `tokens` after those it holds, in O(len(tokens)): call it for each token.

        Raises OverflowError for a token that is no int32, and changes nothing then.
        """
        self._grow(seq, _array(tokens), now)

    def share(self, src: int, dst: int, n: int, now: float) -> None:
        """Record that `dst`, empty before, shares the first `n` cells of `src`: a use of them at `now`, s.

        Raises ValueError if `dst` holds something or `src` holds less, and changes nothing then.
        """
        if dst in self._tails or not 0 <= n <= self.length(src):
            message = f"sequence {dst} cannot get {n} cells of sequence {src}, which holds {self.length(src)}"
            raise ValueError(message)
        if n:
            self.used(src, now, n)
            tail = self._tails[dst] = self._span_to(src, n)
            for span in _upwards(tail):
                span.owners.add(dst)

    def drop(self, seq: int, from_pos: int = 0) -> None:
        """Record that `seq` no longer holds the cells from position `from_pos` on, if it ever did.

        Raises ValueError for a negative position: llama.cpp means another thing by it.
        """
        if from_pos < 0:
            raise ValueError("positions begin at 0")
        self._cut(seq, from_pos)

    def pin(self, seq: int) -> None:
        """Protect all that `seq` holds and will hold from eviction: a running answer's sequence."""
        self._pinned.add(seq)

    def unpin(self, seq: int) -> None:
        """Undo `pin`; nothing happens if it was not pinned."""
        self._pinned.discard(seq)

    def used(self, seq: int, now: float, n: int | None = None) -> None:
        """Record that a request used the first `n` cells of `seq`, or all of them, at `now`, s."""
        self._advance(now)
        n = self.length(seq) if n is None else min(n, self.length(seq))
        if n > 0:
            for span in _upwards(self._span_to(seq, n)):
                span.hits, span.at = self._hits(span) + 1, self._now
            self._join_along(seq)

    # --- what is to be given up ----------------------------------------------------------------------------------

    def evict(self, n_cells: int) -> list[tuple[int, int]]:
        """Take `n_cells` cells, or as many as can be, from unpinned sequences; return [(seq, position to cut it at)].

        The least expected saving per cell goes first, always at the end of a text, and no cell more than asked for. A
        text that several sequences hold is taken from all of them. The index no longer holds what it returns;
        `n_cells` is lower by the cells that this frees.
        """
        cuts: dict[int, int] = {}
        leaves = [
            (self._worth(span), i, span) for i, span in enumerate(self._root.below()) if self._can_shrink(span)
        ]  # fmt: skip
        heapify(leaves)
        n_pushed = self.n_spans  # breaks ties, so that spans need no order
        while n_cells > 0 and leaves:
            leaf = heappop(leaves)[-1]
            keep = max(0, len(leaf.tokens) - n_cells)
            n_cells -= len(leaf.tokens) - keep
            cuts.update(dict.fromkeys(leaf.owners, leaf.start + keep))
            parent = leaf.parent
            self._shrink(leaf, keep)
            if not keep and parent and self._can_shrink(parent):
                n_pushed += 1
                heappush(leaves, (self._worth(parent), n_pushed, parent))
        return list(cuts.items())

    def evict_seq(self) -> int | None:
        """Free the id of the unpinned sequence whose own cells are worth least; None if all are pinned or empty."""
        free = [seq for seq in self._tails if seq not in self._pinned]
        if not free:
            return None
        worst = min(free, key=lambda seq: sum(self._worth(span) * len(span.tokens) for span in self._own(seq)))
        self._cut(worst, 0)
        return worst

    def _can_shrink(self, span: _Span) -> bool:
        return bool(span.owners) and not span.children and span.owners.isdisjoint(self._pinned)

    def _shrink(self, leaf: _Span, keep: int) -> None:
        """Take all but the first `keep` cells of a leaf from all of its owners."""
        if not keep:
            for seq in list(leaf.owners):
                self._leave(seq, leaf)
            return
        self.n_cells -= len(leaf.tokens) - keep
        del leaf.tokens[keep:]

    def _worth(self, span: _Span) -> float:
        """Return the expected saving of a cell of this span, in times to compute a first token."""
        chance: float = 1 - 2 ** -self._hits(span)
        return chance * (1 + (span.start + span.end) / 2 / DEEPER)

    # --- the tree ------------------------------------------------------------------------------------------------

    def _path(self, seq: int) -> Iterator[_Span]:
        """Return the spans of a sequence, from its first cell on."""
        tail = self._tails.get(seq)
        return reversed(list(_upwards(tail))) if tail else iter(())

    def _own(self, seq: int) -> Iterator[_Span]:
        """Yield the spans that only this sequence owns, from its last cell back."""
        tail = self._tails.get(seq)
        return (span for span in _upwards(tail) if len(span.owners) == 1) if tail else iter(())

    def _grow(self, seq: int, tokens: array[int], now: float) -> None:
        self._advance(now)
        if not tokens:
            return
        tail = self._tails.get(seq, self._root)
        self.n_cells += len(tokens)
        if len(tail.owners) == 1:
            # New cells are as recent as this; and a text that was used before will be used with its new end.
            tail.tokens += tokens
            tail.hits, tail.at = max(1.0, self._hits(tail)), self._now
            return
        span = self._tails[seq] = _Span(tail.end, tokens[:], {seq}, tail, 1.0, self._now)
        tail.attach(span)

    def _cut(self, seq: int, n: int) -> None:
        """Leave a sequence its first `n` cells."""
        if n >= self.length(seq):
            return
        for span in list(_upwards(self._tails[seq])):
            if span.start >= n:
                self._leave(seq, span)
            elif span.end > n and len(span.owners) == 1:
                self._shrink(span, n - span.start)
            elif span.end > n:
                self._split(span, n)
                self._leave(seq, span)

    def _leave(self, seq: int, span: _Span) -> None:
        """Take the last span of a sequence from it; cells without an owner are free."""
        parent = _parent(span)
        span.owners.discard(seq)
        if parent is self._root:
            del self._tails[seq]
        else:
            self._tails[seq] = parent
        if not span.owners:
            self.n_cells -= len(span.tokens)
            parent.detach(span)

    def _split(self, span: _Span, at: int) -> _Span:
        """Make the cells of a span before position `at` a span of their own, and return it; `span` keeps the rest."""
        parent, n = _parent(span), at - span.start
        parent.detach(span)
        head = _Span(span.start, span.tokens[:n], set(span.owners), parent, span.hits, span.at)
        parent.attach(head)
        del span.tokens[:n]
        span.start = at
        head.attach(span)
        return head

    def _span_to(self, seq: int, n: int) -> _Span:
        """Return the span of a sequence that ends at its first `n` > 0 cells; split one if there is none."""
        span = next(span for span in self._path(seq) if span.end >= n)
        return self._split(span, n) if span.end > n else span

    def _join_along(self, seq: int) -> None:
        """Undo splits whose reason is gone, so that the tree stays small however long and often a text is used."""
        for span in list(self._path(seq)):
            # The owners of a child are among those of its parent: with as many they are the same, and it is alone.
            child = next((c for twins in span.children.values() for c in twins), None)
            if child and len(child.owners) == len(span.owners) and self._alike(span, child):
                self._join(span, child)

    def _alike(self, a: _Span, b: _Span) -> bool:
        low, high = sorted((self._hits(a) + FAINT, self._hits(b) + FAINT))
        return low >= SIMILAR * high

    def _join(self, head: _Span, tail: _Span) -> None:
        """Put the cells of `head` before those of its only child; sequences end in the child already."""
        parent, n_head = _parent(head), len(head.tokens)
        share = n_head / (n_head + len(tail.tokens))
        tail.hits, tail.at = share * self._hits(head) + (1 - share) * self._hits(tail), self._now
        parent.detach(head)
        tail.tokens, tail.start = head.tokens + tail.tokens, head.start
        parent.attach(tail)

    # --- time ----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)

    def _hits(self, span: _Span) -> float:
        hits: float = span.hits * 2 ** ((span.at - self._now) / self._half_life_s)
        return hits


def _upwards(span: _Span) -> Iterator[_Span]:
    """Yield a span and those before it, without the root."""
    while span.parent:
        yield span
        span = span.parent


def _parent(span: _Span) -> _Span:
    assert span.parent is not None, "the root has no cells"
    return span.parent


def _array(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) and tokens.typecode == TYPECODE else array(TYPECODE, tokens)


def _n_common(held: array[int], wanted: array[int], at: int) -> int:
    """Count how many leading tokens of `held` are those of `wanted` from `at` on."""
    n = min(len(held), len(wanted) - at)
    if n <= 0:
        return 0
    differ = np.frombuffer(held, np.intc)[:n] != np.frombuffer(wanted, np.intc)[at : at + n]
    first = int(differ.argmax())
    return first if differ[first] else n
