"""A conversation that fills its context can be shortened by a summary, which one key takes back."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from disco_daemon.cli.chat import Talk, add_parser
from disco_daemon.client.compaction import HEADING, INSTRUCTION, SUMMARY_TOKENS, TOO_LONG, filled, route_of_summary
from disco_daemon.client.once import DaemonError
from tests.fixtures.tui import DISCO, STATE, Dictated, dictated, screen_text, shown, until

from .test_chat import answered, ask, exchange, said


def state(n_ctx: int | None = 8192, **more: Any) -> dict[str, Any]:
    device = STATE["endpoints"]["device"] | {"n_ctx": n_ctx}
    return STATE | {"endpoints": STATE["endpoints"] | {"device": device}} | more


@pytest.fixture
async def daemon() -> AsyncIterator[Dictated]:
    async with dictated() as server:
        yield server


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


async def test_a_summary_goes_out_for_all_before_the_last_question_until_it_is_undone(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "2")
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        assert contents(daemon.asked[2]) == ["one", "1", INSTRUCTION]
        assert daemon.asked[2]["max_tokens"] == SUMMARY_TOKENS
        daemon.say("We counted.")
        daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: "We counted." in screen_text(app) and "summary: it goes out" in screen_text(app))
        await exchange(app, pilot, daemon, "three", "3")
        assert contents(daemon.asked[3]) == [f"{HEADING}\nWe counted.", "two", "2", "three"]
        assert daemon.asked[3]["messages"][0]["role"] == "system"

        await pilot.press("alt+c")  # a summary of a summary
        await until(pilot, lambda: len(daemon.asked) == 5)
        assert contents(daemon.asked[4]) == [f"{HEADING}\nWe counted.", "two", "2", INSTRUCTION]
        daemon.say("We counted on.")
        daemon.end()
        await answered(app, pilot)
        await pilot.press("ctrl+z")
        await exchange(app, pilot, daemon, "four", "4")
        assert contents(daemon.asked[5]) == [f"{HEADING}\nWe counted.", "two", "2", "three", "3", "four"]


async def test_undone_at_once_all_is_as_before_also_in_a_new_window(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "2")
        before = said(app)
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        daemon.say("Sum.")
        daemon.end()
        await answered(app, pilot)
        shortened = said(app)
        assert shortened == [*before, ("summary", "Sum.")]
        await pilot.press("ctrl+z")
        assert said(app) == before
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 4)
        daemon.say("Sum.")
        daemon.end()
        await answered(app, pilot)
        assert said(app) == shortened
        assert app.conversations.current is not None
        app.conversations.open(app.conversations.current.id)
        await exchange(app, pilot, daemon, "three", "3")
        assert contents(daemon.asked[4]) == [f"{HEADING}\nSum.", "two", "2", "three"]


async def test_a_question_that_was_too_long_is_asked_again_behind_the_summary(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await ask(app, pilot, daemon, "two")
        daemon.fail("the prompt is too long", TOO_LONG)
        await answered(app, pilot)
        await until(pilot, lambda: "too long: Alt+C" in screen_text(app))
        failed = said(app)
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        assert contents(daemon.asked[2]) == ["one", "1", INSTRUCTION]
        daemon.say("Sum.")
        daemon.end()
        await until(pilot, lambda: len(daemon.asked) == 4)
        assert contents(daemon.asked[3]) == [f"{HEADING}\nSum.", "two"]
        daemon.say("2")
        daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: "Sum." in screen_text(app))
        assert said(app) == [*failed, ("summary", "Sum."), ("assistant", "2")]
        await pilot.press("ctrl+z")
        assert said(app) == [*failed, ("assistant", "2")]
        await exchange(app, pilot, daemon, "three", "3")
        assert contents(daemon.asked[4]) == ["one", "1", "two", "2", "three"]


@pytest.mark.parametrize("end", ["stopped", "failed", "empty"])
async def test_a_summary_that_has_not_come_is_not_used(daemon: Dictated, end: str) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "2")
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        if end != "empty":
            daemon.say("Half")
            await until(pilot, lambda: "Half" in screen_text(app))
        if end == "stopped":
            await pilot.press("escape")
        elif end == "failed":
            daemon.fail("gone")
        else:
            daemon.end()
        await answered(app, pilot)
        await until(pilot, lambda: "this summary is not used" in screen_text(app))
        await exchange(app, pilot, daemon, "three", "3")
        assert contents(daemon.asked[3]) == ["one", "1", "two", "2", "three"]


async def test_a_question_whose_summary_came_meanwhile_is_asked_by_the_same_key(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await ask(app, pilot, daemon, "two")
        daemon.fail("the prompt is too long", TOO_LONG)
        await answered(app, pilot)
        assert app.conversations.current is not None
        number = app.conversations.current.id
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        await pilot.press("ctrl+n")
        daemon.say("Sum.")
        daemon.end()
        await until(pilot, lambda: not app.conversations.answering)
        app.conversations.open(number)
        app.chat.show_conversation()
        await until(pilot, lambda: "Alt+C asks again" in screen_text(app))
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 4)
        assert contents(daemon.asked[3]) == [f"{HEADING}\nSum.", "two"]
        daemon.end()


async def test_a_first_question_that_is_too_long_stays_as_it_is(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await ask(app, pilot, daemon, "one")
        daemon.fail("the prompt is too long", TOO_LONG)
        await answered(app, pilot)
        await pilot.press("alt+c")
        await until(pilot, lambda: "nothing to shorten" in screen_text(app))
        assert said(app) == [("user", "one"), ("assistant", "")]


async def test_an_answer_that_is_made_again_keeps_the_summary_and_one_made_before_can_be_brought_back(
    daemon: Dictated,
) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await exchange(app, pilot, daemon, "two", "old")

        async def again(text: str) -> None:
            n = len(daemon.asked)
            await pilot.press("ctrl+r")
            await until(pilot, lambda: len(daemon.asked) == n + 1)
            daemon.say(text)
            daemon.end()
            await answered(app, pilot)

        await again("new")
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 4)
        daemon.say("Sum.")
        daemon.end()
        await answered(app, pilot)
        await again("newer")
        assert contents(daemon.asked[4]) == [f"{HEADING}\nSum.", "two"]
        assert [text for _, text in said(app)] == ["one", "1", "two", "Sum.", "newer"]
        await pilot.press("ctrl+z")  # the summary
        assert [text for _, text in said(app)] == ["one", "1", "two", "newer"]
        await pilot.press("ctrl+z")  # the answer that was made again, with the summary that it had then
        assert [text for _, text in said(app)] == ["one", "1", "two", "new", "Sum."]


async def test_it_is_offered_once_most_of_the_context_is_filled(daemon: Dictated) -> None:
    daemon.state = state()
    async with shown(daemon.root) as (app, pilot):
        await until(pilot, lambda: app.conversations.state is not None)
        await exchange(app, pilot, daemon, "one", "1")
        assert "Alt+C" not in screen_text(app)
        await ask(app, pilot, daemon, "two")
        daemon.say("2")
        daemon.end(disco=DISCO | {"prompt_tokens": 7000})
        await answered(app, pilot)
        await until(pilot, lambda: "Alt+C shortens it: 7,052 of 8,192 tokens" in screen_text(app))
        await pilot.press("alt+c")
        await until(pilot, lambda: len(daemon.asked) == 3)
        assert daemon.asked[2]["model"] == "disco/device", "it has the tokens of what is summarised, and room behind it"
        daemon.say("Sum.")
        daemon.end()
        await answered(app, pilot)
        assert "Alt+C shortens it" not in screen_text(app)


async def test_one_question_is_nothing_to_shorten(daemon: Dictated) -> None:
    async with shown(daemon.root) as (app, pilot):
        await exchange(app, pilot, daemon, "one", "1")
        await pilot.press("alt+c")
        await until(pilot, lambda: "nothing to shorten" in screen_text(app))
        assert said(app) == [("user", "one"), ("assistant", "1")]
        assert len(daemon.asked) == 1


def test_this_machine_writes_the_summary_where_it_can_and_is_no_stand_in() -> None:
    assert route_of_summary(state(), "disco", 5000) == "disco/device"
    assert route_of_summary(state(), "disco", 7500) == "disco", "the summary would not fit behind it"
    assert route_of_summary(state(), "disco", 0) == "disco", "nobody knows whether it fits"
    assert route_of_summary(state(grades={"stand_in": "device"}), "disco", 50) == "disco"
    assert route_of_summary(state(stand_in="135M"), "disco", 50) == "disco"
    assert route_of_summary(state(), "disco/server", 50) == "disco/server"
    assert route_of_summary(state(None), "disco", 50) == "disco"
    assert route_of_summary(None, "disco", 50) == "disco"
    ill = state()
    ill["endpoints"]["device"] |= {"state": "failed"}
    assert route_of_summary(ill, "disco", 50) == "disco"


def test_the_smallest_context_that_may_answer_counts() -> None:
    both = state()
    both["endpoints"]["server"] = both["endpoints"]["server"] | {"capabilities": {"context_length": 100_000}}
    assert filled(both, "disco", 6000) is None
    assert filled(both, "disco", 6200) == (6200, 8192)
    assert filled(both, "disco/server", 6200) is None
    assert filled(both, "disco/server", 80_000) == (80_000, 100_000)
    assert filled(state(None), "disco", 1 << 30) is None
    assert filled(None, "disco", 1 << 30) is None


async def test_disco_chat_shortens_and_takes_it_back(daemon: Dictated, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.state = state()
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    talk = Talk(parser.parse_args(["chat", "--system", "Be brief."]), daemon.root, "")

    async def told(turn: Any, text: str) -> Any:
        running = asyncio.create_task(turn)
        daemon.say(text)
        daemon.end()
        return await asyncio.wait_for(running, 30)

    assert "nothing to shorten" in await talk.compact()
    for question, answer in (("one", "1"), ("two", "2")):
        await told(talk.ask(question), answer)
    assert "/undo" in await told(talk.compact(), "Sum.")
    assert contents(daemon.asked[2]) == ["Be brief.", "one", "1", INSTRUCTION]
    assert daemon.asked[2]["model"] == "disco/device"
    assert "nothing to shorten" in await talk.compact(), "the last question stays"
    await told(talk.ask("three"), "3")
    assert contents(daemon.asked[3]) == [f"Be brief.\n\n{HEADING}\nSum.", "two", "2", "three"]
    assert "wrote no summary" in await told(talk.compact(), " ")
    assert "/undo" in await told(talk.compact(), "Sums.")
    assert contents(daemon.asked[5]) == [f"Be brief.\n\n{HEADING}\nSum.", "two", "2", INSTRUCTION]
    talk.summaries.pop()
    assert [m["content"] for m in talk.messages()] == [f"Be brief.\n\n{HEADING}\nSum.", "two", "2", "three", "3"]
    talk.summaries.pop()
    assert [m["content"] for m in talk.messages()] == ["Be brief.", "one", "1", "two", "2", "three", "3"]
    assert "Sums." in capsys.readouterr().out

    talk.reset()
    await told(talk.ask("one"), "1")
    running = asyncio.create_task(talk.ask("two"))
    daemon.fail("too long", TOO_LONG)
    with pytest.raises(DaemonError):
        await asyncio.wait_for(running, 30)
    assert "/undo" in await told(talk.compact(), "All.")
    assert [m["content"] for m in talk.messages()] == [f"Be brief.\n\n{HEADING}\nAll."]
