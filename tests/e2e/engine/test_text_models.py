"""Models that make vectors of texts, or rate them: tiny ones, held against the same maths in numpy."""

from __future__ import annotations

import random
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from disco_daemon.engine import wire
from disco_daemon.engine.framing import FRAMES
from disco_daemon.engine.llama.embedder import (
    LEAST_CELLS,
    MAX_PACKED,
    PIECE,
    EmbeddingContext,
    EmbeddingError,
    Embeddings,
    Passage,
)
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.refusals import ModelError, PromptError, PromptTooLong
from disco_daemon.engine.llama.rows import ABORTED
from disco_daemon.engine.llama.text_model import TextModel, load_either
from disco_daemon.engine.worker import Worker
from disco_daemon.system.confine import Confinement
from tests.fixtures.gguf import with_keys
from tests.fixtures.tiny_bert import CLS, CONTEXT, LAST, MEAN, RANK, TinyBert, tiny_bert
from tests.fixtures.weights import random_bytes_speaker

LONG_S = 10.0
ALIKE = 0.9999  # cosine; llama.cpp keeps keys and values as F16 where it uses flash attention


def load_of(path: Path, n_ctx: int = 0, *, flash_attn: bool | None = None) -> wire.Load:
    return wire.Load(model_path=str(path), n_ctx=n_ctx, n_threads=1, flash_attn=flash_attn)


def loaded(path: Path, n_ctx: int = 0, *, flash_attn: bool | None = None) -> TextModel:
    found = load_either(load_of(path, n_ctx, flash_attn=flash_attn), AbortFlag(), warm=False)
    assert isinstance(found, TextModel)
    return found


class Texts:
    """The queue of such a model, what it said, and what llama.cpp got at a time."""

    def __init__(self, model: TextModel) -> None:
        self.said: list[Any] = []
        self.packs: list[list[int]] = []
        self.contexts: list[int] = []
        pair = model.pair if model.pooling == "rank" else None
        read = model.vocabulary.raw_tokens
        self.queue = Embeddings(self._context, read, model.n_ctx, model.n_embd_out, self.said.append, pair=pair)
        self._model = model

    def _context(self, n_ctx: int) -> EmbeddingContext:
        self.contexts.append(n_ctx)
        context = self._model.context(n_ctx)
        decode = context.decode

        def noted(pieces: Any) -> Any:
            self.packs.append([piece.end - piece.start for piece in pieces])
            return decode(pieces)

        context.decode = noted  # type: ignore[method-assign]
        return context

    def of(self, *texts: Any, **more: Any) -> list[np.ndarray[Any, Any]]:
        self.queue.add(self.queue.tokenized(wire.Embed(id="e", inputs=texts, **more)))
        while self.queue.step(lambda: LEAST_CELLS):
            pass
        return [np.frombuffer(vector, "<f4") for vector in self.said[-1].vectors]


def some_texts(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(200)]
    return [" ".join(rng.choices(words, k=rng.choice([1, 2, 5, 12]))) for _ in range(n)]


def cosine(a: Any, b: Any) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("pooling", [MEAN, CLS, LAST])
def test_vectors_are_those_of_the_same_maths_alone_and_packed(pooling: int, tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "m.gguf", pooling)
    model, texts = loaded(bert.path), some_texts(40)
    found = Texts(model)
    expected = [bert.vector(bert.tokens(text)) for text in texts]
    together = found.of(*texts)
    n_tokens = [len(bert.tokens(text)) for text in texts]
    assert found.said[-1].n_tokens == sum(n_tokens)
    assert sum(map(len, found.packs)) == len(texts)
    assert len(found.packs) <= 2 * -(-sum(n_tokens) // PIECE), "short texts are computed together"
    assert PIECE < max(map(sum, found.packs)) <= LEAST_CELLS, "as many as a text that is read whole may have"
    alone = [found.of(text)[0] for text in texts]
    for mine, packed, right in zip(alone, together, expected, strict=True):
        assert min(cosine(mine, right), cosine(packed, right)) > ALIKE
        assert abs(float(np.linalg.norm(packed)) - 1) < 1e-6
    wrong = [cosine(a, b) for a, b in zip(together, expected[1:], strict=False)]
    assert min(wrong) < 0.95, "or the texts would be too much alike to tell anything"


def test_a_pair_is_rated_as_its_head_does_and_the_same_from_0_to_1(tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "m.gguf", RANK)
    model, (query, *documents) = loaded(bert.path), some_texts(30, seed=2)
    found = Texts(model).of(*documents, query=query)
    expected = [float(bert.vector(bert.pair(query, document))[0]) for document in documents]
    assert [float(one[0]) for one in found] == pytest.approx(expected, abs=0.02)
    assert [float(one[1]) for one in found] == pytest.approx([1 / (1 + np.exp(-x)) for x in expected], abs=0.01)
    assert max(expected) - min(expected) > 0.5
    order = sorted(range(len(documents)), key=lambda i: -found[i][0])
    assert order[:3] == sorted(range(len(documents)), key=lambda i: -expected[i])[:3]


@pytest.mark.parametrize(
    ("pooling", "asked", "said"),
    [
        (MEAN, {"query": "a"}, "rates no texts"),
        (RANK, {}, "it rates texts"),
        (MEAN, {"dimensions": 65}, "have 64 dimensions"),
        (MEAN, {"dimensions": 65, "least_dimensions": 16}, "have 64 dimensions"),
        (MEAN, {"dimensions": 63}, "leave out 'dimensions', or ask for 64"),
        (MEAN, {"dimensions": 15, "least_dimensions": 16}, "of 16 dimensions and more"),
        (MEAN, {"inputs": ("a" * CONTEXT,)}, f"length is {CONTEXT} tokens, but the input has {CONTEXT + 2}"),
        (RANK, {"query": "a", "inputs": ("a" * CONTEXT,)}, "query with its document has"),
        (RANK, {"query": "a", "inputs": ((4, 5),)}, "not token ids"),
        (MEAN, {"inputs": ((10_000,),)}, "vocabulary"),
    ],
)
def test_what_a_model_cannot_do_is_refused(pooling: int, asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    queue = Texts(loaded(tiny_bert(tmp_path / "m.gguf", pooling).path)).queue
    with pytest.raises(PromptError, match=said):
        queue.tokenized(wire.Embed(**{"id": "e", "inputs": ("a",)} | asked))


def test_a_text_as_long_as_the_context_is_read_whole_and_short_ones_behind_it(tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "m.gguf")
    model = loaded(bert.path)
    long = (("abcdefgh " * 100)[: 9 * 28]).strip()
    texts = ["a b", long, *some_texts(3)]
    n = len(bert.tokens(long))
    assert PIECE < n <= CONTEXT == model.n_ctx
    found = Texts(model)
    vectors = found.of(*texts)
    assert [n in pack for pack in found.packs].count(True) == 1
    for vector, text in zip(vectors, texts, strict=True):
        assert cosine(vector, bert.vector(bert.tokens(text))) > ALIKE


def test_no_more_texts_are_packed_than_there_are_sequences(tmp_path: Path) -> None:
    found = Texts(loaded(tiny_bert(tmp_path / "m.gguf").path))
    assert len(found.of(*[(4,)] * 200)) == 200
    assert max(map(len, found.packs)) == MAX_PACKED


def test_fewer_dimensions_are_the_first_ones_at_length_1_and_centred_where_the_model_wants_it(tmp_path: Path) -> None:
    found = Texts(loaded(tiny_bert(tmp_path / "m.gguf").path))
    (whole,), (cut,) = found.of("a cat"), found.of("a cat", dimensions=16, least_dimensions=16)
    assert cut == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-6)
    (centred,) = found.of("a cat", dimensions=16, least_dimensions=8, centred=True)
    expected = (whole - whole.mean())[:16]
    assert centred == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)
    for least in (None, 16, 100):
        (same,) = found.of("a cat", dimensions=64, least_dimensions=least, centred=True)
        assert same == pytest.approx(whole, abs=1e-6), "nothing is cut"


def test_texts_of_several_requests_are_packed_and_one_that_is_cancelled_leaves_the_others(tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "m.gguf")
    found = Texts(loaded(bert.path))
    for name in "abc":
        found.queue.add(found.queue.tokenized(wire.Embed(id=name, inputs=(f"{name} one", f"{name} two"))))
    found.queue.cancel("b")
    while found.queue.step(lambda: PIECE):
        pass
    assert found.packs == [[6, 6, 6, 6]]
    said = [(message.id, len(message.vectors), message.n_tokens) for message in found.said]
    assert said == [("b", 0, 0), ("a", 2, 12), ("c", 2, 12)], "nothing was computed of what was cancelled"
    last = np.frombuffer(found.said[2].vectors[1], "<f4")
    assert cosine(last, bert.vector(bert.tokens("c two"))) > ALIKE


def test_a_pack_that_llama_cpp_cannot_compute_fails_for_the_text_that_is_the_cause_alone(tmp_path: Path) -> None:
    """The fault is injected: a decode with a certain text in it returns -1."""
    bert = tiny_bert(tmp_path / "m.gguf")
    found = Texts(loaded(bert.path))
    bad, make = bert.tokens("bad"), found.queue.new_context

    def failing(n_ctx: int) -> EmbeddingContext:
        context = make(n_ctx)
        decode = context.decode

        def decoded(pieces: Sequence[Passage]) -> Any:
            return (-1, []) if bad in [piece.tokens for piece in pieces] else decode(pieces)

        context.decode = decoded  # type: ignore[method-assign]
        return context

    found.queue.new_context = failing
    for name, text in (("a", "one"), ("b", "bad"), ("c", "two")):
        found.queue.add(found.queue.tokenized(wire.Embed(id=name, inputs=(f"{name} first", text))))
    while found.queue.step(lambda: PIECE):
        pass
    ended = {message.id: message for message in found.said if not isinstance(message, wire.PrefillProgress)}
    assert (ended["b"].reason, "returned -1" in ended["b"].message) == ("no_embeddings", True)
    for name, text in (("a", "one"), ("c", "two")):
        right = [bert.vector(bert.tokens(one)) for one in (f"{name} first", text)]
        mine = [np.frombuffer(vector, "<f4") for vector in ended[name].vectors]
        assert min(cosine(a, b) for a, b in zip(mine, right, strict=True)) > ALIKE
    found.packs.clear()
    assert len(found.of("a", "b", "c")) == 3
    assert found.packs == [[3, 3, 3]], "and after that texts are computed together again"


def test_a_text_whose_decode_is_broken_off_is_dropped_or_computed_anew(tmp_path: Path) -> None:
    bert = tiny_bert(tmp_path / "m.gguf")
    model = loaded(bert.path)
    found = Texts(model)
    for name in "ab":
        found.queue.add(found.queue.tokenized(wire.Embed(id=name, inputs=(f"{name} cat",))))
    model._abort.set()
    assert found.queue.step(lambda: PIECE)
    assert not found.said
    model._abort.clear()
    found.queue.cancel("a")
    while found.queue.step(lambda: PIECE):
        pass
    dropped, told = found.said
    assert (dropped.id, dropped.vectors, dropped.n_tokens) == ("a", (), 0)
    assert told.id == "b"
    assert cosine(np.frombuffer(told.vectors[0], "<f4"), bert.vector(bert.tokens("b cat"))) > ALIKE


def test_an_engine_ends_the_decode_of_a_text_that_is_cancelled_and_goes_on_with_the_next(tmp_path: Path) -> None:
    """The fault is injected: the first decode takes until its text is cancelled."""
    bert = tiny_bert(tmp_path / "m.gguf")
    ours, theirs = socket.socketpair()
    ours.settimeout(LONG_S)
    begun, cancelled, ended = threading.Event(), threading.Event(), list[int]()
    with ours, theirs, ours.makefile("rb") as stream:
        worker = Worker(theirs)
        model = load_either(load_of(bert.path), worker._abort, warm=False)
        assert isinstance(model, TextModel)
        make = model.context

        def slow(n_ctx: int) -> EmbeddingContext:
            context = make(n_ctx)
            decode = context.decode

            def decoded(pieces: Sequence[Passage]) -> Any:
                begun.set()
                assert cancelled.wait(LONG_S)
                rc, vectors = decode(pieces)
                ended.append(rc)
                return rc, vectors

            context.decode = decoded  # type: ignore[method-assign]
            return context

        model.context = slow  # type: ignore[method-assign]

        def serve() -> None:
            with suppress(SystemExit):
                worker._serve_texts(load_of(bert.path), model, Confinement())

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            said = (wire.decode_from_engine(frame[0]) for frame in iter(lambda: FRAMES.read(stream), None) if frame)
            assert isinstance(next(said), wire.Loaded)
            assert worker._intake is not None
            worker._intake.put(wire.Embed(id="a", inputs=("a long one",)))
            assert begun.wait(LONG_S)
            worker._intake.cancel("a")
            cancelled.set()
            worker._intake.put(wire.Embed(id="b", inputs=("a cat",)))
            ends = (message for message in said if not isinstance(message, wire.Alive))
            dropped, told = next(ends), next(ends)
            assert isinstance(dropped, wire.Embedded)
            assert (dropped.id, dropped.vectors) == ("a", ())
            assert isinstance(told, wire.Embedded)
            assert told.id == "b"
            assert cosine(np.frombuffer(told.vectors[0], "<f4"), bert.vector(bert.tokens("a cat"))) > ALIKE
            assert ended == [ABORTED, 0]
        finally:
            worker._commands.put(sys.exit)  # the thread, which has no other end than the process's
            serving.join(LONG_S)
        assert not serving.is_alive()


@pytest.mark.parametrize("how", ["last", "cls", "mean"])
def test_a_decoder_that_pools_makes_the_vectors_that_it_makes_as_a_chat_model(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3-Embedding: causal, with a KV cache; long texts come in pieces."""
    chat = random_bytes_speaker(tmp_path / "chat.gguf", 512)
    pooled = with_keys(chat, tmp_path / "m.gguf", llama__pooling_type={"mean": MEAN, "cls": CLS, "last": LAST}[how])
    texts = ["a cat", "the lamp " * 40, "b", "the tax of the year", "a " * 70]
    model = loaded(pooled)
    assert (model.pooling, model.reads_whole, model.n_ctx) == (how, False, 512)
    found = Texts(model)
    vectors = found.of(*texts)
    monkeypatch.setattr("disco_daemon.engine.llama.embedder.pooling_of", lambda *_: how)
    llama = Llama(wire.Load(model_path=str(chat), n_ctx=512, n_threads=1, n_cells=512), AbortFlag(), warm=False)
    said: list[Any] = []
    alone = Embeddings(llama.embedding_context, llama.vocabulary.raw_tokens, 512, llama.n_embd_out, said.append)
    for text, vector in zip(texts, vectors, strict=True):
        alone.add(alone.tokenized(wire.Embed(id="e", inputs=(text,))))
        while alone.step(lambda: PIECE):
            pass
        assert cosine(np.frombuffer(said[-1].vectors[0], "<f4"), vector) > ALIKE
    assert any(len(pack) > 1 for pack in found.packs)
    assert max(map(sum, found.packs)) <= PIECE
    llama.close()


def test_a_template_for_pairs_is_filled_and_a_document_opens_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3-Reranker, whose template asks a chat model for a yes."""
    chat = random_bytes_speaker(tmp_path / "chat.gguf", 512)
    model = loaded(with_keys(chat, tmp_path / "m.gguf", llama__pooling_type=LAST))
    monkeypatch.setattr(llama_cpp, "llama_model_chat_template", lambda *_: b"Q {query}\nD {document}</s>")
    plain = model.pair("ab", "cd {query}")
    assert plain == model.vocabulary.tokenize("Q ab\nD cd {query}</s>", parse_special=True)
    end = plain[-1]
    assert plain.count(end) == 1
    spelled = model.pair("ab", "c</s>d")
    assert (spelled[-1], spelled.count(end)) == (end, 1), "the template's own"


@pytest.mark.parametrize("template", [None, b"Q {query}\nD {document}"])
@pytest.mark.parametrize("long", ["query", "document"])
def test_a_pair_that_cannot_fit_is_refused_unread_and_others_give_a_sign_of_life(
    long: str, template: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of letters would keep the only thread that reads texts silent, until the engine is taken for dead."""
    model = loaded(tiny_bert(tmp_path / "m.gguf", RANK).path)
    beats: list[int] = []
    read: list[int] = []
    vocabulary = model.vocabulary
    tokenize = vocabulary.tokenize
    monkeypatch.setattr(llama_cpp, "llama_model_chat_template", lambda *_: template)

    def noted(text: str, **how: bool) -> list[int]:
        read.append(len(text))
        return tokenize(text, **how)

    monkeypatch.setattr(vocabulary, "tokenize", noted)
    vocabulary.beat = lambda: beats.append(1)
    model.pair("a", "b")
    assert beats
    read.clear()
    for text in ("a" * 1_000_000, "a cat " * 200_000):
        pair = {"query": "a", "document": "b"} | {long: text}
        with pytest.raises(PromptTooLong):
            model.pair(pair["query"], pair["document"])
    assert sum(read) < 20_000


def test_a_model_that_reads_texts_whole_is_not_taken_for_one_that_answers(tmp_path: Path) -> None:
    path = tiny_bert(tmp_path / "m.gguf").path
    with pytest.raises(ModelError, match="answers nothing"):
        Llama(load_of(path), AbortFlag())


def test_texts_are_as_long_as_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_bert(tmp_path / "m.gguf").path
    need = 4 * 40 * 64  # bytes a token, by WORK_PER_ROW
    size = llama_cpp.llama_model_size(loaded(path)._model)
    for module in ("text_model", "embedder"):
        monkeypatch.setattr(f"disco_daemon.engine.llama.{module}.available_bytes", lambda: size + int(150 * need / 0.9))
    assert loaded(path).n_ctx == CONTEXT // 2
    monkeypatch.setattr("disco_daemon.engine.llama.text_model.available_bytes", lambda: size + 100 * need)
    with pytest.raises(ModelError, match="texts of 128 tokens need"):
        loaded(path)


def test_a_context_is_no_longer_than_the_texts_that_memory_was_reckoned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disco_daemon.engine.llama.embedder.LEAST_CELLS", 64)
    bert = tiny_bert(tmp_path / "m.gguf")
    found = Texts(loaded(bert.path, 200))
    for size in (20, 150, 198):
        assert cosine(found.of("a" * size)[0], bert.vector(bert.tokens("a" * size))) > ALIKE
    assert found.contexts == [64, 200]


def test_without_flash_attention_the_scores_take_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert = tiny_bert(tmp_path / "m.gguf")
    size = llama_cpp.llama_model_size(loaded(bert.path)._model)
    need = 4 * 40 * 64 * CONTEXT  # bytes, by WORK_PER_ROW; the scores of 4 heads are as much as 2 fifths of it
    for module in ("text_model", "embedder"):
        monkeypatch.setattr(f"disco_daemon.engine.llama.{module}.available_bytes", lambda: size + int(1.2 * need / 0.9))
    assert loaded(bert.path).n_ctx == CONTEXT
    model = loaded(bert.path, flash_attn=False)
    assert model.n_ctx == CONTEXT // 2
    assert cosine(Texts(model).of("a cat")[0], bert.vector(bert.tokens("a cat"))) > ALIKE
    monkeypatch.setattr("disco_daemon.engine.llama.embedder.available_bytes", lambda: int(1.2 * need))
    with pytest.raises(EmbeddingError, match="embeddings of 256 tokens"):
        model.context(CONTEXT)


def test_the_reference_says_what_it_is(tmp_path: Path) -> None:
    bert: TinyBert = tiny_bert(tmp_path / "m.gguf")
    assert loaded(bert.path).vocabulary.raw_tokens("ab c") == bert.tokens("ab c")
