"""What an endpoint can do beyond an answer in text: each declares it, and a request is held against it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any


class Capability(StrEnum):
    """What a request may ask for beside an answer in text."""

    TOOLS = "tools"
    FORCED_TOOLS = "forced_tools"
    JSON_SCHEMA = "json_schema"
    IMAGES = "images"
    LOGPROBS = "logprobs"
    N = "n"
    FIM = "fim"
    CONTINUATION = "continuation"

    @property
    def words(self) -> str:
        """Its name for a reader."""
        return _WORDS.get(self, self.value)


_WORDS = {
    Capability.FORCED_TOOLS: "forced tools",
    Capability.JSON_SCHEMA: "JSON schemas",
    Capability.N: "several answers to one request",
    Capability.FIM: "fill-in-the-middle",
    Capability.CONTINUATION: "going on with a begun answer",
}


class Tools(StrEnum):
    """How an endpoint calls tools."""

    NATIVE = "native"  # in its model's own format, where the model wants to
    GENERIC = "generic"  # in a format that its model was not made for: calls that are forced only
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one endpoint can do; None: not known, and then it is asked.

    `context_length` tokens has a prompt with its answer at most, `max_output` the answer. `refused` are those that are
    false because the endpoint has just refused a request for them, until it is asked again. Of a model that answers
    nothing `chat` is false: it makes vectors of texts (`embeddings`), or rates them (`rerank`).
    """

    context_length: int | None = None
    max_output: int | None = None
    tools: Tools | None = None
    forced_tools: bool | None = None
    json_schema: bool | None = None
    images: bool | None = None
    logprobs: bool | None = None
    n: bool | None = None
    fim: bool | None = None
    continuation: bool | None = None
    chat: bool | None = None
    embeddings: bool | None = None
    rerank: bool | None = None
    refused: frozenset[Capability] = frozenset()

    @classmethod
    def of(cls, found: Mapping[Any, bool], **more: Any) -> Capabilities:
        """Return what is known by name: whether there is each of these; others are not known."""
        named: dict[str, Any] = {Capability(name).value: is_there for name, is_there in found.items()}
        if Capability.TOOLS in named:
            named["tools"] = Tools.NATIVE if named["tools"] else Tools.NONE
        return cls(**named, **more)

    def has(self, capability: Capability) -> bool | None:
        """Whether it is there; None where that is not known."""
        if capability is Capability.TOOLS:
            return None if self.tools is None else self.tools is Tools.NATIVE
        found: bool | None = getattr(self, capability.value)
        return found

    def over(self, other: Capabilities) -> Capabilities:
        """Return what is known here, and of all else what is known there."""
        known = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        refused = other.refused - {c for c in Capability if self.has(c) is not None}
        return replace(other, **known | {"refused": self.refused | refused})

    def to_json(self) -> dict[str, Any]:
        """Return what can be asked for, as far as it is known, by name."""
        return {name: value for name in (*Capability, *_KINDS) if (value := getattr(self, name)) is not None}


_KINDS = ("chat", "embeddings", "rerank")  # what a model was made for
UNKNOWN = Capabilities()


def together(endpoints: Iterable[Capabilities]) -> Capabilities:
    """Return what can be asked for where any of these endpoints may answer.

    A request goes to one that can take it. So one that can is enough, and all have to be known not to be able to.
    Lengths are the longest, if all are known.
    """
    each = list(endpoints)
    merged: dict[str, Any] = {}
    for name in ("context_length", "max_output"):
        lengths = [getattr(one, name) for one in each]
        merged[name] = max(lengths) if lengths and None not in lengths else None
    for capability in Capability:
        values = [getattr(one, capability.value) for one in each]
        best = next((value for value in (Tools.NATIVE, True, None, Tools.GENERIC) if value in values), None)
        merged[capability.value] = best if best is not None or None in values or not values else values[0]
    for kind in _KINDS:
        known = [getattr(one, kind) for one in each]
        merged[kind] = True if True in known else False if known and None not in known else None
    return Capabilities(**merged)
