"""Answers of several LoRA adapters in one engine: they take turns, and none meets what another has computed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_daemon.cli.status import _adapters
from disco_daemon.clock import SystemClock
from disco_daemon.config import layers as config
from disco_daemon.config.schema import AdapterSettings, Config, DeviceSettings
from disco_daemon.daemon.endpoints import make_endpoints
from disco_daemon.endpoints.device import Device
from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.adapters import prefix_key
from disco_daemon.engine.serve.adapter_round_robin import TURN_S, AdapterRoundRobin
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.engine.serve.sequence import Given, Sequence, SequenceStatus
from disco_daemon.errors import ConfigError
from disco_daemon.machines.managed_device import Making
from disco_daemon.scheduler.baselines import RoundRobin
from disco_daemon.scheduler.latency import IterationLatency
from disco_daemon.types import Side
from tests.unit.engine.test_batch import N_SEQS, Cell, FakeLlama, FakeSampler, oracle, tokens_of

NAMES = ("", "one", "two")
N_TOKENS = 256


@dataclass
class AdaptedLlama(FakeLlama):
    """Says another thing under each adapter, and fails when it meets cells that another one has computed."""

    adapters: tuple[str, ...] = NAMES[1:]
    applied: str = ""
    n_changes: int = 0
    made_by: dict[int, str] = field(default_factory=dict)

    def salt(self, adapter: str) -> int:
        return N_TOKENS * NAMES.index(adapter)

    def adapt(self, adapter: str) -> None:
        self.n_changes += adapter != self.applied
        self.applied = adapter

    def share(self, source: int, seq: int, n: int) -> None:
        super().share(source, seq, n)
        self.made_by[seq] = self.made_by[source]

    def save(self, seq: int) -> bytes:
        return bytes([NAMES.index(self.made_by[seq])]) + super().save(seq)

    def restore(self, seq: int, data: bytes) -> bool:
        self.made_by[seq] = NAMES[data[0]]
        return super().restore(seq, data[1:])

    def part(self, seq: int, start: int, end: int) -> bytes:
        return bytes(self.tokens(seq)[start:end])

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> int:
        for token, position, slot, _ in rows:
            assert token < N_TOKENS, "only the prefix index may see a salted token"
            if position == 0:
                self.made_by[slot] = self.applied
            assert self.made_by[slot] == self.applied
        return super().decode(rows)

    def place(self, tokens: Iterable[int]) -> list[Cell]:
        return super().place([token % N_TOKENS for token in tokens])

    def sample(self, sampler: FakeSampler, row: int, among: Any) -> int:
        assert not sampler.closed
        return said(self.logits[row], self.applied)


def said(tokens: list[int], adapter: str) -> int:
    return oracle([*tokens, NAMES.index(adapter)])


class Bench:
    """A batcher over the fake, and what its answers came to."""

    def __init__(self, n_cells: int = 40, tick_s: float = 0.01) -> None:
        self.llama = AdaptedLlama(40, n_cells)
        self.done: dict[str, wire.Done] = {}
        self.asked: dict[str, wire.Generate] = {}
        self.tokens: dict[str, list[int]] = {}
        self.order: list[str] = []
        ticks = iter(range(10**9))
        clock = lambda: tick_s * next(ticks)  # noqa: E731
        latency = IterationLatency((0.01, 0.001, 0.001, 0.0))
        self.cells = Cells(cast(Any, self.llama), N_SEQS, n_cells, clock)
        self.admission = Admission(self.cells, RoundRobin(), latency)
        self.batcher = Batcher(cast(Any, self.llama), cast(Any, self.heard), self.admission, clock)

    def heard(self, message: wire.Message) -> None:
        if isinstance(message, wire.Done):
            self.done[message.id] = message

    def add(self, prompt: str, adapter: str, max_tokens: int = 10) -> Sequence:
        request = wire.Generate(
            id=f"r{len(self.asked)}",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            adapter=adapter,
        )
        self.asked[request.id] = request
        self.batcher.add(request)
        return self.admission.sequences[request.id]

    def step(self) -> bool:
        before = dict(self.admission.sequences)
        busy = self.batcher.step()
        for id_, s in before.items():
            if id_ not in self.admission.sequences:
                self.tokens[id_] = s.tokens
        if busy:
            self.order.append(self.llama.applied)
        return busy

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        pytest.fail("the batcher never comes to rest")

    def expected(self, id_: str) -> list[int]:
        """All tokens of an answer that is alone."""
        request = self.asked[id_]
        tokens = tokens_of(request.messages[0]["content"])
        for _ in range(cast(int, request.max_tokens)):
            token = said(tokens, request.adapter)
            if token == 0 or len(tokens) >= 40:
                break
            tokens.append(token)
        return tokens


# --- turns --------------------------------------------------------------------------------------------------------


def waiting(adapter: str) -> Sequence:
    given = Given(prompt=[], text="", tokens=[], exact=False, n_first=0)
    return Sequence(
        request=wire.Generate(id="", messages=[], adapter=adapter),
        given=given,
        timeline=cast(Any, None),
        waiting_since=None,
        status=SequenceStatus.RUNNING,
    )


def test_who_is_alone_keeps_the_turn() -> None:
    turns, ours = AdapterRoundRobin(), [waiting("a"), waiting("a")]
    for i in range(100):
        assert turns.select(ours, i * TURN_S) == ours


def test_a_turn_is_as_long_as_the_change_is_worth_and_then_it_is_the_next_ones() -> None:
    turns, all_three = AdapterRoundRobin("", 0.0), [waiting(name) for name in ("", "a", "b")]
    served = [turns.select(all_three, i * (TURN_S / 4 + 1e-9))[0].request.adapter for i in range(48)]
    assert served == 4 * (4 * [""] + 4 * ["a"] + 4 * ["b"])


def test_nobody_waits_for_one_who_has_nothing_to_compute() -> None:
    turns, a, b = AdapterRoundRobin("a", 0.0), waiting("a"), waiting("b")
    assert turns.select([a, b], TURN_S / 2) == [a]
    a.status = SequenceStatus.PAUSED
    assert turns.select([a, b], TURN_S / 2) == [b]
    assert turns.select([a], TURN_S / 2) == [], "and nothing is done where nothing is to do"


@given(st.lists(st.sets(st.sampled_from("abcde")), max_size=60))
def test_who_wants_it_gets_its_turn_before_anybody_has_had_two(wants: list[set[str]]) -> None:
    turns, since = AdapterRoundRobin(), dict.fromkeys("abcde", 0)
    for i, names in enumerate(wants):
        served = {s.request.adapter for s in turns.select([waiting(name) for name in sorted(names)], i * 1.01 * TURN_S)}
        assert len(served) == bool(names)
        for name in "abcde":
            since[name] = since[name] + 1 if name in names - served else 0
            assert since[name] < 5


# --- the engine ---------------------------------------------------------------------------------------------------


def test_a_prefix_is_of_use_under_its_own_adapter_only() -> None:
    bench = Bench(n_cells=200)
    bench.llama.skip_s = 0.0  # nothing is put away
    for adapter in NAMES:
        bench.add("abcdefgh", adapter)
        bench.drain()
    assert [done.n_cached for done in bench.done.values()] == [0, 0, 0]
    for adapter in NAMES:
        s = bench.add("abcdefgh", adapter)
        assert bench.cells.count_cached(prefix_key(tokens_of("abcdefgh"), s.salt)) == 8
        bench.drain()
    assert [done.n_cached for done in bench.done.values()] == [0, 0, 0, 7, 7, 7]
    assert all(bench.tokens[id_] == bench.expected(id_) for id_ in bench.asked)


def test_no_two_adapters_have_a_first_token_in_common() -> None:
    firsts = [prefix_key([token, 9], n * N_TOKENS)[0] for n in range(4) for token in range(N_TOKENS)]
    assert len(set(firsts)) == len(firsts)
    assert prefix_key([], N_TOKENS) == []
    assert prefix_key([3, 4], 0) == [3, 4]


def test_answers_of_all_adapters_are_computed_in_turns() -> None:
    bench = Bench(n_cells=200, tick_s=TURN_S / 50)
    for adapter in 2 * NAMES:
        bench.add("ab", adapter, max_tokens=30)
    bench.drain()
    assert set(bench.order) == set(NAMES)
    assert bench.llama.n_changes < len(bench.order) / 2, "a turn is more than one iteration"
    assert all(bench.tokens[id_] == bench.expected(id_) for id_ in bench.asked)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(["ab", "abc", "abcdefghij", "b"]), st.sampled_from(NAMES)),
            st.tuples(st.just("step"), st.integers(1, 8), st.just("")),
            st.tuples(st.just("preempt"), st.integers(0, 9), st.just("")),
            st.tuples(st.just("cancel"), st.integers(0, 9), st.just("")),
            st.tuples(st.just("tidy"), st.just(0), st.just("")),
        ),
        max_size=30,
    )
)
def test_whatever_happens_each_answer_is_what_its_adapter_says(steps: list[tuple[str, Any, str]]) -> None:
    bench, cancelled = Bench(n_cells=60), set()
    for op, what, adapter in steps:
        running = bench.admission.resident
        if op == "add":
            bench.add(what, adapter)
        elif op == "step":
            for _ in range(what):
                bench.step()
        elif op == "preempt" and running:
            bench.cells.swap_s_per_byte = 1e-12 if what % 2 else 1.0  # swapped, or computed again
            bench.admission.preempt(running[what % len(running)])
        elif op == "cancel" and running:
            id_ = running[what % len(running)].request.id
            cancelled.add(id_)
            bench.batcher.cancel(id_)
        elif op == "tidy":
            bench.cells.tidy()
    bench.drain()
    for id_ in bench.asked:
        assert id_ in cancelled or bench.tokens[id_] == bench.expected(id_)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_an_adapter_is_a_path_or_a_table(path: Path) -> None:
    path.write_text('[device.adapters]\npirate = "/p.gguf"\n[device.adapters.poet]\npath = "/q.gguf"\nscale = 0.5\n')
    found = config.load(path, {})
    assert found.device.adapters == {"pirate": "/p.gguf", "poet": AdapterSettings("/q.gguf", 0.5)}
    assert json.dumps(config.get_value(found, "device.adapters"))
    assert config.as_dict(found)["device"]["adapters"]["poet"] == {"path": "/q.gguf", "scale": 0.5}


def test_adapters_may_be_set_by_a_command_or_a_variable(path: Path) -> None:
    text = '{pirate = "/p.gguf", poet = {path = "/q.gguf", scale = 2}}'
    wanted = {"pirate": "/p.gguf", "poet": AdapterSettings("/q.gguf", 2.0)}
    assert config.set_values(path, {"device.adapters": text}).device.adapters == wanted
    assert config.load(path, {}).device.adapters == wanted
    assert config.load(path.with_name("none"), {"DISCO_DEVICE_ADAPTERS": text}).device.adapters == wanted


@pytest.mark.parametrize(
    "text",
    ['{"a b" = "/p"}', "{a = 1}", '{a = {path = "/p", scale = nan}}', '{a = {file = "/p"}}', "/p.gguf", '{"" = "/p"}'],
)
def test_what_is_no_table_of_adapters_is_refused(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.adapters"):
        config.set_values(path, {"device.adapters": text})
    assert not path.exists()


def test_another_server_in_the_devices_place_has_its_own_adapters() -> None:
    device = DeviceSettings(model="m", base_url="http://127.0.0.1:1/v1", adapters={"a": "/p"})
    with pytest.raises(ConfigError, match=r"device\.adapters"):
        config.require_complete(Config(device=device))


def test_the_engine_is_given_them_with_their_scales(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    settings = DeviceSettings(model=str(tmp_path / "m.gguf"), adapters={"a": "~/p", "b": AdapterSettings("/q", 0.5)})
    device = make_endpoints(Config(device=settings), Making(SystemClock()))[Side.DEVICE]
    assert isinstance(device, Device)
    assert device.adapters == {"a": "", "b": ""}
    assert device._engine.config.adapters == (
        wire.AdapterFile(name="a", path=str(Path.home() / "p")),
        wire.AdapterFile(name="b", path="/q", scale=0.5),
    )


def test_status_tells_which_are_there_and_which_are_not() -> None:
    assert _adapters({"adapters": {}}) == _adapters({}) == []
    assert _adapters({"adapters": {"a": "", "b": "/p: no such file", "c": ""}}) == [
        "adapters     disco/device:a, disco/device:c",
        "             not b: /p: no such file",
    ]
