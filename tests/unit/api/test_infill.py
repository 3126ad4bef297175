"""llama-server's `/infill`: what is read of a request, where an answer ends, and its shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.api.llama_server import infill_shape
from disco_daemon.endpoints.gaps import fill, refuses_gap
from disco_daemon.engine.llama.text import TextStream
from disco_daemon.errors import RequestError
from disco_daemon.types import (
    BOTH,
    Capabilities,
    Capability,
    ExtraText,
    GenerationRequest,
    Infill,
    Outcome,
    Plan,
    Side,
    Token,
    wanted,
)

GAP = {"input_prefix": "def f():\n    ", "input_suffix": "\n"}


def asked(**more: Any) -> GenerationRequest:
    return infill_shape.to_generation(*infill_shape.parse(GAP | more), "r", BOTH)


def test_a_request_becomes_a_gap_with_the_fields_that_draw() -> None:
    extra = [{"text": "a"}, {"text": "b", "filename": "b.py"}]
    found = asked(input_extra=extra, prompt="re", n_predict=9, n_indent=4, t_max_predict_ms=300, top_k=3, stop=["x"])
    gap = (ExtraText("a", "tmp"), ExtraText("b", "b.py"))
    assert found.prompt == Infill(prefix="def f():\n    ", suffix="\n", begun="re", extra=gap)
    assert (found.sampling.max_tokens, found.sampling.stop) == (9, ("x",))
    assert (found.drawing.n_indent, found.drawing.t_max_predict_ms, found.drawing.top_k) == (4, 300, 3)
    assert found.needs == ["n_indent", "suffix", "t_max_predict_ms"], "no other side goes on with it"
    assert wanted(found)[Capability.FIM] == "suffix"


@pytest.mark.parametrize(
    ("told", "limit"), [({}, None), ({"n_predict": -1}, None), ({"n_predict": 0}, 1), ({"max_tokens": 5}, 5)]
)
def test_the_limit_is_llama_servers(told: dict[str, Any], limit: int | None) -> None:
    assert asked(**told).sampling.max_tokens == limit


@pytest.mark.parametrize(
    "more",
    [
        {"input_prefix": 5}, {"input_suffix": None}, {"input_extra": {}}, {"input_extra": [{"filename": "a"}]},
        {"input_extra": [{"text": "a", "filename": 3}]}, {"prompt": ["a"]}, {"n_predict": -2}, {"n_indent": -1},
        {"n_indent": 10**6}, {"n": 2}, {"logprobs": True}, {"t_max_predict_ms": "soon"}, {"temperature": 9},
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**more)
    told = infill_shape.error_body(caught.value)["error"]
    assert (told["code"], told["type"]) == (400, "invalid_request_error")


def test_a_server_gets_a_gap_as_a_prompt_with_a_suffix_if_it_is_known_to_read_that() -> None:
    can, request = Capabilities(fim=True), asked(prompt="re", n_predict=9, n_indent=4)
    assert refuses_gap(request, can) is None
    assert isinstance(request.prompt, Infill)
    sent = fill(request, request.prompt).body
    assert sent == {"prompt": "def f():\n    re", "suffix": "\n", "max_tokens": 9, "n_indent": 4}
    assert "server.capabilities" in (refuses_gap(request, Capabilities()) or "")
    assert refuses_gap(asked(input_extra=[{"text": "a"}]), can) is not None
    assert refuses_gap(replace(request, extra={"response_format": {"type": "json_object"}}), can) is not None


def end_of(text: str, n_indent: int) -> int | None:
    """Where a text ends by its indentation: in front of the text of the first line, but one, that has too little."""
    at = 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        indent = len(line) - len(line.lstrip(" \t"))
        if number and indent < n_indent and indent < len(line):
            return at + indent
        at += len(line)
    return None


@given(st.lists(st.text("a \t\n", max_size=4), max_size=12), st.integers(1, 4))
def test_an_answer_ends_where_a_line_is_indented_less(pieces: list[str], n_indent: int) -> None:
    stream, shown = TextStream(n_indent=n_indent), ""
    for piece in pieces:
        shown += stream.feed(piece.encode())
        if stream.stopped:
            break
    text = "".join(pieces)
    end = end_of(text, n_indent)
    assert shown == (text if end is None else text[:end])
    assert stream.is_outdented == (end is not None)


def test_a_stop_text_in_front_of_that_line_comes_first() -> None:
    stream = TextStream(["}"], n_indent=2)
    assert stream.feed(b"x\n  y}\nz") == "x\n  y"
    assert (stream.stopped, stream.is_outdented) == (True, False)


def test_the_events_of_a_stream_are_those_of_a_whole_answer() -> None:
    counts = {Side.DEVICE: 3, Side.SERVER: 0}
    done = Outcome(
        "r", 0.0, "m", "race", Plan(0, 0), 7, Side.DEVICE, "length", None, 0.1, 1.0, 0, counts, (), 0.0, 0.0
    )  # fmt: skip
    tokens = [Token("a\n", 2, ids=(7, 8)), Token("b", 1, ids=(9,))]
    whole = infill_shape.InfillShape("r", 0, "m").body(tokens, {0: [7, 8, 9]}, done)
    shape = infill_shape.InfillShape("r", 0, "m")
    sent = [*(shape.token(token, token.ids, first=False) for token in tokens), shape.ending(done, include_usage=True)]
    events = [msgspec.json.decode(data.removeprefix(b"data: ")) for data in sent]
    assert "".join(one["content"] for one in events) == whole["content"] == "a\nb"
    assert [token for one in events for token in one["tokens"]] == whole["tokens"] == [7, 8, 9]
    assert [one["stop"] for one in events] == [False, False, True]
    assert events[-1] | {"content": "a\nb", "tokens": [7, 8, 9]} == msgspec.to_builtins(whole)
    assert (whole["has_new_line"], whole["stop_type"], whole["model"]) == (True, "limit", "m")
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
