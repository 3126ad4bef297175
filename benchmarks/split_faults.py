"""What the split benchmark does besides plain answers: cuts of the link in the middle of them, and long prompts."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress

from .split_daemons import HeardPieces, TwoMachines, busy_s, until_linked
from .split_text import SplitPrompt

N_PROMPT = 1024  # tokens of a long prompt, about
WORDS_A_TOKEN = 0.8  # of English text, with the embedded model's vocabulary


@dataclass(slots=True)
class Knife:
    """Cuts the link once, behind so many pieces of an answer; `cut_at` says behind how many it was."""

    machines: TwoMachines
    behind: int
    cut_at: int = 0

    def hear(self, heard: HeardPieces) -> None:
        """Look at an answer that has one piece more."""
        if len(heard.pieces) >= self.behind and not self.cut_at:
            self.cut_at = len(heard.pieces)
            self.machines.link.cut()


async def measure_link_cuts(
    machines: TwoMachines, prompts: Sequence[SplitPrompt], n: int, max_tokens: int, seed: int = 0
) -> dict[str, Any]:
    """Cut the link behind a random piece of `n` answers; count the characters that are not the whole model's.

    `back_s` is the median time from the cut to the next piece, `worst_gap_s` the longest one between two pieces of such
    an answer. What an answer that ends with an error does not say is lost.
    """
    chance = random.Random(seed)
    lost = changed = doubled = 0
    gaps, back = [0.0], []
    for number in range(n):
        prompt = prompts[number % len(prompts)].text
        whole, _ = await machines.cloud(prompt, max_tokens)
        behind = chance.randrange(1, max(2, len(whole.pieces) - 2))
        heard, knife = HeardPieces(), Knife(machines, behind)
        try:
            await machines.edge.ask(machines.edge.root, prompt, max_tokens, knife.hear, heard)
        except BenchError as e:
            progress(f"cut {number + 1}: {e}")
        lost += max(0, len(whole.text) - len(heard.text))
        doubled += max(0, len(heard.text) - len(whole.text))
        changed += sum(a != b for a, b in zip(whole.text, heard.text, strict=False))
        gaps += [b - a for a, b in itertools.pairwise(heard.times)]
        if 0 < knife.cut_at < len(heard.times):
            back.append(heard.times[knife.cut_at] - heard.times[knife.cut_at - 1])
        await until_linked(machines.edge)
    return {
        "n": n, "lost": lost, "changed": changed, "doubled": doubled, "worst_gap_s": max(gaps),
        "back_s": statistics.median(back) if back else None,
    }  # fmt: skip


async def measure_ttft(machines: TwoMachines, texts: Sequence[str], mbit_s: float, repeats: int) -> dict[str, float]:
    """Return the time to the first token of long prompts, s, beside what each machine and the line took for them.

    Medians over prompts of which none begins like another one: nothing of them is cached. `edge_s` and `partner_s` are
    processor time, `upload_s` is what the bytes take at the line's rate.
    """
    words = " ".join(texts).split()
    found: dict[str, list[float]] = {"edge_s": [], "upload_s": [], "partner_s": [], "split_s": []}
    for number in range(repeats):
        start = 7 * number
        chosen = words[start : start + int(N_PROMPT * WORDS_A_TOKEN)]
        edge_s, partner_s, up = busy_s(machines.edge_engines), busy_s(machines.partner_engines), machines.link.n_up
        heard = await machines.edge.ask(machines.edge.root, f"{number}: {' '.join(chosen)}", 1)
        found["edge_s"].append(busy_s(machines.edge_engines) - edge_s)
        found["partner_s"].append(busy_s(machines.partner_engines) - partner_s)
        found["upload_s"].append(8e-6 * (machines.link.n_up - up) / mbit_s)
        found["split_s"].append(heard.times[0] if heard.times else heard.took_s)
        progress(f"first token of {heard.usage['prompt_tokens']} tokens: {found['split_s'][-1]:.2f} s")
    return {name: statistics.median(values) for name, values in found.items()}
