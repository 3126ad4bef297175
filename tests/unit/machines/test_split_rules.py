"""Who decides a token on a device over two machines: what settings, request and exit come to, without a model."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from disco_daemon.api.http import sse
from disco_daemon.api.openai import openai_request
from disco_daemon.engine import wire
from disco_daemon.errors import RequestError
from disco_daemon.link.protocol import AnswerOpened, DraftVerdict, DrawRules, JudgeDrafts
from disco_daemon.link.rows.codec import RowArray
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import MAX_HELD, EdgeAnswer
from disco_daemon.machines.split.split_device import PartnerEnergy
from disco_daemon.machines.split.split_rules import LEAST_COVERAGE, SplitRules, resolve, why_not
from disco_daemon.types import BOTH, GenerationRequest, Refusal, Side, SplitMode, SplitWish
from tests.fixtures import chat_bodies

GOOD = 0.4  # of the tokens may leave
ASKED = GenerationRequest("r", ({"role": "user", "content": "Hi"},))


def wishing(mode: SplitMode | None = None, theta: float | None = None) -> GenerationRequest:
    return replace(ASKED, split=SplitWish(mode, theta))


def answered(request: GenerationRequest, rules: SplitRules, coverage: float | None = GOOD) -> GenerationRequest:
    found = resolve(request, rules, coverage)
    assert not isinstance(found, Refusal), found
    return found


def refused(request: GenerationRequest, rules: SplitRules, coverage: float | None = GOOD) -> str:
    found = resolve(request, rules, coverage)
    assert isinstance(found, Refusal)
    return str(found)


def test_the_settings_say_the_mode_unless_the_request_does() -> None:
    rules = SplitRules("confident", 0.8)
    found = answered(ASKED, rules)
    assert (found.split.mode, found.split.theta, found.split.goes_on) == ("confident", 0.8, True)
    assert answered(wishing(theta=0.95), rules).split.theta == 0.95
    exact = answered(wishing("exact"), rules).split
    assert (exact.mode, exact.theta) == ("exact", None)
    assert answered(wishing("alone"), rules).split.mode == "alone"


def test_an_answer_goes_on_alone_only_where_the_settings_let_it_and_there_is_an_exit() -> None:
    assert answered(ASKED, SplitRules()).split.goes_on
    assert not answered(ASKED, SplitRules(goes_on=False)).split.goes_on
    assert not answered(ASKED, SplitRules(), None).split.goes_on


@pytest.mark.parametrize("mode", ["confident", "alone"])
def test_a_mode_that_needs_an_exit_is_refused_with_the_way_to_one(mode: SplitMode) -> None:
    assert "disco exits train" in refused(wishing(mode), SplitRules(), None)
    assert why_not(mode, None)
    assert why_not(mode, LEAST_COVERAGE) is None


def test_confident_is_offered_only_where_the_exit_earns_it_and_the_refusal_has_the_number() -> None:
    text = refused(wishing("confident"), SplitRules(), 0.12)
    assert "12%" in text
    assert "30%" in text
    assert answered(wishing("alone"), SplitRules(), 0.12).split.mode == "alone"


def test_a_small_model_that_drafts_may_answer_alone_and_decides_no_token_of_an_answer_of_both() -> None:
    rules = SplitRules(drafts=True)
    assert "whole small model" in refused(wishing("confident"), rules, 1.0)
    assert answered(wishing("alone"), rules, 0.0).split.mode == "alone"
    assert answered(ASKED, rules, 0.0).split.goes_on
    assert "small model" in refused(replace(ASKED, private=True), rules, 0.0)


def test_theta_without_the_mode_that_it_is_of_is_refused() -> None:
    assert "confident" in refused(wishing(theta=0.9), SplitRules())


@pytest.mark.parametrize("mode", [None, "exact", "confident", "alone"])
def test_a_private_request_is_alone_or_refused_whatever_it_asks_for(mode: SplitMode | None) -> None:
    private = replace(wishing(mode), private=True)
    assert "split.private_alone" in refused(private, SplitRules())
    assert "early exit" in refused(private, SplitRules(private_alone=True), None)
    found = answered(private, SplitRules(mode="confident", private_alone=True), 0.1)
    assert (found.split.mode, found.split.theta, found.split.goes_on) == ("alone", None, False)


# --- the request and its answer's header --------------------------------------------------------------------------


def parsed(**options: object) -> GenerationRequest:
    body = {"model": "disco", "messages": [{"role": "user", "content": "Hi"}], "disco": options}
    chat, extra = chat_bodies.parse(json.dumps(body).encode())
    return openai_request.to_generation(chat, extra, "r", BOTH)


@pytest.mark.parametrize("theta", [0, -0.1, 1.01, "0.9", True])
def test_theta_is_above_zero_and_up_to_one(theta: object) -> None:
    with pytest.raises(RequestError, match="theta"):
        parsed(split_mode="confident", theta=theta)


def test_a_request_says_its_mode_and_one_that_is_not_exact_is_the_devices() -> None:
    found = parsed(split_mode="confident", theta=1)
    assert (found.split.mode, found.split.theta, found.allowed) == ("confident", 1.0, frozenset({Side.DEVICE}))
    assert parsed(split_mode="exact").allowed == BOTH
    with pytest.raises(RequestError, match="split_mode"):
        parsed(split_mode="fast")
    with pytest.raises(RequestError, match="contradict"):
        parsed(split_mode="alone", route="server")


def test_the_header_of_the_quality_is_there_for_a_device_over_two_machines_only() -> None:
    assert sse.headers("r", "device", "alone")["X-Disco-Quality"] == "alone"
    assert "X-Disco-Quality" not in sse.headers("r", "device")


# --- tokens that leave --------------------------------------------------------------------------------------------


def rows(n: int) -> RowArray:
    return np.ones((n, 4), np.float32)


def leaving() -> EdgeAnswer:
    """A confident answer of three tokens whose rows the partner has but for the last, and that is being drawn."""
    answer = EdgeAnswer("a", (1, 2, 3), n_ctx=100, n_vocab=50, is_eager=False)
    answer.add(0, (1, 2, 3), rows(3))
    answer.open()
    answer.opened(AnswerOpened(id="a", n_past=2))
    answer.begin_drawing(DrawRules())
    return answer


def test_rows_of_tokens_that_left_go_up_together_when_the_partner_is_asked() -> None:
    answer, link = leaving(), LinkCredits(100)
    for token in (4, 5, 6):
        answer.leave(token)
        answer.add(answer.n_rows, (token,), rows(1))
        assert not answer.send_due(link)
    assert answer.judge() == JudgeDrafts(id="a", turn=0, start=5, end=6, left=(4, 5, 6))
    sent = [(message.pos, message.tokens, message.drafts) for message, _ in answer.send_due(link)]
    assert sent == [(2, (3, 4, 5), False), (5, (6,), True)]
    taken = answer.verdict(DraftVerdict(id="a", turn=1, start=5, tokens=(7,)))
    assert taken is not None
    assert (answer.tokens, answer.left) == ([1, 2, 3, 4, 5, 6, 7], [])


def test_many_rows_of_tokens_that_left_do_not_wait_for_a_question() -> None:
    answer, link = leaving(), LinkCredits(100)
    for i in range(MAX_HELD + 1):
        answer.leave(4)
        answer.add(3 + i, (4,), rows(1))
    [(message, _)] = answer.send_due(link)
    assert (message.pos, len(message.tokens), message.drafts) == (2, MAX_HELD + 1, False)


def test_no_token_leaves_while_a_verdict_is_awaited_and_none_stays_behind() -> None:
    answer = leaving()
    answer.judge()
    with pytest.raises(ValueError, match="cannot be taken"):
        answer.leave(4)
    assert answer.tokens == [1, 2, 3]


def test_a_new_link_is_told_the_text_with_the_tokens_that_left() -> None:
    answer = leaving()
    answer.leave(4)
    assert answer.open().tokens == (1, 2, 3, 4)
    answer.opened(AnswerOpened(id="a", n_past=0))
    assert answer.begin_drawing(DrawRules(), (3, 4)).answer == (3, 4)
    answer.add(3, (4,), rows(1))
    assert answer.judge().left == ()


def test_the_planner_learns_what_the_partner_spends_on_a_token_of_a_prompt_and_of_an_answer() -> None:
    spent = PartnerEnergy()
    use = wire.SplitUsage(
        edge_rows=140, partner_rows=150, round_trips=20, drafted=30, accepted=19, bytes_up=1, bytes_down=1,
        partner_s=1.5, prompt_rows=100, partner_prompt_s=0.5,
    )  # fmt: skip
    spent.observe(use, 40, 12.0)
    assert spent.prefill_j == pytest.approx(12 * 0.5 / 100)
    assert spent.decode_j == pytest.approx(12 * 1.0 / 40)
    again = msgspec.structs.replace(use, prompt_rows=0, partner_prompt_s=0.0, partner_s=0.0)  # its prompt was cached
    spent.observe(again, 40, 12.0)
    assert spent.prefill_j == pytest.approx(12 * 0.5 / 100)
    assert spent.decode_j == pytest.approx(0.8 * 12 * 1.0 / 40)
    spent.observe(msgspec.structs.replace(use, round_trips=0), 0, 12.0)  # an answer made alone, or ended at once
    assert spent.decode_j == pytest.approx(0.8 * 12 * 1.0 / 40)
