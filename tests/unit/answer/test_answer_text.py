"""The text of an answer knows which of its characters a part of a model has made alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.answer.text import AnswerText
from disco_daemon.types import Side, Token

pieces = st.lists(st.tuples(st.sampled_from(["", "a", "bc", "d e"]), st.booleans()), max_size=12)


@given(pieces, pieces, st.data())
def test_each_character_keeps_who_made_it_whatever_is_taken_back(
    first: list[tuple[str, bool]], second: list[tuple[str, bool]], data: st.DataObject
) -> None:
    text, made = AnswerText(), list[bool]()
    for piece, alone in first:
        text.add(Side.DEVICE, Token(piece, alone=alone))
        made += [alone] * len(piece)
    mark = data.draw(st.integers(0, len(first)))
    gone = "".join(piece for piece, _ in first[mark:])
    shown = gone[: data.draw(st.integers(0, len(gone)))]
    text.retract(mark, Side.DEVICE, 0, shown)
    del made[len(str(text)) :]
    for piece, alone in second:
        text.add(Side.SERVER, Token(piece, alone=alone))
        made += [alone] * len(piece)
    assert [text.is_alone(at) for at in range(len(str(text)))] == made
