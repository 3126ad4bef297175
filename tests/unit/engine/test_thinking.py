from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disco_daemon.engine import framing, wire
from disco_daemon.engine.llama.refusals import FormatError
from disco_daemon.engine.llama.template import ChatTemplate, TemplateError
from disco_daemon.engine.llama.thinking import ThinkingText, ThoughtBudget
from disco_daemon.engine.llama.vocabulary import Vocabulary
from disco_daemon.system.frames import HEADER
from disco_daemon.types import GenerationRequest, Sampling
from disco_daemon.types.thought_marks import IN_FORMATS, KNOWN, THINK, ThoughtLimit, ThoughtMarks, args_for, marks_in

TEMPLATES = Path(__file__).parent.parent.parent / "fixtures" / "templates"
QWEN3, R1 = ((TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in ("qwen3", "deepseek-r1"))
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TALK = [*HI, {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"}, *HI]

pieces = st.sampled_from([*"<>/ \nat€x", "<think>", "</think>", "<thin", "think>", "</", "STOP", "ST", "OP", "🙂", "é"])
texts = st.lists(pieces, max_size=12).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=30)
ASCII_SPACE = string.whitespace
OPEN, CLOSE = THINK.opening, THINK.closing


def run(
    data: bytes, at: list[int], *, inside: bool = False, stop: tuple[str, ...] = (), marks: ThoughtMarks = THINK
) -> tuple[str, str, bool]:
    """The thought and the answer that come of some bytes in some pieces, as the engine reads them."""
    stream, thought, answer = ThinkingText(stop, inside=inside, marks=marks), "", ""
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
        begun = text.lstrip(ASCII_SPACE)
        if not begun.startswith((OPEN, CLOSE)):
            return "", text
        text = begun.removeprefix(OPEN)
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


# --- marks --------------------------------------------------------------------------------------------------------

# By the template: what of a prompt is its end, what the model writes behind it, and the same where it does not think.
WRITTEN = {
    "qwen3": ("assistant\n", "<think>\nT\n</think>\n\nA", "A"),
    "deepseek-r1": ("<think>\n", "T\n</think>\n\nA", "</think>A"),
    "tools/LFM2.5-Instruct": ("assistant\n", "<think>T</think>A", "A"),
    "tools/mistralai-Ministral-3-14B-Reasoning-2512": ("[/INST]", "[THINK]T[/THINK]A", "A"),
    "thoughts/Apertus-8B-Instruct": ("<|assistant_start|>", "<|inner_prefix|>T<|inner_suffix|>A", "A"),
    "thoughts/Apriel-1.6-15b-Thinker-fixed": (
        "Here are my reasoning steps:\n", "T\n[BEGIN FINAL RESPONSE]\nA", "[BEGIN FINAL RESPONSE]\nA",
    ),
    "thoughts/unsloth-Apriel-1.5": (
        "<|assistant|>\n",
        "Here are my reasoning steps:\nT\n[BEGIN FINAL RESPONSE]\nA[END FINAL RESPONSE]\n",
        "[BEGIN FINAL RESPONSE]A[END FINAL RESPONSE]",
    ),
    "thoughts/upstage-Solar-Open-100B": (
        "<|begin|>assistant", "<|think|>T<|end|><|begin|>assistant<|content|>A", "<|content|>A",
    ),
    "thoughts/ByteDance-Seed-OSS": ("assistant\n", "<seed:think>T</seed:think>\nA", "A"),
    "thoughts/CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>T<|END_THINKING|>A", "A",
    ),
    "thoughts/Cohere2MoE": ("<|START_THINKING|>", "T<|END_THINKING|>A", "<|END_THINKING|>A"),
    "thoughts/MiniMax-M3": ("]~b]ai\n", "<mm:think>T</mm:think>A", "</mm:think>A"),
    "thoughts/tencent-Hy3": ("</think:opensource>", "<think:opensource>T</think:opensource>A", "A"),
    "thoughts/Kimi-K3": (
        "<|open|>think<|sep|>", "T<|close|>think<|sep|><|open|>response<|sep|>A<|close|>response<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>A",
    ),
    "thoughts/ibm-granite-granite-3.3-2B-Instruct": (
        "<|end_of_role|>", "<think>T</think>\n<response>A</response>", "<response>A</response>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_says_which_marks_its_model_writes(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    marks, (end, thinks, says) = marks_in(source), WRITTEN[name]
    assert marks is not None
    prompt = ChatTemplate(source, "<bos>", "<eos>").render(HI)
    assert prompt.endswith(end)
    inside = marks.opens_thought(prompt)
    assert inside is end.rstrip().endswith(marks.opening)
    for at in (list(range(200)), []):
        assert run(thinks.encode(), at, inside=inside, marks=marks)[:2] == ("T", "A")
        assert run(says.encode(), at, inside=inside, marks=marks)[:2] == ("", "A")


def test_every_family_of_marks_is_that_of_some_template() -> None:
    sources = [(TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in WRITTEN]
    sources += ["[|assistant|]<thought>\n"]  # EXAONE Deep's
    assert {marks_in(source) for source in sources} == set(KNOWN)


@pytest.mark.parametrize("name", ["google-gemma-4-31B-it", "openai-gpt-oss-120b", "google-gemma-2-2b-it"])
def test_what_has_thoughts_in_a_format_of_its_own_or_none_has_no_marks(name: str) -> None:
    assert marks_in((TEMPLATES / "tools" / f"{name}.jinja").read_text("utf-8")) is None


@pytest.mark.parametrize("marks", KNOWN, ids=lambda marks: marks.opening)
@given(thought=texts, answer=texts, at=cuts)
def test_whatever_the_marks_a_closed_thought_is_told_from_the_answer(
    marks: ThoughtMarks, thought: str, answer: str, at: list[int]
) -> None:
    thought, answer = (text.replace("<", "").replace("[", "").strip() for text in (thought, answer))
    written = f"{marks.opening}{thought}{marks.closer}{answer}".encode()
    assert run(written, at, marks=marks)[:2] == (thought, answer)
    prompt = f"Hi {marks.opening}\n"
    assert marks.opens_thought(prompt)
    unthought = marks.closed(prompt).removeprefix("Hi ")
    assert not marks.opens_thought(unthought)
    assert run(f"{unthought}{answer}".encode(), at, marks=marks)[:2] == ("", answer)


# --- templates ----------------------------------------------------------------------------------------------------


def rendered(source: str, messages: list[dict[str, Any]] = HI, **args: Any) -> str:
    return ChatTemplate(source, "<bos>", "").segments(messages, ["<|im_start|>", "<|im_end|>"], args)[0][0]


def test_qwen3_is_told_not_to_think() -> None:
    assert rendered(QWEN3).endswith("<|im_start|>assistant\n")
    assert rendered(QWEN3, enable_thinking=True) == rendered(QWEN3)
    quiet = rendered(QWEN3, enable_thinking=False)
    assert quiet.endswith("<think>\n\n</think>\n\n")
    assert not THINK.opens_thought(quiet)


def test_r1_opens_the_thought_itself() -> None:
    assert rendered(R1).replace("\uff5c", "|") == "<bos><|User|>Hi<|Assistant|><think>\n"
    assert THINK.opens_thought(rendered(R1))


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


def test_whether_to_think_is_said_in_the_words_of_the_template() -> None:
    def said(name: str, **extra: Any) -> str:
        source = (TEMPLATES / f"thoughts/{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, "", "").render(HI, args_for(source, asked(**extra)))

    assert args_for(QWEN3, {"x": 1}) == {"x": 1}
    assert said("ibm-granite-granite-3.3-2B-Instruct", think=True) != said("ibm-granite-granite-3.3-2B-Instruct")
    assert said("MiniMax-M3", think=False).endswith("</mm:think>")
    assert said("MiniMax-M3", think=True).endswith("<mm:think>")
    for effort, word in (
        ("none", "no_think"),
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "high"),
        ("high", "high"),
    ):
        assert f"reasoning_effort:{word}" in said("tencent-Hy3", reasoning_effort=effort)
    assert said("tencent-Hy3", think=True).endswith("<think:opensource>")
    assert said("upstage-Solar-Open-100B", think=False).endswith("<|think|><|end|><|begin|>assistant")
    assert said("Kimi-K3", think=False).endswith("<|open|>response<|sep|>")
    assert "thinking_effort=low" in said("Kimi-K3", reasoning_effort="low")
    assert "your thinking budget is 0" in said("ByteDance-Seed-OSS", thinking_budget=0)


# --- budgets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "max_tokens", "budget"),
    [
        ({}, 100, None),
        ({"thinking_budget_tokens": 7}, None, 7),
        ({"reasoning_budget_tokens": 0, "reasoning_effort": "high"}, 100, 0),
        ({"thinking_token_budget": -1, "reasoning_effort": "low"}, 100, None),
        ({"reasoning": {"max_tokens": 9}}, 100, 9),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 100, 9),
        ({"chat_template_kwargs": {"thinking_budget": 9}}, 100, 9),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 100, 0),
        ({"think": False}, 100, 0),
        ({"think": "low"}, 100, 20),
        ({"think": True}, 100, None),
        ({"reasoning_effort": "low"}, None, 4096),
        ({"reasoning_effort": "medium"}, 100_000, 16384),
        ({"reasoning_effort": "medium"}, 100, 50),
        ({"reasoning_effort": "high"}, None, None),
        ({"reasoning_effort": "high"}, 100, 80),
        ({"reasoning_effort": "none"}, 100, 0),
        ({"reasoning_effort": "as ever"}, 100, None),
    ],
)
def test_a_budget_is_told_in_whatever_words_clients_have(
    extra: dict[str, Any], max_tokens: int | None, budget: int | None
) -> None:
    request = GenerationRequest("r", tuple(HI), Sampling(max_tokens=max_tokens), extra=extra)
    assert request.thought_budget == budget
    assert GenerationRequest("r", tuple(HI), extra=extra, thinking_tokens=5).thought_budget == 5


def test_a_budget_of_nothing_is_not_to_think_and_the_template_may_know_any() -> None:
    assert asked(thinking_token_budget=0, reasoning_effort="high")["enable_thinking"] is False
    assert asked(thinking_token_budget=7) == {"thinking_budget": 7}
    assert asked(thinking_token_budget=-1) == {}
    assert GenerationRequest("r", tuple(HI), thinking_tokens=7).template_args == {"thinking_budget": 7}
    own = GenerationRequest("r", tuple(HI), extra={"reasoning_effort": "low"}, thinking_tokens=0)
    assert own.template_args == {"reasoning_effort": "low", "enable_thinking": False, "thinking_budget": 0}


def thinks_on(marks: ThoughtMarks, n_tokens: int, written: str, *, inside: bool) -> tuple[str, str, int]:
    """What comes of a model that would write this, and has only so many tokens for its thought; and their number."""
    closer = [token + 256 for token in range(len(marks.closer.encode()))]

    def piece(token: int) -> bytes:
        return bytes([token]) if token < 256 else marks.closer.encode()[token - 256 : token - 255]

    budget = ThoughtBudget(ThinkingText(inside=inside, marks=marks), n_tokens, closer, piece)
    stream, thought, answer, n_within = ThinkingText(inside=inside, marks=marks), "", "", 0
    for token in written.encode():
        while (forced := budget.forced) is not None:
            answer += stream.feed(piece(forced))
            budget.push(forced)
        budget.push(token)
        was_within = stream.is_within
        answer += stream.feed(piece(token))
        n_within += was_within and stream.is_within
        thought += stream.take_thought()
    return thought, answer + stream.flush(), n_within


@pytest.mark.parametrize("marks", [*KNOWN, *IN_FORMATS.values()], ids=lambda marks: marks.opening)
@pytest.mark.parametrize("inside", [False, True])
def test_a_thought_that_has_its_budget_is_closed_and_the_answer_goes_on(marks: ThoughtMarks, inside: bool) -> None:
    written = f"{'' if inside else marks.opening}Wellwell"
    for n in range(8):
        assert thinks_on(marks, n, written, inside=inside) == ("Wellwell"[:n], "Wellwell"[n:], n)
    assert thinks_on(marks, 8, written, inside=inside)[:2] == ("Wellwell", "")
    assert thinks_on(marks, 99, f"{written}{marks.closer}So", inside=inside)[:2] == ("Wellwell", "So")


def test_a_budget_ends_no_thought_within_a_character_or_the_mark_that_ends_it() -> None:
    assert thinks_on(THINK, 1, "€uro", inside=True)[:2] == ("€", "uro")
    assert thinks_on(THINK, 5, "abc</think>d", inside=True)[:2] == ("abc", "d")
    assert thinks_on(THINK, 0, "Hello <think>", inside=False)[:2] == ("", "Hello <think>")


def test_a_thought_that_another_side_made_counts() -> None:
    closer = list(THINK.closer.encode())
    budget = ThoughtBudget(ThinkingText(inside=True), 2, closer, lambda token: bytes([token]))
    for token in b"abcd":
        budget.push(token)
    assert budget.forced == closer[0]
    forced = []
    while token := budget.forced or 0:
        forced.append(token)
        budget.push(token)
    assert forced == closer
    budget.push(ord("x"))
    assert budget.is_over


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
    assert (THINK.is_answer(text), THINK.is_within(text)) == (answer, thinks)


def test_pieces_of_a_thought_survive_the_wire() -> None:
    piece = wire.TextPiece(id="g1", text="Well", n_tokens=2, thought=True)
    assert wire.decode_from_engine(framing.frame(piece)[HEADER.size :]) == piece


def test_a_limit_of_thoughts_that_nobody_has_is_refused(vocabulary: Vocabulary) -> None:
    """Another machine names the family."""
    assert vocabulary.thought_budget(None) is None
    assert vocabulary.thought_budget(ThoughtLimit(family="think", n_tokens=3)) is not None
    with pytest.raises(FormatError, match="No thoughts are known by the name 'nobody'"):
        vocabulary.thought_budget(ThoughtLimit(family="nobody", n_tokens=3))
