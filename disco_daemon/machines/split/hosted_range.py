"""The upper layers on a partner: which cut its members have, what their model is, and the engine that computes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from ... import __version__
from ...clock import Clock
from ...config.layers import write_private
from ...config.schema import Config
from ...engine import wire
from ...errors import ConfigError
from ...link.protocol import Build
from ...link.relay.handshake import TheCuts
from ...link.trust.roles import Role
from ...models.segment_files import read_head
from ...models.segments import NotCuttableError, cut, n_layers
from ...models.vocabulary import vocabulary_mark
from ...system.control_groups import memory
from ...types import LayerRange
from ..device_settings import knobs_for, model_path, n_cpu_moe, n_gpu_layers, row_s, token_s
from ..trust_store import authority_folder
from .check import checksum, segment_files
from .cut_plan import SPARE, ExitFacts, describe_cuts, kv_bytes_per_layer
from .exit_trainer import ExitTrainer
from .joined_model import shape_of
from .trained_exits import KeptExits, mark_of, told_of, train

log = logging.getLogger("disco.exits")


def make_exit_trainer(config: Config, busy: Callable[[], bool], clock: Clock) -> ExitTrainer | None:
    """Return what trains exits in idle hours; None where that is not asked for."""
    if not (config.partner.enabled and config.partner.train_exits and config.device.enabled) or config.device.base_url:
        return None
    model, cuts = model_path(config.device), HostedCuts()

    def lacking() -> int | None:
        """Return the cut of the machines that have joined, if there is no exit behind it yet."""
        cut = next(iter(cuts.load().values()), None)
        return cut if cut and KeptExits(model).best(cut) is None else None

    return ExitTrainer(lacking, lambda cut: train(config, model, log.debug, cut=cut), busy, clock)


class HostedCuts:
    """The cuts of the machines that have joined, by their names, in a file of `folder`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = authority_folder(Role.SPLIT) if folder is None else folder
        self._path = self.folder / "cuts.json"

    def load(self) -> dict[str, int]:
        """Return the cut of each machine; a damaged file has none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.MsgspecError):
            return {}

    def of_others(self, name: str) -> dict[str, int]:
        """Return the cuts of all machines but this one."""
        return {other: cut for other, cut in self.load().items() if other != name}

    def put(self, name: str, cut: int) -> None:
        """Keep the cut of a machine. Raises OSError."""
        self._save(self.load() | {name: cut})

    def drop(self, name: str) -> None:
        """Forget a machine. Raises OSError."""
        self._save(self.of_others(name))

    def _save(self, cuts: dict[str, int]) -> None:
        """Keep them, whole or not at all. Raises OSError."""
        write_private(self._path, msgspec.json.encode(cuts).decode())


def describe_model(model: Path) -> Build:
    """Return what a member has to know of the model; `llama` is empty until an engine has told it.

    Reads the whole file the first time. Raises ConfigError if the model cannot be read, or not be hosted at all.
    """
    head, header = read_head(model)
    try:
        n = n_layers(header)
        cut(
            head, header, LayerRange(0, n, n)
        )  # for an edge with a small model; whether ranges can be had is found later
    except (NotCuttableError, ValueError) as e:
        raise ConfigError(f"{model.name} cannot be computed for other machines: {e}") from e
    n_embd, n_vocab = shape_of(model)
    return Build(
        disco=__version__, llama="", model=checksum(model), n_layers=n, n_embd=n_embd, n_vocab=n_vocab,
        vocabulary=vocabulary_mark(head, header),
    )  # fmt: skip


def tell_cuts(config: Config, hosted: int = 0) -> TheCuts:
    """Return where the configured model may be cut, by what is known here; `hosted` as in `TheCuts`.

    Raises ConfigError.
    """
    model = model_path(config.device)
    head, header = read_head(model)
    try:
        found = describe_cuts(head, header, exit_facts(KeptExits(model)))
    except NotCuttableError as e:
        raise ConfigError(f"{model.name} cannot be cut into ranges of layers: {e}") from e
    return msgspec.structs.replace(
        found,
        free_bytes=float(memory()[1]),
        n_cells=config.device.n_cells or 2 * config.device.divided_n_ctx,
        kv_bytes=config.partner.memory * 2**30,
        token_s=token_s(config, model) or 0.0,
        row_s=row_s(config, model) or 0.0,
        hosted=hosted,
    )


def exit_facts(kept: KeptExits) -> dict[int, ExitFacts]:
    """Return what a plan has to know of the best exit behind each cut. Raises OSError."""
    best_last = reversed(kept.all())
    return {one.figures.cut: ExitFacts(one.figures.agreement, one.path.stat().st_size) for one in best_last}


def write_ranges(model: Path, layers: LayerRange) -> tuple[Path, Path, str]:
    """Return the files of the layers below a last range, with the best exit that is kept, and of the range itself.

    The third is the exit's mark; it is empty if there is none. Below all layers is the vocabulary. Raises ConfigError.
    """
    if layers.is_first:
        return segment_files().write_vocabulary(model), model, ""
    kept = KeptExits(model)
    best = kept.best(layers.first)
    if best is not None:
        [upper] = segment_files().write(model, [layers])
        return kept.segment(best, layers.of), upper, mark_of(told_of(best))
    lower, upper = segment_files().write(model, [LayerRange(0, layers.first, layers.of), layers])
    return lower, upper, ""


def range_config(config: Config, path: Path, layers: LayerRange | None) -> wire.Load:
    """Return how an engine loads a range in the file `path`; None: a whole small model, which drafts.

    It rounds exactly unless the settings say otherwise: rows of several answers then give the bits of each alone.
    """
    settings, knobs = config.device, knobs_for(config, path)
    exact = settings.rounding != "fast" and settings.flash_attn != "off"
    has_all = layers is None or (layers.is_first and layers.is_last)
    on_gpu = n_gpu_layers(settings) if has_all and not exact else 0  # a range is the CPU's
    return wire.Load(
        model_path=str(path), n_ctx=settings.divided_n_ctx, n_threads=knobs.n_threads, n_gpu_layers=on_gpu,
        n_cpu_moe=n_cpu_moe(settings), n_cells=_n_cells(config, path, layers),
        scheduler=settings.scheduler, exact=exact,
        n_threads_batch=knobs.n_threads_batch, n_ubatch=knobs.n_ubatch, flash_attn=knobs.flash_attn,
        kv_type=settings.divided_kv_type, speculate=settings.speculation == "auto",
        layers=() if layers is None else (layers.first, layers.last, layers.of),
        max_answers=config.partner.max_sessions,
    )  # fmt: skip


def _n_cells(config: Config, path: Path, layers: LayerRange | None) -> int:
    """Return how many tokens the KV cache of a range has; 0 = the engine decides. `partner.memory` is for the last."""
    memory_bytes = config.partner.memory * 2**30
    if layers is None or not layers.is_last or not memory_bytes:
        return config.device.n_cells
    _, header = read_head(path)
    return max(config.device.divided_n_ctx, int(memory_bytes // (kv_bytes_per_layer(header) * layers.n_layers)))


def require_memory(config: Config, model: Path, layers: LayerRange) -> None:
    """Raise ConfigError, with the numbers, if a range and its KV cache do not fit into the free memory."""
    head, header = read_head(model)
    n_cells = _n_cells(config, model, layers) or config.device.divided_n_ctx
    needed = cut(head, header, layers).disk_bytes + n_cells * kv_bytes_per_layer(header) * layers.n_layers
    _, free = memory()
    if needed > free * (1 - SPARE):
        msg = (
            f"layers {layers} of {model.name} take {needed / 1e9:.2f} GB at the partner, with {n_cells} tokens of KV "
            f"cache, and {free / 1e9:.2f} GB are free there, of which {SPARE:.0%} are left for everything else: join "
            f"with a {'' if layers.is_first else 'higher '}--cut, or free some memory"
        )
        raise ConfigError(msg)
