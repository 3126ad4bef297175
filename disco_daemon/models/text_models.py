"""Which models make vectors of texts, or rate them, in place of answers; and what families of them were trained with.

Pure but for reading profiles/embeddings.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import msgspec

from ..types import TextFamily, TextKind
from .gguf import Header

RANK = "rank"
# llama.h, `llama_pooling_type`, in a model's header: what of a text's last layer becomes its vector.
POOLING = {1: "mean", 2: "cls", 3: "last", 4: RANK}
# Of these llama.cpp keeps nothing of a text: it is read whole, each token seeing all (src/llama-model.cpp,
# `create_memory`; those that generate by diffusion are left out).
ENCODERS = frozenset({
    "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert",
    "gemma-embedding",
})  # fmt: skip


class _Family(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    source: str
    prefixes: Mapping[str, str] = {}
    least_dimensions: int | None = None
    centred: bool = False


class _Families(msgspec.Struct, frozen=True):
    family: tuple[_Family, ...]


def pooling_of(architecture: str, pooling_type: int | None) -> str:
    """Return how a model pools a text's rows; empty for one that answers."""
    return POOLING.get(pooling_type or 0) or ("mean" if architecture in ENCODERS else "")


def text_kind(header: Header, names: Iterable[str] = ()) -> TextKind | None:
    """Return what a model makes of texts, by the beginning of its header and by other `names`; None if it answers."""
    architecture = header.architecture
    pooling = pooling_of(architecture, header.number(f"{architecture}.pooling_type"))
    if not pooling:
        return None
    own = (header.text("general.name"), header.text("general.basename"))
    return TextKind(pooling, TextFamily() if pooling == RANK else family_of([*own, *names]))


def family_of(names: Iterable[str]) -> TextFamily:
    """Return the family of the first of these names that is known; one without anything for others."""
    for name in names:
        plain = "-".join(name.casefold().replace("_", " ").split())
        known = [(len(part), one) for one in _families() for part in one.names if part in plain]
        if known:
            found = max(known, key=lambda pair: pair[0])[1]
            return TextFamily(found.prefixes, found.least_dimensions, found.centred)
    return TextFamily()


@cache
def _families() -> tuple[_Family, ...]:
    from importlib.resources import files  # the engine asks for the pooling alone, and starts without this

    text = (files("disco_daemon.profiles") / "embeddings.toml").read_text("utf-8")
    return msgspec.toml.decode(text, type=_Families).family
