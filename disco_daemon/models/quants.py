"""Groups the files of a repository into models at one quantization, and chooses one. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import ConfigError
from .gguf import shard, shard_names

DEFAULT = "Q4_K_M"  # as llama.cpp's own `-hf`: saves a good half of the size for a hundredth of the quality
# Bits a weight: tools/quantize/README.md of llama.cpp, measured on Llama 3.1 8B; the others by their blocks.
BITS = {
    "IQ1_S": 2.00, "IQ1_M": 2.15, "TQ1_0": 1.69, "TQ2_0": 2.06, "IQ2_XXS": 2.38, "IQ2_XS": 2.59, "IQ2_S": 2.74,
    "IQ2_M": 2.93, "Q2_K_S": 2.97, "Q2_K": 3.16, "IQ3_XXS": 3.25, "IQ3_XS": 3.50, "Q3_K_S": 3.64, "IQ3_S": 3.66,
    "IQ3_M": 3.76, "Q3_K_M": 4.00, "Q3_K_L": 4.30, "MXFP4": 4.25, "IQ4_XS": 4.46, "Q4_0": 4.66, "Q4_K_S": 4.67,
    "IQ4_NL": 4.68, "Q4_K_M": 4.89, "Q4_1": 5.12, "Q5_0": 5.57, "Q5_K_S": 5.57, "Q5_K_M": 5.70, "Q5_1": 6.02,
    "Q6_K": 6.56, "Q8_0": 8.50, "F16": 16.00, "BF16": 16.00, "F32": 32.00,
}  # fmt: skip
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Za-z0-9]+)*|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?))(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_NO_MODEL = ("mmproj", "imatrix")  # in the names of files beside models
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(
    rf"({_REPO.pattern})/(?:resolve|blob)/[^/]+/([^?#]+\.gguf)(?:\?download=true)?"
)  # its page or address
_HUBS = ("https://huggingface.co/", "http://huggingface.co/", "huggingface.co/", "hf.co/")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file to fetch; `digest` is its SHA-256, or its git SHA-1 if git itself keeps it.

    Where that is empty, since nobody has told it, `version` is a name of this version of the file in hex.
    """

    path: str
    n_bytes: int
    digest: str
    version: str = ""

    @property
    def name(self) -> str:
        """The name without folders."""
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class Pin:
    """What a list says of a file at the Hub: the commit and the SHA-256, each empty where it says nothing."""

    revision: str = ""
    sha256: str = ""


NO_PIN = Pin()


@dataclass(frozen=True, slots=True)
class Variant:
    """One model at one quantization: `label` is empty if the name does not tell it; `files` are in order."""

    label: str
    files: tuple[RemoteFile, ...]

    @property
    def name(self) -> str:
        """The name of its first file."""
        return self.files[0].name

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(file.n_bytes for file in self.files)

    def __str__(self) -> str:
        return f"{self.label or self.name} ({self.n_bytes / 1e9:.2f} GB)"


def is_at_hub(url: str) -> bool:
    """Whether an address is one of the Hub's."""
    return url.startswith(_HUBS)


def parse(spec: str) -> tuple[str, str | None]:
    """Split `USER/REPO[:QUANT]`, or the URL of a file at the Hub, into repository and quantization or file.

    Raises ConfigError.
    """
    text = spec.strip()
    for hub in _HUBS:
        text = text.removeprefix(hub)
    if found := _FILE.fullmatch(text):
        return found[1], found[2]
    repo, colon, wanted = text.partition(":")
    if not _REPO.fullmatch(repo) or (colon and not wanted):
        msg = f"{spec!r} is no USER/REPO or USER/REPO:QUANT, as in bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
        raise ConfigError(msg)
    return repo, wanted or None


def label(path: str) -> str:
    """Return the quantization by the name of the file, else of a folder above; empty if none tells."""
    parts = PurePosixPath(path).parts
    for part in reversed(parts):
        if found := _LABEL.findall(part.removesuffix(".gguf")):
            return str(found[-1]).upper().replace("FP", "F").replace("MXF4", "MXFP4")
    return ""


def bits(name: str) -> float:
    """Return the approximate bits a weight; infinite if unknown."""
    name = name.upper().removeprefix("UD-")
    if name in BITS:
        return BITS[name]
    stem = name.rpartition("_")[0]
    for beginning in (name, stem) if stem else (name,):
        if alike := [known for known in BITS if beginning.startswith(known) or known.startswith(f"{beginning}_")]:
            return max(BITS[known] for known in alike)
    digit = re.match(r"I?Q(\d)", name)
    return int(digit[1]) + 0.5 if digit else math.inf


def variants(files: Iterable[RemoteFile]) -> list[Variant]:
    """Return the models of a repository, smallest first, without those that lack a part."""
    there = {file.path: file for file in files if _is_model(file.path)}
    found = []
    for path in there:
        if shard(PurePosixPath(path).name)[0] != 1:
            continue
        parts = [there.get(str(PurePosixPath(path).with_name(name))) for name in shard_names(PurePosixPath(path).name)]
        whole = tuple(part for part in parts if part is not None)
        if len(whole) == len(parts):
            found.append(Variant(label(path), whole))
    return sorted(found, key=lambda variant: variant.n_bytes)


def choose(repo: str, found: Sequence[Variant], wanted: str | None) -> Variant:
    """Return the wanted model; by default DEFAULT, or the next smaller. Raises ConfigError with the choices."""
    if not found:
        raise ConfigError(f"{repo} has no GGUF model: look for another repository, they are mostly called …-GGUF")
    if wanted is not None:
        return _only(repo, [v for v in found if _is_meant(wanted, v)], f"there is no {wanted} in {repo}", found)
    if usual := [v for v in found if v.label == DEFAULT]:
        return _only(repo, usual, "", found)
    smaller = [v for v in found if bits(v.label) < BITS[DEFAULT]]
    nearest = max(map(_bits, smaller)) if smaller else min(map(_bits, found))
    taken = [v for v in found if _bits(v) == nearest]
    return _only(repo, [v for v in taken if v.label == taken[0].label], "", found)


def _bits(variant: Variant) -> float:
    return bits(variant.label)


def _is_model(path: str) -> bool:
    name = PurePosixPath(path).name.casefold()
    return name.endswith(".gguf") and not any(word in name for word in _NO_MODEL)


def _is_meant(wanted: str, variant: Variant) -> bool:
    asked = wanted.casefold().removesuffix(".gguf")
    names = {file.casefold().removesuffix(".gguf") for file in (variant.name, variant.files[0].path)}
    return asked == variant.label.casefold() or asked in names


def _only(repo: str, meant: Sequence[Variant], none: str, found: Sequence[Variant]) -> Variant:
    if len(meant) == 1:
        return meant[0]
    if not meant:
        msg = f"{none}: there are {', '.join(map(str, found))}"
    else:
        msg = f"{repo} has several such models: name one as {repo}:FILE, of {', '.join(v.name for v in meant)}"
    raise ConfigError(msg)
