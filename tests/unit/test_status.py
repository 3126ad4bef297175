from __future__ import annotations

from disco_daemon.cli.status import _engine

STATS = {
    "running": 2, "paused": 1, "swapped": 1, "waiting": 3, "preemptions": 4, "saved_bytes": 3 * 2**20,
    "cells_used": 2048, "cached_tokens": 900, "prompt_tokens": 1200, "iteration_s": 0.0125, "python_share": 0.021,
}  # fmt: skip


def test_the_engine_is_told_in_three_lines() -> None:
    answers, cache, iteration = _engine({"engine": STATS, "n_cells": 8192, "bytes_per_token": 2**14})
    assert answers.endswith("2 running, 1 paused, 1 swapped out (3 MiB), 3 waiting; 4 preemptions")
    assert cache.endswith("2048 of 8192 tokens (25 %, 32 of 128 MiB); 900 tokens reused, 1200 prefilled")
    assert iteration.endswith("12.5 ms, 2.1 % of it Python")


def test_an_engine_that_has_computed_nothing_yet_has_nothing_to_tell() -> None:
    assert _engine({"engine": None}) == _engine({}) == []
