"""What `benchmarks.qoe` measures, and the requests that it sends: seeded, the same ones to each server."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.demo import PASSAGE
from disco_daemon.bench.engine_chats import story
from disco_daemon.bench.streamed import Chat
from disco_daemon.system.processors import n_cores

from .figures import ANDES, FCFS, PAPER, PEER
from .simulation import ARRIVALS_CV

SERVERS = (ANDES, PAPER, FCFS, PEER)
# Lengths in tokens: median, standard deviation of the logarithm, least, most. They spread about as those of recorded
# chats do (Azure's conversations: 0.99 and 0.86); the medians are small, since the machine is.
PROMPT: Final = (50.0, 1.1, 30, 256)  # the chat template and the instruction alone are 26 or more
ANSWER: Final = (67.0, 0.9, 8, 320)
FRAME_TOKENS, WORD_TOKENS = 31, 1.25  # of a prompt: template and instruction; each further word. By SmolLM2's tokenizer


@dataclass(frozen=True, slots=True)
class Setup:
    """The measurement: each server at each load (of capacity) with each kind of arrivals.

    `n_requests` of a point; 0: as many as are served in `point_s` s. `capacity_rps` requests/s; 0: measured. Each
    server has a KV cache of `n_cells` tokens for all its answers; `threads` 0: one fewer than the cores, at least 1.
    """

    loads: tuple[float, ...] = (0.8, 1.0, 1.2, 2.0)
    n_requests: int = 0
    arrivals: tuple[str, ...] = ("poisson", "gamma")
    servers: tuple[str, ...] = (ANDES, FCFS, PEER)
    seed: int = 1
    point_s: float = 40.0
    capacity_rps: float = 0.0
    n_cells: int = 1024
    model: Path | None = None
    threads: int = 0

    @property
    def n_threads(self) -> int:
        """CPU threads of each server."""
        return self.threads or max(1, n_cores() - 1)

    @property
    def n_points(self) -> int:
        """Servers x loads x kinds of arrivals."""
        return len(self.servers) * len(self.loads) * len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Request:
    """A question `at_s` s after the begin of a point."""

    at_s: float
    chat: Chat
    max_tokens: int


def workload(setup: Setup, arrivals: str, rate_rps: float, n: int, first: int) -> list[Request]:
    """`n` requests at `rate_rps` whose prompts are numbered from `first` on; seeded.

    Lengths are the same at every rate, and gaps but for their scale. Gaps are scaled to the very rate: with some
    hundred requests and a CV of 3 the load would else be luck. Raises BenchError for arrivals that are not known.
    """
    if arrivals not in ARRIVALS_CV:
        msg = f"no arrivals {arrivals!r}; there are {', '.join(ARRIVALS_CV)}"
        raise BenchError(msg)
    shape = ARRIVALS_CV[arrivals] ** -2  # of the Gamma distribution of the gaps; 1 is exponential
    gaps = np.random.default_rng((setup.seed, 0)).gamma(shape, 1.0, n)
    times = np.cumsum(gaps) * (n / rate_rps / gaps.sum())
    prompts, answers = _lengths(setup.seed, n)
    return [
        Request(at, question(first + i, prompt), answer)
        for i, (at, prompt, answer) in enumerate(zip(times.tolist(), prompts, answers, strict=True))
    ]


def question(i: int, n_tokens: int) -> Chat:
    """A chat that no cache knows, of about `n_tokens` tokens, with a long answer; other words for each i."""
    n_words = max(3, round((n_tokens - FRAME_TOKENS) / WORD_TOKENS))
    words = PASSAGE.split()
    begin = (7 * i) % len(words)
    text = " ".join(itertools.islice(itertools.cycle(words), begin, begin + n_words))
    return [story(i)[0], {"role": "user", "content": f"Write a long story with many details about this: {text}"}]


def _lengths(seed: int, n: int) -> tuple[list[int], list[int]]:
    """Tokens of `n` prompts and answers; more of them begin with the same ones."""
    drawn = []
    for stream, (median, sigma, least, most) in enumerate((PROMPT, ANSWER), start=1):
        random = np.random.default_rng((seed, stream))
        values = np.clip(random.lognormal(math.log(median), sigma, n), least, most)
        drawn.append(np.rint(values).astype(int).tolist())
    return drawn[0], drawn[1]
