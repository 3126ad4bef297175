"""The source of a move rests while a slow reader has text in stock: the same words, and a bill that ends there."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conductor.test_handoff import FORCED, STORY, done, pair
from tests.fixtures.daemon import Heard, ask

# So long that the other side is not there before the source may rest; only the source has it in its cache.
LONG = "Tell a story that begins like this. " + "The keeper climbed the stairs every evening with a lamp. " * 25


def read_at(pace_tps: float) -> dict[str, Any]:
    """So slowly that a few tokens last for as long as a busy machine needs. The end of an answer is shown at once."""
    return {"delivery": {"mode": "paced", "pace_tps": pace_tps}}


@pytest.mark.parametrize("source", ["server", "device"])
async def test_a_source_that_rests_is_closed_and_the_answer_reads_like_an_unbroken_one(
    tmp_path: Path, source: str
) -> None:
    async with pair(tmp_path, f"all-{source}", "continue_final_message", *FORCED, **read_at(0.1)) as daemon:
        await ask(daemon, STORY, model="disco/server", max_tokens=2)  # nobody moves to a stranger
        whole = await ask(daemon, LONG, model=f"disco/{source}", max_tokens=48)
        heard = await ask(daemon, LONG, max_tokens=48)
        assert len(heard.disco["moves"]) == 1, heard.disco
        (move,) = done(heard.disco)
        assert move["source"] == source
        assert (move["paused"], move["asked_again"], move["overlap"]) == (True, False, 0), heard.disco
        assert heard.text == whole.text
        assert sum(heard.disco["tokens"].values()) == sum(whole.disco["tokens"].values())
        assert set(heard.disco["endpoints"]) == {"device", "server"}, "nobody was asked twice"
        made = heard.disco["endpoints"][source]["completion_tokens"]
        assert heard.disco["tokens"][source] <= made < 40, "it went on though nobody needed that"


async def test_a_server_that_rests_goes_on_where_the_device_hangs_and_both_requests_are_billed(tmp_path: Path) -> None:
    async with pair(tmp_path, "all-server", "continue_final_message", *FORCED, **read_at(0.5)) as daemon:
        whole = await ask(daemon, LONG, model="disco/server", max_tokens=64)
        engine = (await daemon.state())["endpoints"]["device"]["pid"]

        def hang(heard: Heard) -> None:
            if len(heard.pieces) == 1:
                os.kill(engine, signal.SIGSTOP)

        try:
            heard = await ask(daemon, LONG, max_tokens=64, on_piece=hang)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a hang that lasts is ended
                os.kill(engine, signal.SIGCONT)
        (move,) = heard.disco["moves"]
        assert (move["paused"], move["asked_again"]) == (True, True), heard.disco
        assert move["dropped"] is not None
        assert heard.text == whole.text
        assert heard.finish_reason == whole.finish_reason
        first, second = (heard.disco["endpoints"][name] for name in ("server", "server#2"))
        n_before = heard.disco["tokens"]["server"] - second["completion_tokens"]
        assert 0 < n_before <= first["completion_tokens"] + 1
        assert second["prompt_tokens"] + second["cached_tokens"] >= heard.disco["prompt_tokens"], "it has read it again"
        bills = [attempt["bill_usd"] for name, attempt in heard.disco["endpoints"].items() if name != "device"]
        assert all(bill > 0 for bill in bills)
        assert heard.disco["server_usd"] == pytest.approx(sum(bills))
