"""Fewer answers at a time, and those that wait out of the KV cache: every answer says what it says without that."""

from __future__ import annotations

import pytest

from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.models.default import default_model_path
from tests.fixtures.fleet import LOAD, PROMPTS, Core

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


def ask_all(core: Core) -> None:
    for number, prompt in enumerate(PROMPTS[:4]):
        core.ask(str(number), prompt, n=10)


def test_a_lowered_batch_is_kept_to_and_changes_no_answer() -> None:
    llama = Llama(LOAD, AbortFlag())
    core = Core(llama)
    ask_all(core)
    expected = dict(core.run())
    core.said.clear()
    core.cells.tidy()
    ask_all(core)
    running, offloaded = set[int](), set[int]()

    def lower(step: int) -> None:
        admission = core.admission
        if step == 3:
            admission.limit, admission.offloads = 2, True
            admission.reconsider()
        if step == 14:
            admission.limit, admission.offloads = 0, False
            admission.reconsider()
        if 4 <= step < 14:
            running.add(sum(s.is_running for s in admission.sequences.values()))
            offloaded.add(sum(s.saved is not None for s in admission.sequences.values()))

    assert core.run(lower) == expected
    assert max(running) <= 2
    assert max(offloaded) >= 1
    llama.close()
