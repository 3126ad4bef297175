"""The price lists that ship, and the user's own files."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from disco_daemon.config import pricelist
from disco_daemon.endpoints.continuation import Way
from disco_daemon.errors import ConfigError

SERVERS = {
    "openai", "deepseek", "mistral", "cohere", "anthropic", "google", "groq", "together", "openrouter", "local",
    "paper",
}  # fmt: skip
CATALOG = pricelist.load()


def test_the_shipped_lists_are_all_there() -> None:
    assert {profile.name for profile in CATALOG.profiles} == SERVERS


def test_every_price_has_a_source_and_a_day() -> None:
    for profile in CATALOG.profiles:
        for price in profile.models.values():
            assert price.as_of is not None
            assert date(2024, 1, 1) < price.as_of <= date(2026, 11, 21)
            assert price.source.startswith("https://") or profile.private


def test_every_server_says_whether_closing_stops_billing_and_who_says_so() -> None:
    for profile in CATALOG.profiles:
        assert profile.closing_stops_billing is None or profile.closing_source.startswith("https://")
    # as OpenRouter lists them: https://openrouter.ai/docs/api-reference/streaming
    stops = {p.name for p in CATALOG.profiles if p.closing_stops_billing}
    assert stops == {"openai", "anthropic", "cohere", "together", "deepseek", "local"}


@pytest.mark.parametrize("name", sorted(SERVERS - {"local", "paper"}))
def test_a_lists_continuation_is_what_the_endpoint_does_there(name: str) -> None:
    profile = CATALOG.named(name)
    assert profile is not None
    way = Way.from_setting("auto", profile.urls[0] + ("/beta" if name == "deepseek" else ""))
    assert profile.continuation == (way.method if way.known else "auto")


@pytest.mark.parametrize(
    ("url", "model", "prices"),
    [
        ("https://api.openai.com/v1", "gpt-4o-mini-2024-07-18", (0.15, 0.075, 0.60)),
        ("https://api.deepseek.com/beta", "deepseek-flash", (0.30, 0.006, 1.20)),
        ("https://api.mistral.ai/v1", "mistral-small-2603", (0.15, 0.015, 0.60)),
        ("https://api.cohere.com/compatibility/v1", "command-r-08-2024", (0.15, 0.15, 0.60)),
        ("https://api.anthropic.com/v1/", "claude-haiku-4-5-20251001", (1, 0.1, 5)),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", "models/gemini-2.5-flash", (0.3, 0.03, 2.5)),
        ("https://api.groq.com/openai/v1", "llama-3.3-70b-versatile", (0.59, 0.59, 0.79)),
        ("https://api.together.xyz/v1", "meta-llama/Llama-3.3-70B-Instruct-Turbo", (0.88, 0.88, 0.88)),
        ("https://openrouter.ai/api/v1", "openai/gpt-4o-mini", (0.15, 0.075, 0.60)),
        ("http://localhost:8080/v1", "qwen2.5", (0, 0, 0)),
    ],
)
def test_well_known_prices(url: str, model: str, prices: tuple[float, float, float]) -> None:
    price = CATALOG.price(url, model)
    assert (price.input, price.cached_input, price.output) == prices
    assert price.known


def test_the_papers_services_have_prices_but_no_address() -> None:
    paper = CATALOG.named("paper")
    assert paper is not None
    assert set(paper.models) >= {"gpt-4o-mini", "deepseek-v2.5", "command", "llama-3-70b"}
    assert paper.reference
    assert not paper.urls


def test_a_folder_of_the_users_goes_before_what_ships(tmp_path: Path) -> None:
    text = 'base_url = "https://api.openai.com/v1"\n[models."gpt-4o-mini"]\ninput = 1\noutput = 2\n'
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    (tmp_path / "notes.txt").write_text("not a list", "utf-8")
    own = pricelist.load(tmp_path)
    assert own.price("https://api.openai.com/v1", "gpt-4o-mini").output == 2
    assert own.price("https://api.openai.com/v1", "gpt-4o").output == 10
    assert own.price("https://api.openai.com/v1", "gpt-4o-mini").source == str(tmp_path / "mine.toml")


def test_no_folder_is_fine(tmp_path: Path) -> None:
    assert pricelist.load(tmp_path / "none") == CATALOG


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"base_url = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"x = " + b"1" * pricelist.MAX_BYTES, "longer than"),
        (b"colour = 1", "colour"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, raw: bytes, what: str) -> None:
    (tmp_path / "mine.toml").write_bytes(raw)
    with pytest.raises(ConfigError) as e:
        pricelist.load(tmp_path)
    assert str(tmp_path / "mine.toml") in str(e.value)
    assert what in str(e.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").mkdir()
    with pytest.raises(ConfigError, match=r"mine\.toml cannot be read"):
        pricelist.load(tmp_path)
