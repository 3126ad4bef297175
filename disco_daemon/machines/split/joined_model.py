"""What this machine has of a partner's model after `disco machines join`: its own layers, and what they belong to."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from ...config.layers import data_path, write_private
from ...errors import ConfigError
from ...link.protocol import Build
from ...models.segment_files import read_head
from ...types import LayerRange


class JoinedModel(msgspec.Struct, frozen=True):
    """The model whose first `cut` of `n_layers` layers are here, in a file of `n_bytes` with the checksum `sha256`.

    At cut 0 that file has the vocabulary only, and a small model of this machine's own drafts.
    `fingerprint` is that of the whole model, which only the partner has; `partner` is the name in its certificate. The
    file came with `bytes_per_s`; 0 = not measured.
    """

    model: str
    fingerprint: str
    n_layers: int
    cut: int
    n_bytes: int
    sha256: str
    partner: str
    bytes_per_s: float = 0.0

    @property
    def layers(self) -> LayerRange | None:
        """The layers on this machine; None if it has none of them."""
        return LayerRange(0, self.cut, self.n_layers) if self.cut else None


class JoinedFolder:
    """The folder of the joined model: its layers and what is known of it. One machine has joined one partner."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = data_path() / "split" if folder is None else folder

    @property
    def _record(self) -> Path:
        return self.folder / "joined.json"

    def segment(self, cut: int) -> Path:
        """Return the path of the layers up to `cut`."""
        return self.folder / f"layers-0-{cut}.gguf"

    def load(self) -> JoinedModel:
        """Return what was joined. Raises ConfigError, with the way to join, if it is not here or not whole."""
        found = self.find()
        if found is None:
            msg = (
                f"split.enabled is set, but the layers of the partner's model are not in {self.folder}: run `disco "
                "machines join` with a code of `disco machines pair`, or `disco machines leave`"
            )
            raise ConfigError(msg)
        return found

    def find(self) -> JoinedModel | None:
        """Return what was joined; None if nothing is here, or if it is not whole."""
        try:
            found = msgspec.json.decode(self._record.read_bytes(), type=JoinedModel)
            return found if self.segment(found.cut).stat().st_size == found.n_bytes else None
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    @property
    def _begun(self) -> Path:
        return self.folder / "pending.json"

    def begin(self, model: Build) -> None:
        """Write down the partner's model, of which the layers are still to come. Raises OSError."""
        write_private(self._begun, msgspec.json.encode(model).decode())

    def pending(self) -> Build | None:
        """Return the model of a join that has not come to its end; None if there is none."""
        try:
            return msgspec.json.decode(self._begun.read_bytes(), type=Build)
        except (OSError, msgspec.MsgspecError):
            return None

    def save(self, joined: JoinedModel) -> None:
        """Write down what was joined, when its file is whole; other layers that are here go. Raises OSError."""
        write_private(self._record, msgspec.json.encode(joined).decode())
        self._begun.unlink(missing_ok=True)
        for path in self.folder.glob("layers-*"):
            if path != self.segment(joined.cut):
                path.unlink(missing_ok=True)

    def remove(self) -> int:
        """Remove all of it; return how many bytes of layers were there."""
        n_bytes = sum(path.stat().st_blocks * 512 for path in self.folder.glob("layers-*"))
        shutil.rmtree(self.folder, ignore_errors=True)
        return n_bytes


def shape_of(segment: Path) -> tuple[int, int]:
    """Return the numbers of a row and of the vocabulary, by the header of any range that has a vocabulary.

    Raises ConfigError.
    """
    _, header = read_head(segment)
    n_embd = header.number(f"{header.architecture}.embedding_length")
    n_vocab = header.number("tokenizer.ggml.tokens.length") or header.number(f"{header.architecture}.vocab_size")
    if not n_embd or not n_vocab:
        raise ConfigError(f"{segment.name} does not say how large its rows and its vocabulary are")
    return n_embd, n_vocab
