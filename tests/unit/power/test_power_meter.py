from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.power import meter
from disco_daemon.power.measurement import Covers, PowerReading
from disco_daemon.power.meter import EnergyMeter, TokenEnergy

PREFILL_TPS, DECODE_TPS = 500.0, 40.0


@dataclass
class Machine:
    """A simulated machine: exact energy of idle, prefill and decode, looked at every second."""

    prefill_w: float = 30.0
    decode_w: float = 18.0
    idle_w: float = 7.0
    noise_w: float = 0.5
    idle_noise_w: float | None = None  # None: as while computing
    source: str = "rapl"
    as_watts: bool = False
    seed: int = 0
    prompts: tuple[int, ...] = (200, 800, 1600)
    answers: tuple[int, ...] = (50, 150, 400)
    start: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now, self.joules, self.watts = self.start, 0.0, self.idle_w
        self.due = self.start

    def run(self, m: EnergyMeter, seconds: float, watts: float) -> None:
        end = self.now + seconds
        self.watts = watts
        while self.due <= end:
            self._until(self.due)
            m.sample(self.now, self.reading())
            self.due += 1.0
        self._until(end)

    def _until(self, t: float) -> None:
        at_rest = self.watts == self.idle_w and self.idle_noise_w is not None
        noise = self.rng.gauss(0, self.idle_noise_w if at_rest and self.idle_noise_w is not None else self.noise_w)
        self.joules += (self.watts + noise) * (t - self.now)
        self.now = t

    def reading(self) -> PowerReading:
        if self.as_watts:
            return PowerReading(self.source, Covers.MACHINE, 0.0, watts=self.watts + self.rng.gauss(0, self.noise_w))
        return PowerReading(self.source, Covers.CPU, 0.0, joules=self.joules)

    def answer(self, m: EnergyMeter) -> None:
        self.run(m, self.rng.uniform(3, 8), self.idle_w)
        prompt, answer = self.rng.choice(self.prompts), self.rng.choice(self.answers)
        m.begin("a", self.now)
        self.run(m, prompt / PREFILL_TPS, self.idle_w + self.prefill_w)
        m.observe_prefill("a", self.now, prompt)
        self.run(m, answer / DECODE_TPS, self.idle_w + self.decode_w)
        m.end("a", self.now, answer)

    @property
    def truth(self) -> tuple[float, float]:
        return self.prefill_w / PREFILL_TPS, self.decode_w / DECODE_TPS


def learned(machine: Machine, answers: int = 60, m: EnergyMeter | None = None) -> TokenEnergy:
    m = m or EnergyMeter()
    for _ in range(answers):
        machine.answer(m)
    machine.run(m, 5.0, machine.idle_w)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    return found


def test_joules_per_token_are_found() -> None:
    machine = Machine()
    found = learned(machine)
    assert found.prefill_j_per_token == pytest.approx(machine.truth[0], rel=0.03)
    assert found.decode_j_per_token == pytest.approx(machine.truth[1], rel=0.03)
    assert found.idle_watts == pytest.approx(7.0, abs=0.5)
    assert found.windows > 100
    assert found.relative_error < 0.1


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"as_watts": True, "noise_w": 2.0},
        {"noise_w": 3.0},
        {"decode_w": 30.0},
        {"noise_w": 3.0, "idle_noise_w": 0.0},  # here the fit alone makes the intervals
    ],
    ids=str,
)
def test_the_intervals_hold_the_truth(kind: dict[str, float]) -> None:
    held = 0
    for seed in range(20):
        machine = Machine(**kind, seed=seed)  # type: ignore[arg-type]
        found = learned(machine, answers=25)
        intervals = (found.prefill_interval, found.decode_interval)
        held += all(low <= x <= high for x, (low, high) in zip(machine.truth, intervals, strict=True))
    assert held >= 17  # of 20; 95 % intervals, two at a time, hold 18 on average


def test_idle_is_subtracted() -> None:
    quiet, hungry = (learned(Machine(idle_w=idle)) for idle in (3.0, 60.0))
    assert quiet.decode_j_per_token == pytest.approx(hungry.decode_j_per_token, rel=0.05)


def test_phases_always_in_one_proportion_are_told_apart_by_belief_only() -> None:
    """The sum is well known, each part less so: the intervals say it."""
    machine = Machine(prompts=(1000,), answers=(100,), prefill_w=20.0, decode_w=20.0)
    found = learned(machine)
    assert found.joules(1000, 100) == pytest.approx(20 * (1000 / PREFILL_TPS + 100 / DECODE_TPS), rel=0.03)


def test_a_rare_lookup_still_finds_the_sum() -> None:
    """A battery's figure is old, so its windows are long: many answers in each."""
    m, machine = EnergyMeter(), Machine(as_watts=True, source="battery")

    def sample(now: float, reading: PowerReading) -> None:
        EnergyMeter.sample(m, now, PowerReading("battery", Covers.MACHINE, 0.05, watts=reading.watts, lag_s=2.0))

    m.sample = sample  # type: ignore[method-assign]
    for _ in range(6):
        for _ in range(8):
            machine.answer(m)
        machine.run(m, 40.0, machine.idle_w)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    expected = machine.truth[0] * 870 + machine.truth[1] * 200
    assert found.joules(870, 200) == pytest.approx(expected, rel=0.1)


def test_nothing_is_claimed_without_idle_or_without_work() -> None:
    m, machine = EnergyMeter(), Machine()
    machine.run(m, 60.0, machine.idle_w)
    assert m.energy(PREFILL_TPS, DECODE_TPS) is None
    assert m.idle_watts() == pytest.approx(7.0, abs=0.5)
    busy = EnergyMeter()
    busy.begin("a", 0.0)
    Machine().run(busy, 60.0, 25.0)
    busy.end("a", 60.0, 1000)
    assert busy.energy(PREFILL_TPS, DECODE_TPS) is None
    assert busy.idle_watts() is None


def test_a_moment_of_rest_between_answers_is_not_idle_yet() -> None:
    m, machine = EnergyMeter(), Machine()
    for i in range(20):
        m.begin(i, machine.now)
        machine.run(m, 3.0, 25.0)
        m.end(i, machine.now, 100)
        machine.run(m, 1.0, 15.0)  # one whole window: fans and older figures
    assert m.idle_watts() is None


def test_computing_that_draws_nothing_more_gives_no_figure() -> None:
    m = EnergyMeter()
    machine = Machine(prefill_w=-2.0, decode_w=-2.0)
    for _ in range(20):
        machine.answer(m)
    assert m.energy(PREFILL_TPS, DECODE_TPS) is None


@settings(max_examples=25, deadline=None)
@given(st.floats(-5, 40), st.floats(-5, 40), st.floats(0, 8), st.integers(0, 10**6))
def test_never_negative(prefill_w: float, decode_w: float, noise_w: float, seed: int) -> None:
    m, machine = EnergyMeter(), Machine(prefill_w, decode_w, noise_w=noise_w, seed=seed)
    for _ in range(12):
        machine.answer(m)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    if found is not None:
        assert found.prefill_j_per_token >= 0
        assert found.decode_j_per_token >= 0
        assert found.prefill_interval[0] >= 0
        assert found.decode_interval[0] >= 0
        assert found.prefill_interval[0] <= found.prefill_j_per_token <= found.prefill_interval[1]


def test_a_long_sleep_is_no_window() -> None:
    m, machine = EnergyMeter(), Machine()
    for _ in range(30):
        machine.answer(m)
        machine.joules += 1e6  # the counter ran on while the machine slept
        machine.now += 3600.0
        machine.due = machine.now
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    assert found.joules(500, 100) == pytest.approx(30 + 45, rel=0.1)


def test_the_source_with_the_smaller_error_speaks() -> None:
    m = EnergyMeter()
    first = learned(Machine(source="rapl"), m=m)
    battery = Machine(source="battery", as_watts=True, noise_w=6.0, start=10_000.0)
    assert learned(battery, answers=10, m=m) == first
    assert first.source == "rapl"


def test_what_was_known_stands_until_something_better_is_measured() -> None:
    known = TokenEnergy("battery", 0.1, 0.9, (0.05, 0.15), (0.5, 1.3), 0.5, 6.0, 40)
    m = EnergyMeter(known)
    assert m.energy(PREFILL_TPS, DECODE_TPS) is known
    assert learned(Machine(), m=m).source == "rapl"


def test_assumed_power_stands_in_and_teaches_nothing() -> None:
    m = EnergyMeter()
    m.sample(0.0, PowerReading("user", Covers.COMPUTING, 0.2, watts=20.0))
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    assert (found.source, found.windows, found.idle_watts) == ("user", 0, None)
    assert found.prefill_j_per_token == pytest.approx(0.04)
    assert found.decode_j_per_token == pytest.approx(0.5)
    assert found.relative_error == pytest.approx(0.392)
    assert learned(Machine(start=5.0), m=m).source == "rapl"


def test_an_answer_that_never_ends_does_not_stop_the_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "LONGEST_S", 100.0)
    m = EnergyMeter()
    m.begin("lost", 0.0)
    assert learned(Machine(), m=m).windows > 100


def test_a_cancelled_prompt_counts_for_what_was_read() -> None:
    m, machine = EnergyMeter(), Machine(answers=(1,), prompts=(1600,))
    for _ in range(30):
        machine.run(m, 5.0, machine.idle_w)
        m.begin("a", machine.now)
        machine.run(m, 3.0, machine.idle_w + machine.prefill_w)
        m.observe_prefill("a", machine.now, 3.0 * PREFILL_TPS)
        m.end("a", machine.now)
    machine.run(m, 3.0, machine.idle_w)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    assert found.prefill_j_per_token == pytest.approx(machine.truth[0], rel=0.05)


def test_answers_side_by_side_share_the_energy() -> None:
    m, machine = EnergyMeter(), Machine()
    for i in range(40):
        machine.run(m, 5.0, machine.idle_w)
        for name in "ab":
            m.begin((name, i), machine.now)
        machine.run(m, 4.0, machine.idle_w + 25.0)
        for name in "ab":
            m.end((name, i), machine.now, 100)
    machine.run(m, 3.0, machine.idle_w)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    assert found.decode_j_per_token == pytest.approx(25.0 * 4 / 200, rel=0.05)


def test_unknown_keys_and_empty_times_do_nothing() -> None:
    m = EnergyMeter()
    m.observe_prefill("x", 1.0, 10)
    m.end("x", 2.0, 10)
    m.begin("y", 3.0)
    m.observe_prefill("y", 3.0, 10)
    m.end("y", 3.0, 10)
    assert m.energy(PREFILL_TPS, DECODE_TPS) is None


def test_the_number_of_sources_is_bounded() -> None:
    m = EnergyMeter()
    for i in range(100):
        m.sample(float(i), PowerReading(f"s{i}", Covers.CPU, 0.1, joules=0.0))
    assert len(m._tracks) == meter.MOST_SOURCES


@pytest.mark.parametrize("speeds", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_speeds_must_be_above_0(speeds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        EnergyMeter().energy(*speeds)


def test_a_power_is_needed_for_from_power() -> None:
    with pytest.raises(ValueError, match="gives no power"):
        meter.from_power(PowerReading("rapl", Covers.CPU, 0.1, joules=1.0), 1.0, 1.0)


def test_work_for_other_machines_is_neither_idle_nor_our_own_tokens() -> None:
    machine, m = Machine(), EnergyMeter()
    for number in range(60):
        machine.run(m, 8.0, machine.idle_w)
        for _ in range(20):  # far longer than it is idle
            machine.run(m, 1.0, machine.idle_w + 25.0)
            m.observe_others(machine.now)
        machine.run(m, 4.0, machine.idle_w)
        if number % 2 == 0:
            machine.answer(m)
        else:  # and one of our own in the middle of it, of which nothing can be told
            m.begin("b", machine.now)
            for _ in range(5):
                machine.run(m, 1.0, machine.idle_w + machine.decode_w + 25.0)
                m.observe_others(machine.now)
            m.end("b", machine.now, 5 * DECODE_TPS)
    found = m.energy(PREFILL_TPS, DECODE_TPS)
    assert found is not None
    assert (found.prefill_j_per_token, found.decode_j_per_token) == pytest.approx(machine.truth, rel=0.1)
    assert found.idle_watts == pytest.approx(machine.idle_w, abs=0.5)
