"""Fetching a model from a hub on loopback, over a line that breaks."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from disco_daemon.errors import ConfigError, DiscoError
from disco_daemon.models import hub, remote_source
from disco_daemon.models.hub import copy_in, pull
from disco_daemon.models.part import PREFIX, Part
from disco_daemon.models.quants import Pin, RemoteFile
from disco_daemon.models.remote_source import PullError
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import COMMIT, Fault, HubServer, Repo

SIZE = 1_000_000


def model_bytes(n_bytes: int, seed: int = 0) -> bytes:
    head = header(number("x.block_count", 1))
    return head + random.Random(seed).randbytes(n_bytes - len(head))


CONTENT = model_bytes(SIZE)


class Pulls:
    """What pulls said and did; they never really wait."""

    def __init__(self, server: HubServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.lines: list[str] = []
        self.told: list[tuple[str, int, int]] = []
        self.pauses: list[float] = []

    @property
    def repo(self) -> Repo:
        return self.server.repo

    def __call__(self, spec: str = "maker/tiny-GGUF") -> Path:
        return pull(spec, self.folder, self.lines.append, self._tell, self.server.url, self.pauses.append)

    def _tell(self, name: str, done: int, total: int) -> None:
        self.told.append((name, done, total))

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def begins(self) -> list[int]:
        return [request.begin for request in self.repo.asked]


@pytest.fixture
def pulls(tmp_path: Path) -> Iterator[Pulls]:
    with HubServer(Repo(files={"README.md": b"Hello!", "tiny.Q4_K_M.gguf": CONTENT})) as server:
        yield Pulls(server, tmp_path / "models")


def test_a_file_comes_whole_and_gets_its_name_last(pulls: Pulls) -> None:
    path = pulls()
    assert path == pulls.folder / "tiny.Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    assert pulls.left == [path.name]
    assert pulls.told[-1] == (path.name, SIZE, SIZE)
    assert [done for _, done, _ in pulls.told] == sorted(done for _, done, _ in pulls.told)
    assert pulls.pauses == []


def test_cut_five_times_it_ends_with_the_right_checksum(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(after=150_000, reset=n % 2 == 1) for n in range(5)]
    path = pulls()
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(CONTENT).digest()
    assert pulls.left == [path.name]
    assert len(pulls.begins) == 6
    assert pulls.begins[0] == 0
    assert pulls.begins == sorted(pulls.begins), "each request begins where the last answer ended"
    assert pulls.begins[-1] >= 3 * 150_000, "what a reset takes back is little"
    assert pulls.pauses == [remote_source.PAUSE_S] * 5, "a line that gives something is tried again at once"


def test_a_cut_at_each_piece_goes_on_too(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(after=40_000)] * 20
    assert pulls().read_bytes() == CONTENT
    assert pulls.begins[:4] == [0, 40_000, 80_000, 120_000]


def test_what_an_earlier_pull_left_is_gone_on_with(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(after=400_000)] + [Fault()] * 10
    with pytest.raises(PullError, match="0 MB are kept, and the same command goes on"):
        pulls()
    assert [name.startswith(PREFIX) for name in pulls.left] == [True]
    assert len(pulls.begins) == 1 + remote_source.MAX_TRIES - 1
    assert pulls.pauses == sorted(pulls.pauses), "it waits longer and longer"

    pulls.repo.faults, pulls.repo.asked[:] = [], []
    assert pulls().read_bytes() == CONTENT
    assert pulls.begins == [400_000]
    assert any("going on with" in line for line in pulls.lines)
    assert pulls.left == ["tiny.Q4_K_M.gguf"]


def test_a_wrong_checksum_is_refused_and_leaves_nothing_behind(pulls: Pulls) -> None:
    pulls.repo.digests["tiny.Q4_K_M.gguf"] = "0" * 64
    with pytest.raises(PullError, match="checksum"):
        pulls()
    assert pulls.left == []


def test_a_damaged_half_of_an_earlier_pull_is_found_out(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(after=400_000)] + [Fault()] * 10
    with pytest.raises(PullError):
        pulls()
    [part] = pulls.folder.iterdir()
    part.write_bytes(CONTENT[:399_999] + bytes([CONTENT[399_999] ^ 1]))
    pulls.repo.faults = []
    with pytest.raises(PullError, match="checksum"):
        pulls()
    assert pulls.left == []
    assert pulls().read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"<html>log in</html>" * 1000, b"GGUF\1\0\0\0" + bytes(50)])
def test_what_is_no_model_gets_no_name(pulls: Pulls, content: bytes) -> None:
    pulls.repo.files = {"tiny.gguf": content}
    with pytest.raises(PullError, match="no model"):
        pulls()
    assert pulls.left == []


def test_a_server_that_sends_too_much_is_stopped(pulls: Pulls) -> None:
    pulls.repo.sizes["tiny.Q4_K_M.gguf"] = 500_000
    with pytest.raises(PullError, match="more of the file than there is"):
        pulls()
    assert pulls.left == []


def test_a_server_that_knows_no_ranges_begins_again(pulls: Pulls) -> None:
    pulls.repo.ranges = False
    pulls.repo.faults = [Fault(after=300_000)]
    assert pulls().read_bytes() == CONTENT
    assert pulls.begins == [0, 300_000]


def test_a_server_that_has_less_than_was_there_begins_again(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(after=300_000), Fault(status=416)]
    assert pulls().read_bytes() == CONTENT
    assert pulls.begins == [0, 300_000, 0]


def test_without_the_usual_quantization_it_says_what_there_is_and_takes_the_nearest_smaller(pulls: Pulls) -> None:
    pulls.repo.files = {f"tiny-{quant}.gguf": CONTENT for quant in ("Q8_0", "Q3_K_M", "Q2_K")}
    assert pulls().name == "tiny-Q3_K_M.gguf"
    assert pulls.lines[0].startswith("there is no Q4_K_M in maker/tiny-GGUF, but Q8_0 (0.00 GB), Q3_K_M")
    pulls.lines.clear()
    assert pulls("maker/tiny-GGUF:Q2_K").name == "tiny-Q2_K.gguf"
    assert pulls.lines[0] == "maker/tiny-GGUF: Q2_K (0.00 GB)"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_cannot_for_now_is_asked_again(pulls: Pulls, status: int) -> None:
    pulls.repo.faults = [Fault(status=status)] * 3
    assert pulls().read_bytes() == CONTENT
    assert pulls.pauses == [0.5, 1.0, 2.0]


def test_a_server_that_will_not_is_not_asked_again(pulls: Pulls) -> None:
    pulls.repo.faults = [Fault(status=403)]
    with pytest.raises(PullError, match="answers 403"):
        pulls()
    assert len(pulls.begins) == 1


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "there is no maker/tiny-GGUF at the Hub, or it is private"),
        (403, "GatedRepo", "wants its licence accepted"),
        (400, "", "answers 400"),
    ],
)
def test_a_refusal_says_what_to_do(pulls: Pulls, status: int, code: str, message: str) -> None:
    pulls.repo.refusal = status, code
    with pytest.raises(PullError, match=message):
        pulls()
    assert not pulls.folder.exists()


@pytest.mark.parametrize("page", [b"<html>log in to the hotel network</html>", b"[]", b'{"id": "x", "siblings": [{}]}'])
def test_somebody_else_who_answers_is_no_hub(pulls: Pulls, page: bytes) -> None:
    pulls.repo.page = page
    with pytest.raises(DiscoError):
        pulls()


def test_a_hub_that_is_not_there_is_told_after_some_tries(pulls: Pulls) -> None:
    pulls.server.url = "http://127.0.0.1:1"
    with pytest.raises(PullError, match=r"cannot be reached"):
        pulls()
    assert len(pulls.pauses) == remote_source.MAX_TRIES - 1


def test_offline_is_offline(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullError, match="HF_HUB_OFFLINE"):
        pulls()


def test_without_room_nothing_is_fetched(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(pulls.folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=hub.SPARE_BYTES + SIZE - 1))
    with pytest.raises(PullError, match=r"no room in .*: 0\.00 GB are still to come"):
        pulls()
    (pulls.folder / f"{PREFIX}of-another").write_bytes(bytes(20_000_000))
    (pulls.folder / f"{PREFIX}gone").symlink_to(pulls.folder / "nowhere")
    with pytest.raises(PullError, match=r"0\.02 GB are of other fetches that have not ended \(\.pull-… in it\)"):
        pulls()
    assert pulls.begins == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=hub.SPARE_BYTES + SIZE))
    assert pulls().exists()


def test_a_model_in_parts_has_its_first_part_last(pulls: Pulls) -> None:
    names = [f"big-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    pulls.repo.files |= {f"Q8_0/{name}": model_bytes(50_000, seed) for seed, name in enumerate(names)}
    pulls.repo.faults = [Fault(after=10_000), Fault(), Fault()] + [Fault()] * 10
    with pytest.raises(PullError):
        pulls("maker/tiny-GGUF:q8_0")
    assert names[0] not in pulls.left
    pulls.repo.faults = []
    assert pulls("maker/tiny-GGUF:q8_0") == pulls.folder / names[0]
    assert pulls.left == names
    assert [(pulls.folder / name).read_bytes() for name in names] == [model_bytes(50_000, seed) for seed in range(3)]
    assert list(dict.fromkeys(name for name, *_ in pulls.told)) == names[::-1]


def test_a_small_file_that_git_keeps_has_a_checksum_too(pulls: Pulls) -> None:
    pulls.repo.plain.add("tiny.Q4_K_M.gguf")
    assert pulls().read_bytes() == CONTENT


def test_what_is_here_already_is_not_fetched_again(pulls: Pulls) -> None:
    path = pulls()
    assert pulls() == path
    assert len(pulls.begins) == 1
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(PullError, match="is another file"):
        pulls()
    assert path.read_bytes() == CONTENT[:-1] + b"?"


def test_the_token_goes_to_the_hub_and_not_to_where_it_keeps_its_bytes(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pulls()
    [request] = pulls.repo.asked
    assert pulls.repo.tokens == ["Bearer hf_secret"]
    assert request.host.startswith("localhost:")
    assert request.authorization is None


@pytest.mark.parametrize("name", [".hidden.gguf", "a\nb.gguf"])
def test_a_file_whose_name_is_none_here_is_refused(pulls: Pulls, name: str) -> None:
    pulls.repo.files = {name: CONTENT}
    with pytest.raises(PullError, match="no name for one here"):
        pulls()
    assert pulls.left == []


def test_a_digest_that_is_none_names_no_file(pulls: Pulls) -> None:
    pulls.repo.digests["tiny.Q4_K_M.gguf"] = "../../../escaped"
    with pytest.raises(ConfigError, match="no GGUF model"):
        pulls()


def test_two_pulls_of_one_file_do_not_mix(pulls: Pulls) -> None:
    pulls.folder.mkdir()
    file = RemoteFile("tiny.Q4_K_M.gguf", SIZE, hashlib.sha256(CONTENT).hexdigest())
    with Part(file, pulls.folder, lambda _: None) as part:
        part.write(CONTENT[:10])
        with pytest.raises(ConfigError, match="another `disco models pull`"):
            pulls()
        assert part.path.read_bytes() == CONTENT[:10]
    assert pulls().read_bytes() == CONTENT


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_of_two_pulls_at_once_of_one_name_the_later_one_writes_over_nothing(
    pulls: Pulls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool, same: bool
) -> None:
    def no_links(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    other = tmp_path / "tiny.Q4_K_M.gguf"
    other.write_bytes(theirs := CONTENT if same else model_bytes(SIZE, 1))
    if not links:
        monkeypatch.setattr("disco_daemon.models.part.os.link", no_links)

    def pull_beside(begin: Callable[[object], None]) -> Path:
        return pull("maker/tiny-GGUF", pulls.folder, pulls.lines.append, pulls._tell, pulls.server.url, begin=begin)

    def meanwhile(_files: object) -> None:  # as by a program that knows nothing of the locks
        other.rename(pulls.folder / other.name)

    if same:
        assert pull_beside(meanwhile).read_bytes() == CONTENT
        assert pulls.left == [other.name]
        return
    with pytest.raises(ConfigError, match="has come meanwhile, and is another file: move it away, then pull again"):
        pull_beside(meanwhile)
    assert (pulls.folder / other.name).read_bytes() == theirs
    (pulls.folder / other.name).unlink()
    assert pulls().read_bytes() == CONTENT
    assert pulls.begins == [0], "what came is kept"
    assert pulls.left == [other.name]


def test_a_second_pull_of_one_name_is_refused_before_it_fetches_anything(pulls: Pulls, tmp_path: Path) -> None:
    other = tmp_path / "tiny.Q4_K_M.gguf"
    other.write_bytes(model_bytes(SIZE, 1))

    def meanwhile(_files: object) -> None:
        with pytest.raises(ConfigError, match=r"is fetching tiny\.Q4_K_M\.gguf: let it end first"):
            copy_in(other, pulls.folder, pulls.lines.append, pulls._tell)
        assert pulls.told == []

    took = pull("maker/tiny-GGUF", pulls.folder, pulls.lines.append, pulls._tell, pulls.server.url, begin=meanwhile)
    assert took.read_bytes() == CONTENT
    assert pulls.left == [other.name]


def test_a_model_of_the_list_is_the_one_that_the_list_says_or_is_refused(pulls: Pulls) -> None:
    def pinned(revision: str = "", sha256: str = "") -> Path:
        pin = Pin(revision, sha256)
        return pull("maker/tiny-GGUF", pulls.folder, pulls.lines.append, pulls._tell, pulls.server.url, pin=pin)

    right = hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(PullError, match=f"has the checksum {right} at the Hub, and the list of models says {'a' * 64}"):
        pinned(sha256="a" * 64)
    gone = "f" * 40
    with pytest.raises(PullError, match=f"names the commit {gone} of maker/tiny-GGUF, and the Hub .* has none such"):
        pinned(revision=gone)
    pulls.repo.commits.add(gone)  # a mirror that gives another one in its place
    with pytest.raises(PullError, match=f"gives the commit {COMMIT} in its place"):
        pinned(revision=gone)
    assert pulls.repo.asked == [], "nothing was fetched"
    assert pinned(COMMIT, right.upper()).read_bytes() == CONTENT


def test_a_link_that_leads_nowhere_keeps_no_file_from_its_name(pulls: Pulls) -> None:
    pulls.folder.mkdir()
    (pulls.folder / "tiny.Q4_K_M.gguf").symlink_to(pulls.folder / "gone")
    assert pulls().read_bytes() == CONTENT
    assert pulls.left == ["tiny.Q4_K_M.gguf"]


def test_a_folder_that_cannot_be_made_says_what_to_do(pulls: Pulls) -> None:
    pulls.folder.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="set DISCO_MODELS_DIR"):
        pulls()


def test_a_disk_that_fills_up_keeps_what_is_there(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int, _data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("disco_daemon.models.part.os.write", full)
        with pytest.raises(ConfigError, match="no room left"):
            pulls()
    assert pulls().read_bytes() == CONTENT


@pytest.mark.parametrize("copied", [False, True])
def test_what_others_write_meanwhile_leaves_the_spare_room_free(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copied: bool
) -> None:
    usage, free = shutil.disk_usage(tmp_path), [hub.SPARE_BYTES + SIZE, hub.SPARE_BYTES, hub.SPARE_BYTES - 1]
    monkeypatch.setattr(hub, "LOOK_BYTES", SIZE // 4)
    monkeypatch.setattr("disco_daemon.models.local_files.CHUNK", SIZE // 8)
    (source := tmp_path / "mine.gguf").write_bytes(CONTENT)

    def fetch() -> Path:
        return copy_in(source, pulls.folder, lambda _: None, lambda *_: None) if copied else pulls()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free.pop(0)))
        with pytest.raises(ConfigError, match="no room left"):
            fetch()
    assert free == []
    [part] = pulls.folder.iterdir()
    assert 0 < part.stat().st_size < SIZE
    assert fetch().read_bytes() == CONTENT


def test_a_file_of_this_machine_is_copied_checked_and_gone_on_with(pulls: Pulls, tmp_path: Path) -> None:
    source = tmp_path / "mine.Q8_0.gguf"
    source.write_bytes(CONTENT)
    pulls.folder.mkdir()
    digest = hashlib.sha256(CONTENT).hexdigest()
    (pulls.folder / f"{PREFIX}{digest[:24]}").write_bytes(CONTENT[:1000])
    path = copy_in(source, pulls.folder, pulls.lines.append, pulls._tell)
    assert path == pulls.folder / source.name
    assert path.read_bytes() == CONTENT
    assert source.read_bytes() == CONTENT, "it stays where it is"
    assert pulls.left == [source.name]
    assert any("going on with" in line for line in pulls.lines)
    assert copy_in(source, pulls.folder, pulls.lines.append, pulls._tell) == path
    source.write_bytes(b"no model")
    with pytest.raises(PullError, match="is there already, and is another file"):
        copy_in(source, pulls.folder, pulls.lines.append, pulls._tell)
    other = source.with_name("other.gguf")
    other.write_bytes(b"no model at all")
    with pytest.raises(PullError, match="is no model"):
        copy_in(other, pulls.folder, pulls.lines.append, pulls._tell)
    with pytest.raises(ConfigError, match="cannot be read"):
        copy_in(tmp_path / "none.gguf", pulls.folder, pulls.lines.append, pulls._tell)
    assert pulls.begins == [], "nobody is asked"


@pytest.mark.parametrize("after", ["reading", "checking"])
@pytest.mark.parametrize("now", [CONTENT + b"more", CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_file_of_this_machine_that_is_still_written_is_refused_and_leaves_nothing_behind(
    pulls: Pulls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, now: bytes
) -> None:
    source = tmp_path / "growing.gguf"
    source.write_bytes(CONTENT)
    os.utime(source, ns=(0, 0))

    def then(done: Callable[..., Any]) -> Callable[..., Any]:
        def write_behind(*args: Any) -> Any:
            found = done(*args)
            source.write_bytes(now)
            return found

        return write_behind

    with monkeypatch.context() as patch:
        if after == "reading":
            patch.setattr("disco_daemon.models.local_files.hashlib.file_digest", then(hashlib.file_digest))
        else:
            patch.setattr(hub, "_check_room", then(hub._check_room))
        with pytest.raises(ConfigError, match="is being written by another program"):
            copy_in(source, pulls.folder, pulls.lines.append, pulls._tell)
    assert not pulls.folder.exists() or pulls.left == []
    assert copy_in(source, pulls.folder, pulls.lines.append, pulls._tell).read_bytes() == now


def test_the_address_of_a_file_at_the_hub_names_that_file(pulls: Pulls) -> None:
    pulls.repo.files["deep/tiny.Q8_0.gguf"] = model_bytes(SIZE, 1)
    for kind in ("resolve/main", "blob/0123abc"):
        url = f"https://huggingface.co/maker/tiny-GGUF/{kind}/deep/tiny.Q8_0.gguf"
        assert pulls(url).read_bytes() == pulls.repo.files["deep/tiny.Q8_0.gguf"]
    assert pulls(f"{url}?download=true").name == "tiny.Q8_0.gguf"
