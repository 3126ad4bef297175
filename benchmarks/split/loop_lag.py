"""How late the event loops of both daemons are while long prompts go up: nothing in them is to block for 5 ms."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress

from .daemons import BenchDaemon, TwoMachines

N_WORDS = 1750  # of English text: about 2,000 tokens with the embedded model's vocabulary
SHARE = 0.99  # of the looks at the clock are not later than what is told
LATENESS = "disco_loop_lag_seconds_bucket"  # each daemon looks every 20 ms


async def measure_loop_lag(machines: TwoMachines, texts: Sequence[str], repeats: int, share: float) -> dict[str, float]:
    """Return the 99th percentile of the lateness of both daemons' event loops, ms, while long prompts go up.

    The prompts, that `share` of 2,000 tokens, are the words of `texts`, each from another place on, so that nothing of
    one is cached for the next. Raises BenchError.
    """
    daemons = {"edge": machines.edge, "partner": machines.partner}
    before = await asyncio.gather(*map(looks_by_lateness, daemons.values()))
    for number, prompt in enumerate(long_prompts(texts, int(N_WORDS * share), repeats)):
        heard = await machines.edge.ask(machines.edge.root, prompt, 1)
        progress(f"upload {number + 1} of {repeats}: {heard.usage['prompt_tokens']} tokens, {heard.took_s:.1f} s")
    after = await asyncio.gather(*map(looks_by_lateness, daemons.values()))
    return {
        name: 1e3 * quantile_s({late_s: n - then[late_s] for late_s, n in now.items()}, SHARE)
        for name, then, now in zip(daemons, before, after, strict=True)
    }


def long_prompts(texts: Sequence[str], n_words: int, n: int) -> list[str]:
    """Return `n` prompts of so many words of texts, each of which begins at another place of them."""
    words = " ".join(texts).split()
    starts = [at * len(words) // n for at in range(n)]
    return [" ".join(itertools.islice(itertools.cycle(words), start, start + n_words)) for start in starts]


async def looks_by_lateness(daemon: BenchDaemon) -> dict[float, float]:
    """Return how often a daemon's event loop was at most that late, by the lateness, s, since it began."""
    async with daemon.session.get(f"{daemon.root}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = (sample for family in families for sample in family.samples)
    return {float(one.labels["le"]): one.value for one in samples if one.name == LATENESS}


def quantile_s(counts: Mapping[float, float], share: float) -> float:
    """Return the `share`-quantile of a histogram, s: `counts` of those at or below each bound, the last one infinite.

    As Prometheus does it: the place within a bucket goes by its count, and beyond the last finite bound there is none.
    Raises BenchError where nothing was counted.
    """
    bounds = sorted(counts)
    if not bounds or not counts[bounds[-1]]:
        msg = "no daemon has looked at its event loop"
        raise BenchError(msg)
    wanted = share * counts[bounds[-1]]
    at = next(i for i, bound in enumerate(bounds) if counts[bound] >= wanted)
    low, below = (bounds[at - 1], counts[bounds[at - 1]]) if at else (0.0, 0.0)
    if at == len(bounds) - 1:
        return low
    found = low + (bounds[at] - low) * (wanted - below) / (counts[bounds[at]] - below)
    return min(found, bounds[at])  # whatever rounding makes of it
