"""The tune on the real model: what it says, keeps and leaves behind; and what it may choose changes no bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil
import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.config import layers as config
from disco_daemon.engine import wire
from disco_daemon.engine.llama import gpu
from disco_daemon.engine.llama.memory import placement
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.measure.tune_messages import Knobs, Tuned, TuneJob
from disco_daemon.machines.device_settings import key_for, knobs_for, profiles
from disco_daemon.models.default import default_model_path
from disco_daemon.profiling.autotuner import Autotuner, TuneError, run_tune

START = Knobs(1, 1, 512)


def job(budget_s: float, model: str | None = None) -> TuneJob:
    return TuneJob(model or str(default_model_path()), 2, START, exact=False, budget_s=budget_s)


def tuners() -> list[psutil.Process]:
    """Our children that measure; one that has just ended has no command any more."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [process] if "disco_daemon.engine.measure.tune" in process.cmdline() else []
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The default model in a folder of its own, so that a copy of it belongs there; a link would be followed."""
    return Path(shutil.copyfile(default_model_path(), tmp_path / default_model_path().name))


async def disco(folder: Path, *words: str) -> tuple[int, str, str]:
    """Run a verb with its own folders; exit code, stdout, stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DISCO_")}
    env |= {f"XDG_{name}_HOME": str(folder) for name in ("DATA", "CONFIG", "CACHE", "STATE")} | {"HOME": str(folder)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", *words, stdout=pipe, stderr=pipe,
        env=env | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.slow
async def test_the_fastest_knobs_are_kept_for_the_next_start_and_a_copy_is_only_offered(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = await disco(tmp_path, "tune", "--model", str(model), "--budget", "1", "--requantize", "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["took_s"] > 0
    assert {"knobs", "speed", "start", "rows", "complete", "profile", "copy"} <= set(found)
    assert found["speed"]["prefill_tps"] > 0 < found["speed"]["decode_tps"]
    assert all(row["seconds"] > 0 < row["n"] for row in found["rows"])
    assert "reading prompts" in err or "writing answers" in err, "it says what it does"
    copy = found["copy"]
    assert copy["measured"]
    assert Path(copy["path"]).parent == tmp_path
    assert Path(copy["path"]).stat().st_size == copy["size_bytes"] > copy["model_bytes"]
    assert 0.85 < copy["agreement"] < 1, "8 bits a weight are nearly, and not quite, the same model"
    assert not list(tmp_path.rglob("config.toml")), "which model is used is the user's to say"

    monkeypatch.setattr("disco_daemon.machines.device_settings.data_path", lambda: tmp_path / "disco")
    settings = config.load(tmp_path / "none.toml", {}, {"device.model": str(model)})
    assert profiles().path(key_for(settings, model)) == Path(found["profile"])
    knobs = knobs_for(settings, model)
    assert {"n_threads": knobs.n_threads, "n_ubatch": knobs.n_ubatch}.items() <= found["knobs"].items()


async def test_a_model_that_is_none_is_told_with_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    code, out, err = await disco(tmp_path, "tune", "--model", str(broken), "--budget", "5")
    assert (code, out) == (1, "")
    assert "cannot load" in err
    assert "Traceback" not in err
    with pytest.raises(TuneError, match="cannot load"):
        await run_tune(job(5, str(broken)), lambda line: None)


async def test_a_request_kills_the_measurement_and_later_it_is_done() -> None:
    measuring, adopted = asyncio.Event(), asyncio.Queue[Tuned]()
    loop = asyncio.get_running_loop()
    busy = [False]

    def occupied() -> bool:
        if tuners():
            measuring.set()
        return busy[0]

    def adopt(tuned: Tuned) -> None:  # called in a thread, since it may write a file
        loop.call_soon_threadsafe(adopted.put_nowait, tuned)

    made = Autotuner(job(1.0), occupied, adopt, SystemClock(), idle_s=0.05, undisturbed=lambda: True)
    task = asyncio.create_task(made.run())
    await measuring.wait()
    busy[0] = True
    async with asyncio.timeout(60):
        while made.state != "waiting" or tuners():
            await asyncio.sleep(0.01)  # the end of another process has no event here
    assert adopted.empty()
    busy[0] = False
    tuned = await adopted.get()
    await task
    assert tuned.speed.prefill_tps > 0
    assert tuned.knobs.n_threads in (1, 2)
    assert (made.state, made.n_tries, tuners()) == ("done", 2, [])


async def test_a_cancelled_tune_leaves_no_process() -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(run_tune(job(30), lambda line: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tuners() == []


# --- nothing it may choose changes an exact answer ----------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(
        wire.Load(model_path=str(default_model_path()), n_ctx=768, n_threads=1, n_gpu_layers=0, n_cells=768),
        AbortFlag(),
    )


def last_logits(llama: Llama, load: wire.Load, pieces: Sequence[int]) -> bytes:
    """The logits after a text that was computed in pieces of so many tokens."""
    llama.renew(load)
    n = sum(pieces)
    tokens = (llama.vocabulary.tokenize("The keeper counted the ships each evening. ") * n)[:n]
    row = done = 0
    for piece in pieces:
        row = piece - 1
        assert llama.decode([(tokens[done + i], done + i, 0, i == row) for i in range(piece)]) == 0
        done += piece
    logits = llama_cpp.llama_get_logits_ith(llama._ctx, row)
    return np.ctypeslib.as_array(logits, (llama.vocabulary.n_tokens,)).tobytes()


@pytest.fixture(scope="module")
def by_default(llama: Llama) -> bytes:
    return last_logits(
        llama,
        wire.Load(model_path=str(default_model_path()), n_ctx=768, n_threads=1, n_gpu_layers=0, n_cells=768),
        [512, 48],
    )


@pytest.mark.parametrize(
    "knobs",
    [{"n_threads_batch": 2, "n_ubatch": 128}, {"kv_type": "q8_0"}],
    ids=["two threads for prompts and micro-batches", "q8_0"],
)
def test_an_exact_text_is_the_same_in_whatever_pieces_it_is_computed(
    llama: Llama, by_default: bytes, knobs: dict[str, Any]
) -> None:
    load = wire.Load(model_path=str(default_model_path()), n_ctx=768, n_threads=1, n_gpu_layers=0, n_cells=768, **knobs)
    at_once = last_logits(llama, load, [512, 48])
    assert at_once == last_logits(llama, load, [150] * 3 + [105] + [1] * 5)
    assert (at_once == by_default) == ("kv_type" not in knobs), "only what is kept differs"


def test_keys_and_values_of_a_byte_take_half_the_memory(llama: Llama) -> None:
    path = str(default_model_path())
    llama.renew(wire.Load(model_path=path, n_ctx=768, n_threads=1, n_gpu_layers=0, n_cells=768))
    small = Llama(
        wire.Load(model_path=path, n_ctx=256, n_threads=1, n_gpu_layers=0, n_cells=256, kv_type="q8_0"), AbortFlag()
    )
    assert small.bytes_per_token / llama.bytes_per_token == pytest.approx(34 / 64)
    assert len(_saved(small)) / len(_saved(llama)) == pytest.approx(34 / 64, rel=0.05)
    small.close()


def _saved(llama: Llama) -> memoryview:
    llama.clear()
    llama.decode([(token, i, 0, False) for i, token in enumerate(llama.vocabulary.tokenize("one two three " * 20))])
    return llama.save(0)


def test_a_file_s_header_tells_how_many_layers_fit() -> None:
    load = wire.Load(model_path=str(default_model_path()), n_ctx=4096, n_threads=1, n_gpu_layers=None, n_cells=8192)
    shape = gpu._shape(load, 10**9)
    assert shape is not None
    counts = [placement(*shape, free).n_gpu_layers for free in (0, 10**8, 3 * 10**8, 10**9)]
    assert counts[0] == counts[1] == 0 < counts[2] < 30 < counts[3] == 31
