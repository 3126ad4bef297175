"""The messages of a split check, the child process of `disco split check`: a job and its result (`system.job`)."""

from __future__ import annotations

import msgspec


class SplitRange(msgspec.Struct, frozen=True):
    """The file of a range, and its layers from `first` to `last` (exclusive)."""

    path: str
    first: int
    last: int


class SplitJob(msgspec.Struct, frozen=True):
    """The ranges of one cut, in order, to compare with the model `whole` of `n_layers`; the rest as in `wire.Load`.

    The longest text of the comparison has `longest` tokens.
    """

    whole: str
    n_layers: int
    ranges: list[SplitRange]
    longest: int
    n_threads: int
    n_threads_batch: int
    kv_type: str = "auto"
    flash_attn: bool | None = None
    repack: bool = True


class SplitCompared(msgspec.Struct, tag=True, frozen=True):
    """The logits of the chain of ranges beside the whole model's, over `n_rows` rows of `n_tokens` tokens computed.

    `worst` is the largest difference of a logit, `agreement` the share of rows with the same greedy token; both took
    so many seconds. `build` names llama.cpp and the instruction sets: the bits depend on them.
    """

    worst: float
    agreement: float
    n_rows: int
    n_tokens: int
    longest: int
    whole_s: float
    chain_s: float
    build: str

    @property
    def is_equal(self) -> bool:
        """Whether the chain computes what the whole model does, to the bit."""
        return self.worst == 0.0 and self.agreement == 1.0
