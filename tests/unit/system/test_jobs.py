"""The common end of a job in a child process: its result, or one sentence; real processes of a few words."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import pytest

from disco_daemon.errors import DiscoError
from disco_daemon.system import process
from disco_daemon.system.process import run_job

BEGIN = "import os, sys, time; pid = os.getpid(); say = lambda text: print(text, flush=True); "
FOUND = """say('{"type": "Found", "n": 7}'); """
STEP = """say('{"type": "Step", "text": "half of it"}'); """
REFUSED = """say('{"type": "Refused", "message": "it is too long"}'); """


class Step(msgspec.Struct, tag=True):
    text: str


class Found(msgspec.Struct, tag=True):
    n: int


class Refused(msgspec.Struct, tag=True):
    message: str


class JobError(DiscoError):
    pass


decode = msgspec.json.Decoder(Step | Found | Refused).decode


async def ran(code: str, told: list[str], timeout_s: float = 60.0) -> Found:
    return await run_job(
        BEGIN + code, b"7", decode, told.append, Found, JobError, name="the job", timeout_s=timeout_s, hint="who knows"
    )


@pytest.fixture(autouse=True)
def _lines_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", lambda code: [sys.executable, "-c", code])


def test_the_result_is_the_last_reply_and_what_a_library_prints_is_none() -> None:
    told: list[str] = []
    code = "assert sys.stdin.readline() == '7\\n'; say('llama.cpp'); " + STEP + FOUND + "say('bye')"
    assert asyncio.run(ran(code, told)) == Found(7)
    assert told == ["half of it"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (STEP + REFUSED, "^it is too long$"),
        ("sys.exit(3)", r"^the job ended without a result \(exit status 3\): who knows$"),
        (FOUND + STEP + "os.kill(pid, 9)", r"^the job ended without a result \(exit status -9\): who knows$"),
    ],
)
def test_without_a_result_one_sentence_says_why(code: str, why: str) -> None:
    with pytest.raises(JobError, match=why):
        asyncio.run(ran(code, []))


def test_a_job_that_takes_too_long_is_killed_and_that_is_said() -> None:
    with pytest.raises(JobError, match=r"^the job gave no result in 0\.2 s$"):
        asyncio.run(ran("time.sleep(3600)", [], timeout_s=0.2))
