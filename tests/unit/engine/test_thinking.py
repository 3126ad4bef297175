from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disco_daemon.engine import framing, wire
from disco_daemon.engine.llama.template import ChatTemplate, TemplateError
from disco_daemon.engine.llama.thinking import CLOSE, OPEN, ThinkingText, is_answer, opens_thought, within
from disco_daemon.system.frames import HEADER
from disco_daemon.types import GenerationRequest

TEMPLATES = Path(__file__).parent.parent.parent / "fixtures" / "templates"
QWEN3, R1 = ((TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in ("qwen3", "deepseek-r1"))
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TALK = [*HI, {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"}, *HI]

pieces = st.sampled_from([*"<>/ \nat€x", "<think>", "</think>", "<thin", "think>", "</", "STOP", "ST", "OP", "🙂", "é"])
texts = st.lists(pieces, max_size=12).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=30)
ASCII_SPACE = string.whitespace


def run(data: bytes, at: list[int], *, inside: bool = False, stop: tuple[str, ...] = ()) -> tuple[str, str, bool]:
    """The thought and the answer that come of some bytes in some pieces, as the engine reads them."""
    stream, thought, answer = ThinkingText(stop, inside=inside), "", ""
    edges = [0, *sorted(c % (len(data) + 1) for c in at), len(data)]
    for a, b in itertools.pairwise(edges):
        answer += stream.feed(data[a:b])
        thought += stream.take_thought()
        if stream.stopped:
            break
    answer += stream.flush()
    return thought + stream.take_thought(), answer, stream.stopped


def expected(text: str, *, inside: bool) -> tuple[str, str]:
    """The same of the whole text at once."""
    if not inside:
        if not text.lstrip(ASCII_SPACE).startswith(OPEN):
            return "", text
        text = text.lstrip(ASCII_SPACE)[len(OPEN) :]
    thought, closed, answer = text.partition(CLOSE)
    return thought.strip(), answer.lstrip(ASCII_SPACE) if closed else ""


@given(texts, cuts, st.booleans())
@example("<think>a</think>b", list(range(20)), False)
@example("a</think>\n\nb", list(range(20)), True)
@example("<think>", [], False)
def test_wherever_it_is_cut_nothing_is_lost_doubled_or_misplaced(text: str, at: list[int], inside: bool) -> None:
    assert run(text.encode(), at, inside=inside)[:2] == expected(text, inside=inside)


@given(texts, texts, cuts)
def test_stop_strings_count_in_the_answer_only(thought: str, answer: str, at: list[int]) -> None:
    thought, answer = thought.replace(CLOSE, ""), answer.strip()
    if CLOSE in thought:
        return
    said = run(f"{thought}{CLOSE}{answer}".encode(), at, inside=True, stop=("STOP",))
    before, stopped, _ = answer.partition("STOP")
    assert said == (thought.strip(), before, bool(stopped))


@given(texts, st.booleans())
def test_only_what_may_be_a_tag_or_its_white_space_waits(text: str, inside: bool) -> None:
    """Token by token the reader has all but the beginning of a tag."""
    stream, thought, answer = ThinkingText(inside=inside), "", ""
    for n, character in enumerate(text, 1):
        answer += stream.feed(character.encode())
        thought += stream.take_thought()
        whole = expected(text[:n], inside=inside)
        assert whole[0].startswith(thought)
        assert whole[1].startswith(answer)
        waiting = whole[0][len(thought) :].strip() + whole[1][len(answer) :].strip()
        assert OPEN.startswith(waiting) or CLOSE.startswith(waiting)


@given(st.binary(max_size=40), cuts, st.booleans())
def test_bytes_that_are_no_text_break_nothing(data: bytes, at: list[int], inside: bool) -> None:
    assert run(data, at, inside=inside) == run(data, [], inside=inside)


def test_ids_are_told_only_of_an_answer_without_a_thought() -> None:
    def wholes(*said: bytes) -> list[bool]:
        stream = ThinkingText()
        return [stream.feed(piece) is not None and stream.whole for piece in said]

    assert wholes(b"<th", b"ree>", b" \xe2", b"\x82\xac") == [False, True, False, True]
    assert wholes(b"<think>a", b"</think>b", b"c") == [False, False, False]


def test_an_empty_thought_is_none() -> None:
    assert run(b"<think>\n\n</think>\n\nHello", []) == ("", "Hello", False)
    assert run(b"\n</think>\n\nHello", [], inside=True) == ("", "Hello", False)


def test_a_thought_that_does_not_end_is_all_there_is() -> None:
    assert run(b"Well, let me see: </thi", [], inside=True) == ("Well, let me see: </thi", "", False)


# --- templates ----------------------------------------------------------------------------------------------------


def rendered(source: str, messages: list[dict[str, Any]] = HI, **args: Any) -> str:
    return ChatTemplate(source, "<bos>", "").segments(messages, ["<|im_start|>", "<|im_end|>"], args)[0][0]


def test_qwen3_is_told_not_to_think() -> None:
    assert rendered(QWEN3).endswith("<|im_start|>assistant\n")
    assert rendered(QWEN3, enable_thinking=True) == rendered(QWEN3)
    quiet = rendered(QWEN3, enable_thinking=False)
    assert quiet.endswith("<think>\n\n</think>\n\n")
    assert not opens_thought(quiet)


def test_r1_opens_the_thought_itself() -> None:
    assert rendered(R1).replace("\uff5c", "|") == "<bos><|User|>Hi<|Assistant|><think>\n"
    assert opens_thought(rendered(R1))


@pytest.mark.parametrize("source", [QWEN3, R1])
def test_earlier_thoughts_are_not_read_again(source: str) -> None:
    assert "A greeting" not in rendered(source, TALK)
    assert "Hello!" in rendered(source, TALK)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "raise_exception"])
def test_what_the_engine_tells_a_template_no_client_may(name: str) -> None:
    with pytest.raises(TemplateError, match=f"cannot set {name}"):
        ChatTemplate(QWEN3, "", "").segments(HI, [], {name: []})


@pytest.mark.parametrize("value", ["<|im_end|>", ["a", {"b": "<|im_start|>system"}], {"<|im_end|>": 1}])
def test_no_argument_opens_a_turn(value: Any) -> None:
    with pytest.raises(TemplateError, match="control tokens"):
        rendered("{{ name }}", name=value)


def test_arguments_reach_the_template() -> None:
    assert rendered("{{ name }} {{ list[0].a }}", name="x", list=[{"a": 3}]) == "x 3"


def asked(**extra: Any) -> dict[str, Any]:
    return GenerationRequest("r", tuple(HI), extra=extra).template_args


def test_an_effort_of_none_is_not_to_think() -> None:
    assert asked() == {}
    assert asked(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert asked(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True}
    own = {"enable_thinking": True, "x": 1}
    assert asked(reasoning_effort="none", chat_template_kwargs=own) == {"reasoning_effort": "none"} | own
    assert asked(reasoning_effort=None, chat_template_kwargs=None) == {}


# --- partial answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "thinks"),
    [
        ("", False, False),
        ("Hello", True, False),
        ("<think>\nWell", False, True),
        ("Well\n</think>\n\nHello", False, False),
        ("<think>a</think>b", False, False),
        ("Say <think> aloud", True, False),
    ],
)
def test_what_a_partial_answer_is(text: str, answer: bool, thinks: bool) -> None:
    assert (is_answer(text), within(text)) == (answer, thinks)


def test_pieces_of_a_thought_survive_the_wire() -> None:
    piece = wire.TextPiece(id="g1", text="Well", n_tokens=2, thought=True)
    assert wire.decode_from_engine(framing.frame(piece)[HEADER.size :]) == piece
