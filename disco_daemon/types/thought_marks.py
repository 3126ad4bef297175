"""The marks between which models write what they think, and which of them a chat template has. Pure.

Sources: the templates in llama.cpp's folder models/templates, its tests/test-chat.cpp, and EXAONE Deep's own template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_SPACE = 256  # characters of white space in front of a thought, or within one, that are held back


class ThoughtText:
    """The text of one thought, in pieces, without the white space around it."""

    __slots__ = ("_has_begun", "_space")

    def __init__(self) -> None:
        self._has_begun = False
        self._space = ""  # behind what was returned: none of the thought, if that ends here

    def add(self, text: str) -> str:
        """Take the next piece; return what is known by it to be of the thought."""
        text = self._space + (text if self._has_begun else text.lstrip())
        said = text.rstrip()
        if len(text) - len(said) > MAX_SPACE:  # held longer, it would be looked at with each piece
            said = text
        self._space = text[len(said) :]
        self._has_begun = self._has_begun or bool(said)
        return said


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """How a family of models marks a thought, which stands in front of the answer.

    A template that has one of the `signs` is of this family; without any, one that has a mark is. Between a thought and
    the answer, or in front of an answer without a thought, there may be `leads`; behind one of these, or behind a
    thought, the answer is over where its `ending` comes. `close` is the text that ends a thought anywhere, as the
    model would.
    """

    opening: str
    closing: str
    signs: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    ending: str = ""
    close: str = ""

    @property
    def every(self) -> tuple[str, ...]:
        """All marks of the family."""
        return tuple(filter(None, (self.opening, self.closing, *self.leads, self.ending)))

    def are_in(self, template: str) -> bool:
        """Whether a template's source is of this family."""
        return any(sign in template for sign in self.signs or (self.opening, self.closing))

    def opens_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the beginning of a thought."""
        return prompt.rstrip().endswith(self.opening)

    def closed(self, prompt: str) -> str:
        """Return a prompt that opens a thought with an empty one instead."""
        text = prompt.rstrip()
        return f"{text}\n{self.closer}" if self.closer.startswith("\n") else f"{text}{self.closer}"

    def is_answer(self, text: str) -> bool:
        """Whether a partial answer comes without its thought: then the thought is over, wherever it is."""
        return bool(text) and self.closing not in text and not text.lstrip().startswith(self.opening)

    def is_within(self, text: str) -> bool:
        """Whether a partial answer ends within a thought."""
        return text.lstrip().startswith(self.opening) and self.closing not in text

    @property
    def closer(self) -> str:
        """The text that ends a thought."""
        return self.close or self.closing


THINK = ThoughtMarks("<think>", "</think>", close="\n</think>\n\n")  # behind "<think>\n": Qwen3's empty thought
GRANITE = ThoughtMarks(
    "<think>", "</think>", ("<response></response>",), ("<response>",), "</response>", "</think>\n<response>"
)  # Granite 3.3
HUNYUAN_3 = ThoughtMarks("<think:opensource>", "</think:opensource>", ("<think{}>", "<think:opensource>"))
SEED = ThoughtMarks("<seed:think>", "</seed:think>", close="</seed:think>\n")
MINIMAX_3 = ThoughtMarks("<mm:think>", "</mm:think>")
EXAONE_DEEP = ThoughtMarks("<thought>", "</thought>", close="\n</thought>\n\n")
COMMAND = ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>")  # Command A and R7B
APERTUS = ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>")
MISTRAL = ThoughtMarks("[THINK]", "[/THINK]")  # Magistral and Ministral 3
APRIEL = ThoughtMarks(
    "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("[BEGIN FINAL RESPONSE]",),
    ending="[END FINAL RESPONSE]", close="\n[BEGIN FINAL RESPONSE]\n",
)  # fmt: skip
SOLAR_OPEN = ThoughtMarks(
    "<|think|>", "<|end|>", ("<|begin|>assistant<|think|>",), ("<|begin|>assistant", "<|content|>"),
    close="<|end|><|begin|>assistant<|content|>",
)  # fmt: skip
KIMI_3 = ThoughtMarks(
    "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("open_tag('think'",), ("<|open|>response<|sep|>",),
    "<|close|>response<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>",
)  # fmt: skip

# Those of a special form come first: a template of theirs may have the marks of others in what it tells the model.
FAMILIES = {
    "hunyuan-3": HUNYUAN_3, "seed": SEED, "minimax-3": MINIMAX_3, "exaone-deep": EXAONE_DEEP, "command": COMMAND,
    "apertus": APERTUS, "mistral": MISTRAL, "apriel": APRIEL, "solar-open": SOLAR_OPEN, "kimi-3": KIMI_3,
    "granite": GRANITE, "think": THINK,
}  # fmt: skip
KNOWN = tuple(FAMILIES.values())

TAGS = tuple((marks.opening, marks.closing) for marks in KNOWN if not marks.signs)  # those that nothing else says

# Formats of calls that take their thoughts apart themselves (`tools`): for a budget these marks are counted by.
IN_FORMATS = {
    "gpt-oss": ThoughtMarks(
        "<|channel|>analysis<|message|>", "<|end|>", leads=("<|start|>assistant", "<|channel|>final<|message|>"),
        close="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma": ThoughtMarks("<|channel>thought\n", "<channel|>"),
}  # fmt: skip
ALL_FAMILIES = FAMILIES | IN_FORMATS


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a thought with the marks of a family may have; `is_begun`: the prompt has opened it.

    It ends with its closing mark alone if it `closes_only`, else as the model would end it.
    """

    family: Annotated[str, Meta(max_length=32)]
    n_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    is_begun: bool = False
    closes_only: bool = False


_KIMI_EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}


def args_for(template: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a template with its own names and values for whether to think, and how much.

    What the client has said by such a name itself stays.
    """
    thinks, effort = args.get("enable_thinking"), args.get("reasoning_effort")
    if not isinstance(thinks, bool):
        return dict(args)
    own: dict[str, Any] = {"thinking": thinks, "thinking_mode": "enabled" if thinks else "disabled"}
    if effort in _KIMI_EFFORTS:
        own["thinking_effort"] = _KIMI_EFFORTS[effort]
    made = own | dict(args)
    if HUNYUAN_3.are_in(template):  # it refuses all others
        made["reasoning_effort"] = "no_think" if not thinks else "low" if effort in ("minimal", "low") else "high"
    elif SOLAR_OPEN.are_in(template) and not thinks:
        made["reasoning_effort"] = "minimal"
    return made


def marks_in(template: str) -> ThoughtMarks | None:
    """Return the marks that a chat template has by its source, None if none are known."""
    return next((marks for marks in KNOWN if marks.are_in(template)), None)


def marks_of_tokens(are_tokens: Callable[[tuple[str, ...]], bool]) -> ThoughtMarks | None:
    """Return the marks that a vocabulary has as tokens, for a template without any; `are_tokens` asks it for some."""
    return next((marks for marks in KNOWN if not marks.signs and are_tokens(marks.every)), None)


def family_of(template: str, tool_format: str | None, are_tokens: Callable[[tuple[str, ...]], bool]) -> str | None:
    """Return the name of the family by whose marks thoughts are told apart; None where none are known."""
    if tool_format in IN_FORMATS:
        return tool_format
    found = marks_in(template) or marks_of_tokens(are_tokens)
    return next((name for name, marks in FAMILIES.items() if marks is found), None)
