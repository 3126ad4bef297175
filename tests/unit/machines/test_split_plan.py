"""The plan of a split says what each cut costs on both machines, and takes the best that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.cli.main import main
from disco_daemon.config.schema import Config
from disco_daemon.errors import ConfigError
from disco_daemon.link.relay.handshake import TheCuts
from disco_daemon.link.relay.join import MeasuredLink
from disco_daemon.machines.split.cut_plan import (
    MORE_ROWS,
    ExitFacts,
    LinkSpeed,
    PlanInput,
    SplitPlan,
    describe_cuts,
    expected,
    plan_cuts,
)
from disco_daemon.machines.split.joining import plan_input, require_room
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import read_head

GIVEN = PlanInput(0.030, 0.030, LinkSpeed(0.020, 12.5e6), 8e9, 8e9, n_cells=8192)


def cuts(chances: dict[int, float] | None = None, exit_bytes: int = 0) -> TheCuts:
    exits = {layer: ExitFacts(chance, exit_bytes) for layer, chance in (chances or {}).items()}
    return describe_cuts(*read_head(default_model_path()), exits)


def planned(
    given: PlanInput, chances: dict[int, float] | None = None, hosted: int = 0, exit_bytes: int = 0
) -> SplitPlan:
    return plan_cuts(msgspec.structs.replace(cuts(chances, exit_bytes), n_cells=8192, hosted=hosted), given)


def test_each_cut_of_thirty_layers_has_its_share_of_the_weights_and_of_the_time() -> None:
    plan = planned(GIVEN)
    assert [one.layer for one in plan.cuts] == list(range(1, 30))
    for lower, upper in zip(plan.cuts, plan.cuts[1:], strict=False):
        assert lower.edge_bytes < upper.edge_bytes
        assert lower.partner_bytes > upper.partner_bytes
        assert lower.edge_s_per_token < upper.edge_s_per_token
        # On equal machines the whole takes what it takes anywhere.
        assert lower.edge_s_per_token + lower.partner_s_per_token == pytest.approx(0.030)
        assert lower.token_s == pytest.approx(0.030 + 0.020 + 576 * 4 / 12.5e6)


def test_equal_machines_leave_the_partner_as_little_as_fits() -> None:
    assert planned(GIVEN).chosen == 29
    weights = planned(GIVEN).cuts[14]
    tight = (weights.edge_bytes + 8192 * (15 * 768 + 4 * 576)) / 0.8  # cells of 15 layers, and rows that are kept
    assert planned(replace(GIVEN, edge_memory_bytes=tight)).chosen == 15


def test_a_faster_partner_gets_more_and_a_faster_edge_less() -> None:
    assert planned(replace(GIVEN, partner_token_s=0.003)).chosen == 1
    assert planned(replace(GIVEN, edge_token_s=0.003)).chosen == 29


def test_an_exit_shares_the_round_trip_among_the_tokens_that_it_gives_and_its_cut_is_the_best() -> None:
    plain, drafted = planned(GIVEN), planned(GIVEN, {24: 0.72})
    assert plain.cuts[23].tokens_per_round_trip == 1.0
    assert 1.8 < drafted.cuts[23].tokens_per_round_trip < 2.6
    assert drafted.cuts[23].token_s < plain.cuts[23].token_s - 0.005
    assert drafted.chosen == 24
    assert "right 72% of the time" in drafted.why
    assert "no exit is kept" in plain.why


def test_an_exits_weights_are_read_for_each_row_at_the_edge() -> None:
    whole = cuts().whole_bytes
    free, weighed = planned(GIVEN, {24: 0.72}), planned(GIVEN, {24: 0.72}, exit_bytes=whole // 4)
    assert weighed.cuts[23].token_s > free.cuts[23].token_s + 0.25 * 0.030, "a token takes a row or more"
    assert weighed.cuts[22] == free.cuts[22], "there is none behind 23 layers"
    assert weighed.cuts[23].edge_bytes == free.cuts[23].edge_bytes + whole // 4, "the edge's memory has to hold it"
    assert weighed.cuts[23].partner_bytes == free.cuts[23].partner_bytes, "it is the edge's alone"


@given(st.floats(0.0, 0.1), st.floats(0.0, 1.0))
def test_a_draft_is_judged_for_a_row_of_a_prompt_but_for_a_quarter_of_a_token_at_least(row_s: float, c: float) -> None:
    measured = replace(GIVEN, partner_row_s=row_s)
    assert measured.more_rows == pytest.approx(min(1.0, max(0.25, row_s / 0.030)))
    slower, unmeasured = (expected(0.01, 0.01, 2304, GIVEN.link, c, m) for m in (measured.more_rows, MORE_ROWS))
    assert slower.token_s >= unmeasured.token_s * (1 - 1e-9)


@given(st.floats(0.25, 1.0), st.floats(0.0, 1.0))
def test_drafts_are_judged_together_or_one_after_the_other_whichever_is_quicker(more_rows: float, c: float) -> None:
    run = expected(0.01, 0.02, 2304, GIVEN.link, c, more_rows)
    assert run.n_tokens == pytest.approx(sum(c**i for i in range(run.n_drafts + 1)))
    sent_s = 0.020 + (run.n_drafts + 1) * (0.01 + 2304 / 12.5e6)
    judged_s = 0.02 * min(1 + more_rows * run.n_drafts, run.n_tokens)
    assert run.token_s * run.n_tokens == pytest.approx(sent_s + judged_s)
    no_drafts_s = 0.020 + 0.01 + 0.02 + 2304 / 12.5e6
    assert run.token_s <= no_drafts_s * (1 + 1e-9)


def test_what_a_row_of_a_prompt_takes_there_is_scaled_with_what_a_token_takes() -> None:
    there = msgspec.structs.replace(cuts(), token_s=0.02, row_s=0.012)
    assert plan_input(Config(), there, MeasuredLink(0.003, 1e7, 1e7, 0.0), 8e9).more_rows == pytest.approx(0.6)


def test_on_a_fast_link_an_exit_that_is_often_wrong_drafts_nothing() -> None:
    near = replace(GIVEN, link=LinkSpeed(0.0001, 1e9))
    assert planned(near, {15: 0.3}).cuts[14].tokens_per_round_trip == 1.0


def test_a_partner_that_has_a_range_already_leaves_one_cut_and_it_has_to_fit_here() -> None:
    plan = planned(GIVEN, hosted=15)
    assert plan.chosen == 15
    assert "has the layers from 15 on for other machines" in plan.why
    tight = planned(replace(GIVEN, edge_memory_bytes=1e8), hosted=15)
    assert tight.chosen is None
    assert "GB here with 8192 tokens of KV cache, and 0.10 GB are free" in tight.why


def test_layers_that_do_not_fit_on_this_machine_are_refused_with_the_numbers() -> None:
    require_room(cuts(), 15, 8192, 8e9)
    with pytest.raises(ConfigError, match=r"layers 0-15 take 0\.\d+ GB here, with 8192 tokens .* 0\.10 GB are free"):
        require_room(cuts(), 15, 8192, 1e8)


def test_what_was_not_measured_is_assumed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    link, config = MeasuredLink(0.003, 1e7, 1e7, 0.0), Config()
    neither = plan_input(config, cuts(), link, 8e9)
    assert neither.edge_token_s == neither.partner_token_s > 0
    assert "neither machine was measured" in neither.assumed
    there = plan_input(config, msgspec.structs.replace(cuts(), token_s=0.02), link, 8e9)
    assert (there.edge_token_s, there.partner_token_s) == (0.02, 0.02)
    assert "counts as the partner" in there.assumed


def test_no_cut_is_chosen_where_the_memory_is_short_and_the_reason_has_the_numbers() -> None:
    plan = planned(replace(GIVEN, edge_memory_bytes=1e6))
    assert plan.chosen is None
    assert "0.00 GB are free for the lower layers, 8.00 GB" in plan.why


def test_the_verb_prints_the_document_that_other_programs_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    words = "split plan --json --edge-token-ms 30 --partner-token-ms 10 --rtt-ms 5 --edge-gib 8 --partner-gib 8"
    assert main(words.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"cuts", "chosen", "why"}
    assert set(document["cuts"][0]) == {
        "layer", "edge_bytes", "partner_bytes", "edge_s_per_token", "partner_s_per_token", "tokens_per_round_trip",
        "token_s",
    }  # fmt: skip
    assert main(words.replace("--json ", "").split()) == 0
    assert "<- best" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--rtt-ms 0", "--mbit -1", "--edge-gib nan"])
def test_a_link_that_cannot_be_is_wrong_usage(wrong: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["split", "plan", *wrong.split()])
    assert ended.value.code == 2


def test_a_machine_that_was_not_measured_says_how_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISCO_CONFIG", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert main(["split", "plan"]) == 1
    assert "disco tune" in capsys.readouterr().err
