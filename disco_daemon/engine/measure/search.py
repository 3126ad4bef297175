"""The tune's search: one knob after the other, by medians of interleaved measurements. Pure but for `measure`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from statistics import median

from msgspec.structs import replace

from .tune_messages import Knobs, TuneRow

N_SAMPLES = 3  # of each candidate, in turns, so that what the machine does meanwhile hits all of them
TIE = 0.03  # within this share of the fastest, the more modest one is chosen
DROP = 2.0  # times slower than the best: it is not measured again
LAYOUT_GAIN = 0.1  # by which weights as they are in the file must be faster: the other layout is llama.cpp's own choice
FLASH_GAIN = 0.1  # by which attention must be faster without flash, for it takes memory for all scores
UBATCHES = (512, 256, 128)  # tokens, llama.cpp's own default first

Measure = Callable[[Knobs, str, bool], float]  # (knobs, work, busy) -> s


@dataclass(slots=True)
class Search:
    """A coordinate search over knobs. `measure` does a piece of work and returns how long it took, s.

    Works are `decode` (one token each of one answer, and of eight), `prefill` (a prompt), and `long` (a prompt of
    several micro-batches). `expired` says that the time is up: then undecided knobs stay as they were. With `busy`,
    another process wants a core: with all cores taken, one that is late holds up all others at each of hundreds of
    barriers a token, so the last core is used only if the gain alone outweighs the loss then.
    """

    measure: Measure
    expired: Callable[[], bool]
    samples: dict[tuple[Knobs, str, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    complete: bool = True

    def best(self, start: Knobs, n_cores: int, *, flash: bool, long: bool) -> Knobs:
        """Find the fastest knobs: threads, attention if `flash` may be off, micro-batch if `long` prompts can run."""
        counts = sorted({*thread_counts(n_cores), start.n_threads})
        knobs = self._axis(start, [replace(start, n_threads=n) for n in counts], "decode")
        knobs = self._spare_a_core(knobs, replace(knobs, n_threads=n_cores - 1), "decode", knobs.n_threads == n_cores)
        knobs = self._axis(knobs, [replace(knobs, n_threads_batch=n) for n in counts], "prefill")
        less = replace(knobs, n_threads_batch=n_cores - 1)
        knobs = self._spare_a_core(knobs, less, "prefill", knobs.n_threads_batch == n_cores)
        if flash:
            knobs = self._axis(knobs, [knobs, replace(knobs, flash_attn=False)], "prefill", FLASH_GAIN)
        if long:
            knobs = self._axis(knobs, [replace(knobs, n_ubatch=n) for n in UBATCHES], "long")
        return self._check(start, knobs)

    def layout(self, start: Knobs) -> Knobs:
        """Return `start`, or with `repack` off if reading and writing together are faster with the weights as they are.

        Only one is in memory at a time, so they take turns as wholes: what the machine does meanwhile must not decide,
        and `start` is measured before and behind.
        """
        plain, costs = replace(start, repack=False), []
        for knobs in (start, plain, start):
            found = [self._compare([knobs], work) for work in ("decode", "prefill")]
            if None in found:
                return start
            costs.append(prod(took[knobs] for took in found if took is not None))
        before, there, behind = costs
        return plain if there * (1 + LAYOUT_GAIN) < min(before, behind) else start

    def rows(self) -> list[TuneRow]:
        """Return all measurements."""
        return [TuneRow(k, work, median(s), len(s), busy) for (k, work, busy), s in self.samples.items() if s]

    def _axis(self, current: Knobs, candidates: Sequence[Knobs], work: str, tie: float = TIE) -> Knobs:
        """Return the first candidate that is nearly as fast as the fastest; `current` if the time runs out."""
        if len(candidates) < 2:
            return current
        took = self._compare(candidates, work)
        if took is None:
            return current
        fastest = min(took.values())
        return next(k for k in candidates if took.get(k, inf) <= fastest * (1 + tie))

    def _spare_a_core(self, knobs: Knobs, less: Knobs, work: str, takes_all: bool) -> Knobs:
        """Return `less`, which leaves a core free, unless all cores are better overall, alone and beside others."""
        if not takes_all or min(less.n_threads, less.n_threads_batch) < 1:
            return knobs
        alone = self._compare([knobs, less], work, drop=inf)
        beside = self._compare([knobs, less], work, drop=inf, busy=True)
        if alone is None or beside is None:
            return less
        return knobs if alone[knobs] * beside[knobs] < alone[less] * beside[less] else less

    def _check(self, start: Knobs, knobs: Knobs) -> Knobs:
        """Return `start` if the choice, made knob by knob, is slower on the whole: noise can do that."""
        if knobs == start:
            return start
        decode, prefill = (self._compare([start, knobs], work, drop=inf) for work in ("decode", "prefill"))
        if decode is None or prefill is None:
            return knobs
        cost = {k: decode[k] * prefill[k] for k in (start, knobs)}
        return knobs if cost[knobs] <= cost[start] * (1 + TIE) ** 2 else start

    def _compare(
        self, candidates: Sequence[Knobs], work: str, *, drop: float = DROP, busy: bool = False
    ) -> dict[Knobs, float] | None:
        """Return each median time, s, without those `drop` times slower than the fastest; None if the time ran out."""
        taken: dict[Knobs, list[float]] = {k: [] for k in candidates}
        for _ in range(N_SAMPLES):
            for knobs, samples in taken.items():
                if self.expired():
                    self.complete = False
                    return None
                samples.append(self.measure(knobs, work, busy))
                self.samples[knobs, work, busy].append(samples[-1])
            fastest = min(min(samples) for samples in taken.values())
            taken = {k: samples for k, samples in taken.items() if min(samples) <= drop * fastest}
        return {k: median(samples) for k, samples in taken.items()}


def thread_counts(n_cores: int) -> list[int]:
    """Return numbers of threads worth trying, from few to many: all, or on large machines some."""
    if n_cores <= 8:
        return list(range(1, n_cores + 1))
    doubled = {2**i for i in range(n_cores.bit_length()) if 2**i <= n_cores}
    return sorted(doubled | {n_cores // 2, 3 * n_cores // 4, n_cores - 1, n_cores})
