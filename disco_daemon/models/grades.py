"""How good models are: what profiles/models.toml says by their names, or by their size. Pure but for reading that.

What is known counts in this order: what the user has set, a published figure of the model, the number of its parameters
in the server's catalogue or in the header of its file, that in its name. Fewer than four bits a weight cost: Q2_K of a
13B model has the perplexity of a 7B model, Q3_K loses a third of that on the way (github.com/ggml-org/llama.cpp,
pull request 1684), so they count as fewer parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files

import msgspec

from ..system.net import hostname
from ..types import Grade
from .gguf import Header

PUBLISHED_SPREAD = 5.0  # by how much the figures that different publishers have for one model differ
SIZE_SPREAD = 12.0  # the curve's error over the table, root mean square
KEPT = {1: 0.25, 2: 0.5, 3: 0.8}  # share of the parameters that a model with so many bits a weight counts as
_BITS = re.compile(r"(?:I?Q|TQ)(\d)")
_VENDOR = re.compile(r"^(?:[a-z]+\.)+(?=[a-z])")  # of Amazon's names: us.anthropic.claude-3-5-haiku
_PACKED = re.compile(r"[-.](?:i?q\d|tq\d|b?f16|f32|fp8|fp4|mxfp4|nvfp4|awq|gptq|gguf|latest$).*$")
_SIZE = re.compile(r"(?:^|[-_.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?=$|[-_.])")
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b(?=$|[-_.])")


class PublishedSource(msgspec.Struct, frozen=True):
    """Where figures were read, and when."""

    url: str
    as_of: date


class KnownModel(msgspec.Struct, frozen=True):
    """An entry of the table; `parameters`, and of those the ones that compute for a token, in billions."""

    names: tuple[str, ...] = ()
    parameters: float | None = None
    active: float | None = None
    quality: float | None = None
    source: str = ""


class GradeCurve(msgspec.Struct, frozen=True):
    """A grade by the number of parameters: the file's own comment has the formula."""

    chance: float
    top: float
    middle: float
    slope: float

    def grade(self, parameters: float, active: float | None = None) -> float:
        """Return the grade of a model with that many parameters, in billions; it grows with them."""
        n = math.sqrt(parameters * (active or parameters))
        return self.chance + (self.top - self.chance) / (1 + math.pow(self.middle / n, self.slope))


class ModelTable(msgspec.Struct, frozen=True):
    """The table of models."""

    curve: GradeCurve
    sources: Mapping[str, PublishedSource]
    models: tuple[KnownModel, ...]

    def find(self, name: str) -> KnownModel | None:
        """Return the entry with the longest name that this one begins with."""
        plain = plain_name(name)
        found = [(len(known), model) for model in self.models for known in model.names if _begins(plain, known)]
        return max(found, key=lambda pair: pair[0])[1] if found else None


@cache
def model_table() -> ModelTable:
    """Return the table that ships with the program."""
    text = (files("disco_daemon.profiles") / "models.toml").read_text("utf-8")
    return msgspec.toml.decode(text, type=ModelTable)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parameters of a model: in billions, of those the active ones, and their exact number if that is known."""

    parameters: float
    active: float | None = None
    exact: int | None = None

    def __str__(self) -> str:
        count = f"{1000 * self.parameters:.0f}M" if self.parameters < 1 else f"{self.parameters:.3g}B"
        return f"{count} parameters" + ("" if self.active is None else f", {self.active:.3g}B active")


def chosen_grade(number: float) -> Grade:
    """Return the grade that the user has set."""
    return Grade(number, "set by you", chosen=True)


def grade_of_file(header: Header, names: Iterable[str]) -> Grade:
    """Return the grade of a model file by its header and by the names that it goes by, best first."""
    size, packing = _size_in(header), header.packing
    reason = "" if size is None else f"from its file: {size}" + (f", {packing}" if packing else "")
    basename = f"{header.text('general.basename')}-{header.text('general.size_label')}"
    return _grade([*names, header.text("general.name"), basename], size, reason, packing)


def grade_of_name(name: str, n_parameters: int | None = None) -> Grade:
    """Return the grade of a server's model by its name, and by the parameters that the server's catalogue tells."""
    size = None if n_parameters is None else ModelSize(n_parameters / 1e9, _active_in(name), n_parameters)
    return _grade([name], size, "" if size is None else f"the server's catalogue: {size}", "")


def plain_name(name: str) -> str:
    """Return a model's name as the table has it: no owner, no folder, no ending of a file, one way to write it."""
    last = name.casefold().replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return _VENDOR.sub("", re.sub(r"[\s_:]+", "-", last))


def _grade(names: list[str], size: ModelSize | None, reason: str, packing: str) -> Grade:
    table, model = model_table(), _PACKED.sub("", plain_name(names[0]))
    known = next((entry for name in names if (entry := table.find(name)) is not None), KnownModel())
    quality, spread = known.quality, SIZE_SPREAD
    if size is None and known.parameters is not None:
        size = ModelSize(known.parameters, known.active)
        reason = f"known to have {size}"
    if size is None and (size := next((found for name in names if (found := _size_of(name)) is not None), None)):
        reason = f"from its name: {size}"
    if quality is not None:
        source = table.sources[known.source]
        reason, spread = f"published MMLU-Pro, {hostname(source.url)}, {source.as_of}", PUBLISHED_SPREAD
    elif size is not None:
        quality = table.curve.grade(size.parameters, size.active)
    if quality is None or size is None:
        return Grade(quality, reason or "unknown", spread, model)
    lost, words = _lost_by(packing, size, table.curve)
    return Grade(max(0.0, quality - lost), reason + words, spread, model, size.parameters, size.exact)


def _lost_by(packing: str, size: ModelSize, curve: GradeCurve) -> tuple[float, str]:
    """Return what a packing costs of the grade, and the words for it."""
    bits = int(found[1]) if (found := _BITS.match(packing)) else 4
    if bits not in KEPT:
        return 0.0, ""
    whole = curve.grade(size.parameters, size.active)
    return whole - curve.grade(size.parameters * KEPT[bits], size.active and size.active * KEPT[bits]), (
        f", less for {bits} bit{'s' * (bits > 1)} a weight"
    )


def _begins(name: str, known: str) -> bool:
    """Whether a name is a known one, or goes on with another part; `gpt-5.1` is no `gpt-5`."""
    rest = name[len(known) :]
    return name.startswith(known) and not re.match(r"[a-z0-9]|\.\d", rest)


def _size_in(header: Header) -> ModelSize | None:
    """Return the parameters that a whole header tells, those of experts counted as far as they compute for a token."""
    n = header.n_numbers
    if n == 0:
        return None
    there = header.number(f"{header.architecture}.expert_count")
    used = header.number(f"{header.architecture}.expert_used_count")
    if not there or not used:
        return ModelSize(n / 1e9, None, n)
    experts = sum(tensor.n_numbers for tensor in header.tensors if "_exps." in tensor.name)
    return ModelSize(n / 1e9, (n - experts * (1 - min(1.0, used / there))) / 1e9, n)


def _size_of(name: str) -> ModelSize | None:
    """Return the parameters that a name tells, such as `32b`, `8x7b` or `30b-a3b`."""
    found = _SIZE.search(plain_name(name))
    if found is None:
        return None
    parameters = int(found[1] or 1) * float(found[2]) / (1 if found[3] == "b" else 1000)
    return ModelSize(parameters, _active_in(name)) if parameters > 0 else None


def _active_in(name: str) -> float | None:
    found = _ACTIVE.search(plain_name(name))
    return float(found[1]) if found else None
