"""Which route is served at which door, and what is told at the open one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.app import make_app
from disco_daemon.api.doors import FOR_KEYS, ROUTES, At, ForKey, state_for_key, without_paths
from disco_daemon.api.http.guard import ApiConfig


def test_every_route_of_the_application_stands_in_the_table_and_no_other() -> None:
    nothing: Any = object()
    app = make_app(nothing, nothing, ApiConfig("127.0.0.1", ""), nothing)
    there = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # served as GET is
    }
    assert there == set(ROUTES)


def test_what_changes_something_is_a_control() -> None:
    may_change = {"/disco/v1/answers/{request_id}"}  # by whom its id was told
    for (method, path), where in ROUTES.items():
        if method != "GET" and path.startswith("/disco/") and path not in may_change:
            assert where is At.CONTROL, (method, path)


def test_a_key_with_a_name_opens_no_control_and_what_it_opens_is_there() -> None:
    assert set(FOR_KEYS) <= {route for route, where in ROUTES.items() if where is not At.CONTROL}


def test_what_says_what_others_ask_or_use_is_opened_by_no_key_or_in_part() -> None:
    told = {path for (_, path), what in FOR_KEYS.items() if what in (ForKey.SAME, ForKey.TERMS)}
    assert not [path for path in told if path.startswith("/disco/") or path == "/metrics"]


def test_of_the_state_a_key_sees_nothing_that_is_added_to_it() -> None:
    server = {"kind": "openai", "model": "m", "state": "configured", "new": "sum of all"}
    state = {"version": "1", "uptime_s": 2.0, "policy": "disco", "private": False, "new": "sum of all"}
    state["endpoints"] = {"server": server}
    shown = state_for_key(state)
    assert "sum of all" not in str(shown)
    assert shown["endpoints"]["server"]["model"] == "m"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/home/ann/.local/share/disco/history.sqlite", "history.sqlite"),
        ("~/models/x.gguf", "x.gguf"),
        ("cannot load /home/ann/My Models/x.gguf: no such file", "cannot load x.gguf: no such file"),
        ("\"/a/b\" and '/c/d'", "\"b\" and 'd'"),
        ("https://api.example.com/v1/models is down", "https://api.example.com/v1/models is down"),
        ("meta-llama/Llama-3 at 5 token/s and/or so", "meta-llama/Llama-3 at 5 token/s and/or so"),
        ("5 / 2", "5 / 2"),
        ("path=/etc/passwd", "path=passwd"),
    ],
)
def test_a_path_is_told_by_its_last_name(said: str, told: str) -> None:
    assert without_paths({"a": [{"b": said}]}) == {"a": [{"b": told}]}


@given(st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9 _-]{0,8}[A-Za-z0-9]", fullmatch=True), min_size=2, max_size=5))
def test_no_folder_of_a_path_is_left_over(names: list[str]) -> None:
    path = "/" + "/".join(names)
    for text in (path, f"cannot read {path}", f"'{path}': gone", f"({path})"):
        assert "/" not in without_paths(text)
        assert without_paths(path) == names[-1]


def test_numbers_and_nothing_stay_what_they_are() -> None:
    assert without_paths({"a": 1, "b": None, "c": [True, 2.5], "d": "x"}) == {
        "a": 1,
        "b": None,
        "c": [True, 2.5],
        "d": "x",
    }
