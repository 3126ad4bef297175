"""Which capabilities a request asks for, and which of them an endpoint lacks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .capabilities import Capabilities, Capability
from .fields import asked
from .infill import Infill
from .needs import Refusal, forms
from .request import GenerationRequest

_IMAGES = ("image_url", "image", "input_image")  # types of parts of a message: OpenAI's, Anthropic's, Responses'


def wanted(request: GenerationRequest) -> dict[Capability, str]:
    """Return the capabilities that a request asks for, each with the parameter that does.

    A call that is forced asks for no more than that; a schema is one whatever it is called, and an answer that is to be
    any JSON, or one of a few texts, has none.
    """
    schemas = {name.partition(".")[0] for name, form in forms(request.extra) if form.get("type") == "json_schema"}
    found: dict[Capability, str] = {}
    for row in asked(request.extra):
        if row.capability is not None and (row.capability is not Capability.JSON_SCHEMA or row.name in schemas):
            found.setdefault(row.capability, row.name)
    if Capability.FORCED_TOOLS in found:
        found.pop(Capability.TOOLS, None)
    if not request.text_only and any(part.get("type") in _IMAGES for part in _parts(request)):
        found[Capability.IMAGES] = "messages"
    if isinstance(request.prompt, Infill):
        found[Capability.FIM] = "suffix"
    if request.answer_so_far:
        found[Capability.CONTINUATION] = "messages"
    return found


def lacking(name: str, capabilities: Capabilities, request: GenerationRequest) -> Refusal | None:
    """Return why the endpoint of this name is not for a request: the first capability that it lacks; None if none."""
    for capability, param in wanted(request).items():
        if capabilities.has(capability) is False:
            why = f"the {name} does not support {capability.words} ('{param}')"
            if capability in capabilities.refused:
                why += ", as it has said; `disco status` shows when, and `disco config reload` has it asked again"
            return Refusal(why, param)
    return None


def _parts(request: GenerationRequest) -> Iterator[Mapping[str, Any]]:
    for message in request.messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Mapping))
