from __future__ import annotations

from disco_daemon.cli.status import _engine, _speed

STATS = {
    "running": 2, "paused": 1, "swapped": 1, "waiting": 3, "preemptions": 4, "saved_bytes": 3 * 2**20,
    "cells_used": 2048, "cached_tokens": 900, "prompt_tokens": 1200, "iteration_s": 0.0125, "python_share": 0.021,
}  # fmt: skip


def test_the_engine_is_told_in_three_lines() -> None:
    answers, cache, iteration = _engine({"engine": STATS, "n_cells": 8192, "bytes_per_token": 2**14})
    assert answers.endswith("2 running, 1 paused, 1 swapped out (3 MiB), 3 waiting; 4 preemptions")
    assert cache.endswith("2048 of 8192 tokens (25 %, 32 of 128 MiB); 900 tokens reused, 1200 prefilled")
    assert iteration.endswith("12.5 ms, 2.1 % of it Python")


def test_what_speculation_guessed_is_told_once_it_has_guessed() -> None:
    device = {"engine": STATS | {"drafted": 40, "accepted": 25}, "n_cells": 8192, "bytes_per_token": 2**14}
    assert _engine(device)[2].endswith("2.1 % of it Python; 25 of 40 guessed tokens right")


def test_what_is_on_disk_is_told_and_why_no_more_is() -> None:
    device = {"n_cells": 8192, "bytes_per_token": 2**14}
    stats = STATS | {"disk_texts": 3, "disk_bytes": 41 * 2**20}
    assert _engine(device | {"engine": stats})[3] == "on disk      3 conversations, 41 MiB"
    full = stats | {"disk_error": "kv cannot be written"}
    assert _engine(device | {"engine": full})[3].endswith("41 MiB; kv cannot be written")
    none = STATS | {"disk_texts": 0, "disk_bytes": 0, "disk_error": "another engine has it"}
    assert _engine(device | {"engine": none})[3] == "on disk      another engine has it"


def test_an_engine_that_has_computed_nothing_yet_has_nothing_to_tell() -> None:
    assert _engine({"engine": None}) == _engine({}) == []


def test_a_gpu_and_the_tune_are_told_if_there_is_something_to_tell() -> None:
    device = {"n_gpu_layers": 12}
    assert _speed({"endpoints": {"device": device}, "tune": "measuring"}) == [
        "GPU          12 layers",
        "tune         what is fastest here, until somebody asks something",
    ]
    assert _speed({"endpoints": {"device": {"n_gpu_layers": -1}}, "tune": None}) == ["GPU          all layers"]
    assert _speed({"endpoints": {"device": {"n_gpu_layers": 0}}, "tune": "idle"}) == []
    assert _speed({"endpoints": {}}) == []
