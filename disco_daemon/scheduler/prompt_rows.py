"""How many rows of a prompt an iteration takes beside running answers, and which of them go without a token. Pure.

What the readers have in hand *now* decides, anew for each iteration:

- A reader with seconds of text misses no token: the answer `rests`, and the iteration is the prompt's.
- A reader with less waits no longer than the stock lasts. One who has run dry reads half as fast at the worst
  (DRY_SHARE), or the prompt of somebody else would never end on a machine that is slower than they read.
- Clients without a pace, such as agents, have no stock. Of the time PROMPT_SHARE is the prompt's: it takes about
  1 / PROMPT_SHARE times as long as alone, and a silence is as long as 1 / (1 - PROMPT_SHARE) iterations without it.
  Where that is shorter than PATIENCE_S the prompt gets more.
"""

from __future__ import annotations

from collections.abc import Sequence

from .latency import IterationLatency

FEWEST = 16  # rows of a prompt, whoever waits; fewer cost hardly less
STEP = 4  # rows; llama.cpp's kernels take so many at a time
RICH_S = 2.0  # of text in hand after the iteration; such a reader's answer rests meanwhile
PATIENCE_S = 0.25  # how long a client without a pace is kept waiting for a chunk of another one's prompt, at least
PROMPT_SHARE = 0.875  # of an iteration's time, beside clients without a pace
DRY_SHARE = 0.5  # of an iteration's time, beside readers with nothing in hand


def rests(stock_s: float, prompt_s: float) -> bool:
    """Whether an answer gets no token while others' prompts are read, `prompt_s` of them, s."""
    return stock_s > RICH_S + prompt_s


def prompt_rows(
    latency: IterationLatency, stocks: Sequence[float | None], n_context: int, *, usual: int, most: int
) -> int:
    """Return how many rows of prompts go beside a token for each answer with `n_context` cells in all.

    `stocks` are what the answers' readers have in hand, s; None without a pace. It is at least FEWEST, at most `usual`,
    and up to `most` where the answers would otherwise take more than their share of the time.
    """
    if not stocks:
        return usual
    answers_s = latency.predict(len(stocks), 0, n_context)
    shared_s = answers_s / (1 - PROMPT_SHARE)
    limits = ((max(PATIENCE_S, shared_s) if s is None else max(s, answers_s / (1 - DRY_SHARE))) for s in stocks)
    row_s = max(latency.coefficients[2], 1e-9)
    cap = max(usual, min(most, (shared_s - answers_s) / row_s))
    rows = int(min(cap, (min(limits) - answers_s) / row_s))
    return max(FEWEST, rows - rows % STEP)
