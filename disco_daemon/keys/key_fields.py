"""What a key that may ask for some models only, or spend so much, may tell a server beside the model's name. Pure.

Routers take further names in further fields, such as OpenRouter's `models`, to be tried where the first one refuses or
fails. These are held against the key's patterns. A field that disco does not know may name a model in any way (Groq's
`compound_custom` does, OpenRouter's `preset`, and `Model` at a server that reads names in any case), and so may one of
a plugin: these stay here, and the answer names them.

Of a key with a cap of money the most that a request may cost is held before it is sent. A field by which a server takes
another price, or money for more than tokens, cannot be held, nor can speech and video: these are refused. What disco
does not know stays here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..types import FIELDS, Treatment, field_of

_NAME = "model"  # a key with this in it has names of models: `models`, `allowed_models`, `answering_model`
_STAY = frozenset({"plugins"})  # each has options of its own, and more of them come
# The client's own text and schemas, in which `model` is a word like any other; a server asks nobody by it.
CONTENT = frozenset(
    {
        "functions", "response_format", "json_schema", "guided_json", "structured_outputs", "prediction", "documents",
        "metadata", "chat_template_kwargs",
    }
)  # fmt: skip
# By these a server asks for more than tokens, takes another price for them, or asks another model.
_COSTLY = frozenset(
    {
        "audio", "data_sources", "modalities", "models", "n_predict", "plugins", "search_parameters", "service_tier",
        "use_beam_search", "web_search_options",
    }
)  # fmt: skip
_AT_THE_PRICE: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default", "flex", "standard", "standard_only"),
    "search_parameters": ({"mode": "off"},),
}
_HELD_PARTS = ("text", "refusal", "image_url", "input_image", "image", "file", "input_file", "document")
_OWN_TOOLS = {"function": "function", "custom": "custom"}  # the type of a tool, and where it has the client's own text


def kept(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that such a key may send to a server; the others stay here."""
    return {name: value for name, value in extra.items() if name not in _STAY and (name in FIELDS or _is_form(name))}


def unheld(extra: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the field of a request whose cost cannot be held; "" where there is none."""
    for name, value in extra.items():
        if name in _COSTLY and FIELDS[name].asks(value) and value not in (*_AT_THE_PRICE.get(name, ()), []):
            return name
        if name == "tools" and isinstance(value, list) and any(_is_servers_own(tool) for tool in value):
            return name
    parts = (part for message in messages for part in _list(message.get("content")) if isinstance(part, Mapping))
    return "messages" if any(part.get("type", "text") not in _HELD_PARTS for part in parts) else ""


def _is_servers_own(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "function") not in _OWN_TOOLS


def _list(found: Any) -> Sequence[Any]:
    return found if isinstance(found, list) else ()


def models_named(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of models that the fields which disco knows have in them."""
    for name, value in extra.items():
        if name == "tools" and isinstance(value, list):
            for tool in value:
                yield from _within(_without_text(tool))
        elif name not in CONTENT and not _is_form(name):
            yield from _within({name: value})


def _is_form(name: str) -> bool:
    """Whether a field, which disco need not know, has a form that the answer is to keep."""
    return field_of(name).device is Treatment.FORM


def _without_text(tool: Any) -> Any:
    """Return a tool without what the client itself has written in it."""
    if not isinstance(tool, Mapping):
        return tool
    kind = tool.get("type", "function")
    text = _OWN_TOOLS.get(kind) if isinstance(kind, str) else None
    return {key: value for key, value in tool.items() if key != text}


def _within(found: Any) -> Iterator[str]:
    """Yield each text below a key that says that it names a model, and such a key's own keys."""
    left: list[tuple[Any, bool]] = [(found, False)]
    while left:
        value, is_name = left.pop()
        if isinstance(value, str) and is_name:
            yield value
        elif isinstance(value, Mapping):
            if is_name:
                yield from (key for key in value if _NAME not in key.casefold())
            left += [(inner, is_name or _NAME in key.casefold()) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(inner, is_name) for inner in value]
