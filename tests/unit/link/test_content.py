"""The partner's content manager and the edge's mirror: what they do, and how they refuse what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from disco_daemon.link.protocol import (
    ERA,
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BadFrameError,
    BeginDrawing,
    CloseAnswer,
    Credit,
    CutAnswer,
    DraftVerdict,
    DrawRules,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    SendRows,
)
from disco_daemon.link.rows.codec import RowArray, encode_rows
from disco_daemon.link.rows.content import ContentChange, ContentManager
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import MAX_NEEDS, EdgeAnswer, send_all_due
from disco_daemon.link.rows.pending import MAX_JUDGED

N_EMBD, N_VOCAB, N_CTX, CREDITS = 4, 10, 40, 200
KEY = (1, "a")


def manager() -> ContentManager:
    """A manager with one answer open, of five tokens."""
    made = ContentManager(N_EMBD, N_VOCAB, N_CTX, max_answers=2, credits=CREDITS)
    opened = made.open(1, OpenAnswer(id="a", tokens=(1, 2, 3, 4, 5)), n_have=0)
    assert opened == ContentChange((AnswerOpened(id="a", n_past=0),), keep=0)
    return made


def rows_of(n: int) -> RowArray:
    return np.arange(n * N_EMBD, dtype=np.float32).reshape(n, N_EMBD)


def send(
    made: ContentManager, tokens: tuple[int, ...], pos: int = 0, turn: int = 0, name: str = "a", *, drafts: bool = False
) -> ContentChange:
    message = SendRows(id=name, turn=turn, pos=pos, tokens=tokens, drafts=drafts)
    return made.rows(1, message, encode_rows("f32", rows_of(len(tokens))))


def failure(change: ContentChange) -> tuple[str, str]:
    """Reason and message of the answer's end."""
    assert change.ended
    failed = change.send[0]
    assert isinstance(failed, AnswerFailed)
    return failed.reason, failed.message


def judged() -> ContentManager:
    """A manager whose answer has a run of three rows to compute behind four plain ones."""
    made = manager()
    made.begin(1, BeginDrawing(id="a", sampling=DrawRules()))
    made.judge(1, JudgeDrafts(id="a", turn=0, start=4, end=7))
    send(made, (1, 2, 3, 4))
    send(made, (5, 6, 7), pos=4, drafts=True)
    return made


# --- what is computed -------------------------------------------------------------------------------------------------


def test_prompt_rows_are_computed_as_they_come_in_pieces_of_any_size() -> None:
    made = manager()
    send(made, (1, 2, 3))
    ready = made.take(KEY, 2)
    assert ready is not None
    assert (ready.pos, ready.tokens, ready.n_logits) == (0, (1, 2), 0)
    assert ready.rows.tobytes() == rows_of(3)[:2].tobytes()
    assert made.computed(KEY, 2).send == (Credit(rows=2),)
    ready = made.take(KEY, 99)
    assert ready is not None
    assert (ready.pos, ready.tokens) == (2, (3,))


def test_drafts_are_computed_with_logits_together() -> None:
    made = judged()
    ready = made.take(KEY, 7)
    assert ready is not None
    assert (len(ready.tokens), ready.n_logits) == (7, 3)
    made.computed(KEY, 7, busy_s=0.5)
    assert made.take(KEY, 99) is None
    change = made.draw(KEY, (6, 9))
    assert change == ContentChange(
        (DraftVerdict(id="a", turn=1, start=4, tokens=(6, 9), n_judged=3, n_rows=7, busy_s=0.5),), keep=6
    )
    assert send(made, (9,), pos=6, turn=1, drafts=True) == ContentChange()


def test_drafts_are_computed_one_after_the_other_up_to_the_first_wrong_one() -> None:
    made = judged()
    ready = made.take(KEY, 5)
    assert ready is not None
    assert (len(ready.tokens), ready.n_logits) == (5, 1)
    made.computed(KEY, 5, busy_s=0.25)
    assert made.draw(KEY, (6,)) == ContentChange()  # it is the next draft
    ready = made.take(KEY, 1)
    assert ready is not None
    assert (ready.pos, ready.tokens, ready.n_logits) == (5, (6,), 1)
    made.computed(KEY, 1, busy_s=0.25)
    change = made.draw(KEY, (9,))
    said = DraftVerdict(id="a", turn=1, start=4, tokens=(6, 9), n_judged=2, n_rows=6, busy_s=0.5)
    assert change == ContentChange((said, Credit(rows=1)), keep=6)  # the row of the draft behind it was never computed


def test_a_text_that_ends_with_a_draft_has_its_verdict() -> None:
    made = judged()
    made.computed(KEY, 5)
    assert made.draw(KEY, (6,), ends=True).keep == 5


def test_what_was_drawn_before_an_eviction_is_said_before_rows_are_asked_for() -> None:
    made = judged()
    made.computed(KEY, 5)
    made.draw(KEY, (6,))
    change = made.evicted(KEY, 2)
    said = DraftVerdict(id="a", turn=1, start=4, tokens=(6,), n_judged=1, n_rows=5)
    assert change == ContentChange((said, Credit(rows=2), NeedRows(id="a", turn=2, pos=2)), keep=2)


def test_drafts_wait_until_all_of_them_are_there_and_are_to_be_judged() -> None:
    made = manager()
    send(made, (1, 2, 3, 4))
    send(made, (5, 6), pos=4, drafts=True)
    made.computed(KEY, 4)
    assert made.take(KEY, 99) is None
    made.begin(1, BeginDrawing(id="a", sampling=DrawRules()))
    made.judge(1, JudgeDrafts(id="a", turn=0, start=4, end=7))
    assert made.take(KEY, 99) is None
    send(made, (7, 8), pos=6, drafts=True)  # and one beyond
    ready = made.take(KEY, 99)
    assert ready is not None
    assert ready.tokens == (5, 6, 7)
    made.computed(KEY, 3)
    assert made.draw(KEY, (6, 7, 8)).send[1:] == (Credit(rows=1),)  # rows of the last turn are sent once more


def test_an_eviction_asks_for_rows_again_and_drafts_have_to_be_judged_again() -> None:
    made = judged()
    made.computed(KEY, 7)
    change = made.evicted(KEY, 5)
    assert change.keep == 4  # the logits of the drafts are gone, too
    assert change.send == (NeedRows(id="a", turn=1, pos=4),)
    assert send(made, (8,), pos=7, drafts=True).send == (Credit(rows=1),)  # was on its way
    send(made, (5, 6, 7), pos=4, turn=1, drafts=True)
    assert made.take(KEY, 99) is None
    made.judge(1, JudgeDrafts(id="a", turn=1, start=4, end=7))
    assert made.take(KEY, 99) is not None
    assert made.evicted(KEY, 4) == ContentChange()  # nothing more is gone


def test_rows_may_overtake_the_cut_that_begins_their_turn() -> None:
    made = manager()
    send(made, (1, 2, 3, 4))
    assert send(made, (7, 8), pos=2, turn=ERA) == ContentChange()
    ready = made.take(KEY, 99)
    assert ready is not None
    assert ready.tokens == (1, 2, 3, 4)
    change = made.cut(1, CutAnswer(id="a", turn=ERA, n=2))
    assert change.send == (Credit(rows=2),)
    ready = made.take(KEY, 99)
    assert ready is not None
    assert ready.tokens == (1, 2, 7, 8)


def test_a_cut_above_what_has_come_asks_for_what_is_missing() -> None:
    made = manager()
    send(made, (1, 2))
    change = made.cut(1, CutAnswer(id="a", turn=ERA, n=4))
    assert change.send == (NeedRows(id="a", turn=ERA + 1, pos=2),)
    assert send(made, (3, 4), pos=2).send == (Credit(rows=2),)  # of the turn before
    assert send(made, (3, 4), pos=2, turn=ERA + 1) == ContentChange()


def test_a_closed_answer_says_what_it_computed_and_rows_on_their_way_give_their_credits_back() -> None:
    made = judged()
    made.computed(KEY, 4, busy_s=0.25)
    assert made.close(1, CloseAnswer(id="a")).send == (AnswerClosed(id="a", n_rows=4, busy_s=0.25), Credit(rows=3))
    assert send(made, (8, 9), pos=7, drafts=True).send == (Credit(rows=2),)
    for change in (
        made.close(1, CloseAnswer(id="a")),
        made.cut(1, CutAnswer(id="a", turn=ERA, n=1)),
        made.judge(1, JudgeDrafts(id="a", turn=0, start=4, end=7)),
        made.begin(1, BeginDrawing(id="a", sampling=DrawRules())),
    ):
        assert change == ContentChange()
    assert made.n_rows == 4
    assert made.n_held == 0


def test_a_peer_that_leaves_takes_its_answers_with_it_and_no_other_ones() -> None:
    made = judged()
    made.open(2, OpenAnswer(id="a", tokens=(1,)), n_have=0)
    assert made.peer_left(1) == (KEY,)
    assert [content.key for content in made.contents] == [(2, "a")]
    assert made.peer_left(1) == ()
    assert made.n_held == 0
    made.open(1, OpenAnswer(id="a", tokens=(1,)), n_have=0)  # the id is free again


def test_the_row_of_the_last_token_is_expected_even_if_its_kv_is_there() -> None:
    made = ContentManager(N_EMBD, N_VOCAB, N_CTX, max_answers=1, credits=CREDITS)
    change = made.open(1, OpenAnswer(id="a", tokens=(1, 2, 3), private=True), n_have=3)
    assert change == ContentChange((AnswerOpened(id="a", n_past=2),), keep=2)
    content = made.get(KEY)
    assert content is not None
    assert content.private


# --- what ends an answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "pos", "turn", "drafts", "reason", "message"),
    [
        ((5,), 5, 0, False, "bad_rows", "rows from 5 on came, but the next row is that of 4"),
        ((5,), 3, 0, False, "bad_rows", "rows from 3 on came, but the next row is that of 4"),
        ((5,), -1, 0, False, "bad_rows", "rows from -1 on came"),
        ((5,), 4, 1, False, "bad_rows", "rows of turn 1 came in turn 0"),
        ((5,), 4, ERA + 1, False, "bad_rows", f"rows of turn {ERA + 1} came in turn 0"),
        ((10,), 4, 0, False, "bad_rows", "ids from 10 to 10 are not all in the vocabulary of 10"),
        ((1, -1), 4, 0, False, "bad_rows", "ids from -1 to 1 are not"),
        ((), 4, 0, False, "bad_rows", "a frame without a row"),
        ((1,) * 37, 4, 0, False, "context", "41 tokens do not fit into a context of 40"),
    ],
)
def test_rows_that_cannot_be_end_their_answer(
    tokens: tuple[int, ...], pos: int, turn: int, drafts: bool, reason: str, message: str
) -> None:
    made = manager()
    send(made, (1, 2, 3, 4))
    change = send(made, tokens, pos, turn, drafts=drafts)
    assert failure(change)[0] == reason
    assert message in failure(change)[1]
    assert change.send[1:] == (Credit(rows=4 + len(tokens)),)
    assert made.n_held == 0


def test_rows_of_another_length_or_not_finite_or_by_another_codec_end_their_answer() -> None:
    for codec, payload, message in (
        ("f32", bytes(15), "1 rows of 4 numbers by f32 have 16 bytes, not 15"),
        ("f32", b"\x00\x00\x80\x7f" * 4, "not finite"),
        ("bf16", bytes(16), "by bf16 have 8 bytes, not 16"),
        ("zip", b"", "codec 'zip'"),
    ):
        rows = SendRows(id="a", turn=0, pos=0, tokens=(1,), codec=codec)
        change = manager().rows(1, rows, payload)
        assert failure(change)[0] == "bad_rows"
        assert message in failure(change)[1]
        assert change.send[1:] == (Credit(rows=1),)


def test_drafts_and_plain_rows_have_their_places() -> None:
    for begin, end, drafts in ((4, 8, False), (4, 8, True)):
        made = manager()
        made.begin(1, BeginDrawing(id="a", sampling=DrawRules()))
        made.judge(1, JudgeDrafts(id="a", turn=0, start=begin, end=end))
        change = send(made, (1, 2, 3, 4, 5), drafts=drafts)
        assert "drafts" in failure(change)[1]
    made = manager()
    send(made, (1,), drafts=True)
    assert "came as no drafts" in failure(send(made, (2,), pos=1))[1]


@pytest.mark.parametrize(
    ("turn", "start", "end", "reason"),
    [
        (0, 3, 5, "bad_rows"),  # that one is no draft
        (0, 5, 6, "bad_rows"),  # but there is one before
        (0, 4, 4, "bad_rows"),
        (0, 4, 4 + MAX_JUDGED + 1, "bad_rows"),
        (0, 4, 41, "context"),
        (1, 4, 5, "bad_rows"),
    ],
)
def test_drafts_that_are_none_are_not_judged(turn: int, start: int, end: int, reason: str) -> None:
    made = manager()
    send(made, (1, 2, 3, 4))
    send(made, (5,), pos=4, drafts=True)
    made.begin(1, BeginDrawing(id="a", sampling=DrawRules()))
    assert failure(made.judge(1, JudgeDrafts(id="a", turn=turn, start=start, end=end)))[0] == reason


def test_nothing_is_judged_twice_or_before_drawing_begins_and_drawing_begins_once() -> None:
    assert "cannot be judged now" in failure(manager().judge(1, JudgeDrafts(id="a", turn=0, start=4, end=5)))[1]
    assert "cannot be judged now" in failure(judged().judge(1, JudgeDrafts(id="a", turn=0, start=4, end=7)))[1]
    assert "begun already" in failure(judged().begin(1, BeginDrawing(id="a", sampling=DrawRules())))[1]
    candidates = BeginDrawing(id="a", sampling=DrawRules(), candidates=(10,))
    assert "vocabulary" in failure(manager().begin(1, candidates))[1]


@pytest.mark.parametrize(("turn", "n", "reason"), [(1, 2, "bad_rows"), (ERA, -1, "bad_rows"), (ERA, 41, "context")])
def test_a_cut_that_cannot_be_ends_its_answer(turn: int, n: int, reason: str) -> None:
    assert failure(manager().cut(1, CutAnswer(id="a", turn=turn, n=n)))[0] == reason


def test_rows_that_overtook_a_cut_and_do_not_fit_behind_it_end_their_answer() -> None:
    made = manager()
    send(made, (1, 2))
    send(made, (7,), pos=3, turn=ERA)
    change = made.cut(1, CutAnswer(id="a", turn=ERA, n=2))
    assert "rows from 3 on came, but the next row is that of 2" in failure(change)[1]
    assert change.send[1:] == (Credit(rows=3),)
    assert made.n_held == 0


def test_an_answer_too_many_is_overloaded_and_one_too_long_does_not_fit() -> None:
    made = manager()
    made.open(1, OpenAnswer(id="b", tokens=(1,)), n_have=0)
    change = made.open(1, OpenAnswer(id="c", tokens=(1,)), n_have=0)
    assert change.send == (AnswerFailed(id="c", reason="overloaded", message="2 answers are open already"),)
    assert send(made, (1,), name="c").send == (Credit(rows=1),)
    made.close(1, CloseAnswer(id="b"))
    assert failure(made.open(1, OpenAnswer(id="d", tokens=(1,) * 41), n_have=0))[0] == "context"
    assert failure(made.open(1, OpenAnswer(id="e", tokens=(11,)), n_have=0))[0] == "bad_rows"


def test_our_own_engine_can_end_an_answer() -> None:
    change = judged().fail(KEY, "engine_error", "no memory")
    assert change.send == (AnswerFailed(id="a", reason="engine_error", message="no memory"), Credit(rows=7))


# --- what ends the link -----------------------------------------------------------------------------------------------


def test_what_no_answer_explains_is_the_fault_of_the_peer() -> None:
    made = manager()
    with pytest.raises(BadFrameError, match="no answer 'x' was ever opened"):
        send(made, (1,), name="x")
    with pytest.raises(BadFrameError, match="no answer was ever opened"):
        made.cut(7, CutAnswer(id="a", turn=ERA, n=0))
    for name in ("a", "", "x" * 65):
        with pytest.raises(BadFrameError, match="is none, or was used before"):
            made.open(1, OpenAnswer(id=name, tokens=(1,)), n_have=0)


def test_more_rows_than_credits_are_the_fault_of_the_peer_whatever_they_are() -> None:
    made = manager()
    for turn in (0, ERA):
        message = SendRows(id="a", turn=turn, pos=0, tokens=(1,) * (CREDITS + 1))
        with pytest.raises(BadFrameError, match="201 rows came, but only 200 of 200 credits were left"):
            made.rows(1, message, b"")
    for at in range(5):  # rows of turns to come hold credits as well
        send(made, (1,) * 40, turn=ERA * (at + 1))
    with pytest.raises(BadFrameError, match="only 0 of 200"):
        send(made, (1,))


def test_too_few_credits_for_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="63 credits do not let 1 answers"):
        ContentManager(N_EMBD, N_VOCAB, N_CTX, max_answers=1, credits=63)


def test_wrong_calls_of_our_own_engine_change_nothing() -> None:
    made = judged()
    for n in (0, 8):
        with pytest.raises(ValueError, match="cannot have been computed"):
            made.computed(KEY, n)
    with pytest.raises(ValueError, match="cannot have been drawn"):
        made.draw(KEY, (6,))
    made.computed(KEY, 7)
    for drawn in ((), (9, 7), (6, 7, 1, 1)):
        with pytest.raises(ValueError, match="cannot have been drawn"):
            made.draw(KEY, drawn)
    with pytest.raises(ValueError, match="no answer"):
        made.take((1, "x"), 1)
    assert made.draw(KEY, (6, 7, 1)).keep == 7


# --- the edge ---------------------------------------------------------------------------------------------------------


def edge(*, is_eager: bool = True) -> EdgeAnswer:
    """An answer of five tokens whose partner has the first two, and whose rows are computed."""
    answer = EdgeAnswer("a", (1, 2, 3, 4, 5), n_ctx=N_CTX, n_vocab=N_VOCAB, is_eager=is_eager)
    answer.add(0, (1, 2, 3, 4, 5), rows_of(5))
    answer.opened(AnswerOpened(id="a", n_past=2))
    return answer


def asked() -> EdgeAnswer:
    """The same, with the drafts 6, 7 and 8 of which the first two are judged."""
    answer = edge()
    answer.begin_drawing(DrawRules())
    answer.add(5, (6, 7, 8), rows_of(3))
    assert answer.judge(2) == JudgeDrafts(id="a", turn=0, start=4, end=7)
    return answer


def test_the_last_row_of_the_text_waits_for_drawing_and_goes_as_a_draft() -> None:
    answer, link = edge(), LinkCredits(100)
    ((rows, payload),) = answer.send_due(link)
    assert (rows.pos, rows.tokens, rows.drafts) == (2, (3, 4), False)
    assert payload == encode_rows("f32", rows_of(5)[2:4])
    answer.begin_drawing(DrawRules())
    ((rows, _),) = answer.send_due(link)
    assert (rows.pos, rows.tokens, rows.drafts) == (4, (5,), True)
    assert link.left == 97


def test_drafts_go_only_when_they_are_judged_if_the_edge_may_yet_decide_itself() -> None:
    answer, link = edge(is_eager=False), LinkCredits(100)
    answer.begin_drawing(DrawRules())
    answer.add(5, (6, 7), rows_of(2))
    answer.accept_drafts(1)
    assert [(rows.pos, len(rows.tokens)) for rows, _ in answer.send_due(link)] == [(2, 2)]
    answer.judge()  # with it goes the row of the token that left, which had waited for others
    assert [(rows.pos, rows.drafts) for rows, _ in answer.send_due(link)] == [(4, False), (5, True)]
    with pytest.raises(ValueError, match="cannot be taken"):
        answer.accept_drafts(1)


def test_a_verdict_takes_the_right_drafts_and_the_token_behind_them() -> None:
    answer = asked()
    taken = answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6, 9)))
    assert taken is not None
    assert (taken.n_right, taken.n_rows, taken.n_drafts, taken.n_standing) == (1, 6, 0, 0)
    assert answer.tokens == [1, 2, 3, 4, 5, 6, 9]
    assert answer.n_acknowledged == 6


def test_drafts_made_while_waiting_are_kept_back_until_the_verdict() -> None:
    answer, link = asked(), LinkCredits(100)
    assert [(rows.pos, rows.tokens) for rows, _ in answer.send_due(link)] == [(2, (3, 4)), (4, (5, 6, 7))]
    answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6, 7, 8)))
    assert [(rows.pos, rows.tokens, rows.turn) for rows, _ in answer.send_due(link)] == [(7, (8,), 1)]


def test_drafts_made_while_waiting_stay_if_the_token_they_follow_was_drawn() -> None:
    answer, link = asked(), LinkCredits(100)
    answer.send_due(link)
    taken = answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6, 7, 8)))
    assert taken is not None
    assert (taken.n_right, taken.n_rows, taken.n_drafts, taken.n_standing) == (3, 8, 0, 1)
    assert answer.judge() == JudgeDrafts(id="a", turn=1, start=7, end=8)
    assert [(rows.pos, rows.turn) for rows, _ in answer.send_due(link)] == [(7, 1)]


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ({"start": 5}, "cannot follow 5"),
        ({"tokens": ()}, "cannot follow 4"),
        ({"tokens": (6, 7, 8, 9)}, "cannot follow 4"),
        ({"tokens": (9, 7)}, "cannot follow 4"),
        ({"tokens": (6, 10)}, "vocabulary"),
        ({"tokens": (-1,)}, "vocabulary"),
        ({"turn": 2}, "turn 2 of the partner cannot follow turn 0"),
        ({"turn": -1}, "turn -1"),
        ({"n_rows": -1}, "-1 rows of 0"),
        ({"n_rows": 1}, "1 rows of 0 cannot have been computed"),
        ({"busy_s": float("nan")}, "in nan s"),
        ({"busy_s": float("inf")}, "in inf s"),
        ({"busy_s": -0.1}, "in -0.1 s"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused_and_changes_nothing(verdict: dict[str, object], message: str) -> None:
    answer = asked()
    with pytest.raises(BadFrameError, match=message):
        answer.verdict(DraftVerdict(**{"id": "a", "turn": 1, "start": 4, "tokens": (6,), **verdict}))  # type: ignore[arg-type]
    assert answer.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert answer.judged == (4, 7)


def test_a_verdict_that_nobody_asked_for_is_refused_and_one_that_crossed_a_cut_ignored() -> None:
    answer = edge()
    with pytest.raises(BadFrameError, match="cannot follow"):
        answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6,)))
    answer = asked()
    assert answer.cut(6) == CutAnswer(id="a", turn=ERA, n=5)
    assert answer.verdict(DraftVerdict(id="a", turn=1, start=4, tokens=(6, 9))) is None
    assert answer.need(NeedRows(id="a", turn=2, pos=0)) == ()
    assert answer.tokens == [1, 2, 3, 4, 5, 6]


def test_rows_that_are_needed_again_go_again_and_drafts_are_judged_again() -> None:
    answer, link = asked(), LinkCredits(100)
    answer.send_due(link)
    assert answer.need(NeedRows(id="a", turn=1, pos=3)) == (JudgeDrafts(id="a", turn=1, start=4, end=7),)
    assert [(rows.pos, rows.tokens, rows.drafts) for rows, _ in answer.send_due(link)] == [
        (3, (4,), False),
        (4, (5, 6, 7), True),
    ]
    with pytest.raises(BadFrameError, match="rows from 9 on are wanted again, but only 7 were sent"):
        answer.need(NeedRows(id="a", turn=2, pos=9))


def test_a_partner_that_wants_rows_again_and_again_is_refused_unless_tokens_come_in_between() -> None:
    answer, link, turn = asked(), LinkCredits(10_000), 0

    def wants_rows(n: int) -> None:
        nonlocal turn
        for _ in range(n):
            turn += 1
            answer.send_due(link)
            assert answer.need(NeedRows(id="a", turn=turn, pos=0))

    wants_rows(MAX_NEEDS)
    turn += 1
    assert answer.verdict(DraftVerdict(id="a", turn=turn, start=4, tokens=(6, 9))) is not None
    answer.add(6, (9,), rows_of(1))
    answer.judge()
    wants_rows(MAX_NEEDS)
    with pytest.raises(BadFrameError, match="wanted again 33 times"):
        wants_rows(1)
    answer.open()
    answer.opened(AnswerOpened(id="a", n_past=0))
    answer.begin_drawing(DrawRules())
    answer.judge()
    turn = 0
    wants_rows(MAX_NEEDS)


def test_rows_that_were_never_computed_here_are_missing_until_they_are() -> None:
    answer, link = EdgeAnswer("a", (1, 2, 3, 4, 5), n_ctx=N_CTX, n_vocab=N_VOCAB), LinkCredits(100)
    answer.add(3, (4, 5), rows_of(2))  # the KV cache had the first three
    answer.opened(AnswerOpened(id="a", n_past=1))
    assert answer.missing == range(1, 3)
    assert answer.send_due(link) == []
    answer.add(1, (2,), rows_of(1))
    assert answer.missing == range(1, 1)
    assert [(rows.pos, rows.tokens) for rows, _ in answer.send_due(link)] == [(1, (2,))]
    assert answer.missing == range(2, 3)


def test_an_opening_that_cannot_be_is_refused() -> None:
    for n_past in (-1, 5):
        answer = EdgeAnswer("a", (1, 2, 3, 4, 5), n_ctx=N_CTX, n_vocab=N_VOCAB)
        with pytest.raises(BadFrameError, match="are said to be computed already"):
            answer.opened(AnswerOpened(id="a", n_past=n_past))
    with pytest.raises(BadFrameError, match="are said to be computed already"):
        edge().opened(AnswerOpened(id="a", n_past=0))
    with pytest.raises(BadFrameError, match="turn 1"):
        EdgeAnswer("a", (1,), n_ctx=N_CTX, n_vocab=N_VOCAB).need(NeedRows(id="a", turn=1, pos=0))


def test_an_answer_goes_on_over_a_new_link_with_the_rows_that_it_has() -> None:
    answer = asked()
    answer.lose_link()
    assert answer.send_due(LinkCredits(9)) == []
    answer.accept_drafts(2)  # made alone
    assert answer.open() == OpenAnswer(id="a", tokens=(1, 2, 3, 4, 5, 6, 7))
    answer.opened(AnswerOpened(id="a", n_past=0))
    answer.begin_drawing(DrawRules())
    sent = [(rows.pos, len(rows.tokens), rows.drafts) for rows, _ in answer.send_due(LinkCredits(100))]
    assert sent == [(0, 6, False), (6, 2, True)]


def test_wrong_calls_at_the_edge_are_errors() -> None:
    answer = asked()
    for call in (
        lambda: answer.begin_drawing(DrawRules()),
        answer.judge,
        lambda: answer.extend((1,)),
        lambda: answer.cut(9),
        answer.drop_drafts,
        lambda: answer.add(4, (5,), rows_of(1)),
        lambda: answer.add(8, (1, 2), rows_of(1)),
        lambda: answer.add(8, (1,) * 33, rows_of(33)),
        lambda: answer.add(2, (9,), rows_of(1)),
    ):
        with pytest.raises(ValueError):
            call()


def test_credits_are_never_more_than_were_given() -> None:
    link = LinkCredits(5)
    link.spend(3)
    with pytest.raises(ValueError, match="3 rows for 2 credits"):
        link.spend(3)
    for rows in (4, 0, -1):
        with pytest.raises(BadFrameError, match=f"{rows} credits came back, but 3 rows are on their way"):
            link.give_back(Credit(rows=rows))
    link.give_back(Credit(rows=3))
    assert link.left == 5


def test_a_draft_does_not_wait_behind_a_prompt_and_frames_have_a_size() -> None:
    prompt = EdgeAnswer("p", (1,) * 150, n_ctx=200, n_vocab=N_VOCAB)
    prompt.add(0, (1,) * 150, rows_of(150))
    prompt.opened(AnswerOpened(id="p", n_past=0))
    answer = asked()
    sent = [(rows.id, rows.pos, len(rows.tokens)) for rows, _ in send_all_due((prompt, answer), LinkCredits(100))]
    assert sent == [("a", 2, 2), ("a", 4, 3), ("p", 0, 64), ("p", 64, 31)]
