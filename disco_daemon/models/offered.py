"""The models that disco offers, as profiles/models.toml lists them, and which suit a machine. Pure but for that.

Speeds on a processor are a roofline of what the machine was measured to do (`roofline`). What a GPU does is not
measured: speeds there are not known, but any that holds a model is faster than a reader.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import ConfigError
from ..system.smallfile import read_text
from . import roofline
from .quants import Pin, bits
from .roofline import MachineSpeed, TokenWork

NAME = "models.toml"
CONTEXT = 8192  # tokens kept for answers and prompts, which the memory that is stated is for
READING_TPS = 4.8  # token/s that a person reads (profiles/readers.toml): a slower model keeps its reader waiting
FLUENT = 3.0  # times as fast as a person reads: then more bits a weight cost nobody time
CAUTIOUS_BYTES = 3e9  # that a token may take where no speed is known: 14 GB/s, two channels of old memory, keep up
CAUTIOUS_GPU_BYTES = 20e9  # likewise on a GPU that holds the model: 96 GB/s, half of what the slowest with 8 GB have
SHOWN = 3  # models that are offered at once
LIGHT = 0.6  # of the bytes of the recommended one: what a lighter one has at most
PROMPT = 100  # tokens, the short prompt whose first token is predicted
LONG_PROMPT = 2000  # tokens
ANSWER = 200  # tokens of the answer to the short prompt, for which energy is told
KEPT_NUMBER = 2  # bytes of a number in a cell
VOCABULARY = 32  # bytes of a header for each word
OTHER_HEAD = 0.06  # bits that the head adds to those of a large model's weights, where `quants.BITS` are from
FEED_FORWARD = 3  # times `hidden`, where the list does not say how long that part's rows are


_Number = Annotated[int, msgspec.Meta(gt=0)]


class OfferedModel(msgspec.Struct, frozen=True, rename={"n_bytes": "bytes"}):
    """A model in one file at the Hugging Face Hub, with what its memory and its speed depend on.

    `parameters` and `active` (of those, the ones that a token uses; 0 = all) are in billions. `thinks`: it writes a
    long thought before its answer. `quality` is a published figure, None where there is none; more is better. Where not
    all layers have cells for each token, `attending` have: others see a `window`, or carry `state_bytes` in all.
    `inner` is the length of the feed-forward part's rows, of all experts together that a token has. Unless the
    embeddings are the output head, it is not `tied`. A token
    has `experts_used` of a layer's experts. `revision` and `sha256` are empty where nobody has told them, and where
    `bytes` are 0 in the list they are reckoned.
    """

    name: str
    title: str
    repo: str
    file: str
    packing: str
    licence: str
    architecture: str
    layers: _Number
    hidden: _Number
    vocab: _Number
    kv_heads: _Number
    head_dim: _Number
    context: _Number
    parameters: Annotated[float, msgspec.Meta(gt=0)]
    n_bytes: int = 0
    active: float = 0.0
    experts_used: int = 0
    heads: int = 0
    inner: int = 0
    tied: bool = True
    tools: bool = False
    thinks: bool = False
    sees: bool = False
    quality: float | None = None
    quality_url: str = ""
    quality_date: str = ""
    attending: int = 0
    window: int = 0
    state_bytes: int = 0
    revision: str = ""
    sha256: str = ""
    date: str = ""
    family: str = ""
    is_reckoned: bool = False

    @property
    def spec(self) -> str:
        """What `hub.pull` fetches."""
        return f"{self.repo}:{self.file}"

    @property
    def pin(self) -> Pin:
        """What a fetched file has to be."""
        return Pin(self.revision, self.sha256)

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
    def abilities(self) -> list[str]:
        """The abilities that a person asks for, in words."""
        found = {"tools": self.tools, "thinks": self.thinks, "sees": self.sees}
        return [name for name, has in found.items() if has]

    @property
    def in_head(self) -> int:
        """The weights of the output head, as many as the embeddings have."""
        return self.vocab * self.hidden

    @property
    def reckoned_bytes(self) -> int:
        """The size of the file, as packings of this kind have it; good to some 5 %."""
        head = roofline.BITS[roofline.head_packing(self.packing, self.hidden)]
        most, _ = roofline.mixture(self.packing, self.hidden)
        body = max(bits(self.packing) - OTHER_HEAD, roofline.BITS[most])
        rest = 1e9 * self.parameters - self.in_head
        return round((rest * body + self.in_head * head) / 8) + VOCABULARY * self.vocab

    @property
    def work(self) -> TokenWork:
        """What a token takes, by the shape; the packing of matrices follows from the size of the file."""
        head, packed = self.in_head, roofline.head_packing(self.packing, self.hidden)
        most, _ = roofline.mixture(self.packing, self.hidden)
        rest = 1e9 * self.parameters - head
        n_bytes = self.n_bytes - VOCABULARY * self.vocab - head * roofline.BITS[packed] / 8
        if not self.tied:  # of the embeddings, a file's other large matrix, a token has one row
            rest, n_bytes = rest - head, n_bytes - head * roofline.BITS[most] / 8
        rest = max(1.0, rest)  # a list may say fewer parameters than its embeddings have
        at_query = (self.heads or self.hidden // self.head_dim) * self.head_dim
        inner = self.inner or FEED_FORWARD * self.hidden
        if roofline.is_odd(self.hidden, self.packing):
            weights = roofline.split_odd(rest, self.layers, self.hidden, inner, at_query, self.packing)
        else:
            weights = roofline.split(rest, max(0.0, n_bytes), self.packing, self.hidden)
        dense, in_experts, used = self._divided(rest, at_query)
        attending = self.attending or self.layers
        in_window = self.layers - attending if self.window else 0
        return TokenWork(
            weights={name: n * dense / rest for name, n in weights.items()},
            head={packed: head},
            layers=self.layers,
            attention=2.0 * at_query * attending,
            kept_bytes=KEPT_NUMBER * self.kv_numbers,
            touched=self.layers * roofline.touched(self.hidden, inner, at_query),
            window=self.window,
            window_attention=2.0 * at_query * in_window,
            window_kept_bytes=KEPT_NUMBER * self.window_numbers,
            head_dim=self.head_dim,
            experts={name: n * used * in_experts / rest for name, n in weights.items()} if in_experts else {},
            used=used,
            weighed=float(self.layers * self.experts_used * self.hidden),
        )

    def _divided(self, rest: float, at_query: int) -> tuple[float, float, float]:
        """Return the weights that each token uses, those in experts, and the share of experts that a token uses.

        What is not attention's, by the shape, is taken for experts'. A token uses its feed-forward part's matrices,
        three of a layer; where the list does not tell its rows, what the active parameters leave.
        """
        if not self.active:
            return rest, 0.0, 1.0
        active = min(rest, max(1.0, 1e9 * self.active - self.in_head))
        in_attention = 2.0 * self.layers * self.hidden * (at_query + self.kv_heads * self.head_dim)
        dense = min(active / 2, in_attention)  # where attention is another one (MLA), the shape says too much
        used = 3.0 * self.layers * self.hidden * self.inner if self.inner else active - dense
        return dense, rest - dense, min(1.0, used / (rest - dense))


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model would take here, bytes, whether it fits, and whether a GPU would hold all its layers."""

    n_bytes: int
    fits: bool
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class PredictedModel:
    """A model on this machine. Speed in token/s, times in s and energy in J are None where nothing was measured."""

    model: OfferedModel
    memory: Memory
    first_s: Mapping[int, float] | None = None
    decode_tps: float | None = None
    j_per_answer: float | None = None
    recommended: bool = False

    def ttft_s(self, n_tokens: int) -> float | None:
        """Return when the first token of an answer to a prompt of PROMPT or LONG_PROMPT tokens comes, s."""
        return None if self.first_s is None else self.first_s[n_tokens]

    def to_json(self) -> dict[str, Any]:
        """Return it as `disco models recommend --json` and the API show it."""
        model, waits = self.model, {str(n): self.ttft_s(n) for n in (PROMPT, LONG_PROMPT)}
        return {
            "id": model.name, "title": model.title, "quant": model.packing, "context": CONTEXT,
            "repo": model.repo, "file": model.file, "bytes": model.n_bytes, "bytes_are_reckoned": model.is_reckoned,
            "revision": model.revision or None, "sha256": model.sha256 or None, "date": model.date or None,
            "licence": model.licence, "memory_bytes": self.memory.n_bytes, "fits": self.memory.fits,
            "quality": model.quality, "quality_source": model.quality_url or None,
            "ttft_s": {n: None if s is None else round(s, 2) for n, s in waits.items()},
            "tps": None if self.decode_tps is None else round(self.decode_tps, 1),
            "j_per_answer": None if self.j_per_answer is None else round(self.j_per_answer, 1),
            "abilities": model.abilities, "recommended": self.recommended,
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
    found, tables = [], tomllib.loads(text)
    sources = tables.get("sources", {})
    for entry in tables["models"]:
        shared = {name: entry[name] for name in ("parameters", "active", "quality") if name in entry}
        shared["family"] = entry.get("names", [""])[0]
        if source := sources.get(entry.get("source")):
            shared |= {"quality_url": source["url"], "quality_date": str(source["as_of"])}
        for file in entry.get("files", ()):
            told = shared | file | ({"date": str(file["date"])} if "date" in file else {})
            model = msgspec.convert(told, OfferedModel)
            if not model.n_bytes:
                model = msgspec.structs.replace(model, n_bytes=model.reckoned_bytes, is_reckoned=True)
            found.append(model)
    return tuple(found)


def find(name: str, models: Iterable[OfferedModel]) -> OfferedModel:
    """Return the model of that short name, in any case. Raises ConfigError that lists them."""
    models = tuple(models)
    for model in models:
        if name.casefold() == model.name.casefold():
            return model
    msg = f"no model of the list is called {name!r}: it has {', '.join(model.name for model in models)}"
    raise ConfigError(msg)


def predict(
    model: OfferedModel, memory: Memory, machine: MachineSpeed | None, watts: float | None = None
) -> PredictedModel:
    """Return what to expect of a model whose memory is known; computing draws `watts`, W."""
    if machine is None:
        return PredictedModel(model, memory)
    work = model.work
    decode_tps = 1 / work.decode_s(machine, PROMPT + ANSWER / 2)
    first_s = {n: work.prompt_s(machine, n) for n in (PROMPT, LONG_PROMPT)}
    joules = None if watts is None else watts * (first_s[PROMPT] + ANSWER / decode_tps)
    return PredictedModel(model, memory, first_s, decode_tps, joules)


def recommend(predictions: Sequence[PredictedModel]) -> list[PredictedModel]:
    """Return up to SHOWN models that fit, the recommended one first; none where none fits.

    It is the best by published quality of those that answer at once and faster than a person reads, even if they are
    slower than predicted by as much as predictions may be off. Beside it stand the best of the lighter ones, and the
    best of the rest, which may be slow; of a model in several packings one.
    """
    fitting = sorted((one for one in predictions if one.memory.fits), key=_quality, reverse=True)
    if not fitting:
        return []
    first = next((one for one in fitting if _keeps_up(one)), None) or min(fitting, key=_weight)
    found = [replace(first, recommended=True)]
    _add(found, (one for one in fitting if _is_lighter(one, first)))
    while len(found) < SHOWN and _add(found, fitting):
        pass
    return found


def _add(found: list[PredictedModel], more: Iterable[PredictedModel]) -> bool:
    """Add the first of a family that is not there; return False where there is none."""
    families = {one.model.family or one.model.name for one in found}
    other = next((one for one in more if (one.model.family or one.model.name) not in families), None)
    if other is not None:
        found.append(other)
    return other is not None


def _is_lighter(one: PredictedModel, first: PredictedModel) -> bool:
    return one.model.n_bytes <= LIGHT * first.model.n_bytes and not one.model.thinks


def _keeps_up(one: PredictedModel) -> bool:
    """Whether text comes faster than it is read, or very likely does, and not behind a thought."""
    if one.decode_tps is None:
        most = CAUTIOUS_GPU_BYTES if one.memory.on_gpu else CAUTIOUS_BYTES
        return not one.model.thinks and one.model.active_bytes <= most
    return not one.model.thinks and one.decode_tps * (1 - roofline.ERROR["decode"]) > READING_TPS


def _quality(one: PredictedModel) -> tuple[float, int]:
    """Order by the published figure; of a model in several packings the larger one counts where even that is fluent."""
    fluent = one.memory.on_gpu or (one.decode_tps or 0.0) >= FLUENT * READING_TPS
    return one.model.quality or 0.0, one.model.n_bytes if fluent else -one.model.n_bytes


def _weight(one: PredictedModel) -> tuple[bool, float]:
    return one.model.thinks, one.model.active_bytes
