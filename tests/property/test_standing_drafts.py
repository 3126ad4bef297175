"""What stands of an edge's drafts once the verdict is there, also of those that it made while it waited."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.link.protocol import AnswerOpened, DraftVerdict, DrawRules
from disco_daemon.link.rows.codec import RowArray
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import EdgeAnswer

N_VOCAB = 2  # so that guesses are right often
token = st.integers(0, N_VOCAB - 1)


def rows(n: int) -> RowArray:
    return np.ones((n, 4), np.float32)


@given(st.lists(token, min_size=1, max_size=4), st.lists(token, max_size=6), st.lists(token, max_size=6), st.data())
def test_what_was_drafted_on_stands_if_all_drafts_and_the_token_drawn_are_as_guessed(
    text: list[int], drafts: list[int], ahead: list[int], data: st.DataObject
) -> None:
    answer, link = EdgeAnswer("a", text, n_ctx=100, n_vocab=N_VOCAB), LinkCredits(100)
    answer.add(0, text, rows(len(text)))
    answer.open()
    answer.opened(AnswerOpened(id="a", n_past=0))
    answer.begin_drawing(DrawRules())
    if drafts:
        answer.add(len(text), drafts, rows(len(drafts)))
    answer.judge()
    for at, guess in enumerate(ahead, len(text) + len(drafts)):
        answer.add(at, [guess], rows(1))
    sent = [at for message, _ in answer.send_due(link) for at in range(message.pos, message.pos + len(message.tokens))]
    assert sent == list(range(len(text) + len(drafts)))  # what was made since is kept back

    drawn: list[int] = []
    while len(drawn) <= len(drafts) and drawn == drafts[: len(drawn)]:
        drawn.append(data.draw(token))
    taken = answer.verdict(DraftVerdict(id="a", turn=1, start=len(text) - 1, tokens=tuple(drawn)))

    all_right = len(drawn) == len(drafts) + 1
    standing = ahead if all_right and ahead[:1] == drawn[-1:] else []
    assert taken is not None
    assert answer.tokens == text + drawn + standing[1:]
    assert answer.n_text == len(text) + len(drawn)
    assert (taken.n_standing, taken.n_drafts) == (len(standing), max(0, len(standing) - 1))
    assert answer.n_rows == taken.n_rows == len(text) + len(drawn) - 1 + len(standing)
    again = [at for message, _ in answer.send_due(link) for at in range(message.pos, message.pos + len(message.tokens))]
    assert again == list(range(len(text) + len(drawn) - 1, answer.n_rows))
    if standing:  # the next question can go out at once
        asked = answer.judge()
        assert (asked.start, asked.end) == (answer.n_text - 1, answer.n_rows)
