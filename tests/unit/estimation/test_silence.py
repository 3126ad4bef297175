from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.estimation.knowledge import Knowledge
from disco_daemon.estimation.server_ttft import ServerTtft
from disco_daemon.estimation.silence import BEYOND, ENOUGH, LEAST_S, NEW_KIND, REMEMBERED, Silences

times = st.floats(0.01, 30.0)


def seen(*ttfts: float) -> float:
    return Silences(ttfts).bound_s


@pytest.mark.parametrize("n", [0, 1, ENOUGH - 1])
def test_of_a_few_first_tokens_nothing_is_called_unusual(n: int) -> None:
    assert seen(*[0.05] * n) == math.inf


def test_three_times_the_longest_silence_is_unlike_anything_seen() -> None:
    assert seen(*[0.4] * 30, 0.9) == pytest.approx(BEYOND * 0.9)
    assert seen(*[0.05] * 30) == LEAST_S, "however quick the server"


@pytest.mark.parametrize("n", range(1, NEW_KIND + 3))
def test_ten_of_a_new_kind_have_been_seen_and_fewer_have_not(n: int) -> None:
    bound = seen(*[0.05] * 150, *[6.0] * n)
    assert bound == (BEYOND * 6.0 if n >= NEW_KIND else LEAST_S)


def test_a_new_kind_may_be_of_many_times() -> None:
    assert seen(*[0.05] * 150, 2.0, 60.0, 3.0, 9.0, 1.0) == LEAST_S
    assert seen(*[0.3] * 150, 0.8, 1.5, 3.0) == pytest.approx(9.0), "but a long tail without a gap is one kind"


def test_what_is_long_ago_is_forgotten() -> None:
    silences = Silences([6.0] * NEW_KIND)
    for _ in range(REMEMBERED):
        silences.add(0.05)
    assert silences.bound_s == LEAST_S


@given(st.lists(times, min_size=ENOUGH, max_size=REMEMBERED), st.randoms(use_true_random=False))
def test_the_order_does_not_matter_and_the_bound_is_three_times_a_sample(ttfts: list[float], random: object) -> None:
    bound = seen(*ttfts)
    assert bound == seen(*sorted(ttfts))
    assert bound == LEAST_S or any(bound == BEYOND * t for t in ttfts)
    assert sum(t > bound for t in ttfts) < NEW_KIND


def learned(n: int = 40, ttft_s: float = 0.05) -> ServerTtft:
    server = ServerTtft()
    for _ in range(n):
        server.add(ttft_s, censored=False)
    return server


def test_what_was_not_waited_for_to_the_end_does_not_make_longer_silences_usual() -> None:
    server = learned()
    for _ in range(100):
        server.add(2.0, censored=True)
        server.add_failure(9.0)
    assert server.silence_s == LEAST_S


def test_the_bound_outlives_a_regime_shift_and_a_restart() -> None:
    server, random = learned(200), np.random.default_rng(0)
    for _ in range(NEW_KIND - 1):
        server.add(float(random.uniform(5.0, 7.0)), censored=False)
    assert server.n_shifts == 1
    assert server.n < 60
    assert server.silence_s == LEAST_S
    saved = json.loads(json.dumps(server.to_json()))
    assert ServerTtft.from_json(saved).silence_s == LEAST_S
    del saved["seen_s"]  # as a daemon before this one saved it
    assert ServerTtft.from_json(saved).silence_s > 0
    with pytest.raises(ValueError, match="finite"):
        ServerTtft.from_json(saved | {"seen_s": ["soon"]})
    assert Knowledge().server.silence_s == math.inf
