"""However a server writes calls, texts and thoughts, what it means is read: the same answer in each manner."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.relay.server_streams import cut, disturbed, read

NAMES = st.sampled_from(["look", "look_up", "say", "get_weather"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab{}"\\[] \U0001f98a', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("xy", max_size=2), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(st.text("abc", min_size=1, max_size=2), VALUES, max_size=3)), max_size=3
)
INDEXES = st.sampled_from(["own", "none", "zero", "from one"])
IDS = st.sampled_from(["once", "each time", "empty later", "null later", "late", "never"])


def _written(
    calls: list[tuple[str, dict[str, Any]]], indexes: str, ids: str, *, again: bool, rng: random.Random
) -> list[list[dict[str, Any]]]:
    """The entries of each call, one after the other, in a server's manner."""
    written = []
    for number, (name, given_) in enumerate(calls):
        text = json.dumps(given_)
        ends = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(4)))})
        entries = []
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            entry: dict[str, Any] = {"function": {"arguments": text[a:b]}}
            if indexes != "none":
                entry["index"] = {"own": number, "zero": 0, "from one": number + 1}[indexes]
            if i == 0 or again:
                entry["function"]["name"] = name
            if ids == "each time" or (ids != "never" and i == (ids == "late")):
                entry["id"] = f"call_{number}"
            elif ids in ("empty later", "null later") and i:
                entry["id"] = "" if ids == "empty later" else None
            entries.append(entry)
        written.append(entries)
    return written


@settings(max_examples=120, deadline=None)
@given(st.text(max_size=8), st.text(max_size=8), CALLS, INDEXES, IDS, st.booleans(), st.booleans(), st.randoms())
@example(
    text="", thought="", calls=[("look", {}), ("look", {})], indexes="own", ids="late", again=True, turns=False,
    rng=random.Random(1),
)  # fmt: skip
def test_an_answer_is_read_in_whatever_manner_it_is_written(
    text: str, thought: str, calls: list[tuple[str, dict[str, Any]]], indexes: str, ids: str, again: bool,
    turns: bool, rng: random.Random,
) -> None:  # fmt: skip
    """With own indexes, none or all the same; ids once, always, late or never; names repeated; by turns."""
    told_apart = indexes in ("own", "from one") or ids not in ("never", "late")
    if not told_apart and again:
        again = False  # nobody could say whether a name that comes again begins a call
    queues = _written(calls, indexes, ids, again=again, rng=rng)
    entries = [entry for queue in queues for entry in queue]
    if turns and indexes in ("own", "from one"):
        order = sorted(rng.sample(range(len(entries)), len(entries)))
        first = [queue.pop(0) for queue in queues]
        rest = [queue.pop(0) for _ in order for queue in rng.sample(queues, len(queues)) if queue]
        entries = [*first, *rest]
    deltas: list[dict[str, Any]] = [{"reasoning_content": piece} for piece in thought]
    deltas += [{"content": piece} for piece in text] + [{"tool_calls": [entry]} for entry in entries]
    chunks = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": rng.choice(["stop", "tool_calls"])}]}
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in [*chunks, end]) + b"data: [DONE]\n\n"
    answer = asyncio.run(read(cut(disturbed(body, rng), rng)))
    assert answer.error is None, answer.error
    assert "".join(token.text for token in answer.tokens) == text
    assert "".join(token.delta.thought for token in answer.tokens if token.delta) == thought
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls()] == calls
    assert answer.finish == ("tool_calls" if calls else "stop")
    made = [piece.id for token in answer.tokens if token.delta for piece in token.delta.calls if piece.id]
    assert len(set(made)) == len(made) == len(calls)
