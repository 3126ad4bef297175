"""How the sides are, in words, and the status line that says so at any width."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from disco_daemon.client.side_health import (  # fmt: skip
    REASONS,
    STATES,
    SideHealth,
    breaker_words,
    fallback_words,
    short_model,
    side_health,
    sides_of,
)
from disco_tui.draw.theme import TextTheme
from disco_tui.widgets.status_line import status_text

READY = {"model": "SmolLM2-135M-Instruct.Q4_1", "state": "ready", "last_error": None}
SERVER: dict[str, Any] = {"model": "gpt-4o-mini", "state": "configured", "tried": True, "failing": None, "down_s": 0.0}
REFUSED = SERVER | {"failing": {"reason": "unauthorized", "since": 0.0}}
CAP = {"unit": "$", "limit": 0.5, "spent": 0.5, "reserved": 0.0}


def state(server: Any = SERVER, device: Any = READY, **more: Any) -> dict[str, Any]:
    sides = {name: side for name, side in (("device", device), ("server", server)) if side is not None}
    return {"endpoints": sides, "money": {"caps": {}, "spent": {"usd_today": 0.019}}} | more


def line(said: dict[str, Any] | None, width: int, *, plain: bool = False) -> str:
    return status_text(said, "no daemon: F9 starts one", TextTheme(plain=plain), width).plain


def test_the_line_says_all_there_is_where_there_is_room() -> None:
    assert line(state(REFUSED, private=False), 100) == (
        "◆ SmolLM2-135M · ready   ◇ gpt-4o-mini ✗ key refused · F5   $0.019 today"
    )
    assert line(state(private=True), 100).endswith("◇ gpt-4o-mini · not asked   $0.019 today   private")
    assert line(state(None), 100) == "◆ SmolLM2-135M · ready"
    assert line(state(REFUSED), 100, plain=True) == (
        "[device] SmolLM2-135M ready, [server] gpt-4o-mini: key refused F5, $0.019 today"
    )
    assert line(None, 100).startswith("no daemon")


@pytest.mark.parametrize("plain", [False, True])
def test_in_thirty_columns_it_says_who_is_ill_and_how(plain: bool) -> None:
    for reason, (words, _) in REASONS.items():
        said = line(state(SERVER | {"failing": {"reason": reason, "since": 0.0}}), 30, plain=plain)
        assert words in said or (plain and said.endswith("…"))
    assert "restarting" in line(state(device=READY | {"state": "restarting"}), 30)


@given(
    width=st.integers(1, 130), plain=st.booleans(), private=st.booleans(), name=st.text(max_size=60),
    engine=st.sampled_from([*STATES, "else"]), reason=st.sampled_from([None, *REASONS, "else"]), down=st.floats(0, 300),
)  # fmt: skip
def test_whatever_is_wrong_the_line_fits(
    width: int, plain: bool, private: bool, name: str, engine: str, reason: str | None, down: float
) -> None:
    failing = None if reason is None else {"reason": reason, "since": 0.0}
    said = line(
        state(SERVER | {"failing": failing, "down_s": down}, READY | {"state": engine, "model": name}, private=private),
        width, plain=plain,
    )  # fmt: skip
    assert 0 < cell_len(said) <= max(1, width)


@pytest.mark.parametrize(
    ("endpoint", "words", "key"),
    [
        (REFUSED, "key refused", "F5"),
        (SERVER | {"tried": False}, "untried", ""),
        (SERVER | {"failing": {"reason": "rate_limited", "since": 0.0}, "down_s": 12.4}, "rate-limited for 12 s", ""),
        (READY | {"down_s": 8.0, "crashes": 3}, "left alone for 8 s after 3 crashes", ""),
        (READY | {"state": "loading"}, "loading", ""),
        (READY | {"state": "failed"}, "failed", "F5"),
        (SERVER | {"failing": {"reason": "a_new_one", "since": 0.0}}, "a new one", ""),
    ],
)
def test_each_illness_has_its_words_and_the_key_that_mends_it(endpoint: Any, words: str, key: str) -> None:
    found = side_health(endpoint)
    assert (found.words, found.key) == (words, key)


def test_why_a_server_is_left_alone_and_until_when_is_said() -> None:
    at = f"{datetime.fromtimestamp(60.0).astimezone():%H:%M:%S}"
    said = {
        ("closed", None, None): "",
        ("open", "rate_limited", 60.0): f"open (rate-limited): the server is left alone until {at}",
        ("open", "unauthorized", None): "open (key refused): the server is asked again when its settings change, "
        "or after `disco config reload`",
        ("half_open", "stalled", None): "half open (went silent): one request at a time tries the server, "
        "the others go elsewhere",
    }
    for (is_in, why, until_s), words in said.items():
        assert breaker_words({"breaker": {"state": is_in, "why": why, "until_s": until_s}}) == words
    assert breaker_words({}) == ""


def test_a_cap_and_privacy_close_the_side_that_they_are_about() -> None:
    capped = sides_of(state() | {"money": {"caps": {"usd_per_day": CAP}}})
    assert (capped["server"].words, capped["device"].words) == ("capped", "ready")
    assert sides_of(state(REFUSED, private=True))["server"] == SideHealth("gpt-4o-mini", "not asked")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M"), ("openai/gpt-4o-mini", "gpt-4o-mini"), ("x.gguf", "x"),
        ("Qwen3-4B-Instruct-2507-UD-Q4_K_XL.gguf", "Qwen3-4B-Instruct-2507"), ("Q4_K_M", "Q4_K_M"), ("", ""),
    ],
)  # fmt: skip
def test_a_models_name_is_short(name: str, short: str) -> None:
    assert short_model(name) == short


@pytest.mark.parametrize(
    ("reason", "down_s", "says"),
    [
        ("unauthorized", 0.0, "key refused since {}"),
        ("rate_limited", 12.4, "rate-limited since {}, for 12 s more"),
        ("dropped", 0.0, "broke off at {}"),
    ],
)
def test_what_lasts_has_begun_and_what_happens_has_a_time(reason: str, down_s: float, says: str) -> None:
    at = f"{datetime.fromtimestamp(0.0).astimezone():%H:%M}"
    found = side_health(SERVER | {"failing": {"reason": reason, "since": 0.0}, "down_s": down_s})
    assert found.lasting == says.format(at)


@pytest.mark.parametrize(
    ("error", "server", "device", "says"),
    [
        ("unreachable", 0, 9, "the server: unreachable; this machine answered"),
        ("dropped", 5, 9, "the server: broke off; this machine went on"),
        ("unauthorized", 0, 0, ""),
        (None, 5, 9, ""),
    ],
)
def test_an_answer_that_the_server_was_to_write_says_why_it_did_not(
    error: str | None, server: int, device: int, says: str
) -> None:
    record = {"endpoints": {"server": {"error": error}}, "tokens": {"server": server, "device": device}}
    assert fallback_words(record) == says
    assert fallback_words({}) == ""


@pytest.mark.parametrize(
    ("reason", "side", "device", "is_said"),
    [
        ("only", "device", 9, True),
        ("only", "server", 9, False),
        ("grade", "device", 0, False),
        ("route", "device", 9, False),
    ],
)
def test_an_answer_by_the_stand_in_of_a_server_that_was_not_asked_says_so(
    reason: str, side: str, device: int, *, is_said: bool
) -> None:
    record = {"reason": reason, "stand_in": {"side": side, "why": "."}, "tokens": {"device": device}, "endpoints": {}}
    assert bool(fallback_words(record)) is is_said
    assert fallback_words({**record, "stand_in": None}) == ""


def test_a_server_whose_cap_is_held_by_answers_that_run_is_capped() -> None:
    cap = {"unit": "$", "limit": 1.0, "spent": 0.1, "reserved": 0.9, "reset_at": 0.0}
    endpoints = {"server": {"model": "m", "state": "configured", "tried": True}}
    sides = [
        sides_of({"endpoints": endpoints, "money": {"caps": {"usd_per_day": cap | more}}})
        for more in ({}, {"reserved": 0.8})
    ]
    assert [found["server"].words for found in sides] == ["capped", "ready"]
