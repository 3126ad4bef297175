"""The common end of a job in a child process: its result, or one sentence; real processes of a few words."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import pytest

from disco_daemon.errors import DiscoError
from disco_daemon.plain import reason_of
from disco_daemon.system import process
from disco_daemon.system.job import run_job

BEGIN = """
import os, sys, time
from disco_daemon.system.job import JobFailed, JobSocket
from tests.unit.system.test_jobs import Asked, Found
home = JobSocket()
job, _ = home.job(Asked, lambda _: None)
"""
FOUND, STEP = "home.done(Found(job.n))\n", "home.progress('half of it')\n"
REFUSED = "with home.refusing(ValueError): raise ValueError('it is too long')\n"


class Asked(msgspec.Struct):
    n: int


class Found(msgspec.Struct, tag=True):
    n: int


class JobError(DiscoError):
    pass


async def ran(code: str, told: list[str], timeout_s: float = 60.0) -> Found:
    return await run_job(
        BEGIN + code, Asked(7), told.append, Found, JobError, name="the job", timeout_s=timeout_s, hint="who knows"
    )


@pytest.fixture(autouse=True)
def _lines_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", lambda code, *words: [sys.executable, "-c", code, *words])


def test_the_result_is_what_it_says_last_and_what_a_library_prints_is_none() -> None:
    told: list[str] = []
    code = "print('llama.cpp', flush=True)\n" + STEP + FOUND + "print('bye')\n"
    assert asyncio.run(ran(code, told)) == Found(7)
    assert told == ["half of it"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (STEP + REFUSED, "^it is too long$"),
        ("sys.exit('too bad')", "^the job exited with status 1 without a result: too bad$"),
        ("sys.exit(3)", "^the job exited with status 3 without a result: who knows$"),
        (STEP + "os.kill(os.getpid(), 9)", "^the job was killed by signal 9 without a result: who knows$"),
    ],
)
def test_without_a_result_one_sentence_says_why(code: str, why: str) -> None:
    with pytest.raises(JobError, match=why) as caught:
        asyncio.run(ran(code, []))
    assert reason_of(caught.value) == str(caught.value), "what a socket says of it is nobody's business"


def test_a_job_that_takes_too_long_is_killed_and_that_is_said() -> None:
    with pytest.raises(JobError, match=r"^the job gave no result in 0\.2 s$"):
        asyncio.run(ran("time.sleep(3600)", [], timeout_s=0.2))


CONFINED = """
import msgspec, sys
from disco_daemon.system.confine import Access, confine
from disco_daemon.system.job import JobSocket
from tests.unit.system.test_jobs import Asked, Measures
home = JobSocket()
_, confinement = home.job(Asked, lambda _: confine(Access()))
home.done(Measures(confinement.missing))
"""


class Measures(msgspec.Struct, tag=True):
    missing: dict[str, str]


@pytest.mark.skipif(sys.platform != "linux", reason="landlock is Linux's")
def test_a_job_is_confined_while_its_process_has_one_thread() -> None:
    """What watches for the parent's end is a thread, beside which landlock cannot be put in force."""
    found = asyncio.run(run_job(CONFINED, Asked(7), lambda _: None, Measures, JobError, name="the job", timeout_s=60.0))
    assert "threads run already" not in found.missing.get("landlock", "")
