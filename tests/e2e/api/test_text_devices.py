"""A device whose model makes vectors of texts, or rates them: over HTTP, with a tiny BERT."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.tiny_bert import CONTEXT, MEAN, RANK, TinyBert, tiny_bert
from tests.fixtures.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXTS = ["a cat sleeps", "taxes are due", "the sea"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nomic(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[DaemonProcess, TinyBert, Upstream]]:
    """A daemon beside a server, with a model that has the name of one with prefixes and Matryoshka."""
    folder = tmp_path_factory.mktemp("n")
    bert = tiny_bert(folder / "m.gguf", MEAN, name="nomic-embed-text-v1.5")
    async with (
        Upstream(tokens=3) as server,
        running(folder, server=server.url, model=bert.path) as daemon,
    ):
        await daemon.device_ready()
        yield daemon, bert, server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[DaemonProcess, TinyBert]]:
    """A true start: what such an engine imports, and may do once it is confined, is not that of a fork's parent."""
    folder = tmp_path_factory.mktemp("r")
    bert = tiny_bert(folder / "m.gguf", RANK)
    async with running(folder, model=bert.path, truly=True) as daemon:
        await daemon.device_ready()
        yield daemon, bert


async def posted(daemon: DaemonProcess, path: str, **body: Any) -> tuple[int, Any]:
    async with daemon.session.post(f"{daemon.root}{path}", json={"model": "disco"} | body) as response:
        return response.status, await response.json()


def alike(found: Any, expected: Any) -> bool:
    return float(np.dot(found, expected) / np.linalg.norm(found) / np.linalg.norm(expected)) > 0.9999


async def test_vectors_are_the_models_own_in_every_api(nomic: tuple[DaemonProcess, TinyBert, Upstream]) -> None:
    daemon, bert, server = nomic
    expected = [bert.vector(bert.tokens(text)) for text in TEXTS]
    found = await daemon.client.embeddings.create(model="disco", input=TEXTS)
    assert all(alike(one.embedding, right) for one, right in zip(found.data, expected, strict=True))
    assert found.usage.prompt_tokens == sum(len(bert.tokens(text)) for text in TEXTS)
    _, told = await posted(daemon, "/api/embed", input=TEXTS)
    assert told["embeddings"] == pytest.approx(np.array([one.embedding for one in found.data]), abs=1e-5)
    _, coded = await posted(daemon, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    raw = np.frombuffer(base64.b64decode(coded["data"][1]["embedding"]), "<f4")
    assert raw == pytest.approx(found.data[1].embedding, abs=1e-5)
    ids = [bert.tokens(text) for text in TEXTS]
    by_ids = await daemon.client.embeddings.create(model="disco/device", input=ids)
    assert all(alike(one.embedding, right) for one, right in zip(by_ids.data, expected, strict=True))
    assert server.n_requests == 0


@pytest.mark.parametrize(
    ("field", "value", "prefix"),
    [
        ("input_type", "query", "search_query: "), ("input_type", "search_document", "search_document: "),
        ("input_type", "passage", "search_document: "), ("task", "retrieval.query", "search_query: "),
        ("task", "retrieval.passage", "search_document: "), ("input_type", "clustering", "clustering: "),
    ],
)  # fmt: skip
async def test_a_texts_purpose_puts_the_familys_prefix_in_front(
    field: str, value: str, prefix: str, nomic: tuple[DaemonProcess, TinyBert, Upstream]
) -> None:
    daemon, _, _ = nomic
    _, told = await posted(daemon, "/v1/embeddings", input="the sea", **{field: value})
    _, spelled = await posted(daemon, "/v1/embeddings", input=f"{prefix}the sea")
    _, plain = await posted(daemon, "/v1/embeddings", input="the sea")
    vectors = [answer["data"][0]["embedding"] for answer in (told, spelled, plain)]
    assert vectors[0] == vectors[1]
    assert not alike(vectors[0], vectors[2])
    assert told["usage"] == spelled["usage"]


async def test_what_cannot_be_honoured_is_refused(nomic: tuple[DaemonProcess, TinyBert, Upstream]) -> None:
    daemon, _, _ = nomic
    for more, param, said in (
        ({"dimensions": 32}, "dimensions", "64 dimensions and more"),
        ({"dimensions": 65}, "dimensions", "have 64 dimensions"),
        ({"input_type": "poem"}, "input_type", "search_query"),
        ({"task": "poem"}, "task", "retrieval.query"),
        ({"input": "a" * CONTEXT}, None, f"maximum context length is {CONTEXT} tokens"),
    ):
        status, told = await posted(daemon, "/v1/embeddings", **{"input": "a"} | more)
        assert (status, told["error"]["param"]) == (400, param), told
        assert said in told["error"]["message"]
    status, told = await posted(daemon, "/v1/rerank", query="a", documents=["b"])
    assert status == 400
    assert "rates no texts" in told["error"]["message"]


async def test_a_chat_goes_to_the_server_and_without_one_the_error_says_what_to_do(
    nomic: tuple[DaemonProcess, TinyBert, Upstream], ranker: tuple[DaemonProcess, TinyBert]
) -> None:
    daemon, _, server = nomic
    before = server.n_requests
    assert (await ask(daemon, "Hello?")).text
    assert server.n_requests == before + 1
    with pytest.raises(openai.BadRequestError, match=r"makes vectors of texts .*`disco models use` another model"):
        await ask(daemon, "Hello?", model="disco/device")
    with pytest.raises(openai.BadRequestError, match=r"rates texts .*add a server by `disco setup`"):
        await ask(ranker[0], "Hello?")


async def test_models_say_what_they_can_do(
    nomic: tuple[DaemonProcess, TinyBert, Upstream], ranker: tuple[DaemonProcess, TinyBert]
) -> None:
    able = {}
    for name, (daemon, *_) in (("nomic", nomic), ("ranker", ranker)):
        async with daemon.session.get(f"{daemon.url}/models/disco/device") as response:
            card = await response.json()
        able[name] = {kind: card["capabilities"][kind] for kind in ("chat", "embeddings", "rerank")}
        assert card["context_length"] == CONTEXT
    assert able == {
        "nomic": {"chat": False, "embeddings": True, "rerank": False},
        "ranker": {"chat": False, "embeddings": False, "rerank": True},
    }
    _, shown = await posted(nomic[0], "/api/show", model="disco/device")
    assert shown["capabilities"] == ["embedding"]
    async with nomic[0].session.get(f"{nomic[0].url}/models") as response:
        assert "disco/device" not in [one["slug"] for one in (await response.json())["models"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_the_best_first(path: str, ranker: tuple[DaemonProcess, TinyBert]) -> None:
    daemon, bert = ranker
    documents: list[Any] = ["a cat sleeps", {"text": "taxes are due"}, "the sea", "a", "due"]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    raw = [float(bert.vector(bert.pair("what is due", text))[0]) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: -raw[i])
    status, told = await posted(daemon, path, query="what is due", documents=documents)
    assert status == 200, told
    assert [one["index"] for one in told["results"]] == order
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx(
        [1 / (1 + np.exp(-raw[i])) for i in order], abs=0.01
    )
    n_tokens = sum(len(bert.pair("what is due", text)) for text in texts)
    assert told["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    _, best = await posted(
        daemon, path, query="what is due", documents=documents, top_n=2, return_documents=True, raw_scores=True
    )
    assert [one["document"]["text"] for one in best["results"]] == [texts[i] for i in order[:2]]
    assert best["results"][0]["relevance_score"] == pytest.approx(raw[order[0]], abs=0.02)


async def test_an_engine_that_rates_texts_is_confined_and_does_not_end(
    ranker: tuple[DaemonProcess, TinyBert],
) -> None:
    state = (await ranker[0].state())["endpoints"]["device"]
    assert state["restarts"] == state["crashes"] == 0
    assert "no core dumps" in state["confined"]


async def test_what_cannot_be_rated_is_refused(ranker: tuple[DaemonProcess, TinyBert]) -> None:
    daemon, _ = ranker
    for more, param in (
        ({"documents": []}, "documents"), ({"documents": [{"title": "b"}]}, "documents"), ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"), ({"documents": ["a" * CONTEXT]}, None),
    ):  # fmt: skip
        status, told = await posted(daemon, "/v1/rerank", **{"query": "a", "documents": ["b"]} | more)
        assert (status, told["error"]["param"]) == (400, param), told
    status, told = await posted(daemon, "/v1/embeddings", input="a")
    assert status == 400
    assert "/v1/rerank" in told["error"]["message"]
