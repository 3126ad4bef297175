"""The tune's choice, its file, who wins over it, and when it runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from disco_daemon.cli.tune import copy_path
from disco_daemon.clock import SystemClock
from disco_daemon.config import layers as config
from disco_daemon.config.schema import Config
from disco_daemon.engine import wire
from disco_daemon.engine.measure.search import Search, thread_counts
from disco_daemon.engine.measure.tune_messages import Knobs, Speed, Tuned, TuneJob
from disco_daemon.engine.supervisor import Engine
from disco_daemon.errors import ConfigError
from disco_daemon.machines import device_settings
from disco_daemon.machines.device_settings import (
    engine_knobs,
    is_exact,
    is_exact_but_for_rounding,
    job_for,
    knobs_for,
    make_autotuner,
    n_gpu_layers,
    save,
)
from disco_daemon.profiling import tuned_profile
from disco_daemon.profiling.autotuner import Autotuner, TuneError
from disco_daemon.profiling.tuned_profile import TunedProfiles, Wanted, choose_knobs, key_of
from tests.fixtures.gguf import header, tensor

START = Knobs(3, 3, 512)
SPEED = Speed(1000.0, 50.0, 120.0)
TUNED = Tuned(Knobs(2, 4, 256, False), SPEED, SPEED, [], 1.0, True, 3)
JOB = TuneJob("m.gguf", 4, START)


# --- the choice ---------------------------------------------------------------------------------------------------


def machine(cost: Callable[[Knobs, str, bool], float], n_cores: int = 4, **more: bool) -> Knobs:
    """What the search finds on a machine where work takes so long."""
    start = Knobs(max(1, n_cores - 1), max(1, n_cores - 1), 512)
    return Search(cost, lambda: False).best(start, n_cores, **{"flash": True, "long": True} | more)


def ideal(knobs: Knobs, work: str, busy: bool) -> float:
    """More threads are faster, and nobody disturbs."""
    del busy
    return 1 / (knobs.n_threads if work == "decode" else knobs.n_threads_batch)


def test_all_cores_where_they_help_also_beside_others() -> None:
    assert machine(ideal) == Knobs(4, 4, 512)


def test_one_core_stays_free_where_another_process_stops_all_threads() -> None:
    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        n = knobs.n_threads if work == "decode" else knobs.n_threads_batch
        return ideal(knobs, work, busy) * (10 if busy and n == 4 and work == "decode" else 1)

    assert machine(cost) == Knobs(3, 4, 512), "prefill is not hurt there, and keeps the core"


def test_of_equals_the_fewest_threads_and_llama_cpps_micro_batch() -> None:
    assert machine(lambda knobs, work, busy: 1.0) == Knobs(1, 1, 512)
    assert machine(lambda knobs, work, busy: 1.02 if knobs.n_threads == 1 else 1.0).n_threads == 1
    assert machine(lambda knobs, work, busy: 1.05 if knobs.n_threads == 1 else 1.0).n_threads == 2


def test_memory_bound_writing_and_compute_bound_reading_get_different_threads() -> None:
    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        return max(0.5, ideal(knobs, work, busy)) if work == "decode" else ideal(knobs, work, busy)

    assert machine(cost) == Knobs(2, 4, 512)


def test_attention_without_flash_only_if_it_is_much_faster_and_allowed() -> None:
    def cost(gain: float) -> Callable[[Knobs, str, bool], float]:
        return lambda knobs, work, busy: ideal(knobs, work, busy) / (gain if knobs.flash_attn is False else 1)

    assert machine(cost(1.2)).flash_attn is False
    assert machine(cost(1.08)).flash_attn is None
    assert machine(cost(1.2), flash=False).flash_attn is None


def test_a_smaller_micro_batch_where_it_is_faster_and_prompts_are_quick_enough_to_try() -> None:
    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        return ideal(knobs, work, busy) * (1 + abs(knobs.n_ubatch - 128) / 1000 if work == "long" else 1)

    assert machine(cost).n_ubatch == 128
    assert machine(cost, long=False).n_ubatch == 512


@pytest.mark.parametrize(("reads", "writes", "plain"), [(1.36, 1.0, True), (1.36, 0.7, False), (1.05, 1.0, False)])
def test_weights_stay_as_in_the_file_where_that_is_faster_on_the_whole(
    reads: float, writes: float, plain: bool
) -> None:
    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        gain = {"decode": writes}.get(work, reads)
        return ideal(knobs, work, busy) / (1 if knobs.repack else gain)

    search = Search(cost, lambda: False)
    assert search.layout(START).repack is not plain
    assert search.best(search.layout(START), 4, flash=False, long=True).repack is not plain
    assert Search(cost, lambda: True).layout(START) == START


def test_other_work_that_ends_between_two_layouts_does_not_decide() -> None:
    """Until the second layout is in memory everything takes twice as long."""
    seen: set[bool] = set()

    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        seen.add(knobs.repack)
        return ideal(knobs, work, busy) * (2 if len(seen) == 1 else 1)

    assert Search(cost, lambda: False).layout(START) == START


def test_a_burst_of_other_work_does_not_decide() -> None:
    """One sample of three takes half as long again, of another candidate each time."""
    calls = iter(range(10_000))

    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        return ideal(knobs, work, busy) * (1.5 if next(calls) % 3 == 1 else 1)

    assert machine(cost).n_threads_batch == 4


def test_a_choice_that_is_not_faster_on_the_whole_is_dropped() -> None:
    """Two knobs that are good each for itself, and bad together."""

    def cost(knobs: Knobs, work: str, busy: bool) -> float:
        together = knobs.flash_attn is False and knobs.n_ubatch == 128
        return (9 if together and work == "prefill" else 1) * (
            (0.5 if knobs.flash_attn is False else 1) if work == "prefill" else (knobs.n_ubatch / 512)
        )

    assert Search(cost, lambda: False).best(START, 1, flash=True, long=True) == START


def test_when_the_time_is_up_what_is_undecided_stays() -> None:
    left = iter([False] * 8 + [True] * 1000)
    search = Search(ideal, lambda: next(left))
    assert search.best(START, 4, flash=True, long=True) == START
    assert not search.complete
    assert sum(row.n for row in search.rows()) == 8


def test_a_single_core_needs_no_search_for_threads() -> None:
    assert machine(ideal, 1) == Knobs(1, 1, 512)


@pytest.mark.parametrize(
    ("n", "counts"),
    [
        (1, [1]),
        (2, [1, 2]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, [1, 2, 4, 8, 12, 15, 16]),
        (10, [1, 2, 4, 5, 7, 8, 9, 10]),
    ],
)
def test_thread_counts_worth_trying(n: int, counts: list[int]) -> None:
    assert thread_counts(n) == counts


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_profile_is_found_again_as_it_was_written(tmp_path: Path, model: Path) -> None:
    profiles = TunedProfiles(tmp_path / "profiles" / "devices")
    key = key_of(model, exact=False, kv_type="auto", gpu_layers="auto")
    path = profiles.save(key, TUNED, "2026-11-22")
    found = profiles.load(key)
    assert found is not None
    assert (found.knobs, found.speed, found.measured) == (TUNED.knobs, SPEED, "2026-11-22")
    assert path.name.startswith("tiny.Q4_1-")
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing unfinished is left"


def test_a_changed_model_is_measured_again_and_takes_the_old_ones_place(tmp_path: Path, model: Path) -> None:
    profiles = TunedProfiles(tmp_path / "p")
    key = key_of(model, exact=False, kv_type="auto")
    profiles.save(key, TUNED, "d")
    os.utime(model, ns=(1, 1))
    changed = key_of(model, exact=False, kv_type="auto")
    assert profiles.load(changed) is None
    assert profiles.path(changed) == profiles.path(key)
    model.write_bytes(b"GGUF, longer")
    assert profiles.load(key_of(model, exact=False, kv_type="auto")) is None


@pytest.mark.parametrize(
    "change", [{"cpu": "another"}, {"n_cores": 99}, {"llama_cpp": "0"}, {"exact": True}, {"kv_type": "q8_0"}]
)
def test_a_profile_of_something_else_is_not_used(tmp_path: Path, model: Path, change: dict[str, object]) -> None:
    import msgspec

    profiles = TunedProfiles(tmp_path / "p")
    key = key_of(model, exact=False, kv_type="auto")
    profiles.save(key, TUNED, "d")
    other = msgspec.structs.replace(key, **change)
    assert profiles.load(other) is None
    profiles.path(other).write_text(profiles.path(key).read_text())
    assert profiles.load(other) is None, "nor if it lies in its place"


@pytest.mark.parametrize("text", ["", "not TOML", "[key]\nmodel = 1\n", "\xff"])
def test_a_damaged_profile_is_none(tmp_path: Path, model: Path, text: str) -> None:
    profiles = TunedProfiles(tmp_path)
    key = key_of(model, exact=False, kv_type="auto")
    profiles.path(key).write_text(text, "latin-1")
    assert profiles.load(key) is None


def test_the_cpu_has_a_name() -> None:
    assert tuned_profile.cpu_name()


# --- who wins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "tuned", "cores", "knobs"),
    [
        (Wanted(), None, 8, Knobs(7, 7, 512)),
        (Wanted(), None, 1, Knobs(1, 1, 512)),
        (Wanted(), TUNED.knobs, 8, TUNED.knobs),
        (Wanted(n_threads=5), None, 8, Knobs(5, 5, 512)),
        (Wanted(n_threads=5), TUNED.knobs, 8, Knobs(5, 5, 256, False)),
        (Wanted(n_threads_batch=6), TUNED.knobs, 8, Knobs(2, 6, 256, False)),
        (Wanted(5, 6, 128, True), TUNED.knobs, 8, Knobs(5, 6, 128, True)),
    ],
)
def test_settings_win_over_the_profile_and_that_over_defaults(
    wanted: Wanted, tuned: Knobs | None, cores: int, knobs: Knobs
) -> None:
    assert choose_knobs(wanted, tuned, cores) == knobs


def configured(text: str, tmp_path: Path) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return config.load(path, {})


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("disco_daemon.machines.device_settings.data_path", lambda: tmp_path / "data")
    return tmp_path


def test_the_engine_gets_the_profile_that_fits(at_home: Path, model: Path) -> None:
    settings = configured(f"[device]\nmodel = '{model}'\nrounding = 'fast'\n", at_home)
    save(settings, model, TUNED)
    assert knobs_for(settings, model) == TUNED.knobs
    exact = configured(f"[device]\nmodel = '{model}'\nrounding = 'exact'\n", at_home)
    assert knobs_for(exact, model).flash_attn is None, "what was measured without exactness is another thing"


def test_what_is_exact_computes_on_the_cpu_and_with_flash_attention(at_home: Path) -> None:
    exact = configured("[device]\nrounding = 'exact'\n", at_home)
    assert (is_exact(exact, at_home), n_gpu_layers(exact.device)) == (True, 0)
    auto = configured("[device]\nflash_attn = 'off'\n[server]\nbase_url = 'http://h/v1'\nmodel = 'm'\n", at_home)
    assert (is_exact(auto, at_home), n_gpu_layers(auto.device)) == (False, None)
    some = configured("[device]\nn_gpu_layers = 7\n", at_home)
    assert n_gpu_layers(some.device) == 7


def with_avx2(monkeypatch: pytest.MonkeyPatch, *, there: bool, amx: bool = False) -> None:
    monkeypatch.setattr("disco_daemon.machines.device_settings.has_avx2", lambda: there)
    monkeypatch.setattr("disco_daemon.machines.device_settings.has_amx", lambda: amx)


@pytest.mark.parametrize(
    ("packing", "rounding", "avx2", "tried"),
    [
        (12, "fast", False, True),
        (12, "fast", True, False),
        (11, "fast", True, True),
        (8, "fast", False, False),
        (12, "exact", False, False),
    ],
)
def test_the_layout_of_weights_is_measured_where_there_are_two_and_no_bit_counts(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, packing: int, rounding: str, avx2: bool, tried: bool
) -> None:
    with_avx2(monkeypatch, there=avx2)
    model = at_home / "m.gguf"
    model.write_bytes(header(tensors=[tensor("blk.0.ffn_up.weight", (256, 256), packing)]))
    settings = configured(f"[device]\nmodel = '{model}'\nrounding = '{rounding}'\n", at_home)
    assert job_for(settings, model).layouts is tried
    save(settings, model, Tuned(Knobs(2, 2, 512, repack=False), SPEED, SPEED, [], 1.0, True, 3))
    knobs = knobs_for(settings, model)
    assert (knobs.repack, engine_knobs(knobs)["repack"]) == (False, False)


@pytest.mark.parametrize(
    ("packing", "avx2", "auto", "but_for_rounding"),
    [
        (2, False, True, False),
        (8, False, True, False),
        (12, False, False, False),
        (12, True, True, False),
        (11, True, False, False),
        (1, False, False, True),
        (1, True, True, False),
    ],
)
def test_answers_are_exact_by_themselves_where_that_slows_no_prompt_down(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, packing: int, avx2: bool, auto: bool, but_for_rounding: bool
) -> None:
    with_avx2(monkeypatch, there=avx2)
    weights = [tensor("blk.0.ffn_up.weight", (256, 256), packing), tensor("blk.0.ffn_norm.weight", (256,), 0)]
    (at_home / "m.gguf").write_bytes(header(tensors=weights))
    server = "[server]\nbase_url = 'http://h/v1'\nmodel = 'm'\n"
    assert is_exact(configured(server, at_home), at_home / "m.gguf") is auto
    assert not is_exact(configured("", at_home), at_home / "m.gguf"), "nobody takes such an answer over"
    wanted = configured("[device]\nrounding = 'exact'\n", at_home)
    assert is_exact(wanted, at_home / "m.gguf")
    assert is_exact_but_for_rounding(wanted, at_home / "m.gguf") is but_for_rounding


@pytest.mark.parametrize(
    ("content", "avx2", "ours"),
    [
        (b"\0disco_products\0", True, True),
        (b"\0_disco_products\0", True, True),
        (b"\0disco_products\0", False, False),
        (b"\0llamafile_sgemm\0", True, False),
        (None, True, True),
    ],
)
def test_a_llama_cpp_that_was_not_compiled_here_is_not_taken_for_ours(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, avx2: bool, ours: bool
) -> None:
    with_avx2(monkeypatch, there=avx2)
    monkeypatch.setattr(device_settings, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[at_home]))
    if content is not None:
        (at_home / "lib").mkdir()
        (at_home / "lib" / "libggml-cpu.so.0").write_bytes(b"\x7fELF" + content)
        (at_home / "lib" / "libggml-cpu.so").symlink_to("libggml-cpu.so.0")
        (at_home / "lib" / "libggml-base.so").write_bytes(b"\0disco_products\0")
    (at_home / "m.gguf").write_bytes(header(tensors=[tensor("blk.0.ffn_up.weight", (256, 256), 12)]))
    server = "[server]\nbase_url = 'http://h/v1'\nmodel = 'm'\n"
    assert is_exact(configured(server + "[device]\nn_gpu_layers = 0\n", at_home), at_home / "m.gguf") is ours


@pytest.mark.parametrize(("packing", "auto"), [(2, True), (12, False)])
def test_with_amx_weights_that_it_reads_faster_are_not_exact_by_themselves(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, packing: int, auto: bool
) -> None:
    with_avx2(monkeypatch, there=True, amx=True)
    (at_home / "m.gguf").write_bytes(header(tensors=[tensor("blk.0.ffn_up.weight", (256, 256), packing)]))
    settings = configured("[server]\nbase_url = 'http://h/v1'\nmodel = 'm'\n", at_home)
    assert is_exact(settings, at_home / "m.gguf") is auto


@pytest.mark.parametrize(("gpu", "layers", "auto"), [(True, '"auto"', False), (True, "0", True), (False, "-1", True)])
def test_what_a_gpu_may_compute_is_not_exact_by_itself(
    at_home: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, layers: str, auto: bool
) -> None:
    monkeypatch.setattr("disco_daemon.machines.device_settings.is_for_gpu", lambda: gpu)
    (at_home / "m.gguf").write_bytes(header(tensors=[tensor("blk.0.ffn_up.weight", (256, 256), 8)]))
    server = "[server]\nbase_url = 'http://h/v1'\nmodel = 'm'\n"
    settings = configured(f"{server}[device]\nn_gpu_layers = {layers}\n", at_home)
    assert is_exact(settings, at_home / "m.gguf") is auto


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("flash_attn = 'off'\nrounding = 'exact'", "rounding"),
        ("flash_attn = 'off'\nkv_type = 'q8_0'", "kv_type"),
        ("n_ubatch = 1000", "n_ubatch"),
        ("kv_type = 'q4_0'", "kv_type"),
        ("n_gpu_layers = -2", "n_gpu_layers"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(at_home: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(f"[device]\n{text}\n", at_home)


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q8_0.gguf"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m.Q8_0.gguf"),
        ("model-IQ2_XXS.gguf", "model.Q8_0.gguf"),
        ("model.gguf", "model.Q8_0.gguf"),
        ("model.Q8_0.gguf", "model.Q8_0.gguf"),
    ],
)
def test_where_a_copy_belongs(name: str, copy: str) -> None:
    assert copy_path(Path("/models") / name) == Path("/models") / copy


# --- when it runs -------------------------------------------------------------------------------------------------


class Tune:
    """Stands for the child process: it measures until it is let go or ended."""

    def __init__(self) -> None:
        self.begun, self.go, self.killed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.n_begun = self.n_killed = 0
        self.error: TuneError | None = None

    async def __call__(self, job: TuneJob, progress: Callable[[str], None]) -> Tuned:
        self.n_begun += 1
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.n_killed += 1
            self.killed.set()
            raise
        if self.error is not None:
            raise self.error
        return TUNED


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    stand_in = Tune()
    monkeypatch.setattr("disco_daemon.profiling.autotuner.run_tune", stand_in)
    return stand_in


def tuner(busy: list[bool], adopted: list[Tuned]) -> Autotuner:
    return Autotuner(
        JOB, lambda: busy[0], adopted.append, SystemClock(), idle_s=0.01, undisturbed=lambda: True
    )  # fmt: skip


async def test_it_runs_once_and_the_result_is_kept(tune: Tune) -> None:
    adopted: list[Tuned] = []
    made = tuner([False], adopted)
    tune.go.set()
    await made.run()
    assert (adopted, made.state, tune.n_begun) == ([TUNED], "done", 1)


async def test_a_request_ends_it_and_it_tries_again(tune: Tune) -> None:
    adopted: list[Tuned] = []
    busy = [False]
    made = tuner(busy, adopted)
    task = asyncio.create_task(made.run())
    await tune.begun.wait()
    tune.begun.clear()
    busy[0] = True
    await tune.killed.wait()
    assert adopted == []
    busy[0] = False
    await tune.begun.wait()
    tune.go.set()
    await task
    assert (adopted, tune.n_begun, tune.n_killed) == ([TUNED], 2, 1)


async def test_it_gives_up_when_it_is_always_broken_off(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_daemon.profiling.autotuner.MAX_TRIES", 2)
    monkeypatch.setattr("disco_daemon.system.idle.LOOK_S", 0.001)
    began = -1

    def busy() -> bool:  # a request comes as soon as it has begun
        nonlocal began
        began, before = tune.n_begun, began
        return before != began and began > 0

    adopted: list[Tuned] = []
    made = Autotuner(JOB, busy, adopted.append, SystemClock(), idle_s=0.002, undisturbed=lambda: True)
    async with asyncio.timeout(30):
        await made.run()
    assert (made.n_tries, tune.n_killed) == (2, 2)


async def test_it_does_not_begin_on_a_battery_or_beside_other_work(tune: Tune) -> None:
    asked = 0
    often = asyncio.Event()

    def undisturbed() -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:
            often.set()
        return False

    adopted: list[Tuned] = []
    made = Autotuner(JOB, lambda: False, adopted.append, SystemClock(), idle_s=0.01, undisturbed=undisturbed)
    task = asyncio.create_task(made.run())
    await often.wait()
    assert (made.state, tune.n_begun) == ("waiting", 0)
    task.cancel()
    await asyncio.wait([task])


async def test_a_model_that_cannot_be_measured_is_not_tried_again(tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    tune.error = TuneError("no memory")
    tune.go.set()
    made = tuner([False], [])
    await made.run()
    assert (made.state, tune.n_begun) == ("failed", 1)
    assert "no memory" in caplog.text


async def test_shutdown_ends_the_measurement(tune: Tune) -> None:
    task = asyncio.create_task(tuner([False], []).run())
    await tune.begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert tune.n_killed == 1


@pytest.mark.parametrize(
    ("text", "known", "runs"),
    [
        ("", False, True),
        ("", True, False),
        ("autotune = false", False, False),
        ("n_threads = 2", False, False),
        ("n_ubatch = 256", False, True),
    ],
)
def test_who_is_tuned_by_itself(at_home: Path, model: Path, text: str, known: bool, runs: bool) -> None:
    settings = configured(f"[device]\nmodel = '{model}'\n{text}\n", at_home)
    if known:
        save(settings, model, TUNED)
    clock = SystemClock()
    engine = Engine(wire.Load(model_path=str(model), n_ctx=512, n_threads=1), clock)
    made = make_autotuner(settings, engine, lambda: False, clock)
    assert (made is not None) == runs


def test_a_result_is_for_the_next_start_of_the_engine(at_home: Path, model: Path) -> None:
    settings = configured(f"[device]\nmodel = '{model}'\n", at_home)
    clock = SystemClock()
    engine = Engine(wire.Load(model_path=str(model), n_ctx=512, n_threads=1), clock)
    made = make_autotuner(settings, engine, lambda: False, clock)
    assert made is not None
    made._adopt(TUNED)
    now = engine.config
    assert (now.n_threads, now.n_threads_batch, now.n_ubatch, now.flash_attn) == (2, 4, 256, False)
    assert now.n_ctx == 512
    assert knobs_for(settings, model) == TUNED.knobs
