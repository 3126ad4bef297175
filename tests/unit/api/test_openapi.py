"""/openapi.json has every route, and what it says of errors, fields and keys is what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from disco_daemon.api.control import openapi_route
from disco_daemon.api.doors import ROUTES, At
from disco_daemon.api.http import sse
from disco_daemon.api.http.failures import error_shape
from disco_daemon.types.drawing import Wishes
from docs.openapi.document import WITH_STATUS, described, error_schema
from docs.openapi.operations import OPERATIONS
from docs.openapi.words import HEADERS, WORDS
from tests.fixtures.described import DescribedAnswers, route_of
from tests.fixtures.documents import PAGES, ROOT, rows


@pytest.fixture(scope="module", name="described")
def the_document() -> dict[str, Any]:
    return described()


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


def test_every_route_names_the_refusals_that_every_route_has(described: dict[str, Any]) -> None:
    for (method, path), operation in OPERATIONS.items():
        named = {int(status) for status in described["paths"][path][method.lower()]["responses"]}
        assert {403, 413, 503} <= named, path
        assert (415 in named) is (method != "GET"), path
        assert (401 in named) is (path not in ("/", "/health")), path
        assert operation.takes is None or 400 in named, path
        assert named - {200} <= set(WITH_STATUS), path
        assert 500 not in named, "a fault is no answer that a client may count on"


def test_ollamas_routes_say_what_they_take_and_give() -> None:
    for (method, path), operation in OPERATIONS.items():
        if path.startswith("/api/") and 501 not in operation.failing.value:
            assert isinstance(operation.gives, type), path
            assert (operation.takes is None) is (method == "GET"), path


def test_an_answer_that_the_document_does_not_name_is_noticed() -> None:
    heard = DescribedAnswers()
    for status in (200, 400, 404, 413, 500):
        heard.status("POST", "/v1/chat/completions", status)
    heard.status("GET", "/v1/nothing", 404)
    heard.body("GET", "/api/version", b'{"version": "1"}')
    heard.body("GET", "/api/version", b'{"error": "no"}')
    assert heard.surprises == set()
    heard.status("GET", "/disco/v1/state", 418)
    heard.body("GET", "/api/version", b'{"version": 1}')
    assert len(heard.surprises) == 2


def test_the_words_are_those_of_the_fields_and_headers_that_there_are(described: dict[str, Any]) -> None:
    for name, words in WORDS.items():
        assert set(words) == set(described["components"]["schemas"][name]["properties"]), name
    outcome: Any = SimpleNamespace(cost_usd=0.5, ttft_s=0.5)
    sent = sse.headers("r", "device", "whole", model="m", reason="race", ignored=["x"]) | sse.bill(outcome)
    assert set(sent) == set(HEADERS)


def test_what_docs_say_is_not_here_is_not() -> None:
    missing = [
        name for row in rows(PAGES["reference/api.md"], "What is not here") for name in re.findall(r"/v1/\w+", row[0])
    ]
    assert {"/v1/decisions", "/v1/batches", "/v1/files", "/v1/audio"} <= set(missing)
    assert not [path for _, path in ROUTES if path.startswith(tuple(missing))]


def test_a_path_leads_to_its_route() -> None:
    assert route_of("GET", "/v1/models") == ("GET", "/v1/models")
    assert route_of("GET", "/v1/models/a/b") == ("GET", "/v1/models/{name}")
    assert route_of("POST", "/v1/messages/count_tokens") == ("POST", "/v1/messages/count_tokens")
    assert route_of("GET", "/disco/v1/trace/latest") == ("GET", "/disco/v1/trace/{request_id}")
    assert route_of("GET", "/v1/messages") is None


async def test_the_route_serves_the_file_that_make_docs_writes(described: dict[str, Any]) -> None:
    app = web.Application()
    openapi_route.add_routes(app)
    async with TestClient(TestServer(app)) as client, client.get("/openapi.json") as answer:
        assert answer.content_type == "application/json"
        assert await answer.json() == msgspec.json.decode(msgspec.json.encode(described))


def test_the_document_is_the_same_whichever_equal_type_was_made_first() -> None:
    program = (
        "from typing import Annotated\nfrom msgspec import Meta\n"
        "made = [Annotated[float, Meta(ge=0.0, le=n)] for n in (1.0, 2.0, 100.0)]\n"
        "from docs import generate\nprint(generate.openapi(), end='')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "disco_daemon/api/openapi.json").read_text("utf-8")
