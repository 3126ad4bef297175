from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from disco_tui.data.export import to_json, to_markdown
from disco_tui.data.store import Conversation, Store, StoredTurn

TEXTS = st.text(st.characters(codec="utf-8"))
SIDES = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["device", "server", ""]))).map(tuple)
DISCO = st.none() | st.fixed_dictionaries(
    {"ttft_s": st.none() | st.floats(0, 9), "moves": st.lists(st.just({"at": 1}))}
)
TURNS = st.lists(
    st.builds(
        StoredTurn,
        id=st.integers(1),
        role=st.sampled_from(["user", "assistant"]),
        text=TEXTS,
        sides=SIDES,
        disco=DISCO,
        finish=st.none() | st.just("stop"),
        created=st.floats(0, 4e9),
        parent=st.none() | st.integers(1),
    )
)
HEAD = Conversation(7, "The sky", "Be brief.\n\nAlways.", "disco", 0.0, 60.0)
ANSWER = StoredTurn(
    2, "assistant", "Because.\n\n```py\nx = 1\n```", ((0, "device"), (8, "server")),
    {"ttft_s": 0.25, "server_usd": 0.0001, "energy_j": 3, "qoe": 1.0, "handoffs": 1}, "length", 1.0, 1,
)  # fmt: skip


def read(text: str) -> tuple[Conversation, list[StoredTurn]]:
    """What anybody can make of the JSON with the two classes' fields alone."""
    found: dict[str, Any] = json.loads(text)
    assert found["format"] == 1
    turns = [StoredTurn(**turn | {"sides": tuple((at, side) for at, side in turn["sides"])}) for turn in found["turns"]]
    return Conversation(**found["conversation"]), turns


@given(
    head=st.builds(Conversation, st.integers(1), TEXTS, TEXTS, TEXTS, st.floats(0, 4e9), st.floats(0, 4e9)), turns=TURNS
)
def test_json_holds_all_that_is_known(head: Conversation, turns: list[StoredTurn]) -> None:
    assert read(to_json(head, turns)) == (head, turns)


def test_a_conversation_comes_out_of_the_store_and_back_whole() -> None:
    with Store(None) as store:
        conversation = store.new(system="Be brief.")
        asked = store.add(conversation.id, "user", "Größe?\n🦊")
        answer = store.add(conversation.id, "assistant", "", parent=asked)
        store.append(answer, "42", "server")
        store.finish(answer, "stop", {"qoe": 0.5, "reading": None})
        (head,), turns = store.list(), store.turns(conversation.id)
        assert read(to_json(head, turns)) == (head, turns)


def test_markdown_is_what_was_written_and_a_line_about_each_answer() -> None:
    question = StoredTurn(1, "user", "Why is the sky *blue*?", (), None, None, 0.0, None)
    assert to_markdown(HEAD, [question, ANSWER]) == (
        "# The sky\n\n*1970-01-01 00:00 UTC · disco*\n\n> System: Be brief.\n>\n> Always.\n\n"
        "## You\n\nWhy is the sky *blue*?\n\n## Answer\n\nBecause.\n\n```py\nx = 1\n```\n\n"
        "*characters by device 1 to 8, server 9 to 25 · first token after 0.25 s · $0.00010 · 3 J · QoE 1.00 "
        "· 1 handoff · length*\n"
    )


def test_markdown_says_that_an_answer_was_cut_off_and_nothing_of_what_is_not_known() -> None:
    half = StoredTurn(2, "assistant", "Because", (), None, None, 1.0, 1)
    assert to_markdown(HEAD, [half]).endswith("## Answer\n\nBecause\n\n*cut off*\n")
    looped = StoredTurn(2, "assistant", "Because", (), {"stopped": "repetition"}, "length", 1.0, 1)
    assert to_markdown(HEAD, [looped]).endswith("*stopped: repetition*\n")
    whole = StoredTurn(2, "assistant", "Because", ((0, "device"),), {"ttft_s": None}, "stop", 1.0, 1)
    assert to_markdown(HEAD, [whole]).endswith("*characters by device 1 to 7*\n")


@given(turns=TURNS)
def test_markdown_leaves_no_text_out(turns: list[StoredTurn]) -> None:
    found = to_markdown(HEAD, turns)
    at = 0
    for turn in turns:
        at = found.index(turn.text, at) + len(turn.text)
