"""The memory of models on this machine, as a process of the engine predicts it without loading them."""

from __future__ import annotations

from pathlib import Path

from ..config.schema import DeviceSettings
from ..engine.measure.checkup_messages import CheckupJob, CheckupRequest, Examined
from ..engine.measure.predicted_memory import fit, kv_type_of
from ..errors import DiscoError
from ..models.files import whole_header
from ..models.gguf import Header, read_header, shard_names
from ..models.kept_numbers import GOING_BACK, MOST_LAYERS, kept_numbers
from ..models.model_shape import expert_bytes, shape_of
from ..models.text_models import ENCODERS, pooling_of
from ..plain import reason_of
from ..system.job import run_job
from ..system.smallfile import open_regular
from .device_settings import SHAPE_BYTES, header_of, is_for_gpu, kv_type, n_cpu_moe, n_gpu_layers

CHILD_TIMEOUT_S = 45.0  # importing the bindings takes 0.3 s, from a cold disk or beside a busy machine much more
MOST_MEMORY = 1 << 50  # bytes, where it is asked what a model takes, whether that is there or not
MOST_NUMBERS = 1 << 32  # in the KV cache of one token, and bytes of a state; the largest models have 2 million


class CheckupError(DiscoError):
    """There is no result; the message says why."""


def checkup_request(
    settings: DeviceSettings, path: Path, n_gpu_layers: int | None, header: Header | None = None
) -> CheckupRequest:
    """Return the checkup's request for the model at `path`. Raises OSError, or ValueError for a poor header.

    The beginning of the `header` does where no experts have to be told from the rest.
    """
    header = header or header_of(path) or whole_header(path)  # which says what is wrong with it
    shape = shape_of(header.keys)
    if shape.layers > MOST_LAYERS:
        raise ValueError("its header tells of a shape that no model has")
    trained = header.number(f"{header.architecture}.context_length") or 0
    pooling = pooling_of(header.architecture, header.number(f"{header.architecture}.pooling_type"))
    n_ctx = min(settings.n_ctx or trained, trained) if pooling else settings.n_ctx or trained
    if n_ctx < 1:
        raise ValueError("its header does not tell its context_length")
    kept = kept_numbers(header.keys)
    if max(kept.per_token, kept.in_window, kept.state_bytes) > MOST_NUMBERS:
        raise ValueError("its header tells of a shape that no model has")
    return CheckupRequest(
        n_bytes=sum(path.with_name(name).stat().st_size for name in shard_names(path.name)),
        n_layers=shape.layers,
        n_embd=shape.hidden,
        n_vocab=shape.vocab,
        n_heads=shape.heads if settings.flash_attn == "off" else 0,
        kv_numbers=kept.per_token,
        n_ctx=n_ctx,
        n_cells=settings.n_cells,
        kv_type=kv_type_of(kv_type(settings), shape.head_dim),
        n_gpu_layers=n_gpu_layers,
        is_open=not settings.n_ctx,
        n_cpu_moe=n_cpu_moe(settings),
        experts=expert_bytes(header, shape.layers),
        window=kept.window,
        window_numbers=kept.in_window,
        state_bytes=kept.state_bytes,
        goes_back=header.architecture in GOING_BACK and settings.speculation != "off",
        pooling=pooling,
        reads_whole=header.architecture in ENCODERS,
    )


def predicted_n_ctx(settings: DeviceSettings, path: Path, available: int) -> int | None:
    """Return the tokens that an answer with its prompt will have once the model is loaded, as the engine reckons them.

    `available` bytes of memory are free before. None where it is not known: a GPU's memory counts, too, and only the
    engine's process may ask for it.
    """
    if n_gpu_layers(settings) != 0 and is_for_gpu():
        return None
    try:
        with open_regular(path) as file:
            asked = checkup_request(settings, path, 0, read_header(file.read(SHAPE_BYTES)))
    except (OSError, ValueError):
        return None
    return fit(asked, available, 0).n_ctx or None


def predicted_bytes(settings: DeviceSettings, path: Path) -> int:
    """Return the memory that a model will take with its context, bytes, all of it in main memory; 0 if unknown.

    A header that says nothing of the context leaves the size of the file.
    """
    try:
        asked = checkup_request(settings, path, 0)
    except (OSError, ValueError):
        return path.stat().st_size if path.exists() else 0
    return fit(asked, MOST_MEMORY, 0).n_bytes or asked.n_bytes


async def run_checkup(*about: CheckupRequest) -> Examined:
    """Run `engine.measure.checkup` in a process of its own, for CHILD_TIMEOUT_S at most."""
    job = CheckupJob(about)
    try:
        return await run_job(
            "disco_daemon.engine.measure.checkup", job, lambda _: None, Examined, CheckupError, name="the checkup",
            timeout_s=CHILD_TIMEOUT_S,
        )  # fmt: skip
    except (CheckupError, OSError) as e:
        return Examined(problem=reason_of(e))
