"""Log-probabilities are those of the model's logits, and come with the text of their tokens, in both shapes."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from disco_daemon.api.openai.shapes import ChatShape, TextShape
from disco_daemon.engine.llama.likelihood import likeliest, log_probabilities
from disco_daemon.engine.llama.thinking import ThinkingText
from disco_daemon.engine.serve.unsent_tokens import Unsent
from disco_daemon.types import Likelihood, Outcome, TextLogprobs, Token, chat_logprobs
from disco_daemon.types.likelihood import LEAST
from tests.unit.api.test_openai_format import outcome

rows = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=50)


@settings(max_examples=100)
@given(rows, st.integers(0, 20))
def test_they_are_the_logarithm_of_the_softmax_and_the_likeliest_come_first(row: list[float], n: int) -> None:
    found = log_probabilities(np.array(row, np.float32))
    total = math.fsum(math.exp(x) for x in row)
    assert found.tolist() == pytest.approx([x - math.log(total) for x in row], abs=1e-4)
    best = likeliest(found, n)
    assert best == sorted(range(len(row)), key=lambda i: (-found[i], i))[:n]


def test_a_token_that_is_impossible_is_told_by_a_number() -> None:
    found = log_probabilities(np.array([0.0, -np.inf], np.float32))
    one = chat_logprobs([Likelihood(b"a", float(found[1]), ((b"b", float(found[0])),))])["content"][0]
    assert (one["logprob"], one["top_logprobs"][0]["logprob"]) == (LEAST, 0.0)
    assert json.loads(json.dumps(one)) == one


def tokens_of(text: str, cuts: list[int]) -> list[Likelihood]:
    data = text.encode()
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    return [Likelihood(piece, -float(n)) for n, piece in enumerate(pieces)]


def shown(unsent: Unsent, tokens: list[Likelihood]) -> list[tuple[str, tuple[Likelihood, ...]]]:
    """What leaves, as a sequence sends it."""
    out = []
    for token in tokens:
        unsent.likelihoods.append(token)
        if text := unsent.text.feed(token.piece):
            out.append((text, unsent.take_likelihoods(text)))
        if unsent.text.stopped:
            break
    text = unsent.text.flush()
    return [*out, (text, unsent.take_likelihoods(text))] if text else out


@settings(max_examples=100)
@given(st.text("ab€👩\u200d", max_size=12), st.lists(st.integers(0, 99), max_size=12))
def test_what_a_thinking_model_thinks_is_not_told_but_every_token_of_its_answer_is(text: str, cuts: list[int]) -> None:
    thought = [Likelihood(piece, 0.0) for piece in (b"<think>", b"\n", b"a b", b"\n", b"</think>", b"\n\n")]
    tokens = tokens_of(f"x{text}", cuts)
    left = shown(Unsent(ThinkingText()), [*thought, *tokens])
    assert "".join(piece for piece, _ in left) == f"x{text}"
    told = [token for _, found in left for token in found]
    assert b"".join(token.piece for token in told) == f"x{text}".encode()
    assert [token.logprob for token in told if token.piece] == [token.logprob for token in tokens if token.piece]


def test_half_characters_are_spelled_out_and_each_token_knows_where_it_begins() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x91\xa9b", b"", "€".encode()]
    content = chat_logprobs([Likelihood(piece, -1.0, ((b"z", -0.5),)) for piece in pieces])
    assert [one["token"] for one in content["content"]] == ["a", "\\xf0\\x9f", "\\x91\\xa9b", "", "€"]
    assert [bytes(one["bytes"]) for one in content["content"]] == pieces
    whole = TextLogprobs().of(content)
    assert whole["text_offset"] == [0, 1, 1, 3, 3]
    assert whole["tokens"] == ["a", "\\xf0\\x9f", "\\x91\\xa9b", "", "€"]
    assert whole["top_logprobs"][0] == {"z": -0.5, "a": -1.0}, "the drawn one is there, too"
    parts, streamed = TextLogprobs(), []
    for one in content["content"]:
        streamed += parts.of({"content": [one]})["text_offset"]
    assert streamed == whole["text_offset"]


def test_both_shapes_are_what_openais_client_reads() -> None:
    found = chat_logprobs([Likelihood(b"Hi", -0.25, ((b"Hi", -0.25), (b"Ho", -1.5)))])
    token, ended = Token("Hi", 1, None, found), outcome()
    chat, text = ChatShape("r", 1, "m"), TextShape("r", 1, "m")
    assert isinstance(ended, Outcome)
    chunk = ChatCompletionChunk.model_validate(chat.chunk(token, None, first=True)).choices[0].logprobs
    body = ChatCompletion.model_validate(chat.body([token], {}, ended)).choices[0].logprobs
    for logprobs in (chunk, body):
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].bytes == [72, 105]
        assert [one.logprob for one in logprobs.content[0].top_logprobs] == [-0.25, -1.5]
    raw = Completion.model_validate(text.body([token], {}, ended)).choices[0].logprobs
    assert raw is not None
    assert (raw.tokens, raw.token_logprobs, raw.top_logprobs) == (["Hi"], [-0.25], [{"Hi": -0.25, "Ho": -1.5}])
