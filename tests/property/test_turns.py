"""Templates that want strict turns: any order of roles has a prompt, with all that was said once and in order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.engine.llama.template import ChatTemplate

FOLDER = Path(__file__).parents[1] / "fixtures" / "templates"
ALTERNATING = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
# Of the strict kind, beside those on file: Llama 2's, the first Mistral's, Gemma's, a stricter one of tools.
WRITTEN = {
    "llama-2": "{% if messages[0].role == 'system' %}{% set said = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}" + ALTERNATING
    + "{% if m.role == 'user' %}[INST] {{ (said + ' ' + m.content) if loop.first else m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "mistral-7b": "{% for m in messages %}" + ALTERNATING
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    "gemma": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + ALTERNATING + "<t>{{ m.role }}\n{{ m.content | trim }}</t>{% endfor %}",
    "nothing-empty": "{% for m in messages %}" + ALTERNATING
    + "{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{{ m.content }}|{% endfor %}",
}  # fmt: skip
ON_FILE = [
    "Mistral-Small-3.2-24B-Instruct-2506", "google-gemma-2-2b-it", "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407", "meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B",
]  # fmt: skip


def template(name: str) -> ChatTemplate:
    source = WRITTEN.get(name) or (FOLDER / "tools" / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, "<s>", "</s>")


TEMPLATES = {name: template(name) for name in (*WRITTEN, *ON_FILE)}
# "call": an assistant that calls one or two functions, with all results behind.
roles = st.lists(
    st.sampled_from(["system", "developer", "user", "assistant", "call", "two calls"]), min_size=1, max_size=7
)


def conversation(kinds: list[str]) -> list[dict[str, Any]]:
    """Messages of these kinds, each with a word of its own, as a client of OpenAI's API sends them."""
    found: list[dict[str, Any]] = []
    for n, kind in enumerate(kinds):
        if "call" not in kind:
            found.append({"role": kind, "content": f"word{n}x"})
            continue
        numbers = range(1 if kind == "call" else 2)
        calls = [
            {"id": f"call_{n}{i}abcdefghijklmnop", "type": "function",
             "function": {"name": "look", "arguments": {"at": f"call{n}{i}x"}}}
            for i in numbers
        ]  # fmt: skip
        found.append({"role": "assistant", "content": "", "tool_calls": calls})
        found.extend({"role": "tool", "tool_call_id": calls[i]["id"], "content": f"result{n}{i}x"} for i in numbers)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(kinds=roles)
@settings(max_examples=20, deadline=None)
def test_any_order_of_turns_has_a_prompt_with_all_that_was_said_once_and_in_order(name: str, kinds: list[str]) -> None:
    messages = conversation(kinds)
    before = json.dumps(messages)
    text = TEMPLATES[name].render(messages)
    assert json.dumps(messages) == before, "what a server would get stays as it was"
    if TEMPLATES[name].takes(messages):
        return  # whatever the template itself makes of it: some leave the thoughts of old turns out
    told = re.findall(r"(?:word|call|result)\d+x", text)
    assert sorted(told) == sorted(set(told)), "once"
    said = re.findall(r"(?:word|call|result)\d+x", before)
    assert set(told) == set(said)
    instructions = {f"word{n}x" for n, kind in enumerate(kinds) if kind in ("system", "developer")}
    assert [w for w in told if w[0] == "w" and w not in instructions] == [
        w for w in said if w[0] == "w" and w not in instructions
    ]
    assert [w for w in told if w in instructions] == [w for w in said if w in instructions]
    assert [w for w in told if w[0] == "r"] == [w for w in said if w[0] == "r"]


def test_turns_are_joined_only_where_the_template_refuses_them() -> None:
    two = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    assert TEMPLATES["mistral-7b"].render(two) == "[INST] One\n\nTwo [/INST]"
    assert TEMPLATES["Qwen-Qwen3-0.6B"].render(two).count("<|im_start|>user") == 2


def test_an_assistant_that_speaks_first_answers_an_empty_turn() -> None:
    first = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
    assert TEMPLATES["mistral-7b"].render(first) == "[INST]  [/INST]Hello</s>[INST] Hi [/INST]"
    assert TEMPLATES["nothing-empty"].render(first) == "...|Hello|Hi|"


def test_a_user_behind_a_tools_result_keeps_the_templates_own_form_of_calls() -> None:
    messages = [*conversation(["user", "call"]), {"role": "user", "content": "And?"}]
    text = TEMPLATES["mistralai-Mistral-Nemo-Instruct-2407"].render(messages)
    assert "[TOOL_CALLS]" in text
    assert "[TOOL_RESULTS]" in text
    assert text.index("result10x") < text.index("And?")
