"""What several unit tests need of the default model: its tokens, without its weights."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import pytest

from disco_daemon.engine.llama.model import quiet
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.models.default import default_model_path


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    """The default model's tokens, without its weights."""
    quiet()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(default_model_path()).encode(), params)
    assert model, f"{default_model_path()} is not there: `make model` fetches it"
    yield Vocabulary(model)
    llama_cpp.llama_model_free(model)
