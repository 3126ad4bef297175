"""The daemon's fetches of models, from a hub on loopback: seen, cancelled, gone on with, and put in use."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from disco_daemon.api.ollama.ollama_pull import pull_lines
from disco_daemon.client.offers import fetch_words
from disco_daemon.clock import SystemClock
from disco_daemon.conductor import Privacy
from disco_daemon.daemon.model_fetch import KEPT, FetchError, ModelFetch, ModelFetches, named, offered
from disco_daemon.daemon.state import StateDocuments
from disco_daemon.errors import ConfigError, RequestError
from disco_daemon.models.fetching import Fetched, FetchJob
from disco_daemon.models.offered import shipped
from disco_daemon.models.part import PREFIX
from disco_daemon.models.quants import NO_PIN
from disco_daemon.onboarding.saving import SavedChoice
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import COMMIT, Fault, HubServer, Repo

PATIENCE_S = 120.0
CONTENT = header(number("x.block_count", 1)) + random.Random(0).randbytes(400_000)
LISTED = replace(
    shipped()[0], name="tiny", title="Tiny", repo="maker/tiny-GGUF", file="tiny.gguf", n_bytes=len(CONTENT),
    revision=COMMIT, sha256=hashlib.sha256(CONTENT).hexdigest(),
)  # fmt: skip
TINY = offered(LISTED, "")
OTHER = replace(TINY, name="other", title="Other", spec="maker/tiny-GGUF:other.gguf", pin=NO_PIN)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files = {"tiny.gguf": CONTENT, "other.gguf": CONTENT[:-1], "third.gguf": CONTENT[:-2]}
    with HubServer(Repo(files=files)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "models"))
        yield server


class Used:
    """What was put in use, the last one as `model`; `problem` is why it could not be, `notes` what there is to say."""

    def __init__(self) -> None:
        self.model = ""
        self.paths: list[str] = []
        self.problem: str | Exception = ""
        self.notes: list[str] = []

    async def __call__(self, path: str) -> list[str]:
        self.paths.append(path)
        if isinstance(self.problem, Exception):
            raise self.problem
        if self.problem:
            raise FetchError(self.problem)
        self.model = path
        return self.notes


def made(used: Used, folder: Path, privacy: Privacy | None = None) -> ModelFetches:
    privacy = privacy or Privacy()
    return ModelFetches(used, lambda: privacy.on, lambda: used.model, SystemClock(), folder / "fetches.json")


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


@pytest.mark.parametrize("what", ["none there", "checksum", "load", "fault of ours"])
async def test_what_goes_wrong_is_said_and_the_next_try_may_work(hub: HubServer, what: str, tmp_path: Path) -> None:
    used = Used()
    fetch, model = made(used, tmp_path), TINY
    words = {"none there": "there is no", "checksum": "checksum", "load": "it cannot be loaded"}.get(what, "no number")
    if what == "none there":
        model = replace(TINY, spec="maker/nothing:tiny.gguf")
    if what == "checksum":
        hub.repo.digests = {"tiny.gguf": "0" * 64}
    if what == "load":
        used.problem = "it cannot be loaded"
    if what == "fault of ours":
        used.problem = ValueError("no number")
    async with asyncio.timeout(PATIENCE_S), fetch.start(model).followed() as steps:
        states = [document["state"] async for document, _ in steps]
    assert states[-1] == "failed"
    assert not (tmp_path / "fetches.json").exists(), "the next daemon does not try it again"
    assert words in (fetch.document() or {})["message"]
    hub.repo.digests, used.problem, used.notes = {}, "", ["device.grade = 3 was for the model before."]
    fetch.start(TINY)
    await until(lambda: state(fetch) == "done")
    assert fetch_words(fetch.document() or {}) == f"Tiny is in use. {used.notes[0]}"


async def test_while_nothing_may_leave_nobody_is_asked(hub: HubServer, tmp_path: Path) -> None:
    fetch = made(Used(), tmp_path, Privacy(on=True))
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
    private = made(used, tmp_path, Privacy(on=True))
    private.resume("")
    assert [one["state"] for one in private.documents()] == ["stopped"], "nobody is asked, and it is kept for later"
    await private.close()
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
    async with fetch.followed():  # it leaves before its first step
        async with fetch.followed() as two:
            await anext(two)
            await until(lambda: part_bytes(tmp_path) == 100_000)
        assert fetch.state == "fetching"
    go.set()
    assert fetch.state == "cancelled"
    assert part_bytes(tmp_path) == 100_000
    again = fetches.start(replace(TINY, use=False))
    async with again.followed() as seen:
        steps = [(document["state"], file and file.done) async for document, file in seen]
    assert steps[-1] == ("done", len(CONTENT))
    assert "`disco models use tiny.gguf`" in again.document()["message"]
    assert fetches.document() is None, "none is to be used"


class Jobs:
    """What is done in place of the process that fetches: each job lasts until `go`; one of maker/nothing fails.

    One of the file that is `held` does not end.
    """

    def __init__(self) -> None:
        self.held = ""
        self.go, self.began, self.n_begun = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self, _module: str, job: FetchJob, *_: object, **__: object) -> Fetched:
        if job.spec.startswith("maker/nothing"):
            raise FetchError("there is none")
        self.n_begun += 1
        self.began.set()
        await (asyncio.Event() if self.held and self.held in job.spec else self.go).wait()
        return Fetched(f"models/{job.spec.rpartition(':')[2]}")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    found = Jobs()
    monkeypatch.setattr("disco_daemon.daemon.model_fetch.run_job", found)
    return found


async def last_state(fetch: ModelFetch) -> str:
    async with asyncio.timeout(PATIENCE_S), fetch.followed() as steps:
        return [str(document["state"]) async for document, _ in steps][-1]


async def test_what_runs_stays_in_the_list_behind_any_number_that_failed(jobs: Jobs, tmp_path: Path) -> None:
    fetches = made(Used(), tmp_path)
    long = fetches.start(replace(TINY, use=False))
    for n in range(KEPT + 1):
        assert await last_state(fetches.start(replace(TINY, spec=f"maker/nothing:{n}.gguf"))) == "failed"
    assert len(fetches.documents()) == KEPT
    assert long.document() in fetches.documents()
    assert fetches.start(replace(TINY, use=False)) is long
    await fetches.close()
    after = made(Used(), tmp_path)
    after.resume("")
    assert [(one["id"], one["state"]) for one in after.documents()] == [("tiny", "fetching")]
    await after.close()


async def test_the_end_of_the_daemon_ends_no_fetch_by_ending_its_clients(jobs: Jobs, tmp_path: Path) -> None:
    fetches = made(Used(), tmp_path)
    fetch = fetches.start(replace(TINY, use=False))
    async with fetch.followed() as steps:
        lines = pull_lines(steps)
        await anext(lines)
        await fetches.close()
        assert "the next one goes on" in [line async for line in lines][-1]["error"]
    assert fetch.state == "stopped"
    with pytest.raises(RequestError, match="the daemon ends"):
        fetches.start(OTHER)
    after = made(Used(), tmp_path)
    after.resume("")
    jobs.go.set()
    assert await last_state(after.start(replace(TINY, use=False))) == "done"
    assert not (tmp_path / "fetches.json").exists()


@pytest.mark.parametrize("how", ["cancel", "leave", "use"])
async def test_one_that_goes_on_by_itself_is_cancelled_left_or_used(jobs: Jobs, tmp_path: Path, how: str) -> None:
    used = Used()
    (tmp_path / "fetches.json").write_bytes(encode([replace(TINY, use=False)]))
    fetches = made(used, tmp_path)
    fetches.resume("")
    if how == "cancel":
        await fetches.cancel()
    if how == "leave":
        async with fetches.start(replace(TINY, use=False)).followed():
            await jobs.began.wait()
    if how == "use":
        fetch = fetches.start(TINY)
        jobs.go.set()
        assert await last_state(fetch) == "done"
    assert fetches.documents()[-1]["state"] == ("done" if how == "use" else "cancelled")
    assert used.paths == (["models/tiny.gguf"] if how == "use" else [])
    assert not (tmp_path / "fetches.json").exists()


async def test_private_stops_fetches_and_its_end_goes_on_with_them(jobs: Jobs, tmp_path: Path) -> None:
    used, privacy = Used(), Privacy()
    fetches = made(used, tmp_path, privacy)
    fetches.start(TINY)
    await jobs.began.wait()
    privacy.on = True
    await fetches.hold("")
    assert state(fetches) == "stopped"
    assert "policy.private" in fetch_words(fetches.document() or {})
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "model-fetch"]
    await fetches.close()
    later = made(used, tmp_path, privacy)
    later.resume("")
    await later.hold("")
    assert (state(later), jobs.n_begun) == ("stopped", 1), "nobody is asked"
    privacy.on = False
    await later.hold("")
    jobs.go.set()
    assert await last_state(later.start(TINY)) == "done"
    assert (len(used.paths), jobs.n_begun) == (1, 2)


async def test_a_model_that_was_chosen_since_stays_in_use(jobs: Jobs, tmp_path: Path) -> None:
    used = Used()
    fetches = made(used, tmp_path)
    fetch = fetches.start(TINY)
    await jobs.began.wait()
    used.model = "/models/chosen.gguf"
    jobs.go.set()
    assert await last_state(fetch) == "failed"
    assert used.paths == []
    words = "Tiny is not in use: another model was chosen while it was fetched; `disco models use tiny.gguf` uses it"
    assert fetch_words(fetch.document()) == words
    assert await last_state(fetches.start(replace(TINY, instead_of=used.model))) == "done"
    assert used.model == "models/tiny.gguf"
    jobs.go.clear()
    fetch = fetches.start(replace(OTHER, instead_of="/models/chosen.gguf"))
    jobs.go.set()
    assert await last_state(fetch) == "failed", "one that a fetch has put in use may be chosen as well"


async def test_of_two_that_are_fetched_beside_each_other_the_later_one_is_used_also_by_the_next_daemon(
    jobs: Jobs, tmp_path: Path
) -> None:
    used = Used()
    fetches, jobs.held = made(used, tmp_path), "other"
    first, second = fetches.start(TINY), fetches.start(OTHER)
    jobs.go.set()
    assert await last_state(first) == "done"
    await fetches.close()
    assert second.state == "stopped"
    after, jobs.held = made(used, tmp_path), ""
    after.resume(used.model)
    await until(lambda: state(after) == "done")
    assert used.paths == ["models/tiny.gguf", "models/other.gguf"]
    await after.close()


async def test_a_stopped_one_can_be_cancelled(tmp_path: Path) -> None:
    (tmp_path / "fetches.json").write_bytes(encode([TINY]))
    fetches = made(Used(), tmp_path, Privacy(on=True))
    fetches.resume("")
    await fetches.cancel()
    assert state(fetches) == "cancelled"
    assert not (tmp_path / "fetches.json").exists()


@pytest.mark.parametrize("ends", [asyncio.CancelledError(), ConfigError("no such file")])
async def test_a_model_that_nobody_could_try_is_taken_back(tmp_path: Path, ends: BaseException) -> None:
    taken_back: list[SavedChoice] = []

    class Setup:
        async def save_local(self, path: str) -> SavedChoice:
            return SavedChoice({"device.model": path}, {"device.model": ""})

        async def take_back(self, saved: SavedChoice) -> SavedChoice:
            taken_back.append(saved)
            return saved

    async def reload_written(_: object) -> bool:
        raise ends

    shared = SimpleNamespace(clock=SystemClock(), history=SimpleNamespace(path=tmp_path / "h"), privacy=Privacy())
    runtime = SimpleNamespace(reload_written=reload_written)
    documents = StateDocuments(*cast("Any", (shared, runtime, None, Setup(), None)))
    with pytest.raises(type(ends)):
        await documents._use_fetched("new.gguf")
    assert [saved.before for saved in taken_back] == [{"device.model": ""}]


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
