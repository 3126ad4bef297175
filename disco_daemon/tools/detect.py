"""Which format of calls a chat template has, found by what it makes of tools and of a call; never by a model's name.

A template is asked for one conversation twice: once the assistant says a word, once it calls a tool. What differs is a
call as the template writes it, and the format whose parser reads that call there is the template's. Pure.

Source: "differential analysis" of llama.cpp, ggml-org/llama.cpp#18675.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import framed, tagged
from .format import Arguments, CallBegun, CallEnded, Tool, ToolFormat
from .formats import BY_NAME, FORMATS, GENERIC, LFM2
from .framed import GRANITE, NEMOTRON

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Sequence[Mapping[str, Any]] | None], str]

_NAME, _KEY, _VALUE = "disco_probe", "probed_key", "probed value"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_PROBE = Tool(_NAME, "A probe.", _PARAMETERS)
_REQUEST = {"type": "function", "function": {"name": _NAME, "description": "A probe.", "parameters": _PARAMETERS}}
_CALL_ID = "disco0001"  # Mistral's templates want nine letters or digits
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_USER = {"role": "user", "content": "Hello"}
_WORD = "Zq7"  # begins and ends like no mark
_SAYS = {"role": "assistant", "content": _WORD}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_IDS = (_CALL_ID, "disco0002")
_TWO = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": one, "type": "function", "function": {"name": _NAME, "arguments": tagged.PROBE}} for one in _IDS
    ],
}
# A call where the template refuses calls, and they are told as text (`engine.llama.turns`): no format of its own.
_AS_TEXT = json.dumps({"name": _NAME, "arguments": {_KEY: _VALUE}})
_RESULT = "probed result"
_ANSWERS = {"role": "tool", "name": _NAME, "tool_call_id": _CALL_ID, "content": _RESULT}
# What templates that write no calls say of tools: LFM2's list them so, others show an example.
_TOLD = (
    (GRANITE, ("<|tool_call|>", "JSON list")),
    (NEMOTRON, ("<TOOLCALL>[", "]</TOOLCALL>")),
    (LFM2, ("List of tools: ",)),
    (BY_NAME["qwen3-coder"], ("<tool_call>", "<function=", "<parameter=")),
    (BY_NAME["hermes"], ("<tool_call>", '{"name":', "</tool_call>")),
)


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """What a chat template does with tools."""

    format: ToolFormat
    shows_tools: bool  # tells the model of the tools; else the format's `instructions` have to
    writes_calls: bool  # of the history; else the format's `write` has to, as the message's content
    writes_results: bool  # of calls, as messages of the role `tool`


def detect(render: Render) -> TemplateTools:
    """Find a template's format. `render` gives the prompt for messages and tools, and raises ValueError.

    A template that writes calls as no known format does has the generic one, and so has one that neither shows tools
    nor writes calls in a frame of its own.
    """
    shown = _rendered(render, [_USER], [_REQUEST])
    said = _rendered(render, [_USER, _SAYS], [_REQUEST])
    called = _rendered(render, [_USER, _CALLS], [_REQUEST])
    results = _RESULT in _rendered(render, [_USER, _CALLS, _ANSWERS], [_REQUEST])
    call = _differing(called, said)
    call = "" if call.strip() == _AS_TEXT else call
    if _NAME not in shown:  # DeepSeek R1's and V3.1's
        frame = _derived(render, said, called)[1] if _VALUE in call else None
        if frame is None:
            return TemplateTools(GENERIC, shows_tools=False, writes_calls=False, writes_results=False)
        telling = framed.Framed(frame.frame, tells=True)
        return TemplateTools(telling, shows_tools=False, writes_calls=True, writes_results=results)
    found = next((known for known in FORMATS if _is_written_in(known, call)), None) if _VALUE in call else None
    if found is None and _VALUE in call:
        found = next(filter(None, _derived(render, said, called)), None)
    if found is not None:
        return TemplateTools(found, shows_tools=True, writes_calls=True, writes_results=results)
    told = None if _VALUE in call else _format_told(_differing(shown, _rendered(render, [_USER], None)))
    if told is not None:
        return TemplateTools(told, shows_tools=True, writes_calls=False, writes_results=results)
    return TemplateTools(GENERIC, shows_tools=False, writes_calls=False, writes_results=results)


def _derived(render: Render, said: str, called: str) -> tuple[tagged.Tagged | None, framed.Framed | None]:
    """Return the formats that what a template makes of two calls shows, and in which it writes one, called, too."""
    whole = _whole_tags(called, said).replace(_CALL_ID, framed.FIRST_ID)
    two = _whole_tags(_rendered(render, [_USER, _TWO], [_REQUEST]), said)
    tags, frame = tagged.derived(two, _NAME), framed.derived(two, _NAME, tagged.PROBE, _IDS)
    return (
        tags if tags is not None and _is_written_in(tags, whole) else None,
        frame if frame is not None and _is_written_in(frame, whole) else None,
    )


def _format_told(tools: str) -> ToolFormat | None:
    """Return the format that a template has by what it says of tools, where it writes no calls of the history."""
    return next((known for known, words in _TOLD if all(word in tools for word in words)), None)


def _rendered(render: Render, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Render a prompt; empty if the template refuses."""
    try:
        return render(messages, tools)
    except ValueError:
        return ""


def _differing(text: str, other: str) -> str:
    """Return what is left of a text without what it has in common with another at its begin and at its end."""
    begin = _n_common(text, other)
    end = _n_common(text[begin:][::-1], other[begin:][::-1])
    return text[begin : len(text) - end]


def _whole_tags(text: str, other: str) -> str:
    """Return what `_differing` does, and the rest of a tag that the two have a part of in common."""
    begin = _n_common(text, other)
    end = len(text) - _n_common(text[begin:][::-1], other[begin:][::-1])
    opened = text.rfind("<", 0, begin)
    if opened > text.rfind(">", 0, begin):
        begin = opened
    closed = text.find(">", end)
    if 0 <= text.rfind("<", 0, end) > text.rfind(">", 0, end) and closed >= 0:
        end = closed + 1
    return text[begin:end]


def _n_common(text: str, other: str) -> int:
    """Count the characters with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def _is_written_in(known: ToolFormat, call: str) -> bool:
    """Whether a format's parser reads exactly the call that was asked for, and forced calls begin as this does."""
    if "".join(known.begin([_PROBE]).split()) not in "".join(call.split()):
        return False
    parser = known.parser([_PROBE])
    events = [*parser.push(call), *parser.finish()]
    if [e.name for e in events if isinstance(e, CallBegun)] != [_NAME] or not any(
        isinstance(e, CallEnded) for e in events
    ):
        return False
    return bool(json.loads("".join(e.text for e in events if isinstance(e, Arguments))) == {_KEY: _VALUE})
