"""The KV cache's cells and sequence ids: which sequences have them, what is kept for later, and how room is made.

A sequence is *taken* for a running answer and *left* when that is over: its cells stay as a cached prefix, until
the room is needed. A new answer shares the cells of the longest prefix that any sequence holds.

Cells are used one after the other and never twice, until none is left; then all that is still wanted is *moved* to the
front. So each sequence has its cells in the order of its tokens, whatever became of others meanwhile, and attention
adds up in the same order as for an answer that is alone: it is the same answer, bit for bit.

Where a model is not `divisible`, some layers carry a state through a text: recurrent ones, or those with a window that
have cells for that alone. Only running answers have one in llama.cpp.
What is cached is cells and `checkpoints`: a new answer goes on from the latest state kept of what it begins with.

It is longer than other files, since taking, swapping and making room change the same few numbers.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from ...scheduler.prefix import PrefixIndex
from ..llama.model import Llama
from ..llama.state import State
from ..llama.windows import Piece, joined, parted
from .checkpoints import Checkpoints
from .holder import Held, Holder
from .host_cache import HostCache, Saved
from .spill import Spill

MAX_SAVED_BYTES = 512 * 2**20  # of answers swapped out, and of cached prefixes in main memory, if there is room
FIRST_SWAP_S_PER_BYTE = 1e-10  # out and in again; measured from the first swap on
NEWEST = 0.3  # weight of the newest swap
LEAST_BROUGHT = 32  # tokens that must be saved before a text is brought down from the host cache
MOST_ON_DISK = 4  # states of a text: at its end, and where it is gone on with if it is edited or made again
BLOCK = 8  # the share of all cells that is evicted at once: a move copies the rest, seven for each that is free then
ENOUGH = 2  # the share that a move is to free by garbage alone; else cached prefixes are put away before the next one


class Cells:
    """All sequence ids and cells of one context.

    Owned by the thread that computes; `count_cached` may be called from any. `_taken` has the sequences of answers, and
    how many cells each was promised, `_free` the ids without cells; all others are cached prefixes. Those in `_private`
    are of clients that do not want them on disk.
    """

    def __init__(
        self,
        llama: Llama,
        n_seqs: int,
        n_cells: int,
        clock: Callable[[], float] = time.perf_counter,
        spare_bytes: int = MAX_SAVED_BYTES,
        spill: Spill | None = None,
    ) -> None:
        """`spare_bytes` of main memory may hold answers that are swapped out, and as many cached prefixes.

        With `spill`, cached prefixes go to disk when there is no room for them, or when they have long been unused.
        """
        self._spare_bytes = min(spare_bytes, MAX_SAVED_BYTES)
        self.divisible = llama.divisible  # whether what is computed of a text can be cut behind any token
        self.retracts = llama.retracts  # whether what the latest decode has added can be taken back
        self._copies = not llama.divisible and llama.resumes
        self.n_cells = n_cells
        self.n_seqs = n_seqs
        self.saved_bytes = 0
        self.swap_s_per_byte = FIRST_SWAP_S_PER_BYTE
        self.n_reused = 0  # tokens that were found computed, since the start
        self.n_moves, self.move_s = 0, 0.0
        self.before_move: Callable[[], object] = lambda: None  # brings back what is being computed elsewhere
        self._llama = llama
        self._clock = clock
        self._index = PrefixIndex()
        self.spans = self._index.spans  # the runs of cells that the same sequences hold; for whoever copies them
        self._lock = threading.RLock()
        self._free = set(range(n_seqs))
        self._taken: dict[int, int] = {}
        self._head = 0  # cells used since the last move
        self.spill = spill
        self._host_cache = HostCache(self._spare_bytes, self._put_on_disk if spill is not None else None)
        self.checkpoints = Checkpoints(spare_bytes)
        self._private: set[int] = set()
        self._wasted_s = 0.0  # time lost so far on cells that were in the way

    @property
    def n_used(self) -> int:
        """The number of cells in use, those of cached prefixes included; shared cells count once."""
        return self._index.n_cells

    @property
    def n_free(self) -> int:
        """The number of cells that are neither in use nor promised to a sequence."""
        promised = sum(max(0, n - self._index.length(seq)) for seq, n in self._taken.items())
        return self.n_cells - self.n_used - promised

    @property
    def n_taken(self) -> int:
        """The number of sequences that are taken."""
        return len(self._taken)

    def count_cached(self, tokens: Sequence[int]) -> int:
        """Count how many of these tokens would not have to be computed."""
        with self._lock:
            n = self._usable(tokens, max(self._index.match(tokens)[0], self._host_cache.match(tokens)))
        found = self.spill.find(tokens, n) if self.spill is not None else None
        if found is None or not (self.divisible or found.n == len(found.tokens)):
            return n  # which states are in the file is seen when it is read; that of its end is
        return found.n

    def _usable(self, tokens: Sequence[int], n: int) -> int:
        """Count with how many of `n` tokens that have cells a text can begin. Under the lock."""
        return n if self.divisible else self.checkpoints.reach(tokens, n)

    # --- taking and leaving --------------------------------------------------------------------------------------

    def take(self, tokens: Sequence[int], *, private: bool = False) -> tuple[int, int] | None:
        """Take a sequence for these tokens; return it and how many it has already, or None without room for all.

        The last token is never among them: its logits are wanted. A `private` text is never written to disk.
        """
        if self.n_taken == self.n_seqs:
            return None
        self._bring(tokens[:-1])
        with self._lock:
            n_known, source = self._index.match(tokens[:-1])
            n, state = (n_known, b"") if self.divisible else self.checkpoints.best(tokens, n_known)
            if n and source not in self._taken and self._index.length(source) == n:
                seq, n = self._continue(source, n)
            else:
                seq, n = self._branch(source, n)
            self._index.pin(seq)
        if not self.divisible:
            n = self._carry(seq, n, state)
            self.checkpoints.begin(seq, n, n_known)
        self._conceal(seq, private)
        self._taken[seq] = n
        if not self.promise([(seq, len(tokens))]):
            self.leave(seq)
            return None
        self.n_reused += n
        return seq, n

    def _bring(self, tokens: Sequence[int]) -> None:
        """Bring a text back from host cache or disk, as a cached prefix, if it has many more of these tokens."""
        with self._lock:
            n, n_kept = self._index.match(tokens)[0], self._host_cache.match(tokens)
            n, n_kept = self._usable(tokens, n), self._usable(tokens, n_kept)
        if self.spill is not None and self._read(self.spill, tokens, max(n, n_kept)):
            return
        if n_kept < n + LEAST_BROUGHT:
            return
        with self._lock:
            kept, data, private = self._host_cache.take(tokens)
        if self.make_room(len(kept)):
            self._put_back(kept, data, private=private)
            return
        with self._lock:
            self._host_cache.put(kept, data, private=private)

    def _read(self, spill: Spill, tokens: Sequence[int], have: int) -> bool:
        """Bring a text back from disk if it has enough more than `have` of these tokens; return whether one came."""
        found = spill.find(tokens, have)
        if found is None or not self.make_room(len(found.tokens)):
            return False
        data: State | None = spill.read(found)
        if data is not None and self._copies:
            data = self._without_states(found.tokens, data)
        if data is not None and self._put_back(found.tokens, data, private=False):
            return True
        spill.remove(found.key)
        return False

    def _put_back(self, kept: Sequence[int], data: State, *, private: bool) -> bool:
        """Make a cached prefix of a saved text, if there is an id for it; return False if llama.cpp refuses it."""
        self.advance(len(kept))
        with self._lock:
            seq = self._id()
            if seq is None:
                return True
            if not self._llama.restore(seq, data):
                self._llama.forget(seq)
                self._free.add(seq)
                return False
            if self._copies:
                self._llama.drop_state(seq)
            self._index.hold(seq, kept, self._clock())
        self._head += len(kept)
        self._conceal(seq, private)
        return True

    def _continue(self, source: int, n: int) -> tuple[int, int]:
        """Hand a cached prefix to the new answer, which goes on with its first `n` cells; return it and how many."""
        self._index.used(source, self._clock(), n)
        self._cut_cells(held := Held(source, n), n)
        return source, held.n_past

    def _branch(self, source: int, n: int) -> tuple[int, int]:
        """Make a sequence that shares the first `n` cells of another, which must not be evicted for its id."""
        kept = n > 0 and source not in self._taken
        if kept:
            self._index.pin(source)
        seq = self._id()
        if kept:
            self._index.unpin(source)
        if seq is None:  # no other sequence can be evicted
            return self._continue(source, n)
        if n:
            self._index.share(source, seq, n, self._clock())
            self._llama.share(source, seq, n)
        return seq, n

    def promise(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Promise sequences cells, each as (sequence, cells in all); return False if there is no room for all."""
        self._taken.update(wanted)
        return self.make_room(0)

    def grow(self, seq: int, tokens: Sequence[int]) -> None:
        """Record that a sequence has computed these tokens after those it had."""
        self._head += len(tokens)
        with self._lock:
            self._index.grow(seq, tokens, self._clock())

    def cut(self, holder: Holder, n: int) -> None:
        """Forget what an answer's sequence has beyond its first `n` tokens, and set its `n_past`.

        That is less where a state is to be carried on, and none is kept there.
        """
        if n >= self.n_of(holder.slot) or self._llama.can_cut(holder.slot, n):
            self._cut_cells(holder, n)
        else:
            self.go_back(holder, n)

    def go_back(self, holder: Holder, n: int) -> None:
        """Go back to the latest state kept of a sequence's first `n` tokens; the one that it carries is of no use."""
        seq = holder.slot
        with self._lock:
            n, state = self.checkpoints.best(self._index.tokens(seq), n)
        if n:
            self._llama.drop_state(seq)
        self._cut_cells(holder, n)
        holder.n_past = self._carry(seq, n, state)
        self.checkpoints.begin(seq, holder.n_past)

    def _carry(self, seq: int, n: int, state: State) -> int:
        """Let a sequence of `n` tokens carry this state; return 0 if llama.cpp refuses it: then it has nothing."""
        if n and not self._llama.set_state(seq, state):
            self._llama.forget(seq)
            with self._lock:
                self._index.drop(seq)
            return 0
        return n

    def pass_by(self, seq: int, n_left: int) -> None:
        """Copy the state of a sequence that has read a prompt but for `n_left` tokens, if others may go on there."""
        if n_left > 0 and self._copies and self.checkpoints.is_due(seq, self.n_of(seq), n_left):
            self._copy_state(seq)

    def _copy_state(self, seq: int) -> None:
        with self._lock:
            tokens = self._index.tokens(seq)
            if self.checkpoints.reach(tokens, len(tokens)) < len(tokens):
                self.checkpoints.put(tokens, self._llama.state(seq))

    def _cut_cells(self, holder: Holder, n: int) -> None:
        """Leave a sequence its first `n` cells, and set `n_past`: 0 where it carries a state, which cannot be cut."""
        holder.n_past = n
        self._llama.truncate(holder.slot, n, lambda: setattr(holder, "n_past", 0))
        with self._lock:
            self._index.drop(holder.slot, holder.n_past)

    def leave(self, seq: int) -> None:
        """Give a sequence back when its answer is over; what was computed stays as a cached prefix."""
        if not ((self.divisible or self._copies) and self.n_of(seq)):
            self.free(seq)
            return
        if self._copies:
            self._copy_state(seq)
            self._llama.drop_state(seq)
        del self._taken[seq]
        with self._lock:
            self._index.unpin(seq)
        if self.spill is not None and seq not in self._private:
            self.spill.note_unused(self._index.tokens(seq).tobytes())

    def _conceal(self, seq: int, private: bool) -> None:
        (self._private.add if private else self._private.discard)(seq)

    def free(self, seq: int) -> None:
        """Give a sequence back, and keep nothing of it."""
        self._llama.forget(seq)
        with self._lock:
            self._index.unpin(seq)
            self._index.drop(seq)
        del self._taken[seq]
        self._free.add(seq)

    # --- swapping ------------------------------------------------------------------------------------------------

    def swap_out(self, seq: int, recompute_s: float) -> Saved | None:
        """Free a sequence; return what restores it, or None if to compute it again (`recompute_s`) is cheaper.

        Then it stays as a cached prefix where it can go on from a copy of its state only.
        """
        n_past, saved = self.n_of(seq), None
        began = self._clock()
        if self.saved_bytes < self._spare_bytes and n_past:
            data = self._llama.save(seq) if self._pays(n_past, recompute_s) else b""
            saved = Saved(data, n_past) if data else None
        if saved is not None:
            self.saved_bytes += len(saved.data)
            self._observe_swap(2 * (self._clock() - began), len(saved.data))
        if saved is None and self._copies:
            self.leave(seq)  # it goes on from a copy, if its cells are still there
        else:
            self.free(seq)
        return saved

    def swap_in(self, saved: Saved, tokens: Sequence[int], *, private: bool = False) -> int | None:
        """Restore a sequence, which held the first of `tokens`; return its id, or None if there is no room.

        Where llama.cpp cannot restore it, the sequence is empty.
        """
        if self.n_taken == self.n_seqs or not self.make_room(saved.n_past):
            return None
        with self._lock:
            seq = self._id()
        assert seq is not None, "fewer are taken than there are"
        self.advance(saved.n_past)
        began = self._clock()
        restored = self._llama.restore(seq, saved.data)
        self._head += saved.n_past
        self._taken[seq] = saved.n_past
        self.checkpoints.begin(seq, saved.n_past)
        self._conceal(seq, private)
        with self._lock:
            self._index.pin(seq)
            if restored:
                self._index.hold(seq, tokens[: saved.n_past], self._clock())
                self._observe_swap(2 * (self._clock() - began), len(saved.data))
            else:
                self._llama.forget(seq)
        self.forget(saved)
        return seq

    def forget(self, saved: Saved) -> None:
        """Drop what was swapped out."""
        self.saved_bytes -= len(saved.data)

    def n_of(self, seq: int) -> int:
        """Return the number of cells of a sequence that is taken."""
        with self._lock:
            return self._index.length(seq)

    def swap_s(self, saved: Saved) -> float:
        """Predict how long swapping it in takes, s."""
        return self.swap_s_per_byte * len(saved.data) / 2

    def _pays(self, n_past: int, recompute_s: float) -> bool:
        return self.swap_s_per_byte * n_past * self._llama.bytes_per_token < recompute_s

    def _observe_swap(self, took_s: float, n_bytes: int) -> None:
        """Record how long swapping `n_bytes` out and in took."""
        if n_bytes:
            self.swap_s_per_byte += NEWEST * (took_s / n_bytes - self.swap_s_per_byte)

    # --- room ----------------------------------------------------------------------------------------------------

    def make_room(self, n: int) -> bool:
        """Evict cached prefixes until `n` cells are free; return False if even all of them are not enough."""
        missing = n - self.n_free
        if missing <= 0:
            return True
        self._evict(max(missing, self.n_cells // BLOCK))
        return self.n_free >= n

    def advance(self, n: int) -> None:
        """Make sure of `n` unused cells at the end; call it before a decode of `n` rows.

        Each row passes by all cells in use, its own or not. When as much time has been lost on cells of no
        running answer as it takes to put them away, that is done: rent or buy, at most twice the best possible cost.
        """
        self._wasted_s += n * self._llama.skip_s * (self._head - self._n_running)
        if self._wasted_s > self.swap_s_per_byte * self._llama.bytes_per_token * self.n_used:
            self.tidy()
        if self._head + n > self.n_cells:
            self._reclaim()

    def _reclaim(self) -> None:
        """Free cells at the end, enough of them that it does not have to be done again soon.

        Where garbage is half of all cells a move alone will do. Else it would be due again before long, and all cached
        prefixes would be copied each time: they are put away once, if there is room in the host cache, or the least
        valuable ones are evicted. So whatever is copied was paid for by as many tokens that were written.
        """
        if self.n_cells - self.n_used < self.n_cells // ENOUGH and self._can_put_away():
            self.tidy()
            return
        missing = self.n_cells // BLOCK - (self.n_cells - self.n_used)
        if missing > 0:
            self._evict(missing)
        if self.n_garbage:
            self.move()

    def _can_put_away(self) -> bool:
        """Whether the host cache has room for all cached prefixes, of which each is copied with what others share."""
        n = sum(map(self._index.length, self._index.unpinned()))
        return 0 < n <= self.n_cells and n * self._llama.bytes_per_token <= self._spare_bytes

    def tidy(self) -> None:
        """Put cached prefixes into the host cache, and the cells of running answers to the front."""
        self.before_move()
        began, n_bytes = self._clock(), 0
        with self._lock:
            for seq in self._index.unpinned():
                data = self._llama.save(seq)
                n_bytes += len(data)
                self._host_cache.put(self._index.tokens(seq), data, private=seq in self._private)
                self._index.drop(seq)
                self._llama.forget(seq)
                self._free.add(seq)
        self._observe_swap(2 * (self._clock() - began), n_bytes)
        self.move()

    def move(self) -> None:
        """Put all cells that are wanted to the front, in the same order."""
        self.before_move()
        began = self._clock()
        n_bytes = self._llama.compact(self.spans())
        self._head, self._wasted_s = self.n_used, 0.0
        self.n_moves += 1
        took_s = self._clock() - began
        self.move_s += took_s
        self._observe_swap(took_s, n_bytes)

    @property
    def _n_running(self) -> int:
        """The number of cells of answers; shared ones count for each, which overestimates it."""
        return min(self._head, sum(map(self._index.length, self._taken)))

    @property
    def n_garbage(self) -> int:
        """The number of cells whose content is of no more use; the next move frees them."""
        return self._head - self.n_used

    def _evict(self, n: int) -> None:
        with self._lock:
            texts = self._cached_texts()
            evicted = self._index.evict(n)
            for seq, _ in evicted:
                self._keep_copy(seq, texts)
        for seq, from_pos in evicted:
            self._cut_cells(held := Held(seq, from_pos), from_pos)
            if held.n_past == 0:
                self._free.add(seq)

    def _id(self) -> int | None:
        """Return a free sequence id; without one, the least valuable cached prefix is evicted. Under the lock.

        Where states or windows are large there are few ids: then it goes into the host cache.
        """
        if self._free:
            return self._free.pop()
        texts = self._texts_of(self._index.unpinned()) if self._copies else self._cached_texts()
        seq = self._index.evict_seq()
        if seq is not None:
            self._keep_copy(seq, texts)
            self._llama.forget(seq)
        return seq

    # --- disk ----------------------------------------------------------------------------------------------------

    def leave_all(self) -> None:
        """Give all sequences back."""
        for seq in list(self._taken):
            self.leave(seq)

    def copy(self, key: bytes) -> State | None:
        """Copy just this text, given as its int32 tokens, from KV cache or host cache; None if gone. Takes some ms."""
        tokens = array("i", key)
        with self._lock:
            n, seq = self._index.match(tokens)
            is_here = n == len(tokens) == self._index.length(seq)
            data = self._llama.save(seq) if is_here else self._host_cache.get(key)
            return None if data is None else self._with_states(key, data)

    def _put_on_disk(self, key: bytes, data: State) -> None:
        whole = self._with_states(key, data)
        if self.spill is not None and whole is not None:
            self.spill.put(key, whole)

    def _with_states(self, key: bytes, data: State) -> State | None:
        """Return a text's cells with its latest states, where it has any; None if it is of no use without one."""
        if not self._copies:
            return data
        states = self.checkpoints.along(tokens := array("i", key), MOST_ON_DISK)
        pieces = [Piece(0, len(tokens), data), *(Piece(0, n, state) for n, state in states)]
        return joined(pieces) if states else None

    def _without_states(self, tokens: Sequence[int], whole: State) -> State | None:
        """Return the cells out of `_with_states`, and keep its states; None if it is not whole."""
        pieces = parted(whole)
        if not pieces:
            return None
        with self._lock:
            for state in pieces[1:]:
                self.checkpoints.put(tokens[: state.end], state.data)
        return pieces[0].data

    def _cached_texts(self) -> dict[int, bytes]:
        """Return the texts that can be evicted, by sequence, if evicted ones go to disk; else none. Under the lock."""
        if self.spill is None or not self.spill.active:
            return {}
        return self._texts_of(seq for seq in self._index.unpinned() if seq not in self._private)

    def _texts_of(self, seqs: Iterable[int]) -> dict[int, bytes]:
        return {seq: self._index.tokens(seq).tobytes() for seq in seqs}

    def _keep_copy(self, seq: int, texts: dict[int, bytes]) -> None:
        """Put a sequence that is being evicted into the host cache, which writes to the disk. Under the lock."""
        key = texts.get(seq, b"")
        if not key or (self.spill is not None and self.spill.has(key)):
            return
        tokens = array("i", key)
        if self._host_cache.match(tokens) < len(tokens):
            self._host_cache.put(tokens, self._llama.save(seq), private=seq in self._private)
