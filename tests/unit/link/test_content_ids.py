"""Token ids in place of rows: what a partner with all layers takes, what it refuses, and what its edge sends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from disco_daemon.link.protocol import (
    IDS,
    AnswerFailed,
    AnswerOpened,
    BadFrameError,
    BeginDrawing,
    Credit,
    DraftVerdict,
    DrawRules,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    SendRows,
)
from disco_daemon.link.rows.content import ContentChange, ContentManager
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import MAX_ROWS, EdgeAnswer

N_VOCAB, N_CTX, CREDITS = 10, 40, 200
KEY, TEXT = (1, "a"), (1, 2, 3, 4, 5)


def manager() -> ContentManager:
    """A partner that has all layers, with one answer open."""
    made = ContentManager(0, N_VOCAB, N_CTX, max_answers=2, credits=CREDITS)
    made.open(1, OpenAnswer(id="a", tokens=TEXT), n_have=0)
    return made


def ids(tokens: tuple[int, ...], pos: int = 0, *, codec: str = IDS, drafts: bool = False) -> SendRows:
    return SendRows(id="a", turn=0, pos=pos, tokens=tokens, codec=codec, drafts=drafts)


def failure(change: ContentChange) -> tuple[str, str]:
    assert change.ended
    failed = change.send[0]
    assert isinstance(failed, AnswerFailed)
    return failed.reason, failed.message


def rows_of(n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.empty((n, 0), np.float32)


def test_ids_are_computed_and_judged_as_rows_are() -> None:
    made = manager()
    made.rows(1, ids(TEXT[:4]), b"")
    plain = made.take(KEY, 40)
    assert plain is not None
    assert (plain.tokens, plain.rows.shape, plain.n_logits) == (TEXT[:4], (4, 0), 0)
    assert made.computed(KEY, 4).send == (Credit(rows=4),)
    made.begin(1, BeginDrawing(id="a", sampling=DrawRules()))
    made.rows(1, ids((5, 6, 7), 4, drafts=True), b"")
    made.judge(1, JudgeDrafts(id="a", turn=0, start=4, end=7))
    run = made.take(KEY, 40)
    assert run is not None
    assert (run.tokens, run.n_logits) == ((5, 6, 7), 3)
    made.computed(KEY, 3)
    said = made.draw(KEY, (6, 9)).send[0]
    assert isinstance(said, DraftVerdict)
    assert said.tokens == (6, 9)


@pytest.mark.parametrize(
    ("sent", "payload", "reason", "message"),
    [
        (ids((1, N_VOCAB)), b"", "bad_rows", "not all in the vocabulary"),
        (ids((-1,)), b"", "bad_rows", "not all in the vocabulary"),
        (ids((1,), 2), b"", "bad_rows", "the next row is that of 0"),
        (ids(()), b"", "bad_rows", "a frame without a row"),
        (ids((1,) * 41), b"", "context", "do not fit into a context of 40"),
        (ids((1,)), b"1234", "bad_rows", "have 0 bytes, not 4"),
        (ids((1,), codec="f32"), b"", "bad_rows", "no rows of 0 numbers by the codec 'f32'"),
    ],
)
def test_what_no_id_can_be_ends_its_answer(sent: SendRows, payload: bytes, reason: str, message: str) -> None:
    found = failure(manager().rows(1, sent, payload))
    assert found[0] == reason
    assert message in found[1]


def test_ids_at_a_partner_that_has_only_upper_layers_end_their_answer() -> None:
    made = ContentManager(4, N_VOCAB, N_CTX, max_answers=2, credits=CREDITS)
    made.open(1, OpenAnswer(id="a", tokens=TEXT), n_have=0)
    assert "no rows of 4 numbers by the codec 'ids'" in failure(made.rows(1, ids((1,)), b""))[1]


def test_more_ids_than_credits_are_the_fault_of_the_peer() -> None:
    with pytest.raises(BadFrameError, match="credits were left"):
        manager().rows(1, ids((1,) * (CREDITS + 1)), b"")


# --- the edge ---------------------------------------------------------------------------------------------------------


def edge(text: tuple[int, ...] = TEXT) -> EdgeAnswer:
    return EdgeAnswer("a", text, n_ctx=1000, n_vocab=N_VOCAB, codec=IDS)


def test_a_prompt_goes_up_before_any_of_it_is_computed_in_frames_of_bounded_size() -> None:
    text = (1, 2, 3) * 70
    answer = edge(text)
    answer.opened(AnswerOpened(id="a", n_past=7))
    sent = answer.send_due(LinkCredits(1000))
    assert sum((rows.tokens for rows, _ in sent), ()) == text[7:-1]
    assert all(payload == b"" and rows.codec == IDS and len(rows.tokens) <= MAX_ROWS for rows, payload in sent)
    assert all(one.pos + len(one.tokens) == other.pos for (one, _), (other, _) in pairwise(sent))
    assert answer.missing == range(len(text) - 1, len(text) - 1)
    assert answer.n_covered == len(text), "nothing has to be computed for the partner's sake"


def test_what_is_computed_is_no_news_and_a_new_text_has_its_ids_at_once() -> None:
    answer = edge()
    answer.fill(0, TEXT, rows_of(5))
    assert answer.n_rows == 5
    answer.cut(3)
    answer.extend((7, 8))
    assert (answer.n_rows, answer.tokens) == (5, [1, 2, 3, 7, 8])


def test_behind_a_verdict_that_is_another_token_its_cell_is_still_to_be_computed() -> None:
    answer = edge()
    answer.opened(AnswerOpened(id="a", n_past=0))
    answer.begin_drawing(DrawRules())
    answer.fill(5, (6, 7), rows_of(2))
    answer.judge()
    answer.send_due(LinkCredits(100))
    taken = answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6, 9)))
    assert taken is not None
    assert (taken.n_rows, answer.n_rows, answer.tokens) == (6, 6, [*TEXT, 6, 9])


def test_ids_that_are_asked_for_again_need_no_computing() -> None:
    answer, link = edge(), LinkCredits(100)
    answer.opened(AnswerOpened(id="a", n_past=0))
    answer.begin_drawing(DrawRules())
    answer.judge()
    answer.send_due(link)
    assert answer.need(NeedRows(id="a", turn=1, pos=2)) == (JudgeDrafts(id="a", turn=1, start=4, end=5),)
    assert [(rows.pos, rows.tokens) for rows, _ in answer.send_due(link)] == [(2, (3, 4)), (4, (5,))]
