"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..types import LayerRange
from . import wire


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model to load, and how: `n_ctx` tokens an answer (0 = as trained), `n_cells` in all (0 = as memory allows).

    `n_threads` are CPU threads, `scheduler` names a token scheduler. `exact`: answers can be continued to the bit.
    After `keep_alive_s` without a request the model is unloaded; 0 = never. The rest is as in `wire.Load`.
    """

    model_path: Path
    n_ctx: int
    n_threads: int
    n_gpu_layers: int | None = 0
    n_cells: int = 0
    scheduler: str = "andes"
    exact: bool = True
    adapters: tuple[wire.AdapterFile, ...] = ()
    n_threads_batch: int = 0
    n_ubatch: int = 0
    flash_attn: bool | None = None
    kv_type: str = "auto"
    repack: bool = True
    speculate: bool = True
    draft_path: str = ""
    chat_template: str = ""
    disk: wire.Disk | None = None
    keep_alive_s: float = 0.0
    layers: LayerRange | None = None
    patience_s: float = 0.0
    max_answers: int = 16
    exit: wire.ExitCalibration | None = None
    codec: str = "f32"
    ranges: tuple[wire.RangeFile, ...] = ()
    keep_home: bool = False

    def load(self, *, repack: bool = True) -> wire.Load:
        """Return the message that loads the model in the engine process; `repack` off goes before the setting."""
        return wire.Load(
            model_path=str(self.model_path),
            n_ctx=self.n_ctx,
            n_threads=self.n_threads,
            n_gpu_layers=self.n_gpu_layers,
            n_cells=self.n_cells,
            scheduler=self.scheduler,
            exact=self.exact,
            adapters=self.adapters,
            n_threads_batch=self.n_threads_batch,
            n_ubatch=self.n_ubatch,
            flash_attn=self.flash_attn,
            kv_type=self.kv_type,
            repack=self.repack and repack,
            speculate=self.speculate,
            draft_path=self.draft_path,
            chat_template=self.chat_template,
            disk=self.disk,
            layers=() if self.layers is None else (self.layers.first, self.layers.last, self.layers.of),
            patience_s=self.patience_s,
            max_answers=self.max_answers,
            exit=self.exit,
            codec=self.codec,
            ranges=self.ranges,
            keep_home=self.keep_home,
        )
