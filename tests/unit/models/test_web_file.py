"""Fetching a model by its address: over a line that breaks, and from servers that do not keep their word."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from disco_daemon.errors import ConfigError, DiscoError
from disco_daemon.models.hub import pull
from disco_daemon.models.part import KEPT_S, PREFIX, Part, drop_old
from disco_daemon.models.quants import Pin, RemoteFile
from disco_daemon.models.remote_source import MAX_TRIES, PullError
from disco_daemon.models.web_file import MOST_REDIRECTS, WebFile, is_web_address
from tests.fixtures.gguf import header, number
from tests.fixtures.hub import COMMIT, Fault, HubServer, Repo

CONTENT = header(number("x.block_count", 1)) + random.Random(0).randbytes(600_000)
OTHER = header(number("x.block_count", 1)) + random.Random(1).randbytes(600_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "tiny-Q4_K_M.gguf"


@pytest.fixture
def host() -> Iterator[HubServer]:
    with HubServer(Repo(files={NAME: CONTENT})) as server:
        yield server


def fetched(server: HubServer, folder: Path, path: str = f"/bytes/{NAME}", sha256: str = "") -> Path:
    return pull(
        f"{server.url}{path}", folder / "models", lambda _: None, lambda *_: None, pause=lambda _: None,
        pin=Pin("", sha256),
    )  # fmt: skip


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "models").glob("*"))


def begins(server: HubServer) -> list[int]:
    return [request.begin for request in server.repo.asked]


@pytest.mark.parametrize("sha256", ["", SHA256, SHA256.upper()])
def test_a_file_comes_whole_over_a_line_that_is_cut_and_no_key_goes_along(
    host: HubServer, tmp_path: Path, sha256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    host.repo.faults = [Fault(after=100_000, reset=n % 2 == 1) for n in range(5)]
    path = fetched(host, tmp_path, sha256=sha256)
    assert (path.name, path.read_bytes()) == (NAME, CONTENT)
    assert left(tmp_path) == [NAME]
    assert len(begins(host)) == 6
    assert begins(host) == sorted(set(begins(host)))
    assert {request.authorization for request in host.repo.asked} == {None}
    assert fetched(host, tmp_path, sha256=sha256) == path
    assert len(begins(host)) == 6, "it is here already"


def broken_off(host: HubServer, folder: Path, sha256: str = "") -> None:
    host.repo.faults = [Fault(after=200_000)] + [Fault()] * MAX_TRIES
    with pytest.raises(PullError, match="the same command goes on from there"):
        fetched(host, folder, sha256=sha256)
    host.repo.faults, host.repo.asked[:] = [], []


@pytest.mark.parametrize(("sha256", "etag"), [(SHA256, ""), ("", '"v1"')])
def test_a_later_pull_goes_on_where_it_is_known_to_be_the_same_file(
    host: HubServer, tmp_path: Path, sha256: str, etag: str
) -> None:
    host.repo.etag = etag
    broken_off(host, tmp_path, sha256)
    assert fetched(host, tmp_path, sha256=sha256).read_bytes() == CONTENT
    assert begins(host) == [200_000]


@pytest.mark.parametrize("etag", ["", 'W/"v1"', '"v1"'])
def test_halves_of_two_versions_never_become_one_file(host: HubServer, tmp_path: Path, etag: str) -> None:
    host.repo.etag = etag
    broken_off(host, tmp_path)
    host.repo.files[NAME] = OTHER
    if etag == '"v1"':
        host.repo.etag = '"v2"'
    assert fetched(host, tmp_path).read_bytes() == OTHER


def test_a_version_that_changes_under_way_begins_again(host: HubServer, tmp_path: Path) -> None:
    host.repo.etag = '"v1"'

    def pause(_: float) -> None:
        host.repo.files[NAME], host.repo.etag = OTHER, '"v2"'

    host.repo.faults = [Fault(after=200_000)]
    path = pull(f"{host.url}/bytes/{NAME}", tmp_path, lambda _: None, lambda *_: None, pause=pause)
    assert path.read_bytes() == OTHER


def test_a_file_of_another_size_than_a_moment_ago_is_refused(host: HubServer, tmp_path: Path) -> None:
    def pause(_: float) -> None:
        host.repo.files[NAME] = CONTENT[:-1]

    host.repo.faults = [Fault(after=200_000)]
    with pytest.raises(PullError, match="another file now"):
        pull(f"{host.url}/bytes/{NAME}", tmp_path, lambda _: None, lambda *_: None, pause=pause)
    assert not (tmp_path / NAME).exists()


def test_a_wrong_checksum_leaves_nothing_and_a_file_of_that_name_is_not_believed(
    host: HubServer, tmp_path: Path
) -> None:
    with pytest.raises(PullError, match="checksum"):
        fetched(host, tmp_path, sha256="0" * 64)
    assert left(tmp_path) == []
    fetched(host, tmp_path)
    with pytest.raises(PullError, match="is another file"):
        fetched(host, tmp_path, sha256="0" * 64)


def test_a_server_that_knows_no_ranges_begins_again(host: HubServer, tmp_path: Path) -> None:
    host.repo.ranges = False
    host.repo.faults = [Fault(after=200_000)]
    assert fetched(host, tmp_path).read_bytes() == CONTENT


def test_what_is_no_model_gets_no_name(host: HubServer, tmp_path: Path) -> None:
    host.repo.files[NAME] = b"<html>log in</html>" * 1000
    with pytest.raises(PullError, match="no model"):
        fetched(host, tmp_path)
    assert left(tmp_path) == []


def test_all_parts_of_a_model_are_fetched(host: HubServer, tmp_path: Path) -> None:
    names = [f"big-0000{n}-of-00002.gguf" for n in (1, 2)]
    host.repo.files = dict(zip(names, (CONTENT, OTHER), strict=True))
    assert fetched(host, tmp_path, f"/bytes/{names[1]}").name == names[0]
    assert left(tmp_path) == names
    with pytest.raises(ConfigError, match="one of 2 parts"):
        fetched(host, tmp_path, f"/bytes/{names[0]}", SHA256)


def test_redirects_are_followed_a_few_times_and_never_to_where_others_can_listen(
    host: HubServer, tmp_path: Path
) -> None:
    resolved = f"/{host.repo.name}/resolve/{COMMIT}/{NAME}"
    assert fetched(host, tmp_path, resolved).read_bytes() == CONTENT
    for to, why in (("", f"more than {MOST_REDIRECTS} times"), ("http://192.0.2.1/x.gguf", "https only"),
                    ("file:///etc/passwd", "https only"), ("https://[", "not followed")):  # fmt: skip
        with pytest.raises(PullError, match=why):
            fetched(host, tmp_path, f"/to/{quote(to, safe='')}/x.gguf")


@pytest.mark.parametrize("to", ["http://localhost:11434/x.gguf", "https://127.0.0.1/x.gguf", "https://10.0.0.1/x",
                                "https://[::1]/x", "https://169.254.169.254/latest", "https://127.1/x",
                                "https://2130706433/x", "https://0x7f.1/x", "https://[::ffff:10.0.0.1]/x",
                                "https://inside.example.com/x"])  # fmt: skip
def test_no_host_of_the_open_network_points_into_ones_own(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def answered(host: str, *args: Any, **kinds: Any) -> Any:  # a fault: a name of the open network for one of ours
        return look_up(
            {"inside.example.com": "10.1.2.3", "models.example.com": "192.0.2.1"}.get(host, host), *args, **kinds
        )

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    with pytest.raises(PullError, match="address of this machine or its network"):
        WebFile("https://models.example.com/x.gguf")._pointed_to("https://models.example.com/x.gguf", to)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://models.example.com/x.gguf", "https only"),
        ("https://models.example.com/x.zip", "names no GGUF file"),
        ("https://models.example.com/", "names no GGUF file"),
        ("https:///x.gguf", "no address"),
        ("https://u:secret@models.example.com/x", "https://models.example.com/x names no GGUF file"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anybody_is_asked(url: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as e:
        pull(url, tmp_path / "models", lambda _: None, lambda *_: None)
    assert "secret" not in str(e.value)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(("status", "why"), [(403, "answers 403"), (404, "answers 404")])
def test_a_server_that_will_not_is_not_asked_again(host: HubServer, tmp_path: Path, status: int, why: str) -> None:
    host.repo.faults = [Fault(status=status)]
    with pytest.raises(PullError, match=why):
        fetched(host, tmp_path)
    assert len(host.repo.asked) == 1


def test_addresses_of_the_hub_are_the_hub_s() -> None:
    assert not is_web_address("https://huggingface.co/a/b-GGUF/resolve/main/x.gguf")
    assert not is_web_address("a/b-GGUF:Q8_0")
    assert is_web_address("https://example.com/x.gguf")
    with pytest.raises(DiscoError):
        pull("https://huggingface.co/a/b/tree/main", Path("/nowhere"), lambda _: None, lambda *_: None)


def test_a_part_of_a_fetch_has_a_name_of_its_own(host: HubServer, tmp_path: Path) -> None:
    host.repo.etag = '"v1"'
    broken_off(host, tmp_path)
    assert [name.startswith(PREFIX) for name in left(tmp_path)] == [True]


def test_a_file_of_that_size_is_not_said_to_be_the_same_one(host: HubServer, tmp_path: Path) -> None:
    fetched(host, tmp_path)
    host.repo.files[NAME] = OTHER
    said: list[str] = []
    pull(f"{host.url}/bytes/{NAME}", tmp_path / "models", said.append, lambda *_: None)
    assert "only its checksum could say (--sha256)" in said[-1]


def test_a_file_that_is_packed_on_the_way_is_not_unpacked(host: HubServer, tmp_path: Path) -> None:
    host.repo.encoding = "gzip, gzip, gzip"
    with pytest.raises(PullError, match="sends the file packed"):
        fetched(host, tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "models").glob("*")) == 0


def test_what_nobody_goes_on_with_is_removed_after_a_month(host: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    now = time.time()
    for name, age in (("old", KEPT_S + 60), ("new", KEPT_S - 3600), ("name-old", KEPT_S + 60)):
        (folder / f"{PREFIX}{name}").write_bytes(b"x")
        os.utime(folder / f"{PREFIX}{name}", (now - age, now - age))
    (folder / "old.gguf").write_bytes(b"mine")
    os.utime(folder / "old.gguf", (0, 0))
    fetched(host, tmp_path)
    assert left(tmp_path) == [f"{PREFIX}new", "old.gguf", NAME]
    with Part(RemoteFile(NAME, 10, "a" * 64), folder, lambda _: None):
        drop_old(folder, now + 2 * KEPT_S)
        assert left(tmp_path) == [f"{PREFIX}{'a' * 24}", "old.gguf", NAME], "somebody goes on with it now"
