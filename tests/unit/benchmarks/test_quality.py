"""The evaluation of the learned chance: what a curve is, and that it finds what there is to find and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eval import quality
from benchmarks.eval.checkable import MAKERS, Task, tasks
from benchmarks.eval.graded import CHECKED, CHECKED_COLUMNS, GRADED, GRADES, Answering, graded
from benchmarks.eval.quality import Prompts, curve, figures, play, read, told_apart, with_interval
from disco_daemon.errors import ConfigError

N = 1200


def prompts(by_kind: bool) -> Prompts:
    """The device answers 1 of 10 with code rightly, and 8 of 10 of the others; or half of all, whatever they are."""
    rng = np.random.default_rng(0)
    code = rng.random(N) < 0.4
    device = rng.random(N) < (np.where(code, 0.1, 0.8) if by_kind else 0.5)
    kinds = [frozenset({"code"} if one else ()) for one in code]
    return Prompts(rng.integers(20, 500, N).tolist(), kinds, {}, device.astype(float), np.ones(N))


def test_a_curve_begins_with_the_device_and_ends_with_the_server() -> None:
    device, server = np.array([1.0, 0, 0, 1]), np.array([1.0, 1, 1, 0])
    found = curve(np.array([0.9, 0.1, 0.2, 0.8]), device, server)
    assert (found[0], found[5], found[-1]) == (0.5, 1.0, 0.75)


def test_who_is_told_apart() -> None:
    right = np.array([0.0, 0, 1, 1])
    assert told_apart(np.array([0.1, 0.2, 0.3, 0.4]), right) == 1
    assert told_apart(np.array([0.4, 0.3, 0.2, 0.1]), right) == 0
    assert told_apart(np.full(4, 0.5), right) == 0.5


@pytest.mark.parametrize("by_kind", [True, False])
def test_the_learned_chance_gains_where_the_kind_says_something_and_only_there(by_kind: bool) -> None:
    played = play(prompts(by_kind), 200)
    gained = with_interval(played.recovered("learned") - played.recovered("length"))
    assert (gained["low"] > 0.1) is by_kind
    assert with_interval(played.recovered("all known"))["low"] > with_interval(played.recovered("learned"))["high"]
    assert played.recovered("random") == pytest.approx(0.5)


def test_the_recorded_prompts_are_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quality, "N_SPLITS", 2)
    assert quality.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]
    assert [(one["set"], one["known"]) for one in found] == [
        ("graded", 100), ("graded", 400), ("graded", 2000), ("checked", 200),
    ]  # fmt: skip
    for one in found:
        assert {"random", "length", "learned", "all known"} <= set(one["routers"])
        assert one["device"] < one["server"]
    assert quality.main([]) == 0
    assert "told apart" in capsys.readouterr().out
    assert figures(GRADES)["sets"] == found


def test_what_cannot_be_read_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / GRADED).write_text("set,tokens\nmmlu,x\n")
    for name in (GRADED, CHECKED):
        with pytest.raises(ConfigError, match=name):
            read(tmp_path / name)


def test_what_the_kinds_were_chosen_by_is_not_played(tmp_path: Path) -> None:
    evals = tmp_path / "routellm" / "evals"
    for folder, names in {"mmlu/responses": ["mmlu_a", "mmlu_b", "mmlu_c"], "gsm8k": ["gsm8k_responses"]}.items():
        (evals / folder).mkdir(parents=True)
        for name in names:
            rows = "".join(f"{name} {i},True,{i == 1}\n" for i in range(4))
            (evals / folder / f"{name}.csv").write_text(f"prompt,small,large\n{rows}")
    assert list(graded(tmp_path)) == [
        ("mmlu", "mmlu_b 1", True, True), ("mmlu", "mmlu_b 3", True, False), ("gsm8k", "gsm8k_responses 1", True, True),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="RouteLLM"):
        list(graded(evals))


def test_the_embedded_model_answers_a_question_and_says_how_sure_it_is() -> None:
    (asked,) = (one for one in tasks(1) if one.kind == "program")
    row = dict(zip(CHECKED_COLUMNS, Answering().answer(asked), strict=True))
    assert (row["set"], row["kinds"]) == ("program", "code numbers")
    assert float(row["prompt_least"]) < float(row["prompt_mean"]) < 0
    assert float(row["first_least"]) <= float(row["first_mean"]) <= 0


def test_our_questions_are_of_all_kinds_and_each_is_once_there() -> None:
    found = tasks(20)
    assert {one.kind for one in found} == set(MAKERS)
    assert len({one.prompt for one in found}) == len(found)
    assert found == tasks(20)


@pytest.mark.parametrize(
    ("kind", "right", "answer", "is_right"),
    [
        ("sum", "1234", "It is 1,234.", True), ("sum", "12", "It is 123.", False), ("capital", "Paris", "PARIS!", True),
        ("copy", "a b", "a  b", True), ("json", '{"a": 1}', '```json\n{\n  "a": 1\n}', True), ("sum", "5", "-", False),
    ],
)  # fmt: skip
def test_an_answer_is_right_if_it_has_the_right_words(kind: str, right: str, answer: str, is_right: bool) -> None:
    assert Task(kind, "?", right).is_right(answer) is is_right
