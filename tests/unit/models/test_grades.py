"""How good models are, by their names, their sizes and their packing; and which side is a stand-in."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from disco_daemon.models.gguf import Header, Keys, Tensor
from disco_daemon.models.grades import (
    PUBLISHED_SPREAD,
    SIZE_SPREAD,
    chosen_grade,
    grade_of_file,
    grade_of_name,
    model_table,
    plain_name,
)
from disco_daemon.types import Grade, Relation, Side, Unequal, relation

TABLE = model_table()
F16, Q2_K, Q4_1 = 1, 10, 3


def file(n: int, packing: int = Q4_1, **keys: Any) -> Header:
    """The header of a model file of so many parameters."""
    named: Keys = {"general.architecture": "llama", "general.file_type": packing, **keys}
    return Header(1, named, (Tensor("w", (n,), packing, 0),), whole=True)


EMBEDDED = grade_of_file(file(134_515_008), ["SmolLM2-135M-Instruct.Q4_1.gguf"])


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_figure_names_where_and_when_it_was_published() -> None:
    raw = tomllib.loads((files("disco_daemon.profiles") / "models.toml").read_text("utf-8"))
    assert len(TABLE.models) == len(raw["models"]) > 80
    for model in TABLE.models:
        assert (model.quality is None) == (not model.source), model.names
        if model.quality is not None:
            assert 0 <= model.quality <= 100
            assert TABLE.sources[model.source].url.startswith("https://")
    assert {model.source for model in TABLE.models if model.source} == set(TABLE.sources)


def test_no_name_stands_twice_and_each_is_written_as_it_is_looked_up() -> None:
    names = [name for model in TABLE.models for name in model.names]
    assert len(names) == len(set(names))
    assert all(name == plain_name(name) for name in names)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gpt-4o-mini", 63.1),
        ("gpt-4o-mini-2024-07-18", 63.1),
        ("openai/gpt-4.1", 81.8),
        ("gpt-4o", 72.6),
        ("anthropic/claude-sonnet-4.5", 88),
        ("us.anthropic.claude-3-5-haiku-20241022-v1:0", 65),
        ("qwen2.5:7b", 56.3),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 56.3),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 48.3),
        ("llama3.2:1b", 22.6),
        ("deepseek-chat", 83.7),
        ("mixtral-8x7b-instruct-v0.1", 40.4),
    ],
)
def test_a_published_figure_is_found_by_the_names_that_people_write(name: str, number: float) -> None:
    found = grade_of_name(name)
    assert found.number == number
    assert found.reason.startswith("published MMLU-Pro")
    assert found.spread == PUBLISHED_SPREAD


@pytest.mark.parametrize("name", ["gpt-5.1", "gpt-5-mini", "gpt-4.1-mini", "scripted", "gpt-50", "", "o3"])
def test_a_model_without_a_figure_has_not_its_namesakes(name: str) -> None:
    assert grade_of_name(name).number is None


def test_the_curve_is_fitted_to_the_table_and_as_far_off_as_it_is_said_to_be() -> None:
    curve = TABLE.curve
    known = [
        (math.sqrt(m.parameters * (m.active or m.parameters)), m.quality)
        for m in TABLE.models
        if m.parameters is not None and m.quality is not None
    ]
    x, y = np.log([n for n, _ in known]), np.array([quality for _, quality in known])
    middles, slopes = np.arange(0.5, 4, 0.01), np.arange(0.2, 1.5, 0.01)
    grid = 1 + np.exp(-slopes[None, :, None] * (x[None, None, :] - middles[:, None, None]))
    errors = ((curve.chance + (curve.top - curve.chance) / grid - y) ** 2).mean(axis=2)
    i, j = np.unravel_index(errors.argmin(), errors.shape)
    assert math.log(curve.middle) == pytest.approx(middles[i], abs=0.011)
    assert curve.slope == pytest.approx(slopes[j], abs=0.011)
    assert math.sqrt(errors.min()) == pytest.approx(SIZE_SPREAD, abs=1.0)


def test_more_parameters_are_never_worse() -> None:
    grades = [TABLE.curve.grade(n) for n in np.geomspace(0.01, 2000, 100)]
    assert grades == sorted(grades)
    assert TABLE.curve.chance < grades[0] < grades[-1] < TABLE.curve.top
    assert TABLE.curve.grade(30, 3) < TABLE.curve.grade(30)


# --- grades -----------------------------------------------------------------------------------------------------------


def test_a_file_counts_by_its_parameters_and_says_so() -> None:
    assert EMBEDDED.reason == "from its file: 135M parameters, Q4_1"
    assert EMBEDDED.number == pytest.approx(TABLE.curve.grade(0.1345), abs=0.1)
    assert EMBEDDED.n_parameters == 134_515_008


def test_a_published_figure_of_a_file_goes_before_its_size_and_two_bits_cost_of_both() -> None:
    whole = grade_of_file(file(7_615_000_000, F16), ["Qwen2.5-7B-Instruct-f16.gguf"])
    packed = grade_of_file(file(7_615_000_000, Q2_K), ["Qwen2.5-7B-Instruct-Q2_K.gguf"])
    assert whole.number == 56.3
    assert packed.number is not None
    assert 45 < packed.number < 52
    assert packed.reason.endswith("less for 2 bits a weight")
    unknown, worse = (grade_of_file(file(13_000_000_000, p), ["mine.gguf"]) for p in (F16, Q2_K))
    assert worse.number == pytest.approx(TABLE.curve.grade(6.5))
    assert unknown.number == pytest.approx(TABLE.curve.grade(13))


def test_experts_count_as_far_as_they_compute() -> None:
    keys: Keys = {"general.architecture": "m", "m.expert_count": 8, "m.expert_used_count": 2, "general.file_type": F16}
    tensors = (Tensor("blk.0.ffn_up_exps.weight", (8_000_000_000,), F16, 0), Tensor("w", (1_000_000_000,), F16, 0))
    found = grade_of_file(Header(2, keys, tensors, whole=True), ["mine.gguf"])
    assert found.reason == "from its file: 9B parameters, 3B active, F16"
    assert found.number == pytest.approx(TABLE.curve.grade(9, 3))


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("mine-32b", 32, None), ("my_30B-A3B", 30, 3), ("x/some-8x7b-thing", 56, None), ("tiny-270m-it", 0.27, None)],
)
def test_a_size_in_a_name_counts_where_nothing_better_is_known(
    name: str, parameters: float, active: float | None
) -> None:
    found = grade_of_name(name)
    assert found.number == pytest.approx(TABLE.curve.grade(parameters, active))
    assert found.reason.startswith("from its name: ")


def test_what_a_catalogue_tells_goes_before_the_name() -> None:
    found = grade_of_name("mine-32b", 1_235_814_432)
    assert found.reason == "the server's catalogue: 1.24B parameters"
    assert found.number == pytest.approx(TABLE.curve.grade(1.2358), abs=0.01)


def test_a_file_that_tells_nothing_has_no_grade() -> None:
    assert grade_of_file(Header(0, {}), ["mine.gguf"]).number is None


# --- how they stand to each other -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "server",
    ["gpt-4o-mini", "deepseek-chat", "scripted", "qwen2.5:0.5b", "llama3.2:1b", "smollm2:360m", "", "gemma3:1b"],
)
def test_the_embedded_model_is_a_stand_in_for_every_server(server: str) -> None:
    found = relation(EMBEDDED, grade_of_name(server))
    assert found.stand_in is found.lower is Side.DEVICE
    assert found.better is Side.SERVER
    assert found.why.startswith("This machine's model is a stand-in")


def test_it_goes_both_ways_round() -> None:
    big = grade_of_file(file(32_500_000_000), ["Qwen2.5-32B-Instruct-Q4_K_M.gguf"])
    assert relation(big, grade_of_name("llama3.2:1b")).lower is Side.SERVER
    assert relation(big, EMBEDDED).lower is Side.SERVER
    assert relation(big, EMBEDDED).why.startswith("The server's model is a stand-in, a toy of 135M parameters")


@pytest.mark.parametrize(
    ("device", "server"),
    [("qwen2.5-14b", "gpt-4o-mini"), ("qwen2.5-7b", "gpt-4o-mini"), ("llama3.1:8b", "qwen2.5:7b"), ("a-7b", "b-8b")],
)
def test_what_the_figures_may_be_off_by_is_no_difference(device: str, server: str) -> None:
    assert relation(grade_of_name(device), grade_of_name(server)).lower is None
    assert relation(grade_of_name(server), grade_of_name(device)).lower is None


@pytest.mark.parametrize(("device", "server"), [("llama3.1:8b", "gpt-4o-mini"), ("a-1b", "b-32b"), ("a-4b", "gpt-4o")])
def test_what_is_beyond_that_is_one(device: str, server: str) -> None:
    assert relation(grade_of_name(device), grade_of_name(server)).lower is Side.DEVICE
    assert relation(grade_of_name(server), grade_of_name(device)).lower is Side.SERVER


def test_one_model_on_both_sides_is_equal_by_name_or_by_its_parameters() -> None:
    assert relation(EMBEDDED, grade_of_name("SmolLM2-135M-Instruct")).lower is None
    assert relation(EMBEDDED, grade_of_name("whatever", 134_515_008)).lower is None
    assert relation(EMBEDDED, grade_of_name("whatever", 134_515_009)).lower is None, "two toys, by their figures"


def test_a_server_of_which_nothing_is_known_goes_before_a_small_model_only() -> None:
    small, large = grade_of_name("mine-3b"), grade_of_name("mine-14b")
    told = relation(small, grade_of_name("scripted"))
    assert told.lower is Side.DEVICE
    assert "nothing is known" in told.why
    assert "disco config set server.grade" in told.why
    equal = relation(large, grade_of_name("scripted"))
    assert equal.lower is None
    assert equal.why.endswith("set server.grade.")
    assert relation(Grade(), grade_of_name("gpt-4o")).lower is None


def test_what_the_user_sets_counts_to_the_point() -> None:
    assert relation(chosen_grade(50), chosen_grade(50)).lower is None
    assert relation(chosen_grade(49), chosen_grade(50)).lower is Side.DEVICE
    assert relation(chosen_grade(63), grade_of_name("gpt-4o-mini")).lower is None
    assert relation(chosen_grade(90), grade_of_name("gpt-4o-mini")).lower is Side.SERVER
    assert relation(chosen_grade(10), Grade()).lower is None, "who sets one side knows of the other"


def test_a_race_is_one_whatever_the_grades_are_and_says_so() -> None:
    found = relation(EMBEDDED, grade_of_name("gpt-4o"), Unequal.RACE)
    assert found.lower is found.better is None
    assert found.stand_in is Side.DEVICE
    assert found.why.endswith("They race all the same (policy.unequal).")
    assert found.to_json()["unequal"] == "race"


def test_one_side_alone_is_no_relation() -> None:
    assert Relation().lower is None
