"""What moving, putting away and bringing back of cells costs for each token, however full the KV cache is.

Random chats, several at a time, some that go on with what was said and some that begin alike, fill the cells many times
over. What is copied stays within a bound by token written, on a GPU (`skip_s` is 0) and in a
fleet, where a swap is dear; and so does the number of moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.kv.cells import BLOCK, Cells
from tests.unit.engine.test_batch import N_SEQS, FakeLlama

N_CELLS = 256
MOST_RUNNING = N_CELLS // 2  # cells of answers at a time
MOST_COPIED = (
    16  # cells for each token written: two ways of seven eighths, for an eighth that is free then, and two more
)
CHEAP, DEAR = 1e-9, 1.0  # s, for a step of the clock


@dataclass
class CountingLlama(FakeLlama):
    """Counts the cells that are copied out of the KV cache or into it, and those that are written."""

    n_copied: int = 0
    n_written: int = 0

    def save(self, seq: int) -> bytes:
        self.n_copied += len(self.cells[seq])
        return bytes(self.tokens(seq))

    def restore(self, seq: int, data: bytes) -> bool:
        self.n_copied += len(data)
        self.n_written += len(data)  # as much as computing it anew
        return FakeLlama.restore(self, seq, data)

    def part(self, seq: int, start: int, end: int) -> bytes:
        self.n_copied += end - start
        return bytes(self.tokens(seq)[start:end])

    def put(self, data: bytes, owners: Iterable[int], start: int, end: int) -> None:
        self.n_copied += end - start
        FakeLlama.put(self, data, owners, start, end)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> int:
        rc = FakeLlama.decode(self, rows)
        self.n_written += len(rows) if rc == 0 else 0
        return rc


class Chats:
    """Chats over the cells of one engine, as a batcher has them."""

    def __init__(self, skip_s: float, step_s: float, spare_bytes: int) -> None:
        self.llama = CountingLlama(n_ctx=N_CELLS, n_cells=N_CELLS, skip_s=skip_s)
        ticks = iter(range(10**9))
        clock = lambda: step_s * next(ticks)  # noqa: E731
        self.cells = Cells(cast(Any, self.llama), N_SEQS, N_CELLS, clock, spare_bytes=spare_bytes)
        self.running: dict[int, tuple[list[int], int]] = {}  # what each has, and how many tokens are to come
        self.said: list[list[int]] = []

    def begin(self, prompt: list[int], n_answer: int) -> None:
        """Take a sequence for a prompt, unless the answers at a time would be too many."""
        n_all = sum(len(text) + n for text, n in self.running.values())
        if len(self.running) == N_SEQS - 1 or n_all + len(prompt) + n_answer > MOST_RUNNING:
            self.finish()
            return
        taken = self.cells.take(prompt)
        assert taken is not None, "half of the cells are free, or of cached prefixes"
        seq, n = taken
        self._compute([(seq, prompt[n:])])
        self.running[seq] = prompt, n_answer

    def step(self) -> None:
        """Compute a token of each answer."""
        for seq in [seq for seq, (_, n) in self.running.items() if n == 0]:
            self.said.append(self.running.pop(seq)[0])
            self.cells.leave(seq)
        token = 1 + self.llama.n_written % 200
        self._compute([(seq, [token]) for seq in self.running])
        self.running = {seq: ([*text, token], n - 1) for seq, (text, n) in self.running.items()}

    def finish(self) -> None:
        while self.running:
            self.step()

    def _compute(self, more: list[tuple[int, list[int]]]) -> None:
        rows = [
            (token, self.cells.n_of(seq) + i, seq, False) for seq, tokens in more for i, token in enumerate(tokens)
        ]  # fmt: skip
        if not rows:
            return
        assert self.cells.promise((seq, self.cells.n_of(seq) + len(tokens)) for seq, tokens in more)
        self.cells.advance(len(rows))
        assert self.llama.decode(rows) == 0
        for seq, tokens in more:
            self.cells.grow(seq, tokens)


CHATS = st.lists(
    st.tuples(
        st.integers(0, 40),  # how many chats ago the one was that it goes on with or begins like; 0 = a new one
        st.integers(1, 60),  # tokens that are new in its prompt
        st.integers(0, 40),  # tokens of its answer
        st.integers(0, 8),  # steps until the next one begins
        st.booleans(),  # whether it begins like the other one only
    ),
    min_size=40,
    max_size=120,
)


@pytest.mark.parametrize(
    ("skip_s", "step_s"), [(0.0, CHEAP), (0.0, DEAR), (1e-6, DEAR)], ids=["GPU", "GPU behind a slow bus", "fleet"]
)
@pytest.mark.parametrize("spare_bytes", [0, N_CELLS, 100 * N_CELLS])
@settings(max_examples=10, deadline=None)
@given(chats=CHATS)
def test_what_is_copied_for_a_token_is_bounded_however_full_the_cells_are(
    skip_s: float, step_s: float, spare_bytes: int, chats: list[tuple[int, int, int, int, bool]]
) -> None:
    bench = Chats(skip_s, step_s, spare_bytes)
    for number, (ago, n_new, n_answer, n_steps, is_branch) in enumerate(chats):
        before = bench.said[-ago] if 0 < ago <= len(bench.said) else []
        before = before[: len(before) // 2 if is_branch else N_CELLS // 4]
        bench.begin([*before, *((7 * number + i) % 199 + 1 for i in range(n_new))], n_answer)
        for _ in range(n_steps):
            bench.step()
    bench.finish()
    assert bench.llama.n_copied <= MOST_COPIED * bench.llama.n_written + N_CELLS
    assert bench.cells.n_moves <= bench.llama.n_written // (N_CELLS // BLOCK // 2) + 2, (
        "two in a row make room for an eighth"
    )
