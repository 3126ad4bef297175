from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import fuzz_files
from benchmarks.faults.fuzz import run, targets
from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import read_header


@pytest.mark.parametrize("name", sorted(targets()))
def test_mutated_input_is_refused_or_read_and_nothing_else(name: str) -> None:
    """A short run of `python benchmarks/faults/fuzz.py`, which makes 50,000 of each."""
    found = run(targets()[name], 300, seed=7, n_traced=0)
    assert (found["crashes"], found["slow"]) == (0, 0), found["first_crashes"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, fuzz_files.Kind], Path]]:
    folder = tmp_path_factory.mktemp("files")
    yield fuzz_files.kinds(folder), folder
    fuzz_files.forget()


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
@pytest.mark.parametrize("name", ["adapter", "model", "segment"])
def test_a_model_file_that_lies_is_refused_or_loaded_within_bounds(
    name: str, files: tuple[dict[str, fuzz_files.Kind], Path]
) -> None:
    """A short run of `python -m benchmarks.faults.fuzz_files`; what ends the process of the model ends that alone."""
    kinds, folder = files
    sound = fuzz_files.run_one(kinds[name], kinds[name].data, folder)
    assert sound[0] == fuzz_files.LOADED, "else all would be refused"
    found = fuzz_files.run(kinds[name], 25, seed=3, folder=folder)
    assert (found["fault"], found["slow"], found["large"]) == (0, 0, 0), found["odd_cases"]
    assert found["refused"] > found["ended"]


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
def test_saved_cells_that_lie_end_neither_home_nor_its_memory(files: tuple[dict[str, fuzz_files.Kind], Path]) -> None:
    """What a lent host sends of a model with a sliding window, whose form only llama.cpp puts together."""
    kinds, folder = files
    assert fuzz_files.run_one(kinds["cells"], kinds["cells"].data, folder)[0] == fuzz_files.LOADED
    found = fuzz_files.run(kinds["cells"], 60, seed=5, folder=folder)
    assert (found["ended"], found["fault"], found["slow"], found["large"]) == (0, 0, 0, 0), found["odd_cases"]
    assert found["refused"] > found["loaded"] > 0


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
@pytest.mark.parametrize("name", ["adapter", "model", "segment"])
def test_no_text_of_a_file_needs_to_be_utf_8(name: str, files: tuple[dict[str, fuzz_files.Kind], Path]) -> None:
    kinds, folder = files
    kind = kinds[name]
    made = fuzz_files.without_utf8(kind.data, read_header(kind.data))
    ended = {key: fuzz_files.run_one(kind, data, folder)[0] for key, data in made.items()}
    assert set(ended.values()) <= {fuzz_files.LOADED, fuzz_files.REFUSED}, ended
    loaded = {key for key, code in ended.items() if code == fuzz_files.LOADED}
    words = {f"tokenizer.{key}" for key in ("ggml.tokens", "ggml.merges", "chat_template")}
    assert loaded == (set() if name == "adapter" else words), "what a model is may be refused, never its words"
