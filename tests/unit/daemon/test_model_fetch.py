"""The daemon's one fetch of a model, from a hub on loopback: seen, cancelled, gone on with, and put in use."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from disco_daemon.client.offers import fetch_words
from disco_daemon.clock import SystemClock
from disco_daemon.daemon.model_fetch import FetchError, ModelFetch
from disco_daemon.errors import RequestError
from disco_daemon.models.offered import shipped
from disco_daemon.models.part import PREFIX
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import Fault, HubServer, Repo

PATIENCE_S = 120.0
CONTENT = header(number("x.block_count", 1)) + random.Random(0).randbytes(400_000)
TINY = replace(shipped()[0], name="tiny", title="Tiny", repo="maker/tiny-GGUF", file="tiny.gguf", n_bytes=len(CONTENT))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(Repo(files={"tiny.gguf": CONTENT})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "models"))
        yield server


class Used:
    """What was put in use; `problem` is why it could not be, `notes` what there is to say of it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.problem = ""
        self.notes: list[str] = []

    async def __call__(self, path: str) -> list[str]:
        self.paths.append(path)
        if self.problem:
            raise FetchError(self.problem)
        return self.notes


def made(used: Used, *, private: bool = False) -> ModelFetch:
    return ModelFetch(used, lambda: private, SystemClock())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.02)


def part_bytes(folder: Path) -> int:
    """The bytes of a file that is being fetched."""
    return sum(path.stat().st_size for path in (folder / "models").glob(f"{PREFIX}*"))


def state(fetch: ModelFetch) -> str:
    return str((fetch.document() or {}).get("state"))


async def test_a_model_is_fetched_checked_and_in_use(hub: HubServer, tmp_path: Path) -> None:
    used = Used()
    fetch = made(used)
    assert fetch.document() is None
    fetch.start(TINY)
    await until(lambda: state(fetch) not in ("fetching", "loading"))
    document = fetch.document()
    assert document is not None
    assert (document["state"], document["message"], document["done_bytes"]) == ("done", "", len(CONTENT))
    assert used.paths == [str(tmp_path / "models" / "tiny.gguf")]
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT


async def test_a_cancelled_one_goes_on_where_it_was_and_only_one_runs_at_a_time(hub: HubServer, tmp_path: Path) -> None:
    used, go = Used(), threading.Event()
    fetch = made(used)
    hub.repo.faults = [Fault(after=100_000, go=go)]
    fetch.start(TINY)
    await until(lambda: part_bytes(tmp_path) == 100_000)
    fetch.start(TINY)  # the same one is under way
    with pytest.raises(RequestError, match="Tiny is being fetched") as refused:
        fetch.start(replace(TINY, name="other"))
    assert refused.value.status == 429
    await fetch.cancel()
    go.set()
    assert state(fetch) == "cancelled"
    assert used.paths == []
    fetch.start(TINY)
    await until(lambda: state(fetch) == "done")
    assert [request.begin for request in hub.repo.asked] == [0, 100_000]
    await fetch.cancel()  # nothing runs
    assert state(fetch) == "done"


@pytest.mark.parametrize("what", ["none there", "checksum", "load"])
async def test_what_goes_wrong_is_said_and_the_next_try_may_work(hub: HubServer, what: str) -> None:
    used = Used()
    fetch, model = made(used), TINY
    words = {"none there": "there is no", "checksum": "checksum", "load": "it cannot be loaded"}[what]
    if what == "none there":
        model = replace(TINY, repo="maker/nothing")
    if what == "checksum":
        hub.repo.digests = {"tiny.gguf": "0" * 64}
    if what == "load":
        used.problem = "it cannot be loaded"
    fetch.start(model)
    await until(lambda: state(fetch) == "failed")
    assert words in (fetch.document() or {})["message"]
    hub.repo.digests, used.problem, used.notes = {}, "", ["device.grade = 3 was for the model before."]
    fetch.start(TINY)
    await until(lambda: state(fetch) == "done")
    assert fetch_words(fetch.document() or {}) == f"Tiny is in use. {used.notes[0]}"


async def test_while_nothing_may_leave_nobody_is_asked(hub: HubServer) -> None:
    fetch = made(Used(), private=True)
    with pytest.raises(RequestError, match="nobody is asked"):
        fetch.start(TINY)
    assert fetch.document() is None
    assert hub.repo.asked == []


async def test_it_ends_with_the_daemon(hub: HubServer, tmp_path: Path) -> None:
    go = threading.Event()
    hub.repo.faults = [Fault(after=100_000, go=go)]
    fetch = made(Used())
    fetch.start(TINY)
    await until(lambda: part_bytes(tmp_path) == 100_000)
    await fetch.close()
    go.set()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "model-fetch"]
