"""What a server tells of a model before it is asked anything: its list of models, and llama-server's properties. Pure.

There is no standard for it. These are the names that vLLM, SGLang, llama-server, LM Studio, OpenRouter, Groq, Mistral,
Together and another disco use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..types import Capabilities, Capability

_CONTEXT = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx")
_OUTPUT = ("max_output", "max_output_tokens", "max_completion_tokens")
_LENGTHS = range(1, 1 << 40)  # tokens that may be true
# OpenRouter's names of parameters; that of JSON mode alone says nothing of schemas.
_PARAMETERS = {
    Capability.TOOLS: "tools",
    Capability.FORCED_TOOLS: "tool_choice",
    Capability.LOGPROBS: "logprobs",
}
_FLAGS = {
    "function_calling": Capability.TOOLS,
    "vision": Capability.IMAGES,
}  # Mistral's; its `completion_fim` is for a route of its own, which nobody asks here


def entry_of(body: bytes, model: str) -> Mapping[str, Any] | None:
    """Return what a list of models has of one, or of the only one that there is; None if nothing.

    Raises msgspec.MsgspecError.
    """
    listed = msgspec.json.decode(body)
    entries = listed.get("data") if isinstance(listed, dict) else listed
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    named = next((entry for entry in found if entry.get("id") == model), None)
    return named or (found[0] if len(found) == 1 else None)


def is_llama_server(entry: Mapping[str, Any]) -> bool:
    """Whether the server is llama.cpp's, which has more to tell under /props."""
    return entry.get("owned_by") == "llamacpp"


def of_entry(entry: Mapping[str, Any]) -> Capabilities:
    """Return what a model's entry in the list says."""
    provider, meta, found = _object(entry, "top_provider"), _object(entry, "meta"), dict[str, bool]()
    if isinstance(parameters := entry.get("supported_parameters"), list):
        found = {capability.value: name in parameters for capability, name in _PARAMETERS.items()}
        if "structured_outputs" in parameters:
            found[Capability.JSON_SCHEMA.value] = True
    modalities = _object(entry, "architecture").get("input_modalities")
    if isinstance(modalities, list):
        found[Capability.IMAGES.value] = "image" in modalities
    for name, value in _object(entry, "capabilities").items():
        capability = _FLAGS.get(name) or (Capability(name) if name in set(Capability) else None)
        if capability is not None and isinstance(value, bool | str):
            found[capability.value] = value in (True, "native")
    return Capabilities.of(
        found,
        context_length=_length(_CONTEXT, provider, entry, meta),
        max_output=_length(_OUTPUT, provider, entry),
    )


def n_parameters_of(entry: Mapping[str, Any]) -> int | None:
    """Return the number of the model's parameters, which llama-server tells."""
    found = _object(entry, "meta").get("n_params")
    return found if type(found) is int and found > 0 else None


def of_props(body: bytes) -> Capabilities:
    """Return what llama-server's properties say. Raises msgspec.MsgspecError."""
    props = msgspec.json.decode(body)
    if not isinstance(props, dict):
        return Capabilities()
    vision = _object(props, "modalities").get("vision")
    return Capabilities(
        context_length=_length(_CONTEXT, _object(props, "default_generation_settings"), props),
        images=vision if isinstance(vision, bool) else None,
    )


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _length(names: tuple[str, ...], *places: Mapping[str, Any]) -> int | None:
    """Return the first number of tokens that one of the places has under one of the names."""
    values = (place.get(name) for place in places for name in names)
    return next((value for value in values if type(value) is int and value in _LENGTHS), None)
