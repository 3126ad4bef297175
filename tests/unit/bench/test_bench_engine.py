"""`disco bench engine` and `benchmarks.engine`: times and answers of scripted servers; real ones are in tests/e2e."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks import llama_server
from benchmarks.command import run_script
from benchmarks.engine import limits
from benchmarks.engine.__main__ import PEER, by_processor
from disco_daemon.bench import engine, engine_chats, streamed
from disco_daemon.bench.child import BenchError, child_process
from disco_daemon.bench.engine import OURS, Bench, EngineSetup
from disco_daemon.bench.loopback import LoopbackServer
from disco_daemon.bench.script import Exchange
from disco_daemon.bench.streamed import Chat, Door, StreamedAnswer, ask, rate_together, rate_whole, worst_gap
from tests.fixtures.upstream import Upstream

TEMPLATE = 9  # tokens that a chat template adds, in these tests


def answer(begin: float, end: float, n_pieces: int, n_tokens: int | None = None) -> StreamedAnswer:
    """Pieces evenly from `begin` to `end`."""
    step = (end - begin) / (n_pieces - 1)
    times = [begin + i * step for i in range(n_pieces)]
    return StreamedAnswer(0.0, times, "", "length", {"completion_tokens": n_tokens or n_pieces}, end)


async def words(chat: Chat) -> int:
    """A tokenizer: a word is a token."""
    return TEMPLATE + sum(len(m["content"].split()) for m in chat)


class Scripted(LoopbackServer):
    """A scripted daemon with a state. If `stalled`, answers stop after their 10th piece until a long prompt comes."""

    def __init__(self, *, tokens: int, stalled: bool = False) -> None:
        super().__init__(tokens=tokens)
        self.device: dict[str, Any] = {}
        self.stalled = stalled
        self.long = asyncio.Event()
        self._runner.app.router.add_get("/disco/v1/state", self.state)

    async def state(self, request: web.Request) -> web.Response:
        """GET /disco/v1/state."""
        return web.json_response({"endpoints": {"device": self.device}})

    def on_request(self, exchange: Exchange) -> None:
        """A long prompt ends the stall."""
        if exchange.usage()["prompt_tokens"] > 1000:
            self.long.set()
            self.device = {"chunks": self.device.get("chunks", 0) + 4, "chunks_s": self.device.get("chunks_s", 0) + 2}

    async def before(self, request: web.Request, response: web.StreamResponse, exchange: Exchange, i: int) -> None:
        """The stall."""
        if self.stalled and i == 10:
            await self.long.wait()
        await super().before(request, response, exchange, i)


class Stage:
    """Two scripted servers and a bench between them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.servers: dict[str, Scripted] = {}
        self.said: list[str] = []

    async def bench(self, setup: EngineSetup, names: tuple[str, ...] = (OURS, PEER), **changes: Any) -> Bench:
        """Start the servers."""
        doors = {}
        for name in names:
            self.servers[name] = await self.stack.enter_async_context(Scripted(**{"tokens": 400} | changes))
            session = await self.stack.enter_async_context(aiohttp.ClientSession())
            doors[name] = Door(name, self.servers[name].url, session)
        return Bench(doors, setup, words, self.said.append)

    def prompts(self, name: str) -> list[str]:
        """All that was asked at one door, as JSON."""
        return [json.dumps(e.body["messages"]) for e in self.servers[name].exchanges]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(stack)


# --- times ------------------------------------------------------------------------------------------------------------


def test_rate_together_counts_only_what_comes_while_all_answers_run() -> None:
    a, b = answer(1.0, 11.0, 101), answer(3.0, 9.0, 61)  # 10 token/s each, together from 3 to 9 s
    assert rate_together([a, b]) == pytest.approx(20, rel=0.02)
    assert rate_together([a]) == pytest.approx(10)


def test_answers_one_after_the_other_have_no_rate_together() -> None:
    assert rate_together([answer(1.0, 2.0, 11), answer(3.0, 4.0, 11)]) is None
    assert rate_together([answer(0.0, 10.0, 101), answer(9.5, 20.0, 106)]) is None  # 12 of 207 tokens


def test_a_piece_of_several_tokens_counts_as_many() -> None:
    assert rate_together([answer(0.0, 10.0, 11, n_tokens=44)]) == pytest.approx(4.0)


def test_the_whole_rate_has_waiting_and_prefill_in_it() -> None:
    assert rate_whole([answer(1.0, 2.0, 10), answer(3.0, 5.0, 10)]) == pytest.approx(20 / 5)


def test_worst_gap_looks_at_gaps_that_overlap_the_disturbance() -> None:
    times = [0.0, 5.0, 6.0, 9.0, 10.0, 20.0]
    assert worst_gap(times, 6.5, 9.5) == 3.0  # begun before the prompt came, ended while it was prefilled
    assert worst_gap(times, 6.5, 10.5) == 10.0  # ended after it
    assert worst_gap(times, 21.0, 22.0) == 0.0


# --- what the state tells ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "share"),
    [
        ([{}], None),
        ([{}, {}], None),
        ([{}, {"python_share": 0.03}], 0.03),
        ([{"python_share": 0.9}, {"python_share": 0.02}, {"python_share": 0.5}, {"python_share": 0.03}], 0.03),
        # No further iteration yet: still what was told before the run.
        ([{"iterations": 7}, {"iterations": 7, "python_share": 0.9}, {"iterations": 8, "python_share": 0.1}], 0.1),
        ([{"python_s": 5.0, "busy_s": 5.0}, {"python_s": 5.5, "busy_s": 14.5, "python_share": 0.2}], 0.05),
        ([{"python_s": 5.0, "busy_s": 5.0}, {"python_s": 5.0, "busy_s": 5.0}], None),
    ],
)
def test_pythons_share_is_that_of_the_measured_time(states: list[dict[str, float]], share: float | None) -> None:
    assert engine.python_share(states) == share


def test_the_device_is_found_in_the_state_wherever_it_is() -> None:
    state = {"endpoints": {"device": {"state": "ready", "engine": {"iterations": 3}}}, "device": {"python_share": 0.1}}
    found = streamed.device_state(state)
    assert (found["state"], found["iterations"], found["python_share"]) == ("ready", 3, 0.1)
    assert streamed.device_state({"endpoints": {"device": {"engine": None}}}) == {"engine": None}
    assert streamed.device_state({}) == {}


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [32, 512, 2048])
async def test_a_sized_prompt_has_exactly_its_length(n_tokens: int) -> None:
    assert await words(await engine_chats.chat_of_length(n_tokens, 17, words)) == n_tokens


async def test_a_tokenizer_that_splits_words_still_gets_the_length() -> None:
    async def pieces(chat: Chat) -> int:
        return TEMPLATE + sum(1 + len(word) // 4 for m in chat for word in m["content"].split())

    assert [await pieces(await engine_chats.chat_of_length(n, 3, pieces)) for n in (40, 333)] == [40, 333]


async def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(BenchError, match="template"):
        await engine_chats.chat_of_length(TEMPLATE, 0, words)


def test_no_two_prompts_begin_alike() -> None:
    first = [engine_chats.story(i)[0]["content"] for i in range(2000)]
    assert len(set(first)) == len(first)
    assert first[0].split()[0] != first[1].split()[0]


# --- one answer -------------------------------------------------------------------------------------------------------


async def test_an_answer_is_timed_and_counted() -> None:
    async with LoopbackServer(tokens=40) as server, aiohttp.ClientSession() as session:
        heard = await ask(Door(OURS, server.url, session), engine_chats.story(1), 12)
    assert (heard.n_tokens, len(heard.times), heard.finish) == (12, 12, "length")
    assert heard.sent < heard.first <= heard.times[-1] <= heard.ended
    assert heard.text.startswith("Write a long story")
    assert heard.settled.is_set()


async def test_faults_of_a_server_end_the_measurement() -> None:
    async with Upstream(tokens=8) as upstream, aiohttp.ClientSession() as session:
        door = Door(PEER, upstream.url, session)
        with upstream.status(500), pytest.raises(BenchError, match="peer answered 500"):
            await ask(door, engine_chats.story(1), 8)
        with upstream.close_without_finish(3), pytest.raises(BenchError, match="finish_reason"):
            await ask(door, engine_chats.story(1), 8)
        with upstream.error_event_after(3), pytest.raises(BenchError, match="carried an error"):
            await ask(door, engine_chats.story(1), 8)


# --- the measurements -------------------------------------------------------------------------------------------------


async def test_throughput_asks_both_the_same_things_in_turn(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=3, max_tokens=200))
    found = await bench.throughput(4)
    assert sorted(stage.prompts(OURS)) == sorted(stage.prompts(PEER))
    assert len(set(stage.prompts(OURS))) == 12
    assert found["measure"] == "decode"
    assert found["ratio"] == pytest.approx(found["tps"][OURS] / found["tps"][PEER], rel=1e-3)
    assert found["ended_early"] == {OURS: 0, PEER: 0}
    assert [len(found["raw"]["whole"][name]) for name in (OURS, PEER)] == [3, 3]
    assert len(stage.said) == 3


async def test_alone_there_are_figures_and_no_ratios(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=2, max_tokens=200), names=(OURS,))
    found = await bench.throughput(2)
    assert set(found) == {"measure", "tps", "whole_tps", "ended_early", "raw"}  # nor processor time, of no process
    assert list(found["tps"]) == [OURS]
    assert set(await bench.ttft(32)) == {"s", "prompts", "raw"}
    assert set(await bench.second_turn()) == {"s", "prompts", "raw"}
    assert len(stage.said) == 6


async def test_a_server_that_counts_no_prompts_is_asked_what_two_of_them_took() -> None:
    async with LoopbackServer(tokens=1) as server, aiohttp.ClientSession() as session:
        count = await engine_chats.calibrate_count(Door(OURS, server.url, session))
    for n_tokens in (40, 512):
        chat = await engine_chats.chat_of_length(n_tokens, 3, count)
        said = sum(len(message["content"].split()) for message in chat)  # a word is a token there
        assert said == pytest.approx(n_tokens, abs=1)


async def test_pythons_share_is_read_while_eight_answers_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOOK_S", 0.001)
    bench = await stage.bench(EngineSetup(repeats=1, max_tokens=200))
    stage.servers[OURS].device = {"engine": {"python_share": 0.04}}
    stage.servers[PEER].device = {"engine": {"python_share": 0.9}}
    await bench.throughput(engine.SHARE_AT)
    await bench.throughput(2)
    assert bench.shares == {engine.SHARE_AT: 0.04, 2: None}


async def test_answers_that_end_early_are_told(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=1, max_tokens=200), tokens=20)
    assert (await bench.throughput(2))["ended_early"] == {OURS: 2, PEER: 2}


async def test_where_one_side_cannot_run_all_at_once_the_whole_rate_counts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: Any = itertools.cycle([None, 50.0])
    monkeypatch.setattr(engine, "rate_together", lambda _: next(rates))
    found = await (await stage.bench(EngineSetup(repeats=1, max_tokens=20))).throughput(2)
    assert found["measure"] == "whole"
    assert (found["ratio"], found["tps"]) == (found["whole_ratio"], found["whole_tps"])


async def test_ttft_takes_short_prompts_more_often(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=2))
    found = await bench.ttft(32)
    assert len(stage.prompts(OURS)) == len(set(stage.prompts(OURS))) == 2 * engine.TTFT_TRIES
    assert set(found["s"]) == {OURS, PEER}
    await bench.ttft(2048)
    assert len(stage.prompts(PEER)) == 2 * engine.TTFT_TRIES + 2


async def test_the_second_turn_is_the_first_and_its_answer_and_more(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=1))
    found = await bench.second_turn()
    first, second = (e.body["messages"] for e in stage.servers[OURS].exchanges)
    assert second[:2] == first
    assert [m["role"] for m in second[2:]] == ["assistant", "user"]
    assert len(second[2]["content"].split()) == engine.TURN_TOKENS
    assert found["prompts"][PEER]["cached_tokens"] is None  # the scripted server has no cache


async def test_the_gap_of_running_answers_is_held_against_a_chunk(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=1), stalled=True)
    found = await bench.worst_tbt()
    assert min(found["s"].values()) > 0
    assert found["chunk_s"] == 0.5
    assert found["over_chunk"] == pytest.approx(found["s"][OURS] / 0.5, abs=1e-3)


async def test_without_a_running_answer_there_is_no_gap(stage: Stage) -> None:
    bench = await stage.bench(EngineSetup(repeats=1), tokens=4)
    with pytest.raises(BenchError, match="were over"):
        await bench.worst_tbt()


# --- llama-server -----------------------------------------------------------------------------------------------------


def test_llama_server_is_told_its_options() -> None:
    options = llama_server.Options(n_ctx=8192, n_parallel=16, kv_unified=True)
    *_, model, told, library = llama_server.argv(Path("m.gguf"), options)
    assert model == "m.gguf"
    assert llama_server.Options(**json.loads(told)) == options
    assert Path(library) == llama_server.library()
    words = options.words(model)
    said = dict(zip(words[1::2], words[2::2], strict=False))
    assert (said["--model"], said["--ctx-size"], said["--parallel"], said["--port"]) == ("m.gguf", "8192", "16", "0")
    assert "--kv-unified" in words
    assert "--kv-unified" not in llama_server.Options().words(model)


SERVER = """
#include <cstdio>
#include <unistd.h>
int llama_server(int argc, char ** argv) {
    std::fprintf(stderr, "srv: %d, %s\\n", argc, argv[2]);
    std::fprintf(stdout, "srv: listening on http://127.0.0.1:9\\n");
    std::fflush(stdout);
    return pause();
}
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    source, library = tmp_path / "server.cpp", tmp_path / llama_server.LIBRARY
    source.write_text(SERVER)
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    return library


async def test_a_compiled_server_says_where_it_listens_and_ends_with_its_stdin(compiled: Path, tmp_path: Path) -> None:
    argv = [*llama_server.argv(Path("m.gguf"))[:-1], str(compiled)]
    async with child_process(argv, tmp_path, PEER) as (url, pid):
        assert url == "http://127.0.0.1:9/v1"
        async with aiohttp.ClientSession() as session:
            assert (Door(PEER, url, session, pid).cpu_s() or 0) > 0
    assert f"srv: {len(llama_server.Options().words('m.gguf'))}, m.gguf" in (tmp_path / f"{PEER}.log").read_text()


def test_the_source_is_fetched_by_the_hash_in_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], _: float) -> None:
        ran.append(words)
        with tarfile.open(tmp_path / "llama.tar.gz", "w:gz") as tar:
            for name in ("llama/vendor/llama.cpp/CMakeLists.txt", "llama/other"):
                tar.addfile(tarfile.TarInfo(name))

    monkeypatch.setattr(llama_server, "_run", run)
    assert llama_server._fetch(tmp_path) == tmp_path / "llama" / "vendor" / "llama.cpp"
    assert (tmp_path / "llama" / "vendor" / "llama.cpp" / "CMakeLists.txt").exists()
    assert not (tmp_path / "llama" / "other").exists()
    assert "--require-hashes" in ran[0]
    entry = Path(ran[0][-1]).read_text().splitlines()
    assert entry[0].startswith("llama-cpp-python==")
    assert all(line.strip().startswith("--hash=sha256:") for line in entry[1:])


@pytest.mark.parametrize("script", ["engine", "handoff", "qoe"])
def test_a_script_says_what_to_install(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    more = ["--server", "llama-server"] if script == "handoff" else []
    main = importlib.import_module(f"benchmarks.{script}.__main__").main
    assert run_script(lambda: main(more)) == 1
    shown = capsys.readouterr()
    assert "pip install cmake" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_processor_time_is_compared_by_the_median() -> None:
    found = engine.processor({OURS: [0.02, None, 0.04, 0.03], PEER: [0.06, 0.05, 0.09]})
    assert found == {"cpu_s": {OURS: 0.03, PEER: 0.06}, "cpu_ratio": 2.0}
    assert engine.processor({OURS: [0.5]}) == {"cpu_s": {OURS: 0.5}}
    assert engine.processor({OURS: [0.5], PEER: [None]}) == {}


@pytest.mark.parametrize("bounds", [None, limits.Bounds(1e9, 0.0, 2e8, 1e9, 1)])
def test_the_bounds_share_is_of_our_processor_time(bounds: limits.Bounds | None) -> None:
    one = {"cpu_s": {OURS: 0.02, PEER: 0.03}, "cpu_ratio": 1.5}
    figures = {"throughput": {"1": one}, "ttft": {"512": {"s": {}}}}
    found = by_processor(figures, limits.Work(1000, 0, 10_000_000), bounds)
    assert found["cpu_ratio"] == {"prompt": None, "one": 1.5, "many": None}
    assert found["limit_share"] == {"prompt": None, "one": None if bounds is None else 0.5}
    assert (found["limits"] or {}).get("multiply_adds_per_cycle") == (None if bounds is None else 5.0)


def test_threads_default_to_one_fewer_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "n_cores", lambda: 8)
    assert (EngineSetup().n_threads, EngineSetup(threads=2).n_threads) == (7, 2)
    monkeypatch.setattr(engine, "n_cores", lambda: 1)
    assert EngineSetup().n_threads == 1
