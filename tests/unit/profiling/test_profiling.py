"""What `disco profile` asks, how it judges what it hears, and the file it leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import msgspec
import pytest

from disco_daemon.cli import profiling as verb
from disco_daemon.clock import SystemClock
from disco_daemon.endpoints.device import Device
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.engine import wire
from disco_daemon.engine.measure.tune_messages import Knobs, Speed, Tuned
from disco_daemon.estimation.device_ttft import DeviceTtft
from disco_daemon.power.measurement import Covers, PowerReading, Thermal
from disco_daemon.power.meter import EnergyMeter
from disco_daemon.power.sensors import Sensors, assumed_reading
from disco_daemon.profiling import picture, prompts, saved
from disco_daemon.profiling.device import DeviceBench, Effort, Steps
from disco_daemon.profiling.saved import TYPICAL, DeviceFigures, Measured, ServerFigures
from disco_daemon.profiling.server_probe import MAX_FAILED, measure_server
from disco_daemon.profiling.tuned_profile import ProfileKey, TunedProfiles
from disco_daemon.profiling.watch import ProfileError, Watch, watching
from disco_daemon.types import Finish, GenerationRequest, Token, Usage
from tests.fixtures.upstream import Upstream

C, K, Q = 0.02, 1e-3, 2e-7  # s, s/token, s/token^2
DECODE_TPS, PREFILL_W, DECODE_W, IDLE_W = 50.0, 30.0, 18.0, 7.0
TEXT = " ".join(f"word{i}" for i in range(200))
EFFORT = Effort(repeats=3, loads=1, answer_tokens=32, idle_s=0.0, work_s=0.0)
INFO = wire.Loaded(model="m", n_ctx=4096, n_cells=8192, n_seqs=8, bytes_per_token=100, load_s=0.5, prefill_tps=900.0)


def quiet() -> Steps:
    return Steps(lambda text, done, total: None)


# --- what is asked ------------------------------------------------------------------------------------------------


def test_lengths_double_up_to_2048_where_there_is_room_and_time() -> None:
    assert prompts.lengths(4096, 1000.0, 7, 300.0) == [32, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(("n_ctx", "tps"), [(4096, 20.0), (1024, 1000.0), (512, 5.0), (100, 1000.0)])
def test_a_slow_device_or_a_short_context_gets_shorter_prompts_not_fewer(n_ctx: int, tps: float) -> None:
    found = prompts.lengths(n_ctx, tps, 3, 60.0)
    assert len(set(found)) >= 6
    assert found[0] == prompts.SHORTEST
    assert found[-1] <= n_ctx - prompts.SPARE
    if found[-1] > prompts.LEAST_LONGEST:
        assert 3 * sum(found) <= 60 * tps


def test_a_context_without_room_is_told() -> None:
    with pytest.raises(ValueError, match="too short"):
        prompts.lengths(64, 1000.0, 3, 60.0)


def test_no_two_prompts_begin_alike() -> None:
    made = prompts.Prompts(range(100, 400), random.Random(0))
    asked = [made.fresh(n) for n in [1, 2, 5, 700] * 50]
    assert [len(ids) for ids in asked] == [1, 2, 5, 700] * 50
    assert len({ids[0] for ids in asked}) == len(asked)
    assert all(100 <= token < 400 for ids in asked for token in ids)


def test_a_text_of_few_tokens_makes_no_prompts() -> None:
    with pytest.raises(ValueError, match="too few"):
        prompts.Prompts([1, 2, 3] * 20, random.Random(0))


def test_chats_are_of_all_lengths_and_none_is_another_s_beginning() -> None:
    chats = prompts.chats(TEXT, 1000, random.Random(0))
    texts = [next(chats)[0]["content"] for _ in range(200)]
    sizes = sorted(len(text.split()) for text in texts)
    assert sizes[0] < 15
    assert sizes[-1] > 700
    assert sizes[-1] <= 1001
    assert len({text.split()[0] for text in texts}) == 200


# --- what is heard: a machine whose every fault is known ----------------------------------------------------------


class Machine:
    """Exact times and energy on a clock of its own; `warm` prompts are half cached, `slower` the later, the more."""

    def __init__(self, *, warm: int = 0, slower: float = 0.0, answers: int = 10**6, throttles: bool = False) -> None:
        self.time, self.joules = 0.0, 0.0
        self.asked: list[GenerationRequest] = []
        self._warm, self._slower, self._answers = warm, slower, answers
        self.model = "simulated"
        self.engine = SimpleNamespace(config=SimpleNamespace(n_threads=3))
        sensors = Sensors(
            [lambda now: PowerReading("rapl", Covers.CPU, 0.0, joules=self.joules)],
            assumed_reading(0.0, 3.0, frugal=False),
            heat=lambda now: Thermal(throttles),
            interval_s=3600.0,
        )
        self.watch = Watch(sensors, EnergyMeter(), self)

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def spend(self, seconds: float, watts: float) -> None:
        """Time goes by; somebody looks at the sensors each second."""
        while seconds > 0:
            step = min(seconds, 1.0 - self.time % 1.0)
            self.time, self.joules, seconds = self.time + step, self.joules + watts * step, seconds - step
            if self.time % 1.0 < 1e-9:
                await self.watch.look()

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        assert isinstance(request.prompt, str)
        return 1, *(100 + crc32(word.encode()) % 5000 for word in request.prompt.split())  # 1: a beginning of text

    async def generate(self, request: GenerationRequest, usage: Usage) -> AsyncGenerator[Token | Finish, None]:
        self.asked.append(request)
        n = (
            len(request.prompt)
            if isinstance(request.prompt, str | tuple)
            else len(request.messages[0]["content"].split())
        )
        cached = n // 2 if 0 < len(self.asked) - 2 <= self._warm else 0
        fresh = n - cached
        factor = 1 + self._slower * len(self.asked)
        await self.spend(factor * (C + K * fresh + Q * fresh**2), PREFILL_W)
        usage.prompt_tokens, usage.cached_tokens = fresh, cached
        for i in range(min(self._answers, request.sampling.max_tokens or 1)):
            if i:
                await self.spend(1 / DECODE_TPS, DECODE_W)
            usage.completion_tokens += 1
            yield Token("a")
        yield Finish("length")


async def measured(machine: Machine, effort: Effort = EFFORT, n_check: int = 0) -> DeviceFigures:
    bench = DeviceBench(cast("Device", machine), machine, machine.watch, effort, quiet(), random.Random(0), TEXT)
    async with watching(machine.watch):
        await machine.spend(20.0, IDLE_W)
        return await bench.run(INFO, [0.6, 0.5, 0.55], n_check, 0.0)


async def test_an_exact_machine_is_measured_exactly() -> None:
    machine = Machine()
    found = await measured(machine, n_check=20)
    fit = found.ttft_fit
    assert (fit.c_s, fit.k_s_per_token, fit.q_s_per_token2) == pytest.approx((C, K, Q), rel=1e-4)
    assert fit.r2 > 0.9999
    assert found.prefill_tps == pytest.approx(1 / (K + TYPICAL * Q), rel=1e-4)
    assert found.decode_tps == pytest.approx(DECODE_TPS)
    assert found.load_s == pytest.approx(0.55)
    assert found.first_load_s == 0.6
    assert not found.throttled
    assert found.drift == pytest.approx(0, abs=1e-9)
    assert found.n_warm == 0
    assert len({n for n, _ in found.samples}) >= 6
    assert found.check is not None
    assert found.check.median_relative_error < 1e-3
    assert found.check.n == 20


async def test_energy_is_what_the_machine_drew_above_idle() -> None:
    found = await measured(Machine(), dataclasses.replace(EFFORT, repeats=7, answer_tokens=128))
    energy = found.energy
    assert energy.source == "rapl"
    assert energy.windows > 0
    low, high = energy.decode_interval
    assert low <= (DECODE_W - IDLE_W) / DECODE_TPS <= high
    total = energy.joules(1000, 200)
    truth = (PREFILL_W - IDLE_W) * (1000 * K + 1000**2 * Q) + (DECODE_W - IDLE_W) * 200 / DECODE_TPS
    assert total == pytest.approx(truth, rel=max(0.25, energy.relative_error))


async def test_a_warm_prefix_is_no_sample() -> None:
    """Half of such a prompt takes half the time: taken for a sample it would make the device twice as fast."""
    found = await measured(Machine(warm=5))
    assert found.n_warm == 5
    assert (found.ttft_fit.k_s_per_token, found.ttft_fit.c_s) == pytest.approx((K, C), rel=1e-3)
    assert any("were not counted" in line for line in verb._warnings(found))


async def test_with_all_prompts_warm_there_is_no_line() -> None:
    with pytest.raises(ProfileError, match="warm cache"):
        await measured(Machine(warm=10_000))


async def test_a_machine_that_gets_slower_is_throttled() -> None:
    found = await measured(Machine(slower=0.02))
    assert found.drift > 0.15
    assert found.throttled
    assert any("longer at the end" in line for line in verb._warnings(found))


async def test_a_sensor_that_says_hot_is_believed() -> None:
    found = await measured(Machine(throttles=True))
    assert found.drift == pytest.approx(0, abs=1e-9)
    assert found.throttled
    assert any("heat" in line for line in verb._warnings(found))


async def test_a_model_that_says_nothing_cannot_be_measured() -> None:
    with pytest.raises(ProfileError, match="ends its answers"):
        await measured(Machine(answers=3))


async def test_no_prompt_is_asked_twice_and_the_order_is_shuffled() -> None:
    machine = Machine()
    found = await measured(machine)
    firsts = [request.prompt[0] for request in machine.asked if isinstance(request.prompt, tuple)]
    assert len(set(firsts)) == len(firsts)
    lengths = [n for n, _ in found.samples[3:-3]]
    rounds = [lengths[i : i + 7] for i in range(0, 21, 7)]
    assert all(sorted(part) == sorted(rounds[0]) for part in rounds)
    assert any(part != sorted(part) for part in rounds)


async def test_sensors_that_break_end_the_measurement_with_a_reason() -> None:
    def broken(now: float) -> PowerReading:
        raise OSError("the battery was taken out")

    machine = Machine()
    machine.watch.sensors = Sensors([broken], assumed_reading(0.0, 3.0, frugal=False))
    with pytest.raises(ProfileError, match="taken out"):
        await measured(machine)


async def test_what_is_only_assumed_is_no_knowledge() -> None:
    """Without a sensor the watts of so many cores stand in; the meter of the daemon must not take them for measured."""
    machine = Machine()
    machine.watch.sensors = Sensors([], assumed_reading(0.0, 3.0, frugal=False), interval_s=3600.0)
    found = await measured(machine)
    assert found.energy.source == "cores"
    assert found.energy.prefill_j_per_token == pytest.approx(27.0 / found.prefill_tps)
    assert Measured(KEY, KNOBS, "2026-11-22", found).known_energy is None


# --- the server ---------------------------------------------------------------------------------------------------


def server_at(url: str, **settings: Any) -> Server:
    return Server(ServerConfig(url, "loopback", "test", first_token_timeout_s=2.0, **settings))


async def test_a_server_s_times_and_its_way_to_continue() -> None:
    async with Upstream(tokens=64) as upstream:
        found = await measure_server(server_at(upstream.url), SystemClock(), quiet(), n=5, may_probe=True)
        assert (found.n, found.n_failed, found.error) == (5, 0, "")
        assert found.continuation == "continue_final_message"
        assert found.probed
        assert found.rtt_s is not None
        assert found.ttft_p50_s is not None
        assert found.ttft_p90_s is not None
        assert found.rtt_s > 0
        assert 0 < found.ttft_p50_s <= found.ttft_p90_s
        assert len(found.samples) == 5
        assert found.tokens > 5 * 8
        assert all(exchange.body["max_tokens"] == 8 for exchange in list(upstream.exchanges)[:5])


async def test_a_server_is_not_probed_against_the_user_s_will_or_where_the_way_is_set() -> None:
    async with Upstream(tokens=64) as upstream:
        found = await measure_server(server_at(upstream.url), SystemClock(), quiet(), n=2, may_probe=False)
        assert (found.continuation, found.probed) == ("untried", False)
        told = server_at(upstream.url, continuation="prefix")
        found = await measure_server(told, SystemClock(), quiet(), n=2, may_probe=True)
        assert (found.continuation, found.probed) == ("prefix", False)
        assert len(upstream.exchanges) == 4


async def test_a_server_that_fails_is_reported_and_soon_left_alone() -> None:
    async with Upstream() as upstream:
        with upstream.status(401):
            found = await measure_server(server_at(upstream.url), SystemClock(), quiet(), n=9, may_probe=True)
        assert (found.n, found.n_failed, len(upstream.exchanges)) == (0, MAX_FAILED, MAX_FAILED)
        assert "API key" in found.error
        assert found.rtt_s is not None
        assert found.ttft_p50_s is None
        async with upstream.refuse():
            found = await measure_server(server_at(upstream.url), SystemClock(), quiet(), n=9, may_probe=True)
    assert (found.n, found.rtt_s) == (0, None)
    assert found.error
    assert any("failed" in line for line in verb._server_lines(found))


async def test_a_server_that_fails_now_and_then_is_measured_all_the_same() -> None:
    async with Upstream(tokens=8) as upstream:
        with upstream.status(500, times=2):
            found = await measure_server(server_at(upstream.url), SystemClock(), quiet(), n=6, may_probe=False)
    assert (found.n, found.n_failed) == (4, 2)


# --- the file -----------------------------------------------------------------------------------------------------

KEY = ProfileKey("/models/m.gguf", 1000, 7, "a processor", 8, "0.3.36", True, "auto", "auto")
KNOBS = Knobs(3, 4, 512)
SERVER = ServerFigures("http://localhost/v1", "m", 5, 0, 99, "prefix", samples=[0.1, 0.2])


@pytest.fixture
async def result() -> Measured:
    return Measured(KEY, KNOBS, "2026-11-22", await measured(Machine(), n_check=5), SERVER)


def test_what_was_measured_is_read_again(tmp_path: Path, result: Measured) -> None:
    profiles = TunedProfiles(tmp_path / "devices")
    path = saved.save(profiles, result)
    assert saved.load(profiles, KEY, KNOBS) == result
    assert path.parent == profiles.path(KEY).parent
    assert path.name.endswith(".measured.toml")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    alone = msgspec.structs.replace(result, server=None)
    saved.save(profiles, alone)
    assert saved.load(profiles, KEY, KNOBS) == alone


def test_it_lies_beside_the_tune_s_profile_and_leaves_it_alone(tmp_path: Path, result: Measured) -> None:
    profiles = TunedProfiles(tmp_path)
    speed = Speed(1000.0, 50.0, 120.0)
    profiles.save(KEY, Tuned(KNOBS, speed, speed, [], 1.0, True, 3), "2026-11-22")
    saved.save(profiles, result)
    found = profiles.load(KEY)
    assert found is not None
    assert found.knobs == KNOBS
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("key", "knobs"),
    [
        (msgspec.structs.replace(KEY, size=1001), KNOBS),
        (msgspec.structs.replace(KEY, llama_cpp="0.3.37"), KNOBS),
        (KEY, Knobs(2, 4, 512)),
    ],
    ids=["another file", "another llama.cpp", "other threads"],
)
def test_it_is_not_used_for_something_else(tmp_path: Path, result: Measured, key: ProfileKey, knobs: Knobs) -> None:
    profiles = TunedProfiles(tmp_path)
    saved.save(profiles, result)
    assert saved.load(profiles, key, knobs) is None


@pytest.mark.parametrize("damage", ["", "measured = 3", "= =", "\x00"])
def test_a_damaged_file_is_none(tmp_path: Path, result: Measured, damage: str) -> None:
    profiles = TunedProfiles(tmp_path)
    assert saved.load(profiles, KEY, KNOBS) is None
    saved.save(profiles, result).write_text(damage)
    assert saved.load(profiles, KEY, KNOBS) is None


def test_the_daemon_can_start_from_it(result: Measured) -> None:
    k, c = result.prior
    estimate, fit = DeviceTtft(k, c), result.device.ttft_fit
    assert estimate.predict(0) == pytest.approx(fit.predict(0))
    assert estimate.predict(TYPICAL) == pytest.approx(fit.predict(TYPICAL), rel=1e-6)
    known = result.known_energy
    assert known is not None
    assert EnergyMeter(known).energy(1000.0, 50.0) == known


# --- the picture --------------------------------------------------------------------------------------------------


def test_the_terminal_shows_samples_and_curve(result: Measured) -> None:
    lines = picture.terminal(result.device).splitlines()
    assert len(lines) == picture.HEIGHT + 3
    assert lines[1].rstrip().endswith("o"), "the longest prompt is the slowest, at the top right"
    assert "." in "".join(lines[2:-2])
    assert lines[-1].split() == ["0", "1024", "2048"]
    assert all(len(line) <= 80 for line in lines)
    assert "ms·(l/1000)²" in picture.formula(result.device)


def test_the_png_is_one(tmp_path: Path, result: Measured) -> None:
    path = picture.draw(result.device, tmp_path / "new" / "ttft.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_all_that_was_measured_is_told_in_words(result: Measured) -> None:
    text = "\n".join([*verb._device_lines(result.device), *verb._server_lines(result.server)])
    for part in ("simulated", "loads", "reads", "writes", "R² 1.0000", "J to read a token", "measured: rapl", "check"):
        assert part in text
    assert "continues answers by: prefix" in text
    assert verb._server_lines(None) == []


async def test_steps_count_up_to_their_sum() -> None:
    told: list[tuple[int, int]] = []
    machine = Machine()
    steps = Steps(lambda text, done, total: told.append((done, total)))
    bench = DeviceBench(cast("Device", machine), machine, machine.watch, EFFORT, steps, random.Random(0), TEXT)
    async with watching(machine.watch):
        await bench.run(INFO, [0.5], 3, 0.0)
    done, total = told[-1]
    assert done + 1 == total
    assert all(a <= b for (a, _), (b, _) in pairwise(told))
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "profile sensors"]
