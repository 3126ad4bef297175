"""Chat messages to prompt text, by the model's own template in a sandbox (templates are untrusted code)."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2

from ...plain import writable_text
from .sandbox import Sandbox, TooMuch, said
from .turns import has_all, orders

# Used for a model without a template, such as a base model: plain roles, readable by any model.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


# Errors of a foreign program in the sandbox, at compile or run time.
_FAULTS = (
    jinja2.TemplateError, SyntaxError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError,
    LookupError, RuntimeError, MemoryError, NameError,
)  # fmt: skip


_PLAIN = re.compile(r"[\w.:/-]*", re.ASCII)  # a name of which no control token can be made
MAX_DATE = 200  # characters of a format for the date
_SAMPLE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"})
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None  # as OpenAI writes them
_NO_ARGS: Mapping[str, Any] = {}
# Arguments that only the engine gives a template.
_OURS = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"})


class TemplateError(ValueError):
    """The model's template refuses these messages; the message says why."""


class TemplateUnfit(TemplateError):
    """The template cannot be used: it does not compile, or takes too much; another one is needed."""


class ChatTemplate:
    """One compiled chat template.

    Source: a Jinja text from the GGUF's `tokenizer.chat_template`; see CVE-2024-34359 for why it is sandboxed.
    """

    def __init__(self, source: str | None, bos: str, eos: str) -> None:
        environment = self._sandbox = Sandbox()
        self._turn = threading.Lock()  # the budget is that of one rendering
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda fmt: datetime.now(UTC).strftime(fmt[:MAX_DATE])
        try:
            self._template = environment.from_string(source or PLAIN_TEMPLATE)
        except _FAULTS as e:
            raise TemplateUnfit(f"the model's chat template does not compile: {writable_text(said(e))}") from e
        self._bos, self._eos = bos, eos

    def render(self, messages: Messages, args: Mapping[str, Any] = _NO_ARGS, tools: Tools = None) -> str:
        """Render the prompt, up to where the answer begins; `args` are for the template. Raises TemplateError.

        Where the template refuses their order, it is one that it takes, see `turns`.
        """
        try:
            return self._render(messages, args, tools)
        except TemplateUnfit:
            raise
        except TemplateError as e:
            refused = e
        less = ""
        for order in orders(messages) if messages else ():
            try:
                text = self._render(order, args, tools)
            except TemplateUnfit:
                raise
            except TemplateError:
                continue
            if has_all(text, messages):
                return text
            less = less or text
        try:
            if not less:
                raise refused
            return less
        finally:
            del refused  # its traceback holds this frame, which would hold it

    def takes(self, messages: Messages, args: Mapping[str, Any] = _NO_ARGS, tools: Tools = None) -> bool:
        """Whether the template takes these messages in the order that they have."""
        try:
            self._render(messages, args, tools)
        except TemplateError:
            return False
        return True

    def _render(self, messages: Messages, args: Mapping[str, Any], tools: Tools) -> str:
        try:
            with self._turn:
                self._sandbox.begin()
                given = dict(args, messages=messages, bos_token=self._bos, eos_token=self._eos)
                text = self._template.render(given | ({"tools": tools} if tools else {}), add_generation_prompt=True)
                return writable_text(text)  # a template may spell halves of characters
        except TooMuch as e:
            msg = f"the model's chat template refuses these messages, for it takes more than it may: {said(e)}"
            raise TemplateUnfit(msg) from e
        except _FAULTS as e:
            raise TemplateError(f"the model's chat template refuses these messages: {writable_text(said(e))}") from e

    def try_out(self) -> None:
        """Render two messages. Raises TemplateUnfit if that takes too much; a template may refuse them."""
        try:
            self.render(_SAMPLE)
        except TemplateUnfit:
            raise
        except TemplateError:
            pass

    def segments(
        self, messages: Messages, control: Sequence[str], args: Mapping[str, Any] = _NO_ARGS, tools: Tools = None
    ) -> list[tuple[str, bool]]:
        """Render the prompt as (text, is_template) parts in order. Raises TemplateError.

        It is one part where nothing spells a control token. Otherwise each such content is its own part, to be
        tokenized without control tokens, so that a user's text cannot open a turn. Neither may `args`. Of tools and
        calls only what spells a control token is a part of its own: a template writes them in ways of its own.
        """
        if args:
            _check_args(args, control)
        marks: dict[str, str] = {}
        guarded: list[dict[str, Any]] = []
        for message in messages:
            content = message.get("content")
            told = {key: value if key == "content" else _guard(value, control, marks) for key, value in message.items()}
            if isinstance(content, str) and any(c in content for c in control):
                told["content"] = _mark(content, marks)
            for key in ("name", "tool_call_id"):  # templates may put one beside the other
                if isinstance(name := message.get(key), str) and not _PLAIN.fullmatch(name):
                    told[key] = _mark(name, marks)
            guarded.append(told)
        parts = [(self.render(guarded, args, _guard(tools, control, marks)), True)]
        for mark, content in marks.items():
            parts = [piece for part in parts for piece in _split(part, mark, content)]
        return [part for part in parts if part[0]]


def _mark(text: str, marks: dict[str, str]) -> str:
    """Return a word that stands for a text."""
    mark = f"disco{secrets.token_hex(12)}"
    marks[mark] = text
    return mark


def _guard(value: Any, control: Sequence[str], marks: dict[str, str]) -> Any:
    """Return JSON with a mark in place of each control token that it spells; as it is if there is none."""
    if not value or not any(c in text for text in _texts(value) for c in control):
        return value
    spelled = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))
    return _replaced(value, lambda text: spelled.sub(lambda found: _mark(found[0], marks), text))


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its strings changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _replaced(inner, change) for key, inner in value.items()}
    return [_replaced(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def _split(part: tuple[str, bool], mark: str, content: str) -> list[tuple[str, bool]]:
    text, is_template = part
    if not is_template or mark not in text:
        return [part]
    before, _, after = text.partition(mark)
    return [(before, True), (content, False), *_split((after, True), mark, content)]


def _check_args(args: Mapping[str, Any], control: Sequence[str]) -> None:
    """Refuse arguments that a client may not give. Raises TemplateError."""
    if ours := sorted(_OURS & args.keys()):
        raise TemplateError(f"chat_template_kwargs cannot set {', '.join(ours)}")
    if any(c in text for text in _texts(args) for c in control):
        raise TemplateError("chat_template_kwargs cannot spell control tokens")


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.items() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


def _raise(message: object) -> None:
    raise jinja2.TemplateError(said(message))
