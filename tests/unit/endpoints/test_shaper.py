from __future__ import annotations

import importlib.resources
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_daemon.clock import SystemClock
from disco_daemon.endpoints.base import Controls, Resumption
from disco_daemon.endpoints.device import Device
from disco_daemon.endpoints.shaper import N_REMEMBERED, Shape, Shaped, read_trace
from disco_daemon.errors import ConfigError
from disco_daemon.types import CaughtUp, Continuation, Finish, GenerationRequest, PromptLength, Side, Token, Usage


class Inner:
    """A device that answers at once."""

    side, model, prefill_tps, continuation = Side.SERVER, "m", 100.0, Continuation.EXACT
    can_hold, resumption, known_since = True, Resumption.ALONE, 0.0

    def refuses(self, request: GenerationRequest) -> str | None:
        return "no" if request.extra else None

    def may_serve(self) -> bool:
        return True

    async def count(self, request: GenerationRequest) -> PromptLength | None:
        return PromptLength(request.n_chars)

    async def token_ids(self, request: GenerationRequest) -> tuple[int, ...] | None:
        return (1, 2)

    async def generate(
        self, request: GenerationRequest, usage: Usage, controls: Controls | None = None
    ) -> AsyncGenerator[Token | CaughtUp | Finish, None]:
        if controls is not None and controls.held:
            yield CaughtUp()
        usage.prompt_tokens = request.n_chars
        yield Token("Hi")
        yield Finish("stop")

    def status(self) -> dict[str, Any]:
        return {"kind": "engine"}


def shaped(trace: list[float]) -> Shaped:
    return Shaped(cast(Device, Inner()), Shape(tuple(trace)), SystemClock())


def ask(text: str, **more: Any) -> GenerationRequest:
    return GenerationRequest("r", ({"role": "user", "content": text},), **more)


def trace_of(folder: Path, text: str) -> list[float]:
    path = folder / "trace.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return read_trace(path)


def test_a_trace_is_its_ttft_column_in_order(tmp_path: Path) -> None:
    assert trace_of(tmp_path, "# a comment\nseq,ttft_s,region\n0,0.5,sea\n1,0.25,cdg\n") == [0.5, 0.25]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.lists(st.floats(0, 1e6), min_size=1))
def test_a_trace_comes_back_as_it_was_written(values: list[float], tmp_path: Path) -> None:
    assert trace_of(tmp_path, "ttft_s\n" + "".join(f"{v!r}\n" for v in values)) == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft_s\n",
        "seq,region\n0,sea\n",
        "ttft_s\nfast\n",
        "ttft_s\n0.5\n-0.1\n",
        "seq,ttft_s\n0,0.5\n1\n",
        "ttft_s\nnan\n",
        "ttft_s\ninf\n",
        "ttft_s\n\udcff\n",
        "ttft_s\n" + "1" * 200_000 + "\n",
    ],
    ids=["empty", "header", "column", "word", "negative", "short row", "nan", "inf", "not utf-8", "huge field"],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.csv"):
        trace_of(tmp_path, text)


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.csv is no trace"):
        read_trace(tmp_path / "missing.csv")


def test_the_packaged_trace_is_in_the_package() -> None:
    packaged = importlib.resources.files("disco_daemon.profiles") / "traces" / "gpt-3.5-turbo.csv"
    with importlib.resources.as_file(packaged) as path:
        values = read_trace(path)
    assert len(values) == 48
    assert all(0.05 < v < 30 and math.isfinite(v) for v in values)


async def test_a_shaped_endpoint_answers_as_the_one_behind() -> None:
    endpoint, usage = shaped([0.0]), Usage()
    assert [e async for e in endpoint.generate(ask("Hello"), usage)] == [Token("Hi"), Finish("stop")]
    assert usage.prompt_tokens == 5
    assert (endpoint.side, endpoint.model, endpoint.may_serve()) == (Side.SERVER, "m", True)
    assert endpoint.continuation is Continuation.EXACT
    assert endpoint.refuses(ask("Hello")) is None
    assert endpoint.refuses(ask("Hello", extra={"tools": [1]})) == "no"
    assert await endpoint.count(ask("Hello")) == PromptLength(5)
    assert await endpoint.token_ids(ask("Hello")) == (1, 2)
    assert endpoint.can_hold
    assert endpoint.resumption is Resumption.ALONE
    held = [e async for e in endpoint.generate(ask("Hello"), usage, Controls(held=True))]
    assert held == [CaughtUp(), Token("Hi"), Finish("stop")]
    assert endpoint.status() == {"kind": "engine", "shaped": True}


async def test_a_continued_answer_waits_again() -> None:
    endpoint, clock = shaped([0.1]), SystemClock()
    began = clock.now()
    events = endpoint.generate(ask("Hello", answer_so_far="Well, "), Usage())
    assert await anext(events) == Token("Hi")
    assert clock.now() - began > 0.09
    await events.aclose()


def test_the_same_prompt_meets_the_same_ttft_and_a_new_one_the_next() -> None:
    endpoint = shaped([0.1, 0.2])
    assert [endpoint._ttft_s(ask(t)) for t in ("a", "b", "a", "c", "b")] == [0.1, 0.2, 0.1, 0.1, 0.2]


def test_the_memory_of_prompts_is_bounded() -> None:
    endpoint = shaped([0.1])
    for i in range(N_REMEMBERED + 10):
        endpoint._ttft_s(ask(str(i)))
    assert len(endpoint._drawn) == N_REMEMBERED
