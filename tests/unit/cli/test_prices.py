"""`disco prices` shows what is known, and fetches a newer list: bounded, checked, and only when it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disco_daemon.cli import prices
from disco_daemon.cli.main import main
from disco_daemon.config import pricelist
from disco_daemon.config.pricelist import load
from disco_daemon.config.schema import Config, NamedServer
from disco_daemon.errors import ConfigError

OPENAI = "https://api.openai.com/v1"
Disco = Callable[..., tuple[int, str, str]]


def document(**prices: float) -> list[dict[str, Any]]:
    """A list as genai-prices has it: some models of OpenAI, and many of a server that we know nothing of."""
    models = [
        {"id": name, "match": {"equals": name}, "prices": {"input_mtok": usd, "output_mtok": 2 * usd}}
        for name, usd in prices.items()
    ]
    others = [model | {"id": f"m{i}", "match": {"equals": f"m{i}"}} for i in range(30) for model in models[:1]]
    return [
        {"id": "openai", "name": "OpenAI", "api_pattern": "https://api\\.openai\\.com", "models": models},
        {"id": "x-ai", "name": "xAI", "api_pattern": "https://api\\.x\\.ai", "models": others},
    ]


class Page(BaseHTTPRequestHandler):
    body: bytes = b""
    status = 200
    n_asked = 0

    def do_GET(self) -> None:
        type(self).n_asked += 1
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        if self.status == 302:
            self.send_header("Location", "https://elsewhere.example.com/")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def page() -> Iterator[tuple[type[Page], str]]:
    """A page on this machine, and its address."""
    handler = type("OnePage", (Page,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}/data.json"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def disco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Disco:
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text(
        f'[server]\nbase_url = "{OPENAI}"\nmodel = "gpt-4o-mini"\n'
        f'[[servers]]\nname = "too"\nbase_url = "{OPENAI}"\nmodel = "nobody-knows"\n'
    )

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["prices", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def rows(disco: Disco) -> dict[str, Any]:
    return {row["model"]: row for row in json.loads(disco("--json")[1])}


def test_what_is_known_of_the_servers_in_use_is_shown_with_source_and_day(disco: Disco) -> None:
    code, said, _ = disco()
    assert code == 0
    assert "server/gpt-4o-mini: $0.15 in, $0.6 out, $0.075 in from its cache per million tokens (https://" in said
    assert "too/nobody-knows: not known" in said
    assert "disco prices refresh" in said


def test_a_newer_list_is_fetched_shown_as_a_difference_and_used(
    disco: Disco, page: tuple[type[Page], str], tmp_path: Path
) -> None:
    handler, url = page
    handler.body = json.dumps(document(**{"gpt-4o-mini": 0.1, "nobody-knows": 7.0})).encode()
    code, said, _ = disco("refresh", "--list-url", url, "--dry-run")
    assert (code, (tmp_path / "servers").exists()) == (0, False)
    code, said, _ = disco("refresh", "--list-url", url)
    assert code == 0
    assert "openai: gpt-4o-mini: $0.15 (0.075 cached) in, $0.6 out -> $0.1 in, $0.2 out" in said
    assert "31 are new, 1 have changed, 0 are gone" in said
    found = rows(disco)
    assert (found["gpt-4o-mini"]["input_usd_per_mtok"], found["gpt-4o-mini"]["source"]) == (0.1, url)
    assert (found["nobody-knows"]["known"], found["nobody-knows"]["output_usd_per_mtok"]) == (True, 14.0)
    catalog = pricelist.load(tmp_path / "servers")
    assert catalog.price("https://api.x.ai/v1", "m3").known
    shipped = pricelist.load()
    assert catalog.dearest == shipped.dearest, "what nobody knows is as dear as before"
    assert catalog.stops_billing(OPENAI) is shipped.stops_billing(OPENAI)
    assert catalog.price(OPENAI, "gpt-4o").input == shipped.price(OPENAI, "gpt-4o").input, "the rest stays known"
    handler.body = json.dumps(document(**{"gpt-4o-mini": 0.1})).encode()
    assert "0 are new, 0 have changed, 1 are gone" in disco("refresh", "--list-url", url)[1]


def test_a_password_in_the_lists_address_is_neither_kept_nor_shown(
    disco: Disco, page: tuple[type[Page], str], tmp_path: Path
) -> None:
    handler, url = page
    with_password = url.replace("://", "://anna:s3cret@")
    handler.body = json.dumps(document(**{"gpt-4o-mini": 0.1})).encode()
    code, said, _ = disco("refresh", "--list-url", with_password)
    assert (code, handler.n_asked) == (0, 1)
    assert rows(disco)["gpt-4o-mini"]["source"] == url
    assert "s3cret" not in said + (tmp_path / "servers" / pricelist.FETCHED).read_text()
    handler.status = 404
    assert "s3cret" not in "".join(map(str, disco("refresh", "--list-url", with_password)))


def test_a_list_of_ones_own_and_the_settings_go_before_it(
    disco: Disco, page: tuple[type[Page], str], tmp_path: Path
) -> None:
    handler, url = page
    handler.body = json.dumps(document(**{"gpt-4o-mini": 0.1})).encode()
    disco("refresh", "--list-url", url)
    (tmp_path / "servers" / "own.toml").write_text(f'base_url = "{OPENAI}"\n[models."gpt-4o-mini"]\ninput=9\noutput=9')
    assert rows(disco)["gpt-4o-mini"]["input_usd_per_mtok"] == 9


def test_a_file_needs_no_network_and_with_private_nothing_is_asked_for(
    disco: Disco, page: tuple[type[Page], str], tmp_path: Path
) -> None:
    handler, url = page
    handler.body = json.dumps(document(**{"gpt-4o-mini": 0.2})).encode()
    (tmp_path / "list.json").write_bytes(handler.body)
    with (tmp_path / "config.toml").open("a") as f:
        f.write("[policy]\nprivate = true\n")
    code, _, said = disco("refresh", "--list-url", url)
    assert (code, handler.n_asked) == (1, 0)
    assert "policy.private is on" in said
    assert disco("refresh", "--from", str(tmp_path / "list.json"))[0] == 0
    assert rows(disco)["gpt-4o-mini"]["input_usd_per_mtok"] == 0.2
    assert disco("refresh", "--list-url", url, "--online")[0] == 0
    assert handler.n_asked == 1


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"", "answers 404"),
        (302, b"", "answers 302 and points to https://elsewhere.example.com/"),
        (200, b"<html>", "is no list of genai-prices"),
        (200, b"{}", "is no list of genai-prices: it is no list of providers"),
        (200, b"[" * 100_000, "is no list of genai-prices"),
        (200, b"[]", "has prices of 0 models"),
        (200, json.dumps([{"id": "x", "models": []}]).encode(), "has prices of 0 models"),
        (200, b" " * (9 * 2**20), "is longer than"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_list_changes_nothing_and_says_so(
    status: int, body: bytes, says: str, disco: Disco, page: tuple[type[Page], str], tmp_path: Path
) -> None:
    handler, url = page
    handler.status, handler.body = status, body
    code, _, said = disco("refresh", "--list-url", url)
    assert code == 1
    assert says in said
    assert not (tmp_path / "servers").exists()


def test_prices_are_fetched_by_https_and_a_list_that_was_broken_later_says_what_to_do(
    disco: Disco, tmp_path: Path
) -> None:
    code, _, said = disco("refresh", "--list-url", "http://prices.example.com/data.json")
    assert (code, "by https only" in said) == (1, True)
    (tmp_path / "servers").mkdir()
    for text in ("{", "[]", '{"source": 1, "as_of": 2, "servers": {"x": 3}}', '{"servers": {}}'):
        (tmp_path / "servers" / pricelist.FETCHED).write_text(text)
        with pytest.raises(ConfigError, match=r"disco prices refresh|no day|quotes"):
            pricelist.load(tmp_path / "servers")


def test_what_is_shown_is_what_a_daemon_uses(tmp_path: Path) -> None:
    said = NamedServer(
        name="plain", base_url="https://unlisted.example/v1", models=("a", "b"), input_usd_per_mtok=1.0,
        output_usd_per_mtok=2.0,
    )  # fmt: skip
    config, catalog = Config(servers=(said, msgspec.structs.replace(said, name="own", model="a"))), load(tmp_path)
    rows = {f"{row['server']}/{row['model']}": row for row in prices._rows(config, catalog)}
    assert [rows[f"plain/{model}"]["known"] for model in ("a", "b")] == [True, True]  # said of all that it has …
    assert [rows[f"own/{model}"]["known"] for model in ("a", "b")] == [True, False]  # … and of its own one alone
    assert (rows["plain/b"]["input_usd_per_mtok"], rows["plain/b"]["source"]) == (1.0, "your settings")
