"""What the measurements of the relay make of streams and of pairs."""

from __future__ import annotations

import pytest

from benchmarks.relay.against import interval, table
from disco_daemon.bench.child import BenchError
from disco_daemon.bench.relay_apis import APIS, choice_of, document_of

STREAMS = {
    "chat": [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a "},"finish_reason":null}]}',
        b'data: {"choices":[{"index":0,"delta":{"content":"b "},"finish_reason":"stop"}]}',
        b'data: {"choices":[],"usage":{"completion_tokens":2}}',
        b"data: [DONE]",
    ],
    "responses": [
        b"event: response.created",
        b'data: {"type":"response.created","response":{"error":null}}',
        b'data: {"type":"response.output_text.delta","delta":"a "}',
        b'data: {"type":"response.output_text.delta","delta":"b "}',
        b'data: {"type":"response.completed","response":{}}',
    ],
    "messages": [
        b'data: {"type":"message_start","message":{}}',
        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a b "}}',
        b'data: {"type":"message_stop"}',
    ],
    "ollama": [
        b'{"model":"disco","message":{"role":"assistant","content":"a "},"done":false}',
        b'{"model":"disco","message":{"role":"assistant","content":"b "},"done":true}',
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_the_answer_is_read_in_each_api(name: str) -> None:
    api, lines = APIS[name], STREAMS[name]
    assert api.text(lines) == "a b "
    assert api.is_whole(lines)
    assert not api.is_whole(lines[:-1])
    assert any(api.has_text(line) for line in lines[:3])


def test_a_chat_is_whole_with_its_last_line_only() -> None:
    lines = STREAMS["chat"]
    assert not APIS["chat"].is_whole([lines[0], lines[-1]])
    assert choice_of(lines[-1]) is None
    assert choice_of(lines[2]) is None


@pytest.mark.parametrize(
    "line",
    [
        b'data: {"error":{"message":"no"}}',
        b'data: {"type":"response.failed","response":{"error":{"message":"no"}}}',
        b'{"error":"no"}',
    ],
)
def test_an_error_in_a_stream_breaks_the_measurement(line: bytes) -> None:
    with pytest.raises(BenchError, match="no"):
        document_of(line)


def test_the_interval_holds_the_ratio_and_is_narrow_where_the_pairs_agree() -> None:
    that = [1.0 + i / 1000 for i in range(100)]
    low, high = interval([0.5 * t for t in that], that, samples=200)
    assert 0.49 < low <= 0.5 <= high < 0.51
    low, high = interval([t * (0.2 if i % 2 else 1.8) for i, t in enumerate(that)], that, samples=200)
    assert high - low > 0.5


def test_the_table_shows_both_and_the_ratio() -> None:
    both = {"this": 1.0, "that": 2.0}
    figures = {
        "added_ms": both, "ratio": 0.5, "ratio_95": [0.4, 0.6], "cpu_ms_per_request": both, "cpu_ratio": 0.5,
        "cpu_us_per_token": both,
    }  # fmt: skip
    assert "0.500 (0.400 to 0.600)" in table(figures)
