"""What the build of the single binary says of it."""

from __future__ import annotations

import sys
from pathlib import Path

from binary import started


def test_the_build_says_which_engine_is_in_it_and_what_it_asks_of_a_processor() -> None:
    said = started.engine(Path(sys.executable))
    assert said.startswith("llama.cpp ")
    assert len(said.split(", ", 1)[1].split()) > 0
