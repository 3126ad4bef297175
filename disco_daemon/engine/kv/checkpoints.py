"""Copies of what a recurrent layer carries through a text, taken at some of its tokens: from there it can go on. Pure.

Keys and values have a cell for each token, and can be cut behind any of them. A recurrent state is that of all tokens
read so far, and only goes on; so does a window, where the cells behind it are used for others. So it is copied now and
then, and a text is used again up to the nearest copy. Copies are taken

- at the end of each answer, from which the next turn goes on;
- near the end of each prompt: for an answer that is made again, and for templates that take thoughts out of answers;
- where a prompt parts from a text that was read before it: the next that begins so goes on from just there, as with the
  branches of Marconi (Pan et al. 2025, arXiv 2411.19379);
- every EVERY tokens of a long prompt, and ever farther apart behind many, where there is room for more than FEW.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..llama.state import State
from .sorted_texts import text_key

EVERY, SHARE = 256, 8  # tokens of a prompt between two copies, or an eighth of what is read where that is more
FEW = 8  # copies: with room for fewer of the largest, none is taken within a prompt, where others would go for it
LAST_CHUNK = 16  # tokens of a prompt behind its last copy: more than a template puts between a question and its answer


@dataclass(slots=True)
class _Reading:
    """How a prompt is read: its latest copy, and where it parts from a text that is known, 0 if nowhere; positions."""

    copied: int
    fork: int


class Checkpoints:
    """Copied states, each under a hash of the text that it has read; the one used last at the end.

    Bounded by `max_bytes`: those unused for longest go first. For the thread that computes; another one that asks needs
    a lock.
    """

    def __init__(self, max_bytes: int, *, every: int = EVERY, last: int = LAST_CHUNK) -> None:
        self.n_bytes = 0
        self._max_bytes = max_bytes
        self._largest = 0  # bytes of a state
        self._every, self._last = every, last
        self._least = 2 * last  # tokens of an iteration: with fewer, a prompt is not divided for the sake of a copy
        self._kept: OrderedDict[bytes, tuple[int, State]] = OrderedDict()  # tokens read, and the state
        self._lengths: Counter[int] = Counter()
        self._reading: dict[int, _Reading] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # --- what is kept --------------------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], state: State) -> None:
        """Keep the state of just these tokens; one for which there is no room at all costs none of the others."""
        if len(state) > self._max_bytes:
            return
        key = blake2b(text_key(tokens)).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = len(tokens), state
        self._lengths[len(tokens)] += 1
        self.n_bytes += len(state)
        self._largest = max(self._largest, len(state))
        while self.n_bytes > self._max_bytes:
            n, old = self._kept.popitem(last=False)[1]
            self.n_bytes -= len(old)
            self._lengths[n] -= 1
            if not self._lengths[n]:
                del self._lengths[n]

    def reach(self, tokens: Sequence[int], n: int) -> int:
        """Count how many of the first `n` tokens the longest text has whose state is kept."""
        return max((length for length, _ in self._found(tokens, n)), default=0)

    def best(self, tokens: Sequence[int], n: int) -> tuple[int, State]:
        """Return what `reach` does, and that state, which is used now; it is empty where there is none."""
        length, key = max(self._found(tokens, n), default=(0, b""))
        if not length:
            return 0, b""
        self._kept.move_to_end(key)
        return length, self._kept[key][1]

    def along(self, tokens: Sequence[int], most: int) -> list[tuple[int, State]]:
        """Return how long the longest texts are that these tokens begin with, and their states, the longest first."""
        found = sorted(self._found(tokens, len(tokens)), reverse=True)
        return [self._kept[key] for _, key in found[:most]]

    def _found(self, tokens: Sequence[int], n: int) -> Iterator[tuple[int, bytes]]:
        """Yield length and key of the kept texts that the first `n` tokens begin with; none twice."""
        text, hashed, at = text_key(tokens[:n]), blake2b(), 0
        for length in sorted(length for length in self._lengths if length <= n):
            hashed.update(text[4 * at : 4 * length])
            at = length
            if (key := hashed.digest()) in self._kept:
                yield length, key

    # --- when a copy is due --------------------------------------------------------------------------------------

    def begin(self, seq: int, n: int, n_known: int = 0) -> None:
        """Note that a sequence goes on from the state at `n`, and that another one has its first `n_known` tokens."""
        self._reading[seq] = _Reading(n, n_known if n_known - n >= self._least else 0)

    def chunk_end(self, seq: int, start: int, end: int, n_tokens: int) -> int:
        """Return where a chunk of a prompt of `n_tokens` ends that begins at `start`, at `end` or before it.

        A state can be copied there only, so a chunk ends at a fork, and not within the prompt's last tokens.
        """
        if start < (fork := self._reading[seq].fork) < end:
            return fork
        if n_tokens - start > self._least:
            return min(end, n_tokens - self._last)
        return end

    def is_due(self, seq: int, n: int, n_left: int) -> bool:
        """Whether the state of a sequence is copied that has read `n` tokens of a prompt, with `n_left` to come."""
        reading = self._reading[seq]
        gain = n - reading.copied
        ends = gain >= self._last and n_left <= self._least
        is_far = gain >= max(self._every, n // SHARE) and FEW * self._largest <= self._max_bytes
        due = ends or is_far or n == reading.fork
        if due:
            reading.copied = n
        return due
