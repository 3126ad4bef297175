"""A real daemon with the user's rules, beside a scripted server: who answers what, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit

from disco_daemon.models.default import DEFAULT_MODEL
from disco_daemon.store import History
from disco_daemon.types import EarlierAnswer, NextAct, Outcome, Side
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream
from tests.unit.store.test_store import OUTCOME

SERVERS = "This is the server's answer."
N_TOKENS = 6
LONG = "word " * 300
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
RULES: list[dict[str, Any]] = [
    {"name": "tools", "use": "server", "tools": True},
    {"name": "german", "use": "device", "language": "de"},
    {"name": "legal", "use": "private", "headers": {"X-Team": "legal*"}},
    {"name": "judges", "use": "plan", "user": "judge-*", "min_grade": 99},
    {"name": "long", "use": "prefer-server", "prompt_at_least": 200},
    {"name": "the rest", "use": "prefer-device"},
]


async def reload(daemon: DaemonProcess, rules: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
    path = daemon.folder / "config.toml"
    values = tomlkit.parse(path.read_text()).unwrap()
    path.write_text(tomlkit.dumps(values | {"rules": rules}))
    async with daemon.controls.post(f"{daemon.root}/disco/v1/reload") as response:
        return response.status, await response.json()


async def chat(
    daemon: DaemonProcess, text: str, headers: Mapping[str, str] | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """The status of one answer in one piece, and its `disco` object, or its error."""
    body = {"model": "disco", "messages": [{"role": "user", "content": text}], "max_tokens": N_TOKENS} | more
    async with daemon.session.post(f"{daemon.url}/chat/completions", json=body, headers=headers) as response:
        found = await response.json()
        said: dict[str, Any] = found.get("disco") or found["error"]
        return response.status, said


async def change(daemon: DaemonProcess, **changes: Any) -> tuple[int, dict[str, Any]]:
    body = {key.replace("_", ".", 1): value for key, value in changes.items()}
    async with daemon.controls.patch(f"{daemon.root}/disco/v1/settings", json=body) as response:
        return response.status, await response.json()


async def plan(daemon: DaemonProcess, query: str) -> dict[str, Any]:
    async with daemon.controls.get(f"{daemon.root}/disco/v1/plan?{query}") as response:
        found: dict[str, Any] = await response.json()
        assert response.status == 200, found
        return found


async def test_the_first_rule_that_fits_says_who_answers_and_is_named_wherever_an_answer_is(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        with upstream.answering(SERVERS):
            _, before = await chat(daemon, "Say yes.")
            assert "rule" not in before
            assert "rule" not in await plan(daemon, "tokens=50")
            assert await reload(daemon, RULES) == (200, {"changed": ["rules"], "needs_restart": []})

            _, found = await chat(daemon, "Say yes.", tools=[TOOL])
            assert (found["winner"], found["reason"], found["rule"]) == ("server", "rule", "tools")
            _, found = await chat(daemon, "Wie wird das Wetter morgen in Berlin?")
            assert (found["winner"], found["reason"], found["rule"]) == ("device", "rule", "german")
            _, found = await chat(daemon, "Say yes.", {"x-team": "legal-eu"})
            assert (found["winner"], found["reason"], found["rule"]) == ("device", "private", "legal")
            _, found = await chat(daemon, LONG)
            assert (found["winner"], found["reason"], found["rule"]) == ("server", "rule", "long")
            n_asked = len(upstream.exchanges)
            status, found = await chat(daemon, "Say yes.")
            assert (found["winner"], found["reason"], found["rule"]) == ("device", "rule", "the rest")
            assert len(upstream.exchanges) == n_asked, "the other side is there for failures only"

            # What the client says is narrowed, never widened, and an error names the rule.
            status, error = await chat(daemon, "Say yes.", model="disco/device", tools=[TOOL])
            assert (status, error["code"]) == (403, "rule")
            assert error["message"].startswith("Rule 'tools' lets only the server answer this, and the request is for")
            status, error = await chat(daemon, "Say yes.", disco={"private": True}, tools=[TOOL])
            assert (status, error["code"]) == (403, "rule")
            status, error = await chat(daemon, "Say yes.", user="judge-7")
            assert (status, error["code"]) == (403, "rule")
            assert "asks for a grade of 99, and no model has that: device 0.1" in error["message"]
            _, found = await chat(daemon, LONG, disco={"route": "prefer-device"})
            assert (found["winner"], found["rule"]) == ("device", "long")
            assert len(upstream.exchanges) == n_asked

        explained = await plan(daemon, "tokens=100&is=tools")
        assert explained["rule"] == {"name": "tools", "use": "server", "of_set": "", "nobody": None}
        assert explained["plan"]["device_s"] is None
        assert (await plan(daemon, "tokens=100&language=de"))["plan"]["server_s"] is None
        assert (await plan(daemon, "tokens=500&header=X-Team:it"))["rule"]["name"] == "long"
        assert (await plan(daemon, "tokens=9&user=judge-1"))["rule"]["nobody"].startswith("Rule 'judges' asks for")

        rows = await daemon.recorded(7)
        assert [row["rule"] for row in reversed(rows)] == ["", "tools", "german", "legal", "long", "the rest", "long"]

        # A rule that cannot be meant changes nothing.
        status, refused = await reload(daemon, [{"name": "bad", "use": "sever"}])
        assert status == 400
        assert "rule 'bad' use = 'sever' is nobody: did you mean" in refused["error"]["message"]
        assert ", line " in refused["error"]["message"]
        assert (await plan(daemon, "tokens=100&is=tools"))["rule"]["name"] == "tools"


async def test_a_set_is_chosen_while_the_daemon_runs_and_an_answer_can_be_redone_with_the_server(
    tmp_path: Path,
) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        with upstream.answering(SERVERS):
            status, changed = await change(daemon, policy_set="frugal")
            assert status == 200, changed
            assert changed["settings"]["policy"]["hedge"] == 0
            _, first = await chat(daemon, "Say yes.")
            assert (first["winner"], first["rule"]) == ("device", "this machine first")
            assert not upstream.exchanges

            _, again = await chat(daemon, "Say yes.", disco={"redo_of": first["request_id"]})
            assert (again["winner"], again["reason"]) == ("server", "route")
            await daemon.recorded(2)
            lost = {"request_id": again["request_id"]}
            async with daemon.controls.post(f"{daemon.root}/disco/v1/history/outdone", json=lost) as response:
                assert (response.status, await response.json()) == (200, lost | {"followed": "outdone"})
            assert [row["followed"] for row in await daemon.history()] == ["outdone", "redone"]
            _, edited = await chat(daemon, "Say no.", disco={"edits": again["request_id"]})
            _, hidden = await chat(daemon, "Say so.", disco={"regenerates": edited["request_id"], "private": True})
            followed = {row["request_id"]: row["followed"] for row in await daemon.recorded(4)}
            ids = [one["request_id"] for one in (first, again, edited, hidden)]
            assert [followed[one] for one in ids] == ["redone", "edited", None, None], "of a private one nothing"
            status, error = await chat(daemon, "x", disco={"redo_of": "a", "edits": "b"})
            assert (status, error["param"]) == (400, "disco")

            n_asked = len(upstream.exchanges)
            status, changed = await change(daemon, policy_set="private")
            assert (status, changed["settings"]["policy"]["private"]) == (200, True)
            _, found = await chat(daemon, "Say yes.", disco={"redo_of": first["request_id"]})
            assert (found["winner"], found["reason"]) == ("device", "private")
            status, error = await change(daemon, policy_private=False)
            assert status == 400
            assert "policy.set = 'private' keeps every request on this machine" in error["error"]["message"]
            assert len(upstream.exchanges) == n_asked

            status, changed = await change(daemon, policy_set="balanced")
            assert (status, changed["settings"]["policy"]["private"]) == (200, False)
            assert changed["settings"]["policy"]["hedge"] > 0
            assert "rule" not in (await chat(daemon, "Say yes."))[1]


async def test_a_rule_names_a_model_of_another_server(tmp_path: Path) -> None:
    async with Upstream() as first, Upstream() as second, running(tmp_path, server=first.url, device=False) as daemon:
        path = daemon.folder / "config.toml"
        values = tomlkit.parse(path.read_text()).unwrap()
        other = {"name": "other", "base_url": second.url, "models": ["m2"], "probe": False, "api_key_env": ""}
        path.write_text(tomlkit.dumps(values | {"servers": [other]}))
        rules = [{"name": "thoughts", "use": "other/m2", "thinking": True}]
        with first.answering(SERVERS), second.answering("The other one."):
            assert (await reload(daemon, rules))[0] == 200
            status, found = await chat(daemon, "Say yes.", reasoning_effort="high")
            assert (status, found["rule"], found["reason"]) == (200, "thoughts", "rule")
            assert (len(first.exchanges), len(second.exchanges)) == (0, 1)
            assert "rule" not in (await chat(daemon, "Say yes."))[1]
            status, refused = await reload(daemon, [{"use": "othr/m2"}])
            assert (status, refused["error"]["code"]) == (400, "invalid_setting")


async def test_the_better_model_answers_whichever_server_the_pool_would_choose(tmp_path: Path) -> None:
    async with Upstream() as worse, Upstream() as better:
        other = {
            "name": "other", "base_url": better.url, "model": "m2", "probe": False, "api_key_env": "", "grade": 80.0,
        }  # fmt: skip
        settings: dict[str, dict[str, Any]] = {
            "policy": {"set": "best"},
            "device": {"grade": 50.0},
            "server": {"grade": 20.0},
        }
        async with running(tmp_path, server=worse.url, servers=[other], settings=settings) as daemon:
            await daemon.device_ready()
            assert [one["name"] for one in (await plan(daemon, "tokens=20"))["servers"]] == ["other"]
            with worse.answering("Of the worse one."), better.answering(SERVERS):
                for _ in range(6):  # the pool looks at a server that it does not know now and then
                    _, found = await chat(daemon, "Say yes.")
                    assert (found["winner"], found["server"], found["rule"]) == ("server", "other", "the better model")
                assert len(better.exchanges) == 6
            with worse.answering("Of the worse one."), better.status(500):
                _, found = await chat(daemon, "Say yes.")
                assert (found["winner"], found["rule"]) == ("device", "the better model"), "it is better than the rest"
            assert not worse.exchanges


def past(n: int, model: str) -> list[Outcome]:
    """Answers of a model of the device: those with code were redone, the others did."""
    found = []
    own = tuple(replace(one, model=model) if one.side is Side.DEVICE else one for one in OUTCOME.attempts)
    for i in range(n):
        was = replace(OUTCOME, attempts=own, kind="" if i % 2 else "code")
        found.append(replace(was, request_id=f"past-{i}", prompt_tokens=30, tokens={Side.DEVICE: 30}))
        if was.kind:
            redone = EarlierAnswer(f"past-{i}", NextAct.REDONE)
            found.append(replace(OUTCOME, request_id=f"new-{i}", winner=Side.SERVER, earlier=redone))
    return found


async def test_a_rule_goes_by_what_was_learned_of_this_machines_answers(tmp_path: Path) -> None:
    with History(tmp_path / "history.sqlite") as history:
        for outcome in (*past(120, DEFAULT_MODEL.removesuffix(".gguf")), *past(80, "the-model-of-before")):
            history.record(outcome)
    code = "def f(x):\n    return x + 1\nWhat is wrong?"
    async with Upstream() as upstream, running(tmp_path, server=upstream.url) as daemon:
        await daemon.device_ready()
        rules: list[dict[str, Any]] = [
            {"name": "too hard", "use": "prefer-server", "device_chance_below": 0.5},
            {"name": "the rest", "use": "prefer-device"},
        ]
        assert (await reload(daemon, rules))[0] == 200
        thought = (await plan(daemon, "tokens=30&is=code"))["device_chance"]
        assert (thought["answers"], thought["failed"]) == (120, 60), "of the present model alone"
        assert thought["chance"] < 0.2
        assert (await plan(daemon, "tokens=30&is=numbers"))["device_chance"]["chance"] > 0.8
        with upstream.answering(SERVERS):
            _, hidden = await chat(daemon, code, disco={"private": True})
            _, found = await chat(daemon, "Say yes.", disco={"redo_of": hidden["request_id"]})
            _, found = await chat(daemon, "Say yes.")
            assert (found["winner"], found["rule"]) == ("device", "the rest")
            _, found = await chat(daemon, code)
            assert (found["winner"], found["rule"]) == ("server", "too hard")
        rows = {row["request_id"]: row for row in await daemon.history()}
        assert rows[found["request_id"]]["kind"] == "code"
        of_private = rows[hidden["request_id"]]
        assert [of_private[name] for name in ("kind", "followed", "teaches_of", "private")] == ["", None, None, 1]
