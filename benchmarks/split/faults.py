"""What the split benchmark does besides plain answers: cuts of the link in the middle of them, and long prompts."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress

from .daemons import HeardPieces, TwoMachines, busy_s, until_linked, write_settings
from .text import SplitPrompt

STALL_S = 2.0  # that nothing gets through: a link is given up before
N_PROMPT = 1024  # tokens of a long prompt, about, unless another number is asked for
WORDS_A_TOKEN = 0.8  # of English text, with the embedded model's vocabulary


class Fault(Enum):
    """What happens to an answer in its middle."""

    CUT = "cut"  # all connections end
    STALL = "stall"  # nothing gets through for a while, either way
    KILL = "kill"  # the partner's engine of the upper layers ends


@dataclass(slots=True)
class Knife:
    """Does a fault once, behind so many pieces of an answer.

    `cut_at` says behind how many it was, `over_at` when it was over, s, by `time.perf_counter`; of an engine that is
    loaded again that is not known.
    """

    machines: TwoMachines
    fault: Fault
    behind: int
    cut_at: int = 0
    over_at: float | None = None
    _stall: asyncio.Task[None] | None = None

    def hear(self, heard: HeardPieces) -> None:
        """Look at an answer that has one piece more. Raises BenchError if the engine that is to be killed has gone."""
        if len(heard.pieces) < self.behind or self.cut_at:
            return
        self.cut_at = len(heard.pieces)
        match self.fault:
            case Fault.CUT:
                self.machines.link.cut()
                self.over_at = time.perf_counter()
            case Fault.STALL:
                self._stall = asyncio.create_task(self._stop_for_a_while())
            case Fault.KILL:
                newest = max(self.machines.partner.engines(), key=lambda process: process.create_time())
                newest.kill()  # it was started behind that of the whole model, or anew

    async def _stop_for_a_while(self) -> None:
        async with self.machines.link.stalled():
            await asyncio.sleep(STALL_S)
        self.over_at = time.perf_counter()

    async def end(self) -> None:
        """Wait until what it has stopped goes on."""
        if self._stall is not None:
            await self._stall


async def measure_link_cuts(
    machines: TwoMachines, prompts: Sequence[SplitPrompt], n: int, max_tokens: int, seed: int = 0
) -> dict[str, Any]:
    """Let something happen behind a random piece of `n` answers; count the characters that are not the whole model's.

    The three faults take turns, and the edge goes on alone meanwhile, as it does by default, if it has an exit. What
    it says from there on, in `alone` answers, is text of its own, so an answer is compared up to there; it is to end
    like any other. `worst_gap_s` is the longest time between two pieces of such an answer, and `gaps` has the longest
    one of each fault. `back_s` is the median of the times between the end of a cut or a stall and the next piece that
    the partner has judged. What an answer that ends with an error does not say is lost.
    """
    write_settings(machines.edge.folder, {"split": {"alone": "go-on"}})
    await machines.edge.type("config", "reload")
    chance = random.Random(seed)
    lost = changed = doubled = n_alone = 0
    back, gaps = list[float](), dict[str, float]()
    whole = dict[str, HeardPieces]()
    for number in range(n):
        prompt, fault = prompts[number % len(prompts)].text, list(Fault)[number % len(Fault)]
        if prompt not in whole:
            whole[prompt] = await machines.whole(prompt, max_tokens)
        expected = whole[prompt]
        behind = chance.randrange(1, max(2, len(expected.pieces) - 2))
        heard, knife, has_ended = HeardPieces(), Knife(machines, fault, behind), False
        try:
            await machines.edge.ask(machines.edge.root, prompt, max_tokens, knife.hear, heard, {"sides": True})
            has_ended = True
        except BenchError as e:
            progress(f"{fault.value} {number + 1}: {e}")
        await knife.end()
        n_exact = heard.n_exact if has_ended else None
        whole_text, text = expected.text[:n_exact], heard.text[:n_exact]
        lost += max(0, len(whole_text) - len(text))
        doubled += max(0, len(text) - len(whole_text))
        changed += sum(a != b for a, b in zip(whole_text, text, strict=False))
        n_alone += n_exact is not None
        gap_s = max((b - a for a, b in itertools.pairwise(heard.times)), default=0.0)
        gaps[fault.value] = max(gaps.get(fault.value, 0.0), gap_s)
        if knife.over_at is not None:
            since = [heard.sent_at + at_s - knife.over_at for at_s in heard.times]
            judged = (s for s, alone in zip(since, heard.alone, strict=False) if s > 0 and not alone)
            back += list(itertools.islice(judged, 1))
        wrong = f"{lost}, {changed}, {doubled} characters lost, changed, doubled so far"
        progress(f"{fault.value} {number + 1} of {n}, behind {knife.cut_at} pieces: gap {gap_s:.2f} s; {wrong}")
        await until_linked(machines.edge)
    back_s, worst_gap_s = statistics.median(back) if back else None, max(gaps.values(), default=0.0)
    return {
        "n": n, "lost": lost, "changed": changed, "doubled": doubled, "alone": n_alone,
        "worst_gap_s": worst_gap_s, "back_s": back_s, "gaps": gaps,
    }  # fmt: skip


async def measure_ttft(
    machines: TwoMachines, texts: Sequence[str], mbit_s: float, repeats: int, n_prompt: int
) -> dict[str, float]:
    """Return the time to the first token of long prompts, s, beside what each machine and the line took for them.

    They have about `n_prompt` tokens, and none begins like another one: nothing is cached. Returned are medians.
    `edge_s` and `partner_s` are processor time, `upload_s` is what the bytes take at the line's rate.
    """
    words = " ".join(texts).split()
    found: dict[str, list[float]] = {"edge_s": [], "upload_s": [], "partner_s": [], "split_s": []}
    for number in range(repeats):
        start = 7 * number
        chosen = words[start : start + int(n_prompt * WORDS_A_TOKEN)]
        edge_s, partner_s, up = busy_s(machines.edge_engines), busy_s(machines.partner_engines), machines.link.n_up
        heard = await machines.edge.ask(machines.edge.root, f"{number}: {' '.join(chosen)}", 1)
        found["edge_s"].append(busy_s(machines.edge_engines) - edge_s)
        found["partner_s"].append(busy_s(machines.partner_engines) - partner_s)
        found["upload_s"].append(8e-6 * (machines.link.n_up - up) / mbit_s)
        found["split_s"].append(heard.times[0] if heard.times else heard.took_s)
        progress(f"first token of {heard.usage['prompt_tokens']} tokens: {found['split_s'][-1]:.2f} s")
    return {name: statistics.median(values) for name, values in found.items()}
