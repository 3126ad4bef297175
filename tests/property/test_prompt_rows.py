"""A prompt beside running answers: it takes as much of an iteration as their readers leave it, whatever the machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.scheduler.prompt_rows import (
    DRY_SHARE,
    FEWEST,
    PATIENCE_S,
    PROMPT_SHARE,
    RICH_S,
    STEP,
    prompt_rows,
    rests,
)

USUAL, MOST = 128, 512
HAIR = 1e-9
# From an old laptop with a model of 7 billion weights to a fast machine with the default one.
machines = st.builds(
    lambda base, answer, row, cell: IterationLatency((base, answer, row, cell)),
    st.floats(1e-4, 0.3), st.floats(1e-4, 0.1), st.floats(1e-4, 0.05), st.floats(0, 1e-5),
)  # fmt: skip
stock_of = st.one_of(st.none(), st.floats(0, 60))
stocks_of = st.lists(stock_of, min_size=1, max_size=16)
contexts = st.integers(0, 16_000)


def rows_of(latency: IterationLatency, stocks: list[float | None], n_context: int = 0) -> int:
    return prompt_rows(latency, stocks, n_context, usual=USUAL, most=MOST)


@given(machines, stocks_of, contexts)
def test_nobody_waits_longer_than_the_rule_says(
    latency: IterationLatency, stocks: list[float | None], n_context: int
) -> None:
    rows, n = rows_of(latency, stocks, n_context), len(stocks)
    assert FEWEST <= rows <= MOST
    answers_s, took_s = latency.predict(n, 0, n_context), latency.predict(n, rows, n_context)
    for stock in stocks if rows > FEWEST else []:
        bound = max(PATIENCE_S, answers_s / (1 - PROMPT_SHARE)) if stock is None else stock
        assert took_s <= max(bound, answers_s / (1 - DRY_SHARE)) + HAIR


@given(machines, stocks_of, contexts, st.data())
def test_more_in_hand_never_means_less_of_a_prompt(
    latency: IterationLatency, stocks: list[float | None], n_context: int, data: st.DataObject
) -> None:
    richer = [s if s is None else s + data.draw(st.floats(0, 60)) for s in stocks]
    assert rows_of(latency, richer, n_context) >= rows_of(latency, stocks, n_context)


@given(machines, st.integers(1, 16), contexts)
def test_beside_agents_a_prompt_has_its_share_up_to_the_largest_chunk(
    latency: IterationLatency, n: int, n_context: int
) -> None:
    rows = rows_of(latency, [None] * n, n_context)
    answers_s, row_s = latency.predict(n, 0, n_context), latency.coefficients[2]
    # Rounded down to whole steps: what that takes away is no more than so many rows.
    assert rows > MOST - STEP or (rows + STEP) * row_s >= PROMPT_SHARE / (1 - PROMPT_SHARE) * answers_s * (1 - HAIR)


@given(machines, st.lists(st.floats(0, 60), min_size=1, max_size=16), contexts)
def test_beside_readers_who_have_text_a_chunk_is_no_larger_than_usual_unless_agents_would_take_more(
    latency: IterationLatency, stocks: list[float], n_context: int
) -> None:
    answers_s, row_s = latency.predict(len(stocks), 0, n_context), latency.coefficients[2]
    shared = PROMPT_SHARE / (1 - PROMPT_SHARE) * answers_s / row_s
    assert rows_of(latency, [*stocks], n_context) <= max(USUAL, shared + 1)


def test_who_has_seconds_in_hand_rests_and_has_seconds_left_after_the_chunk() -> None:
    assert rests(RICH_S + 1.3 + HAIR, 1.3)
    assert not rests(RICH_S + 1.2, 1.3)
    assert rows_of(IterationLatency((0.01, 0.01, 0.01, 0.0)), []) == USUAL


def prompt_beside(latency: IterationLatency, n_answers: int, n_prompt: int) -> tuple[float, float]:
    """Play a prompt beside agents: its time over that alone, and the longest iteration over that, too."""
    done, took_s, longest_s, n_context = 0, 0.0, 0.0, 64 * n_answers
    while done < n_prompt:
        rows = min(rows_of(latency, [None] * n_answers, n_context), n_prompt - done)
        iteration_s = latency.predict(n_answers, rows, n_context)
        done, took_s, longest_s, n_context = (
            done + rows, took_s + iteration_s, max(longest_s, iteration_s), n_context + n_answers,
        )  # fmt: skip
    alone_s = n_prompt / MOST * latency.predict(0, MOST)
    return took_s / alone_s, longest_s / alone_s


def test_a_long_prompt_beside_four_agents_on_three_machines() -> None:
    """Its first token comes within 1.5 times what it takes alone, and no silence is longer than a tenth of that."""
    machines = {
        "default model on a fast core": (0.008, 0.008, 0.003, 1e-6),
        "the same on a slow one": (0.03, 0.03, 0.0102, 1e-6),
        "7 billion weights on eight cores": (0.12, 0.03, 0.03, 5e-6),
    }
    for name, coefficients in machines.items():
        ttft, gap = prompt_beside(IterationLatency(coefficients), 4, 2048)
        assert ttft <= 1.5, name
        assert gap <= 0.1, name
