"""Measures the device: how long its model loads, how fast it reads and writes, and what that takes.

Three things look like a slow device and are none. A model that is still loading: loading is timed apart, and the first
answer after it is thrown away. A prompt that a cache knows in part: each is fresh, and a sample with a cached token is
dropped and counted. A processor that is slowed down by heat: the first length is measured again at the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import psutil

from ..clock import Clock
from ..endpoints.device import LOAD_WAIT_S, Device
from ..engine import wire
from ..engine.supervisor import Engine
from ..estimation.prefill_curve import Line, fit, mean95
from ..power.measurement import Covers, PowerReading
from ..power.meter import EnergyMeter, TokenEnergy, from_power
from ..power.sensors import Sensors, assumed_reading
from ..types import Finish, GenerationRequest, Usage
from . import prompts
from .prompts import Prompts
from .saved import TYPICAL, Check, DeviceFigures, TtftFit
from .watch import ProfileError, Watch, watching

ANSWER_S = 600.0  # one answer; the supervisor kills an engine that is silent for much less
N_DRIFT = 3  # repeats of the first length at the begin, and again at the end
DRIFT = 0.15  # slower by more than this share at the end: the machine was slowed down
LEAST_DECODED = 16  # tokens; shorter answers say little of the speed
PROMPT = 64  # tokens in front of an answer whose speed is measured
CHECK_SHARE = 0.5  # of the longest prompt, in words: a word of a foreign text may be two tokens


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of a measurement.

    `budget_s` bounds the prompts, `idle_s` the wait for idle power, `work_s` that for power at work; both only as long
    as the source needs for `n_idle` and `n_work` windows.
    """

    repeats: int = 7
    loads: int = 5
    answer_tokens: int = 128
    budget_s: float = 300.0
    idle_s: float = 240.0
    work_s: float = 240.0
    n_idle: int = 8
    n_work: int = 20


FULL = Effort()
QUICK = Effort(repeats=3, loads=3, answer_tokens=64, budget_s=60.0, idle_s=30.0, work_s=30.0, n_idle=5, n_work=8)
LOADS_S = 30.0  # a model that takes this long to load is loaded once


class Steps:
    """Reports the step under way, and how many of the steps known so far are done: `tell(text, done, total)`."""

    def __init__(self, tell: Callable[[str, int, int], None]) -> None:
        self._tell = tell
        self._done = self._total = 0

    def expect(self, n: int) -> None:
        """Expect `n` steps more."""
        self._total += n

    def begin(self, text: str) -> None:
        """Report that a step begins."""
        self._tell(text, self._done, self._total)

    def end(self) -> None:
        """Count the step as done."""
        self._done += 1


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer: `fresh` and `cached` tokens of its prompt, and s until its first token.

    `decoded` tokens more came in the `decode_s` after that.
    """

    fresh: int
    cached: int
    ttft_s: float
    decoded: int
    decode_s: float


@dataclass(slots=True)
class DeviceBench:
    """One device that is being measured; `text` is what prompts are made of."""

    device: Device
    clock: Clock
    watch: Watch
    effort: Effort
    steps: Steps
    rng: random.Random
    text: str
    samples: list[tuple[int, float]] = field(default_factory=list)
    n_warm: int = 0
    _n_asked: int = 0

    # --- one answer ----------------------------------------------------------------------------------------------

    async def time_answer(self, request: GenerationRequest) -> TimedAnswer:
        """Ask, and take the times. Raises EndpointError, or ProfileError when it takes too long."""
        usage, times, counts = Usage(), [self.clock.now()], [0]
        meter = self.watch.meter
        meter.begin(request.request_id, times[0])
        try:
            async with asyncio.timeout(ANSWER_S), aclosing(self.device.generate(request, usage)) as events:
                async for event in events:
                    if not isinstance(event, Finish) or len(times) == 1:
                        times.append(self.clock.now())
                        counts.append(usage.completion_tokens)
        except TimeoutError as e:
            raise ProfileError(f"an answer took more than {ANSWER_S:g} s") from e
        finally:
            meter.observe_prefill(request.request_id, times[min(1, len(times) - 1)], usage.prompt_tokens)
            meter.end(request.request_id, times[-1], usage.completion_tokens)
        return TimedAnswer(
            usage.prompt_tokens, usage.cached_tokens, times[1] - times[0], counts[-1] - counts[1], times[-1] - times[1]
        )

    def _name(self) -> str:
        self._n_asked += 1
        return f"profile-{self._n_asked}"

    # --- what is measured ----------------------------------------------------------------------------------------

    async def run(self, info: wire.Loaded, loads: Sequence[float], n_check: int, busy_share: float) -> DeviceFigures:
        """Measure all but the loads. Raises DiscoError."""
        made = await self._prompts()
        await self._idle()
        drift = await self._ttfts(made, info)
        line = self._fit()
        speeds = await self._decode(made)
        await self._work(made)
        check = await self._check(line, info.n_ctx, n_check) if n_check else None
        await self.watch.look()
        decode_tps, decode_interval = mean95(speeds)
        load_s, load_interval = mean95(loads)
        prefill_tps, prefill_interval = line.speed(TYPICAL)
        return DeviceFigures(
            model=self.device.model,
            load_s=load_s,
            prefill_tps=prefill_tps,
            decode_tps=decode_tps,
            ttft_fit=TtftFit.of(line),
            energy=self._energy(prefill_tps, decode_tps),
            n_ctx=info.n_ctx,
            first_load_s=loads[0],
            prefill_interval=prefill_interval,
            drift=drift,
            throttled=self.watch.throttled or drift > DRIFT,
            n_warm=self.n_warm,
            busy_share=busy_share,
            samples=self.samples,
            load_interval=load_interval,
            decode_interval=decode_interval,
            check=check,
        )

    async def _prompts(self) -> Prompts:
        """The text in the model's tokens; what a text begins with by rule is left off."""
        ids = [await self._ids(self.text), await self._ids(self.text[1:])]
        common = int(ids[0][0] == ids[1][0])
        try:
            return Prompts(ids[0][common:], self.rng)
        except ValueError as e:
            raise ProfileError(f"{self.device.model} cannot be measured: {e}") from e

    async def _ids(self, text: str) -> tuple[int, ...]:
        for _ in range(20):  # a machine with other work may be too slow to say at the first time
            ids = await self.device.token_ids(GenerationRequest(self._name(), (), prompt=text))
            if ids is not None:
                return ids
        raise ProfileError("the engine does not tell the tokens of a text")

    async def _idle(self) -> None:
        """Wait until the meter knows what the machine draws at rest; not if that is assumed."""
        if self.watch.measures:
            self.steps.expect(1)
            self.steps.begin(f"looking at idle power ({_source(self.watch)})")
            await asyncio.sleep(min(self.effort.idle_s, self.effort.n_idle * self.watch.window_s))
            self.steps.end()

    async def _ttfts(self, made: Prompts, info: wire.Loaded) -> float:
        """Fill `samples`; by what share the first length took longer at the end than at the begin."""
        effort = self.effort
        try:
            each = prompts.lengths(info.n_ctx, info.prefill_tps, effort.repeats, effort.budget_s)
        except ValueError as e:
            raise ProfileError(str(e)) from e
        first = each[len(each) // 2]
        self.steps.expect(effort.repeats * len(each) + 2 * N_DRIFT)
        await self.time_answer(prompts.prompt_request(self._name(), made.fresh(first), 1))  # wakes what still sleeps
        begin = [await self._sample(made, first) for _ in range(N_DRIFT)]
        for _ in range(effort.repeats):
            for n in self.rng.sample(each, len(each)):
                await self._sample(made, n)
        end = [await self._sample(made, first) for _ in range(N_DRIFT)]
        return median(end) / median(begin) - 1

    async def _sample(self, made: Prompts, n: int) -> float:
        """One more TTFT, s; not a sample if a cache knew a part of the prompt."""
        self.steps.begin(f"reading prompts: {n} tokens")
        heard = await self.time_answer(prompts.prompt_request(self._name(), made.fresh(n), 1))
        if heard.cached:
            self.n_warm += 1
        else:
            self.samples.append((heard.fresh, heard.ttft_s))
        self.steps.end()
        return heard.ttft_s

    def _fit(self) -> Line:
        try:
            return fit([n for n, _ in self.samples], [s for _, s in self.samples])
        except ValueError as e:
            raise ProfileError(f"no line fits the measured times, {self.n_warm} dropped for a warm cache: {e}") from e

    async def _decode(self, made: Prompts) -> list[float]:
        """Speeds of single answers, token/s. An answer that ends early is asked once more, with another prompt."""
        effort, speeds = self.effort, list[float]()
        self.steps.expect(effort.repeats)
        for _ in range(effort.repeats):
            self.steps.begin(f"writing answers: {effort.answer_tokens} tokens")
            for _ in range(2):
                heard = await self.time_answer(
                    prompts.prompt_request(self._name(), made.fresh(PROMPT), effort.answer_tokens)
                )
                if heard.decoded >= LEAST_DECODED and heard.decode_s > 0:
                    speeds.append(heard.decoded / heard.decode_s)
                    break
            self.steps.end()
        if not speeds:
            raise ProfileError(f"{self.device.model} ends its answers after fewer than {LEAST_DECODED} tokens")
        return speeds

    async def _work(self, made: Prompts) -> None:
        """Work until the meter has seen enough of it; the prompts and answers so far often are."""
        if not self.watch.measures:
            return
        self.steps.expect(1)
        self.steps.begin(f"looking at power at work ({_source(self.watch)})")
        end = self.clock.now() + min(self.effort.work_s, self.effort.n_work * self.watch.window_s)
        while self.clock.now() < end:
            await self.time_answer(prompts.prompt_request(self._name(), made.fresh(PROMPT), self.effort.answer_tokens))
            await self.time_answer(prompts.prompt_request(self._name(), made.fresh(4 * PROMPT), 1))
        self.steps.end()

    def _energy(self, prefill_tps: float, decode_tps: float) -> TokenEnergy:
        found = self.watch.meter.energy(prefill_tps, decode_tps)
        if found is not None:
            return found
        # The source was there, but said too little: a battery that is read now and then, or hardly any work to see.
        battery = self.watch.now is not None and self.watch.now.reading.covers is Covers.MACHINE
        stand_in: PowerReading = assumed_reading(0.0, float(self.device.engine.config.n_threads), frugal=battery)
        return from_power(stand_in, prefill_tps, decode_tps)

    async def _check(self, line: Line, n_ctx: int, n: int) -> Check:
        """Ask `n` chats of random lengths, as clients do, and compare; the template's own part may be cached."""
        errors = []
        longest = CHECK_SHARE * min(prompts.LONGEST, n_ctx - prompts.SPARE)
        self.steps.expect(n)
        chats = prompts.chats(self.text, int(longest), self.rng)
        for _ in range(n):
            self.steps.begin("comparing predictions with what is seen")
            heard = await self.time_answer(prompts.chat_request(self._name(), next(chats), 1))
            errors.append(line.predict(heard.fresh) / heard.ttft_s - 1)
            self.steps.end()
        p50, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return Check(n, float(p50), float(p90), float(median(errors)))


def _source(watch: Watch) -> str:
    return watch.now.reading.source if watch.now is not None else ""


async def measure(
    device: Device,
    sensors: Callable[[bool], Sensors],
    clock: Clock,
    effort: Effort,
    steps: Steps,
    *,
    text: str,
    n_check: int = 0,
    seed: int = 0,
) -> DeviceFigures:
    """Measure a device that was not started yet, with the engine of its configuration; closing it is the caller's.

    `sensors` of a model that is on a GPU or not; `text` for the prompts, some hundred words; `seed` for their order.
    Raises DiscoError.
    """
    busy_share = await _share_of_others()
    loads = await _loads(device, clock, effort, steps)
    info = device.engine.info
    assert info is not None
    watch = Watch(sensors(info.n_gpu_layers != 0), EnergyMeter(), clock)
    bench = DeviceBench(device, clock, watch, effort, steps, random.Random(seed), text)
    async with watching(watch):
        return await bench.run(info, loads, n_check, busy_share)


async def _share_of_others(look_s: float = 1.0) -> float:
    """The share of the processor that is busy while nothing of ours computes."""
    psutil.cpu_percent()
    await asyncio.sleep(look_s)
    return psutil.cpu_percent() / 100


async def _loads(device: Device, clock: Clock, effort: Effort, steps: Steps) -> list[float]:
    """Return the load times of fresh engines, s, one by one; the last of them is the device's own and stays."""
    steps.expect(effort.loads)
    taken: list[float] = []
    while len(taken) < effort.loads:
        last = len(taken) == effort.loads - 1 or sum(taken) > LOADS_S
        one = device if last else Device(Engine(device.engine.config, clock))
        steps.begin(f"loading {device.model}")
        try:
            started = clock.now()
            await one.start()
            await one.engine.ready(LOAD_WAIT_S)
            taken.append(clock.now() - started)
        finally:
            if one is not device:
                await one.close()
        steps.end()
        if last:
            break
    return taken
