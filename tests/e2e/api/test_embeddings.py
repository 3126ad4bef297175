"""`/v1/embeddings` on the device, with the real model and the unmodified openai client."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from disco_daemon.api.openai.embeddings import MAX_INPUTS, EmbeddingsRequest, OpenAIVectors
from disco_daemon.engine import wire
from disco_daemon.engine.llama.embedder import PIECE, EmbeddingContext, Embeddings
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.errors import RequestError
from disco_daemon.models.default import default_model_path
from disco_daemon.types import Embedding
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.upstream import Upstream

N_CTX = 256
CAT = "The cat sleeps on the sofa in the sun."
KITTEN = "A kitten is napping on the couch in the sunshine."
TAX = "Please file the quarterly tax report before Friday."
TAXES = "The tax forms for this quarter are due by Friday."
LONG = "The keeper of the lighthouse lit the lamp and wrote down the weather. " * 10

# --- the engine's part, in this process ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(
        wire.Load(model_path=str(default_model_path()), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0, n_cells=N_CTX),
        AbortFlag(),
    )


class Heard:
    """Embeddings on the real model, and what they said."""

    def __init__(self, llama: Llama, new_context: Any = None) -> None:
        self.said: list[Any] = []
        self.embeddings = Embeddings(
            new_context or llama.embedding_context,
            llama.vocabulary.raw_tokens,
            llama.n_ctx,
            llama.n_embd_out,
            self.said.append,
        )

    def add(self, request_id: str, *texts: str | tuple[int, ...]) -> None:
        self.embeddings.add(self.embeddings.tokenized(wire.Embed(id=request_id, inputs=texts)))

    def of(self, *texts: str | tuple[int, ...], room: int = PIECE) -> Any:
        self.said.clear()
        self.add("e1", *texts)
        while self.embeddings.step(lambda: room):
            pass
        return self.said[-1]


def test_a_vector_does_not_depend_on_the_pieces_of_its_text(llama: Llama) -> None:
    heard = Heard(llama)
    whole = heard.of(LONG)
    assert [m.n_past for m in heard.said[:-1]] == list(range(PIECE, whole.n_tokens, PIECE))
    in_pieces = heard.of(LONG, room=16)
    assert len(heard.said) == 9
    assert in_pieces.vectors == whole.vectors
    assert abs(float(np.linalg.norm(np.frombuffer(whole.vectors[0], "<f4"))) - 1) < 1e-6
    assert whole.busy_s > 0


def test_a_text_that_was_aborted_in_the_middle_is_the_same(llama: Llama) -> None:
    heard = Heard(llama)
    whole = heard.of(LONG)
    heard.add("e1", LONG)
    n_steps = 0
    while heard.embeddings.step(lambda: 64):
        n_steps += 1
        llama._abort.set() if n_steps in (1, 3, 4) else llama._abort.clear()
    assert n_steps == -(-whole.n_tokens // 64) + 3
    assert heard.said[-1].vectors == whole.vectors


def test_beside_answers_it_has_half_the_time(llama: Llama) -> None:
    now = 100.0

    def new_context(n_ctx: int) -> EmbeddingContext:
        context = llama.embedding_context(n_ctx)
        decode = context.decode

        def slow(*args: Any) -> Any:
            nonlocal now
            now += 1.0  # by this clock each piece takes a second
            return decode(*args)

        context.decode = slow  # type: ignore[method-assign,assignment]
        return context

    heard = Heard(llama, new_context)
    heard.embeddings.clock = lambda: now
    heard.add("e1", LONG)
    n_pieces = []
    for passed_s, beside in ((0, True), (0.9, True), (0.2, True), (0, True), (0, False), (1.0, True)):
        now += passed_s
        assert heard.embeddings.step(lambda: 16, beside=beside), "there is something to compute, though maybe not now"
        n_pieces.append(len(heard.said))
    assert n_pieces == [1, 1, 2, 2, 3, 4]


def test_a_text_that_nobody_waits_for_is_left(llama: Llama) -> None:
    heard = Heard(llama)
    other = heard.of(CAT)
    heard.said.clear()
    heard.add("gone", LONG)
    heard.add("next", CAT)
    assert heard.embeddings.step(lambda: 16)
    heard.embeddings.cancel("gone")
    heard.embeddings.cancel("unknown")
    while heard.embeddings.step(lambda: 16):
        pass
    gone, following = [m for m in heard.said if isinstance(m, wire.Embedded)]
    assert (gone.id, gone.vectors, gone.n_tokens, following.id) == ("gone", (), 16, "next")
    assert gone.busy_s > 0, "what was computed of it is booked"
    assert heard.said[-1].vectors == other.vectors


def test_the_context_grows_with_the_texts(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_daemon.engine.llama.embedder.LEAST_CELLS", 64)
    made: list[int] = []

    def new_context(n_ctx: int) -> EmbeddingContext:
        made.append(n_ctx)
        return llama.embedding_context(n_ctx)

    heard = Heard(llama, new_context)
    short = heard.of(CAT)
    assert heard.of((1,) * 80).n_tokens == 80
    assert heard.of(CAT).vectors == short.vectors
    assert made == [64, 128]


def test_without_memory_there_is_an_error_and_the_engine_goes_on(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(llama)
    monkeypatch.setattr("disco_daemon.engine.llama.embedder.available_bytes", lambda: 2**20)
    failed = heard.of(CAT)
    assert (failed.reason, failed.your_fault) == ("no_embeddings", False)
    assert "GiB of memory, and 0.00 GiB are free" in failed.message
    monkeypatch.undo()
    assert heard.of(CAT).n_tokens > 5


def test_what_llama_cpp_cannot_compute_fails_alone(llama: Llama) -> None:
    """The fault is injected: a decode that returns -1, once."""
    heard = Heard(llama)
    good = heard.of(CAT)
    context = heard.embeddings._context
    assert context is not None
    decode = context.decode
    context.decode = lambda *_: (-1, [])  # type: ignore[method-assign]
    assert "llama_decode returned -1" in heard.of(CAT).message
    context.decode = decode  # type: ignore[method-assign]
    assert heard.of(CAT).vectors == good.vectors


def test_the_last_token_or_the_first_may_stand_for_all(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3-Embedding pools, and BERT."""
    vectors = {}
    for how in ("mean", "last", "cls"):
        monkeypatch.setattr("disco_daemon.engine.llama.embedder.pooling_of", lambda *_: how)  # noqa: B023
        heard = Heard(llama)
        vectors[how] = heard.of(LONG).vectors
        assert heard.of(LONG, room=50).vectors == vectors[how]
        short = heard.of(LONG[:12]).vectors
        assert (short == vectors[how]) == (how == "cls")  # it knows nothing of what comes behind it
    assert len(set(vectors.values())) == 3


def test_what_would_not_fit_into_a_response_is_refused_with_the_first_vector() -> None:
    vector = Embedding((struct.pack("<4096f", *([0.0123456789] * 4096)),), 7)
    numbers, text = EmbeddingsRequest(model="m", input=""), EmbeddingsRequest(model="m", input="")
    text.encoding_format = "base64"
    with pytest.raises(RequestError, match="'encoding_format': 'base64'") as refused:
        OpenAIVectors(numbers, MAX_INPUTS).add(vector)
    assert (refused.value.status, refused.value.code) == (400, "response_too_large")
    collected = OpenAIVectors(text, MAX_INPUTS)
    for _ in range(3):
        collected.add(vector)
    told = json.loads(collected.body())
    assert [one["index"] for one in told["data"]] == [0, 1, 2]
    assert told["usage"]["prompt_tokens"] == 21


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    settings = {"device": {"n_ctx": N_CTX, "watts": 10.0, "usd_per_kwh": 1.0}}
    async with running(tmp_path_factory.mktemp("d"), settings=settings) as daemon:
        await daemon.device_ready()
        yield daemon


async def embed(device: DaemonProcess, given: Any, **more: Any) -> list[list[float]]:
    found = await device.client.embeddings.create(model="disco", input=given, **more)
    assert [e.index for e in found.data] == list(range(len(found.data)))
    return [e.embedding for e in found.data]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.asyncio(loop_scope="module")
async def test_texts_that_mean_the_like_are_near_each_other(device: DaemonProcess) -> None:
    cat, kitten, tax, taxes = await embed(device, [CAT, KITTEN, TAX, TAXES])
    assert min(cosine(cat, kitten), cosine(tax, taxes)) > max(cosine(cat, tax), cosine(kitten, taxes))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_among_others_is_what_it_is_alone(device: DaemonProcess) -> None:
    texts = [CAT, TAX, LONG]
    together = await embed(device, texts)
    alone = [(await embed(device, text))[0] for text in texts]
    assert np.abs(np.array(together) - np.array(alone)).max() < 1e-5


@pytest.mark.asyncio(loop_scope="module")
async def test_both_encodings_say_the_same(device: DaemonProcess) -> None:
    (as_numbers,) = await embed(device, CAT, encoding_format="float")
    (as_text,) = await embed(device, CAT, encoding_format="base64")
    raw = base64.b64decode(str(as_text))
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == as_numbers
    assert await embed(device, CAT) == [as_numbers]
    assert abs(sum(x * x for x in as_numbers) - 1) < 1e-5


@pytest.mark.asyncio(loop_scope="module")
async def test_fewer_dimensions_are_the_first_ones_made_long_again(device: DaemonProcess) -> None:
    (whole,) = await embed(device, CAT)
    (part,) = await embed(device, CAT, dimensions=64)
    assert len(part) == 64
    assert cosine(part, whole[:64]) == pytest.approx(1)
    assert sum(x * x for x in part) == pytest.approx(1, abs=1e-5)
    assert await embed(device, CAT, dimensions=len(whole)) == [whole]


@pytest.mark.asyncio(loop_scope="module")
async def test_token_ids_are_taken_as_they_are(device: DaemonProcess, llama: Llama) -> None:
    ids = llama.vocabulary.raw_tokens(CAT)
    assert await embed(device, [ids, ids]) == await embed(device, ids) * 2 == await embed(device, CAT) * 2


async def booked(device: DaemonProcess, request_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:  # the other process writes when it comes to it
            for row in await device.history():
                if row["request_id"] == request_id:
                    return row
            await asyncio.sleep(0.01)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_are_counted_and_booked(device: DaemonProcess, llama: Llama) -> None:
    n_learned = (await device.state())["learned"]["prompts"]["n"]
    response = await device.client.embeddings.with_raw_response.create(model="disco/device", input=[CAT, TAX])
    found = response.parse()
    n_tokens = len(llama.vocabulary.raw_tokens(CAT)) + len(llama.vocabulary.raw_tokens(TAX))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (n_tokens, n_tokens)
    assert found.model == "disco/device"
    row = await booked(device, response.headers["X-Disco-Request-Id"])
    assert (row["policy"], row["winner"], row["finish_reason"]) == ("embedding", "device", "embedding")
    assert (row["prompt_tokens"], row["device_tokens"], row["error"]) == (n_tokens, 0, None)
    assert row["energy_j"] > 0
    assert (await device.state())["learned"]["prompts"]["n"] == n_learned, "what was embedded is no chat"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("more", "status", "param", "said"),
    [
        ({"input": ""}, 400, "input", "empty string"),
        ({"input": [CAT, ""]}, 400, "input", "empty string"),
        ({"input": []}, 400, "input", "not an empty one"),
        ({"input": [[]]}, 400, "input", "of at least 1 entries"),
        ({"input": None}, 400, "input", "expected text"),
        ({}, 400, "input", "missing"),
        ({"input": [CAT, 3]}, 400, "input", "must be a text, not a whole number"),
        ({"input": [1, -1]}, 400, "input", "of at least 0"),
        ({"input": [1, True]}, 400, "input", "must be a whole number, not true or false"),
        ({"input": [2**31 - 1]}, 400, None, "vocabulary"),
        ({"input": [CAT] * 2049}, 400, "input", "2048"),
        ({"input": "word " * (N_CTX + 1)}, 400, None, f"maximum context length is {N_CTX} tokens"),
        ({"input": CAT, "encoding_format": "hex"}, 400, "encoding_format", "hex"),
        ({"input": CAT, "dimensions": 0}, 400, "dimensions", "of at least 1"),
        ({"input": CAT, "dimensions": 100_000}, 400, "dimensions", "576 dimensions"),
        ({"input": CAT, "model": "nope"}, 404, "model", "does not exist"),
        ({"input": CAT, "disco": {"route": "server"}}, 400, "disco", "by the device only"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    more: dict[str, Any], status: int, param: str | None, said: str, device: DaemonProcess
) -> None:
    async with device.session.post(f"{device.url}/embeddings", json={"model": "disco"} | more) as response:
        assert response.status == status, await response.text()
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_is_the_same_with_embeddings_beside_it(device: DaemonProcess) -> None:
    alone = await ask(device, "Tell me about the sea.", max_tokens=80)
    vectors = await embed(device, [CAT, LONG])
    begun = asyncio.Event()
    asked = asyncio.create_task(
        ask(device, "Tell me about the sea.", max_tokens=80, on_piece=lambda _: begun.set())
    )  # fmt: skip
    await begun.wait()
    beside = await embed(device, CAT)
    assert not asked.done(), "the answer was over before"
    beside += await embed(device, LONG)
    assert (await asked).text == alone.text
    assert np.abs(np.array(beside) - np.array(vectors)).max() < 1e-5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_takes_its_texts_along(device: DaemonProcess) -> None:
    cancelled = sum(row["finish_reason"] == "cancelled" for row in await device.history())
    task = asyncio.create_task(embed(device, [f"{i} {LONG}" for i in range(200)]))
    await device.until(lambda s: s["endpoints"]["device"]["in_flight"] > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await device.until(lambda s: s["endpoints"]["device"]["in_flight"] == 0)
    async with asyncio.timeout(60):
        while len(rows := [r for r in await device.history() if r["finish_reason"] == "cancelled"]) == cancelled:
            await asyncio.sleep(0.01)
    assert rows[0]["prompt_tokens"] < 100 * 140


async def test_only_the_device_embeds(tmp_path: Any) -> None:
    async with Upstream() as upstream:
        async with running(tmp_path, server=upstream.url, device=False) as daemon:
            for model in ("disco", "disco/server"):
                with pytest.raises(openai.BadRequestError):
                    await daemon.client.embeddings.create(model=model, input=CAT)
        assert not upstream.exchanges
