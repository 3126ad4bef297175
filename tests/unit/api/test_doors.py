"""Which route is served at which door, and what is told at the open one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.app import make_app
from disco_daemon.api.doors import ROUTES, At, without_paths
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
