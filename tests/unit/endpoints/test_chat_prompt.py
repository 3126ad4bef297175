from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_daemon.endpoints.chat_prompt import THOUGHTS, for_template
from disco_daemon.engine.llama.template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "fixtures/templates"
MIND = "First I look."
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ASK: dict[str, Any] = {"role": "user", "content": "Where is it?"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "Here."}
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}]


def prompt(name: str, messages: list[dict[str, Any]]) -> str:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, "", "").segments(for_template(messages), ["<|im_end|>"], {}, TOOLS)[0][0]


def called(name: str, said: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": said, "tool_calls": [CALL], name: MIND}


@pytest.mark.parametrize("told_as", THOUGHTS)
@pytest.mark.parametrize(
    "name",
    [
        "tools/Qwen-Qwen3-0.6B", "tools/Qwen3.5-4B", "tools/LFM2.5-8B-A1B", "tools/openai-gpt-oss-120b",
        "tools/google-gemma-4-31B-it", "thoughts/upstage-Solar-Open-100B", "thoughts/ByteDance-Seed-OSS",
        "thoughts/CohereForAI-c4ai-command-r7b-12-2024-tool_use", "thoughts/MiniMax-M3",
    ],
)  # fmt: skip
def test_between_calls_a_model_has_its_thought_where_its_template_shows_it(name: str, told_as: str) -> None:
    assert MIND in prompt(name, [ASK, called(told_as), RESULT])


@pytest.mark.parametrize("said", ["", "It is here."])
@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek-r1", "tools/Qwen3.5-4B", "tools/LFM2.5-8B-A1B", "tools/openai-gpt-oss-120b"]
)
def test_the_thought_of_an_earlier_turn_is_not_put_back(name: str, said: str) -> None:
    over = [ASK, {"role": "assistant", "content": said or "Done.", "reasoning_content": MIND}, ASK]
    assert MIND not in prompt(name, over)


def test_a_template_that_takes_a_thought_or_a_text_beside_a_call_gets_one() -> None:
    assert "It is near." in prompt("tools/openai-gpt-oss-120b", [ASK, called("thinking", "It is near."), RESULT])


def test_what_is_no_thought_is_none() -> None:
    for told in ("", " \n", None, 3, ["x"]):
        (made,) = for_template([{"role": "assistant", "content": "Hi", "reasoning_content": told}])
        assert made == {"role": "assistant", "content": "Hi"}
    assert for_template([{**ASK, "reasoning": MIND}]) == (ASK,), "a user's message has none"
