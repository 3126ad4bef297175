"""A server's thought in its plain text is told from the answer where it begins that, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from disco_daemon.endpoints.chunks import Reader
from disco_daemon.endpoints.leading_thought import MAX_SPACE, LeadingThought
from disco_daemon.engine.llama.thinking import ThinkingText
from disco_daemon.types import Finish, Token
from disco_daemon.types.thought_marks import KNOWN, TAGS

ANSWERS = {  # what a server writes: its thought, and its answer
    "<think>\nHm, 1 < 2.\n</think>\n\nYes.": ("Hm, 1 < 2.", "Yes."),
    "\n\n<think>Hm.</think>Yes.": ("Hm.", "Yes."),
    "<think></think>\n\nYes.": ("", "Yes."),
    "<think>\n\n</think>Yes, \n\n東 🙂": ("", "Yes, \n\n東 🙂"),
    "<think>one\n\n two </think> <think>Yes.</think>": ("one\n\n two", "<think>Yes.</think>"),
    "<think>never closed \n": ("never closed", ""),
    "<think>cut </thi": ("cut </thi", ""),
    "[THINK]Hm [x].[/THINK]Yes.": ("Hm [x].", "Yes."),
    "<seed:think>Hm.</seed:think>\nYes.": ("Hm.", "Yes."),
    "<|START_THINKING|>Hm.<|END_THINKING|>Yes.": ("Hm.", "Yes."),
    "Yes: <think>no thought</think>": ("", "Yes: <think>no thought</think>"),
    "<thin": ("", "<thin"),
    "<thinker>x</thinker>": ("", "<thinker>x</thinker>"),
    " \n a": ("", " \n a"),
    "[1] is a source.": ("", "[1] is a source."),
    "</think>Yes.": ("", "</think>Yes."),
    "": ("", ""),
}


def divided(pieces: list[str]) -> tuple[str, str]:
    stream = LeadingThought()
    parts = [stream.divided(piece) for piece in pieces] + [stream.rest()]
    return "".join(thought for _, thought in parts), "".join(text for text, _ in parts)


@pytest.mark.parametrize("written", ANSWERS)
def test_a_thought_is_told_from_the_answer_wherever_the_stream_is_cut(written: str) -> None:
    assert divided([written]) == ANSWERS[written]
    assert divided(list(written)) == ANSWERS[written], "character by character"
    for at in range(1, len(written)):
        assert divided([written[:at], written[at:]]) == ANSWERS[written], written[:at]


@pytest.mark.parametrize("tags", TAGS, ids=[opening for opening, _ in TAGS])
def test_it_is_told_as_the_device_tells_its_own(tags: tuple[str, str]) -> None:
    marks = next(known for known in KNOWN if (known.opening, known.closing) == tags and not known.signs)
    written = f" {tags[0]}\n a\n {tags[0]} b \n{tags[1]}\n\n c {tags[1]} d"
    stream, thought, text = ThinkingText(marks=marks), "", ""
    for letter in written:
        text += stream.feed(letter.encode())
        thought += stream.take_thought()
    assert divided(list(written)) == (thought, text + stream.flush())


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    stream = LeadingThought()
    assert stream.divided("<") == ("", "")
    assert stream.divided("b>") == ("<b>", "")
    assert stream.is_over
    stream = LeadingThought()
    assert stream.divided("<think>Hm") == ("", "Hm")
    assert stream.divided(" and") == ("", " and"), "a thought is told while it is written"
    assert LeadingThought().divided(" " * (MAX_SPACE + 1)) == (" " * (MAX_SPACE + 1), "")


# --- a server's chunks --------------------------------------------------------------------------------------------


def read(deltas: list[dict[str, Any]], **more: Any) -> tuple[str, str, list[Token | Finish]]:
    reader = Reader(name="x", **{"may_think": True} | more)
    found: list[Token | Finish] = []
    for delta in deltas:
        chunk = {"choices": [{"index": 0, "delta": delta}]}
        token = reader.plain(chunk) or reader.token(reader.choices(chunk)[0])
        found += [token] if token is not None else []
    reader.token({"index": 0, "delta": {}, "finish_reason": "stop"})
    found += reader.ends(is_done=True)
    tokens = [one for one in found if isinstance(one, Token)]
    return "".join(t.delta.thought for t in tokens if t.delta), "".join(t.text for t in tokens), found


@pytest.mark.parametrize("written", [written for written in ANSWERS if written.strip()])
def test_a_servers_text_is_divided_in_every_cut(written: str) -> None:
    for at in range(len(written)):
        thought, text, found = read([{"content": written[:at]}, {"content": written[at:]}])
        assert (thought, text) == ANSWERS[written], written[:at]
        assert isinstance(found[-1], Finish)
    assert read([{"content": letter} for letter in written])[:2] == ANSWERS[written]
    assert read([{"content": written}], may_think=False)[:2] == ("", written)


def test_a_whole_message_is_divided_too() -> None:
    reader = Reader(may_think=True)
    message = {"role": "assistant", "content": "<think>Hm.</think>\n\nYes."}
    token = reader.token({"index": 0, "message": message, "finish_reason": "stop"})
    assert token is not None
    assert token.delta is not None
    assert (token.delta.thought, token.text) == ("Hm.", "Yes.")
    assert token.n_tokens > 1, "a thought counts"


def test_where_the_server_tells_thoughts_apart_its_text_stays_as_it_is() -> None:
    told = read([{"reasoning_content": "Hm."}, {"content": "<think>is a tag</think>"}])
    assert told[:2] == ("Hm.", "<think>is a tag</think>")
    assert read([{"content": "<"}, {"reasoning": "Hm."}, {"content": "b>"}])[:2] == ("Hm.", "<b>")


def test_each_choice_has_its_own_thought() -> None:
    reader = Reader(n_choices=2, name="x", may_think=True)
    parts = {0: ("", ""), 1: ("", "")}
    for at, letter in enumerate("<think>Hm</think>Yes"):
        for index, piece in ((0, letter), (1, "No: <think>x</think>"[at])):
            if (token := reader.token({"index": index, "delta": {"content": piece}})) is not None:
                thought, text = parts[index]
                parts[index] = thought + (token.delta.thought if token.delta else ""), text + token.text
    assert parts == {0: ("Hm", "Yes"), 1: ("", "No: <think>x</think>")}


def test_behind_the_answers_begin_chunks_take_the_short_way() -> None:
    reader = Reader(may_think=True)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Yes"}}]}
    assert reader.plain(chunk) is None
    assert reader.token(reader.choices(chunk)[0]) is not None
    assert reader.plain(chunk) is not None


def test_calls_behind_a_thought_are_calls() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    thought, text, found = read([{"content": "<think>Hm.</think>"}, {"tool_calls": [call]}])
    assert (thought, text) == ("Hm.", "")
    assert [one.name for t in found if isinstance(t, Token) and t.delta for one in t.delta.calls] == ["f"]
