"""The messages to and from `checkup`: JSON over its standard input, JSON lines over its output."""

from __future__ import annotations

import msgspec


class CheckupRequest(msgspec.Struct, frozen=True):
    """A model's shape, by its header, and the settings for it.

    `n_bytes` is the file's size, `kv_numbers` how many numbers a token leaves in the KV cache, `n_heads` those whose
    scores take memory (0 with flash attention). The rest is as in `wire.Load`, but for `n_ctx`, which is above 0; with
    `is_open` it is what the model was trained for, and as much of that as fits is wanted.
    """

    n_bytes: int
    n_layers: int
    n_embd: int
    n_vocab: int
    n_heads: int
    kv_numbers: int
    n_ctx: int
    n_cells: int
    kv_type: str = "auto"
    n_gpu_layers: int | None = 0
    is_open: bool = False


class Confined(msgspec.Struct, tag=True, frozen=True):
    """The confinement of a process that reads model files: measures `in_force`, and those `missing`, with the reason.

    `refused`: whether each forbidden attempt failed: to connect, to read the user's files, to write.
    """

    in_force: list[str]
    missing: dict[str, str]
    refused: dict[str, bool]


class Bindings(msgspec.Struct, tag=True, frozen=True):
    """llama.cpp as it is built here; `gpu_bytes` are free on the GPUs that it would use, 0 if it uses none.

    `backends` are those that it is built with, by llama.cpp's names: CPU, CUDA, Vulkan … `fault`: what this build
    computes wrong, "" where it is right.
    """

    version: str
    features: list[str]
    gpu_bytes: int
    backends: list[str] = []
    fault: str = ""


class Fit(msgspec.Struct, tag=True, frozen=True):
    """The memory a model takes of the `available`, in bytes, and the tokens an answer and the KV cache would have.

    `problem` says why it cannot be loaded. `gpu_layers` would be on the GPU, and are not in `n_bytes`; `in_all` has
    them, too.
    """

    available: int
    n_bytes: int = 0
    n_ctx: int = 0
    n_cells: int = 0
    gpu_layers: int = 0
    problem: str = ""
    in_all: int = 0


encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(list[CheckupRequest]).decode
decode_reply = msgspec.json.Decoder(Confined | Bindings | Fit).decode
