"""What several unit tests need of the default model: its tokens, without its weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disco_daemon.engine.llama.vocabulary import Vocabulary
from tests.fixtures.token_draws import default_vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    """The default model's tokens, without its weights."""
    with default_vocabulary() as found:
        yield found
