from __future__ import annotations

import importlib.util
import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from disco_daemon.engine.llama import template
from disco_daemon.engine.llama.template import ChatTemplate, TemplateError

FOLDER = Path(__file__).parents[2] / "fixtures" / "templates" / "tools"
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
        if expected is None:  # a template that refuses them gets these turns joined, or as text
            with suppress(TemplateError):
                said = chat.render(messages, {"tools": RECORDER.TOOLS})
                assert all((m.get("content") or "").strip() in said for m in messages), conversation
        else:
            assert chat.render(messages, {"tools": RECORDER.TOOLS}).encode() == expected.encode(), conversation
