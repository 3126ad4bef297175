"""What a request is, as rules ask for it: each fact is found once, and only if something asks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from ..estimation.will_do import KINDS as LEARNED_KINDS
from ..estimation.will_do import WillDo
from ..types import Capability, GenerationRequest, Infill, text_of
from ..types.tools import tool_use
from ..types.wanted import wanted
from .language import has_code, has_numbers, language_of

LEAST_CHARS = 12  # of a question whose language is the conversation's; "and now?" goes by what was said before
MOST_SAID_CHARS = 100_000  # in which a fact is looked for, the latest message first: a conversation has no end


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What holds whatever the request is: the local time, the charge (None on mains), and the share used of a cap.

    `will_do` is what was learned of the device's answers.
    """

    now: Callable[[], datetime]
    battery: Callable[[], float | None]
    cap_used: Callable[[], float]
    will_do: Callable[[], WillDo] = WillDo


class RequestFacts:
    """The facts of one request, by what an endpoint would get, and by how it was asked. See `rules.RuleFacts`."""

    def __init__(
        self, request: GenerationRequest, model: str, headers: Mapping[str, str], around: Surroundings
    ) -> None:
        self._request, self._headers, self._around = request, headers, around
        self.model = model
        self.tokens: int | None = None

    @cached_property
    def tools(self) -> bool:
        """See `rules.RuleFacts`."""
        return tool_use(self._request.extra) is not None or bool(self._request.extra.get("functions"))

    @cached_property
    def images(self) -> bool:
        """See `rules.RuleFacts`."""
        return not self._request.text_only and Capability.IMAGES in wanted(self._request)

    @property
    def schema(self) -> bool:
        """See `rules.RuleFacts`."""
        return self._request.has_form

    @cached_property
    def thinking(self) -> bool:
        """See `rules.RuleFacts`."""
        args = self._request.template_args
        asked = args.get("enable_thinking") is True or "reasoning_effort" in args or args.get("thinking_budget", 0) > 0
        return asked and args.get("enable_thinking") is not False and self._request.thinking_tokens != 0

    @cached_property
    def code(self) -> bool:
        """See `rules.RuleFacts`."""
        return any(has_code(text) for text in self._said())

    @cached_property
    def numbers(self) -> bool:
        """Whether the latest question has several numbers; answers are told apart by it, and no rule asks for it."""
        return has_numbers(next(self._said(), ""))

    @cached_property
    def language(self) -> str:
        """See `rules.RuleFacts`."""
        latest = ""
        for text in self._said():
            found = language_of(text)
            if found and len(text) >= LEAST_CHARS:
                return found
            latest = latest or found
        return latest

    @property
    def user(self) -> str:
        """See `rules.RuleFacts`."""
        user = self._request.extra.get("user")
        return user if isinstance(user, str) else ""

    def header(self, name: str) -> str | None:
        """See `rules.RuleFacts`."""
        return self._headers.get(name)

    @property
    def now(self) -> datetime:
        """See `rules.RuleFacts`."""
        return self._around.now()

    @property
    def battery(self) -> float | None:
        """See `rules.RuleFacts`."""
        return self._around.battery()

    @property
    def cap_used(self) -> float:
        """See `rules.RuleFacts`."""
        return self._around.cap_used()

    @property
    def learned_kinds(self) -> tuple[str, ...]:
        """What it is of that which answers are told apart by."""
        return tuple(kind for kind in LEARNED_KINDS if getattr(self, kind))

    @property
    def device_chance(self) -> float | None:
        """See `rules.RuleFacts`."""
        return None if self.tokens is None else self._around.will_do().chance(self.tokens, self.learned_kinds)

    def _said(self) -> Iterator[str]:
        """Yield what the user says lately, the latest first."""
        n_chars = 0
        for text in self._all_said():
            yield text
            n_chars += len(text)
            if n_chars >= MOST_SAID_CHARS:
                return

    def _all_said(self) -> Iterator[str]:
        """Yield all that the user says, the latest first; a raw prompt is all of it."""
        match self._request.prompt:
            case str() as text:
                yield text
            case Infill(prefix=prefix, suffix=suffix):
                yield f"{prefix}\n{suffix}"
        for message in reversed(self._request.messages):
            if message.get("role") == "user":
                yield text_of(message.get("content"))


@dataclass(frozen=True, slots=True)
class SaidFacts:
    """The facts of a request that is only spoken of, as `disco plan` does. See `rules.RuleFacts`."""

    around: Surroundings
    tokens: int | None = None
    model: str = "disco"
    user: str = ""
    language: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: bool = False
    images: bool = False
    schema: bool = False
    code: bool = False
    thinking: bool = False
    numbers: bool = False

    def header(self, name: str) -> str | None:
        """See `rules.RuleFacts`."""
        return next((value for own, value in self.headers.items() if own.casefold() == name.casefold()), None)

    @property
    def now(self) -> datetime:
        """See `rules.RuleFacts`."""
        return self.around.now()

    @property
    def battery(self) -> float | None:
        """See `rules.RuleFacts`."""
        return self.around.battery()

    @property
    def cap_used(self) -> float:
        """See `rules.RuleFacts`."""
        return self.around.cap_used()

    @property
    def learned_kinds(self) -> tuple[str, ...]:
        """What it is of that which answers are told apart by."""
        return tuple(kind for kind in LEARNED_KINDS if getattr(self, kind))

    @property
    def device_chance(self) -> float | None:
        """See `rules.RuleFacts`."""
        return None if self.tokens is None else self.around.will_do().chance(self.tokens, self.learned_kinds)


KINDS = ("tools", "images", "schema", "code", "thinking")
