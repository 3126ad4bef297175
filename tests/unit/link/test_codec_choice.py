"""Which codec hidden rows travel by, and what the way to the partner carries."""

from __future__ import annotations

import itertools

import pytest

from disco_daemon.link.rows.codec import SLOW_ROW_S, choose_codec, salt_for
from disco_daemon.machines.split.joining import FetchRate

N_EMBD = 576
SLOW, FAST = 4 * N_EMBD / SLOW_ROW_S / 2, 4 * N_EMBD / SLOW_ROW_S * 2  # bytes/s


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_a_codec_that_is_asked_for_is_taken(codec: str) -> None:
    assert {choose_codec(codec, N_EMBD, rate, exact=exact) for rate in (SLOW, FAST) for exact in (True, False)} == {
        codec
    }


@pytest.mark.parametrize("rate", [0.0, SLOW, FAST])
def test_exact_answers_have_rows_to_the_bit(rate: float) -> None:
    assert choose_codec("auto", N_EMBD, rate, exact=True) == "f32"


def test_bits_are_given_up_only_where_rows_were_measured_to_take_long() -> None:
    found = {rate: choose_codec("auto", N_EMBD, rate, exact=False) for rate in (0.0, SLOW, FAST)}
    assert found == {0.0: "f32", SLOW: "bf16", FAST: "f32"}


def test_a_fetch_is_measured_from_its_first_bytes_on() -> None:
    rate = FetchRate(itertools.count(10.0, 2.0).__next__)
    assert rate.bytes_per_s == 0
    rate.add(1000)  # they were here already, or took the time of the connection
    rate.add(5000)
    assert rate.bytes_per_s == pytest.approx(4000 / 2)


def test_cells_of_rounded_rows_are_kept_apart() -> None:
    salt = 0b1011
    assert salt_for(salt, ("f32",)) == salt
    assert (
        len({salt, salt_for(salt, ("bf16",)), salt_for(salt, ("int8",)), salt_for(salt, ("f32", "int8", "bf16"))}) == 4
    )
