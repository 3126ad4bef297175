"""The trace of an answer that a real daemon has given: over HTTP, by the link, and as `disco trace`."""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

from disco_daemon.client.stream import Link
from tests.e2e.cli.test_cli import disco
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

PACE = 40.0  # token/s
PACED = {"delivery": "paced", "pace_tps": PACE}
TOKENS = 12


async def answered(link: Link, **options: Any) -> dict[str, Any]:
    """The `disco` object of one answer."""
    told: dict[str, Any] = {}
    async with aclosing(link.chat([{"role": "user", "content": "red green"}], **options)) as pieces:
        async for piece in pieces:
            told = dict(piece.disco or told)
    return told


async def refused(daemon: DaemonProcess, request_id: str) -> dict[str, Any]:
    """The error in place of a trace."""
    async with daemon.session.get(f"{daemon.root}/disco/v1/trace/{request_id}") as response:
        assert response.status == 404
        found: dict[str, Any] = (await response.json())["error"]
    return found


async def test_a_paced_answer_and_one_that_is_not_known(tmp_path: Path) -> None:
    async with (
        Upstream(tokens=TOKENS) as upstream,
        running(tmp_path / "d", server=upstream.url, device=False) as daemon,
        Link(daemon.root) as link,
    ):
        error = await refused(daemon, "latest")
        assert (error["code"], error["type"]) == ("trace_gone", "invalid_request_error")
        assert "No answer has been given" in error["message"]
        told = await answered(link, disco=PACED)
        await answered(link)
        assert "last 256 answers" in (await refused(daemon, "req-nobody"))["message"]
        assert await link.trace("req/nobody?") is None

        trace = await link.trace(told["request_id"])
        assert trace is not None
        put, released = trace["put_s"], trace["released_s"]
        assert len(put) == len(released) == TOKENS
        assert trace["disco"] == told
        assert (trace["pace_tps"], trace["cut"], trace["finish_reason"]) == (PACE, False, "stop")
        assert put == sorted(put)
        assert released == sorted(released)
        assert all(came <= shown for came, shown in zip(put, released, strict=True))
        assert abs(put[0] - told["ttft_s"]) < 0.002, "both are of the first token"
        latest = await link.trace("latest")
        assert latest is not None
        assert latest["request_id"] != told["request_id"]
        await shown_in_a_terminal(daemon, tmp_path, told["request_id"])


async def shown_in_a_terminal(daemon: DaemonProcess, home: Path, request_id: str) -> None:
    """`disco trace` of that answer, and of one that there never was."""
    code, out, err = await disco("trace", request_id, "--url", daemon.url, home=home)
    assert (code, err) == (0, "")
    assert f"answer {request_id}: server was first" in out
    assert "generated from" in out
    assert "tokens over time: * shown  + generated" in out
    assert f"{TOKENS} tokens" in out
    code, out, _ = await disco("trace", "--plain", "--url", daemon.url, home=home)
    assert code == 0
    assert "tokens over time" not in out
    assert "generated from" in out
    code, out, _ = await disco("trace", request_id, "--json", "--url", daemon.url, home=home)
    assert json.loads(out)["request_id"] == request_id
    for args in (["req-nobody"], ["req-nobody", "--json"]):
        code, out, err = await disco("trace", *args, "--url", daemon.url, home=home)
        assert (code, out) == (1, "")
        assert "No trace of 'req-nobody' is kept" in err


async def test_a_reader_who_goes_away_leaves_a_trace_and_a_restart_leaves_the_history(tmp_path: Path) -> None:
    async with Upstream(tokens=TOKENS) as upstream:
        async with running(tmp_path / "d", server=upstream.url, device=False) as daemon, Link(daemon.root) as link:
            with upstream.stall_after(4):
                async with aclosing(link.chat([{"role": "user", "content": "red green"}], disco=PACED)) as pieces:
                    assert (await anext(pieces)).text
            await daemon.until(lambda state: state["served"] == 1)
            trace = await link.trace("latest")
            assert trace is not None
            assert trace["finish_reason"] == "cancelled"
            assert 1 <= trace["released"] <= trace["put"] <= 4
        async with running(tmp_path / "d", server=upstream.url, device=False) as daemon, Link(daemon.root) as link:
            assert await link.trace(trace["request_id"]) is None
            for named in ([trace["request_id"]], []):
                code, out, _ = await disco("trace", *named, "--url", daemon.url, home=tmp_path)
                assert code == 0
                assert f"answer {trace['request_id']}: server was first" in out
                assert "a straight line: there is no trace of it" in out
