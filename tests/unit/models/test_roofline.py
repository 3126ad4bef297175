"""What a model's tokens take, by what a machine does: more of anything is slower, and each bound is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from disco_daemon.models.offered import OfferedModel, shipped
from disco_daemon.models.roofline import BITS, MIXTURES, PackedSpeed, mixture, split
from docs.recommended import MEASURED, scaled

MODELS = st.sampled_from(shipped())


@given(model=MODELS, few=st.floats(1, 4000), more=st.floats(1, 4000))
def test_longer_prompts_and_contexts_take_longer(model: OfferedModel, few: float, more: float) -> None:
    least, most = sorted((few, more))
    assert model.work.prompt_s(MEASURED, least) <= model.work.prompt_s(MEASURED, most)
    assert model.work.decode_s(MEASURED, least) <= model.work.decode_s(MEASURED, most)


@given(model=MODELS, threads=st.integers(1, 32), times=st.floats(0.1, 8), bandwidth=st.floats(1e9, 1e12))
def test_no_token_comes_faster_than_its_weights_from_memory(
    model: OfferedModel, threads: int, times: float, bandwidth: float
) -> None:
    machine, work = scaled(threads, times, bandwidth), model.work
    n_bytes = sum(n * BITS[name] / 8 for part in (work.weights, work.head, work.experts) for name, n in part.items())
    assert n_bytes <= 1.02 * model.n_bytes
    assert work.decode_s(machine, 0) >= n_bytes / bandwidth
    assert work.prompt_s(machine, 1) >= n_bytes / bandwidth


def test_a_window_is_read_and_multiplied_no_further_than_it_reaches() -> None:
    model = next(one for one in shipped() if one.name == "gemma-3-4b")
    work = model.work
    inside, behind = (work.decode_s(MEASURED, n + 1) - work.decode_s(MEASURED, n) for n in (100, 5000))
    assert behind == pytest.approx(inside * model.attending / model.layers, rel=1e-6)
    whole = replace(work, attention=work.attention + work.window_attention, window=0, window_attention=0.0)
    assert work.prompt_s(MEASURED, 1000) == pytest.approx(whole.prompt_s(MEASURED, 1000)), "all of it is in the window"
    assert work.prompt_s(MEASURED, 4000) < whole.prompt_s(MEASURED, 4000)


@given(n=st.floats(1e6, 1e11), share=st.floats(0, 1), packing=st.sampled_from(sorted(MIXTURES)))
def test_the_bytes_of_a_file_say_what_it_is_packed_in(n: float, share: float, packing: str) -> None:
    most, more = mixture(packing, 2048)
    n_bytes = n * (BITS[most] + share * (BITS[more] - BITS[most])) / 8
    found = split(n, n_bytes, packing, 2048)
    assert sum(found.values()) == pytest.approx(n)
    assert sum(number * BITS[name] / 8 for name, number in found.items()) == pytest.approx(n_bytes)


def test_rows_that_a_k_packing_cannot_take_have_another() -> None:
    assert mixture("Q4_K_M", 1152) == ("Q5_0", "Q8_0")
    assert mixture("q4_k_m", 2048) == mixture("UD-Q4_K_M", 2048) == ("Q4_K", "Q6_K")
    assert mixture("of tomorrow", 2048) == ("Q4_K", "Q6_K")


def test_what_a_token_reads_of_experts_a_prompt_reads_of_all_that_its_tokens_chose() -> None:
    work = next(one for one in shipped() if one.name == "qwen3-30b-a3b").work
    assert work.used == pytest.approx(8 / 128, rel=0.02)
    assert sum(work.experts.values()) / work.used == pytest.approx(48 * 128 * 3 * 2048 * 768, rel=0.02)
    slower = changed(
        MEASURED, experts={name: changed(of, bytes_per_s=of.bytes_per_s / 2) for name, of in MEASURED.experts.items()}
    )
    one, many = (work.prompt_s(slower, n) - work.prompt_s(MEASURED, n) for n in (1, 500))
    assert one == pytest.approx(work.decode_s(slower, 0) - work.decode_s(MEASURED, 0))
    assert many == pytest.approx(one / work.used, rel=1e-6), "all are read, each once"


def test_rows_of_experts_are_weighed_one_by_one() -> None:
    work = next(one for one in shipped() if one.name == "gpt-oss-20b").work
    assert work.weighed == 24 * 4 * 2880
    slower = changed(MEASURED, scaled_per_s=MEASURED.scaled_per_s / 10)
    assert work.decode_s(slower, 0) - work.decode_s(MEASURED, 0) == pytest.approx(
        9 * work.weighed / MEASURED.scaled_per_s
    )


def test_cells_come_from_memory_by_the_length_of_a_head_and_are_multiplied_meanwhile() -> None:
    work = next(one for one in shipped() if one.name == "qwen3-4b").work
    fast = changed(MEASURED, kept_bytes_per_s={"64": 1e9, "128": 2e9}, attention_one_per_s=1e15)
    assert fast.kept_speed(80) == 1e9
    assert fast.kept_speed(128) == fast.kept_speed(576) == 2e9
    assert work.decode_s(fast, 1000) - work.decode_s(fast, 0) == pytest.approx(1000 * work.kept_bytes / 2e9)
    slow = changed(fast, attention_one_per_s=1e9)
    assert work.decode_s(slow, 1000) - work.decode_s(slow, 0) == pytest.approx(1000 * work.attention / 1e9)


def test_a_packing_that_was_not_measured_has_the_speed_of_the_next_in_bits() -> None:
    fewer = changed(MEASURED, packings={"Q4_K": PackedSpeed(4.5e9, 2e10), "Q8_0": PackedSpeed(9e9, 1e10)})
    assert fewer.of("Q8_0") == PackedSpeed(9e9, 1e10)
    near = fewer.of("Q5_K")
    assert near.bytes_per_s == pytest.approx(5.5e9), "as many weights a second as of the other"
    assert near.multiply_adds_per_s == 2e10
