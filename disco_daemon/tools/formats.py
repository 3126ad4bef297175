"""All formats that are known, in the order in which a chat template's is looked for. Pure."""

from __future__ import annotations

from .format import ToolFormat
from .json_calls import Generic, Hermes

GENERIC: ToolFormat = Generic()
FORMATS: tuple[ToolFormat, ...] = (Hermes(),)
BY_NAME = {known.name: known for known in (*FORMATS, GENERIC)}
