"""Describes a model file by its header, and says why llama.cpp could not load it. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..plain import reason_of
from ..system.smallfile import open_regular
from ..types.thought_marks import family_of, marks_in
from .gguf import Header, joined, read_header, shard, shard_names, with_shards
from .vocabulary import has_tokens

# Bytes of a file: the shape is in the first kilobytes; most vocabularies end within 8 MiB, all known ones within 64.
QUICK, *LONGER = (1 << 20, 1 << 23, 1 << 26)
CHAT_TEMPLATE = "tokenizer.chat_template"  # the key of a header
# The other kinds of GGUF, by `general.type`.
_OTHERS = {
    "adapter": "a LoRA adapter: it goes into device.adapters",
    "mmproj": "the part of a model that sees or hears, not a model",
    "imatrix": "an importance matrix, not a model",
}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model in one file or in several parts, of which `path` is the first.

    `n_bytes` is the size of all parts. `n_parameters` is None unless all headers were read. `problem` says why
    llama.cpp could not load it; empty if no problem is known.
    """

    path: Path
    header: Header
    n_bytes: int
    n_parameters: int | None
    problem: str

    @property
    def n_ctx(self) -> int | None:
        """The context length that the model was trained for, tokens."""
        return self.header.number(f"{self.header.architecture}.context_length")


def examine(path: Path, *, quick: bool = False) -> ModelFile:
    """Examine a model file; `quick` reads too little to know its end and its parameters."""
    try:
        header = _header(path, quick=quick)
        parts = [path.with_name(name) for name in shard_names(path.name)]
        sizes = {part: part.stat().st_size for part in parts if part.exists()}
    except OSError as e:
        return ModelFile(path, Header(0, {}), 0, None, f"cannot be read: {e.strerror}")
    except ValueError as e:
        return ModelFile(path, Header(0, {}), _size(path), None, f"cannot be used: {e}")
    problem = _what_else(header) or _parts_problem(path, header, sizes)
    if quick or problem:
        return ModelFile(path, header, sum(sizes.values()), None, problem)
    n_parameters, problem = _weights(header, parts, sizes)
    return ModelFile(path, header, sum(sizes.values()), n_parameters, problem)


def is_model(found: ModelFile) -> bool:
    """Whether the file is a model, or would be if it were intact, and no other kind of GGUF."""
    return not _what_else(found.header)


def whole_header(path: Path) -> Header:
    """Return the header of a model's first file, with the tensors of all its parts. Raises OSError, ValueError."""
    return joined(_header(part, quick=False) for part in with_shards([path]))


def thinks(header: Header) -> bool:
    """Whether the text of the chat template in a complete header shows that the model thinks."""
    source = header.text(CHAT_TEMPLATE)
    return marks_in(source) is not None or "enable_thinking" in source


def thoughts_of(path: Path, header: Header, source: str, tool_format: str | None) -> str | None:
    """Return the family of marks of a model's thoughts, with `source` as its chat template. Raises OSError."""
    with open_regular(path) as f:
        head = f.read(header.spans.get("tokenizer.ggml.tokens", (0, 0))[1])
    return family_of(source, tool_format, lambda marks: has_tokens(head, header, marks))


def _header(path: Path, *, quick: bool) -> Header:
    """Read the header. Raises OSError, or ValueError if it is none."""
    with open_regular(path) as f:
        head = f.read(QUICK)
        header = read_header(head)
        for limit in [] if quick else LONGER:
            if header.whole or len(head) < QUICK:
                break
            head += f.read(limit - len(head))
            header = read_header(head)
    return header


def _what_else(header: Header) -> str:
    """Return the kind of a GGUF that is no model."""
    kind = "mmproj" if header.architecture == "clip" else header.text("general.type")
    return f"is {_OTHERS[kind]}" if kind in _OTHERS else ""


def _parts_problem(path: Path, header: Header, sizes: dict[Path, int]) -> str:
    """Return what is wrong with the parts of a model, or with a header that tells too little."""
    number, count = shard(path.name)
    names = shard_names(path.name)
    if number != 1 or header.number("split.no"):
        return f"is not the first part of its model: name {names[0] if count > 1 else 'that one'}"
    if count == 1 and (header.number("split.count") or 1) > 1:
        return "is one of several parts, and llama.cpp finds the others by a name such as NAME-00001-of-00002.gguf"
    missing = [name for name in names if path.with_name(name) not in sizes]
    if missing:
        return f"lacks {len(missing)} of its {count} parts: {missing[0]} is not beside it"
    return "" if header.architecture else "does not tell its architecture"


def _weights(header: Header, parts: list[Path], sizes: dict[Path, int]) -> tuple[int | None, str]:
    """Return the parameters of all parts, and what is wrong with their weights."""
    n_parameters = 0
    for part in parts:
        try:
            found = header if part is parts[0] or len(parts) == 1 else _header(part, quick=False)
        except (OSError, ValueError) as e:
            return None, f"has a part that is no GGUF file: {part.name}: {reason_of(e)}"
        if not found.whole:
            cut = sizes[part] < LONGER[-1]
            return None, f"{part.name} is cut short" if cut else f"has a header beyond {LONGER[-1] >> 20} MiB"
        if sizes[part] < found.least_bytes:
            return None, f"{part.name} is cut short: {found.least_bytes - sizes[part]} bytes are missing"
        n_parameters += found.n_numbers
    return n_parameters, "" if n_parameters else "holds a vocabulary, and no weights"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
