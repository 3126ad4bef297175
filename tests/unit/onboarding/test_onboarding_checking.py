"""Does a server work with a key and a model? Asked of real ones on this machine, which refuse in every known way."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.bench.script import error_body
from disco_daemon.config import pricelist
from disco_daemon.money.catalog import Catalog, parse
from disco_daemon.onboarding import asking, checking
from disco_daemon.onboarding.asking import MAX_TOKENS, Said
from disco_daemon.onboarding.checking import Checked, Trouble, address_problem, check, cost, key_problem
from disco_daemon.plain import PIECE
from tests.fixtures.provider import SECRET, Provider
from tests.fixtures.refusals import REFUSALS, Refusal

CATALOG = pricelist.load()
OPENAI = "https://api.openai.com/v1"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no answer of these servers late."""
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 120.0)
    monkeypatch.setattr(asking, "MODELS_TIMEOUT_S", 120.0)


async def asked(server: Provider, model: str = "small", key: str = SECRET, catalog: Catalog = CATALOG) -> Checked:
    checked = await asyncio.to_thread(check, server.url, key, model, catalog)
    assert SECRET not in json.dumps(checked.to_json()) + repr(checked)
    return checked


def trouble(checked: Checked) -> tuple[Trouble, str]:
    assert checked.problem is not None
    assert checked.problem.mend
    return checked.problem.code, checked.problem.text


async def test_a_server_that_works_is_asked_once_for_its_models_and_once_for_an_answer() -> None:
    async with Provider() as server:
        checked = await asked(server)
        assert checked.problem is None
        assert checked.models == ("large-2", "small", "text-embed-1"), "what answers no chat stands last"
        assert checked.ttft_s is not None
        assert 0 < checked.ttft_s < asking.ANSWER_TIMEOUT_S
        assert checked.price is not None
        assert (checked.price.known, checked.price.input) == (True, 0.0), "a server of one's own bills nothing"
        assert server.seen == [SECRET, SECRET]
        body = server.exchanges[0].body
        assert (body["model"], body["max_tokens"], body["stream"]) == ("small", MAX_TOKENS, True)


async def test_without_a_model_nothing_is_asked_that_costs() -> None:
    async with Provider() as server:
        checked = await asked(server, "")
        assert (checked.problem, checked.ttft_s, checked.price) == (None, None, None)
        assert not server.exchanges


@pytest.mark.parametrize(("turned", "n_asked"), [([True], 0), ([False, True], 1)])
async def test_while_nothing_may_leave_nobody_is_asked(turned: list[bool], n_asked: int) -> None:
    """Also where the switch is turned between the list and the answer."""
    async with Provider() as server:
        switch = iter(turned)
        checked = await asyncio.to_thread(check, server.url, SECRET, "small", CATALOG, private=lambda: next(switch))
        assert trouble(checked)[0] is Trouble.PRIVATE
        assert len(server.seen) == n_asked
        assert not server.exchanges


async def test_a_list_for_anybody_proves_nothing() -> None:
    async with Provider() as server:
        server.open_list = True
        checked = await asked(server, key="sk-wrong-key-1234567")
        assert trouble(checked) == (Trouble.KEY, "the server refuses the key (401)")
        assert checked.models is not None
        assert server.n_requests == 1, "no second try"


@pytest.mark.parametrize(("key", "text"), [("sk-wrong-key-1234567", "refuses the key"), ("", "wants a key")])
async def test_a_wrong_key_and_none_are_told_before_anything_is_asked(key: str, text: str) -> None:
    async with Provider() as server:
        code, told = trouble(await asked(server, key=key))
        assert code is Trouble.KEY
        assert text in told
        assert key == "" or key not in told
        assert not server.exchanges


async def test_a_server_without_a_list_of_models_works_all_the_same() -> None:
    async with Provider(names=None) as server:
        listed = await asked(server, "")
        assert (listed.problem, listed.models) == (None, None)
        assert "no list of models" in " ".join(listed.notes)
        checked = await asked(server, "whatever")
        assert (checked.problem, checked.models) == (None, None)
        assert checked.ttft_s is not None


async def test_a_model_that_is_not_there_is_told_with_those_that_are_like_it() -> None:
    async with Provider() as server:
        checked = await asked(server, "smal")
        assert trouble(checked)[0] is Trouble.MODEL
        assert checked.problem is not None
        assert "small" in checked.problem.mend
        assert checked.price is None


async def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 0.3)
    async with Provider() as server:
        server.hangs = True
        assert trouble(await asked(server)) == (Trouble.TIMEOUT, "no token within 0.3 s")
        monkeypatch.setattr(asking, "MODELS_TIMEOUT_S", 0.3)
        server.lists_late = True
        assert trouble(await asked(server)) == (Trouble.TIMEOUT, "no answer within 0.3 s")
        assert server.n_requests <= 1, "no second try; a busy machine may not have come to the first"
        monkeypatch.setattr(asking, "MODELS_TIMEOUT_S", 120.0)
    code, _ = trouble(await asked(server))
    assert code is Trouble.NETWORK, "nobody listens any more"


async def test_what_our_own_client_takes_to_load_is_none_of_the_servers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded before the thread begins that is waited for."""
    made: list[int] = []
    client = asking._client

    def noted(url: str, timeout_s: float) -> Any:
        made.append(threading.get_ident())
        return client(url, timeout_s)

    monkeypatch.setattr(asking, "_client", noted)
    async with Provider() as server:

        def ask() -> int:
            assert asking.ask_models(server.url, SECRET).status == asking.ask_answer(server.url, SECRET, "small").status
            return threading.get_ident()

        asked_in = await asyncio.to_thread(ask)
        assert made == [asked_in, asked_in]


STREAMED = 'data: {"error": {"message": "You have insufficient credits", "code": 402}}\n\n'
WHOLE = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Hello"}}]})
ROLE, THOUGHT = ({"role": "assistant", "content": ""}, {"reasoning": "Hm"})
THINKING = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in (ROLE, THOUGHT))


def refused(message: str, code: str | None = None) -> str:
    return json.dumps(error_body(message, code=code))


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (401, refused("no"), Trouble.KEY),
        (400, json.dumps([{"error": {"code": 400, "message": "API key not valid. Please pass one."}}]), Trouble.KEY),
        (403, refused("Country not supported"), Trouble.KEY),
        (402, refused("Insufficient Balance"), Trouble.CREDIT),
        (429, refused("You exceeded your current quota", "insufficient_quota"), Trouble.CREDIT),
        (400, refused("Your credit balance is too low"), Trouble.CREDIT),
        (200, STREAMED, Trouble.CREDIT),
        (429, refused("Rate limit reached for model small"), Trouble.SERVER),
        (404, refused("nothing here"), Trouble.MODEL),
        (400, refused("small is not a valid model ID"), Trouble.MODEL),
        (422, refused("temperature is wrong"), Trouble.REFUSED),
        (500, refused("the model crashed"), Trouble.SERVER),
        (503, "<html>down</html>", Trouble.SERVER),
        (302, "", Trouble.ADDRESS),
        (200, "<!doctype html><p>Sign in</p>", Trouble.ADDRESS),
        (200, "", Trouble.ADDRESS),
        (200, "[" * 50_000, Trouble.ADDRESS),
    ],
)
async def test_what_servers_say_is_told_by_what_has_to_be_changed(status: int, body: str, code: Trouble) -> None:
    async with Provider() as server:
        server.refusal = status, body
        checked = await asked(server)
        assert trouble(checked)[0] is code
        assert "<" not in trouble(checked)[1]
        assert server.n_requests == 1


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: f"{one.status} {one.text[:32]}")
async def test_real_refusals_are_told_as_the_daemon_tells_them(refusal: Refusal) -> None:
    codes = {
        "unauthorized": Trouble.KEY, "forbidden": Trouble.KEY, "no_credit": Trouble.CREDIT, "not_found": Trouble.MODEL,
        "rate_limited": Trouble.SERVER,
    }  # fmt: skip
    async with Provider() as server:
        server.refusal = refusal.status, refusal.body
        code, told = trouble(await asked(server))
        if refusal.reason != "refused":
            assert code is codes[refusal.reason]
        else:
            assert code not in (Trouble.CREDIT, Trouble.KEY)
        assert code is Trouble.KEY or refusal.text[:40] in told


@pytest.mark.parametrize("body", [WHOLE, THINKING])
async def test_an_answer_in_one_piece_and_a_thought_are_answers(body: str) -> None:
    async with Provider() as server:
        server.refusal = 200, body
        checked = await asked(server)
        assert (checked.problem, checked.ttft_s is None) == (None, False)


async def test_openai_is_told_the_limit_by_its_newer_name() -> None:
    async with Provider() as server:
        ours = parse("openai", {"base_url": server.url, "models": {"m": {"input": 1, "output": 2}}}, "x", own=True)
        checked = await asked(server, catalog=Catalog((ours,)))
        assert checked.problem is None
        assert server.exchanges[0].body["max_completion_tokens"] == MAX_TOKENS
        assert "max_tokens" not in server.exchanges[0].body


async def test_a_limit_that_is_refused_by_its_name_is_sent_by_the_other_one() -> None:
    async with Provider() as server:
        server.unknown = "max_tokens"
        checked = await asked(server)
        assert (checked.problem, checked.ttft_s is None) == (None, False)
        assert [body_limits(exchange.body) for exchange in server.exchanges] == [
            ["max_tokens"],
            ["max_completion_tokens"],
        ]
        switch = iter([False, False, True])
        checked = await asyncio.to_thread(check, server.url, SECRET, "small", CATALOG, private=lambda: next(switch))
        assert trouble(checked)[0] is Trouble.PRIVATE, "it may be turned in between"


def body_limits(body: Any) -> list[str]:
    return [name for name in ("max_tokens", "max_completion_tokens") if name in body]


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "no address"),
        ("openai", "no address"),
        ("https://user:pass@llm.example.com/v1", "more than an address"),
        ("https://llm.example.com/v1?key=hush", "more than an address"),
        ("https://llm.example.com/v1/chat/completions", "one of the server's pages"),
        ("http://localhost:4747/v1", "this daemon itself"),
        ("https://llm.example.com/" + "x" * 600, "no address"),
        ("https://llm.example.com/v1\x1b[2J", "no address"),
    ],
)
async def test_an_address_that_cannot_be_right_is_asked_nothing(url: str, word: str) -> None:
    problem = check(url, SECRET, "m", CATALOG, own_port=4747).problem
    assert problem is not None
    assert (problem.code, word in problem.text) == (Trouble.ADDRESS, True)
    assert "pass" not in problem.text.replace("password", "")
    assert address_problem("http://localhost:4748/v1", 4747) is None


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel", "x" * 5000])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    problem = key_problem(key)
    assert problem is not None
    assert problem.code is Trouble.KEY
    assert key not in problem.text + problem.mend
    assert check("http://127.0.0.1:9/v1", key, "m", CATALOG).problem == problem


async def test_a_key_goes_nowhere_public_in_the_clear_unless_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "ask_models", lambda url, key: asking.Reply(200, ("m",)))
    problem = check("http://llm.example.com/v1", SECRET, "", CATALOG).problem
    assert problem is not None, "nobody is asked"
    assert "in the clear" in problem.text
    assert "https" in problem.mend
    assert check("http://llm.example.com/v1", "", "", CATALOG).problem is None, "without a key there is nothing to keep"
    wanted_so = check("http://llm.example.com/v1", SECRET, "", CATALOG, insecure=True)
    assert "https" in " ".join(wanted_so.notes)
    assert check("https://llm.example.com/v1", SECRET, "", CATALOG).notes == ()


def test_a_price_that_nobody_knows_says_where_to_put_it() -> None:
    known = cost(CATALOG, OPENAI, "gpt-4o-mini", "own.toml")
    assert (known.known, known.input, known.output, known.mend) == (True, 0.15, 0.6, "")
    assert known.source.startswith("openai: gpt-4o-mini, 20")
    unknown = cost(CATALOG, OPENAI, "gpt-99", "own.toml")
    assert not unknown.known
    assert unknown.mend.startswith("own.toml:\n")


KEYS = st.text("ABCDEFGHKLMNPQRSTUVWXYZ0123456789-_", min_size=12, max_size=60)


@given(
    key=KEYS, cut=st.integers(0, 60), before=st.sampled_from(["", "Incorrect API key provided: ", "model ", "quota "]),
    status=st.sampled_from([200, 400, 401, 402, 403, 404, 422, 429, 500, 503]),
)  # fmt: skip
def test_no_piece_of_a_key_that_a_server_says_back_is_told(key: str, cut: int, before: str, status: int) -> None:
    said = Said(status, None, (), f"{before}{key[:cut]}****{key[-4:]}")
    problem = checking._of_answer(said, Checked(OPENAI, "small", ("small",)), key)
    assert problem is not None
    told = problem.text + problem.mend
    assert not any(key[i : i + PIECE] in told for i in range(len(key) - PIECE + 1))


def test_a_list_of_models_has_a_limit_and_no_name_that_drives_a_terminal() -> None:
    names = (*(f"m{i}" for i in range(checking.MAX_MODELS + 5)), "\x1b[2J", "x" * 1000)
    listed = checking._order(asking.Reply(200, names), None)
    assert listed is not None
    assert len(listed) == checking.MAX_MODELS
    assert all(name.isprintable() and len(name) < 20 for name in listed)
