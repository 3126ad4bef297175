"""How much memory is free, and what fits: known before llama.cpp asks for it, and is killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...models.gguf import shard_names
from ...models.kept_numbers import KeptNumbers
from ...system import control_groups

N_SEQS = 64  # sequences in one context: answers, and cached prefixes
N_SPARE_SEQS = 2  # of a context beside them: for forgotten cells, and for cells that are being moved
N_BATCH = 512  # tokens per llama_decode; llama.cpp's own default micro-batch
CACHE_SHARE = 0.25  # of the free memory, for more than one answer's KV cache
OPEN_SHARE = 0.5  # of what weights leave free, for the KV cache where device.n_ctx is not set; others want some, too
OPEN_STEP = 256  # tokens; such a context is a multiple
FIRST_CTX = 4096  # tokens that layers on a GPU leave room for where device.n_ctx is not set; more context comes next
FACTOR = 2  # answers of full length in the KV cache, if there is memory
STATES_SHARE = 1 / 16  # of the free memory, for recurrent states: llama.cpp makes one for each sequence at once
WINDOW_SHARE = 1 / 4  # of what all other cells take, for the windows of more than LEAST_SEQS running answers
MOST_WINDOW_SHARE = 1 / 2  # with more, all layers have all cells: then texts are shared and cut without copies
COPIES_SHARE = 0.1  # of the free memory, for texts and states that are put away, and as much again for cached prefixes
COPIES = 2  # of a window, at least: of a chat's last answer, and of its prompt that is read now
LEAST_SEQS = 4  # answers and cached texts, however large their states
SNAPSHOTS = (7, 3)  # of each state, for as many guessed tokens, where SNAPSHOT_SEQS sequences have room all the same
SNAPSHOT_SEQS = 8  # answers and cached texts beside which snapshots are kept
LEAST_WINDOW = 16  # tokens; with fewer a batch would not fit beside the windows of as many sequences as there can be
WINDOW_STEP = 256  # cells; llama.cpp makes a multiple of them
LEAST_CTX = 512  # tokens; an answer with less is of no use
TEXT_ROWS = 128  # tokens of a text in one llama_decode; larger ones are hardly faster, and answers wait for them
LEAST_TEXT = 128  # tokens; a model that cannot read so many is of no use
SPARE = 0.9  # of the free memory; something else may want some
GPU_SPARE = 0.9  # of the GPU's free memory; the screen and other programs take some, and buffers are rounded up
GPU_SLACK = 2**29  # bytes beside that on a GPU that is filled on purpose: a browser on its screen takes as much later
WORK_PER_ROW = 40  # numbers per row and embedding dimension in llama.cpp's work buffers, roughly
GIB = 2**30
F16, Q8_0 = "f16", "q8_0"
# Bytes a number takes in the KV cache. Q8_0 keeps 32 numbers of a byte each with a scale of two bytes.
KV_BYTES = {"auto": 2.0, F16: 2.0, Q8_0: 34 / 32}
KV_BLOCK = 32  # numbers; a head of another length cannot be kept as Q8_0


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of a context: `per_token` of the KV cache, and `work` in all, bytes."""

    per_token: int
    work: int


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What a model keeps of texts, bytes: a `cell` of each token, and a `state` of each sequence.

    Layers with a window of `window` tokens have a `window_cell` of each token beside that, or of those in it.
    `goes_back`: whether llama.cpp can keep snapshots of a state.
    """

    cell: int
    window: int = 0
    window_cell: int = 0
    state: int = 0
    goes_back: bool = False


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """The tokens of an answer, cells and sequences of a context, and what is kept in it, bytes.

    `windowed`: whether layers with a window have cells for that alone. `n_snapshots`: of each sequence's state.
    """

    n_ctx: int
    n_cells: int
    n_bytes: int
    n_seqs: int = N_SEQS
    windowed: bool = False
    n_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model of `n_layers` layers: `n_bytes` of weights in all, and `kv_bytes` of KV cache.

    `experts` are the bytes of experts in each layer, () where a model has none; without those all are of a size.
    """

    n_bytes: int
    n_layers: int
    kv_bytes: int
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """How many layers are on the GPU, the last ones (-1 = all), and from how many, the first ones, experts are not.

    Those stay with the processor. Of `n_moe` layers they could. All of it is on the GPU of number `main_gpu`, or spread
    over all GPUs (-1).
    """

    n_gpu_layers: int
    n_cpu_moe: int = 0
    n_moe: int = 0
    main_gpu: int = -1

    def smaller(self, n_gpu_layers: int | None, n_cpu_moe: int | None) -> GpuPlacement | None:
        """Return one that takes less of the GPU, if this did not fit; None where settings leave nothing else to try.

        A number in the settings is meant. All experts go before any layer does. What did not fit on one GPU is tried on
        all of them first.
        """
        if self.main_gpu >= 0:
            return replace(self, main_gpu=-1)
        if n_cpu_moe is None and self.n_gpu_layers and 0 <= self.n_cpu_moe < self.n_moe:
            return replace(self, n_cpu_moe=self.n_moe)
        if n_gpu_layers is not None or not self.n_gpu_layers:
            return None
        n = self.n_gpu_layers // 2
        return replace(self, n_gpu_layers=n, n_cpu_moe=self.n_cpu_moe if n else 0)


def kept_of(numbers: KeptNumbers, kv_type: str) -> KeptBytes:
    """Return in bytes what is kept."""
    per_token, in_window = (int(n * KV_BYTES[kv_type]) for n in (numbers.per_token, numbers.in_window))
    return KeptBytes(max(1, per_token), numbers.window, in_window, numbers.state_bytes)


def work_bytes(n_rows: int, n_vocab: int, n_embd: int) -> int:
    """Estimate the memory for computing `n_rows` rows at once: logits and intermediate results."""
    return 4 * n_rows * (n_vocab + WORK_PER_ROW * n_embd)


@dataclass(frozen=True, slots=True)
class TextNeed:
    """The shape of a model that makes vectors of texts: what a token leaves in its context, bytes, and its logits.

    An encoder `reads_whole` texts, leaves nothing, and has no logits. The scores of `n_heads` take memory, each of a
    token with another: 0 with flash attention.
    """

    n_embd: int
    n_vocab: int
    kept: int
    reads_whole: bool
    n_heads: int = 0

    def n_bytes(self, n_ctx: int) -> int:
        """Estimate the memory of a context for texts of `n_ctx` tokens."""
        n_rows = n_ctx if self.reads_whole else min(n_ctx, TEXT_ROWS)
        n_vocab = 0 if self.reads_whole else self.n_vocab
        return work_bytes(n_rows, n_vocab, self.n_embd) + n_ctx * (self.kept + 4 * n_rows * self.n_heads)

    def n_ctx(self, wanted: int, free: int) -> int:
        """Return the tokens that a text may have: `wanted`, or as many of them as fit. Raises MemoryError."""
        n_ctx = wanted
        while self.n_bytes(n_ctx) > SPARE * free and n_ctx // 2 >= LEAST_TEXT:
            n_ctx //= 2
        require(f"texts of {n_ctx} tokens", self.n_bytes(n_ctx), free)
        return n_ctx


def gpu_layers(model: Footprint, work: int, free: int, n_cpu_moe: int = 0) -> int:
    """Count how many layers fit `free` bytes of GPU memory beside `work` bytes; n_layers + 1 is all of the model.

    The last one makes logits. Token embeddings stay in main memory, so the file's size is a little too much. Experts of
    the first `n_cpu_moe` layers do, too; those of one layer are copied to the GPU for a long prompt.
    """
    experts = model.experts or (0,) * model.n_layers
    room = GPU_SPARE * free - work - max(experts[:n_cpu_moe], default=0)
    others = model.n_bytes - sum(experts) + model.kv_bytes
    kept = [0 if i < n_cpu_moe else n_bytes for i, n_bytes in enumerate(experts)]
    if others + sum(kept) <= room:
        return model.n_layers + 1
    taken = itertools.accumulate(others / model.n_layers + n_bytes for n_bytes in reversed(kept))
    return sum(n_bytes <= room for n_bytes in taken)


def placement(
    model: Footprint, work: int, free: int, n_gpu_layers: int | None = None, n_cpu_moe: int | None = None
) -> GpuPlacement:
    """Decide what goes on a GPU with `free` bytes, beside `work` bytes, where settings leave it open (None).

    A token needs few of the experts, and all of the rest: so all layers go there, and as few experts as that asks for
    stay with the processor; layers stay only where there is no room for them without any experts. -1 means all.
    """
    n_moe = len(model.experts)
    if not n_moe:
        n_cpu_moe = 0
    elif n_cpu_moe is not None:
        n_cpu_moe = n_moe if n_cpu_moe < 0 else min(n_moe, n_cpu_moe)
    if n_cpu_moe is None:
        wanted = model.n_layers + 1 if n_gpu_layers is None or n_gpu_layers < 0 else n_gpu_layers
        enough = (n for n in range(n_moe) if gpu_layers(model, work, free, n) >= wanted)
        n_cpu_moe = next(enough, n_moe)
    n = gpu_layers(model, work, free, n_cpu_moe) if n_gpu_layers is None else n_gpu_layers
    return GpuPlacement(n, n_cpu_moe if n else 0, n_moe)


def one_gpu(model: Footprint, work: int, free: Sequence[int], placed: GpuPlacement) -> int:
    """Return the number of the GPU that holds all of one of several placed models; -1 for none.

    Of those where GPU_SLACK stays free it is the one with least `free`, so that other models find the others free; else
    the one with most. On one GPU nothing crosses from one to another at each token. A model that does not go whole on
    the GPUs is spread over all, as it is where there is one GPU.
    """
    n = placed.n_gpu_layers
    if len(free) < 2 or 0 <= n <= model.n_layers:
        return -1

    def holding(slack: int) -> list[int]:
        return [
            i for i, has in enumerate(free) if gpu_layers(model, work, has - slack, placed.n_cpu_moe) > model.n_layers
        ]

    if easily := holding(GPU_SLACK):
        return min(easily, key=lambda i: (free[i], i))
    return max(holding(0), key=lambda i: (free[i], -i), default=-1)


def weights_there(model: Footprint, placed: GpuPlacement) -> int:
    """Return the bytes of weights that are on the GPU."""
    n = model.n_layers if placed.n_gpu_layers < 0 else min(model.n_layers, placed.n_gpu_layers)
    others = (model.n_bytes - sum(model.experts)) * n // model.n_layers
    return others + sum(model.experts[max(model.n_layers - n, placed.n_cpu_moe) :])


def available_bytes() -> int:
    """Return the memory available without swapping: the machine's, or what control groups leave if that is less."""
    return control_groups.memory()[1]


def model_bytes(path: str) -> int:
    """Return the size of a model on disk, and about that in memory: of all its parts, of which `path` is the first.

    Raises OSError if one is missing.
    """
    first = Path(path)
    return sum(first.with_name(name).stat().st_size for name in shard_names(first.name))


def too_large(model_bytes: int, available: int) -> str | None:
    """Explain why the model cannot be loaded; None if it can."""
    if model_bytes <= available:
        return None
    return (
        f"the model needs {model_bytes / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are free: "
        "close other programs, or choose a smaller model or quantisation (device.model)"
    )


def fitting(n_ctx: int, n_cells: int, need: Need, available: int) -> tuple[int, int]:
    """Return the tokens of an answer, and of the KV cache: `n_ctx` and `n_cells` (0: as many as are sensible), or less.

    Raises MemoryError if not even LEAST_CTX tokens (or `n_ctx`, if that is less) fit.
    """
    room = int((SPARE * available - need.work) // need.per_token)
    least = min(n_ctx, LEAST_CTX)
    if room < least:
        msg = (
            f"a context of {least} tokens needs {(need.work + least * need.per_token) / GIB:.2f} GiB of memory, and "
            f"{available / GIB:.2f} GiB are free: close other programs, or choose a smaller model (device.model)"
        )
        raise MemoryError(msg)
    spacious = int(CACHE_SHARE * available // need.per_token)
    wanted = n_cells or max(n_ctx, min(FACTOR * n_ctx, spacious))
    fit = min(max(wanted, n_ctx), room)
    return min(n_ctx, fit), fit


def kv_type_for(fits: Callable[[str], bool]) -> str:
    """Return how the KV cache keeps a number, where that is open: 16 bits, or q8_0 where only so all fits.

    `fits` says of a type whether `fitting` gives the whole context.
    """
    return Q8_0 if not fits(F16) and fits(Q8_0) else F16


def open_context(trained: int, n_cells: int, need: Need, free: int) -> int:
    """Return the tokens of an answer where nobody has set them: as many as fit, up to those the model was trained for.

    They take OPEN_SHARE of the `free` bytes, which the weights are not in, at most; and `n_cells`, if that is set.
    """
    room = int(OPEN_SHARE * max(0, free - need.work) // need.per_token) // OPEN_STEP * OPEN_STEP
    return min(trained, n_cells or trained, max(LEAST_CTX, room))


def open_cells(n_ctx: int) -> int:
    """Return the tokens of the KV cache where nobody has set a context of `n_ctx` tokens, nor them.

    They hold one answer of that length, or FACTOR of FIRST_CTX: to hold FACTOR of a long context, llama.cpp would clear
    twice the memory at each start, for a model that hardly ever gets two such texts at once.
    """
    return max(n_ctx, FACTOR * min(n_ctx, FIRST_CTX))


def sequences_fitting(most: int, state_bytes: int, available: int) -> int:
    """Return how many sequences a context is made for that has a state of so many bytes for each: at most `most`."""
    return max(LEAST_SEQS, min(most, int(STATES_SHARE * available // state_bytes)))


def snapshots_fitting(state_bytes: int, available: int) -> int:
    """Return how many snapshots of each state of so many bytes a context has."""
    fit = (n for n in SNAPSHOTS if sequences_fitting(SNAPSHOT_SEQS, (1 + n) * state_bytes, available) == SNAPSHOT_SEQS)
    return next(fit, 0)


def window_sizes(window: int, n_seqs: int, n_ubatch: int) -> tuple[int, int]:
    """Return for how many sequences a context is made whose windows have cells of their own, and how many these are.

    llama.cpp makes as many as in llama-kv-cache-iswa.cpp; a batch fits beside the windows of `n_seqs` sequences.
    """
    n_max = n_seqs + N_SPARE_SEQS + -(-(N_BATCH - n_ubatch) // window)
    return n_max, -(-(window * n_max + n_ubatch) // WINDOW_STEP) * WINDOW_STEP


def context_sizes(
    kept: KeptBytes, fit: Callable[[int, int], tuple[int, int]], available: int, n_ubatch: int = N_BATCH
) -> ContextSizes:
    """Return the sizes of a context in which this is kept, in so many bytes of memory.

    `fit` returns the tokens of an answer, and the cells, by the bytes of a cell, and those that are taken in any case.
    Windows have cells of their own where that is much less, and COPIES of one fit beside them. Then there are as many
    sequences as have their windows in WINDOW_SHARE.
    """

    def sized(n_seqs: int, cell: int, fixed: int, *, windowed: bool = False) -> ContextSizes:
        n_ctx, n_cells = fit(cell, fixed)
        return ContextSizes(n_ctx, n_cells, n_cells * cell + fixed, n_seqs, windowed)

    def apart(n_seqs: int) -> ContextSizes:
        n_bytes = window_sizes(kept.window, n_seqs, n_ubatch)[1] * kept.window_cell
        return sized(n_seqs, kept.cell, n_bytes, windowed=True)

    if kept.state:
        n = snapshots_fitting(kept.state, available) if kept.goes_back else 0
        state = (1 + n) * kept.state
        n_seqs = sequences_fitting(N_SEQS, state, available)
        return replace(sized(n_seqs, kept.cell, (n_seqs + N_SPARE_SEQS) * state), n_snapshots=n)
    copies = COPIES * kept.window * kept.window_cell
    if kept.window >= LEAST_WINDOW and copies <= COPIES_SHARE * available:
        n_cells = apart(LEAST_SEQS).n_cells
        if window_sizes(kept.window, LEAST_SEQS, n_ubatch)[1] <= MOST_WINDOW_SHARE * n_cells:
            n_seqs = sequences_fitting(N_SEQS, kept.window * kept.window_cell, available)
            room = n_cells * min(MOST_WINDOW_SHARE, WINDOW_SHARE * kept.cell / kept.window_cell)
            while n_seqs > LEAST_SEQS and window_sizes(kept.window, n_seqs, n_ubatch)[1] > room:
                n_seqs -= 1
            return apart(n_seqs)
    return sized(N_SEQS, kept.cell + kept.window_cell, 0)


def kept_bytes(kept: KeptBytes, n_ctx: int, n_cells: int, available: int) -> int:
    """Return what a context takes in which an answer may have `n_ctx` tokens, with `n_cells` (0: FACTOR times that)."""
    return context_sizes(kept, lambda *_: (n_ctx, max(n_ctx, n_cells or FACTOR * n_ctx)), available).n_bytes


def require(what: str, n_bytes: int, available: int) -> None:
    """Raises MemoryError if there is no room for `what`, which takes `n_bytes`."""
    if n_bytes > SPARE * available:
        msg = (
            f"{what} need {n_bytes / GIB:.2f} GiB of memory, and {available / GIB:.2f} GiB are free: "
            "close other programs, or choose a smaller model (device.model)"
        )
        raise MemoryError(msg)
