"""Chat messages to prompt text, by the model's own template in a sandbox (templates are untrusted code)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Used for a model without a template, such as a base model: plain roles, readable by any model.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


# What somebody else's program can raise in the sandbox, at compile or run time.
_FAULTS = (
    jinja2.TemplateError, SyntaxError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError,
    LookupError, RuntimeError, MemoryError,
)  # fmt: skip


class TemplateError(ValueError):
    """The model's template refuses these messages; the message says why."""


class ChatTemplate:
    """One compiled chat template.

    Source: a Jinja text from the GGUF's `tokenizer.chat_template`; see CVE-2024-34359 for why it is sandboxed.
    """

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda fmt: datetime.now(UTC).strftime(fmt)
        try:
            self._template = environment.from_string(source or PLAIN_TEMPLATE)
        except _FAULTS as e:
            msg = f"the model's chat template does not compile: {e}"
            raise TemplateError(msg) from e
        self._bos, self._eos = bos, eos

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Prompt text, up to where the assistant's answer begins. Raises TemplateError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, bos_token=self._bos, eos_token=self._eos
            )
        except _FAULTS as e:
            msg = f"the model's chat template refuses these messages: {e}"
            raise TemplateError(msg) from e

    def segments(self, messages: Sequence[Mapping[str, Any]], control: Sequence[str]) -> list[tuple[str, bool]]:
        """Prompt as (text, is_template) parts in order.

        One part where no content spells a control token. Otherwise each such content is its own part, to be
        tokenized without control tokens, so that a user's text cannot open a turn.
        """
        marks: dict[str, str] = {}
        guarded: list[dict[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and any(c in content for c in control):
                mark = f"disco{secrets.token_hex(12)}"
                marks[mark] = content
                guarded.append({**message, "content": mark})
            else:
                guarded.append(dict(message))
        parts = [(self.render(guarded), True)]
        for mark, content in marks.items():
            parts = [piece for part in parts for piece in _split(part, mark, content)]
        return [part for part in parts if part[0]]


def _split(part: tuple[str, bool], mark: str, content: str) -> list[tuple[str, bool]]:
    text, is_template = part
    if not is_template or mark not in text:
        return [part]
    before, _, after = text.partition(mark)
    return [(before, True), (content, False), *_split((after, True), mark, content)]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
