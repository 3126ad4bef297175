"""A model whose template wants strict turns answers any order of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fixtures.daemon import running

GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


async def test_turns_that_a_template_refuses_are_answered(tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(GEMMA)
    settings: dict[str, Any] = {"device": {"chat_template": str(template)}}
    orders = [
        ["user", "user"], ["assistant", "user"], ["user", "assistant", "assistant", "user"], ["system", "user"],
        ["user", "system", "user"], ["user", "assistant"], ["system", "system", "assistant"],
    ]  # fmt: skip
    async with running(tmp_path, policy="all-device", settings=settings) as daemon:
        await daemon.device_ready()
        for roles in (["user"], *orders):
            messages: Any = [{"role": role, "content": f"Say {n}."} for n, role in enumerate(roles)]
            told = await daemon.client.chat.completions.create(model="disco", messages=messages, max_tokens=2)
            disco = (told.model_extra or {})["disco"]
            assert told.choices[0].finish_reason in ("stop", "length"), roles
            if roles in (["user"], ["user", "assistant"], ["user", "system", "user"]):  # this template takes them
                assert disco["ignored"] == [], roles
            else:
                assert disco["ignored"] == ["messages.order"], roles
