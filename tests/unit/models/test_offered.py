"""The list of models that disco offers, and which of them it recommends for a machine."""

from __future__ import annotations

import re
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
from disco_daemon.models.roofline import ERROR, MachineSpeed
from docs.recommended import MACHINES, RecordedMachine, offered, recommended, scaled

GIB = 2**30
HERE = scaled(3, 1.0, 25e9)
SLOW = scaled(1, 0.5, 10e9)
RECURRENT = {"qwen35", "qwen35moe", "qwen3next", "granitehybrid", "lfm2", "mamba2", "nemotron_h", "falcon-h1"}
WINDOWED = {"gemma3", "gpt-oss"}
LICENCES = {"Apache-2.0", "MIT", "Llama 3.1 Community", "Llama 3.2 Community", "Gemma terms"}


def by_memory(free: int, measured: MachineSpeed | None = HERE, gpu: int = 0) -> list[PredictedModel]:
    """What is recommended with so much memory, by the arithmetic of the engine itself."""
    requests = [(model, request_for(model, Config())) for model in shipped()]
    memories = [(model, memory_of(request, fit(request, free, gpu))) for model, request in requests]
    return recommend([predict(model, memory, measured) for model, memory in memories])


def test_the_list_names_models_once_and_by_words_that_can_be_typed() -> None:
    names = [model.name for model in shipped()]
    assert 16 <= len(names) == len(set(names)) <= 40
    assert len({model.family for model in shipped()}) >= 12
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
    assert model.architecture.encode() + b"\0" in library.read_bytes(), "a linker keeps the end of a longer word once"
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
    first = by_memory(20 * GIB, SLOW)[0]
    assert not first.model.thinks
    assert first.model.n_bytes < 1.2e9
    assert by_memory(GIB) == []


def test_without_a_measurement_it_is_cautious_and_says_nothing_of_speed() -> None:
    first = by_memory(64 * GIB, None)[0]
    assert first.model.active_bytes < 3e9
    assert first.to_json()["tps"] is None
    assert first.to_json()["j_per_answer"] is None
    assert first.to_json()["ttft_s"] == {"100": None, "2000": None}


def test_a_gpu_that_holds_a_model_is_fast_enough_without_a_measurement() -> None:
    first = by_memory(26 * GIB, None, 24 * GIB)[0]
    assert first.memory.on_gpu
    assert first.model.quality == max(model.quality or 0 for model in shipped() if model.n_bytes < 20e9)


def test_of_a_model_in_two_packings_the_larger_one_is_taken_where_it_is_fluent_and_one_is_shown() -> None:
    quick, slow = by_memory(20 * GIB, scaled(16, 2.0, 200e9)), by_memory(20 * GIB, SLOW)
    for found in (quick, slow):
        assert len({one.model.family for one in found}) == len(found) == 3
    light = by_memory(3 * GIB, scaled(1, 1.0, 20e9))[0].model
    heavy = by_memory(3 * GIB, scaled(16, 2.0, 200e9))[0].model
    assert (light.family, light.packing) == (heavy.family, "Q4_K_M")
    assert heavy.packing == "Q8_0"


def test_a_file_s_weights_are_told_by_its_bytes() -> None:
    dense, sparse = find("qwen3-8b", shipped()), find("qwen3-30b-a3b", shipped())
    work = dense.work
    in_head = dense.vocab * dense.hidden
    assert work.head == {"Q6_K": in_head}
    assert sum(work.weights.values()) == pytest.approx(1e9 * dense.parameters - 2 * in_head)
    assert 0.1 < work.weights["Q6_K"] / work.weights["Q4_K"] < 0.25, "as llama.cpp mixes them"
    assert sum(sparse.work.weights.values()) < 3.1e9, "a token has the experts that it is sent to"
    assert sparse.work.decode_s(HERE, 0) < find("mistral-small-3.2", shipped()).work.decode_s(HERE, 0) / 5


def test_what_nobody_has_told_is_reckoned_and_said_to_be() -> None:
    for model in shipped():
        assert model.reckoned_bytes == pytest.approx(model.n_bytes, rel=0.06), model.name
        said = predict(model, Memory(1, fits=True), HERE).to_json()
        assert said["bytes_are_reckoned"] is model.is_reckoned
        assert said["sha256"] is None or len(bytes.fromhex(said["sha256"])) == 32
        assert said["revision"] is None or len(bytes.fromhex(said["revision"])) == 20
        assert said["date"]
        assert (said["quality"] is None) == (said["quality_source"] is None)
    assert any(model.is_reckoned for model in shipped())


def test_the_json_has_the_keys_that_programs_read() -> None:
    for machine in MACHINES:
        for one in offered(machine):
            said = one.to_json()
            keys = {
                "id",
                "quant",
                "context",
                "bytes",
                "memory_bytes",
                "fits",
                "ttft_s",
                "tps",
                "j_per_answer",
                "abilities",
            }
            assert keys | {"licence", "recommended"} <= said.keys()
            assert set(said["ttft_s"]) == {"100", "2000"}
            assert set(said["abilities"]) <= {"tools", "thinks", "sees"}


def test_an_answer_s_energy_is_its_power_for_its_time() -> None:
    one = predict(find("qwen3-4b", shipped()), Memory(1, fits=True), HERE, 9.0)
    assert one.decode_tps is not None
    first_s = one.ttft_s(100)
    assert first_s is not None
    assert one.j_per_answer == pytest.approx(9.0 * (first_s + 200 / one.decode_tps))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_each_recorded_machine_gets_one_that_fits_and_keeps_up_with_its_reader(machine: RecordedMachine) -> None:
    found = offered(machine)
    assert [one.recommended for one in found] == [True, False, False]
    first = found[0]
    assert not first.model.thinks
    assert first.memory.on_gpu or (first.decode_tps or 0) * (1 - ERROR["decode"]) > READING_TPS
    assert all(one.memory.n_bytes < (machine.free + (0 if machine.shared else machine.gpu)) * GIB for one in found)


def test_the_page_of_recorded_machines_is_what_the_list_gives() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "recommended.md"
    assert page.read_text("utf-8") == recommended()


listed = st.builds(
    changed, st.sampled_from(shipped()), name=st.just("other"), n_bytes=st.integers(1, 60 * GIB),
    quality=st.none() | st.floats(0, 100), layers=st.integers(1, 100), kv_heads=st.integers(1, 32),
    parameters=st.floats(0.05, 120), hidden=st.sampled_from([256, 640, 2048, 8192]), thinks=st.booleans(),
)  # fmt: skip


@given(
    free=st.integers(0, 128 * GIB), gpu=st.sampled_from([0, 0, 8 * GIB, 24 * GIB]), more=st.lists(listed, max_size=6),
    machine=st.none() | st.builds(scaled, st.integers(1, 64), st.floats(0.05, 8), st.floats(1e9, 1e12)),
    shared=st.booleans(), leave=st.integers(0, len(shipped())),
)  # fmt: skip
def test_what_does_not_fit_is_never_offered(
    free: int, gpu: int, more: list[OfferedModel], machine: MachineSpeed | None, shared: bool, leave: int
) -> None:
    models = [*shipped()[leave:], *(changed(one, name=f"other-{i}") for i, one in enumerate(more))]
    found = []
    for model in models:
        request = request_for(model, Config())
        memory = memory_of(request, fit(request, free, gpu), shared=shared)
        found.append(predict(model, memory, machine))
    offers = recommend(found)
    assert len(offers) <= 3
    assert sum(one.recommended for one in offers) == bool(offers)
    for one in offers:
        answer = fit(request_for(one.model, Config()), free, gpu)
        assert not answer.problem
        assert answer.n_ctx >= CONTEXT
        assert (answer.in_all if shared else answer.n_bytes) <= SPARE * free
        assert one.model.n_bytes <= one.memory.n_bytes <= free + gpu
    assert bool(offers) == any(one.memory.fits for one in found)


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
    assert find("qwen3-4b", [changed(found[0], name="Qwen3-4B")]).title == "Mine"
    assert len(found) == len(shipped())
    valid = own.read_text()
    assert predict(changed(found[0], parameters=1e-12), Memory(1, fits=True), HERE).decode_tps
    for name in ("parameters", "layers", "head_dim"):
        own.write_text(re.sub(rf"{name} = [0-9.]+", f"{name} = 0", valid))
        with pytest.raises(ConfigError, match="is no list of models"):
            offered_models(tmp_path)
    for broken in ("nonsense", "[[models]]\nfiles = 3\n", "[[models]]\n[[models.files]]\nname = 3\n", "a = 1\n"):
        own.write_text(broken)
        with pytest.raises(ConfigError, match="is no list of models"):
            offered_models(tmp_path)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3-4b"):
        find("gpt-9", shipped())
