"""The models as Ollama's API shows them: its list, those in memory, and one in detail. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...plain import ANY
from ..names import LATEST
from .ollama_shape import rfc3339

NEVER = "9999-12-31T23:59:59Z"  # when a model leaves memory that stays in it
UNKNOWN = "disco"  # the architecture of a server's model, which no server tells
MILLION, BILLION = 1e6, 1e9  # parameters


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """The device's model: what its file's header says, and how it is now.

    `n_parameters` is None where the file does not tell, `leaves_at` is Unix time, None if it stays in memory. `on_gpu`
    is the share of its layers that the GPU has.
    """

    architecture: str
    packing: str
    n_bytes: int
    n_parameters: int | None
    thinks: bool
    is_loaded: bool
    leaves_at: float | None
    on_gpu: float


class OllamaModels:
    """The documents of models by their `cards`; `files` are this machine's, by the names of models.

    All that takes long is here and pure, so that the documents of thousands of models can be made beside the loop.
    """

    def __init__(self, cards: Sequence[Mapping[str, Any]], files: Mapping[str, DeviceFile]) -> None:
        self._cards = [card for card in cards if ANY not in card["id"]]  # patterns of aliases are no names
        self._files = files

    def tags(self) -> dict[str, Any]:
        """Return the list of all models."""
        return {"models": [_listed(card, self._files.get(card["id"])) for card in self._cards]}

    def in_memory(self) -> dict[str, Any]:
        """Return the list of those that the device has in memory, by each of their names."""
        found = ((card, self._files.get(card["id"])) for card in self._cards)
        return {"models": [_loaded(card, file) for card, file in found if file is not None and file.is_loaded]}


def shown(card: Mapping[str, Any], file: DeviceFile | None) -> dict[str, Any]:
    """Return one model in detail."""
    architecture = (file and file.architecture) or UNKNOWN
    known: dict[str, Any] = {"general.architecture": architecture, "general.basename": card["id"]}
    if file is not None and file.n_parameters is not None:
        known["general.parameter_count"] = file.n_parameters
    if "context_length" in card:
        known[f"{architecture}.context_length"] = card["context_length"]
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(file),
        "model_info": known,
        "capabilities": _capabilities(card, file),
        "modified_at": rfc3339(card["created"]),
    }


def _listed(card: Mapping[str, Any], file: DeviceFile | None) -> dict[str, Any]:
    name = tagged(card["id"])
    found = {"name": name, "model": name, "modified_at": rfc3339(card["created"])}
    size = {"size": file.n_bytes if file is not None else 0}
    return found | size | {"digest": _digest({**card, **size}), "details": _details(file)}


def _loaded(card: Mapping[str, Any], file: DeviceFile) -> dict[str, Any]:
    leaves = NEVER if file.leaves_at is None else rfc3339(file.leaves_at)
    found = {key: value for key, value in _listed(card, file).items() if key != "modified_at"}
    context = {"context_length": card["context_length"]} if "context_length" in card else {}
    return found | context | {"expires_at": leaves, "size_vram": round(file.n_bytes * file.on_gpu)}


def _details(file: DeviceFile | None) -> dict[str, Any]:
    family = "" if file is None else file.architecture
    n_parameters = None if file is None else file.n_parameters
    return {
        "parent_model": "",
        "format": "" if file is None else "gguf",
        "family": family,
        "families": [] if file is None else [family],
        "parameter_size": "" if n_parameters is None else parameter_size(n_parameters),
        "quantization_level": "" if file is None else file.packing,
    }


def _capabilities(card: Mapping[str, Any], file: DeviceFile | None) -> list[str]:
    """Return Ollama's words for what a model can do.

    Tools and images are there unless they are known not to be: what nothing is known of is tried, and some clients
    offer no model without tools. Nobody here can force a call, so tools that are only for that do not count.
    """
    able = card["capabilities"]
    answers = able.get("chat", True)
    found = {
        "completion": answers,
        "embedding": able.get("embeddings", False),
        "tools": answers and able.get("tools", "native") == "native",
        "vision": answers and able.get("images", True),
        "insert": able.get("fim", False),
        "thinking": file is not None and file.thinks,
    }
    return [word for word, is_there in found.items() if is_there]


def tagged(name: str) -> str:
    """Return a name with a tag, as all names of this API have one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def parameter_size(n: int) -> str:
    """Return a number of parameters in words, as Ollama has it."""
    return f"{n / BILLION:.1f}B" if n >= BILLION else f"{n / MILLION:.2f}M"


def _digest(document: dict[str, Any]) -> str:
    """Return what changes when a model does; clients show its first characters."""
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()
