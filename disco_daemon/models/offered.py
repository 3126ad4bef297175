"""The models that disco offers, as profiles/models.toml lists them, and which suit a machine. Pure but for that.

Speeds are those of the model that was measured here, scaled: an answer's token reads all active weights once, and a
prompt's token takes two operations for each. Kernels for other packings are faster or slower: they are about right.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..system.smallfile import read_text

NAME = "models.toml"
CONTEXT = 8192  # tokens kept for answers and prompts, which the memory that is stated is for
READING_TPS = 4.8  # token/s that a person reads (profiles/readers.toml): a slower model keeps its reader waiting
CAUTIOUS_BYTES = 3e9  # that a token may take where no speed is known: 14 GB/s, two channels of old memory, keep up
SHOWN = 3  # models that are offered at once
LIGHT = 0.6  # of the bytes of the recommended one: what a lighter one has at most
PROMPT = 100  # tokens, the short prompt whose first token is predicted
LONG_PROMPT = 2000  # tokens


class OfferedModel(msgspec.Struct, frozen=True, rename={"n_bytes": "bytes"}):
    """A model in one file at the Hugging Face Hub, with what its memory and its speed depend on.

    `parameters` and `active` (of those, the ones that a token uses; 0 = all) are in billions. `thinks`: it writes a
    long thought before its answer. `quality` is a published figure, None where there is none; more is better. Where not
    all layers have cells for each token, `attending` have: others see a `window`, or carry `state_bytes` in all.
    """

    name: str
    title: str
    repo: str
    file: str
    packing: str
    n_bytes: int
    licence: str
    architecture: str
    layers: int
    hidden: int
    vocab: int
    kv_heads: int
    head_dim: int
    context: int
    parameters: float
    active: float = 0.0
    thinks: bool = False
    quality: float | None = None
    attending: int = 0
    window: int = 0
    state_bytes: int = 0

    @property
    def kv_numbers(self) -> int:
        """The numbers that each token leaves in layers that see all of them."""
        return 2 * (self.attending or self.layers) * self.kv_heads * self.head_dim

    @property
    def window_numbers(self) -> int:
        """The numbers that a token leaves in layers that see a window."""
        return 2 * (self.layers - self.attending) * self.kv_heads * self.head_dim if self.window else 0

    @property
    def active_bytes(self) -> float:
        """The bytes that are read for a token of an answer."""
        return self.n_bytes * (self.active or self.parameters) / self.parameters

    @property
    def active_parameters(self) -> float:
        """The parameters that compute a token."""
        return 1e9 * (self.active or self.parameters)


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The speed of a model on this machine, token/s, and its bytes and parameters that a token takes."""

    model: str
    n_bytes: float
    n_parameters: float
    prefill_tps: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model would take here, bytes, and whether it fits."""

    n_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class PredictedModel:
    """A model on this machine; speeds in token/s are None where nothing was measured to scale them from."""

    model: OfferedModel
    memory: Memory
    prefill_tps: float | None
    decode_tps: float | None
    recommended: bool = False

    def ttft_s(self, n_tokens: int) -> float | None:
        """Return about when the first token of an answer to a prompt of `n_tokens` tokens comes, s."""
        if self.prefill_tps is None or self.decode_tps is None:
            return None
        return n_tokens / self.prefill_tps + 1 / self.decode_tps

    def to_json(self) -> dict[str, Any]:
        """Return it as `disco models recommend --json` and the API show it."""
        model, waits = self.model, {str(n): self.ttft_s(n) for n in (PROMPT, LONG_PROMPT)}
        return {
            "id": model.name, "title": model.title, "quant": model.packing, "context": CONTEXT,
            "repo": model.repo, "file": model.file, "bytes": model.n_bytes, "licence": model.licence,
            "memory_bytes": self.memory.n_bytes, "fits": self.memory.fits, "quality": model.quality,
            "ttft_s": {n: None if s is None else round(s, 2) for n, s in waits.items()},
            "tps": None if self.decode_tps is None else round(self.decode_tps, 1),
            "abilities": ["thinks"] * model.thinks, "recommended": self.recommended,
        }  # fmt: skip


def offered_models(folder: Path) -> tuple[OfferedModel, ...]:
    """Return the list: that in the user's `models.toml` in a folder, if there is one, then that of the program.

    Of two of a name the user's counts. Blocks on disk. Raises ConfigError for a file of the user's that is no list.
    """
    path = folder / NAME
    try:
        own = parse(read_text(path, "")) if path.exists() else ()
    except (ValueError, KeyError, TypeError, AttributeError) as e:  # a msgspec.ValidationError is a ValueError
        msg = f"{path} is no list of models: {e}"
        raise ConfigError(msg) from e
    return (*own, *(model for model in shipped() if model.name not in {one.name for one in own}))


@cache
def shipped() -> tuple[OfferedModel, ...]:
    """Return the list that ships with the program."""
    return parse((files("disco_daemon.profiles") / NAME).read_text("utf-8"))


def parse(text: str) -> tuple[OfferedModel, ...]:
    """Read a list; entries without files offer nothing. Raises ValueError or msgspec.ValidationError."""
    found = []
    for entry in tomllib.loads(text)["models"]:
        shared = {name: entry[name] for name in ("parameters", "active", "quality") if name in entry}
        found += [msgspec.convert(shared | file, OfferedModel) for file in entry.get("files", ())]
    return tuple(found)


def find(name: str, models: Iterable[OfferedModel]) -> OfferedModel:
    """Return the model of that short name, in any case. Raises ConfigError that lists them."""
    models = tuple(models)
    for model in models:
        if name.casefold() == model.name:
            return model
    msg = f"no model of the list is called {name!r}: it has {', '.join(model.name for model in models)}"
    raise ConfigError(msg)


def predict(model: OfferedModel, memory: Memory, measured: MeasuredSpeed | None) -> PredictedModel:
    """Return what to expect of a model whose memory is known."""
    if measured is None:
        return PredictedModel(model, memory, None, None)
    return PredictedModel(
        model, memory,
        measured.prefill_tps * measured.n_parameters / model.active_parameters,
        measured.decode_tps * measured.n_bytes / model.active_bytes,
    )  # fmt: skip


def recommend(predictions: Sequence[PredictedModel]) -> list[PredictedModel]:
    """Return up to SHOWN models that fit, the recommended one first; none where none fits.

    It is the best by published quality of those that answer at once and faster than a person reads. Beside it stand
    the best of the lighter ones, and the best of the rest, which may be slow.
    """
    fitting = sorted((one for one in predictions if one.memory.fits), key=_quality, reverse=True)
    if not fitting:
        return []
    first = next((one for one in fitting if _keeps_up(one)), None) or min(fitting, key=_weight)
    rest = [one for one in fitting if one is not first]
    lighter = [one for one in rest if one.model.n_bytes <= LIGHT * first.model.n_bytes and not one.model.thinks]
    more = lighter[:1] + [one for one in rest if one not in lighter[:1]]
    return [replace(first, recommended=True), *more[: SHOWN - 1]]


def _keeps_up(one: PredictedModel) -> bool:
    """Whether text comes faster than it is read, or very likely does, and not behind a thought."""
    if one.decode_tps is None:
        return not one.model.thinks and one.model.active_bytes <= CAUTIOUS_BYTES
    return not one.model.thinks and one.decode_tps > READING_TPS


def _quality(one: PredictedModel) -> tuple[float, int]:
    return one.model.quality or 0.0, one.model.n_bytes


def _weight(one: PredictedModel) -> tuple[bool, float]:
    return one.model.thinks, one.model.active_bytes
