"""A refusal names what has to be changed; and only what is the server's own makes the side ill."""

from __future__ import annotations

import json

import pytest

from disco_daemon.endpoints.refusal_reason import named_wait_s
from disco_daemon.endpoints.server_errors import MAX_DOWN_S, RATE_LIMITED_S, ServerErrors, StatusError
from disco_daemon.errors import EndpointError
from disco_daemon.types import Side
from tests.fixtures.clock import StoppedClock
from tests.fixtures.refusals import REFUSALS, Refusal

URL = "https://llm.example.com/v1"
KEY = "sk-0123456789abcdef"


def told(status: int, body: str, **headers: str) -> tuple[EndpointError, ServerErrors]:
    errors = ServerErrors(Side.SERVER, URL, KEY, StoppedClock())
    return errors.translated(StatusError(status, headers, URL, body.encode())), errors


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: f"{one.status} {one.text[:32]}")
def test_a_refusal_is_told_by_what_has_to_be_changed_in_the_servers_own_words(refusal: Refusal) -> None:
    error, _ = told(refusal.status, refusal.body)
    assert (error.reason, error.your_fault) == (refusal.reason, refusal.reason == "refused")
    assert refusal.text[:40] in str(error)


def test_a_request_that_is_said_back_is_no_word_of_the_servers() -> None:
    said = {"detail": [{"loc": ["body", "n"], "input": "API key not valid. Your credit balance is too low"}]}
    for document in (said, {"message": said}, {"error": said}):
        assert told(422, json.dumps(document))[0].reason == "refused"


@pytest.mark.parametrize(
    ("text", "headers", "reason", "down_s"),
    [
        ("no credits", {}, "no_credit", RATE_LIMITED_S),
        ("no credits", {"retry-after": "20"}, "rate_limited", 20.0),
        ("no credits", {"retry-after": "86400"}, "no_credit", MAX_DOWN_S),
        ("no credits, try again in 7m12.5s", {}, "rate_limited", MAX_DOWN_S),
        ("no credits, retry after 9 seconds", {}, "rate_limited", 9.0),
        ("slow down, try again in 9s", {"retry-after": "3"}, "rate_limited", 3.0),
        (f"{'x' * 300} no credits", {}, "no_credit", RATE_LIMITED_S),
    ],
)
def test_a_429_with_a_short_wait_is_no_empty_account(
    text: str, headers: dict[str, str], reason: str, down_s: float
) -> None:
    error, errors = told(429, json.dumps({"error": {"message": text}}), **headers)
    errors.failed(error)
    assert (error.status, errors.health()["failing"]["reason"], errors.down_s) == (429, reason, down_s)


@pytest.mark.parametrize(
    ("text", "s"),
    [
        ("Please try again in 1.95s.", 1.95), ("try again in 850ms", 0.85), ("try again in 1h2m3s", 3723.0),
        ("Please retry after 2 seconds", 2.0), ('{"retryDelay": "35s"}', 35.0), ("retry in 5 minutes", 300.0),
        ("try again in 6m0s", 360.0), ("try again in 2m", 120.0), ("try again in a while", None), ("5 seconds", None),
        ("try again in a while, or retry in 4s", 4.0), ("try again in 99999h", None), ("", None),
    ],
)  # fmt: skip
def test_a_wait_is_read_out_of_words(text: str, s: float | None) -> None:
    found = named_wait_s(text)
    assert found == (None if s is None else pytest.approx(s))


def test_a_key_that_a_server_says_back_is_not_told() -> None:
    for status in (400, 401, 402, 403, 429):
        assert KEY not in str(told(status, json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}))[0])


@pytest.mark.parametrize(
    ("said", "reason", "down_s"),
    [
        # OpenRouter, in the stream of an answer that has begun; Google's; OpenAI's and Anthropic's words
        ({"code": 429, "message": "Rate limit exceeded", "metadata": {}}, "rate_limited", RATE_LIMITED_S),
        ({"code": 402, "message": "Insufficient credits"}, "no_credit", 0.0),
        ({"code": 503, "message": "try later", "status": "UNAVAILABLE"}, "overloaded", 0.0),
        ({"code": "429", "message": "retry in 9s"}, "rate_limited", 9.0),
        ({"type": "rate_limit_error", "message": "slow down"}, "rate_limited", RATE_LIMITED_S),
        ({"type": "overloaded_error", "message": "Overloaded"}, "overloaded", 0.0),
        ({"type": "insufficient_quota", "message": "none left"}, "no_credit", 0.0),
        ({"code": 400, "message": "bad"}, "server_error", 0.0),
        ({"code": 408, "message": "late"}, "server_error", 0.0),
        ({"code": 502, "message": "provider died"}, "server_error", 0.0),
        ({"code": True, "message": ["a", "list"]}, "server_error", 0.0),
        ({"code": 10**400, "message": None}, "server_error", 0.0),
        ("it burns", "server_error", 0.0),
        (["it", "burns"], "server_error", 0.0),
        (1, "server_error", 0.0),
    ],
)  # fmt: skip
def test_an_error_within_an_answer_is_told_as_its_status_would_be_and_is_never_the_requests(
    said: object, reason: str, down_s: float
) -> None:
    errors = ServerErrors(Side.SERVER, URL, KEY, StoppedClock())
    error = errors.reported(said)
    assert (error.reason, error.your_fault, errors.down_s) == (reason, False, down_s)
    assert "200" not in str(error)


@pytest.mark.parametrize(("status", "settings"), [(401, ("api_key_env", "api_key_file")), (404, ("model",)),
                                                  (301, ("base_url",))])  # fmt: skip
def test_of_several_servers_the_one_is_named_whose_settings_mend_it(status: int, settings: tuple[str, ...]) -> None:
    for name in ("", "box"):
        errors = ServerErrors(Side.SERVER, URL, KEY, StoppedClock(), name)
        said = str(errors.translated(StatusError(status, {}, URL, b"no")))
        for setting in settings:
            assert (f"{setting} of [[servers]] box" if name else f"server.{setting}") in said
        assert not name or "server." not in said
