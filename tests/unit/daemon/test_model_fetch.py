"""The daemon's fetches of models, from a hub on loopback: seen, cancelled, gone on with, and put in use."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from disco_daemon.client.offers import fetch_words
from disco_daemon.clock import SystemClock
from disco_daemon.daemon.model_fetch import FetchError, ModelFetches, named, offered
from disco_daemon.errors import RequestError
from disco_daemon.models.offered import shipped
from disco_daemon.models.part import PREFIX
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import Fault, HubServer, Repo

PATIENCE_S = 120.0
CONTENT = header(number("x.block_count", 1)) + random.Random(0).randbytes(400_000)
LISTED = replace(
    shipped()[0], name="tiny", title="Tiny", repo="maker/tiny-GGUF", file="tiny.gguf", n_bytes=len(CONTENT)
)
TINY = offered(LISTED, "")
OTHER = replace(TINY, name="other", title="Other", spec="maker/tiny-GGUF:other.gguf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files = {"tiny.gguf": CONTENT, "other.gguf": CONTENT[:-1], "third.gguf": CONTENT[:-2]}
    with HubServer(Repo(files=files)) as server:
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


def made(used: Used, folder: Path, *, private: bool = False) -> ModelFetches:
    return ModelFetches(used, lambda: private, SystemClock(), folder / "fetches.json")


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.02)


def part_bytes(folder: Path) -> int:
    """The bytes of a file that is being fetched."""
    return sum(path.stat().st_size for path in (folder / "models").glob(f"{PREFIX}*"))


def has_arrived(folder: Path, n_bytes: int) -> bool:
    return part_bytes(folder) == n_bytes


def state(fetch: ModelFetches) -> str:
    return str((fetch.document() or {}).get("state"))


async def test_a_model_is_fetched_checked_and_in_use(hub: HubServer, tmp_path: Path) -> None:
    used = Used()
    fetch = made(used, tmp_path)
    assert fetch.document() is None
    fetch.start(TINY)
    await until(lambda: state(fetch) not in ("fetching", "loading"))
    document = fetch.document()
    assert document is not None
    assert (document["state"], document["message"], document["done_bytes"]) == ("done", "", len(CONTENT))
    assert used.paths == [str(tmp_path / "models" / "tiny.gguf")]
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT


async def test_a_cancelled_one_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    used, go = Used(), threading.Event()
    fetch = made(used, tmp_path)
    hub.repo.faults = [Fault(after=100_000, go=go)]
    fetch.start(TINY)
    await until(lambda: part_bytes(tmp_path) == 100_000)
    fetch.start(TINY)  # the same one is under way
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
async def test_what_goes_wrong_is_said_and_the_next_try_may_work(hub: HubServer, what: str, tmp_path: Path) -> None:
    used = Used()
    fetch, model = made(used, tmp_path), TINY
    words = {"none there": "there is no", "checksum": "checksum", "load": "it cannot be loaded"}[what]
    if what == "none there":
        model = replace(TINY, spec="maker/nothing:tiny.gguf")
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


async def test_while_nothing_may_leave_nobody_is_asked(hub: HubServer, tmp_path: Path) -> None:
    fetch = made(Used(), tmp_path, private=True)
    with pytest.raises(RequestError, match="nobody is asked"):
        fetch.start(TINY)
    assert fetch.document() is None
    assert hub.repo.asked == []


async def test_it_ends_with_the_daemon(hub: HubServer, tmp_path: Path) -> None:
    go = threading.Event()
    hub.repo.faults = [Fault(after=100_000, go=go)]
    fetch = made(Used(), tmp_path)
    fetch.start(TINY)
    await until(lambda: part_bytes(tmp_path) == 100_000)
    await fetch.close()
    go.set()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "model-fetch"]


async def test_two_are_fetched_at_once_and_a_third_waits_its_turn(hub: HubServer, tmp_path: Path) -> None:
    used, go = Used(), threading.Event()
    fetches = made(used, tmp_path)
    hub.repo.faults = [Fault(after=100_000, go=go), Fault(after=100_000, go=go)]
    fetches.start(TINY)
    fetches.start(OTHER)
    await until(lambda: part_bytes(tmp_path) == 200_000)
    with pytest.raises(RequestError, match="Tiny and Other are being fetched") as refused:
        fetches.start(replace(OTHER, name="third", spec="maker/tiny-GGUF:third.gguf"))
    assert refused.value.status == 429
    go.set()
    await until(lambda: [one["state"] for one in fetches.documents()] == ["done", "done"])
    assert sorted(used.paths) == [str(tmp_path / "models" / name) for name in ("other.gguf", "tiny.gguf")]


@pytest.mark.parametrize("in_use", ["", "theirs.gguf"])
async def test_one_that_a_daemon_leaves_is_gone_on_with_by_the_next(
    hub: HubServer, tmp_path: Path, in_use: str
) -> None:
    used, go = Used(), threading.Event()
    for n_kept in range(1, 6):  # interrupted five times
        hub.repo.faults = [Fault(after=50_000, go=go)]
        fetches = made(used, tmp_path)
        if n_kept == 1:
            fetches.start(TINY)
        else:
            fetches.resume("")
        await until(partial(has_arrived, tmp_path, n_kept * 50_000))
        await fetches.close()
    go.set()
    assert (tmp_path / "fetches.json").stat().st_mode & 0o077 == 0
    private = made(used, tmp_path, private=True)
    private.resume("")
    assert private.documents() == [], "nobody is asked, and it is kept for later"
    last = made(used, tmp_path)
    last.resume(in_use)
    await until(lambda: [one["state"] for one in last.documents()] == ["done"])
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT
    assert [request.begin for request in hub.repo.asked] == [n * 50_000 for n in range(6)]
    assert len(used.paths) == (not in_use), "a model that was chosen meanwhile stays"
    assert not (tmp_path / "fetches.json").exists()
    after = made(used, tmp_path)
    after.resume("")
    assert after.documents() == []


async def test_one_that_is_only_followed_ends_when_the_last_one_leaves(hub: HubServer, tmp_path: Path) -> None:
    go = threading.Event()
    hub.repo.faults = [Fault(after=100_000, go=go)]
    fetches = made(Used(), tmp_path)
    fetch = fetches.start(replace(TINY, use=False))
    assert fetches.start(replace(TINY, use=False)) is fetch
    one, two = fetch.follow(), fetch.follow()
    await anext(one)
    await anext(two)
    await until(lambda: part_bytes(tmp_path) == 100_000)
    await one.aclose()
    assert fetch.state == "fetching"
    await two.aclose()
    go.set()
    assert fetch.state == "cancelled"
    assert part_bytes(tmp_path) == 100_000
    again = fetches.start(replace(TINY, use=False))
    steps = [(document["state"], file and file.done) async for document, file in again.follow()]
    assert steps[-1] == ("done", len(CONTENT))
    assert "`disco models use tiny.gguf`" in again.document()["message"]
    assert fetches.document() is None, "none is to be used"


def test_a_name_is_one_of_the_list_or_of_the_hub_and_nothing_else() -> None:
    for name in ("tiny", "Tiny:latest", "tiny "):
        assert named(name, [LISTED]).spec == "maker/tiny-GGUF:tiny.gguf"
    assert named("qwen3:4b", shipped()).spec == named("qwen3-4b", shipped()).spec
    for name in ("hf.co/maker/tiny-GGUF", "maker/tiny-GGUF:latest", "https://huggingface.co/maker/tiny-GGUF"):
        assert named(name, [LISTED]).spec.removeprefix("hf.co/").removeprefix("https://huggingface.co/") == (
            "maker/tiny-GGUF"
        )
    for name in ("llama3.2", "169.254.169.254/a/b", "http://evil.example/a/b", "../../etc", "a/b/c:d", ""):
        with pytest.raises(RequestError, match="pull model manifest: file does not exist") as refused:
            named(name, [LISTED])
        assert refused.value.status == 404
