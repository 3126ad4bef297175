from __future__ import annotations

import re
from typing import Any

from disco_daemon.cli.status import (  # fmt: skip
    _breakers,
    _endpoints,
    _energy,
    _engine,
    _estimators,
    _fleet,
    _keys,
    _money,
    _refused,
    _speed,
    _stand_in,
)

STATS = {
    "running": 2, "paused": 1, "swapped": 1, "waiting": 3, "preemptions": 4, "saved_bytes": 3 * 2**20,
    "cells_used": 2048, "cached_tokens": 900, "prompt_tokens": 1200, "iteration_s": 0.0125, "python_share": 0.021,
}  # fmt: skip
SIZES = {"n_ctx": 4096, "n_cells": 8192}


def test_a_stand_in_is_called_one_and_a_fetch_says_how_far_it_is() -> None:
    assert _stand_in({}) == _stand_in({"stand_in": "", "fetch": None}) == []
    [line] = _stand_in({"stand_in": "135M"})
    assert line.startswith("Answers come from a 135M stand-in.")
    fetch = {
        "title": "X", "state": "fetching", "done_bytes": 5e8, "bytes": 2.5e9, "bytes_per_s": None, "message": "",
    }  # fmt: skip
    assert _stand_in({"fetch": fetch}) == ["Fetching X: 20 %, 500 MB of 2.5 GB."]
    assert _stand_in({"fetch": fetch | {"state": "done"}}) == []


def test_the_engine_is_told_in_three_lines() -> None:
    answers, cache, iteration = _engine({"engine": STATS, "bytes_per_token": 2**14} | SIZES)
    assert answers.endswith("2 running, 1 paused, 1 swapped out (3 MiB), 3 waiting; 4 preemptions")
    assert cache.endswith(
        "2048 of 8192 tokens (25 %, 32 of 128 MiB), 4096 an answer's at most; 900 tokens reused, 1200 prefilled"
    )
    assert iteration.endswith("12.5 ms, 2.1 % of it Python")


def test_what_speculation_guessed_is_told_once_it_has_guessed() -> None:
    device = {"engine": STATS | {"drafted": 40, "accepted": 25}, "bytes_per_token": 2**14} | SIZES
    assert _engine(device)[2].endswith("2.1 % of it Python; 25 of 40 guessed tokens right")


def test_what_is_on_disk_is_told_and_why_no_more_is() -> None:
    device: dict[str, Any] = {"bytes_per_token": 2**14} | SIZES
    stats = STATS | {"disk_texts": 3, "disk_bytes": 41 * 2**20}
    assert _engine(device | {"engine": stats})[3] == "on disk      3 conversations, 41 MiB"
    full = stats | {"disk_error": "kv cannot be written"}
    assert _engine(device | {"engine": full})[3].endswith("41 MiB; kv cannot be written")
    none = STATS | {"disk_texts": 0, "disk_bytes": 0, "disk_error": "another engine has it"}
    assert _engine(device | {"engine": none})[3] == "on disk      another engine has it"


def test_what_a_server_has_refused_is_told_with_the_way_to_have_it_asked_again() -> None:
    assert _refused({}) == _refused({"refused": []}) == []
    tools = {"what": "forced_tools", "said": "it said 400:\x1b[2J no", "for_s": 7200}
    first, second = _refused({"refused": [tools, {"what": "images", "said": "no", "for_s": 60}]})
    assert first.startswith("refused      forced tools: it said 400:")
    assert first.endswith("no (asked again in 2.0 h, or after `disco config reload`)")
    assert "\x1b" not in first
    assert second.startswith("             images: no")


def test_an_engine_that_has_computed_nothing_yet_has_nothing_to_tell() -> None:
    assert _engine({"engine": None}) == _engine({}) == []


def test_a_gpu_and_the_tune_are_told_if_there_is_something_to_tell() -> None:
    device = {"n_gpu_layers": 12}
    assert _speed({"endpoints": {"device": device}, "tune": "measuring"}) == [
        "GPU          12 layers",
        "tune         what is fastest here, until somebody asks something",
    ]
    assert _speed({"endpoints": {"device": {"n_gpu_layers": -1}}, "tune": None}) == ["GPU          all layers"]
    moe = {"n_gpu_layers": 49, "n_cpu_moe": 31}
    assert _speed({"endpoints": {"device": moe}, "tune": None}) == ["GPU          49 layers, without the experts of 31"]
    assert _speed({"endpoints": {"device": {"n_gpu_layers": 0}}, "tune": "idle"}) == []
    assert _speed({"endpoints": {}}) == []


MONEY: dict[str, Any] = {
    "usd_per_kwh": 0.3, "effective_usd_per_kwh": 4.2, "scarcer": "server", "threshold_usd_per_kwh": 61.7,
    "power": {"charge": 0.2, "on_mains": False, "throttled": True, "headroom_k": None},
    "server_price": {"input_usd_per_mtok": 0.15, "output_usd_per_mtok": 0.6, "known": True},
    "spent": {"usd_today": 0.0123, "usd_this_month": 1.5, "wh_today": 2.25},
    "caps": {"usd_per_day": {"unit": "$", "limit": 2.0, "spent": 0.0123, "reserved": 0.004, "reset_at": 0.0}},
}  # fmt: skip


def test_money_is_told_with_what_decides_it() -> None:
    rate = "a kWh        is worth $4.20 now (battery at 20 %), throttled by heat, $0.30 set"
    assert _money(MONEY) == [
        f"{rate}; server is scarce, which changes at $61.70",
        "server price $0.15 in, $0.6 out, a million tokens",
        "spent        $0.012 today, $1.50 this month to the server; 2.25 Wh here today",
        "cap          usd_per_day: $0.012 of $2.00, $0.0040 held for what runs",
    ]
    unknown = MONEY | {"server_price": MONEY["server_price"] | {"known": False}}
    assert "see `disco doctor`" in _money(unknown)[1]


def test_without_a_server_nobody_is_scarce_and_nothing_is_billed() -> None:
    alone = MONEY | {"server_price": None, "scarcer": None, "threshold_usd_per_kwh": None, "caps": {}}
    assert _money(alone | {"power": MONEY["power"] | {"on_mains": True, "throttled": False}}) == [
        "a kWh        is worth $4.20 now, $0.30 set",
        "spent        2.25 Wh here today",
    ]


def test_a_figure_of_energy_says_whether_it_was_measured() -> None:
    per = {"source": "rapl", "prefill_j_per_token": 0.02, "decode_j_per_token": 0.25, "relative_error": 0.08}
    (measured,) = _energy({"per_token": per | {"windows": 40}})
    assert measured.endswith("20 mJ a prompt token, 250 an answer's (rapl, measured over 40 windows, ±8 %)")
    (assumed,) = _energy({"per_token": per | {"windows": 0, "relative_error": None}})
    assert assumed.endswith("(rapl, assumed, not measured)")
    assert _energy({"per_token": None}) == []


def test_endpoints_are_a_table_whose_last_column_is_folded() -> None:
    device = {"model": "tiny", "state": "ready", "last_error": None}
    server = {"model": "gpt-4o-mini", "state": "configured", "last_error": "refused " * 6 + "\x1b[31m"}
    assert _endpoints({"endpoints": {"device": device, "server": server | {"tried": False}}}, 60) == [
        "endpoint  model        state    last failure",
        "device    tiny         ready    -",
        "server    gpt-4o-mini  untried  refused refused refused",
        "                                refused refused refused",
        "                                \ufffd[31m",
    ]


def test_a_failure_is_told_with_its_hour_until_the_server_answers() -> None:
    server = {"model": "m", "state": "configured", "last_error": "it said 401", "tried": True}
    failing = server | {"failing": {"reason": "unauthorized", "since": 0.0}}
    ill, well = (_endpoints({"endpoints": {"server": one}}, 80)[1] for one in (failing, server | {"failing": None}))
    assert re.fullmatch(r"server +m +key refused since \d\d:\d\d +it said 401", ill)
    assert re.fullmatch(r"server +m +ready +-", well)


def test_a_breaker_that_is_open_says_why_and_a_closed_one_nothing() -> None:
    shut = {"breaker": {"state": "open", "why": "unauthorized", "until_s": None}}
    assert _breakers({"endpoints": {"device": {}, "server": {"breaker": {"state": "closed"}}}}) == []
    assert _breakers({"endpoints": {"device": {}, "server": shut}}) == [
        (
            "breaker      open (key refused): the server is asked again when its settings change, "
            "or after `disco config reload`"
        )
    ]


def test_a_narrow_terminal_and_an_empty_failure_still_give_rows() -> None:
    server = {"model": "m", "state": "configured", "last_error": " "}
    assert _endpoints({"endpoints": {"server": server}}, 10)[1] == "server    m      ready  -"


def test_a_fleet_is_shown_and_a_whole_device_has_none() -> None:
    fleet = {"hosts": 1, "layers_away": 22, "replicas": 0, "state": "up"}
    assert _fleet({"fleet": fleet}) == ["fleet        up: 22 layers at 1 host"]
    several = {"hosts": 2, "layers_away": 17, "replicas": 1, "state": "up"}
    assert _fleet({"fleet": several}) == ["fleet        up: 17 layers at 2 hosts, 1 replica"]
    assert _fleet({}) == []


def learned(n: int) -> dict[str, Any]:
    server = {
        "n": n, "quantiles_s": {"p50": 0.5, "p95": 2.0, "p99": 6.0},
        "censored_share": 0.0, "availability": 0.95, "shifts": 0,
    }  # fmt: skip
    device, tokens = {"n": n, "c_s": 0.02, "k_s_per_token": 0.01}, {"n": n, "mean": 116.0}
    paced = {"ratio": None, "requests": 0}
    return {
        "server_ttft": server, "device_ttft": device, "realised": paced, "prompts": tokens, "outputs": tokens,
        "constrained": "device", "budget": 0.5, "handed_out": 0.5,
    }  # fmt: skip


def test_what_was_never_seen_is_no_more_than_expected_and_of_no_side_that_is_not_there() -> None:
    assert _estimators(learned(0), {"device": {}, "server": {}})[:4] == [
        "server TTFT  not seen yet; expected: p50 0.50 s, p95 2.00 s, p99 6.00 s",
        "device TTFT  not seen yet; expected: 20 ms + 10.00 ms a token",
        "prompts      not seen yet; expected: 116 tokens",
        "answers      not seen yet; expected: 116 tokens",
    ]
    alone = _estimators(learned(3), {"device": {}})
    assert alone[0] == "device TTFT  20 ms + 10.00 ms a token; 3 samples"
    seen = _estimators(learned(3), {"server": {}})
    assert seen[0].endswith("3 samples, 0 % of them ended before a first token")
    assert seen[2] == "prompts      116 tokens; 3 samples"


def test_keys_with_names_are_told_with_what_they_spent_and_may() -> None:
    assert _keys({}) == _keys({"keys": []}) == []
    terms: dict[str, Any] = {
        "usd_per_day": 1.0,
        "usd_per_month": None,
        "requests_per_minute": 20,
        "models": [],
        "private": False,
    }
    anna = {"name": "anna", "usd_today": 0.25, "usd_this_month": 2.0} | terms
    first, second = _keys({"keys": [anna, anna | {"name": "kids", "usd_today": 1.0}]})
    assert first == ("keys         anna: $0.25 today, $2.00 this month; all models; $1.00 a day; 20 requests a minute")
    assert second.startswith("             kids: $1.00 today, $2.00 this month; it has reached its $1.00 a day; all")
