"""/openapi.json has every route, and what it says of errors, fields and keys is what the code does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from disco_daemon.api.app import make_app
from disco_daemon.api.doors import ROUTES, At
from disco_daemon.api.failures import error_shape
from disco_daemon.api.guard import ApiConfig
from disco_daemon.api.openapi import document, error_schema, routes_of
from disco_daemon.api.operations import OPERATIONS
from disco_daemon.types.drawing import Wishes


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    nothing: Any = object()
    return document(routes_of(make_app(nothing, nothing, ApiConfig("127.0.0.1", ""), nothing)))


def test_every_route_has_an_entry_and_no_other(described: dict[str, Any]) -> None:
    assert set(OPERATIONS) == set(ROUTES)
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(ROUTES)


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    for kind, name in re.findall(r'"#/components/(\w+)/([^"]+)"', json.dumps(described)):
        assert name in described["components"][kind]


def test_errors_have_the_shape_of_their_route(described: dict[str, Any]) -> None:
    for (method, path), _ in ROUTES.items():
        refused = described["paths"][path][method.lower()]["responses"]["403"]
        ref = refused["content"]["application/json"]["schema"]["$ref"]
        assert described["components"]["schemas"][ref.rpartition("/")[2]] == error_schema(error_shape(path))


def test_a_control_wants_a_key_and_health_none(described: dict[str, Any]) -> None:
    for (method, path), where in ROUTES.items():
        security = described["paths"][path][method.lower()]["security"]
        assert ({} in security or not security) is (where is not At.CONTROL), path
    assert described["paths"]["/health"]["get"]["security"] == []


def test_a_chat_has_the_fields_of_the_table(described: dict[str, Any]) -> None:
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(Wishes.__struct_fields__) <= set(body["properties"])
    assert "api_key" not in body["properties"], "nobody heeds it"
    assert "device: refused" in body["properties"]["functions"]["description"]
