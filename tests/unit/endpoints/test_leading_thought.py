"""A server's thought in its plain text is told from the answer where it begins that, and only there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.relay.server_streams import read as read_body
from disco_daemon.api.openai.shapes import ChatShape
from disco_daemon.endpoints.chunks import CutError, Reader
from disco_daemon.endpoints.leading_thought import LeadingThought, tags_for
from disco_daemon.engine.llama.thinking import ThinkingText
from disco_daemon.types import Finish, Token, Usage
from disco_daemon.types.thought_marks import KNOWN, MAX_SPACE, TAGS
from tests.unit.types.test_fields import asked

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
    stream = LeadingThought(TAGS)
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
    stream = LeadingThought(TAGS)
    assert stream.divided("<") == ("", "")
    assert stream.divided("b>") == ("<b>", "")
    assert stream.is_over
    stream = LeadingThought(TAGS)
    assert stream.divided("<think>Hm") == ("", "Hm")
    assert stream.divided(" and") == ("", " and"), "a thought is told while it is written"
    assert LeadingThought(TAGS).divided(" " * (MAX_SPACE + 1)) == (" " * (MAX_SPACE + 1), "")


# --- a server's chunks --------------------------------------------------------------------------------------------


def read(deltas: list[dict[str, Any]], **more: Any) -> tuple[str, str, list[Token | Finish]]:
    reader = Reader(name="x", **{"tags": TAGS} | more)
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
    assert read([{"content": written}], tags=())[:2] == ("", written)


def test_a_whole_message_is_divided_too() -> None:
    reader = Reader(tags=TAGS)
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
    reader = Reader(n_choices=2, name="x", tags=TAGS)
    parts = {0: ("", ""), 1: ("", "")}
    for at, letter in enumerate("<think>Hm</think>Yes"):
        for index, piece in ((0, letter), (1, "No: <think>x</think>"[at])):
            if (token := reader.token({"index": index, "delta": {"content": piece}})) is not None:
                thought, text = parts[index]
                parts[index] = thought + (token.delta.thought if token.delta else ""), text + token.text
    assert parts == {0: ("Hm", "Yes"), 1: ("", "No: <think>x</think>")}


def test_behind_the_answers_begin_chunks_take_the_short_way() -> None:
    reader = Reader(tags=TAGS)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Yes"}}]}
    assert reader.plain(chunk) is None
    assert reader.token(reader.choices(chunk)[0]) is not None
    assert reader.plain(chunk) is not None


def test_calls_behind_a_thought_are_calls() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    thought, text, found = read([{"content": "<think>Hm.</think>"}, {"tool_calls": [call]}])
    assert (thought, text) == ("Hm.", "")
    assert [one.name for t in found if isinstance(t, Token) and t.delta for one in t.delta.calls] == ["f"]


# --- what a server has written, and all that it tells of it -------------------------------------------------------

TEXTS = [
    "<",
    "think>",
    "<think>",
    "</think>",
    "</",
    "[",
    "[THINK]",
    "[/THINK]",
    "\n",
    "  ",
    " " * 300,
    "Hm, ",
    "Yes",
    "b>",
    "",
]
CALL = [
    {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
]


def parted(written: str) -> tuple[str, str]:
    """Return the thought and the answer of a whole text, by an expression."""
    either = "|".join(re.escape(opening) for opening, _ in TAGS)
    found = re.match(rf"\s{{0,{MAX_SPACE}}}(?!\s)({either})", written)
    if found is None:
        return "", written
    thought, mark, text = written[found.end() :].partition(dict(TAGS)[found[1]])
    return thought.strip(), text.lstrip() if mark else ""


def likelihood(name: str) -> dict[str, Any]:
    return {"content": [{"token": name, "logprob": -1.0}]}


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.sampled_from([[text] for text in TEXTS] + [["\ud83d", "\ude42"]]), min_size=1, max_size=8),
    tail=st.lists(st.sampled_from(TEXTS), max_size=3),
    calls=st.booleans(),
    likely=st.booleans(),
    ids_back=st.booleans(),
    n_choices=st.integers(1, 2),
    reason=st.sampled_from(["stop", None]),
)
def test_nothing_of_what_a_server_writes_is_lost_doubled_or_out_of_order(
    texts: list[list[str]],
    tail: list[str],
    calls: bool,
    likely: bool,
    ids_back: bool,
    n_choices: int,
    reason: str | None,
) -> None:
    pieces = [{"content": piece} for text in texts for piece in text]
    deltas = [*pieces, *(CALL + [{"content": piece} for piece in tail] if calls else [])]
    reader = Reader(n_choices=n_choices, ids_back=ids_back and n_choices == 1, name="x", tags=TAGS)
    last, found = n_choices - 1, list[Token]()
    named = []
    for at, delta in enumerate(deltas):
        choice: dict[str, Any] = {"index": last, "delta": delta}
        if delta.get("content") != "":
            named.append(at)
            choice |= {"token_ids": [at]} | ({"logprobs": likelihood(str(at))} if likely else {})
        token = reader.plain({"choices": [choice]}) or reader.token(choice)
        found += [] if token is None else [token]
    if reason is not None:
        reader.token({"index": last, "delta": {}, "finish_reason": reason, "token_ids": [999]})
    if not named:
        with pytest.raises(CutError):
            Reader(tags=TAGS).ends(is_done=True)
        return
    *ends, finish = reader.ends(is_done=True)
    found += [end for end in ends if isinstance(end, Token)]
    assert finish == Finish("tool_calls" if calls else "stop")

    said = "".join((t.delta.thought if t.delta else "") + t.text for t in found)
    thought = "".join(t.delta.thought for t in found if t.delta)
    text = "".join(t.text for t in found)
    assert said == thought + text, "a thought comes first"
    before = "".join(str(one["content"]) for one in pieces).replace("\ud83d\ude42", "🙂")
    is_thought, is_text = parted(before)
    assert (thought.rstrip(), text) == (is_thought, is_text + "".join(tail) * calls)
    if calls:
        begun = next(i for i, t in enumerate(found) if t.delta and t.delta.calls)
        in_front = "".join(t.text for t in found[: begun + 1])
        assert in_front.startswith(is_text), "text in front of a call comes in front of it"
    assert sum(t.n_tokens for t in found) == reader.n_tokens
    told = [one["token"] for t in found if t.logprobs for one in t.logprobs["content"]]
    assert told == [str(at) for at in named] * likely
    if ids_back and n_choices == 1:
        assert [i for t in found for i in t.ids] == named


@pytest.mark.parametrize("written", ["[", "<", "\n", "<think></think>", "<think>"])
def test_an_answer_that_is_held_whole_is_an_answer(written: str) -> None:
    for n_choices in (1, 2):
        reader = Reader(n_choices=n_choices, tags=TAGS)
        choice = {"index": 0, "delta": {"content": written}, "logprobs": likelihood(written)}
        assert reader.token(choice) is None
        token, *ends = [*reader.ends(is_done=True)]
        assert isinstance(token, Token)
        assert (token.text, token.n_tokens, token.index) == (written if "think" not in written else "", 1, 0)
        assert token.logprobs is not None
        assert [one["token"] for one in token.logprobs["content"]] == [written]
        assert ends == [Finish("stop")]


@pytest.mark.parametrize("written", ["[", "<", "\n", "<think>"])
async def test_an_answer_that_is_held_whole_is_billed_and_shown(written: str) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": written}, "logprobs": likelihood(written)}]}
    usage = Usage()
    answer = await read_body([b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"], usage=usage)
    (token,) = answer.tokens
    assert (usage.completion_tokens, token.n_tokens, answer.finish) == (1, 1, "stop")
    sent = json.loads(ChatShape("r", 1, "m").token(token, None, first=True).removeprefix(b"data: "))["choices"][0]
    assert [one["token"] for one in sent["logprobs"]["content"]] == [written]
    assert (sent["delta"].get("content") or "") == token.text


def test_of_two_choices_one_that_is_held_whole_does_not_vanish() -> None:
    reader = Reader(n_choices=2, tags=TAGS)
    for index, written in enumerate(("Yes", "<")):
        reader.token({"index": index, "delta": {"content": written}})
    first, second, finish = reader.ends(is_done=True)
    assert isinstance(first, Token)
    assert isinstance(second, Token)
    assert (first.text, first.ended, second.text, second.index) == ("", "stop", "<", 1)
    assert finish == Finish("stop")


def test_an_answer_that_nobody_says_is_whole_is_cut_though_it_is_held() -> None:
    reader = Reader(tags=TAGS)
    reader.token({"index": 0, "delta": {"content": "<"}})
    with pytest.raises(CutError):
        reader.ends(is_done=False)


def test_endless_white_space_in_a_thought_is_given_out_and_not_kept() -> None:
    stream = LeadingThought(TAGS)
    stream.divided("<think>Hm")
    space = [stream.divided(" ")[1] for _ in range(10 * MAX_SPACE)]
    assert max(map(len, space)) == MAX_SPACE + 1
    assert len("".join(space)) > 9 * MAX_SPACE
    device, thoughts = ThinkingText(), [""]
    for piece in [b"<think>Hm", *[b" "] * (10 * MAX_SPACE)]:
        assert device.feed(piece) == ""
        thoughts.append(device.take_thought())
    assert "".join(thoughts) == "Hm" + "".join(space), "as the device does"


def test_marks_that_prompts_ask_for_stay_in_the_answer() -> None:
    openings = {opening for opening, _ in tags_for(asked())}
    assert openings.isdisjoint({"<thought>", "[THINK]"}), "agents ask any model for these, and read them"
    assert openings >= {"<think>", "<seed:think>", "<|START_THINKING|>"}
    for content in ("Use <think> first.", [{"type": "text", "text": "Use <think> first."}]):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]
        assert {opening for opening, _ in tags_for(asked(messages=messages))} == openings - {"<think>"}
    assert tags_for(asked(reasoning_format="none")) == ()
