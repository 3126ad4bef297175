"""Prompts with tools are those of llama-server, where that and transformers agree on what a template says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.models.default import default_model_path
from tests.fixtures.llama_servers import told_by

FOLDER = Path(__file__).parents[1] / "fixtures" / "templates" / "tools"
RECORDED = json.loads((FOLDER / "prompts.json").read_text("utf-8"))["prompts"]
# The beginning and the end of a text, as they were recorded and as the embedded model has them.
MARKS = {"<s>": "<|im_start|>", "</s>": "<|im_end|>"}
# Where llama-server says something else: it has thinking on unless told otherwise, and today's date.
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


async def test_a_prompt_with_tools_is_that_of_llama_server() -> None:
    made = recorder()
    templates = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.jinja") if path.stem not in OTHERS}
    asked = {
        "model": str(default_model_path()), "templates": templates, "messages": made.CONVERSATIONS, "tools": made.TOOLS,
    }  # fmt: skip
    told = await told_by("llama_server_prompts", asked)
    assert len(templates) >= 14
    for name in templates:
        for conversation, prompt in RECORDED[name].items():
            expected = prompt
            for ours, theirs in MARKS.items():
                expected = expected.replace(ours, theirs)
            assert told[name][conversation] == expected, (name, conversation)
