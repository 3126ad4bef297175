"""Cases that schemathesis makes of /openapi.json, asked of a daemon; run by `tests.contract`, in its own environment.

The variables: DISCO_URL, DISCO_KEY (opens all routes), DISCO_SERVER (a server on loopback), DISCO_CASES, DISCO_SEED.
The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi import checks as specs

MOST_TOKENS = 8
MAX_INT = 2**63 - 1  # what the document's descriptions say of every integer
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict")
MODELS = ("disco", "disco/device", "disco/server")
PATIENCE_S = 60.0
# They open a port of this machine for others, and the cases would do that again and again.
NOT_ASKED = {("POST", "/disco/v1/fleet/new"), ("POST", "/disco/v1/partner/pair")}
# By these a daemon loses the endpoints that all others are asked by, so they come last.
LAST = {
    ("PUT", "/disco/v1/server"),
    ("PUT", "/disco/v1/device"),
    ("PATCH", "/disco/v1/settings"),
    ("POST", "/disco/v1/reload"),
}
CHECKS = [
    specs.status_code_conformance,
    specs.content_type_conformance,
    specs.response_headers_conformance,
    specs.response_schema_conformance,
    specs.negative_data_rejection,
]
MOST_SHOWN = 40


def tame(body: Any, draw: random.Random, server: str, *, positive: bool) -> None:
    """Let no answer be longer than MOST_TOKENS, and let most well-formed requests name a model that is there."""
    if not isinstance(body, dict):
        return
    for name in LIMITS:
        if type(body.get(name)) in (int, float) and (body[name] > MOST_TOKENS or body[name] == -1):
            body[name] = MOST_TOKENS
    options = body.get("options")
    if isinstance(options, dict):
        tame(options, draw, server, positive=False)
    if positive and "model" in body:
        if draw.random() < 0.9:
            body["model"] = draw.choice(MODELS)
        if type(body.get("min_tokens")) is int:
            body["min_tokens"] = min(body["min_tokens"], MOST_TOKENS)
    if isinstance(body.get("base_url"), str) and ":" in body["base_url"]:
        body["base_url"] = server


def limit(body: Any, path: str) -> None:
    """Say how long the answer may be, where the request does not."""
    if isinstance(body, dict) and "model" in body and not any(body.get(name) is not None for name in LIMITS):
        if path == "/v1/responses":
            body["max_output_tokens"] = MOST_TOKENS
        elif path.startswith("/api/"):
            options = body.setdefault("options", {})
            if isinstance(options, dict):
                options.setdefault("num_predict", MOST_TOKENS)
        elif path in ("/v1/chat/completions", "/v1/completions"):
            body["max_tokens"] = MOST_TOKENS


def plain(value: Any) -> Any:
    """Return a value without what JSON Schema has no word for: 7.0 is an integer there, and none has a last bit."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_INT:
        return int(value)
    return max(-MAX_INT, min(MAX_INT, value)) if type(value) is int else value


class Tally:
    """What came of the cases."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.slowest_s: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    @property
    def n_cases(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())

    def failed(self, where: str, why: Failure, case: Any, answer: str) -> None:
        key = f"{where}: {why.title}: {why.message.splitlines()[0][:120] if why.message else ''}"
        seen = self.failures.setdefault(
            key, {"n": 0, "why": why.message[:600], "body": repr(case.body)[:900], "answer": answer}
        )
        seen["n"] += 1


def ask(operation: Any, n: int, mode: GenerationMode, tally: Tally, seed: int) -> None:
    """Ask one route `n` times."""
    where = f"{operation.method.upper()} {operation.path}"
    session, draw = requests.Session(), random.Random(seed)
    session.headers["Authorization"] = f"Bearer {os.environ['DISCO_KEY']}"

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = plain(case.body)
        tame(case.body, draw, os.environ["DISCO_SERVER"], positive=mode is GenerationMode.POSITIVE)
        limit(case.body, operation.path)
        begun = time.perf_counter()
        response = case.call(session=session, timeout=PATIENCE_S)
        tally.slowest_s[where] = max(tally.slowest_s[where], round(time.perf_counter() - begun, 3))
        if mode is GenerationMode.POSITIVE and response.status_code >= 400 and "message" in response.text:
            error = response.json()["error"]
            tally.refused[f"{where} {(error if isinstance(error, str) else error['message'])[:150]}"] += 1
        tally.statuses.setdefault(where, Counter())[response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                tally.failed(where, failure, case, response.text[:400])
        except Failure as failure:
            tally.failed(where, failure, case, response.text[:400])

    one()


def name_of(operation: Any) -> tuple[str, str]:
    """Return method and path of a route."""
    return operation.method.upper(), operation.path


def ask_both(operation: Any, n: int, tally: Tally, seed: int) -> None:
    """Ask one route `n` times: two thirds are requests as the document has them, the others break it."""
    where = " ".join(name_of(operation))
    try:
        ask(operation, n - n // 3, GenerationMode.POSITIVE, tally, seed)
        if operation.body or operation.query:
            ask(operation, n // 3, GenerationMode.NEGATIVE, tally, seed)
    except hypothesis.errors.Unsatisfiable:
        print(f"{where}: nothing more can be generated", file=sys.stderr)
    print(f"{where}: {dict(tally.statuses.get(where, {}))}", file=sys.stderr, flush=True)


def main() -> int:
    """Ask every route; return 1 where the daemon has broken its contract."""
    url, wanted = os.environ["DISCO_URL"].removesuffix("/v1"), int(os.environ["DISCO_CASES"])
    schema = schemathesis.openapi.from_url(
        f"{url}/openapi.json", headers={"Authorization": f"Bearer {os.environ['DISCO_KEY']}"}
    )
    operations = [found.ok() for found in schema.get_all_operations()]
    asked = [one for one in operations if name_of(one) not in NOT_ASKED | LAST]
    answering = [one for one in asked if one.method.upper() == "POST" and not one.path.startswith("/disco")]
    weights = [8 if one in answering else 1 for one in asked]
    tally, seed = Tally(), int(os.environ["DISCO_SEED"])
    for operation, weight in zip(asked, weights, strict=True):
        ask_both(operation, max(4, wanted * weight // sum(weights)), tally, seed)
    more = seed
    while answering and tally.n_cases < wanted:  # a route without parameters has one case, whatever its share
        more += 1
        for operation in answering:
            ask_both(operation, max(3, (wanted - tally.n_cases) // len(answering)), tally, more)
    for operation in (one for one in operations if name_of(one) in LAST):
        ask_both(operation, max(4, wanted // sum(weights)), tally, seed)
    by_status: Counter[int] = Counter()
    for counts in tally.statuses.values():
        by_status += counts
    told = {
        "cases": tally.n_cases,
        "seed": seed,
        "schemathesis": schemathesis.__version__,
        "statuses": dict(sorted(by_status.items())),
        "slowest_s": dict(tally.slowest_s.most_common(5)),
        "failures": dict(list(tally.failures.items())[:MOST_SHOWN]),
        "not_asked": sorted(" ".join(one) for one in NOT_ASKED),
    }
    if "DISCO_VERBOSE" in os.environ:
        print(json.dumps(tally.refused.most_common(80), indent=1), file=sys.stderr)
    print(json.dumps(told))
    return 1 if tally.failures or not tally.n_cases else 0


if __name__ == "__main__":
    sys.exit(main())
