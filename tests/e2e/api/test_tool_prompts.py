"""Prompts with tools are those of llama-server, where that and transformers agree on what a template says."""

from __future__ import annotations

import importlib.util
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.models.default import default_model_path
from tests.fixtures.llama_servers import told_by

FOLDER = Path(__file__).parents[2] / "fixtures" / "templates" / "tools"
RECORDED = json.loads((FOLDER / "prompts.json").read_text("utf-8"))["prompts"]
# The beginning and the end of a text, as they were recorded and as the embedded model has them.
MARKS = {"<s>": "<|im_start|>", "</s>": "<|im_end|>"}
DAYS = "%Y-%m-%d", "%d %b %Y"  # as templates write a date
# Where llama-server says something else: it has thinking on unless told otherwise.
OTHERS = {
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "google-gemma-2-2b-it",
}

pytestmark = pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")


def recorder() -> Any:
    spec = importlib.util.spec_from_file_location("record_prompts", FOLDER / "record_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_recorded(prompt: str, recorded: date, today: date) -> str:
    """The prompt with the day on which others were recorded for today, or for tomorrow: midnight comes at any time."""
    for form in DAYS:
        for day in (today, today + timedelta(days=1)):
            prompt = prompt.replace(day.strftime(form), recorded.strftime(form))
    return prompt


async def test_a_prompt_with_tools_is_that_of_llama_server() -> None:
    made = recorder()
    templates = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.jinja") if path.stem not in OTHERS}
    asked = {
        "model": str(default_model_path()), "templates": templates, "messages": made.CONVERSATIONS, "tools": made.TOOLS,
    }  # fmt: skip
    before = date.today()  # noqa: DTZ011 - llama-server's clock is the local one, too
    told = await told_by("llama_server_prompts", asked)
    assert len(templates) >= 14
    for name in templates:
        for conversation, prompt in RECORDED[name].items():
            expected = prompt
            for ours, theirs in MARKS.items():
                expected = expected.replace(ours, theirs)
            heard = as_recorded(told[name][conversation], made.NOW.date(), before)
            assert heard == expected, (name, conversation)
