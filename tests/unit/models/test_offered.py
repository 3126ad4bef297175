"""The list of models that disco offers, and which of them it recommends for a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from disco_daemon.config.schema import Config
from disco_daemon.engine.measure.predicted_memory import fit
from disco_daemon.errors import ConfigError
from disco_daemon.machines.model_offers import SPARE, memory_of, request_for
from disco_daemon.models.kept_numbers import KeptNumbers, kept_numbers
from disco_daemon.models.offered import (
    CONTEXT,
    READING_TPS,
    MeasuredSpeed,
    Memory,
    OfferedModel,
    PredictedModel,
    find,
    offered_models,
    predict,
    recommend,
    shipped,
)
from disco_daemon.models.quants import bits

GIB = 2**30
HERE = MeasuredSpeed("SmolLM2-135M-Instruct.Q4_1.gguf", 98e6, 134.5e6, 800.0, 180.0)
RECURRENT = {"qwen35", "qwen35moe", "qwen3next", "granitehybrid", "lfm2", "mamba2", "nemotron_h", "falcon-h1"}
WINDOWED = {"gemma3", "gpt-oss"}
LICENCES = {"Apache-2.0", "MIT", "Llama 3.2 Community", "Gemma terms"}


def by_memory(free: int, measured: MeasuredSpeed | None = HERE, gpu: int = 0) -> list[PredictedModel]:
    """What is recommended with so much memory, by the arithmetic of the engine itself."""
    requests = [(model, request_for(model, Config())) for model in shipped()]
    memories = [(model, memory_of(request, fit(request, free, gpu))) for model, request in requests]
    return recommend([predict(model, memory, measured) for model, memory in memories])


def test_the_list_names_models_once_and_by_words_that_can_be_typed() -> None:
    names = [model.name for model in shipped()]
    assert 8 <= len(names) == len(set(names)) <= 16
    assert all(name == name.casefold() and "/" not in name and " " not in name for name in names)


@pytest.mark.parametrize("model", shipped(), ids=lambda model: model.name)
def test_an_entry_is_of_one_piece(model: OfferedModel) -> None:
    assert model.repo.count("/") == 1
    assert model.file.endswith(".gguf")
    assert model.licence in LICENCES
    assert model.active <= model.parameters
    assert model.context >= CONTEXT
    packed = 8 * model.n_bytes / (1e9 * model.parameters)
    assert 0.9 * bits(model.packing) < packed < 1.4 * bits(model.packing), "bytes, parameters and packing go together"
    request = request_for(model, Config())
    assert memory_of(request, fit(request, 64 * GIB, 0)).n_bytes > model.n_bytes + 2 * CONTEXT * model.kv_numbers


@pytest.mark.parametrize("model", shipped(), ids=lambda model: model.name)
def test_the_engine_knows_the_architecture_and_the_entry_what_it_keeps_of_a_text(model: OfferedModel) -> None:
    library = next(Path(llama_cpp.__file__).parent.joinpath("lib").glob("libllama.*"))
    assert b"\0" + model.architecture.encode() + b"\0" in library.read_bytes()
    assert (model.state_bytes > 0) is (model.architecture in RECURRENT), "memory is reckoned by it"
    assert (model.window > 0 and 0 < model.attending < model.layers) is (model.architecture in WINDOWED)
    if model.architecture in WINDOWED:
        own = f"{model.architecture}."
        kept = kept_numbers({
            "general.architecture": model.architecture, f"{own}block_count": model.layers,
            f"{own}attention.head_count": model.kv_heads, f"{own}attention.key_length": model.head_dim,
            f"{own}attention.value_length": model.head_dim, f"{own}attention.sliding_window": model.window,
        })  # fmt: skip
        assert kept == KeptNumbers(model.kv_numbers, model.window, model.window_numbers)


def test_the_best_published_one_that_keeps_up_with_its_reader_comes_first() -> None:
    found = by_memory(20 * GIB)
    assert len(found) == 3
    assert [one.recommended for one in found] == [True, False, False]
    first = found[0]
    assert first.decode_tps is not None
    assert first.decode_tps > READING_TPS
    fast = [one for one in by_memory(20 * GIB) if (one.decode_tps or 0) > READING_TPS and not one.model.thinks]
    assert first.model.quality == max(one.model.quality or 0 for one in fast)
    assert found[1].model.n_bytes < first.model.n_bytes, "and a lighter one beside it"


def test_a_slow_machine_gets_a_light_model_and_none_where_none_fits() -> None:
    slow = replace(HERE, decode_tps=20.0, prefill_tps=100.0)
    first = by_memory(20 * GIB, slow)[0]
    assert not first.model.thinks
    assert first.model.n_bytes < 1.2e9
    assert by_memory(GIB) == []


def test_without_a_measurement_it_is_cautious_and_says_nothing_of_speed() -> None:
    first = by_memory(64 * GIB, None)[0]
    assert first.model.active_bytes < 3e9
    assert first.to_json()["tps"] is None
    assert first.to_json()["ttft_s"] == {"100": None, "2000": None}


def test_speeds_are_scaled_by_what_a_token_takes() -> None:
    dense, sparse = find("qwen3-4b", shipped()), find("qwen3-30b-a3b", shipped())
    memory = Memory(1, fits=True)
    one, other = predict(dense, memory, HERE), predict(sparse, memory, HERE)
    assert one.decode_tps == pytest.approx(180.0 * 98e6 / dense.n_bytes)
    assert one.prefill_tps == pytest.approx(800.0 * 0.1345 / dense.parameters)
    assert other.decode_tps == pytest.approx(180.0 * 98e6 / (sparse.n_bytes * sparse.active / sparse.parameters))
    prefill_tps, decode_tps = 800.0 * 0.1345 / dense.parameters, 180.0 * 98e6 / dense.n_bytes
    assert one.ttft_s(100) == pytest.approx(100 / prefill_tps + 1 / decode_tps)


@given(free=st.integers(0, 128 * GIB), gpu=st.sampled_from([0, 0, 8 * GIB, 24 * GIB]), bytes_=st.integers(1, 60 * GIB),
       tps=st.none() | st.floats(0.1, 500))  # fmt: skip
def test_what_does_not_fit_is_never_offered(free: int, gpu: int, bytes_: int, tps: float | None) -> None:
    models = [*shipped(), changed(shipped()[0], name="other", n_bytes=bytes_, quality=99.0)]
    measured = None if tps is None else replace(HERE, decode_tps=tps)
    found = []
    for model in models:
        request = request_for(model, Config())
        found.append(predict(model, memory_of(request, fit(request, free, gpu)), measured))
    offered = recommend(found)
    assert len(offered) <= 3
    assert sum(one.recommended for one in offered) == bool(offered)
    for one in offered:
        answer = fit(request_for(one.model, Config()), free, gpu)
        assert not answer.problem
        assert answer.n_ctx >= CONTEXT
        assert answer.n_bytes <= SPARE * free
    assert bool(offered) == any(one.memory.fits for one in found)


def test_the_user_s_own_list_goes_before_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert offered_models(tmp_path) == shipped()
    own = tmp_path / "models.toml"
    own.write_text(
        '[[models]]\nnames = ["mine"]\nparameters = 0.1\n[[models.files]]\nname = "qwen3-4b"\ntitle = "Mine"\n'
        'repo = "me/mine"\nfile = "mine.gguf"\npacking = "Q8_0"\nbytes = 1000\nlicence = "MIT"\n'
        'architecture = "llama"\nlayers = 1\nhidden = 1\nvocab = 1\nkv_heads = 1\nhead_dim = 1\ncontext = 9000\n'
    )
    found = offered_models(tmp_path)
    assert find("QWEN3-4B", found).title == "Mine"
    assert len(found) == len(shipped())
    for broken in ("nonsense", "[[models]]\nfiles = 3\n", "[[models]]\n[[models.files]]\nname = 3\n", "a = 1\n"):
        own.write_text(broken)
        with pytest.raises(ConfigError, match="is no list of models"):
            offered_models(tmp_path)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3-4b"):
        find("gpt-9", shipped())
