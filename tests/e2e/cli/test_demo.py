"""`disco demo`, for real: each act happens. How long it takes is a matter of the machine, so nothing here times it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.bench.child import child_env
from disco_daemon.bench.demo import (
    KILLED,
    LENGTHS,
    LONG,
    PRICES,
    SHORT,
    TIMES,
    recorded_answers,
    recorded_draws,
    run_demo,
)
from disco_daemon.cli import demo
from disco_daemon.endpoints.shaper import read_trace
from disco_daemon.models.default import default_model_path

SLOW, FAST = 3.0, 0.02  # of a server that comes after any machine with a short question, and before any with a long one
TPS = 4.0  # any machine that reads faster than that catches up, a busy one too
PATIENCE_S = 600.0


class Seen:
    """Remembers what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.answers: list[list[tuple[str, str]]] = []
        self.asked_sides: list[Sequence[str]] = []

    def say(self, line: str, *, title: bool = False) -> None:
        self.lines.append(line)

    def asked(self, question: str, sides: Sequence[str]) -> None:
        self.asked_sides.append(sides)
        self.answers.append([])

    def piece(self, text: str, side: str) -> None:
        self.answers[-1].append((text, side))

    def ended(self) -> None:
        assert self.answers[-1]


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
async def test_each_act_happens_and_the_text_goes_on_at_the_very_letter() -> None:
    seen = Seen()
    result = await run_demo(seen, lambda _: None, draws=[(SLOW, TPS), (FAST, TPS)])
    rows, moved, killed, summary = (result[key] for key in ("requests", "moved", "killed", "summary"))
    assert len(rows) >= 4
    for row in rows:  # each has disco and both sides alone, by one and the same draw
        assert row["recorded_ttft_s"] == (SLOW if row["question"] == SHORT else FAST)
        assert row["server_ttft_s"] >= row["recorded_ttft_s"]
        assert row["winner"] == ("device" if row["question"] == SHORT else "server")
    assert summary["wins"] == {"device": len(rows) / 2, "server": len(rows) / 2}
    races = seen.answers[:2]
    assert [{side for _, side in answer} for answer in races] == [{"device"}, {"server"}]
    assert "".join(text for text, _ in races[1]) == "".join(recorded_answers()[LONG][: LENGTHS[LONG]])

    assert moved["handoffs"] == 1
    assert moved["tokens"]["device"] > 0 < moved["tokens"]["server"]
    assert 0 < summary["saved_usd"] == moved["saved_usd"] < moved["usd"]

    whole = "".join(recorded_answers()[KILLED])
    server, device = killed["server_text"], killed["device_text"]
    assert 0 < len(server) < len(whole)
    assert (server + device).startswith(whole[: len(server) + 8]), "the next word is the unbroken answer's"
    assert seen.asked_sides[-1] == ("server",)
    assert "".join(text for text, _ in seen.answers[-1]) == server + device


def run(tmp_path: Path, *words: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
    own = child_env(tmp_path) | {"DISCO_MODELS_DIR": str(default_model_path().parent), "COLUMNS": "100"} | (env or {})
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "demo", *words]
    return subprocess.Popen(argv, env=own, stdin=subprocess.DEVNULL, **more)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
def test_into_a_pipe_it_prints_plain_lines_and_what_to_do_next(tmp_path: Path) -> None:
    with run(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = (text.decode() for text in process.communicate(timeout=PATIENCE_S))
    assert process.returncode == 0, err
    print(out)  # the figures of this machine, in the output of a run with -s
    assert "\x1b" not in out
    assert "\r" not in out
    for word in ("thefastest.ai", "MIT", "◆ reads the question …", "◇ was asked …", "⇢◆", "first word", "saved"):
        assert word in out
    after = out[out.index("Next") :]
    assert all(verb in after for verb in ("disco tui", "disco setup", "F5", "disco models recommend"))


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("no_color", ["", "1"])
def test_at_a_terminal_lines_move_unless_colours_are_unwanted_and_ctrl_c_is_quiet(
    no_color: str, tmp_path: Path
) -> None:
    ours, its = pty.openpty()
    env = {"TERM": "xterm-256color", "NO_COLOR": no_color}
    with run(tmp_path, env=env, stdout=its, stderr=subprocess.PIPE, start_new_session=True) as process:
        os.close(its)
        shown = b""
        while b"server alone" not in shown:
            shown += os.read(ours, 4096)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    os.close(ours)
    assert process.returncode == 130
    assert b"Traceback" not in err
    moved = re.search(rb"\x1b\[\d*[AK]", shown) is not None
    assert moved is not bool(no_color)


def test_the_server_costs_and_takes_what_the_service_did() -> None:
    folder = files("disco_daemon.profiles")
    listed = tomllib.loads((folder / "servers" / "openai.toml").read_text())["models"]["gpt-3.5-turbo"]
    prices = {"input_usd_per_mtok": listed["input"], "output_usd_per_mtok": listed["output"]}
    assert prices == PRICES
    trace = Path(str(folder / "traces" / "gpt-3.5-turbo.csv"))
    assert [ttft_s for ttft_s, _ in recorded_draws()] == read_trace(trace)
    assert all(pieces and len(pieces) <= LENGTHS[question] for question, pieces in recorded_answers().items())


@pytest.mark.parametrize(
    ("saved_usd", "said"),
    [
        (0.0, "saved       nothing here: that answer did not move"),
        (0.00013, "saved       $0.00013 of $0.00025 where an"),
    ],
)
def test_what_was_not_saved_is_not_said_to_be(saved_usd: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that reads too slowly for a move is as honest an end as one that saves."""
    times = dict(zip(TIMES, (0.3, 0.7, 0.5), strict=True))
    shapes = dict.fromkeys(("mean", "median", "mean_short", "mean_long"), times)
    summary = shapes | {"of": 6, "wins": {"device": 3, "server": 3}, "saved_usd": saved_usd}
    demo._conclude(
        demo.DemoScreen(), {"summary": summary, "moved": {"saved_usd": saved_usd, "usd": 0.00025}, "killed": None}
    )
    assert said in capsys.readouterr().out
