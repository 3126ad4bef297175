"""The messages of a checkup: a job and its result (`system.job`)."""

from __future__ import annotations

import msgspec


class CheckupRequest(msgspec.Struct, frozen=True):
    """A model's shape, by its header, and the settings for it.

    `n_bytes` is the file's size, `kv_numbers` how many numbers a token leaves in the KV cache, `n_heads` those whose
    scores take memory (0 with flash attention), `experts` the bytes of experts in each layer. Layers that see a
    `window` of tokens have `window_numbers` beside that, and recurrent ones `state_bytes` for each sequence, and
    snapshots of these if it `goes_back`. The rest is as in `wire.Load`, but for `n_ctx`, which is above 0; with
    `is_open` it is what the model was trained for, and as much of that as fits is wanted. `pooling` is that of a model
    that makes vectors of texts, of texts that it `reads_whole` or not.
    """

    n_bytes: int
    n_layers: int
    n_embd: int
    n_vocab: int
    n_heads: int
    kv_numbers: int
    n_ctx: int
    n_cells: int
    kv_type: str = "f16"
    n_gpu_layers: int | None = 0
    is_open: bool = False
    n_cpu_moe: int | None = None
    experts: tuple[int, ...] = ()
    window: int = 0
    window_numbers: int = 0
    state_bytes: int = 0
    goes_back: bool = False
    pooling: str = ""
    reads_whole: bool = False


class CheckupJob(msgspec.Struct, frozen=True):
    """Say what there is of llama.cpp here, and what memory these models would take."""

    models: tuple[CheckupRequest, ...]


class Confined(msgspec.Struct, frozen=True):
    """The confinement of a process that reads model files: measures `in_force`, and those `missing`, with the reason.

    `refused`: whether each forbidden attempt failed: to connect, to read the user's files, to write.
    """

    in_force: list[str]
    missing: dict[str, str]
    refused: dict[str, bool]


class Bindings(msgspec.Struct, frozen=True):
    """llama.cpp as it is built here; `gpu_bytes` are free on the GPUs that it would use, 0 if it uses none.

    `backends` are those that it is built with, by llama.cpp's names: CPU, CUDA, Vulkan … `fault`: what this build
    computes wrong, "" where it is right. `build` is all that llama.cpp says of itself: what differs in it may compute
    otherwise.
    """

    version: str
    features: list[str]
    gpu_bytes: int
    backends: list[str] = []
    fault: str = ""
    build: str = ""


class Fit(msgspec.Struct, tag=True, frozen=True):
    """The memory a model takes of the `available`, in bytes, and the tokens an answer and the KV cache would have.

    `problem` says why it cannot be loaded. `gpu_layers` would be on the GPU, without the experts of the first
    `n_cpu_moe`, and are not in `n_bytes`; `in_all` has them, too. `kv_type` is f16 or q8_0.
    """

    available: int
    n_bytes: int = 0
    n_ctx: int = 0
    n_cells: int = 0
    gpu_layers: int = 0
    problem: str = ""
    in_all: int = 0
    n_cpu_moe: int = 0
    kv_type: str = "f16"


class Examined(msgspec.Struct, tag=True, frozen=True):
    """What was found, of the models in their order; nothing where there is a `problem`, which says why."""

    bindings: Bindings | None = None
    fits: tuple[Fit, ...] = ()
    problem: str = ""
    confined: Confined | None = None

    @property
    def fit(self) -> Fit | None:
        """That of the first model; None if there is none."""
        return self.fits[0] if self.fits else None
