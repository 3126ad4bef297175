"""The models as Ollama's API shows them: its list, those in memory, and one in detail. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...plain import ANY
from ...types import Side
from ..names import LATEST, ModelNames
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
    """The documents of all models that may be asked for; `files` are this machine's, by the names of several models.

    That of the device of the race is called "".
    """

    def __init__(self, names: ModelNames, files: Mapping[str, DeviceFile]) -> None:
        self._names, self._files = names, files

    def tags(self) -> dict[str, Any]:
        """Return the list of all models; patterns of aliases are no names."""
        return {"models": [self._listed(card) for card in self._cards()]}

    def in_memory(self) -> dict[str, Any]:
        """Return the list of those that the device has in memory, by each of their names."""
        return {"models": [self._loaded(card, file) for card in self._cards() if (file := self._of(card)) is not None]}

    def show(self, name: str) -> dict[str, Any]:
        """Return one model in detail. Raises RequestError."""
        card = self._names.card(name)
        file = self._file_of(card)
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
            "details": self._details(card),
            "model_info": known,
            "capabilities": self._capabilities(card),
            "modified_at": rfc3339(card["created"]),
        }

    def _cards(self) -> list[dict[str, Any]]:
        return [card for card in self._names.cards() if ANY not in card["id"]]

    def _listed(self, card: dict[str, Any]) -> dict[str, Any]:
        file = self._file_of(card)
        name = tagged(card["id"])
        found = {"name": name, "model": name, "modified_at": rfc3339(card["created"])}
        size = {"size": file.n_bytes if file is not None else 0}
        return found | size | {"digest": _digest(card | size), "details": self._details(card)}

    def _loaded(self, card: dict[str, Any], file: DeviceFile) -> dict[str, Any]:
        leaves = NEVER if file.leaves_at is None else rfc3339(file.leaves_at)
        found = {key: value for key, value in self._listed(card).items() if key != "modified_at"}
        context = {"context_length": card["context_length"]} if "context_length" in card else {}
        return found | context | {"expires_at": leaves, "size_vram": round(file.n_bytes * file.on_gpu)}

    def _of(self, card: dict[str, Any]) -> DeviceFile | None:
        file = self._file_of(card)
        return file if file is not None and file.is_loaded else None

    def _file_of(self, card: dict[str, Any]) -> DeviceFile | None:
        found = self._names.find(card["id"])
        return self._files.get(found.local) if Side.DEVICE in found.sides else None

    def _details(self, card: dict[str, Any]) -> dict[str, Any]:
        file = self._file_of(card)
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

    def _capabilities(self, card: dict[str, Any]) -> list[str]:
        """Return Ollama's words for what a model can do.

        Tools and images are there unless they are known not to be: what nothing is known of is tried, and some clients
        offer no model without tools. Nobody here can force a call, so tools that are only for that do not count.
        """
        able, file = card["capabilities"], self._file_of(card)
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
