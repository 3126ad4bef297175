"""What is predicted of a file is what the list would say of it, and a prediction that is off is told."""

from __future__ import annotations

from benchmarks.engine import predicted
from disco_daemon.models.default import default_model_path
from disco_daemon.models.files import whole_header
from disco_daemon.models.listed import listed
from disco_daemon.models.roofline import BITS
from docs.recommended import MEASURED


def test_a_file_is_an_entry_of_the_list() -> None:
    path = default_model_path()
    model = listed(path, whole_header(path))
    assert (model.architecture, model.packing, model.tied, model.layers) == ("llama", "Q4_1", True, 30)
    assert abs(model.parameters - 0.1345) < 1e-3
    parts = (model.work.weights, model.work.head)
    n_bytes = sum(n * BITS[name] / 8 for part in parts for name, n in part.items())
    assert 0.95 < n_bytes / path.stat().st_size < 1.02
    told = predicted.expected(model, MEASURED, [100, 512])
    assert set(told) == {"prompt_100", "prompt_512", "decode", "memory"}
    assert told["prompt_100"] < told["prompt_512"]
    assert told["memory"] > path.stat().st_size


def test_a_prediction_that_is_off_by_more_than_is_stated_is_told() -> None:
    right = {"ratio": {"prompt_100": 0.8, "decode": 1.14, "memory": 0.94}}
    assert not predicted.is_off(right)
    for what, ratio in (("prompt_100", 1.3), ("decode", 0.84), ("memory", 1.08)):
        assert predicted.is_off({"ratio": right["ratio"] | {what: ratio}})
