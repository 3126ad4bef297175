from __future__ import annotations

import importlib.util
import json
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from disco_daemon.engine.llama import template
from disco_daemon.engine.llama.template import ChatTemplate

FOLDER = Path(__file__).parents[2] / "fixtures" / "templates" / "tools"
ASKED = (
    "<s><start_of_turn>user\n{}What's the weather in Zürich <tomorrow> & after?<end_of_turn>\n<start_of_turn>model\n"
)
# What transformers refuses, since the template raises, is answered here as llama-server and Ollama do: instructions
# stand in the user's first turn, and calls and their results are turns of text.
TOLD = {
    "google-gemma-2-2b-it": {
        "a question with instructions": ASKED.format("Be brief.\n\n"),
        "a result": ASKED.format("")
        + """{"name": "get_weather", "arguments": {"city": "Zürich <ZH> & \\"so\\" 'on'", "days": 2}}<end_of_turn>\n"""
        + """<start_of_turn>user\n{"°C": [7, 9]}<end_of_turn>\n<start_of_turn>model\n""",
    }
}
RECORDED: dict[str, dict[str, str | None]] = json.loads((FOLDER / "prompts.json").read_text("utf-8"))["prompts"]


def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_prompts", FOLDER / "record_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORDER = recorder()


class Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return RECORDER.NOW


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_a_prompt_with_tools_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "datetime", Frozen)
    chat = ChatTemplate((FOLDER / f"{name}.jinja").read_text("utf-8"), "<s>", "</s>")
    assert set(RECORDED[name]) == set(RECORDER.CONVERSATIONS)
    for conversation, messages in RECORDER.CONVERSATIONS.items():
        expected = RECORDED[name][conversation]
        if expected is None:
            expected = TOLD[name][conversation]
        assert chat.render(messages, {"tools": RECORDER.TOOLS}).encode() == expected.encode(), conversation
